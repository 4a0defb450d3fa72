"""Causal depthwise convolution over the last few tokens, then SiLU, with its window as state.

Source: Kimi Linear (arXiv:2510.26692), section 4; fact sheet of models, section 3.1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import BLOCK_BYTES, at_least_f32, at_once, empty_like, operator
from .offers import Offer, cannot
from .state import put_rows, state_rows


@operator(sharding="b t h k, h k w, s h k u, b, b, b -> b t h k, s h k u", whole="twsu")
def short_conv(
    x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, lengths: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """`silu(sum_j weight[j] * x[t - W + 1 + j])` per channel, and the next window.

    Args:
        x: `[B, T, H, K]`, right-padded rows.
        weight: `[H, K, W]`, oldest tap first.
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
            last = torch.where((counts > 0).to(x.device)[:, None, None, None], last, before)
    else:
        inputs = torch.cat([before.permute(0, 3, 1, 2), x], 1)
        y = _convolve(inputs, at_least_f32(weight))
        at = counts.to(x.device)[:, None] + torch.arange(window.shape[-1], device=x.device)
        last = inputs[torch.arange(len(x), device=x.device)[:, None], at].permute(0, 2, 3, 1)
    return y, put_rows(window, slots, last)


def _convolve(inputs: Tensor, weight: Tensor) -> Tensor:
    """`[B, W - 1 + T, H, K]` and `[H, K, W]` -> `[B, T, H, K]`, a block of tokens at a time (see `by_rows`)."""
    first, *rest = (tap.contiguous() for tap in weight.unbind(-1))
    tokens = inputs.shape[1] - len(rest)
    block = max(1, at_once(BLOCK_BYTES, inputs) // (4 * inputs[:, 0].numel()))
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
    return empty_like(x), empty_like(window)


@short_conv.lowering
def _(ge, *args):
    return ge.serve("short convolution", OFFERS, *args)


def _own(ge, x, weight, window, slots, lengths, counts):
    inputs = {"x": x, "weight": weight, "window": window, "slots": slots, "lengths": lengths, "counts": counts}
    return ge.own("ShortConv", inputs, ["y", "window"], {})


def _composed(ge, x, weight, window, slots, lengths, counts):
    """A product for each tap, summed in float32; what a row keeps is gathered by where its real tokens end."""
    f32, half, (rows, tokens, heads, key) = torch.float32, ge.dtype(x), ge.shape(x)
    kept = ge.shape(window)[-1]
    seen = tokens + kept
    old = ge.GatherV2(window, slots, ge.const([0], torch.int64), negative_index_support=False)
    old = ge.Transpose(ge.mark(old, (rows, heads, key, kept), half), ge.const([0, 3, 1, 2], torch.int64))
    goes_on = ge.reshape(ge.mark(ge.Greater(lengths, counts), (rows,), torch.bool), [rows, 1, 1, 1])
    old = ge.SelectV2(goes_on, old, ge.const(0.0, half))  # whatever the slot holds, no number included
    inputs = ge.concat([ge.mark(old, (rows, kept, heads, key), half), x], 1)
    y = None
    for j in range(kept + 1):
        term = ge.Mul(ge.cast(ge.cut(inputs, 1, j, tokens), f32), ge.weight_as(weight, f32, taken=(2, j)))
        y = term if y is None else ge.Add(y, term)
    y = ge.cast(ge.mark(ge.Swish(y), ge.shape(x), f32), half)
    firsts = ge.const([[row * seen + j for j in range(kept)] for row in range(rows)], torch.int64)
    at = ge.mark(ge.Add(firsts, ge.reshape(counts, [rows, 1])), (rows, kept), torch.int64)
    flat = ge.reshape(inputs, [rows * seen, heads * key])
    last = ge.GatherV2(flat, at, ge.const([0], torch.int64), negative_index_support=False)
    last = ge.reshape(ge.mark(last, (rows, kept, heads * key), half), [rows, kept, heads, key])
    last = ge.Transpose(last, ge.const([0, 2, 3, 1], torch.int64))
    return y, ge.ScatterNdUpdate(window, ge.reshape(slots, [rows, 1]), last)


def _own_sizes(ge, x, weight, *args) -> str:
    (*_, heads, key), taps = ge.shape(x), ge.shape(weight)[-1]
    if taps == 4 and heads * key % 16 == 0:
        return ""
    return f"takes 4 taps and a multiple of 16 channels, these are {taps} and {heads * key}"


_OTHER_WINDOW = "keeps its windows as [slots, taps - 1, channels] and does not know padded rows"

OFFERS = (
    cannot("builtin", "CausalConv1d", _OTHER_WINDOW),
    cannot("vllm-ascend", "CausalConv1d", "its definition has the windows, which it writes, among the inputs alone"),
    Offer("own", "ShortConv", _own, "one kernel for prefill and decode, in place over slots", _own_sizes),
    Offer("composed", "GatherV2, Mul, Add, Swish, ScatterNdUpdate", _composed, "a product for each tap, float32 sums"),
)
