"""Rotary positions: neighbouring channels, or a half and the other half, turn by an angle that grows with position."""

import torch
from torch import Tensor

from .base import at_least_f32, operator


@operator(sharding="b t h r, b t c, b t c -> b t h r", whole="rc")
def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Pairs `(a, b)` of channels become `(a cos - b sin, b cos + a sin)`; computed in float32, given in x's dtype.

    Args:
        x: `[B, T, H, R]`. cos, sin: `[B, T, R / 2]`, of each token's position.
        interleaved: pair m is channels (2m, 2m + 1); else (m, m + R / 2). The result has the layout of `x`.
    """
    x32, cos, sin = at_least_f32(x), cos[:, :, None], sin[:, :, None]
    if interleaved:
        a, b = x32.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)
    a, b = x32.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


@rope.fake
def _(x, cos, sin, interleaved):
    return torch.empty_like(x)
