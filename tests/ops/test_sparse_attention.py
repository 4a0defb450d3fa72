"""Sparse attention: selection against plain Python, attention to a selection against softmax, and what is not read."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kimi_graph import ops

MODULE = sys.modules["kimi_graph.ops.sparse_attention"]  # the package's attribute of this name is the operator
NAN = float("nan")
PAGE, PAGES = 4, 8
LENGTHS, COUNTS = torch.tensor([30, 4, 7, 0]), torch.tensor([9, 4, 0, 0])
TABLE = (torch.randperm(4 * PAGES, generator=torch.Generator().manual_seed(1)) + 1).view(4, PAGES).int()
F64 = torch.float64


@pytest.fixture(params=[None, (240, 384), (4, 4)], ids=["whole", "blocks", "one by one"])
def blocks(request, monkeypatch) -> None:
    """Blocks as they are, and so small that there are several of queries and of keys."""
    if request.param is not None:
        monkeypatch.setattr(MODULE, "SCORE_BYTES", request.param[0])
        monkeypatch.setattr(MODULE, "PART_BYTES", request.param[1])


def by_sorting(q, weights, pool, table, lengths, counts, top_k):
    """Plain Python: every score, sorted by score and then by position."""
    out = torch.full((*q.shape[:2], top_k), -1, dtype=torch.int32)
    for row in range(len(q)):
        keys = pool[table[row].long()].flatten(0, 1)
        for t in range(int(counts[row])):
            scores = []
            for position in range(int(lengths[row] - counts[row]) + t + 1):
                dots = (q[row, t] @ keys[position]).tolist()
                scores.append(sum(w * max(d, 0.0) for w, d in zip(weights[row, t].tolist(), dots, strict=True)))
            best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:top_k]
            out[row, t, : len(best)] = torch.tensor(best)
    return out


def integers(*shape: int) -> torch.Tensor:
    """Small whole numbers: sums are exact in any order, so equal scores are equal, and there are many."""
    return torch.randint(-1, 2, shape).double()


@pytest.mark.parametrize("top_k", [1, 3, 10, 64])
@pytest.mark.parametrize("heads", [1, 5])
def test_the_best_are_selected_and_equal_scores_go_to_the_lower_position(blocks, heads, top_k):
    q, weights, pool = integers(4, 9, heads, 6), integers(4, 9, heads), integers(4 * PAGES + 1, PAGE, 6)
    args = (q, weights, pool, TABLE, LENGTHS, COUNTS, top_k)
    assert torch.equal(ops.select_keys(*args), by_sorting(*args))


def test_selection_in_float32_is_that_of_real_numbers_where_they_are_apart(blocks):
    q, weights, pool = torch.randn(4, 9, 16, 8), torch.randn(4, 9, 16), torch.randn(4 * PAGES + 1, PAGE, 8)
    rows = (TABLE, LENGTHS, COUNTS)
    got = ops.select_keys(q, weights, pool, *rows, 6)
    assert torch.equal(got, by_sorting(q.double(), weights.double(), pool.double(), *rows, 6))


@given(st.lists(st.integers(0, 12), min_size=3, max_size=3), st.integers(0, 2**32))
def test_tokens_read_one_by_one_select_what_they_select_together(counts, seed):
    torch.manual_seed(seed)
    counts, before = torch.tensor(counts), torch.tensor([0, 7, 18])
    q, weights, pool = integers(3, 12, 3, 4), integers(3, 12, 3), integers(4 * PAGES + 1, PAGE, 4)
    together = ops.select_keys(q, weights, pool, TABLE[:3], before + counts, counts, 5)
    for t in range(12):
        now = (counts > t).long()
        one = ops.select_keys(q[:, t : t + 1], weights[:, t : t + 1], pool, TABLE[:3], before + t * now + now, now, 5)
        assert torch.equal(one[:, 0][now.bool()], together[:, t][now.bool()])
    assert (together[torch.arange(12) >= counts[:, None]] == -1).all()


def test_more_than_a_sorts_worth_of_equal_scores_are_taken_in_order():
    q, weights, pool = torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 2), torch.zeros(33, 64, 4)
    table = torch.arange(1, 33, dtype=torch.int32)[None]
    got = ops.select_keys(q, weights, pool, table, torch.tensor([2000]), torch.tensor([1]), 512)
    assert torch.equal(got[0, 0], torch.arange(512, dtype=torch.int32))


def stale(pool: torch.Tensor) -> torch.Tensor:
    """The pool with NaN in every cache row that no token of the batch is in."""
    flat = torch.full_like(pool, NAN).flatten(0, 1)
    for row, length in enumerate(LENGTHS.tolist()):
        for position in range(length):
            at = int(TABLE[row, position // PAGE]) * PAGE + position % PAGE
            flat[at] = pool.flatten(0, 1)[at]
    return flat.view(pool.shape)


def test_selection_does_not_look_at_cache_rows_without_a_token(blocks):
    q, weights, pool = integers(4, 9, 5, 6), integers(4, 9, 5), integers(4 * PAGES + 1, PAGE, 6)
    q[0, 8:], q[1, 4:] = NAN, NAN  # the last token of a row, and padding
    got = ops.select_keys(q, weights, stale(pool), TABLE, LENGTHS, COUNTS, 7)
    want = by_sorting(q.nan_to_num(), weights, pool, TABLE, LENGTHS, COUNTS, 7)
    assert torch.equal(got[:, :8], want[:, :8])


def test_a_visible_nan_shows_in_the_selection():
    q, weights, pool = torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1), torch.zeros(2, 8, 2)
    pool[1, 5] = NAN
    rows = (torch.tensor([[1]], dtype=torch.int32), torch.tensor([8]), torch.tensor([1]))
    assert ops.select_keys(q, weights, pool, *rows, 2).tolist() == [[[5, 0]]]
    assert ops.select_keys(q * NAN, weights, pool, *rows, 3).tolist() == [[[0, 1, 2]]]


def by_softmax(q, q_rope, latent_pool, rope_pool, selected, scale):
    """Of each query and head over its selected tokens, in float64."""
    out = torch.zeros_like(q)
    for row in range(len(q)):
        latent, rope = (pool[TABLE[row].long()].flatten(0, 1) for pool in (latent_pool, rope_pool))
        for t in range(int(COUNTS[row])):
            last = int(LENGTHS[row] - COUNTS[row]) + t
            at = [p for p in selected[row, t].tolist() if 0 <= p <= last]
            if at:
                scores = (q[row, t] @ latent[at].mT + q_rope[row, t] @ rope[at].mT) * scale
                out[row, t] = scores.softmax(-1) @ latent[at]
    return out


def inputs(heads: int = 3, selected: int = 5) -> list[torch.Tensor]:
    made = [torch.randn(4, 9, heads, 6), torch.randn(4, 9, heads, 2)]
    made += [torch.randn(4 * PAGES + 1, PAGE, 6), torch.randn(4 * PAGES + 1, PAGE, 2)]
    chosen = torch.randint(-1, 32, (4, 9, 32)).argsort(-1)[:, :, :selected] - 1  # none twice
    return [*(x.double() for x in made), chosen.int()]


ROUNDING = {"rtol": 1e-13, "atol": 1e-13}


def test_attention_is_a_softmax_over_the_selected_tokens(blocks):
    args = inputs()
    got = ops.sparse_attention(*args, TABLE, LENGTHS, COUNTS, 0.5)  # a float attribute is a float32
    torch.testing.assert_close(got, by_softmax(*args, 0.5), **ROUNDING)


def test_only_selected_rows_of_the_cache_are_read(blocks):
    *given, selected = inputs()
    selected[:, :, 3:] = torch.where(torch.rand(4, 9, 2) < 0.5, -1, selected[:, :, 3:])
    q, q_rope, latent, rope = given
    used = set()
    for row in range(4):
        for t in range(int(COUNTS[row])):
            for p in selected[row, t].tolist():
                if 0 <= p <= int(LENGTHS[row] - COUNTS[row]) + t:
                    used.add(int(TABLE[row, p // PAGE]) * PAGE + p % PAGE)
    unused = torch.ones(latent.shape[:2], dtype=torch.bool).flatten()
    unused[sorted(used)] = False
    unused = unused.view(*latent.shape[:2], 1)
    want = by_softmax(*given, selected, 0.5)
    poisoned = [x.masked_fill(unused, NAN) for x in (latent, rope)]
    got = ops.sparse_attention(q, q_rope, *poisoned, selected, TABLE, LENGTHS, COUNTS, 0.5)
    torch.testing.assert_close(got, want, **ROUNDING)


def test_padding_may_hold_anything_and_gives_zeros(blocks):
    q, q_rope, latent, rope, selected = inputs()
    want = ops.sparse_attention(q, q_rope, latent, rope, selected, TABLE, LENGTHS, COUNTS, 0.5)
    padding = torch.arange(9) >= COUNTS[:, None]
    q, q_rope = (x.masked_fill(padding[:, :, None, None], NAN) for x in (q, q_rope))
    selected = selected.masked_fill(padding[:, :, None], 2**31 - 1)
    got = ops.sparse_attention(q, q_rope, latent, rope, selected, TABLE, LENGTHS, COUNTS, 0.5)
    assert torch.equal(got, want)
    assert (got[padding] == 0).all()


def test_a_query_without_any_selected_token_gives_zeros():
    args = inputs()
    args[-1][0, 2] = -1
    got = ops.sparse_attention(*args, TABLE, LENGTHS, COUNTS, 0.5)
    assert (got[0, 2] == 0).all()


def test_with_everything_selected_a_step_is_dense_absorbed_attention():
    q, q_rope, latent, rope, _ = inputs()
    lengths, counts = torch.tensor([30, 4, 7, 0]), torch.tensor([1, 1, 1, 0])
    everything = torch.arange(32, dtype=torch.int32).flip(0).expand(4, 1, 32)
    step = (q[:, :1], q_rope[:, :1], latent, rope)
    got = ops.sparse_attention(*step, everything, TABLE, lengths, counts, 0.5)
    torch.testing.assert_close(got, ops.latent_attention(*step, TABLE, lengths, 0.5), **ROUNDING)


def test_index_keys_land_in_their_cache_rows_and_nowhere_else():
    key, pool = torch.randn(2, 3, 4), torch.randn(3, 4, 4)
    mapping = torch.tensor([5, 6, 7, 8, 0, 1])
    got = ops.index_write(key, pool, mapping)
    want = pool.clone().view(12, 4)
    want[mapping] = key.view(6, 4)
    assert torch.equal(got, want.view(3, 4, 4))
    given = pool.clone()
    with ops.donating():
        assert ops.index_write(key, given, mapping) is given
    assert torch.equal(given, got)


def test_best_positions_of_parts_are_those_of_the_whole():
    """Scores with many ties, shared out over three devices that each name the best of theirs."""
    score = torch.randint(4, (2, 1, 30)).float()
    whole = score.sort(dim=2, descending=True, stable=True).indices[:, :, :7].int()
    order = torch.randperm(30)
    assert torch.equal(ops.best_positions(score[:, :, order], order.int().expand(2, 1, 30), 7), whole)


def test_best_positions_end_with_the_last_key():
    score = torch.tensor([[[ops.NO_SCORE, 2.0, ops.NO_SCORE, 5.0]]])
    found = ops.best_positions(score, torch.tensor([[[7, 4, 7, 9]]], dtype=torch.int32), 3)
    assert found.tolist() == [[[9, 4, -1]]]
