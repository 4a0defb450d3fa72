"""Causal depthwise convolution over the last few tokens, then SiLU, with its window as state."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import BLOCK_BYTES, at_least_f32, operator
from .state import put_rows, state_rows


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
    before = state_rows(window, slots, lengths, counts).to(x.dtype)
    if x.shape[1] == 1:
        inputs = torch.cat([before, x.permute(0, 2, 3, 1)], -1)
        y = F.silu((at_least_f32(inputs) * at_least_f32(weight)).sum(-1)).to(x.dtype)[:, None]
        last = inputs[..., 1:]
        if 0 in counts.tolist():
            last = torch.where((counts > 0)[:, None, None, None], last, before)
    else:
        inputs = torch.cat([before.permute(0, 3, 1, 2), x], 1)
        y = _convolve(inputs, at_least_f32(weight))
        at = counts[:, None] + torch.arange(window.shape[-1], device=x.device)
        last = inputs[torch.arange(len(x), device=x.device)[:, None], at].permute(0, 2, 3, 1)
    return y, put_rows(window, slots, last)


def _convolve(inputs: Tensor, weight: Tensor) -> Tensor:
    """`[B, W - 1 + T, H, K]` and `[H, K, W]` -> `[B, T, H, K]`, a block of tokens at a time (see `by_rows`)."""
    first, *rest = (tap.contiguous() for tap in weight.unbind(-1))
    tokens = inputs.shape[1] - len(rest)
    block = max(1, BLOCK_BYTES // (4 * inputs[:, 0].numel()))
    outs = []
    for start in range(0, max(1, tokens), block):
        size = min(block, tokens - start)
        wide = at_least_f32(inputs[:, start : start + size + len(rest)])
        y = wide[:, :size] * first
        for j, tap in enumerate(rest, 1):
            y = torch.addcmul(y, wide[:, j : j + size], tap)
        outs.append(F.silu(y).to(inputs.dtype))
    return torch.cat(outs, 1)


@short_conv.fake
def _(x, weight, window, slots, lengths, counts):
    return torch.empty_like(x), torch.empty_like(window)


@short_conv.lowering
def _(ge, x, weight, window, slots, lengths, counts):
    inputs = {"x": x, "weight": weight, "window": window, "slots": slots, "lengths": lengths, "counts": counts}
    if ge.soc == "950":
        reason = "own type: CANN's CausalConv1d keeps its window in another order and does not know padded rows"
    else:
        reason = "own type: CANN has CausalConv1d for 950 alone"
    ge.chose("short convolution", "ShortConv", reason)
    return ge.own("ShortConv", inputs, ["y", "window"], {})
