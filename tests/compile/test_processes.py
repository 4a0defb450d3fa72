"""Ranks in processes of their own, over gloo, give to the bit what they give in lockstep."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kimi_graph.compile.capture import capture
from kimi_graph.compile.convert import convert
from kimi_graph.compile.executor import Executor, infer_shapes, run_together
from kimi_graph.compile.executor.processes import connect, run_alone
from kimi_graph.compile.ge_proto import ModelDef
from kimi_graph.compile.targets import target
from kimi_graph.errors import BundleError
from kimi_graph.parallel import Mesh, collectives

A3 = target("a3")
MESH = Mesh.parse("dp=2,tp=2")
TENSOR, DATA, BOTH = ("tensor",), ("data",), ("data", "tensor")


def groups(name: str) -> list[list[int]]:
    return MESH.groups(collectives.group_axes(name))


def every_collective(x: Any) -> Any:
    y = collectives.all_reduce(x, BOTH).sigmoid()
    y = collectives.all_to_all(MESH, y * x, TENSOR, 0, 1)
    y = collectives.reduce_scatter(MESH, y, DATA, 1).exp()
    return collectives.all_gather(MESH, collectives.all_reduce(y, TENSOR, "max"), DATA, 0)


def given(rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return {"arg0_1": torch.randn(8, 12, generator=generator).bfloat16()}


def rank_main(rank: int, folder: str, mode: str) -> None:
    """One process: its graph from the file, its run, its results into a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=MESH.world)
    graphs = sorted(Path(folder).glob("*.bytes"))
    executor = Executor(ModelDef.FromString(graphs[rank % len(graphs)].read_bytes()))
    try:
        ran = run_alone(executor.steps(given(rank), {}, mode), connect(["tensor", "data", "data,tensor"], groups))
        torch.save(ran.outputs, f"{folder}/{rank}.pt")
    except BundleError as error:
        Path(f"{folder}/{rank}.error").write_text(str(error))
    dist.barrier()
    dist.destroy_process_group()


def graph(host: Any, f: Any) -> ModelDef:
    x = torch.empty(8, 12, dtype=torch.bfloat16, device="meta")
    made = convert(
        capture(lambda x: {"y": f(x)}, {"x": x}).module, name="call", host=host, target=A3, cann=A3.cann
    ).model
    infer_shapes(made)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "native"])
def test_four_processes_give_what_lockstep_gives(host, tmp_path, mode):
    model = graph(host, every_collective)
    (tmp_path / "0.bytes").write_bytes(model.SerializeToString())
    mp.spawn(rank_main, (str(tmp_path), mode), nprocs=MESH.world)
    executor = Executor(model)
    want = run_together([executor.steps(given(rank), {}, mode) for rank in range(MESH.world)], groups)
    for rank, ran in enumerate(want):
        (got,) = torch.load(tmp_path / f"{rank}.pt")
        assert torch.equal(got, ran.outputs[0])


@pytest.mark.slow
def test_processes_that_come_to_different_collectives_say_so(host, tmp_path):
    for i, kind in enumerate(("sum", "max")):
        model = graph(host, lambda x, kind=kind: collectives.all_reduce(x, TENSOR, kind))
        (tmp_path / f"{i}.bytes").write_bytes(model.SerializeToString())
    mp.spawn(rank_main, (str(tmp_path), "exact"), nprocs=MESH.world)
    for rank in range(MESH.world):
        assert "differ: ('HcomAllReduce'" in (tmp_path / f"{rank}.error").read_text()
