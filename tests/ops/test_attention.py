"""MLA's attention: causal over ragged rows, equal in both forms, blind to the future and to what no row has written."""

import math
from importlib import import_module

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kimi_graph import ops

ROUNDING = 1e-12  # float64, sums in another order


def inputs(rows, tokens, cached, heads=3, nope=5, rope=4, value=6, dtype=torch.float64):
    shapes = [
        (rows, tokens, heads, nope),
        (rows, tokens, heads, rope),
        (rows, cached, heads, nope),
        (rows, cached, rope),
        (rows, cached, heads, value),
    ]
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def textbook(q_nope, q_rope, k_nope, k_rope, v, length, count, scale):
    """One row `[T, H, ...]`, softmax over one token's keys at a time."""
    scale = float(torch.tensor(scale))  # operators round their float attributes to float32
    outs = []
    for i in range(count):
        seen = length - count + i + 1
        scores = torch.einsum("hn,chn->hc", q_nope[i], k_nope[:seen]) + torch.einsum(
            "hr,cr->hc", q_rope[i], k_rope[:seen]
        )
        outs.append(torch.einsum("hc,chv->hv", (scale * scores).softmax(-1), v[:seen]))
    return torch.stack(outs)


def test_ragged_and_resumed_rows_equal_the_textbook():
    lengths, counts = torch.tensor([9, 20, 7, 4, 16]), torch.tensor([9, 3, 1, 0, 9])
    args = inputs(5, 9, 20)
    o = ops.attention(*args, lengths, counts, 0.4)
    for row, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        if count:
            torch.testing.assert_close(o[row, :count], textbook(*(x[row] for x in args), length, count, 0.4))
        assert not o[row, count:].any()


