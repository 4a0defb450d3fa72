"""GELU, exact or by the tanh approximation: a released model means one of them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import operator


def _form(tanh: bool) -> str:
    return "tanh" if tanh else "none"


@operator(sharding="... d -> ... d")
def gelu(x: Tensor, tanh: bool) -> Tensor:
    """`x` times the normal distribution function of `x`; with `tanh` by its approximation. In x's dtype.

    Args:
        x: `[..., D]`.
    """
    return F.gelu(x, approximate=_form(tanh))


@gelu.fake
def _(x, tanh):
    return torch.empty_like(x)


@gelu.lowering
def _(ge, x, tanh):
    return ge.GeluV2(x, approximate=_form(tanh))  # torchair's converter of aten.gelu forgets which form is meant
