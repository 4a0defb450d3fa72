"""What runs a bundle's graphs on an engine's own caches: on the CPU the executor, which is what `verify` runs.

Axes: B rows of a graph, V vocab.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_graph import tree
from kimi_graph.checkpoint import Checkpoint, load_params
from kimi_graph.compile.executor import Ran, Selections
from kimi_graph.compile.executor.lockstep import Steps
from kimi_graph.compile.executor.processes import run_alone
from kimi_graph.compile.ranks import Plan, handed_on, make_ranks, results
from kimi_graph.compile.verify import BoundGraphs, Packed, find_checkpoint
from kimi_graph.compile.verify_ranks import whole_result
from kimi_graph.models import decoder

from .bundles import Graphs


class Runner(Protocol):
    """Runs graphs on an engine's own caches."""

    def call(self, phase: str, given: Mapping[str, Tensor], states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a graph gives, by name: `logits` `[B, V]` of each row's last token; what the next stage reads.

        Args:
            given: see `bundle_calls.inputs_of`.
            states: by name, `[slots, ..]` and `[pages, page, ..]`, as the engine's caches hold them: views with any
                strides. They are written where they lie.
        """
        ...


@dataclass(frozen=True)
class Seat:
    """Where a process stands among those that run a bundle together.

    Attributes:
        rank: of the bundle's mesh.
        peers: the processes of its stage as torch.distributed counts them, in the order of their ranks.
        group: of torch.distributed, of these; it moves tensors of the CPU. None: there is one.
    """

    rank: int = 0
    peers: Sequence[int] = (0,)
    group: Any = None


def runner_for(graphs: Graphs, folder: Path, device: torch.device, seat: Seat) -> Runner:
    """What runs graphs on a device, with the weights of a checkpoint.

    Raises:
        BundleError: nothing here does.
        CheckpointError: the checkpoint is not the model's.
    """
    graphs.check_device(device)
    checkpoint = find_checkpoint(graphs.bundle, folder)
    exact = graphs.mode == "exact"
    params = load_params(checkpoint, graphs.config, torch.float64 if exact else None)
    if graphs.bundle.manifest["mesh"] is None:
        return CpuRunner(graphs, params, checkpoint)
    return CpuRankRunner(graphs, params, checkpoint, seat)


class CpuRunner:
    """Graphs of one rank in the executor: slow, and what it gives is what `verify` has compared with the model."""

    def __init__(self, graphs: Graphs, params: Any, checkpoint: Checkpoint) -> None:
        self.caches = Caches(graphs)
        packed = Packed(checkpoint, dict(tree.items(decoder.model_specs(graphs.config))))
        self.bound = BoundGraphs(graphs.bundle, params, graphs.mode, packed)

    def call(self, phase: str, given: Mapping[str, Tensor], states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Runner.call`."""
        ran = self.bound.run(phase, given, self.caches.read(states), in_place=self.caches.native)
        self.caches.write(states, ran, given)
        (entry,) = self.caches.graphs.bundle.graph(phase)["outputs"]
        return {entry["name"]: ran.outputs[0]}


class CpuRankRunner:
    """Graphs of one rank of a mesh in the executor; at every collective it meets the processes of its stage."""

    def __init__(self, graphs: Graphs, params: Any, checkpoint: Checkpoint, seat: Seat) -> None:
        self.caches, self.seat = Caches(graphs), seat
        self.plan = Plan.read(graphs.bundle, graphs.config)
        (self.rank,) = make_ranks(self.plan, [seat.rank], params, checkpoint, graphs.mode)

    def call(self, phase: str, given: Mapping[str, Tensor], states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Runner.call`. Results that the ranks share out are put together on each of them."""
        meetings = dict.fromkeys(self.plan.bundle.manifest["mesh"]["groups"], (list(self.seat.peers), self.seat.group))
        gives = run_alone(self.steps(phase, given, states), meetings)
        if self.rank.stage != self.plan.stages(phase)[-1]:
            return handed_on(self.plan, phase, self.rank.stage, {**given, **gives})
        (entry,) = results(self.plan, phase)
        parts = enumerate(self._gathered(gives[entry["name"]]))
        return {entry["name"]: whole_result(self.plan, phase, {place: {entry["name"]: x} for place, x in parts})}

    def steps(self, phase: str, given: Mapping[str, Tensor], states: Mapping[str, Tensor]) -> Steps:
        """A call which stops at every collective, and ends with what this rank's graph gives, by name."""
        self.rank.states = self.caches.read(states)
        ran = yield from self.rank.start(phase, given, Selections(), in_place=self.caches.native)
        self.caches.write(states, ran, given)
        return self.rank.finish(phase, ran)

    def _gathered(self, x: Tensor) -> Iterator[Tensor]:
        """Of each rank of the stage."""
        if len(self.seat.peers) == 1:
            return iter([x])
        given = x.contiguous()
        parts = [torch.empty_like(given) for _ in self.seat.peers]
        dist.all_gather([part.view(torch.uint8) for part in parts], given.view(torch.uint8), group=self.seat.group)
        return iter(parts)


@dataclass(frozen=True)
class Caches:
    """The engine's caches as graphs read and write them."""

    graphs: Graphs

    @property
    def native(self) -> bool:
        """Whether graphs write them where they lie; in exact mode they compute in another dtype."""
        return self.graphs.mode == "native"

    def read(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """In the shapes of the graphs: views, or in exact mode copies."""
        shapes = {s["name"]: s["graph_shape"] for s in self.graphs.contract["states"]}
        return {name: (x.view if self.native else x.reshape)(shapes[name]) for name, x in states.items()}

    def write(self, states: Mapping[str, Tensor], ran: Ran, given: Mapping[str, Tensor]) -> None:
        """What a call made of its rows' slots and pages; of others' nothing, as other states share their memory."""
        if self.native or not states:
            return
        pages = (given["batch.slot_mapping"] // self.graphs.contract["page_tokens"]).unique()
        slots = given["batch.slots"].long().unique()
        for name, x in states.items():
            at = slots if ".kda." in name else pages
            x[at] = ran.states[name].view(x.shape)[at].to(x.dtype)
