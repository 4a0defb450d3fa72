"""`kimi-graph shard`: what every rank of a mesh holds, from a config alone, or why the mesh cannot be.

Placements come from rules (`parallel/presets.py`), stages from the model's schedule, collectives from tracing each kind
of part once on meta tensors. No weights are read.
"""

import dataclasses
import difflib
import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import formats, tree
from .checkpoint import released_formats
from .compile.phases import Bucket, pools, sharded_piece_tracer, uses
from .compile.targets import GIB, target
from .config import KdaConfig, MlaConfig, ModelConfig, check_length
from .display import Html, card, columns, fold, table, tag
from .errors import ShardingError
from .models.counts import PARTS, part_of
from .models.decoder import is_sparse, model_specs, state_specs
from .models.pipeline import model_stages, stages_of
from .ops.attention import latent_heads
from .parallel import legality
from .parallel.collectives import Issued
from .parallel.experts import buffer_bytes, capacity, no_pair
from .parallel.legality import Size, faults, sizes_of
from .parallel.links import DOMAINS, domains_spanned
from .parallel.mesh import FLAGS, NAMES, Axes, Mesh
from .parallel.placement import Placement, place
from .parallel.presets import directions, preset
from .parallel.rules import Rules
from .parallel.stages import Stage
from .read_config import load_config
from .spec import ParamSpec

