"""A step of an engine becomes rows in which every token has its place. Needs no engine."""

import itertools

import hypothesis.strategies as st
import torch
from hypothesis import given

from kimi_graph.serving.rows import MOST_PADDING, reads_new_pages, rows_of

REQUESTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 300)), min_size=1, max_size=12)


def step(requests):
    """Where tokens start, and lengths after the step, of new tokens and tokens before."""
    counts = [count for count, _ in requests]
    return [0, *itertools.accumulate(counts)], [count + before for count, before in requests]


@given(REQUESTS, st.booleans())
def test_every_token_is_in_one_row_at_its_position(requests, shared):
    starts, lengths = step(requests)
    seen = []
    for rows in rows_of(starts, lengths, shared=shared):
        for request, at, before, count in zip(rows.requests, rows.at, rows.before, rows.counts, strict=True):
            assert (int(count), int(before)) == requests[request]
            first = starts[request]
            assert at[:count].tolist() == list(range(first, first + int(count)))
            assert set(at[count:].tolist()) <= {first + int(count) - 1}
        seen += rows.at[rows.real].tolist()
        assert rows.longest == int((rows.before + rows.counts).max())
    assert sorted(seen) == list(range(starts[-1]))


@given(REQUESTS, st.booleans())
def test_groups_are_of_one_kind_and_at_most_half_padding(requests, shared):
    for rows in rows_of(*step(requests), shared=shared):
        steps = (rows.counts == 1) & (rows.before > 0)
        assert bool(steps.all()) == rows.step
        assert rows.step or not bool(steps.any())
        assert rows.at.numel() <= MOST_PADDING * int(rows.counts.sum())


@given(REQUESTS, st.sampled_from([2, 4]))
def test_rows_that_are_read_are_padded_to_a_multiple_of_the_ranks_that_share_them(requests, ways):
    plain, padded = rows_of(*step(requests)), rows_of(*step(requests), ways=ways)
    for a, b in zip(plain, padded, strict=True):
        assert b.at.shape[1] == (1 if b.step else -(-a.at.shape[1] // ways) * ways)
        assert a.at[a.real].equal(b.at[b.real])
        assert set(b.at[~b.real].tolist()) <= set(a.at[:, -1].tolist())


@given(REQUESTS)
def test_where_pages_are_shared_rows_go_in_the_order_of_what_is_there_already(requests):
    groups = rows_of(*step(requests), shared=True)
    for earlier, later in itertools.pairwise(groups):
        assert int(earlier.before.max()) <= int(later.before.min())


def test_decoding_is_one_group_where_nothing_is_shared():
    starts, lengths = step([(1, 5), (30, 0), (1, 900), (1, 0), (17, 3), (1, 64)])
    kinds = [(rows.step, sorted(rows.requests.tolist())) for rows in rows_of(starts, lengths)]
    assert kinds == [(True, [0, 2, 5]), (False, [3]), (False, [1, 4])]


def test_a_prefix_that_another_request_writes_in_this_step_is_noticed():
    table = torch.tensor([[1, 2, 3], [1, 4, 0], [5, 6, 0]])
    counts = torch.tensor([12, 3, 1])
    assert reads_new_pages(table, torch.tensor([0, 4, 7]), counts, 4)  # request 1 has read page 1, which 0 writes
    assert not reads_new_pages(table, torch.tensor([4, 4, 7]), torch.tensor([8, 3, 1]), 4)
    assert not reads_new_pages(table[2:], torch.tensor([4]), torch.tensor([3]), 4)
