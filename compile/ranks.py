"""What each rank of a bundle has and does: its weights by its recipes, its part of inputs and states, its graphs.

One `Rank` is a rank's side of a deployment, made of the bundle's files alone. `verify` runs all of them in lockstep in
one process, or each in a process of its own; both drive the same object:

    run = rank.start(step)            # what Executor.steps is: stops at every collective
    rank.finish(step, ran)            # its states move on; what it gives is there for later stages
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kimi_graph import tree
from kimi_graph.checkpoint import Checkpoint, load_packed
from kimi_graph.config import ModelConfig, MoeConfig, arranged
from kimi_graph.errors import BundleError, VerifyError
from kimi_graph.models import decoder
from kimi_graph.parallel import Mesh, Rules, balance
from kimi_graph.parallel.balance import Table
from kimi_graph.parallel.collectives import group_axes
from kimi_graph.parallel.mesh import Axes
from kimi_graph.parallel.placement import with_zeros
from kimi_graph.spec import ParamSpec

from . import air, recipe
from .bundle import MANIFEST, Bundle
from .executor import Executor, Ran, Selections
from .executor.lockstep import Groups, Steps
from .ge_proto import ModelDef, TensorDescriptor, shape_of
from .manifest import layout_in
from .mesh_manifest import as_dims, own_axes
from .meshes import Layout
from .places import bind_rank, placed_groups
from .weight_formats import as_read, bound
from .written import Written, open_written

CAUSAL = "causal_mask"


def cut(x: Tensor, dims: Sequence[Axes], mesh: Mesh, rank: int) -> Tensor:
    """A rank's part of a tensor."""
    for dim, axes in enumerate(dims):
        if axes:
            size = x.shape[dim] // mesh.size(axes)
            x = x.narrow(dim, mesh.index(rank, axes) * size, size)
    return x


# ---- weights ---------------------------------------------------------------------------------------------------------


@dataclass
class Weights:
    """Makes the weights of every rank by a bundle's plan; ranks that hold the same part share it.

    Attributes:
        params: parameters by path. specs: of the model, by path. checkpoint: where packed weights are read from.
        slots: of parameters that hold copies of experts, which expert is in each slot.
        written: weights that were made ahead; they have to be those that are made here, to the byte.
    """

    bundle: Bundle
    mesh: Mesh
    params: Mapping[str, Tensor]
    specs: Mapping[str, ParamSpec]
    checkpoint: Checkpoint
    slots: Mapping[str, Sequence[int]]
    written: Written | None = None
    made: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def of(self, model: ModelDef, rank: int) -> dict[str, Tensor]:
        """The weights that a graph reads on a rank, by name.

        Raises:
            BundleError: a weight the plan does not know, or does not make in the size the graph reads.
        """
        return {
            op.name: self._weight(op.name, op.output_desc[0], rank)
            for op in model.graph[0].op
            if op.type == "Data" and op.name.startswith("p.")
        }

    def _weight(self, name: str, desc: TensorDescriptor, rank: int) -> Tensor:
        entry = self.bundle.weights["weights"].get(name)
        if entry is None or entry["parameter"] not in self.params:
            raise BundleError(f"weight {name}: the weight plan or the model does not have it.")
        dims = as_dims(entry["over"])
        # Phases may read one weight in two shapes of the same bytes.
        key = name, shape_of(desc), *(self.mesh.index(rank, axes) for axes in dims)
        if key not in self.made:
            made = self._make(name, entry, dims, desc, rank)
            if self.written is not None and rank in self.written.ranks:
                made = as_written_ahead(self.written, rank, name, desc, made)
            self.made[key] = made
        return self.made[key]

    def _make(
        self, name: str, entry: Mapping[str, Any], dims: Sequence[Axes], desc: TensorDescriptor, rank: int
    ) -> Tensor:
        """A rank's part of the parameter, then the steps. Of experts that are packed, the rank's own ones."""
        steps, path = recipe.from_json(entry["steps"]), entry["parameter"]
        form = recipe.form(steps)
        if form is None:
            whole = self._in_slots(path, self.params[path])
            whole = with_zeros(whole, entry.get("padded", whole.shape))
            made = recipe.apply(steps, cut(whole, dims, self.mesh, rank).contiguous())
        else:
            whole = self._in_slots(path, self._packed(path, form)[steps[0].args[1]])
            shape = [*entry.get("padded", whole.shape)[:1], *whole.shape[1:]]
            made = recipe.apply(steps[1:], cut(with_zeros(whole, shape), dims[:1], self.mesh, rank))
        return bound(f"weight {name} of rank {rank}", desc, made, form)

    def _in_slots(self, path: str, x: Tensor) -> Tensor:
        return x[list(self.slots[path])] if path in self.slots else x

    @functools.cached_property
    def _read(self) -> dict[tuple[str, str], dict[str, Tensor]]:
        return {}

    def _packed(self, path: str, form: str) -> dict[str, Tensor]:
        if (path, form) not in self._read:
            self._read[path, form] = load_packed(self.specs[path], self.checkpoint, form)
        return self._read[path, form]


