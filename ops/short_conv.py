"""Causal depthwise convolution over the last few tokens, then SiLU, with its window as state."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import at_least_f32, may_overwrite, operator


@operator(sharding="b t h k, h k w, s h k u, b, b, b -> b t h k, s h k u", whole="twsu")
def short_conv(
    x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, lengths: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """`silu(sum_j weight[j] * x[t - W + 1 + j])` per channel, and the next window.

    Args:
        x: `[B, T, H, K]`, right-padded rows. weight: `[H, K, W]`, oldest tap first.
        window: `[S, H, K, W - 1]`, the inputs before this step, oldest first; read as zeros where the row's sequence
            starts in this step (`lengths == counts`).
        slots, lengths, counts: `[B]`, see `Batch`.

    Returns:
        `[B, T, H, K]`, and the windows, in which the rows' slots hold the last W - 1 inputs before the padding.
    """
    past = window.shape[-1]
    started = (lengths > counts)[:, None, None, None]
    before = torch.where(started, window[slots.long()], 0).to(x.dtype).permute(0, 3, 1, 2)
    inputs = torch.cat([before, x], 1)
    wide = at_least_f32(inputs)
    taps = at_least_f32(weight)
    tokens = x.shape[1]
    y = sum(wide[:, j : j + tokens] * taps[..., j] for j in range(past + 1))
    at = counts[:, None] + torch.arange(past, device=x.device)
    last = torch.gather(inputs, 1, at[:, :, None, None].expand(-1, -1, *x.shape[2:])).permute(0, 2, 3, 1)
    return F.silu(y).to(x.dtype), put_rows(window, slots, last)


@short_conv.fake
def _(x, weight, window, slots, lengths, counts):
    return torch.empty_like(x), torch.empty_like(window)


def put_rows(state: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """`state` with `rows` at `slots`; written into `state` itself where the caller gave it away."""
    rows = rows.to(state.dtype)
    if may_overwrite(state):
        return state.index_copy_(0, slots.long(), rows)
    return state.index_copy(0, slots.long(), rows)


@short_conv.lowering
def _(ge, x, weight, window, slots, lengths, counts):
    inputs = {"x": x, "weight": weight, "window": window, "slots": slots, "lengths": lengths, "counts": counts}
    return ge.own("ShortConv", inputs, ["y", "window"], {})
