"""Rotary positions: neighbouring channels, or a half and the other half, turn by an angle that grows with position.

Source: RoFormer (arXiv:2104.09864), section 3.4.2; fact sheet of models, section 7.
"""

import torch
from torch import Tensor

from .base import at_least_f32, empty_like, operator


@operator(sharding="b t h r, b t c, b t c -> b t h r", whole="rc")
def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Pairs `(a, b)` of channels become `(a cos - b sin, b cos + a sin)`; computed in float32, given in x's dtype.

    Args:
        x: `[B, T, H, R]`.
        cos, sin: `[B, T, R / 2]`, of each token's position.
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
    return empty_like(x)


@rope.lowering
def _(ge, x, cos, sin, interleaved):
    # rows as one sequence: angles may then differ by row, in every release and on every chip
    rows, tokens, heads, width = ge.shape(x)
    flat, dtype = [1, rows * tokens, heads, width], ge.dtype(x)
    # one layout of caches on all chips: InterleaveRope moves the pairs apart, and 950 lacks it
    reason = "on every chip, pairs stay where they are" + (", unlike in InterleaveRope" if interleaved else "")
    ge.chose("rotation", "RotaryPositionEmbedding", f"{reason}; angles rounded to the dtype of what is turned")
    angles = (_of_channels(ge, ge.cast(a, dtype), interleaved) for a in (cos, sin))
    y = ge.RotaryPositionEmbedding(ge.reshape(x, flat), *angles, mode=int(interleaved))
    return ge.reshape(ge.mark(y, flat, dtype), ge.shape(x))


def _of_channels(ge, angles, interleaved):
    """cos or sin of pairs `[B, T, R / 2]` as those of channels: `[1, B * T, 1, R]`."""
    rows, tokens, pairs = ge.shape(angles)
    one, two = ([pairs, 1], [pairs, 2]) if interleaved else ([1, pairs], [2, pairs])
    count = rows * tokens

    def make():
        return ge.broadcast(ge.reshape(angles, [count, *one]), [count, *two])

    return ge.reshape(ge.once(("channels", angles.tensor, interleaved), make), [1, count, 1, 2 * pairs])
