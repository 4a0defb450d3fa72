"""SiTU: a gated activation whose two factors are both bounded, `beta tanh(g / beta) sigmoid(g) * lb tanh(u / lb)`."""

import torch
from torch import Tensor

from .base import at_least_f32, by_rows, operator


def _situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    g, u = at_least_f32(gate), at_least_f32(up)
    y = beta * torch.tanh(g / beta) * torch.sigmoid(g) * (linear_beta * torch.tanh(u / linear_beta))
    return y.to(gate.dtype)


@operator(sharding="m f -> m g", whole="fg")
def situ(x: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU of the two halves of the last dimension, gate first: `[M, 2 F]` -> `[M, F]`; float32 inside.

    Source: fact sheet of models, section 2.6.
    """
    return by_rows(lambda x: _situ(*x.chunk(2, -1), beta, linear_beta), x)


@situ.fake
def _(x, beta, linear_beta):
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@operator(sharding="... f, ... f -> ... f")
def situ_mul(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU of a gate and a linear part of one shape: `[..., F]`; float32 inside."""
    return by_rows(lambda gate, up: _situ(gate, up, beta, linear_beta), gate, up)


@situ_mul.fake
def _(gate, up, beta, linear_beta):
    return torch.empty_like(gate)
