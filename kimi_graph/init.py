"""Random parameters that make every part of a model count.

With matrices of standard deviation 0.02, as in training code, small models add almost nothing to their residual stream
and a test cannot tell whether a layer ran. Here every projection keeps the scale of its input, decays forget over a
few to a few hundred tokens, and router biases are large enough to change some choices.
"""

import hashlib
import math
import re

import torch
from torch import Tensor

from .spec import ParamSpec


def init_tensor(spec: ParamSpec, path: str, seed: int = 0) -> Tensor:
    """A float32 value for one parameter.

    Args:
        path: the parameter's place in the tree (`layers.3.kda.query`); with `seed` it decides the value, so that the
            order in which parameters are made, and which of them, does not matter.
    """
    generator = torch.Generator().manual_seed(_seed(path, seed))
    name = spec.source[0]

    def normal() -> Tensor:
        return torch.randn(spec.shape, generator=generator)

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(spec.shape, generator=generator) * (high - low) + low

    if name.endswith("A_log") and spec.padding:  # a padded one belongs to the bounded gate: decay 5 sigmoid(rate ...)
        return uniform(0.5, 2).log()
    if name.endswith("A_log"):  # decay rates 1 to 16, as released code starts them
        return uniform(1, 16).log()
    if name.endswith("dt_bias"):  # softplus(dt_bias) is a step of 0.001 to 0.1
        step = uniform(math.log(1e-3), math.log(1e-1)).exp()
        return step + (-torch.expm1(-step)).log()
    if name.endswith("e_score_correction_bias"):  # scores have a standard deviation of about 0.2
        return 0.05 * normal()
    if re.search(r"norm\d?\.weight$", name):
        return 1 + 0.1 * normal()
    if name.endswith(".bias"):
        return 0.1 * normal()
    if name.endswith(("embed_tokens.weight", "pos_emb.weight")):
        return normal()
    return normal() / math.sqrt(math.prod(spec.stored[1:]))


def _seed(path: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {path}".encode()).digest()[:8], "little") >> 1  # 63 bits
