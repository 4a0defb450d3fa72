"""`kimi-graph verify`: execute a bundle's graphs on the CPU and compare every output and state with the model.

Prompts of unequal length are read in chunks, then decoded token by token, through the bundle's own state contract:
slots and pages in scrambled order, rows that end inside a chunk or come later, decode steps with a row that no sequence
uses. Twice:

* exact: every float is float64 and float casts do nothing, on both sides. What is left is rounding: <= 1e-12 of scale.
* native: the graph in its own dtypes, against the exact model; choices of experts and of keys are taken from the exact
  run, because a rounding that flips a near tie changes a token's experts and says nothing about the graph. How many of
  those keys the graph would have chosen itself is counted and shown.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_graph import formats, tree
from kimi_graph.checkpoint import Checkpoint, load_packed, load_params
from kimi_graph.config import MlaConfig, ModelConfig, MoeConfig
from kimi_graph.errors import BundleError, VerifyError
from kimi_graph.layers import Batch, arrange_patches, step_batch, vision_forward, vision_tables
from kimi_graph.models import decoder
from kimi_graph.ops.kernel_project import project_files
from kimi_graph.progress import Notify, silent
from kimi_graph.spec import ParamSpec

from . import air, recipe
from .bundle import KERNELS, LOCAL, Bundle, as_written, kernels_entry, open_bundle, read_json
from .caches import kept_states, model_states, quantised_layer
from .constants import to_inputs
from .executor import Executor, Ran, Selections, provenance_counts
from .executor.on_twin import ARCH, kernels_on_twin
from .expect import bundle_config, check_checkpoint_model
from .ge_proto import ModelDef
from .manifest import check_claims
from .ranks import Plan, as_written_ahead
from .targets import target
from .verify_ranks import SELECTORS, MeshSide
from .weight_formats import bound
from .written import open_written

E4M3_ROWS = ("mxfp4", "fp8")  # forms of experts that are multiplied with rows in E4M3
EXACT_TOLERANCE = 1e-12  # 27 layers give 1e-14 of rounding; an epsilon that is off by 1 % gives 5e-11


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of the script, the same for model and graph.

    Attributes:
        inputs: values that no part of the model writes: `tokens`, `vision.rows` and `vision.values`, or
            `vision.patches`.
        batch: where the rows stand; or a picture's tables, in the vision phase.
        used: which rows of the result count; the others are padding.
    """

    phase: str
    inputs: dict[str, Tensor]
    batch: Any
    used: Tensor

    @property
    def named(self) -> dict[str, Tensor]:
        """All a graph reads besides weights and states."""
        what = "tables" if self.phase == "vision" else "batch"
        return self.inputs | {f"{what}.{name}": x for name, x in tree.items(self.batch)}

    def given(self, mode: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """`named` as graphs take it: float64 in exact mode, else in the graph's own dtypes; `dtype`: the model's."""
        return {name: x if mode == "exact" else _narrow(name, x, dtype) for name, x in self.named.items()}


@dataclass(frozen=True, kw_only=True)
class Row:
    """The largest difference seen for one kind of tensor.

    Attributes:
        what: "logits" or a kind of state, such as "kda.memory". count: tensors compared.
        error: of the worst tensor. exact: largest |difference| / largest |model|; native: the ratio of their 2-norms.
        where: tensor and step of the largest. bfloat16: tolerance if the caches had not been rounded to 8 bits.
    """

    mode: str
    what: str
    count: int
    error: float
    tolerance: float
    where: str
    bfloat16: float | None = None

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # NaN fails


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Of the keys that a layer selects in the exact run, those that the native graph selects by itself.

    Attributes:
        where: the layer. queries: those that saw more keys than are selected. worst, mean: share of the keys, 0 to 1.
        chance: mean share that a selection at random would have.
    """

    where: str
    queries: int
    worst: float
    mean: float
    chance: float


@dataclass
class Report:
    """What verify found. `rows` per mode and kind of tensor; `overlaps` per layer that selects keys; `notes`: what else
    was measured, in words."""

    rows: list[Row]
    steps: int
    provenance: dict[str, int]
    difference: str = ""
    overlaps: list[Overlap] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(r.passed for r in self.rows)

    @property
    def summary(self) -> str:
        modes = dict.fromkeys(r.mode for r in self.rows)
        worst = {mode: max(r.error for r in self.rows if r.mode == mode) for mode in modes}
        errors = ", ".join(f"{mode} {error:.1e}" for mode, error in worst.items())
        if self.passed:
            return f"verified: graphs equal the model over {self.steps} steps ({errors})"
        bad = next((r for r in self.rows if not r.passed), None)
        if bad is None:
            return "nothing was compared"
        return (
            f"the graphs differ from the model: {bad.where} ({bad.mode}: {bad.error:.1e}, allowed {bad.tolerance:.0e})"
        )

    def text(self) -> str:
        beside = any(r.bfloat16 is not None for r in self.rows)
        title = f"{'bfloat16':>10}" if beside else ""
        lines = [f"{'mode':<8}{'tensor':<14}{'compared':>9}{'error':>10}{'allowed':>10}{title}  worst"]
        for r in self.rows:
            mark = "" if r.passed else "  DIFFERS"
            plain = ("-" if r.bfloat16 is None else f"{r.bfloat16:.1e}").rjust(10) if beside else ""
            numbers = f"{r.count:>9}{r.error:>10.1e}{r.tolerance:>10.1e}{plain}"
            lines.append(f"{r.mode:<8}{r.what:<14}{numbers}  {r.where}{mark}")
        if self.overlaps:
            numbers = f"{'queries':>9}{'worst':>10}{'mean':>10}{'by chance':>10}"
            lines.append(f"{'share of keys':<22}{numbers}  of the exact run's, that the graph selects itself")
        for o in self.overlaps:
            lines.append(f"{o.where:<22}{o.queries:>9}{o.worst:>10.3f}{o.mean:>10.3f}{o.chance:>10.3f}")
        lines += self.notes
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.provenance.items())
        lines.append(f"semantics of the operator types executed: {kinds}")
        if self.difference:
            lines.append(self.difference)
        return "\n".join(lines)

    def to_json(self) -> Any:
        rows = [dataclasses.asdict(r) | {"passed": r.passed, "error": _json_number(r.error)} for r in self.rows]
        return {
            "passed": self.passed,
            "steps": self.steps,
            "rows": rows,
            "overlaps": [dataclasses.asdict(o) for o in self.overlaps],
            "provenance": self.provenance,
            "difference": self.difference,
            "notes": self.notes,
        }


def _json_number(x: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return x if math.isfinite(x) else str(x)


# ---- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """Where weights come from that graphs keep packed: a checkpoint, and the model's specs by path."""

    checkpoint: Checkpoint
    specs: dict[str, ParamSpec]

    def make(self, steps: tuple[recipe.Step, ...], path: str) -> Tensor:
        """A packed weight, to the byte: `[..]` as its last step gives it."""
        return recipe.make(steps, self.specs[path], self.checkpoint, torch.float64)

    def values(self, form: str, path: str) -> Tensor:
        """What a parameter is once it was packed: `[..]` as the model has it, float64."""
        spec = self.specs[path]
        return formats.unpack(form, load_packed(spec, self.checkpoint, form), torch.float64).view(spec.shape)


def as_kept(plan: dict[str, Any], params: Any, packed: Packed) -> Any:
    """The model's parameters, float64, as a bundle's graphs keep them: packed ones with the values they have then."""
    forms = {e["parameter"]: recipe.form(recipe.from_json(e["steps"])) for e in plan["weights"].values()}
    values = {path: packed.values(form, path) for path, form in forms.items() if form is not None}
    return tree.map_with_path(lambda path, x: values.get(path, x), params)


def graph_weights(
    plan: dict[str, Any], model: ModelDef, params: dict[str, Tensor], packed: Packed | None = None
) -> dict[str, Tensor]:
    """The graph's weights by the plan, from parameters by path (float64 parameters stay float64).

    Args:
        packed: where weights are read from that are packed, to the byte.

    Raises:
        BundleError: a weight the plan does not know, or does not make in the size the graph reads.
    """
    weights = {}
    for op in model.graph[0].op:
        if op.type != "Data" or not op.name.startswith("p."):
            continue
        entry = plan["weights"].get(op.name)
        if entry is None or entry["parameter"] not in params:
            raise BundleError(f"weight {op.name}: the weight plan or the model does not have it.")
        steps, path = recipe.from_json(entry["steps"]), entry["parameter"]
        form = recipe.form(steps)
        made = packed.make(steps, path) if packed and form is not None else recipe.apply(steps, params[path])
        weights[op.name] = bound(f"weight {op.name}", op.output_desc[0], made, form)
    return weights


def check_constants(constants: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    """Weights that a bundle holds itself must be those of the checkpoint, to the byte.

    Raises:
        VerifyError: one that is not.
    """
    for name, value in constants.items():
        if value.dtype != weights[name].dtype or not torch.equal(value, weights[name]):
            raise VerifyError(f"constant {name} is not what the weight plan makes of the checkpoint.")


def _written_ahead(bundle: Bundle, model: ModelDef, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a graph of one rank from their files, where they were made ahead."""
    written = open_written(bundle)
    if written is None:
        return weights
    described = {op.name: op.output_desc[0] for op in model.graph[0].op if op.name in weights}
    return {name: as_written_ahead(written, 0, name, described[name], x) for name, x in weights.items()}


def causal_mask(size: int) -> Tensor:
    """`[size, size]` bool, True above the diagonal: what a query must not see."""
    return torch.ones(size, size, dtype=torch.bool).triu(1)


GENERATORS: dict[str, Callable[[int], Tensor]] = {"causal_mask": causal_mask}


def generated_inputs(plan: dict[str, Any]) -> dict[str, Tensor]:
    """Inputs no checkpoint holds."""
    return {name: GENERATORS[kind](size) for name, (kind, size) in plan["generated"].items()}


# ---- the script ------------------------------------------------------------------------------------------------------


def script(bundle: Bundle, config: ModelConfig, steps: int, seed: int) -> Iterator[Step]:
    """Pictures, then prefill chunks that read unequal prompts, then `steps` decode steps, as the bundle has phases."""
    contract = bundle.manifest["state"]
    phases = {g["phase"]: g for g in bundle.manifest["graphs"]}
    rows = next(iter(phases.values()))["rows"]
    generator = torch.Generator().manual_seed(seed)
    if "vision" in phases:
        yield from _pictures(phases["vision"], config, generator)
    if phases.keys() == {"vision"}:
        return
    page = contract["page_tokens"]
    chunk = phases["prefill"]["tokens"] if "prefill" in phases else min(16, contract["tokens_per_sequence"])
    table, slots = _scattered(contract, rows, generator)
    room = row_capacity(contract, rows) - (steps if "decode" in phases else 0)

    def batch(where: tuple[Tensor, Tensor, Tensor, Tensor], tokens: int) -> Batch[Tensor]:
        return step_batch(*where, tokens, page, rope=config.rotation, dtype=torch.float64)

    before = torch.zeros(rows, dtype=torch.int64)
    for counts in prompt_chunks(rows, chunk, room, _top_k(config) + chunk // 2 + 1):
        tokens = torch.randint(config.vocab, (rows, chunk), generator=generator)
        here = before + counts > 0  # a sequence that has not come yet has neither slot nor pages
        mine = (table * here[:, None]).int(), (slots * here).int(), before, counts
        images = _image_rows(phases.get("prefill"), config, counts, generator)
        step = batch(mine, chunk)
        yield Step(phase="prefill", inputs={"tokens": tokens, **images}, batch=step, used=counts > 0)
        before = before + counts
    for i in range(steps if "decode" in phases else 0):
        tokens = torch.randint(config.vocab, (rows, 1), generator=generator)
        used = (torch.arange(rows) != i % (rows + 1)) | (rows == 1)  # one row after the other stands empty, then none
        mine = (table * used[:, None]).int(), (slots * used).int(), before * used, used.long()
        yield Step(phase="decode", inputs={"tokens": tokens}, batch=batch(mine, 1), used=used)
        before = before + used


def _top_k(config: ModelConfig) -> int:
    """Keys a sparse layer keeps; 0 in dense models."""
    mixers = [layer.mixer for layer in config.layers]
    return max((m.indexer.top_k for m in mixers if isinstance(m, MlaConfig) and m.indexer), default=0)


def _image_rows(
    entry: dict[str, Any] | None, config: ModelConfig, counts: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """Some tokens stand for rows of random image embeddings, in models with vision."""
    if config.vision is None or entry is None:
        return {}
    images, shape = entry["images"], (len(counts), entry["tokens"])
    rows = torch.randint(images + 1, shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.5)
    values = torch.randn(images, config.embed, generator=generator, dtype=torch.float64)
    return {"vision.rows": rows, "vision.values": values}


def _pictures(entry: dict[str, Any], config: ModelConfig, generator: torch.Generator) -> Iterator[Step]:
    """Two pictures of random patches: one that fills the bucket, and a narrow one."""
    v, room = config.vision, entry["tokens"]
    assert v is not None
    down, across = v.merge
    most = room // (down * across)
    side = max(1, math.isqrt(most))
    for height, width in ((side, most // side), (1, max(1, most // 3))):
        grid = (1, height * down, width * across)
        patches = torch.randn(math.prod(grid), 3 * v.patch**2, generator=generator, dtype=torch.float64)
        yield Step(
            phase="vision",
            inputs={"vision.patches": arrange_patches(v, patches, grid, room)},
            batch=vision_tables(v, grid, room, torch.float64),
            used=torch.arange(most) < height * width,
        )


def row_capacity(contract: dict[str, Any], rows: int) -> int:
    """Tokens that every row can hold at once."""
    shards, pools = _shards(contract), _pools(contract)
    pages = (contract["pages"] // (shards * pools) - 1) // (rows // shards)
    return min(contract["tokens_per_sequence"], pages * pools * contract["page_tokens"])


def _shards(contract: dict[str, Any]) -> int:
    """Into how many parts rows fall, and the slots and pages that are theirs: one, or on a mesh some."""
    return len(contract.get("shards", [None]))


def _pools(contract: dict[str, Any]) -> int:
    """Pools that the pages of a shard are, of ranks that share each sequence."""
    return contract.get("pools", 1)


def prompt_chunks(rows: int, chunk: int, room: int, longest: int) -> Iterator[Tensor]:
    """New tokens `[rows]` of each prefill step: whole and partial chunks, one token, none, a row that comes later.

    The first row goes on to `longest` tokens, so that a selection of keys leaves something out.
    """
    before = torch.zeros(rows, dtype=torch.int64)
    for wanted in ((chunk, 0, chunk - 3), (chunk // 2 + 1, chunk, 0), (1, 1, 1)):
        counts = torch.tensor([wanted[r % 3] for r in range(rows)]).clamp(min=0).minimum(room - before)
        if bool(counts.any()):
            yield counts
        before = before + counts
    while int(before[0]) < min(longest, room):
        counts = torch.zeros_like(before)
        counts[0] = min(chunk, min(longest, room) - int(before[0]))
        yield counts
        before = before + counts


def _scattered(contract: dict[str, Any], rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pages and slots in scrambled order: a graph that ignores the tables cannot pass."""
    shards, pools = _shards(contract), _pools(contract)
    pages, places, own = contract["pages"] // (shards * pools), contract["slots"] // shards, rows // shards
    per_row = min(contract["pages_per_sequence"] // pools, (pages - 1) // own)
    table = torch.zeros(rows, contract["pages_per_sequence"], dtype=torch.int32)
    slots = []
    for shard in range(shards):
        for pool in range(pools):
            order = torch.randperm(pages - 1, generator=generator) + 1 + (shard * pools + pool) * pages
            mine = order[: own * per_row].view(own, per_row).int()
            table[shard * own : (shard + 1) * own, pool : per_row * pools : pools] = mine
        slots.append(torch.randperm(places - 1, generator=generator)[:own] + 1 + shard * places)
    return table, torch.cat(slots).int()


# ---- both sides ------------------------------------------------------------------------------------------------------


class ModelSide:
    """The functional model on the bundle's own state shapes, in float64."""

    def __init__(self, config: ModelConfig, contract: dict[str, Any], params: Any) -> None:
        self.config, self.params = config, params
        specs = decoder.state_specs(
            config, slots=contract["slots"], pages=contract["pages"], page=contract["page_tokens"], dtype=torch.float64
        )
        self.states = tree.map(lambda s: torch.zeros(s.shape, dtype=torch.float64), specs)
        self.pools = {
            f"s.layers.{i}.{layer.kinds[0]}.{leaf}": spec.axes[0]
            for i, (layer, state) in enumerate(zip(config.layers, specs, strict=True))
            for leaf, spec in tree.items(state)
        }
        self.parts = {"slots": _shards(contract), "pages": _shards(contract) * _pools(contract)}

    def owned(self, name: str, x: Tensor) -> Tensor:
        """A state without slot 0 and page 0, which are nobody's, of every part."""
        return x.unflatten(0, (self.parts[self.pools[name]], -1))[:, 1:]

    def step(self, step: Step) -> Tensor:
        """Logits `[rows, vocab]` of each row's last token, and the states move on; or a picture's embeddings."""
        decode = step.phase == "decode"
        with torch.no_grad():
            if step.phase == "vision":
                vision = self.config.vision
                assert vision is not None
                return vision_forward(self.params.vision, vision, step.inputs["vision.patches"], step.batch)
            images = [x for name, x in step.inputs.items() if name != "tokens"]
            logits, self.states = decoder.forward(
                self.params,
                self.config,
                step.inputs["tokens"],
                self.states,
                step.batch,
                step=decode,
                last_only=not decode,
                vision=(images[0], images[1]) if images else None,
            )
        return logits[:, 0]

    def named_states(self) -> dict[str, Tensor]:
        kinds = [layer.kinds[0] for layer in self.config.layers]
        return {
            f"s.layers.{i}.{kind}.{leaf}": value
            for i, (kind, state) in enumerate(zip(kinds, self.states, strict=True))
            for leaf, value in tree.items(state)
        }


class BoundGraphs:
    """The graphs of a bundle of one rank in the executor, with their weights. States are the caller's.

    Attributes:
        graphs: by phase.
        inputs: of each, those that stay: weights and what no checkpoint holds.
    """

    def __init__(self, bundle: Bundle, params: Any, mode: str, packed: Packed | None = None) -> None:
        self.mode = mode
        named = dict(tree.items(params))
        self.graphs: dict[str, Executor] = {}
        self.inputs: dict[str, dict[str, Tensor]] = {}
        for entry in bundle.manifest["graphs"]:
            model = air.from_bytes(bundle.graph_bytes(entry), entry["file"])
            constants = to_inputs(model, bundle.folder)
            self.graphs[entry["phase"]] = Executor(model)
            weights = graph_weights(bundle.weights, model, named, packed)
            if mode == "native":
                check_constants(constants, weights)
                weights = _written_ahead(bundle, model, weights)
            self.inputs[entry["phase"]] = weights | generated_inputs(bundle.weights)

    def run(self, phase: str, given: Mapping[str, Tensor], states: Mapping[str, Tensor], **options: Any) -> Ran:
        """A step.

        Args:
            given: inputs besides those that stay; ones that the graph has not are left out.
            states: all there are.
            options: those of `Executor.run`.

        Raises:
            BundleError: the graph reads what nobody gives; see `Executor.run`.
        """
        executor = self.graphs[phase]
        given = self.inputs[phase] | dict(given)
        missing = [name for name in executor.inputs if name not in given]
        if missing:
            raise BundleError(f"graph {phase}: nobody knows what its input {missing[0]!r} is.")
        inputs = {name: given[name] for name in executor.inputs}
        return executor.run(inputs, {name: states[name] for name in executor.states}, self.mode, **options)


class GraphSide(BoundGraphs):
    """The bundle's graphs in the executor, and their states."""

    def __init__(
        self, bundle: Bundle, config: ModelConfig, params: Any, mode: str, packed: Packed | None = None
    ) -> None:
        super().__init__(bundle, params, mode, packed)
        self.config, self.kv_dtype = config, bundle.manifest["state"]["kv_dtype"]
        self.states = {
            s["name"]: torch.zeros(
                s["graph_shape"], dtype=torch.float64 if mode == "exact" else getattr(torch, s["dtype"])
            )
            for s in bundle.manifest["state"]["states"]
        }

    @property
    def types(self) -> set[str]:
        """Operator types that run."""
        return set().union(*(g.types for g in self.graphs.values()))

    def selections(self) -> Selections:
        return Selections()

    def step(self, phase: str, given: Mapping[str, Tensor], selections: Selections, observe: Any = None) -> Tensor:
        """Logits `[rows, vocab]`; the states move on. `selections`: expert choices, recorded or replayed."""
        ran = self.run(phase, given, self.states, selections=selections, observe=observe)
        self.states |= ran.states
        return ran.outputs[0]

    def choices(self, phase: str, selections: Selections) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Of a replayed step, by layer: the keys that the graph selects itself, and those of the exact run."""
        for name, own in selections.own.items():
            if self.graphs[phase].nodes[name].type in SELECTORS:
                yield name, own[:, :, 0], selections.chosen[name][:, :, 0]

    def take(self, states: dict[str, Tensor]) -> None:
        """Start from the model's states."""
        for name, value in kept_states(self.config, self.kv_dtype, states, exact=self.mode == "exact").items():
            self.states[name].copy_(value.view(self.states[name].shape))

    def named_states(self) -> dict[str, Tensor]:
        """What the states hold, under the model's names; dimensions as the graphs have them."""
        return model_states(self.config, self.kv_dtype, self.states)


def make_sides(bundle: Bundle, config: ModelConfig, params: Mapping[str, Any], packed: Packed) -> dict[str, Any]:
    """The bundle's graphs in every mode: of one rank, or of all ranks of a mesh in lockstep."""
    if bundle.manifest["mesh"] is None:
        return {mode: GraphSide(bundle, config, p, mode, packed) for mode, p in params.items()}
    plan = Plan.read(bundle, config)
    return {mode: MeshSide(bundle, config, p, mode, packed.checkpoint, plan) for mode, p in params.items()}


def _narrow(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """A float64 input of the script in the graph's own dtype: angles and tables float32, pictures the model's."""
    if name in ("vision.values", "vision.patches"):
        return x.to(dtype)
    return x.float() if x.dtype == torch.float64 and name.startswith(("batch.", "tables.")) else x


# ---- comparison ------------------------------------------------------------------------------------------------------


def kind_of(name: str) -> str:
    """`s.layers.3.kda.memory` -> `kda.memory`."""
    return ".".join(name.split(".")[3:]) if name.startswith("s.") else name


def largest(a: Tensor, b: Tensor) -> float:
    """Largest difference over the largest value of `b`."""
    return _ratio((a.double() - b).abs().max(), b.abs().max())


def norm(a: Tensor, b: Tensor) -> float:
    """2-norm of the difference over the 2-norm of `b`."""
    return _ratio((a.double() - b).norm(), b.norm())


def _ratio(difference: Tensor, scale: Tensor) -> float:
    return float(difference / scale) if float(scale) else (math.inf if float(difference) else 0.0)


def native_tolerance(config: ModelConfig, experts: str = "plain") -> float:
    """How far a graph in the model's own dtype may be from the exact model, relative, in the 2-norm.

    Each rounding to a float of `p` bits of mantissa is off by at most 2^-p relative, by half of that in the mean; a
    layer rounds the residual stream through about 16 operators, and independent roundings add up as a square root.
    Where `experts` are multiplied with rows in E4M3, two roundings to 3 bits are added in every MoE layer.
    """
    squares = torch.finfo(config.dtype).eps ** 2 * 16 * len(config.layers)
    if experts in E4M3_ROWS:
        squares += (2**-4) ** 2 * 2 * sum(isinstance(layer.ffn, MoeConfig) for layer in config.layers)
    return math.sqrt(squares)


# Rounding of a cache to 8 bits, of its 2-norm, for numbers as normal ones are. int8: 128 of them reach 2.9 deviations,
# which are 127 steps, and a step rounds by 1 / sqrt(12) of it. float8: half a unit of 3 bits of mantissa is 2^-4 of
# the power of two, by 1 / sqrt(3) in the mean, and numbers are 1.5 times their power of two, some below the smallest.
CACHE_ROUNDING = {"bf16": 0.0, "int8": 0.0066, "fp8": 0.026}


def cache_tolerance(config: ModelConfig, kv_dtype: str, experts: str = "plain") -> float:
    """`native_tolerance` of a bundle whose caches have a dtype.

    What attention reads of a cache is off by its rounding, and so is what it adds to the stream; roundings of
    different layers are independent, and the last one is of the state that is compared.
    """
    layers = sum(map(quantised_layer, config.layers))
    return math.hypot(native_tolerance(config, experts), CACHE_ROUNDING[kv_dtype] * math.sqrt(layers + 1))


@dataclass
class Comparison:
    """Collects differences of one mode by kind of tensor. `bfloat16`: see `Row`."""

    mode: str
    tolerance: float
    measure: Callable[[Tensor, Tensor], float]
    bfloat16: float | None = None
    worst: dict[str, Row] = field(default_factory=dict)

    def add(self, name: str, where: str, graph: Tensor, model: Tensor) -> None:
        kind = kind_of(name)
        if graph.numel() != model.numel():
            raise VerifyError(f"{name} at {where}: the graph gives {list(graph.shape)}, the model {list(model.shape)}.")
        error = self.measure(graph.reshape(model.shape), model)
        old = self.worst.get(kind)
        count = 1 + (old.count if old else 0)
        if old is None or not (math.isnan(old.error) or error <= old.error):  # NaN is the worst of all, and stays
            where = f"{name}, {where}"
            old = Row(
                mode=self.mode, what=kind, count=count, error=error, tolerance=self.tolerance, where=where,
                bfloat16=self.bfloat16,
            )  # fmt: skip
        self.worst[kind] = dataclasses.replace(old, count=count)


@dataclass
class Overlaps:
    """Collects shares of keys by layer, and the shares that a selection at random would have."""

    shares: dict[str, list[float]] = field(default_factory=dict)
    chances: dict[str, list[float]] = field(default_factory=dict)

    def add(self, step: Step, choices: Iterable[tuple[str, Tensor, Tensor]]) -> None:
        """Of a replayed step: queries without a choice (they see no more keys than are selected) do not count."""
        for name, own, exact in choices:
            place = torch.arange(own.shape[1])
            seen = (step.batch.lengths - step.batch.counts)[:, None] + place + 1
            chose = (seen > own.shape[2]) & (place < step.batch.counts[:, None])
            layer, pairs = name.partition("/")[0], zip(exact[chose], own[chose], strict=True)
            self.shares.setdefault(layer, []).extend(float(torch.isin(e, o).double().mean()) for e, o in pairs)
            self.chances.setdefault(layer, []).extend((own.shape[2] / seen[chose]).tolist())

    def rows(self) -> list[Overlap]:
        """Of layers that had a choice."""
        return [
            Overlap(where=x, queries=len(f), worst=min(f), mean=sum(f) / len(f), chance=sum(self.chances[x]) / len(f))
            for x, f in self.shares.items()
            if f
        ]


class WeightLoss:
    """What it costs that a bundle keeps weights in another form: the model with the checkpoint's own weights beside."""

    def __init__(self, config: ModelConfig, bundle: Bundle, stored: Any, kept: Any) -> None:
        pairs = [(a, b) for a, b in zip(tree.leaves(stored), tree.leaves(kept), strict=True) if not torch.equal(a, b)]
        self.form: str = bundle.manifest["weights"]["experts"]
        self.weights = [norm(b, a) for a, b in pairs]
        self.model = ModelSide(config, bundle.manifest["state"], stored) if pairs else None
        self.logits: list[float] = []

    def step(self, step: Step, kept: Tensor) -> None:
        if self.model is not None and step.phase != "vision":
            self.logits.append(norm(kept[step.used], self.model.step(step)[step.used]))

    def notes(self) -> list[str]:
        if not self.logits:
            return []
        share, worst = sum(self.weights) / len(self.weights), max(self.logits)
        return [f"experts as {self.form} differ from the checkpoint's by {share:.2%}, logits by at most {worst:.2%}"]


def _check_finite(params: Any, checkpoint: Checkpoint) -> None:
    """Weights that are not numbers make every comparison one of nothing.

    Raises:
        VerifyError: naming a parameter that holds some.
    """
    for path, x in tree.items(params):
        if not bool(torch.isfinite(x).all()):
            bad = int((~torch.isfinite(x)).sum())
            raise VerifyError(f"{checkpoint.folder}: parameter {path} has {bad:,} values that are NaN or infinite.")


SMALL = 1 << 28  # bytes of weights: the fixtures


@contextlib.contextmanager
def enough_threads(weights: int) -> Iterator[None]:
    """Inside, a model of so many bytes of weights runs on one thread if it is small.

    Products of a fixture are over before other threads are awake, which spin meanwhile, and on a busy machine are
    waited for: 200 s in place of 24, and 40 s of CPU time in place of 5.
    """
    before = torch.get_num_threads()
    if weights < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compare(
    bundle: Bundle,
    config: ModelConfig,
    checkpoint: Checkpoint,
    modes: tuple[str, ...],
    steps: int,
    seed: int,
    notify: Notify,
    ran: Mapping[str, Any] | None = None,
) -> Report:
    """Run the script through the model and through the graphs of every mode, side by side.

    Args:
        ran: the graphs' side of every mode, where it is not run here (`verify_processes`).
    """
    stored = load_params(checkpoint, config, dtype=torch.float64)
    _check_finite(stored, checkpoint)
    packed = Packed(checkpoint, dict(tree.items(decoder.model_specs(config))))
    params = as_kept(bundle.weights, stored, packed)
    model = ModelSide(config, bundle.manifest["state"], params)
    both = {"exact": params, "native": load_params(checkpoint, config)}
    graphs = dict(ran) if ran is not None else make_sides(bundle, config, both, packed)
    kv_dtype, experts = bundle.manifest["state"]["kv_dtype"], bundle.manifest["weights"]["experts"]
    plain, allowed = (cache_tolerance(config, x, experts) for x in ("bf16", kv_dtype))
    overlaps = Overlaps()
    comparisons = {
        "exact": Comparison("exact", EXACT_TOLERANCE, largest),
        "native": Comparison("native", allowed, norm, None if kv_dtype == "bf16" else plain),
    }
    loss = WeightLoss(config, bundle, stored, params)
    if "native" not in modes:
        del graphs["native"]
    todo = list(script(bundle, config, steps, seed))
    phases = {g["phase"] for g in bundle.manifest["graphs"]}
    for index, step in enumerate(todo):
        notify("verify", index, len(todo))
        logits = model.step(step)
        loss.step(step, logits)
        if step.phase not in phases:  # a bundle without prefill starts from the model's own state
            for side in graphs.values():
                side.take(model.named_states())
            continue
        chosen = graphs["exact"].selections()
        for mode, side in graphs.items():
            selections = chosen if mode == "exact" else chosen.replay()
            found = side.step(step.phase, step.given(mode, config.dtype), selections)
            overlaps.add(step, side.choices(step.phase, selections))
            where = f"step {index} ({step.phase})"
            what = "embeddings" if step.phase == "vision" else "logits"
            comparisons[mode].add(what, where, found[step.used], logits[step.used])
            if step.phase == "vision":
                continue
            states = side.named_states()
            if states is None:  # of processes: after the last step
                continue
            for name, value in model.named_states().items():
                mine = states[name].reshape(value.shape)
                comparisons[mode].add(name, where, model.owned(name, mine), model.owned(name, value))
    types = sorted(graphs["exact"].types)
    rows = [row for mode in graphs if mode in modes for row in comparisons[mode].worst.values()]
    return Report(rows, len(todo), provenance_counts(types), notes=loss.notes(), overlaps=overlaps.rows())


def find_checkpoint(bundle: Bundle, given: Path | None, *, mapped: bool = True) -> Checkpoint:
    """The checkpoint named on the command line, or the one the bundle was compiled from.

    Raises:
        BundleError: neither is there.
    """
    local = bundle.folder / LOCAL
    if given is None and local.is_file():
        try:
            known = read_json(local)["checkpoint"]
        except (BundleError, KeyError, TypeError):
            known = None
        if not isinstance(known, str):
            raise BundleError(f"{local}: does not say where a checkpoint is; delete it, and give --checkpoint DIR.")
        given = Path(known)
        if not given.is_dir():
            raise BundleError(
                f"{local}: the checkpoint {given} is not there any more; say where it is with --checkpoint DIR."
            )
    if given is None:
        name = bundle.manifest["model"]["name"]
        raise BundleError(
            f"{bundle.folder}: compiled from a config alone, so there are no weights to run it with; "
            f"give --checkpoint DIR, or compile a fixture: kimi-graph fixture {name} -o DIR."
        )
    return Checkpoint.open(given, mapped=mapped)


def _check_steps(bundle: Bundle, steps: int) -> None:
    graphs = bundle.manifest["graphs"]
    least = 0 if any(g["phase"] == "prefill" for g in graphs) else 1
    room = row_capacity(bundle.manifest["state"], graphs[0]["rows"])
    if not least <= steps < room:
        raise VerifyError(
            f"--steps {steps}: {bundle.folder} takes {least} to {room - 1:,}; "
            f"a row holds {room:,} tokens, one of them a prompt."
        )


def _check_kernels(bundle: Bundle) -> None:
    """Raises VerifyError where the kernels that the twin would run are not those that the bundle has."""
    entry = bundle.manifest["kernels"]
    if entry is None:
        return
    here = kernels_entry({f"{KERNELS}/{name}": data for name, data in project_files().items()}, entry["operators"])
    differ = [n for n in sorted({**entry["files"], **here["files"]}) if entry["files"].get(n) != here["files"].get(n)]
    if differ:
        raise VerifyError(
            f"--kernels twin runs the kernels of this installation; {bundle.folder / differ[0]} is of another: compile "
            f"it again, or verify it with the version that made it ({bundle.manifest['made_by']['kimi_graph']})."
        )


def _compared(bundle: Bundle, *rest: Any) -> Report:
    with enough_threads(bundle.manifest["memory"]["weights"]):
        return compare(bundle, *rest)


def verify_bundle(
    folder: Path,
    *,
    checkpoint: Path | None = None,
    steps: int = 4,
    modes: tuple[str, ...] = ("exact", "native"),
    seed: int = 0,
    bisect: bool = False,
    processes: bool = False,
    kernels: Path | None = None,
    progress: Notify = silent,
) -> Report:
    """Execute a bundle and compare it with its model.

    Args:
        checkpoint: weights; None: those it was compiled from.
        steps: decode steps after the prefill.
        bisect: where something differs, name the first node.
        processes: of a mesh, run every rank in a process of its own.
        kernels: in native runs, run our operators that have a kernel by it, on the CPU twin; the folder for what is
            built.

    Raises:
        KimiGraphError: a damaged bundle, or weights that are not the model's.
    """
    bundle = open_bundle(folder)
    with as_written(folder):
        config = bundle_config(bundle)
        graphs = {g["name"]: air.from_bytes(bundle.graph_bytes(g), g["file"]) for g in bundle.manifest["graphs"]}
        check_claims(bundle, config, graphs)
        bundle.check_constants()
        bundle.kernels_state()
        _check_steps(bundle, steps)
    weights = find_checkpoint(bundle, checkpoint)
    check_checkpoint_model(bundle, weights.folder)
    if kernels is not None and (processes or "native" not in modes):
        raise VerifyError("--kernels twin: runs in this process and in native mode; leave --processes and --mode out.")
    if kernels is not None:
        _check_kernels(bundle)
        arch = ARCH[target(bundle.manifest["target"]["name"]).soc]
        with kernels_on_twin(arch, kernels) as ours:
            report = _compared(bundle, config, weights, modes, steps, seed, progress)
        report.notes.append(str(ours))
    elif not processes:
        report = _compared(bundle, config, weights, modes, steps, seed, progress)
    else:
        from .verify_processes import Processes  # whose processes read this module

        if bundle.manifest["mesh"] is None:
            raise VerifyError(f"--processes: {bundle.folder} is of one rank; compile it with --mesh.")
        if "prefill" not in {g["phase"] for g in bundle.manifest["graphs"]}:
            raise VerifyError("--processes: needs a bundle with prefill; its ranks start from nothing.")
        with Processes(bundle, config, weights, steps, seed) as ran:
            report = _compared(bundle, config, weights, modes, steps, seed, progress, ran)
            report.notes.append(f"{bundle.manifest['mesh']['ranks']} ranks, each in a process of its own, over gloo")
    if bisect and not report.passed and bundle.manifest["mesh"] is not None:
        report.difference = (
            "--bisect names a node of a bundle of one rank, this one is of a mesh: compile it without --mesh as well, "
            "where a wrong lowering differs too."
        )
    elif bisect and not report.passed:
        from .bisect import first_difference

        params = load_params(find_checkpoint(bundle, checkpoint), config, dtype=torch.float64)
        report.difference = first_difference(bundle, config, params, list(script(bundle, config, steps, seed)))
    return report
