"""All ranks in lockstep: parts of tensors, replicas that have to agree, and graphs."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kimi_graph.compile.capture import capture
from kimi_graph.errors import ShardingError
from kimi_graph.parallel import Mesh, collectives
from kimi_graph.parallel.simulate import difference, gather, scatter, simulate

MESH = Mesh.parse("dp=2,tp=3")
PLACES = [
    [(), ()],
    [("data",), ()],
    [("tensor",), ("data",)],
    [("data", "tensor"), ()],
    [(), ("tensor", "data")],
]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("dims", PLACES, ids=str)
def test_parts_gather_to_the_whole(dims):
    x = normal(12, 18)
    parts = scatter(MESH, x, dims)
    assert parts[0].numel() * MESH.size([a for axes in dims for a in axes]) == x.numel()
    assert torch.equal(gather(MESH, parts, dims), x)


def test_the_first_axis_of_a_dimension_is_the_outermost():
    x = torch.arange(6)
    assert [int(p) for p in scatter(MESH, x, [("data", "tensor")])] == [0, 1, 2, 3, 4, 5]
    assert [int(p) for p in scatter(MESH, x, [("tensor", "data")])] == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize("partial", [("data",), ("tensor",), ("data", "tensor")])
def test_summands_are_unequal_along_an_axis_and_add_up(partial):
    x = normal(4)
    parts = scatter(MESH, x, [()], partial)
    for group in MESH.groups(partial):
        torch.testing.assert_close(sum(parts[rank] for rank in group), x, rtol=0, atol=1e-14)
        assert all(parts[rank].abs().max() > 0 for rank in group)
    for group in [group for axis in partial for group in MESH.groups((axis,))]:
        assert all(not torch.equal(parts[a], parts[b]) for a in group for b in group if a < b)


@given(st.integers(0, 5))
def test_a_replica_that_differs_is_named(rank):
    parts = scatter(MESH, normal(6, 5), [("data",), ()])
    parts[rank] = parts[rank] + 1e-9
    with pytest.raises(ShardingError, match=r"ranks \d and \d should hold the same \[3, 5\], and differ by"):
        gather(MESH, parts, [("data",), ()])


def test_rounding_is_no_difference_of_replicas_but_a_whole_number_is():
    parts = scatter(MESH, normal(5), [()])
    parts[4] = parts[4] * (1 + 1e-15)
    gather(MESH, parts, [()])
    numbers = scatter(MESH, torch.full((5,), 10**15), [()])
    numbers[4] = numbers[4] + 1
    with pytest.raises(ShardingError, match="ranks 0 and 4"):
        gather(MESH, numbers, [()])


def test_a_difference_is_of_the_largest_value_and_knows_what_is_no_number():
    want = torch.tensor([2.0, -4.0, math.inf, math.nan])
    assert difference(want, want) == 0
    assert difference(want + torch.tensor([0, 1.0, 0, 0]), want) == 0.25
    assert difference(torch.tensor([2.0, -4.0, 1.0, math.nan]), want) == math.inf
    assert difference(torch.tensor([2.0, math.nan, math.inf, math.nan]), want) == math.inf
    assert difference(torch.tensor([True]), torch.tensor([False])) == 1
    assert difference(torch.zeros(0), torch.zeros(0)) == 0


def test_a_graph_runs_with_its_constants_collectives_and_places():
    table = torch.tensor([1.0, 2.0], dtype=torch.float64)

    def f(x):
        total = collectives.all_reduce(x, ("tensor",))
        first = collectives.own_index(("data",), 10)
        own = collectives.own_slice(MESH, total, ("tensor",), 0)
        return {"y": own + first, "t": total, "n": torch.arange(2, device=x.device) + first, "c": table}

    module = capture(f, {"x": torch.empty(6, dtype=torch.float64, device="meta")}).module
    x = [normal(6) for _ in range(6)]
    own, total, numbers, constant = simulate(module, MESH, [x])
    for rank in range(6):
        data, tensor = divmod(rank, 3)
        want = x[3 * data] + x[3 * data + 1] + x[3 * data + 2]
        torch.testing.assert_close(total[rank], want, rtol=0, atol=1e-14)
        torch.testing.assert_close(own[rank], want[2 * tensor : 2 * tensor + 2] + 10 * data, rtol=0, atol=1e-14)
        assert numbers[rank].tolist() == [10 * data, 10 * data + 1]
        assert torch.equal(constant[rank], table)
