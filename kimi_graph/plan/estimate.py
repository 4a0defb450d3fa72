"""Time of steps by a roofline: each node of the traced parts takes as long as what binds it, and a launch.

A step of a stage is the sum of its parts. A prefill of T tokens goes chunk by chunk through the stages, so that stages
work at the same time; the chunk that starts at token C takes `t0 + t1 C` (index scores and dense attention grow with
what is cached), so that the whole takes `a T + b T^2`. A decode step goes through all stages, one after another.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kimi_graph.compile.caches import quantise_caches
from kimi_graph.compile.driver import Request
from kimi_graph.compile.meshes import Layout
from kimi_graph.compile.phases import Bucket, fold_piece, pools, sharded_piece_tracer, stage_parts, uses
from kimi_graph.compile.sharded import ShardedCapture
from kimi_graph.compile.targets import Target
from kimi_graph.config import MlaConfig
from kimi_graph.models.decoder import Use
from kimi_graph.parallel import Mesh

from .factors import Factors
from .ledger import buckets_of, kind_of
from .network import crossing, edge
from .routing import Routing, Spread, routing
from .work import Work, part_work, peak_bytes, score_bytes

CUBE = {"mxfp4": "fp8", "fp8": "fp8"}  # what experts are multiplied in, by the form they are kept in
BYTES = {"plain": 2.0, "mxfp4": 0.53125, "fp8": 1.000244140625, "int4-g32": 0.5625}  # of an expert's number


@dataclass(frozen=True)
class Part:
    """A kind of part as it is traced on a mesh.

    Attributes:
        works: its nodes.
        peak: the most bytes it needs at once beside its inputs.
        scores: bytes of index scores.
    """

    works: tuple[Work, ...]
    peak: int
    scores: int = 0


def traced(request: Request, b: Bucket, like: Mapping[str, Part] | None = None) -> Mapping[str, Part]:
    """Every kind of part of a bucket, traced once for all ranks.

    Args:
        like: parts of a bucket that differs in the length of sequences alone: attention is traced anew, nothing else.

    Raises:
        ShardingError: a part that cannot run on the mesh, with the author's line.
    """
    layout = request.placed
    if b.phase == "vision":  # the tower sees pictures alone, whatever the batch
        b = replace(b, rows=1, pages=1, sequence_pages=1, slots=1)
    if like is None:
        return _traced(layout, b, request.kv_dtype)
    trace, found = sharded_piece_tracer(request.config, b, layout.rules(b.phase)), dict(like)
    for use in uses(request.config, b):
        if kind_of(use.part).startswith("mla") and found[use.part] is like[use.part]:
            found[use.part] = _part(trace(use), request.kv_dtype)
    return found


@functools.lru_cache(maxsize=32)
def _traced(layout: Layout, b: Bucket, kv_dtype: str) -> Mapping[str, Part]:
    trace = sharded_piece_tracer(layout.config, b, layout.rules(b.phase))
    found: dict[str, Part] = {}
    for use in uses(layout.config, b):
        alike = use.part.replace("ffn_", "attn_", 1)  # both halves of a layer mix and add in the same way
        if use.part not in found:
            found[use.part] = found[alike] if alike in found else _part(trace(use), kv_dtype)
    return found


def _part(piece: ShardedCapture, kv_dtype: str) -> Part:
    folded = replace(piece, captured=fold_piece(quantise_caches(piece.captured, kv_dtype)).captured)
    return Part(tuple(part_work(folded)), peak_bytes(folded), score_bytes(folded))


# ---- work memory -----------------------------------------------------------------------------------------------------


def workspace(request: Request, b: Bucket, parts: Mapping[str, Part]) -> dict[int, tuple[int, int]]:
    """The most bytes of activations of a rank of each stage: values between parts at that moment, and inside a part."""
    sizes = _value_bytes(request, b)
    found = {}
    for stage in stage_parts(request.config, b, request.placed.stages(b)):
        last = {name: i for i, use in enumerate(stage.parts) for name in use.reads}
        live = {name for use in stage.parts for name in use.reads} - {n for use in stage.parts for n in use.writes}
        best = (0, 0)
        for i, use in enumerate(stage.parts):
            best = max(best, (sum(map(sizes, live)), parts[use.part].peak), key=sum)
            live |= set(use.writes)
            live = {n for n in live if last.get(n, -1) > i or n in stage.gives}
        found[stage.stage.index] = best
    return found


def _value_bytes(request: Request, b: Bucket) -> Any:
    c, rows = request.config, b.rows // request.placed.rules(b.phase).ways("batch")
    width = c.vision.embed if b.phase == "vision" and c.vision is not None else c.embed
    top_k = max(
        (x.mixer.indexer.top_k for x in c.layers if isinstance(x.mixer, MlaConfig) and x.mixer.indexer), default=0
    )

    def size(name: str) -> int:
        if name in ("tokens", "vision.rows"):
            return 8 * rows * b.tokens
        if name == "selected":
            return 4 * rows * b.tokens * top_k
        if name == "vision.values":
            return b.images * c.embed * c.dtype.itemsize
        if name == "logits" or name.endswith(".table"):
            return 0
        return rows * b.tokens * width * c.dtype.itemsize

    return size


# ---- one part --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spent:
    """Seconds of a part, by what binds its nodes: "cube bf16", "memory", "vector", "launches", "link superpod" ..."""

    by: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.by.values())

    @property
    def bound(self) -> str:
        """What most of it goes to."""
        return max(self.by, key=lambda k: self.by[k], default="nothing")

    def times(self, n: float) -> "Spent":
        """`n` times as much of everything."""
        return Spent({k: v * n for k, v in self.by.items()})


def together(parts: Iterable[Spent]) -> Spent:
    """The sum of several."""
    found: Counter[str] = Counter()
    for part in parts:
        for k, v in part.by.items():
            found[k] += v  # type: ignore[assignment]
    return Spent(dict(found))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What nodes run on: a target, how much of it a kernel gets, and how experts are kept and chosen."""

    target: Target
    factors: Factors
    mesh: Mesh
    form: str = "plain"
    chosen: Routing = field(default_factory=Routing)
    chunks: int = 1

    def spend(self, works: Iterable[Work]) -> Spent:
        """Seconds of a part's nodes, one after another; what goes to experts in chunks overlaps with their products."""
        found: Counter[str] = Counter()
        sent: Counter[str] = Counter()
        own: Counter[str] = Counter()
        for work in works:
            name, seconds = self.node(work)
            into = found
            if self.chunks > 1 and (work.experts or (work.issued and work.name.startswith("expert_"))):
                into = sent if work.issued else own
            into[name] += seconds  # type: ignore[assignment]
            if not work.issued:
                found["launches"] += self.factors.launch_us * 1e-6  # type: ignore[assignment]
        longer, shorter = (sent, own) if sum(sent.values()) > sum(own.values()) else (own, sent)
        for k, v in longer.items():
            found[k] += v
        for k, v in shorter.items():
            found[k] += v / self.chunks  # type: ignore[assignment]
        return Spent(dict(found))

    def weights(self, w: Work) -> float:
        """Bytes of weights that a node reads: of experts those that have rows, as they are kept."""
        return w.weights * (self.chosen.touched * BYTES.get(self.form, 2.0) / 2 if w.experts else 1.0)

    def load(self, works: Iterable[Work]) -> tuple[float, float]:
        """FLOP of products, and bytes from and to HBM, of weights and states."""
        flops = bytes_ = 0.0
        for w in works:
            flops += w.cube * (self.chosen.rows if w.experts else 1.0)
            bytes_ += self.weights(w) + w.states
        return flops, bytes_

    def node(self, w: Work) -> tuple[str, float]:
        """What binds a node, and its seconds without its launch."""
        f, die = self.factors, self.target.die
        if w.issued is not None:
            skew = self.chosen.rows if w.name.startswith("expert_") else 1.0
            cross = crossing(w.issued, self.mesh.stage, self.target.links, f, skew)
            return f"link {cross.link}", cross.seconds
        rows = self.chosen.rows if w.experts else 1.0
        dtype = CUBE.get(self.form, w.dtype) if w.name == "grouped_matmul" else w.dtype
        rate = die.cube.get(dtype, die.cube["bf16"]).value
        weights = self.weights(w)
        near = w.moved < die.l2.value / 2
        times = {
            f"cube {dtype}": w.cube * rows / (rate * f.cube),
            "vector": w.vector * rows * 2 / (die.vector.value * f.vector),  # in float32: half of the rate of fp16
            "memory": (weights + w.states + (0 if near else w.moved * rows)) / (die.bandwidth.value * f.memory),
            "L2": w.moved * rows / (die.l2_bandwidth.value * f.l2) if near else 0.0,
        }
        name = max(times, key=lambda k: times[k])
        return name, times[name]


