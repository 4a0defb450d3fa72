"""Gated feed-forward layer, SwiGLU or SiTU.

Axes: B sequences, T tokens, D embed, F ffn.
Source: SwiGLU (arXiv:2002.05202), section 2; for SiTU fact sheet of models, section 2.6. `source=`: released names.
"""

from typing import Generic

import torch.nn.functional as F
from torch import Tensor

from kimi_graph import ops
from kimi_graph.config import SituConfig
from kimi_graph.ops import contract
from kimi_graph.spec import ParamSpec, weight
from kimi_graph.tree import Leaf, param_tree


@param_tree
class Ffn(Generic[Leaf]):
    """Weights: `gate` and `up` `[F, D]`, `down` `[D, F]`."""

    gate: Leaf
    up: Leaf
    down: Leaf


def ffn_specs(ffn: int, embed: int) -> Ffn[ParamSpec]:
    """Specs of a layer of F = `ffn` channels between D = `embed`."""
    return Ffn(
        gate=weight((ffn, embed), "ffn embed", source="gate_proj.weight"),
        up=weight((ffn, embed), "ffn embed", source="up_proj.weight"),
        down=weight((embed, ffn), "embed ffn", source="down_proj.weight"),
    )


def ffn(p: Ffn[Tensor], x_BTD: Tensor, situ: SituConfig | None = None) -> Tensor:
    """`down(silu(gate x) * up x)` over the last dimension: `[B, T, D]` -> `[B, T, D]`.

    Args:
        situ: bounds of SiTU, which then stands in place of `silu(gate x) * up x` (`ops.situ_mul`).
    """
    gate_BTF = contract("btd,fd->btf", x_BTD, p.gate)
    up_BTF = contract("btd,fd->btf", x_BTD, p.up)
    if situ is None:
        h_BTF = F.silu(gate_BTF) * up_BTF
    else:
        h_BTF = ops.situ_mul(gate_BTF, up_BTF, situ.beta, situ.linear_beta)
    return contract("btf,df->btd", h_BTF, p.down)