def test_blocks_of_queries_and_heads_change_nothing(monkeypatch):
    args, at = inputs(1, 100, 130), (torch.tensor([130]), torch.tensor([100]))
    whole = ops.attention(*args, *at, 0.4)
    module = import_module("kimi_graph.ops.attention")
    monkeypatch.setattr(module, "SCORE_BYTES", 1)
    monkeypatch.setattr(module, "MIN_QUERIES", 7)
    torch.testing.assert_close(ops.attention(*args, *at, 0.4), whole, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_changed_token_leaves_outputs_before_it_bitwise_equal(dtype):
    tokens = 300
    args, at = inputs(1, tokens, tokens, dtype=dtype), (torch.tensor([tokens]), torch.tensor([tokens]))
    before = ops.attention(*args, *at, 0.4)
    for t in (0, 1, 31, 32, 100, 255, 256, 299):
        changed = [x.clone() for x in args]
        for x in changed:
            x[:, t] = torch.randn_like(x[:, t])
        after = ops.attention(*changed, *at, 0.4)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.equal(after[:, t], before[:, t])


def test_cache_rows_past_a_length_and_queries_past_a_count_do_not_matter():
    lengths, counts = torch.tensor([9, 5]), torch.tensor([4, 2])
    args = inputs(2, 4, 12)
    want = ops.attention(*args, lengths, counts, 0.4)
    for x in args[:2]:
        x[1, 2:] = math.nan
    for x in args[2:]:
        x[0, 9:], x[1, 5:] = math.nan, math.inf
    assert torch.equal(ops.attention(*args, lengths, counts, 0.4), want)


def test_scores_of_all_pairs_of_tokens_are_never_held_at_once():
    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and "view" not in func.name():
                self.size = max(self.size, out.untyped_storage().nbytes())
            return out

    tokens = 3000
    with Largest() as seen:
        ops.attention(*inputs(1, tokens, tokens, dtype=torch.float32), *[torch.tensor([tokens])] * 2, 0.4)
    assert seen.size < 3 * tokens * tokens * 4 / 16


def paged(latent, rope, lengths, page=4):
    """Pools in which each row's pages are scattered, everything not written is NaN; and the block table."""
    rows, cached = latent.shape[:2]
    per_row = -(-cached // page)
    pages = torch.randperm(rows * per_row) + 1
    table = pages.view(rows, per_row).int()
    pools = [torch.full((rows * per_row + 1, page, x.shape[-1]), math.nan, dtype=x.dtype) for x in (latent, rope)]
    for row, length in enumerate(lengths.tolist()):
        for t in range(length):
            for pool, x in zip(pools, (latent, rope), strict=True):
                pool[table[row, t // page], t % page] = x[row, t]
    return *pools, table


@pytest.mark.parametrize("consecutive", [True, False])
def test_the_absorbed_form_over_pages_equals_the_expanded_form(consecutive):
    heads, nope, value, width = 3, 5, 6, 7
    lengths = torch.tensor([9, 1, 4, 12, 0])
    latent, rope = torch.randn(5, 12, width, dtype=torch.float64), torch.randn(5, 12, 4, dtype=torch.float64)
    q_nope, q_rope = (torch.randn(5, 1, heads, n, dtype=torch.float64) for n in (nope, 4))
    up_key, up_value = (torch.randn(heads, n, width, dtype=torch.float64) for n in (nope, value))
    *pools, table = paged(latent, rope, lengths)
    if consecutive:
        order = torch.cat([torch.tensor([0]), table.flatten().long()])
        pools, table = [pool[order] for pool in pools], torch.arange(1, 16, dtype=torch.int32).view(5, 3)
    mixed = ops.latent_attention(torch.einsum("bthn,hnl->bthl", q_nope, up_key), q_rope, *pools, table, lengths, 0.4)
    keys, values = (torch.einsum("bcl,hnl->bchn", latent, up) for up in (up_key, up_value))
    want = ops.attention(q_nope, q_rope, keys, rope, values, lengths, (lengths > 0).long(), 0.4)
    torch.testing.assert_close(torch.einsum("bthl,hvl->bthv", mixed, up_value), want)
    assert not mixed[4].any()


def test_a_bfloat16_cache_is_widened_in_parts_with_the_same_result(monkeypatch):
    lengths = torch.tensor([300])
    latent, rope = (torch.randn(1, 300, n).bfloat16() for n in (16, 4))
    *pools, table = paged(latent, rope, lengths, page=16)
    q = [torch.randn(1, 1, 3, n).bfloat16() for n in (16, 4)]
    whole = ops.latent_attention(*q, *pools, table, lengths, 0.4)
    monkeypatch.setattr(import_module("kimi_graph.ops.attention"), "BLOCK_BYTES", 4 * 16 * 33)
    parts = ops.latent_attention(*q, *pools, table, lengths, 0.4)
    exact = ops.latent_attention(*(x.double() for x in q), *(x.double() for x in pools), table, lengths, 0.4)
    for o in (whole, parts):  # one rounding to bfloat16
        assert (o.double() - exact).abs().max() <= 2**-8 * exact.abs().max()


def test_parts_of_a_cache_merge_to_the_whole_by_their_log_sum_exps():
    q, q_rope = torch.randn(1, 1, 3, 6, dtype=torch.float64), torch.randn(1, 1, 3, 2, dtype=torch.float64)
    latent, rope = torch.randn(4, 5, 6, dtype=torch.float64), torch.randn(4, 5, 2, dtype=torch.float64)
    whole = ops.latent_attention(q, q_rope, latent, rope, torch.tensor([[2, 1, 3]]).int(), torch.tensor([13]), 0.4)
    parts = [([[2, 1]], 10), ([[3, 0]], 3), ([[0, 0]], 0)]
    found = [
        ops.latent_attention_lse(q, q_rope, latent, rope, torch.tensor(t).int(), torch.tensor([n]), 0.4)
        for t, n in parts
    ]
    share = torch.stack([lse for _, lse in found]).softmax(0)
    torch.testing.assert_close(sum(o * s[..., None] for (o, _), s in zip(found, share, strict=True)), whole)