def machine(request: Request, factors: Factors, b: Bucket, *, quantile: str = "median") -> Machine:
    """How a bucket's rows go to experts. `quantile`: "even", "median" or "high", see `routing`."""
    mesh, c = request.placed.mesh, request.config
    moe = c.moe
    spread, chunks = Spread(), 1
    if moe is not None and b.phase != "vision":
        rules = request.placed.rules(b.phase)
        ways = rules.ways("experts")
        # rows that one set of experts serves: of all the ranks that share it
        outside = mesh.stage.size(tuple(a for a in rules.on("batch") if a not in rules.on("experts")))
        choices = max(1, b.rows * b.tokens * moe.top_k // outside)
        physical = rules.physical("experts", moe.slots)
        if physical % ways == 0:
            spread = routing(moe.experts, choices, ways, physical - moe.experts, factors.spread)
        chunks = moe.chunks
    chosen = {"even": spread.even, "median": spread.median, "high": spread.high}[quantile]
    return Machine(target=request.target, factors=factors, mesh=mesh, form=request.form, chosen=chosen, chunks=chunks)


# ---- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a bucket.

    Attributes:
        stages: of each pipeline stage.
        edges: seconds to hand values on.
        kinds: of each kind of part, in all stages: how often, and one of them.
        loads: its FLOP and bytes from HBM.
    """

    bucket: Bucket
    stages: tuple[Spent, ...]
    kinds: Mapping[str, tuple[int, Spent]]
    edges: float
    loads: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Through all stages."""
        return sum(s.seconds for s in self.stages) + self.edges

    @property
    def slowest(self) -> float:
        """Seconds of the slowest stage, with its share of the edges; a full pipeline gives a step in this time."""
        return max(s.seconds for s in self.stages) + self.edges / max(1, len(self.stages) - 1)

    @property
    def spent(self) -> Spent:
        """Of all stages one after another, and of the edges between them."""
        return together([*self.stages, Spent({"stage edges": self.edges} if self.edges else {})])


def step(request: Request, b: Bucket, parts: Mapping[str, Part], m: Machine) -> Step:
    """Time of a step."""
    each = {name: m.spend(part.works) for name, part in parts.items()}
    split = stage_parts(request.config, b, request.placed.stages(b))
    spent = tuple(together(_counted(s.parts, each)) for s in split)
    counts = Counter(kind_of(use.part) for s in split for use in s.parts)
    one: dict[str, list[Spent]] = {}
    for s in split:
        for use in s.parts:
            one.setdefault(kind_of(use.part), []).append(each[use.part])
    kinds = {name: (counts[name], together(same).times(1 / counts[name])) for name, same in one.items()}
    ways = request.placed.rules(b.phase).ways("batch")
    sizes = [s.stage.edge.bytes / ways for s in split if s.stage.edge is not None and b.phase != "vision"]
    distance = m.mesh.stage.world
    edges = sum(edge(size, m.target.links, distance, m.factors) for size in sizes)
    loads = {kind_of(name): m.load(part.works) for name, part in parts.items()}
    return Step(bucket=b, stages=spent, kinds=kinds, edges=edges, loads=loads)


def _counted(parts: Iterable[Use], each: Mapping[str, Spent]) -> list[Spent]:
    counts = Counter(use.part for use in parts)
    return [each[name].times(n) for name, n in counts.items()]


def bucket_at(request: Request, phase: str, *, rows: int, tokens: int, context: int) -> Bucket:
    """The shapes of a step whose sequences have so many tokens, the new ones included."""
    layout, page = request.placed, request.page
    share = layout.pools
    pages = -(-max(1, math.ceil(context / page)) // share) * share
    slots, pool = pools(layout.rules("decode"), rows, pages)
    b = next(b for b in buckets_of(request) if b.phase == phase)
    return replace(b, rows=rows, tokens=tokens, pages=pool, sequence_pages=pages, slots=slots)


# ---- prefill ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """Time of prefills of one sequence for each of `data`.

    Attributes:
        a, b: seconds of T tokens are `fill + a T + b T^2`.
        fill: until the last stage has the first chunk.
        chunk: tokens of a step.
        bound: of the slowest stage of the last chunk at the longest context.
        image: seconds of a picture in the vision tower; 0 without.
        image_tokens: that it becomes.
    """

    a: float
    b: float
    fill: float
    chunk: int
    rows: int
    bound: str
    steps: tuple[Step, ...]
    image: float = 0.0
    image_tokens: int = 0

    def seconds(self, tokens: int) -> float:
        """Until the first token of a prompt, in seconds."""
        return self.fill + self.a * tokens + self.b * tokens**2

    @property
    def equal(self) -> float:
        """The length at which both terms take as long; infinite without a quadratic one."""
        return self.a / self.b if self.b > 0 else math.inf

    def with_images(self, tokens: int, images: int) -> tuple[float, float]:
        """Of a text with pictures: one after another, and the tower working ahead of the prefill."""
        text = self.seconds(tokens + images * self.image_tokens)
        tower = images * self.image
        return text + tower, max(text + min(1, images) * self.image, tower + self.fill)


def prefill(request: Request, factors: Factors, *, quantile: str = "median") -> Prefill:
    """The law of a prefill's time, from steps at two lengths of what is cached before."""
    c, mesh, chunk = request.config, request.placed.mesh, request.chunk
    rows = mesh.data
    near, far = chunk, max(_longest(request), 2 * chunk)
    top_k = max(
        (x.mixer.indexer.top_k for x in c.layers if isinstance(x.mixer, MlaConfig) and x.mixer.indexer), default=0
    )
    if far > top_k:
        near = max(near, top_k + request.page)
        far = max(far, 2 * near)
    longest, *buckets = (
        bucket_at(request, "prefill", rows=rows, tokens=chunk, context=n) for n in (request.max_len, near, far)
    )
    whole = traced(request, longest)  # the ledger has traced it already
    steps = [
        step(request, b, traced(request, b, whole), machine(request, factors, b, quantile=quantile)) for b in buckets
    ]
    slope = max(0.0, (steps[1].slowest - steps[0].slowest) / (far - near))
    base = steps[0].slowest - slope * near  # of a chunk that starts where nothing is cached, less what it sees itself
    image, image_tokens = _tower(request, factors)
    return Prefill(
        # of chunk i, which sees (i + 1) chunks: base + slope (i + 1) chunk; their sum over T / chunk
        a=base / chunk + slope / 2,
        b=slope / (2 * chunk),
        fill=max(0.0, steps[0].seconds - steps[0].slowest),
        chunk=chunk, rows=rows, bound=max(steps[1].stages, key=lambda s: s.seconds).bound, steps=tuple(steps),
        image=image, image_tokens=image_tokens,
    )  # fmt: skip


def _longest(request: Request) -> int:
    return request.max_len


def _tower(request: Request, factors: Factors) -> tuple[float, int]:
    if request.config.vision is None or "vision" not in request.phases:
        return 0.0, 0
    b = next(b for b in buckets_of(request) if b.phase == "vision")
    made = step(request, b, traced(request, b), machine(request, factors, b))
    return made.seconds, b.images


# ---- decode ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Decode:
    """Time of a token of every sequence.

    Attributes:
        even, median, high: the step with experts chosen evenly, and at two quantiles of the busiest rank's rows.
        context: tokens of every sequence.
    """

    even: Step
    median: Step
    high: Step
    context: int
    rows: int

    @property
    def seconds(self) -> float:
        """A token, in seconds, at the median step."""
        return self.median.seconds

    def tokens_per_second(self, devices: int) -> float:
        """Of one device, with as many batches in flight as there are stages."""
        return self.rows / (self.median.slowest * devices)

    @property
    def idle(self) -> float:
        """The part of the time in which a stage waits, with one batch in flight."""
        s = self.median
        return 1 - s.seconds / (len(s.stages) * s.slowest) if len(s.stages) == 1 else 1 - 1 / len(s.stages)


def decode(request: Request, factors: Factors, *, rows: int | None = None, context: int | None = None) -> Decode:
    """A decode step of `rows` sequences (the request's, by default) that have `context` tokens (its longest)."""
    rows, context = rows or request.rows, context or _longest(request)
    b = bucket_at(request, "decode", rows=rows, tokens=1, context=context)
    parts = traced(request, b)
    steps = (step(request, b, parts, machine(request, factors, b, quantile=q)) for q in ("even", "median", "high"))
    even, median, high = steps
    return Decode(even=even, median=median, high=high, context=context, rows=rows)
