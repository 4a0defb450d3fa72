"""`verify --processes`: every rank of a bundle in a process of its own, over gloo, from the bundle's files.

Ranks know nothing of each other: each reads the files, makes its weights by its recipes, meets its groups at every
collective, and gets from the rank at its place in the stage before what that gives. What they give is written to files,
after every step, and their states after the last one.
"""

import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from kimi_graph.checkpoint import Checkpoint, load_params
from kimi_graph.config import ModelConfig
from kimi_graph.errors import KimiGraphError, VerifyError

from .bundle import Bundle, open_bundle
from .executor import Selections
from .executor.processes import connect, run_alone
from .mesh_manifest import group_names
from .ranks import Plan, Rank, handed_on, make_ranks
from .verify import Step, bundle_config, script
from .verify_ranks import RankSelections, whole_choices, whole_result, whole_states


class ProcessSide:
    """What the processes of a mode wrote, read step by step; see `verify_ranks.MeshSide`."""

    def __init__(self, plan: Plan, mode: str, folder: Path, steps: int) -> None:
        self.plan, self.mode, self.folder, self.left = plan, mode, folder, steps
        self.at = -1
        self.types = plan.types

    def selections(self) -> RankSelections:
        return RankSelections()

    def step(self, phase: str, given: Mapping[str, Tensor], selections: RankSelections) -> Tensor:
        """Whole results of the next step of the script."""
        self.at += 1
        wrote = {
            r: torch.load(self.folder / f"{self.at}.{self.mode}.{r}.pt")
            for stage in self.plan.stages(phase)
            for r in self.plan.ranks(stage)
        }
        for rank, found in wrote.items():
            selections.ranks[rank] = Selections(found["chosen"], replaying=True, own=found["own"])
        last = self.plan.ranks(self.plan.stages(phase)[-1])
        return whole_result(self.plan, phase, {place: wrote[r]["gives"] for place, r in enumerate(last)})

    def named_states(self) -> dict[str, Tensor] | None:
        """Whole states after the last step; None before."""
        if self.at + 1 < self.left:
            return None
        world = range(self.plan.mesh.world)
        states = [torch.load(self.folder / f"states.{self.mode}.{r}.pt") for r in world]
        return whole_states(self.plan, self.plan.bundle.manifest["state"]["kv_dtype"], states)

    def choices(self, phase: str, selections: RankSelections) -> Iterator[tuple[str, Tensor, Tensor]]:
        """See `MeshSide.choices`."""
        yield from whole_choices(self.plan, phase, selections)


class Processes:
    """Runs the script of a bundle with a process for each rank; `with` it, the sides can be read.

    Raises:
        VerifyError: a rank failed, with what it said.
    """

    def __init__(self, bundle: Bundle, config: ModelConfig, checkpoint: Checkpoint, steps: int, seed: int) -> None:
        self.plan, self.count = Plan.read(bundle, config), len(list(script(bundle, config, steps, seed)))
        self._given = str(bundle.folder), str(checkpoint.folder), steps, seed
        self._folder = TemporaryDirectory()

    def __enter__(self) -> dict[str, ProcessSide]:
        folder = Path(self._folder.name)
        world = self.plan.mesh.world
        with _deaf_to_interrupts():
            ranks = spawn(_rank_main, (str(folder), _free_port(), *self._given), nprocs=world, join=False)
        assert ranks is not None
        try:
            while not ranks.join(timeout=1):
                pass
        except (ProcessRaisedException, ProcessExitedException) as error:
            said = sorted(folder.glob("*.error"))
            words = said[0].read_text() if said else str(error).strip().splitlines()[-1]
            self._folder.cleanup()
            raise VerifyError(f"a rank's process failed: {words}") from None
        except BaseException:  # Ctrl-C: ranks do not hear of it, and wait for each other
            running = [process for process in ranks.processes if process is not None]
            for process in running:
                process.kill()
            for process in running:
                process.join()
            self._folder.cleanup()
            raise
        return {mode: ProcessSide(self.plan, mode, folder, self.count) for mode in ("exact", "native")}

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes that are started inside ignore Ctrl-C, from their first instruction on: who started them ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _free_port() -> int:
    with closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _rank_main(rank: int, folder: str, port: int, bundle: str, checkpoint: str, steps: int, seed: int) -> None:
    """One process."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    try:
        opened = open_bundle(bundle)
        config = bundle_config(opened)
        plan, weights = Plan.read(opened, config), Checkpoint.open(checkpoint)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=plan.mesh.world)
        groups = connect({name for m in plan.models.values() for name in group_names(m)}, plan.groups())
        params = {"exact": load_params(weights, config, dtype=torch.float64), "native": load_params(weights, config)}
        sides = {mode: make_ranks(plan, [rank], p, weights, mode)[0] for mode, p in params.items()}
        for index, step in enumerate(script(opened, config, steps, seed)):
            _run_step(plan, rank, sides, step, index, groups, Path(folder), config.dtype)
        for mode, side in sides.items():
            torch.save(side.states, f"{folder}/states.{mode}.{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
    except KimiGraphError as error:
        Path(f"{folder}/{rank}.error").write_text(f"rank {rank}: {error}")
        raise


def _run_step(
    plan: Plan, rank: int, sides: Mapping[str, Rank], step: Step, index: int, groups: Any, folder: Path, dtype: Any
) -> None:
    """One step of a rank in both modes, if its stage has a part in it."""
    phase, stage, world = step.phase, plan.stage_of(rank), plan.mesh.stage.world
    stages = plan.stages(phase)
    if stage not in stages:
        return
    chosen = Selections()
    for mode, side in sides.items():
        selections = chosen if mode == "exact" else chosen.replay()
        side.crossed = {} if stage == stages[0] else _received(rank - world)
        ran = run_alone(side.start(phase, step.given(mode, dtype), selections), groups)
        gives = side.finish(phase, ran)
        if stage != stages[-1]:
            dist.send_object_list([handed_on(plan, phase, stage, side.crossed | gives)], dst=rank + world)
        made = {"gives": gives, "chosen": selections.chosen, "own": selections.own}
        torch.save(made, folder / f"{index}.{mode}.{rank}.pt")


def _received(source: int) -> dict[str, Tensor]:
    given: list[Any] = [None]
    dist.recv_object_list(given, src=source)
    return given[0]
