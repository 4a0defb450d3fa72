"""The short convolution is torch's depthwise one, goes on from its window, and reads nothing it should not."""

import math
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

from kimi_graph import ops


def inputs(rows, tokens, heads=3, key=5, width=4, dtype=torch.float64):
    x = torch.randn(rows, tokens, heads, key, dtype=torch.float64).to(dtype)
    return x, torch.randn(heads, key, width, dtype=dtype), torch.randn(rows + 1, heads, key, width - 1, dtype=dtype)


def where(lengths, counts):
    return torch.arange(len(counts), 0, -1, dtype=torch.int32), torch.tensor(lengths), torch.tensor(counts)


def textbook(x, weight):
    """`[T, H, K]` from zero, by torch's convolution."""
    flat = F.pad(x.flatten(1).T, (weight.shape[-1] - 1, 0))
    y = F.conv1d(flat[None], weight.flatten(0, 1)[:, None], groups=len(flat))
    return F.silu(y[0]).T.view(x.shape)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 50])
def test_it_is_a_depthwise_convolution_then_silu(tokens):
    x, weight, window = inputs(1, tokens)
    y, after = ops.short_conv(x, weight, window, *where([tokens], [tokens]))
    torch.testing.assert_close(y[0], textbook(x[0], weight))
    last = torch.cat([x.new_zeros(3, 3, 5), x[0]])[-3:]
    assert torch.equal(after[1], last.permute(1, 2, 0))


@pytest.mark.parametrize("parts", [[1] * 9, [2, 7], [5, 1, 3], [9]], ids=str)
def test_parts_equal_the_whole(parts):
    x, weight, window = inputs(2, 9)
    seen, outs = 0, []
    for size in parts:
        piece = x[:, seen : seen + size]
        seen += size
        y, window = ops.short_conv(piece, weight, window, *where([seen] * 2, [size] * 2))
        outs.append(y)
    for row, y in zip(x, torch.cat(outs, 1), strict=True):
        torch.testing.assert_close(y, textbook(row, weight))


@pytest.mark.parametrize("tokens", [1, 6])
def test_padding_and_stale_slots_do_not_matter(tokens):
    x, weight, window = inputs(3, tokens)
    at = where([tokens, 9, 20], [tokens, 0, min(tokens, 2)])  # one starts, one has no new token, one goes on
    want, after = ops.short_conv(x, weight, window, *at)
    assert torch.equal(after[2], window[2])
    dirty, stale = x.clone(), window.clone()
    dirty[1] = dirty[2, 2:] = stale[0] = stale[3] = math.nan
    y, dirty_after = ops.short_conv(dirty, weight, stale, *at)
    assert torch.equal(y[0], want[0]) and torch.equal(y[2, :2], want[2, :2])
    assert torch.equal(dirty_after[1:], after[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_changed_token_leaves_outputs_before_it_bitwise_equal(dtype):
    x, weight, window = inputs(1, 30, dtype=dtype)
    before, _ = ops.short_conv(x, weight, window, *where([31], [30]))
    for t in (0, 1, 15, 29):
        changed = x.clone()
        changed[:, t] = torch.randn_like(changed[:, t])
        after, _ = ops.short_conv(changed, weight, window, *where([31], [30]))
        assert torch.equal(after[:, :t], before[:, :t]) and not torch.equal(after[:, t], before[:, t])


def test_blocks_of_tokens_change_nothing(monkeypatch):
    x, weight, window = inputs(2, 50, dtype=torch.float32)
    whole, _ = ops.short_conv(x, weight, window, *where([50, 51], [50, 50]))
    monkeypatch.setattr(import_module("kimi_graph.ops.short_conv"), "BLOCK_BYTES", 7 * 4 * 30)
    parts, _ = ops.short_conv(x, weight, window, *where([50, 51], [50, 50]))
    torch.testing.assert_close(parts, whole)  # not bitwise: ends of a block are computed without vector instructions


def test_windows_are_overwritten_only_when_given_away():
    x, weight, window = inputs(1, 3)
    kept = window.clone()
    _, after = ops.short_conv(x, weight, window, *where([5], [3]))
    assert torch.equal(window, kept)
    with ops.donating():
        _, same = ops.short_conv(x, weight, window, *where([5], [3]))
    assert same.data_ptr() == window.data_ptr() and torch.equal(same, after)
