"""A bundle's ranks on the CPU, step by step, with what each graph read and gave: what devices are held against.

The steps are those of `verify`: prompts in chunks, then decode. Ranks run in the graphs' own dtypes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_graph import tree
from kimi_graph.checkpoint import load_params
from kimi_graph.config import ModelConfig
from kimi_graph.errors import BundleError
from kimi_graph.models import decoder

from . import air
from .bundle import Bundle, as_written
from .constants import to_inputs
from .device import Groups, Job
from .executor import Executor, Node, Ran, run_together
from .executor.node import Edge
from .ge_proto import ModelDef
from .ranks import Plan, handed_on, make_ranks
from .verify import Packed, Step, bundle_config, find_checkpoint, generated_inputs, graph_weights, script


@dataclass(frozen=True)
class Recorded:
    """A graph of a rank that ran. `values`: what each node gave, by edge; empty where nobody asked."""

    graph: str
    phase: str
    stage: int
    rank: int
    job: Job
    ran: Ran
    values: dict[Edge, Tensor] = field(default_factory=dict)

    @property
    def model(self) -> ModelDef:
        return self.job.model


Stage = dict[int, Recorded]  # by rank


class Sides:
    """All ranks of a bundle, with weights and states.

    Raises:
        BundleError: there are no weights to run it with. CheckpointError: they are not the model's.
    """

    def __init__(self, bundle: Bundle, checkpoint: Path | None, steps: int = 2, seed: int = 0) -> None:
        self.bundle = bundle
        with as_written(bundle.folder):
            self.config: ModelConfig = bundle_config(bundle)
            weights = find_checkpoint(bundle, checkpoint)
            params = load_params(weights, self.config)
            known = {g["phase"] for g in bundle.manifest["graphs"]}
            self.script = [s for s in script(bundle, self.config, steps, seed) if s.phase in known]
            if bundle.manifest["mesh"] is None:
                specs = dict(tree.items(decoder.model_specs(self.config)))
                self.ranks: Any = _Alone(bundle, params, Packed(weights, specs))
            else:
                self.ranks = _Meshed(Plan.read(bundle, self.config), params, weights)

    @property
    def groups(self) -> Groups:
        """Rank lists of the groups that graphs name."""
        mesh = self.bundle.manifest["mesh"]
        return {} if mesh is None else mesh["groups"]

    @property
    def world(self) -> int:
        mesh = self.bundle.manifest["mesh"]
        return 1 if mesh is None else mesh["ranks"]

    def play(self, wanted: Mapping[int, bool] | None = None) -> Iterator[tuple[int, Step, list[Stage]]]:
        """Every step, with what each stage's ranks did; of `wanted` steps with all values."""
        for index, step in enumerate(self.script):
            yield index, step, self.ranks.step(step, self.config, bool(wanted and wanted.get(index)))

    def last_of_phases(self) -> dict[int, bool]:
        """Of each phase the last step: its states are those of some steps."""
        return {max(i for i, s in enumerate(self.script) if s.phase == p): True for p in {s.phase for s in self.script}}


def record(bundle: Bundle, checkpoint: Path | None) -> Iterator[Recorded]:
    """The last step of each phase on every rank, with all values."""
    sides = Sides(bundle, checkpoint)
    wanted = sides.last_of_phases()
    for index, _, stages in sides.play(wanted):
        if index in wanted:
            yield from (r for stage in stages for r in stage.values())


def run_stage(jobs: Mapping[int, tuple[str, str, int, Job]], groups: Groups, keep: bool) -> Stage:
    """Ranks of a stage together; jobs with graph, phase and stage."""
    ranks = sorted(jobs)
    values: dict[int, dict[Edge, Tensor]] = {rank: {} for rank in ranks}

    def observer(rank: int) -> Any:
        def observe(node: Node, outputs: tuple[Tensor, ...]) -> None:
            if node.type not in ("Data",):
                values[rank].update({(node.name, i): x.clone() for i, x in enumerate(outputs)})

        return observe if keep else None

    runs = [
        Executor(jobs[r][3].model).steps(jobs[r][3].inputs, jobs[r][3].states, "native", observe=observer(r))
        for r in ranks
    ]
    first = ranks[0]

    def lists(name: str) -> list[list[int]]:
        return [[r - first for r in own] for own in groups[name] if own[0] in ranks]

    ran = dict(zip(ranks, run_together(runs, lists), strict=True))
    found = {}
    for rank, (graph, phase, stage, job) in jobs.items():
        found[rank] = Recorded(graph, phase, stage, rank, job, ran[rank], values[rank])
    return found


class _Meshed:
    """All ranks of a mesh."""

    def __init__(self, plan: Plan, params: Any, checkpoint: Any) -> None:
        self.plan = plan
        self.ranks = make_ranks(plan, range(plan.mesh.world), params, checkpoint, "native")

    def step(self, step: Step, config: ModelConfig, keep: bool) -> list[Stage]:
        plan, phase, given = self.plan, step.phase, step.given("native", config.dtype)
        values: dict[int, dict[str, Tensor]] = {}
        found = []
        for stage in plan.stages(phase):
            ranks = [self.ranks[r] for r in plan.ranks(stage)]
            for place, rank in enumerate(ranks):
                rank.crossed = values.get(place, {})
            name = plan.entries[phase, stage]["name"]
            jobs = {r.rank: (name, phase, stage, self._job(r, phase, given)) for r in ranks}
            made = run_stage(jobs, plan.bundle.manifest["mesh"]["groups"], keep)
            for place, rank in enumerate(ranks):
                gives = rank.finish(phase, made[rank.rank].ran)
                values[place] = handed_on(plan, phase, stage, rank.crossed | gives)
            found.append(made)
        return found

    def _job(self, rank: Any, phase: str, given: Mapping[str, Tensor]) -> Job:
        executor = self.plan.executor(phase, rank.rank)
        states = {name: rank.states[name] for name in executor.states}
        return Job(self.plan.model(phase, rank.rank), rank.inputs(phase, given), states)


class _Alone:
    """The only rank."""

    def __init__(self, bundle: Bundle, params: Any, packed: Packed) -> None:
        named = dict(tree.items(params))
        self.names, self.models, self.inputs = {}, {}, {}
        for entry in bundle.manifest["graphs"]:
            phase = entry["phase"]
            model = air.from_bytes(bundle.graph_bytes(entry), entry["file"])
            to_inputs(model, bundle.folder)  # FileConstants as inputs
            self.names[phase], self.models[phase] = entry["name"], model
            weights = graph_weights(bundle.weights, model, named, packed)
            self.inputs[phase] = weights | generated_inputs(bundle.weights)
        self.states = {
            s["name"]: torch.zeros(s["graph_shape"], dtype=getattr(torch, s["dtype"]))
            for s in bundle.manifest["state"]["states"]
        }

    def step(self, step: Step, config: ModelConfig, keep: bool) -> list[Stage]:
        phase, model = step.phase, self.models[step.phase]
        alone = Executor(model)
        given = self.inputs[phase] | step.given("native", config.dtype)
        if missing := [name for name in alone.inputs if name not in given]:
            raise BundleError(f"graph {phase}: nobody knows what its input {missing[0]!r} is.")
        states = {name: self.states[name] for name in alone.states}
        job = Job(model, {name: given[name] for name in alone.inputs}, states)
        made = run_stage({0: (self.names[phase], phase, 0, job)}, {}, keep)
        self.states |= made[0].ran.states
        return [made]
