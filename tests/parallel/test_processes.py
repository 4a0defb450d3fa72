"""A collective among processes is what it is among the ranks of a simulation."""

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from kimi_graph.errors import ShardingError
from kimi_graph.parallel import Mesh, collectives
from kimi_graph.parallel.processes import Member

MESH, AXES = Mesh(tensor=2), ("tensor",)


def given(rank, dtype=torch.float32):
    return (torch.arange(48).view(2, 6, 4) * (rank + 1)).to(dtype)


def moved(x):
    """Every collective that torch.distributed has, along dimensions of all kinds."""
    yield collectives.all_reduce(x, AXES)
    yield collectives.all_reduce(x, AXES, "max")
    for dim in range(3):
        yield collectives.all_gather(MESH, x, AXES, dim)
        yield collectives.reduce_scatter(MESH, x, AXES, dim)
        yield collectives.own_slice(MESH, x, AXES, dim)
        yield collectives.all_to_all(MESH, x, AXES, dim, (dim + 1) % 3)
    yield collectives.own_index(AXES, 5, torch.int32)


def expected(rank, dtype):
    both = given(0, dtype), given(1, dtype)
    yield both[0] + both[1]
    yield torch.maximum(*both)
    for dim in range(3):
        yield torch.cat(both, dim)
        yield (both[0] + both[1]).chunk(2, dim)[rank]
        yield both[rank].chunk(2, dim)[rank]
        yield torch.cat([x.chunk(2, dim)[rank] for x in both], (dim + 1) % 3)
    yield torch.tensor([5 * rank], dtype=torch.int32)


def exchanged(x, chosen, weights):
    """Rows to their experts and back, where an expert adds its number."""
    sent, sizes, *notes = collectives.expert_dispatch(MESH, x, chosen, AXES, 2)
    number = 2 * int(collectives.own_index(AXES)) + torch.repeat_interleave(torch.arange(2), sizes)
    made = torch.zeros_like(sent)
    made[: len(number)] = sent[: len(number)] + number[:, None]
    return collectives.expert_combine(MESH, made, chosen, weights, (notes[0], notes[1]), AXES, 2)


def on_a_rank(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    member = Member(MESH, rank, dist.group.WORLD, torch.device("cpu"))
    with member.at_work(), torch.inference_mode():
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
            for got, want in zip(moved(given(rank, dtype)), expected(rank, dtype), strict=True):
                assert got.equal(want), (dtype, got, want)
        x, chosen = given(rank)[0], torch.tensor([[0, 3], [1, 2], [2, 3], [0, 1], [3, 1], [2, 0]], dtype=torch.int32)
        weights = torch.tensor([[0.5, 0.25]]).expand(6, 2)
        want = 0.75 * x + (weights * chosen).sum(1)[:, None]
        assert torch.allclose(exchanged(x, chosen, weights), want)
    with pytest.raises(ShardingError, match="work of several ranks"):
        collectives.all_reduce(x, AXES)
    dist.destroy_process_group()


def test_processes_give_what_the_ranks_of_a_simulation_give(tmp_path):
    spawn(on_a_rank, (tmp_path / "store",), 2)


def test_a_collective_along_a_part_of_the_mesh_is_refused():
    """There is one group, that of all ranks."""
    member = Member(Mesh(data=2, tensor=2), 0, None, torch.device("cpu"))
    with member.at_work(), pytest.raises(ShardingError, match=r"all_reduce along tensor of the mesh dp=2,tp=2"):
        collectives.all_reduce(torch.ones(2), ("tensor",))