PAGE, CHUNK, MAX_LEN = 128, 512, 4096  # tokens of a page, of a prefill step, and of the longest sequence unless told
PATCHES = 4096  # of a picture
LIKE = {"data": "rows of a batch are split, not weights", "context": "tokens are split, not weights"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to place, and on what.

    Attributes:
        phase: "vision", "prefill" or "decode".
        target: whose links and memory it is held against.
        pad: axes that may be padded are.
        batch: sequences of all ranks together; None: one for each of `data`.
        max_len: longest sequence, tokens.
        exchange, split_cache: see `presets.preset`.
        changes: logical axes with another rule than the preset's, see `Rules.changed`.
    """

    config: ModelConfig
    mesh: Mesh
    phase: str = "decode"
    target: str = "a3"
    pad: bool = False
    batch: int | None = None
    max_len: int | None = None
    exchange: bool = False
    split_cache: bool = False
    changes: Mapping[str, str | Axes | None] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Sequences of all ranks together."""
        return self.mesh.data if self.batch is None else self.batch

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return min(MAX_LEN, self.config.max_len) if self.max_len is None else self.max_len

    def rules(self, mesh: Mesh | None = None) -> Rules:
        """The rules of the phase; on another mesh where one is given.

        Raises:
            ShardingError: a changed rule names an axis that the model does not have.
        """
        made = mesh or self.mesh
        rules = preset(self.config, made, self.phase, exchange=self.exchange, split_cache=self.split_cache)
        for axis in self.changes:
            if axis not in rules.mapping:
                near = difflib.get_close_matches(axis, rules.mapping, n=1, cutoff=0.0)[0]
                raise ShardingError(f"rules: {self.config.name} has no logical axis {axis!r}; the nearest is {near!r}.")
        return rules.changed(**self.changes)


# ---- the plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Parameters or states of one kind: the same name in several layers, the same shape and placement.

    Attributes:
        name: `layers.*.kda.query`.
        part: as in `Counts.parts`, or "kda states", "mla states".
        paths: all of them.
    """

    name: str
    part: str
    paths: tuple[str, ...]
    placement: Placement

    @property
    def bytes(self) -> int:
        """Of all of them on the ranks that hold them, once per stage."""
        return self.placement.bytes * len(self.paths)


@dataclass(frozen=True, kw_only=True)
class StageUse:
    """What a rank of one stage holds, in bytes: weights, the same as released, and states."""

    stage: Stage
    mixers: dict[str, int]
    weights: int
    released: int
    states: int


@dataclass(frozen=True, kw_only=True)
class PartUse:
    """What crosses devices in one kind of part ("kda", "moe", "embed").

    Attributes:
        count: how often a step has the part.
        issued: its collectives in order.
        refused: why the part cannot run on this mesh, with the author's line; empty where it can.
    """

    part: str
    count: int
    issued: tuple[Issued, ...] = ()
    refused: str = ""

    @property
    def bytes(self) -> int:
        """What a rank gives to the collectives of one such part."""
        return sum(i.bytes for i in self.issued)


@dataclass(frozen=True, kw_only=True)
class RankUse:
    """What one rank holds, in bytes.

    Attributes:
        stage: of the pipeline.
        at: where the rank is along each mesh axis.
        parts: by kind of part ("experts", "kda", "mla states"), most first.
        weights, states: their sums.
    """

    rank: int
    stage: int
    at: Mapping[str, int]
    parts: Mapping[str, int]

    @property
    def states(self) -> int:
        """Bytes of KDA memories and caches."""
        return sum(size for part, size in self.parts.items() if part.endswith(" states"))

    @property
    def weights(self) -> int:
        """Bytes of parameters."""
        return sum(self.parts.values()) - self.states

    def __repr__(self) -> str:
        return "\n".join([self._said, *(f"  {line}" for line in columns(self._rows))])

    def _repr_html_(self) -> Html:
        return card(self._said, table(self._rows))

    @property
    def _said(self) -> str:
        held = f"{amount(self.weights)} of weights, {amount(self.states)} of states"
        return f"rank {self.rank} of stage {self.stage}: {held}"

    @property
    def _rows(self) -> list[tuple[str, str]]:
        return [("part", "bytes"), *((part, f"{size:,}") for part, size in self.parts.items())]


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """A model on a mesh. `rank(3)` says what a rank holds, `placement("embed")` where a parameter is.

    Attributes:
        parameters, states: by kind, in reading order.
        whole: what is the same along a direction: (direction, why, parts, bytes of a copy).
        collectives: of each kind of part that has any, or that cannot run.
    """

    request: Request
    rules: Rules
    parameters: tuple[Kind, ...]
    states: tuple[Kind, ...]
    stages: tuple[StageUse, ...]
    whole: tuple[tuple[str, str, tuple[str, ...], int], ...]
    collectives: tuple[PartUse, ...]
    notes: tuple[str, ...]

    @property
    def summary(self) -> str:
        r = self.request
        most = max(s.weights for s in self.stages)
        ranks = "one rank" if r.mesh.world == 1 else f"{r.mesh.world:,} ranks"
        return f"{r.config.name} on {r.mesh}: {ranks}, at most {amount(most)} of weights each"

    @property
    def die(self) -> int:
        """Bytes of memory that a rank has on the target."""
        return target(self.request.target).memory_bytes

    def rank(self, rank: int) -> RankUse:
        """What a rank holds, by part.

        Raises:
            ShardingError: there is no such rank.
        """
        mesh = self.request.mesh
        at, stages = mesh.coordinates(rank), [use.stage for use in self.stages]
        stage, held = rank // mesh.stage.world, Counter[str]()
        for kind in (*self.parameters, *self.states):
            here = sum(stage in stages_of(path, self.request.config, stages) for path in kind.paths)
            held[kind.part] += here * kind.placement.bytes
        return RankUse(rank=rank, stage=stage, at=at, parts={p: n for p, n in held.most_common() if n})

    def placement(self, name: str) -> Placement:
        """Where a parameter or state is, by its path (`layers.3.kda.query`, `s.layers.3.kda.memory`).

        Raises:
            ShardingError: there is none of that name.
        """
        kinds = {path: kind for kind in (*self.parameters, *self.states) for path in kind.paths}
        if name not in kinds:
            near = ", ".join(_near(name, [*kinds]))
            raise ShardingError(f"{self.request.config.name} has no parameter {name!r}; nearest: {near}.")
        return dataclasses.replace(kinds[name].placement, path=name)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> Html:
        title, about = _head(self)
        body = [table(_stage_rows(self)), _collective_table(self.collectives)]
        body += [fold("parameters", _kind_table("parameter", self.parameters))]
        body += [fold("states", _kind_table("state", self.states))]
        if self.whole:
            body.append(fold("what several ranks hold alike, and why", table(_whole_rows(self.whole))))
        return card(title, tag("div", about), *body, *(tag("div", f"note: {note}") for note in self.notes))

    def text(self) -> str:
        lines = [
            *_head(self),
            "",
            *columns(_kind_rows("parameter", self.parameters)),
            "",
            *columns(_kind_rows("state", self.states)),
        ]
        if self.whole:
            lines += ["", *columns(_whole_rows(self.whole))]
        lines += ["", *columns(_stage_rows(self)), ""]
        lines += [*_collective_lines(self.collectives), ""]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_json(self) -> Any:
        r, mesh = self.request, self.request.mesh
        return {
            "model": r.config.name,
            "phase": r.phase,
            "target": r.target,
            "mesh": {"text": str(mesh), "ranks": mesh.world, "axes": dict(mesh.axes), "experts": mesh.experts},
            "rules": {
                name: {"axes": list(self.rules.on(name)), "why": self.rules.why.get(name, "")}
                for name in self.rules.mapping
            },
            "padding": [{"axis": a, "size": n, "physical": p} for (a, n), p in self.rules.padding.items()],
            "parameters": [_kind_json(k) for k in self.parameters],
            "states": [_kind_json(k) for k in self.states],
            "whole": [{"along": d, "why": w, "parts": list(p), "bytes": n} for d, w, p, n in self.whole],
            "stages": [_stage_json(s) for s in self.stages],
            "collectives": [_part_json(part) for part in self.collectives],
            "notes": list(self.notes),
        }


def shard_plan(
    config: ModelConfig | str,
    mesh: Mesh | str,
    *,
    phase: str = "decode",
    target: str = "a3",
    rules: Mapping[str, str | Axes | None] | None = None,
    pad: bool = False,
    batch: int | None = None,
    max_len: int | None = None,
    exchange: bool = False,
    split_cache: bool = False,
) -> ShardPlan:
    """What every rank of a mesh holds and sends, from a config alone.

    Args:
        config: or what `load_config` takes.
        mesh: or its text, `pp=4,tp=32`.
        rules: logical axes with a rule of their own: `{"vocab": None}` keeps the vocabulary whole on every rank,
            `{"heads": "data"}` splits heads over data. All others keep theirs.
        phase, target, pad, batch, max_len, exchange, split_cache: see `Request`.

    Returns:
        placements, bytes of ranks, and collectives. What the rules make impossible for one part is said there
        (`PartUse.refused`).

    Raises:
        ShardingError: sizes that do not divide, all of them; a phase, axis or rule that is not there.
        ConfigError: a length that cannot be.
        CompileError: a target that is not known.
    """
    return shard_model(
        Request(
            config=config if isinstance(config, ModelConfig) else load_config(config),
            mesh=Mesh.parse(mesh) if isinstance(mesh, str) else mesh,
            phase=phase,
            target=target,
            changes=rules or {},
            pad=pad,
            batch=batch,
            max_len=max_len,
            exchange=exchange,
            split_cache=split_cache,
        )
    )


def shard_model(request: Request) -> ShardPlan:
    """What every rank holds.

    Raises:
        ShardingError: sizes that do not divide, all of them; more stages than layers; a phase the model has not.
        ConfigError: a length that cannot be.
        CompileError: a target that is not known.
    """
    target(request.target)
    c, mesh = request.config, request.mesh
    rules, specs = request.rules(), dict(tree.items(model_specs(c)))
    _check_experts(c, rules, request.exchange)
    sizes = sizes_of(specs, c.dtype)
    rules = rules.padded(legality.pad(sizes, rules) if request.pad else {})
    if found := faults([*sizes, *_chosen(request)], rules):
        raise ShardingError(_refusal(request, sizes, found))
    pages = _sequence_pages(request, rules)
    stages = model_stages(c, mesh.pipe, sparse=is_sparse(c, pages * PAGE))
    params = {path: place(path, spec, rules, c.dtype) for path, spec in specs.items()}
    states = _place_states(request, rules, pages)
    parameters, kinds = (
        _kinds(params, part_of, reading=True),
        _kinds(states, lambda path: f"{path.split('.')[3]} states"),
    )
    return ShardPlan(
        request=request,
        rules=rules,
        parameters=parameters,
        states=kinds,
        stages=tuple(_stage_uses(c, stages, params, states, _released(c, specs))),
        whole=tuple(_whole([*parameters, *kinds], rules)),
        collectives=tuple(collectives_of(request, rules, pages)),
        notes=tuple(_notes(request, rules, stages, params, states, pages)),
    )


def collectives_of(r: Request, rules: Rules, pages: int) -> Iterator[PartUse]:
    """What crosses devices in each kind of part, by tracing it once where it is first."""
    c, bucket = r.config, _bucket(r, rules, pages)
    trace, schedule = sharded_piece_tracer(c, bucket, rules), uses(c, bucket)
    first = {_kind_of(use.part): use for use in reversed(schedule)}
    counts = Counter(_kind_of(use.part) for use in schedule)
    for part in dict.fromkeys(_kind_of(use.part) for use in schedule):
        try:
            issued = tuple(trace(first[part]).collectives)
        except ShardingError as error:
            yield PartUse(part=part, count=counts[part], refused=str(error))
        else:
            if issued:
                yield PartUse(part=part, count=counts[part], issued=issued)


def _kind_of(part: str) -> str:
    """A part without the number of blocks that it mixes: they are alike in what crosses devices."""
    return part.rstrip("0123456789")


def _bucket(r: Request, rules: Rules, pages: int) -> Bucket:
    """The shapes of a step, of all ranks together."""
    slots, pool = _pools(r, rules, pages)
    tokens = {"vision": PATCHES, "prefill": _chunk(r), "decode": 1}[r.phase]
    return Bucket(
        phase=r.phase, rows=r.rows, tokens=tokens, page=PAGE, pages=pool, sequence_pages=pages, slots=slots,
        images=0 if r.config.vision is None else PATCHES // math.prod(r.config.vision.merge),
    )  # fmt: skip


def _chosen(r: Request) -> Iterator[Size]:
    """Sizes that the command line chooses."""
    yield Size(axis="batch", size=r.rows, path="--batch", count=0)
    tokens = 1 if r.phase == "decode" else _chunk(r)
    if r.exchange and r.rows % r.mesh.data == 0:
        yield Size(axis="token", size=r.rows * tokens, path="--batch", count=0)


def _chunk(r: Request) -> int:
    """Tokens of a prefill step, as many on each rank that has queries (those of an indexer are over tensor too)."""
    indexed = any(isinstance(m, MlaConfig) and m.indexer for m in _mixers(r.config))
    unit = r.mesh.context * (r.mesh.tensor if indexed else 1)
    return -(-CHUNK // unit) * unit


def _check_experts(c: ModelConfig, rules: Rules, exchange: bool) -> None:
    """Copies divide over ranks, and chunks are of rows that are sent."""
    moe = c.moe
    if moe is not None and moe.redundant:
        legality.check_redundant(moe.experts, moe.redundant, rules.ways("experts"))
    if moe is not None and moe.chunks > 1 and not exchange:
        raise ShardingError(f"--moe-chunks {moe.chunks}: rows are sent to their experts with --exchange alone.")


def _refusal(r: Request, sizes: list[Size], found: list[legality.Fault]) -> str:
    return legality.refusal(r.config.name, r.mesh, sizes, found, r.rules)


# ---- states ----------------------------------------------------------------------------------------------------------


def _sequence_pages(r: Request, rules: Rules) -> int:
    """Pages of a sequence: whole ones, the same number on each rank that has a part of it."""
    ways = rules.ways("cached")
    return -(-check_length(r.config, r.length, PAGE).pages // ways) * ways


def _place_states(r: Request, rules: Rules, pages: int) -> dict[str, Placement]:
    """States of all layers."""
    slots, pool = _pools(r, rules, pages)
    specs = state_specs(r.config, slots=slots, pages=pool, page=PAGE, dtype=r.config.dtype)
    kinds = [layer.kinds[0] for layer in r.config.layers]
    named = {f"s.layers.{i}.{kinds[i]}": s for i, s in enumerate(specs)}
    return {
        f"{prefix}.{path}": place(f"{prefix}.{path}", spec, rules, r.config.dtype)
        for prefix, s in named.items()
        for path, spec in tree.items(s)
    }


def _pools(r: Request, rules: Rules, pages: int) -> tuple[int, int]:
    """Slots and pages of all ranks."""
    return pools(rules, r.rows, pages)


# ---- by kind and by stage --------------------------------------------------------------------------------------------


def _kinds(placed: dict[str, Placement], part: Any, *, reading: bool = False) -> tuple[Kind, ...]:
    found: dict[Any, list[str]] = {}
    for path, p in placed.items():
        name = re.sub(r"\.\d+\.", ".*.", path)
        found.setdefault((name, p.shape, p.dims, p.dtype), []).append(path)
    kinds = [
        Kind(
            name=name if len(paths) > 1 else paths[0],
            part=part(paths[0]),
            paths=tuple(paths),
            placement=placed[paths[0]],
        )
        for (name, *_), paths in found.items()
    ]
    return tuple(sorted(kinds, key=lambda k: PARTS.index(k.part)) if reading else kinds)


def _released(c: ModelConfig, specs: Mapping[str, ParamSpec]) -> dict[str, float]:
    """Of parameters that the released file has quantised: their bytes there, in bytes of the model's dtype."""

    @functools.cache
    def share(form: str, stored: tuple[int, ...]) -> float:
        parts = formats.layout(form, stored).values()
        return sum(math.prod(shape) * d.itemsize for d, shape in parts) / (math.prod(stored) * c.dtype.itemsize)

    return {path: share(form, specs[path].stored) for path, form in released_formats(c, specs).items()}


def _stage_uses(
    c: ModelConfig,
    stages: list[Stage],
    params: dict[str, Placement],
    states: dict[str, Placement],
    released: dict[str, float],
) -> Iterator[StageUse]:
    weights, stored, held = Counter[int](), Counter[int](), Counter[int]()
    for path, p in params.items():
        for stage in stages_of(path, c, stages):
            weights[stage] += p.bytes
            stored[stage] += round(p.bytes * released.get(path, 1.0))
    for path, p in states.items():
        (stage,) = stages_of(path, c, stages)
        held[stage] += p.bytes
    for s in stages:
        mixers = Counter(c.layers[i].kinds[0] for i in s.layers)
        yield StageUse(
            stage=s,
            mixers=dict(sorted(mixers.items())),
            weights=weights[s.index],
            released=stored[s.index],
            states=held[s.index],
        )


def _whole(kinds: Sequence[Kind], rules: Rules) -> Iterator[tuple[str, str, tuple[str, ...], int]]:
    """What is the same on several ranks, by direction and reason."""
    found: dict[tuple[str, str], tuple[dict[str, None], int]] = {}
    for kind in kinds:
        for direction in directions(rules.mesh, kind.placement.whole_over):
            key = direction, _why_along(direction, kind, rules)
            parts, size = found.get(key, ({}, 0))
            found[key] = parts | {kind.part: None}, size + kind.bytes
    for (direction, why), (parts, size) in sorted(found.items(), key=lambda item: NAMES.index(item[0][0])):
        yield direction, why, tuple(parts), size


def _why_along(direction: str, kind: Kind, rules: Rules) -> str:
    """Why ranks along a direction hold the same of a parameter or state: the reason of its first axis that says so."""
    p = kind.placement
    if "experts" in p.axes and direction != "context":
        return f"ep={rules.mesh.experts}: experts are split over the inner part, and copied over the rest"
    pool = next((axis for axis in p.axes if axis in ("slots", "pages")), "")
    if direction in LIKE:
        return rules.why[pool] if pool else LIKE[direction]
    whole = [axis for axis, over in zip(p.axes, p.dims, strict=True) if axis not in ("_", pool) and not over]
    return rules.why.get(next(iter(whole), pool), "it has no axis to be split by")


def _notes(
    r: Request,
    rules: Rules,
    stages: list[Stage],
    params: dict[str, Placement],
    states: dict[str, Placement],
    pages: int,
) -> Iterator[str]:
    yield from _crossings(r)
    for (axis, size), physical in rules.padding.items():
        yield f"padded: {axis} {size:,} -> {physical:,}, {_PADDED[axis]}"
    yield from _expert_notes(r, rules)
    tower = ("vision_heads", "vision_ffn") if r.config.vision is not None and r.mesh.tensor > 1 else ()
    for why in dict.fromkeys(rules.why[axis] for axis in tower if not rules.on(axis)):
        yield f"vision: {why}"
    wanted = check_length(r.config, r.length, PAGE).pages
    if pages != wanted:
        yield f"caches: {wanted:,} pages of a sequence rounded up to {pages:,}, the same on each of its ranks"
    yield from _padded_heads(r, rules, pages)
    yield from _memory_notes(r, stages, params, states)


def _padded_heads(r: Request, rules: Rules, pages: int) -> Iterator[str]:
    """Heads of a rank that the target's attention does not take as they are, of a step or of selected keys."""
    selects = r.phase != "vision" and is_sparse(r.config, pages * PAGE)
    if r.phase != "decode" and not selects:
        return
    sparse = selects and (r.phase == "prefill" or rules.ways("cached") == 1)  # parts of a cache are merged densely
    on, ways = target(r.target), rules.ways("attn_heads" if r.phase == "decode" else "heads")
    for n in sorted({m.heads // ways for m in _mixers(r.config) if isinstance(m, MlaConfig)}):
        if (more := latent_heads(n, on.soc, on.cann, sparse=sparse)) != n:
            name = "SparseFlashAttention" if sparse else "FusedInferAttentionScore"
            words = f"{n} heads of a rank padded to {more} and stripped, {more / n - 1:.0%} more queries"
            yield f"attention: {name} of {r.target} takes powers of two: {words}"


_PADDED = {
    "vocab": "zeros; logits of what is added are minus infinity",
    "experts": "zeros; the router does not know what is added",
}


def _expert_notes(r: Request, rules: Rules) -> Iterator[str]:
    """How rows come to experts, and where copies of experts are."""
    moe = r.config.moe
    if moe is None:
        return
    ways, slots = rules.ways("experts"), rules.physical("experts", moe.slots)
    if moe.redundant:
        yield (
            f"experts: {moe.experts:,} and {moe.redundant:,} copies in {moe.slots:,} slots, {slots // ways:,} a rank; "
            f"layers.*.moe.table, an input of {4 * moe.table:,} bytes, says which are where"
        )
    if not r.exchange or ways == 1:
        return
    tokens = 1 if r.phase == "decode" else _chunk(r)
    own = -(-r.rows * tokens // rules.ways("token"))
    chunks = min(moe.chunks, own)
    rows = -(-own // chunks)
    sizes = rows, moe.latent or r.config.embed, moe.top_k, ways, slots // ways
    if why := no_pair(target(r.target), *sizes):
        yield f"exchange: every rank reads all rows of its group, since CANN's fused pair cannot: {why}"
        return
    size = -(-buffer_bytes(*sizes) // 2**20)
    parts = f", {chunks} chunks of them" if chunks > 1 else ""
    yield (
        f"exchange: MoeDistributeDispatchV2 and MoeDistributeCombineV2, {rows:,} rows of a rank{parts}, "
        f"up to {capacity(rows, moe.top_k, ways, slots // ways):,} come; HCCL_BUFFSIZE of {size:,} or more"
    )


def _crossings(r: Request) -> Iterator[str]:
    """Directions whose collectives leave a host; stages only hand on, and rows of a batch do not meet."""
    domain, spans = DOMAINS[r.target], domains_spanned(r.mesh, r.target)
    for flag, name in FLAGS.items():
        count = spans.get(name, 1)
        if name in ("pipe", "data") or count == 1 or (name == "experts" and r.mesh.experts == r.mesh.tensor):
            continue
        size = getattr(r.mesh, name)
        spanned = f"{count} {domain.name}s of {domain.dies} dies"
        yield f"{flag}={size} crosses {domain.name}s: a group spans {spanned} ({r.target})"


def _memory_notes(
    r: Request, stages: list[Stage], params: dict[str, Placement], states: dict[str, Placement]
) -> Iterator[str]:
    memory = target(r.target).memory_bytes
    held = Counter[int]()
    for path, p in [*params.items(), *states.items()]:
        for stage in stages_of(path, r.config, stages):
            held[stage] += p.bytes
    most = max(held.values())
    if most > memory:
        yield (
            f"does not fit: weights and states take up to {amount(most)} of a die, {r.target} has "
            f"{memory / GIB:.0f} GiB; activations and buffers come on top"
        )


def _mixers(c: ModelConfig) -> list[KdaConfig | MlaConfig]:
    return [layer.mixer for layer in c.layers]


# ---- one parameter ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Explained:
    """Every step from a parameter's spec to the ranks that hold it."""

    request: Request
    rules: Rules
    spec: ParamSpec
    placement: Placement
    stages: tuple[Stage, ...]

    @property
    def summary(self) -> str:
        return f"{self.placement.path} on {self.request.mesh}"

    def text(self) -> str:
        p, spec, mesh = self.placement, self.spec, self.rules.mesh
        first, *others = spec.source
        source = f", from {first}" + (f" and {len(others):,} more" if others else "") if first else ", a state"
        dtype = str(p.dtype).removeprefix("torch.")
        rows = [("dim", "axis", "size", "rule", "split over", "of a rank", "why")]
        for d, (axis, size) in enumerate(zip(p.axes, p.shape, strict=True)):
            split = " x ".join(f"{a}={mesh.axes[a]}" for a in p.dims[d]) or "-"
            rule = "-" if axis == "_" else " x ".join(self.rules.mapping[axis]) or "whole"
            rows.append((str(d), axis, f"{size:,}", rule, split, f"{p.local[d]:,}", self.rules.why.get(axis, "")))
        whole = math.prod(p.shape) * p.dtype.itemsize
        lines = [f"{p.path}: {list(p.given)} {dtype}{source}"]
        if p.shape != p.given:
            lines.append(f"padded    to {list(p.shape)}")
        lines += ["", *columns(rows), "", f"placement {p}"]
        lines.append(f"of a rank {list(p.local)}, {p.bytes:,} bytes of {whole:,}")
        for s in self.stages:
            ranks = range(s.index * mesh.stage.world, (s.index + 1) * mesh.stage.world)
            layers = f"layers {s.layers[0]} to {s.layers[-1]}"
            lines.append(f"stage     {s.index} of {mesh.pipe} ({layers}): {ranks_text(ranks)}")
            lines += [f"  {line}" for line in self._holders(ranks[0])]
        return "\n".join(lines)

    def _holders(self, first: int) -> list[str]:
        """Which part lies where: all parts, or the first and the last of many."""
        groups = self._groups()
        shown = groups if len(groups) <= 8 else [*groups[:3], None, groups[-1]]
        lines = []
        for group in shown:
            if group is None:
                lines.append(f"... {len(groups) - 4:,} more parts")
                continue
            parts = [
                f"{axis} {own.start:,} to {own.stop - 1:,}"
                for d, axis in enumerate(self.placement.axes)
                if len(own := self.placement.own(d, group[0])) < self.placement.shape[d]
            ]
            where = ranks_text([first + rank for rank in group])
            lines.append(f"{', '.join(parts) or 'all of it'}: {where}")
        return lines

    def _groups(self) -> list[list[int]]:
        """Ranks of a stage that hold the same, by the part they hold."""
        stage = dataclasses.replace(self.placement, mesh=self.rules.mesh.stage)
        return stage.mesh.groups(stage.whole_over)

    def to_json(self) -> Any:
        p = self.placement
        return {
            "path": p.path,
            "source": list(self.spec.source),
            "dtype": str(p.dtype).removeprefix("torch."),
            "dims": [
                {"axis": a, "size": n, "over": list(over), "local": m, "why": self.rules.why.get(a, "")}
                for a, n, over, m in zip(p.axes, p.shape, p.dims, p.local, strict=True)
            ],
            "bytes": p.bytes,
            "replicas": p.replicas,
            "stages": [s.index for s in self.stages],
            "holders": self._groups(),
        }


def explain_parameter(request: Request, name: str) -> Explained:
    """How one parameter or state comes to lie where it does.

    Raises:
        ShardingError: there is none of that name; it cannot be placed, and why.
    """
    c, rules = request.config, request.rules()
    _check_experts(c, rules, request.exchange)
    specs = dict(tree.items(model_specs(c)))
    sizes = sizes_of(specs, c.dtype)
    rules = rules.padded(legality.pad(sizes, rules) if request.pad else {})
    states = _place_states(request, rules, _sequence_pages(request, rules)) if name not in specs else {}
    if name not in specs and name not in states:
        raise ShardingError(
            f"{c.name} has no parameter {name!r}; nearest: {', '.join(_near(name, [*specs, *states]))}."
        )
    stages = model_stages(c, request.mesh.pipe)
    if name in states:
        placement = states[name]
        spec = ParamSpec(
            shape=placement.given, axes=placement.axes, source=("",), stored=placement.given, dtype=placement.dtype
        )
    else:
        spec = specs[name]
        if found := faults(sizes_of({name: spec}, c.dtype), rules):
            raise ShardingError(_refusal(request, sizes, [*found]))
        placement = place(name, spec, rules, c.dtype)
    held = tuple(stages[i] for i in stages_of(name, c, stages))
    return Explained(request=request, rules=rules, spec=spec, placement=placement, stages=held)


def _near(name: str, names: list[str]) -> list[str]:
    """Names like one that is not there, of the same layer where it has one."""
    place = re.match(r"(s\.)?(layers|vision\.blocks)\.\d+\.", name)
    own = [n for n in names if place and n.startswith(place[0])]
    return difflib.get_close_matches(name, own or names, n=3, cutoff=0.0)


# ---- meshes of N devices ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Meshes:
    """Legal meshes of so many devices, each with the bytes of weights of its fullest rank."""

    request: Request
    devices: int
    meshes: tuple[tuple[Mesh, int], ...]

    @property
    def summary(self) -> str:
        return f"{len(self.meshes)} meshes of {self.devices:,} devices for {self.request.config.name}"

    def text(self) -> str:
        memory = target(self.request.target).memory_bytes
        c = self.request.config
        experts = c.moe.experts if c.moe else 0
        heads = max(m.heads for m in _mixers(c))
        rows = [("mesh", "heads", "experts", "layers", "weights of a rank", f"fits {self.request.target}")]
        for mesh, size in self.meshes:
            fits = "yes" if size <= memory else "no"
            layers = f"{math.ceil(len(c.layers) / mesh.pipe):,}"
            rows.append(
                (str(mesh), str(heads // mesh.tensor), str(experts // mesh.experts), layers, amount(size), fits)
            )
        tail = "heads and experts of a rank, layers of a stage; weights alone, without states and activations"
        return "\n".join([*columns(rows), "", tail])

    def to_json(self) -> Any:
        return [{"mesh": str(mesh), "weights_bytes": size} for mesh, size in self.meshes]


def meshes_of(request: Request, devices: int) -> Meshes:
    """The legal meshes of a model, fewest stages first."""
    c = request.config
    specs = model_specs(c)
    legal = legality.legal_meshes(sizes_of(specs, c.dtype), devices, request.rules, stages=len(c.layers))
    return Meshes(
        request=request,
        devices=devices,
        meshes=tuple((mesh, _fullest(c, specs, mesh, request.rules(mesh))) for mesh in legal),
    )


def legal_meshes(config: ModelConfig, devices: int) -> list[Mesh]:
    """Every mesh of so many devices on which a model can be, without context parallelism and padding."""
    return [mesh for mesh, _ in meshes_of(Request(config=config, mesh=Mesh()), devices).meshes]


def _fullest(c: ModelConfig, specs: Any, mesh: Mesh, rules: Rules) -> int:
    """Bytes of weights of a rank of the fullest stage; layers that are configured alike are placed once."""
    stages = model_stages(c, mesh.pipe)

    def size(part: Any) -> int:
        return 0 if part is None else sum(place("", s, rules, c.dtype).bytes for s in tree.leaves(part) if s)

    by_kind = {layer: size(specs.layers[i]) for i, layer in reversed(list(enumerate(c.layers)))}
    held = [sum(by_kind[c.layers[i]] for i in s.layers) for s in stages]
    held[0] += size(specs.embed) + size(specs.vision)
    held[-1] += size(specs.out_res) + size(specs.norm) + size(specs.head)
    if c.tied and len(held) > 1:
        held[-1] += size(specs.embed)
    return max(held)


# ---- text ------------------------------------------------------------------------------------------------------------


def amount(size: float) -> str:
    """Bytes for a reader: `43.55 GB`."""
    unit, name = next(((u, n) for u, n in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")) if size >= u), (1e3, "KB"))
    return f"{size / unit:.2f} {name}"


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 to 31`, `ranks 0, 8, 16, ... (32)`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]:,}"
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))) and len(ranks) > 2:
        return f"ranks {ranks[0]:,} to {ranks[-1]:,}"
    shown = ", ".join(f"{r:,}" for r in ranks[:4])
    return f"ranks {shown}" + (f", ... ({len(ranks)})" if len(ranks) > 4 else "")


def _few(words: Sequence[str]) -> str:
    return ", ".join(words if len(words) <= 5 else [*words[:4], f"... ({len(words)})"])


def _head(plan: ShardPlan) -> list[str]:
    r, mesh = plan.request, plan.request.mesh
    sizes = " x ".join(f"{name} {getattr(mesh, name)}" for name in NAMES if getattr(mesh, name) > 1) or "one device"
    dtype = str(r.config.dtype).removeprefix("torch.")
    return [
        f"{r.config.name} on {mesh}, {r.phase}: {mesh.world:,} ranks = {sizes}; ep={mesh.experts}",
        f"weights as {dtype} (dequantised at load); {r.rows:,} {'sequence' if r.rows == 1 else 'sequences'} of at most "
        f"{r.length:,} tokens in pages of {PAGE}",
    ]


def _kind_row(kind: Kind) -> tuple[str, ...]:
    p = kind.placement
    local = "x".join(map(str, p.local))
    dtype = "" if p.dtype.itemsize == 2 else str(p.dtype).removeprefix("torch.")
    return kind.name, str(len(kind.paths)), str(p), local, f"{p.bytes:,}", dtype


def _kind_rows(what: str, kinds: Sequence[Kind]) -> list[tuple[str, ...]]:
    return [(what, "#", "whole@axes", "of a rank", "bytes", ""), *map(_kind_row, kinds)]


def _kind_table(what: str, kinds: Sequence[Kind]) -> Html:
    return table(_kind_rows(what, kinds))


def _whole_rows(whole: Sequence[tuple[str, str, tuple[str, ...], int]]) -> list[tuple[str, ...]]:
    rows = [("the same along", "bytes", "what", "why")]
    return rows + [(d, f"{size:,}", _few(parts), why) for d, why, parts, size in whole]


def _stage_rows(plan: ShardPlan) -> list[tuple[str, ...]]:
    world = plan.request.mesh.stage.world
    return [_STAGE_HEAD, *(_stage_row(use, world) for use in plan.stages)]


_STAGE_HEAD = (
    "stage", "ranks", "layers", "count", "mixers", "weights", "as released", "states", "hands on, bytes a token",
)  # fmt: skip


def _stage_row(use: StageUse, world: int) -> tuple[str, ...]:
    """`world`: ranks of a stage."""
    s = use.stage
    ranks = range(s.index * world, (s.index + 1) * world)
    mixers = ", ".join(f"{n} {kind}" for kind, n in use.mixers.items())
    return (
        str(s.index),
        ranks_text(ranks).removeprefix("ranks ").removeprefix("rank "),
        f"{s.layers[0]} to {s.layers[-1]}",
        str(len(s.layers)),
        mixers,
        amount(use.weights),
        amount(use.released),
        amount(use.states),
        _edge_text(s),
    )


def _edge_text(s: Stage) -> str:
    if s.edge is None:
        return "-"
    blocks = sum("embed" in spec.axes for spec in s.edge.values.values()) - 1
    words = ["hidden"] + [f"{blocks} closed blocks"] * (blocks > 0) + ["selection"] * ("selected" in s.edge.values)
    return f"{s.edge.bytes:,}: {' + '.join(words)} ({', '.join(s.edge.values)})"


def _collective_lines(parts: Sequence[PartUse]) -> list[str]:
    """A line for each collective of each kind of part, and what a step has in all."""
    rows = _collective_rows(parts)
    return [*(columns(rows) if len(rows) > 1 else []), *_collective_words(parts)]


def _collective_table(parts: Sequence[PartUse]) -> Html:
    rows = _collective_rows(parts)
    words = (tag("div", line) for line in _collective_words(parts))
    return tag("div", *([table(rows)] if len(rows) > 1 else []), *words)


def _collective_rows(parts: Sequence[PartUse]) -> list[tuple[str, ...]]:
    rows = [("part", "#", "collective", "over", "of a rank", "bytes", "line")]
    for part in parts:
        for i in part.issued:
            local = "x".join(map(str, i.shape))
            cells = (i.name, " x ".join(i.axes), local, f"{i.bytes:,}", i.source)
            rows.append((part.part, str(part.count), *cells))
    return rows


def _collective_words(parts: Sequence[PartUse]) -> list[str]:
    count = sum(part.count * len(part.issued) for part in parts)
    size = sum(part.count * part.bytes for part in parts)
    each = ", ".join(f"{part.part} {len(part.issued)} ({part.bytes:,} bytes)" for part in parts if part.issued)
    totals = [f"in one part: {each}", f"a step through all stages: {count:,} collectives, {size:,} bytes"]
    lines = totals if count else []
    lines += [f"{part.part} cannot run on this mesh yet: {part.refused}" for part in parts if part.refused]
    return lines or ["no collectives."]


def _part_json(part: PartUse) -> dict[str, Any]:
    issued = [
        {
            "collective": i.name,
            "axes": list(i.axes),
            "shape": list(i.shape),
            "dtype": str(i.dtype).removeprefix("torch."),
            "bytes": i.bytes,
            "source": i.source,
        }
        for i in part.issued
    ]
    return {"part": part.part, "count": part.count, "bytes": part.bytes, "issued": issued, "refused": part.refused}


def _kind_json(kind: Kind) -> dict[str, Any]:
    p = kind.placement
    return {
        "name": kind.name,
        "part": kind.part,
        "count": len(kind.paths),
        "axes": list(p.axes),
        "shape": list(p.shape),
        "over": [list(axes) for axes in p.dims],
        "local": list(p.local),
        "dtype": str(p.dtype).removeprefix("torch."),
        "bytes": p.bytes,
        "replicas": p.replicas,
    }


def _stage_json(use: StageUse) -> dict[str, Any]:
    s = use.stage
    edge = None
    if s.edge is not None:
        values = {
            n: {"shape": list(v.shape), "axes": list(v.axes), "dtype": str(v.dtype or s.edge.dtype)}
            for n, v in s.edge.values.items()
        }
        edge = {"values": values, "bytes_per_token": s.edge.bytes}
    return {
        "stage": s.index,
        "layers": [s.layers[0], s.layers[-1]],
        "mixers": use.mixers,
        "weights_bytes": use.weights,
        "released_bytes": use.released,
        "states_bytes": use.states,
        "edge": edge,
    }
