"""Collectives as nodes: what they mean for a group, their shapes, what a graph issues, and their GE nodes."""

import pytest
import torch

from kimi_graph.compile.capture import capture
from kimi_graph.errors import ShardingError
from kimi_graph.parallel import Mesh, collectives
from kimi_graph.parallel.collectives import COLLECTIVES, OPS, issued
from kimi_graph.parallel.simulate import simulate

MESH = Mesh.parse("dp=2,tp=3")
TENSOR, BOTH = ("tensor",), ("data", "tensor")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


# name: what is called with a tensor `[6, 12, 5]`, and what that is of the tensors of a group of three
CALLS = {
    "all_reduce": (lambda x: collectives.all_reduce(x, TENSOR), lambda xs: [sum(xs)] * 3),
    "all_reduce max": (
        lambda x: collectives.all_reduce(x, TENSOR, "max"),
        lambda xs: [torch.maximum(torch.maximum(*xs[:2]), xs[2])] * 3,
    ),
    "all_gather": (lambda x: collectives.all_gather(MESH, x, TENSOR, 1), lambda xs: [torch.cat(xs, 1)] * 3),
    "reduce_scatter": (
        lambda x: collectives.reduce_scatter(MESH, x, TENSOR, -2),
        lambda xs: [sum(xs)[:, 4 * i : 4 * i + 4] for i in range(3)],
    ),
    "all_to_all": (
        lambda x: collectives.all_to_all(MESH, x, TENSOR, 0, 1),
        lambda xs: [torch.cat([x[2 * i : 2 * i + 2] for x in xs], 1) for i in range(3)],
    ),
    "own_slice": (
        lambda x: collectives.own_slice(MESH, x, TENSOR, 1),
        lambda xs: [x[:, 4 * i : 4 * i + 4] for i, x in enumerate(xs)],
    ),
    "own_index": (
        lambda x: collectives.own_index(TENSOR, 4, torch.int32),
        lambda xs: [torch.tensor([4 * i], dtype=torch.int32) for i in range(3)],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_collective_means_what_its_name_says_to_each_group(name):
    call, meaning = CALLS[name]
    captured = capture(lambda x: {"y": call(x)}, {"x": torch.empty(6, 12, 5, dtype=torch.float64, device="meta")})
    (node,) = [n for n in captured.module.graph.nodes if n.target in COLLECTIVES]
    x = [normal(6, 12, 5) for _ in range(6)]
    (got,) = simulate(captured.module, MESH, [x])
    for group in ([0, 1, 2], [3, 4, 5]):
        for rank, want in zip(group, meaning([x[r] for r in group]), strict=True):
            torch.testing.assert_close(got[rank], want, rtol=0, atol=1e-14)
            fake = node.meta["val"]
            assert (got[rank].shape, got[rank].dtype, got[rank].stride()) == (fake.shape, fake.dtype, fake.stride())


def test_every_collective_is_tried():
    pair = {"expert_dispatch", "expert_combine"}  # of several tensors: tests of parallel.experts
    assert {name.split()[0] for name in CALLS} == set(OPS) - pair


def test_a_group_along_two_axes_has_the_first_outermost():
    x = [torch.tensor([float(rank)]) for rank in range(6)]
    for axes, order in ((BOTH, [0, 1, 2, 3, 4, 5]), (BOTH[::-1], [0, 3, 1, 4, 2, 5])):
        module = capture(
            lambda x, axes=axes: {"y": collectives.all_gather(MESH, x, axes, 0)}, {"x": torch.empty(1, device="meta")}
        ).module
        assert simulate(module, MESH, [x])[0][5].tolist() == order


@pytest.mark.parametrize("name", ["reduce_scatter", "own_slice"])
def test_what_does_not_divide_is_refused(name):
    with pytest.raises(ShardingError, match=rf"{name}: dimension 1 of \[2, 7\] on each device is not divisible by ten"):
        getattr(collectives, name)(MESH, torch.empty(2, 7, device="meta"), TENSOR, -1)


def test_one_device_cannot_run_a_collective():
    with pytest.raises(ShardingError, match="all_reduce is the work of several ranks"):
        collectives.all_reduce(normal(2), TENSOR)


def test_what_a_graph_issues_is_listed_in_order_with_bytes():
    def f(x):
        y = collectives.own_slice(MESH, collectives.all_reduce(x, TENSOR), TENSOR, 0)
        return {"y": collectives.all_gather(MESH, y, BOTH, 1) + collectives.own_index(TENSOR)}

    module = capture(f, {"x": torch.empty(6, 4, dtype=torch.bfloat16, device="meta")}).module
    found = issued(module.graph)
    assert [str(c) for c in found] == ["all_reduce tensor [6, 4] bfloat16", "all_gather data,tensor [2, 4] bfloat16"]
    assert [c.bytes for c in found] == [48, 16]
    assert found[1].arguments == (("ways", 6), ("dim", 1))
    assert [c.source.partition(":")[0] for c in found] == ["test_collectives.py"] * 2