def as_written_ahead(written: Written, rank: int, name: str, desc: TensorDescriptor, made: Tensor) -> Tensor:
    """A weight from its file, as a graph reads it in an input described by `desc`.

    Args:
        made: what the recipe makes of the checkpoint.

    Raises:
        BundleError: the file was changed. VerifyError: it was made of another checkpoint.
    """
    found = as_read(desc, written.read(rank, name))
    if found.dtype != made.dtype or not torch.equal(_bytes(found), _bytes(made)):
        raise VerifyError(
            f"weight {name} of rank {rank} in {written.folder} is not what its recipe makes of the checkpoint; run "
            "kimi-graph weights again."
        )
    return found


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


# ---- a rank ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A bundle of a mesh, read: its layout, and the graph of each phase and stage.

    Attributes:
        executors: made so far; by phase, stage, and places in groups where a graph says them.
    """

    bundle: Bundle
    layout: Layout
    entries: Mapping[tuple[str, int], Mapping[str, Any]]
    models: Mapping[tuple[str, int], ModelDef]
    executors: dict[tuple[str, int, tuple[int, ...]], Executor] = field(default_factory=dict)

    @staticmethod
    def read(bundle: Bundle, config: ModelConfig) -> "Plan":
        """All graphs, from their files."""
        layout = layout_in(bundle.manifest, config, bundle.folder / MANIFEST)
        assert layout is not None
        entries = {(g["phase"], g["stage"]): g for g in bundle.manifest["graphs"]}
        models = {key: air.from_bytes(bundle.graph_bytes(g), g["file"]) for key, g in entries.items()}
        return Plan(bundle, layout, entries, models)

    def executor(self, phase: str, rank: int) -> Executor:
        """Of a rank's graph."""
        model = self.models[phase, self.stage_of(rank)]
        places = {group: self.mesh.index(rank, group_axes(group)) for group in placed_groups(model)}
        key = phase, self.stage_of(rank), tuple(places.values())
        if key not in self.executors:
            self.executors[key] = Executor(self.model(phase, rank))
        return self.executors[key]

    def model(self, phase: str, rank: int) -> ModelDef:
        """A rank's graph: the one in the file, told where the rank stands."""
        model = self.models[phase, self.stage_of(rank)]
        places = {group: self.mesh.index(rank, group_axes(group)) for group in placed_groups(model)}
        return bind_rank(model, places.__getitem__) if places else model

    @property
    def types(self) -> set[str]:
        """Operator types that run."""
        return set().union(*(self.executor(phase, self.ranks(stage)[0]).types for phase, stage in self.entries))

    @property
    def config(self) -> ModelConfig:
        """Of the model as the graphs have it."""
        return self.layout.config

    @property
    def mesh(self) -> Mesh:
        """Of the bundle."""
        return self.layout.mesh

    def stages(self, phase: str) -> list[int]:
        """Those that have a part in a phase, in order."""
        return sorted(stage for name, stage in self.entries if name == phase)

    def ranks(self, stage: int) -> range:
        """The ranks of a stage."""
        world = self.mesh.stage.world
        return range(stage * world, (stage + 1) * world)

    def stage_of(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return rank // self.mesh.stage.world

    def rules(self, phase: str) -> Rules:
        """Where axes lie in a phase."""
        return self.layout.rules(phase)

    def groups(self) -> Groups:
        """Rank lists of a group, as the manifest has them.

        Raises:
            BundleError: when it is asked for a group that the manifest does not have.
        """
        known = self.bundle.manifest["mesh"]["groups"]

        def ranks(name: str) -> list[list[int]]:
            if name not in known:
                raise BundleError(f"group {name!r} of the graphs is not in the manifest.")
            return known[name]

        return ranks

    @functools.cached_property
    def written(self) -> Written | None:
        """Weights that were made ahead."""
        return open_written(self.bundle)

    @functools.cached_property
    def tables(self) -> dict[int, Table]:
        """Where the copies of experts are, by layer, as in weights that were made ahead, else for loads that are skewed
        and differ by layer."""
        if self.written is not None:
            ways = self.rules("decode").ways("experts")
            return {int(path.split(".")[1]): Table(slots, ways) for path, slots in self.written.slots.items()}
        generator, ways = torch.Generator().manual_seed(0), self.rules("decode").ways("experts")
        found = {}
        for i, layer in enumerate(self.config.layers):
            if isinstance(layer.ffn, MoeConfig) and layer.ffn.redundant:
                loads = torch.rand(layer.ffn.experts, generator=generator).pow(4).tolist()
                found[i] = balance(loads, layer.ffn.slots, ways).table
        return found

    def table_inputs(self) -> dict[str, Tensor]:
        """`tables` as inputs of graphs."""
        return {decoder.table_name(i): torch.tensor(t.packed, dtype=torch.int32) for i, t in self.tables.items()}

    def shard(self, rank: int) -> Mapping[str, Any]:
        """The rows, slots and pages of a rank."""
        return next(s for s in self.bundle.manifest["state"]["shards"] if rank in s["ranks"])


class Rank:
    """One rank of a bundle: graphs, weights, states and what it has got from other stages.

    Args:
        mode: of the executor.
    """

    def __init__(self, plan: Plan, rank: int, weights: Weights, mode: str) -> None:
        self.plan, self.rank, self.mode = plan, rank, mode
        self.stage = plan.stage_of(rank)
        self.phases = [phase for phase, stage in plan.entries if stage == self.stage]
        self.weights = {phase: weights.of(plan.models[phase, self.stage], rank) for phase in self.phases}
        self.crossed: dict[str, Tensor] = {}

    @functools.cached_property
    def states(self) -> dict[str, Tensor]:
        """By name, zeros at first; whoever has others sets them before a step."""
        return {
            s["name"]: torch.zeros(
                s["graph_shape"], dtype=torch.float64 if self.mode == "exact" else getattr(torch, s["dtype"])
            )
            for s in self.plan.bundle.manifest["state"]["states"]
            if s["stage"] == self.stage
        }

    def start(
        self, phase: str, given: Mapping[str, Tensor], selections: Selections, *, in_place: bool = False
    ) -> Steps:
        """A step of the phase, which stops at every collective.

        Args:
            given: whole inputs by name, with slots and pages counted through all shards.
            in_place: write `states`, see `Executor.run`.
        """
        executor = self.plan.executor(phase, self.rank)
        states = {name: self.states[name] for name in executor.states}
        return executor.steps(self.inputs(phase, given), states, self.mode, selections=selections, in_place=in_place)

    def inputs(self, phase: str, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the rank's graph reads besides states: weights, its part of `given`, values of other stages."""
        entry = self.plan.entries[phase, self.stage]
        given = {**given, **self.plan.table_inputs()}
        described = {i["name"]: i for i in entry["inputs"]}
        return {
            name: self.weights[phase][name] if name in self.weights[phase] else self._input(described[name], given)
            for name in self.plan.executor(phase, self.rank).inputs
        }

    def finish(self, phase: str, ran: Ran) -> dict[str, Tensor]:
        """Move on after a step; what the rank gives, by name."""
        self.states |= ran.states
        return dict(zip(self.plan.entries[phase, self.stage]["gives"], ran.outputs, strict=True))

    def _input(self, entry: Mapping[str, Any], given: Mapping[str, Tensor]) -> Tensor:
        name, mesh = entry["name"], self.plan.mesh
        if name in self.crossed:
            return self.crossed[name]
        if name.startswith("own_index."):
            return torch.tensor([mesh.index(self.rank, own_axes(name))])
        if name == CAUSAL:
            return torch.ones(*entry["shape"], dtype=torch.bool).triu(1)
        if name not in given:
            raise BundleError(f"rank {self.rank}: nobody knows what its input {name!r} is.")
        return self._within(name, cut(given[name], as_dims(entry["over"]), mesh, self.rank)).contiguous()

    def _within(self, name: str, ids: Tensor) -> Tensor:
        """Slots and pages as they count within the rank's shard; those of nobody stay so."""
        unit = {"batch.slots": ("slots", 1), "batch.block_table": ("pages", 1)}
        unit["batch.slot_mapping"] = "pages", self.plan.bundle.manifest["state"]["page_tokens"]
        if name not in unit:
            return ids
        what, size = unit[name]
        first = self.plan.shard(self.rank)[what][0] * size
        return torch.where(ids >= first, ids - first, ids).to(ids.dtype)


def make_ranks(plan: Plan, ranks: Sequence[int], params: Any, checkpoint: Checkpoint, mode: str) -> list[Rank]:
    """Ranks with their weights, made of parameters (float64 parameters stay float64)."""
    specs = dict(tree.items(decoder.model_specs(arranged(plan.config))))
    slots = {f"layers.{i}.moe.{name}": t.slots for i, t in plan.tables.items() for name in ("gate_up", "down")}
    written = plan.written if mode == "native" else None
    weights = Weights(plan.bundle, plan.mesh, dict(tree.items(params)), specs, checkpoint, slots, written)
    return [Rank(plan, rank, weights, mode) for rank in ranks]


def handed_on(plan: Plan, phase: str, stage: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of the values that a stage has and gives, those that a later one reads."""
    later = {name for s in plan.stages(phase) if s > stage for name in plan.entries[phase, s]["reads"]}
    return {name: value for name, value in values.items() if name in later}


def results(plan: Plan, phase: str) -> Iterator[Mapping[str, Any]]:
    """What the last stage of a phase gives, as the manifest describes it."""
    yield from plan.entries[phase, plan.stages(phase)[-1]]["outputs"]
