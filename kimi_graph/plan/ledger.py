"""What every rank of a deployment holds, line by line: name, bytes, and how they come about, in words.

Weights are the inputs that graphs have: every kind of part is traced once, without a mesh, and the passes that compile
has fold what is done to weights into recipes; placements say what a rank has of each. States are those of the bundle's
contract. So weights and states are, to the byte, what the manifest of the compiled bundle says (`memory`).
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from kimi_graph import tree
from kimi_graph.compile import caches
from kimi_graph.compile.driver import Request
from kimi_graph.compile.ge_proto import Dtype
from kimi_graph.compile.passes import bytes_only, weight_name
from kimi_graph.compile.phases import Bucket, fold_piece, parameter_path, piece_tracer, uses
from kimi_graph.compile.prototype_rows import ROWS
from kimi_graph.compile.prototypes import layouts_of
from kimi_graph.compile.weight_formats import Packed
from kimi_graph.config import KdaConfig, MlaConfig, ModelConfig, MoeConfig, arranged
from kimi_graph.models import decoder
from kimi_graph.models.counts import part_of
from kimi_graph.models.decoder import Use
from kimi_graph.models.vision import vision_part_params, vision_schedule
from kimi_graph.ops.base import OPERATORS
from kimi_graph.parallel import Rules, place
from kimi_graph.parallel.placement import Placement
from kimi_graph.spec import ParamSpec


@dataclass(frozen=True, kw_only=True)
class Line:
    """Bytes of a rank.

    Attributes:
        name: `layers.*.kda.query`.
        kind: "weights", "states" or "buffers".
        part: what of the model it belongs to.
        derivation: how the bytes come about, in words.
        whole: every rank of the stage has the same.
        layout: in which a weight lies.
        taken: in which the operators that read it take it.
    """

    name: str
    kind: str
    part: str
    dtype: str
    bytes: int
    derivation: str
    whole: bool = False
    layout: str = ""
    taken: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StageLedger:
    """What a rank of one pipeline stage holds. `layers`, `ranks`: first and last."""

    stage: int
    layers: tuple[int, int]
    ranks: tuple[int, int]
    lines: tuple[Line, ...]

    def of(self, kind: str) -> int:
        """Bytes of "weights", "states" or "buffers"."""
        return sum(line.bytes for line in self.lines if line.kind == kind)

    @property
    def total(self) -> int:
        """Bytes of all lines."""
        return sum(line.bytes for line in self.lines)

    def laid_out(self, wrong: bool) -> int:
        """Bytes of weights that lie in a layout that no operator takes (`wrong`), or that is one of several."""
        weights = (line for line in self.lines if line.kind == "weights")
        if wrong:
            return sum(line.bytes for line in weights if line.layout not in line.taken)
        return sum(line.bytes for line in weights if line.layout in line.taken and len(line.taken) > 1)

    def by_part(self) -> dict[tuple[str, str, str], int]:
        """Bytes by kind, part and dtype, in the order of the lines."""
        found: Counter[tuple[str, str, str]] = Counter()
        for line in self.lines:
            found[line.kind, line.part, line.dtype] += line.bytes
        return dict(found)


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """All stages. `asides`: lines that are in no sum."""

    request: Request
    stages: tuple[StageLedger, ...]
    asides: tuple[Line, ...] = ()

    @property
    def fullest(self) -> StageLedger:
        """The stage whose ranks hold most."""
        return max(self.stages, key=lambda s: s.total)

    def with_buffers(self, lines: Mapping[int, tuple[Line, ...]]) -> "Ledger":
        """The same with more lines, by stage."""
        stages = tuple(replace(s, lines=s.lines + lines.get(s.stage, ())) for s in self.stages)
        return replace(self, stages=stages)

    def to_json(self) -> Any:
        return {
            "stages": [
                {
                    "stage": s.stage,
                    "layers": list(s.layers),
                    "ranks": list(s.ranks),
                    "bytes": {kind: s.of(kind) for kind in ("weights", "states", "buffers")} | {"all": s.total},
                    "lines": [_json(line) for line in s.lines],
                }
                for s in self.stages
            ],
            "asides": [_json(line) for line in self.asides],
        }


def _json(line: Line) -> dict[str, Any]:
    return {
        "name": line.name,
        "kind": line.kind,
        "part": line.part,
        "dtype": line.dtype,
        "bytes": line.bytes,
        "replicated": line.whole,
        "derivation": line.derivation,
        **({"layout": line.layout, "taken_in": list(line.taken)} if line.layout else {}),
    }


def buckets_of(request: Request) -> tuple[Bucket, ...]:
    """The buckets of a request, made and checked once. Raises as `Request.buckets`."""
    kept = request.__dict__  # where its cached properties are too
    if "made_buckets" not in kept:
        kept["made_buckets"] = request.buckets()
    return kept["made_buckets"]


def make_ledger(request: Request) -> Ledger:
    """Weights and states of every stage. The request is not checked (`Request.check`).

    Raises:
        ShardingError: a size that does not divide.
        CompileError: a choice that cannot be.
    """
    b = buckets_of(request)[0]
    layout = request.placed
    rules, layers = layout.rules("decode"), [s.layers for s in layout.stages(b)]
    weights = Weights(request, rules, census_of(request, b))
    states = _States(request, rules, b)
    world = layout.mesh.stage.world
    stages = tuple(
        StageLedger(
            stage=i,
            layers=(own[0], own[-1]),
            ranks=(i * world, (i + 1) * world - 1),
            lines=(*weights.lines(own, first=i == 0, last=i == len(layers) - 1), *states.lines(own)),
        )
        for i, own in enumerate(layers)
    )
    return Ledger(request=request, stages=stages, asides=tuple(_asides(request, b)))


# ---- weights ---------------------------------------------------------------------------------------------------------


class Read(NamedTuple):
    """A weight that a part reads: of which parameter (below the part's prefix), and what becomes of it.

    Attributes:
        steps: what is done to its bytes, in the name.
        share: numbers of it in those of the parameter.
        dtype: as read.
        readers: operators, and which argument of theirs it is.
    """

    parameter: str
    steps: str
    share: tuple[int, int]
    dtype: torch.dtype
    readers: frozenset[tuple[str, str]]


def kind_of(part: str) -> str:
    """A part without the number of blocks that it mixes: their weights are alike."""
    return part.rstrip("0123456789")


@functools.lru_cache(maxsize=16)
def weights_read(c: ModelConfig, phase: str, sparse: bool, images: int, patches: int) -> dict[str, tuple[Read, ...]]:
    """What each kind of part of a phase reads, by tracing it without a mesh.

    Args:
        sparse: whether keys are selected.
        images, patches: of models with vision.
    """
    page, top_k = 16, [m.indexer.top_k for m in (x.mixer for x in c.layers) if isinstance(m, MlaConfig) and m.indexer]
    pages = max(1, min(top_k, default=0) // page) + sparse  # as short as it can be: sizes of weights do not change
    tokens = {"decode": 1, "prefill": 64, "vision": patches}[phase]
    b = Bucket(
        phase=phase, rows=1, tokens=tokens, page=page, pages=pages + 1, sequence_pages=pages, slots=2, images=images
    )
    trace, found = piece_tracer(c, b), {}
    for use in uses(c, b):
        kind = kind_of(use.part)
        if kind in found or kind.endswith("_add"):
            continue
        folded = fold_piece(trace(use))
        nodes = folded.captured.module.graph.find_nodes(op="placeholder")
        inputs = dict(zip(folded.captured.inputs, nodes, strict=True))
        sizes = _sizes(c, use)
        found[kind] = tuple(
            _read(parameter, steps, inputs[name], sizes[parameter])
            for name, (parameter, steps) in folded.weights.items()
        )
    return found


def _short(parameter: str, steps: Any) -> str:
    return weight_name(parameter, bytes_only(steps)).removeprefix(parameter)


def _sizes(c: ModelConfig, use: Use) -> dict[str, int]:
    """Numbers of each parameter of a part, by its input's name."""
    specs = decoder.model_specs(c)
    if kind_of(use.part) in ("embed", "embed_vision", "head", "out_res") or use.layer is not None:
        params = decoder.part_params(use, specs)
    else:
        params = vision_part_params(use, specs.vision)
    return {f"p.{name}": spec.numel for name, spec in tree.items(params)}


def _read(parameter: str, steps: Any, node: fx.Node, size: int) -> Read:
    val = node.meta["val"]
    readers = frozenset(_readers(node))
    return Read(parameter.removeprefix("p."), _short(parameter, steps), _share(val, size), val.dtype, readers)


def _readers(weight: fx.Node) -> Iterator[tuple[str, str]]:
    """Operators that read a weight, and as which argument."""
    for user in weight.users:
        schema = getattr(user.target, "_schema", None)
        if schema is not None:
            at = next((i for i, given in enumerate(user.args) if given is weight), None)
            yield schema.name.partition("::")[2], "" if at is None else schema.arguments[at].name


def _taken(readers: Iterable[tuple[str, str]], dtype: Dtype, port: str = "") -> tuple[str, ...]:
    """Layouts in which all readers take a weight. `port`: of the operator, where a weight has several inputs there."""
    found = [layouts_of(_GE[name], port or argument, dtype.proto) for name, argument in readers if name in _GE]
    return tuple(x for x in found[0] if all(x in other for other in found)) if found else ("ND",)


_GE = {operator: type_ for type_ in ROWS for operator in OPERATORS if operator.replace("_", "") == type_.lower()}


def _share(x: torch.Tensor, size: int) -> tuple[int, int]:
    common = math.gcd(x.numel(), size)
    return x.numel() // common, size // common


@functools.lru_cache(maxsize=4)
def _paths(c: ModelConfig) -> dict[str, ParamSpec]:
    return dict(tree.items(decoder.model_specs(c)))


Key = tuple[str, str]  # path of a parameter, and what becomes of it


@dataclass(frozen=True)
class Census:
    """The weights that graphs of some phases read, whatever the mesh.

    Attributes:
        by_layer: of each layer.
        ends: beside the layers, of the first stage and of the last.
        alike: for each layer the first one that is configured alike and has weights of the same kinds.
    """

    reads: Mapping[Key, Read]
    by_layer: tuple[tuple[Key, ...], ...]
    ends: tuple[tuple[Key, ...], tuple[Key, ...]]
    alike: tuple[int, ...]


@functools.lru_cache(maxsize=8)
def census(c: ModelConfig, phases: tuple[str, ...], sparse: bool, images: int, patches: int) -> Census:
    """See `weights_read`."""
    reads: dict[Key, Read] = {}
    by_layer: list[dict[Key, None]] = [{} for _ in c.layers]
    ends: tuple[dict[Key, None], dict[Key, None]] = ({}, {})
    for phase in phases:
        vision = phase == "vision"
        read = weights_read(c, phase, sparse, images, patches if vision else 0)
        schedule = vision_schedule(c.vision) if vision else decoder.schedule(  # type: ignore[arg-type]
            c, sparse=sparse, vision=c.vision is not None and phase == "prefill"
        )  # fmt: skip
        for use in schedule:
            kind = kind_of(use.part)
            if vision or use.layer is None:
                into = ends[not vision and kind not in ("embed", "embed_vision")]
            else:
                into = by_layer[use.layer]
            for r in read.get(kind, ()):
                key = parameter_path(c, f"p.{r.parameter}", use.prefix), r.steps
                into[key], reads[key] = None, r
    first: dict[Any, int] = {}
    alike = tuple(
        first.setdefault((c.layers[i], tuple((p.removeprefix(f"layers.{i}."), s) for p, s in keys)), i)
        for i, keys in enumerate(by_layer)
    )
    return Census(reads, tuple(map(tuple, by_layer)), (tuple(ends[0]), tuple(ends[1])), alike)


def census_of(request: Request, b: Bucket) -> Census:
    """Of a request; `b`: any of its buckets."""
    sparse = decoder.is_sparse(request.config, b.sequence_pages * b.page)
    patches = 0 if request.config.vision is None else b.images * math.prod(request.config.vision.merge)
    c = arranged(request.config)  # copies of experts and chunks of rows change no kind of weight
    return census(c, request.phases, sparse, b.images, patches)


class Weights:
    """Lines of weights; layers that are configured alike are placed once."""

    def __init__(self, request: Request, rules: Rules, read: Census) -> None:
        self.request, self.rules, self.c = request, rules, request.config
        self.census, self.specs = read, _paths(request.config)
        self.made: dict[Any, tuple[Line, ...]] = {}

    def lines(self, layers: range, *, first: bool, last: bool) -> Iterator[Line]:
        """Of a stage with these layers; those of one kind of weight are one line."""
        ends = self.census.ends
        keys = [*(ends[0] if first else ()), *(k for i in layers for k in self.census.by_layer[i])]
        found: dict[tuple[str, str, str], list[Line]] = {}
        for path, steps in dict.fromkeys([*keys, *(ends[1] if last else ())]):
            for line in self._lines(path, steps):
                found.setdefault((line.name, line.dtype, line.derivation), []).append(line)
        for (name, _, words), same in found.items():
            times = f"{len(same)} {'blocks' if name.startswith('vision') else 'layers'} x " if "*" in name else ""
            yield replace(same[0], bytes=sum(line.bytes for line in same), derivation=times + words)

    def bytes_of(self, keys: Iterable[Key]) -> int:
        """Of some weights together."""
        return sum(line.bytes for key in keys for line in self._lines(*key))

    def _lines(self, path: str, steps: str) -> tuple[Line, ...]:
        """Of one weight, made once for all layers that are configured alike."""
        words = path.split(".")
        alike = self.census.alike[int(words[1])] if words[0] == "layers" else -1
        name = ".".join("*" if word.isdigit() else word for word in words)
        key = name, steps, alike
        if key not in self.made:
            self.made[key] = tuple(self._make(path, name, steps))
        return self.made[key]

    def _make(self, path: str, name: str, steps: str) -> Iterator[Line]:
        placed, r = self._placed(path), self.census.reads[path, steps]
        packed = self._packed(path)
        for part, p in packed.items():
            size = -(-math.prod(p.shape) * p.dtype.bits // 8)
            words = f"{_dims(p.shape)} of a rank, {p.dtype.text}, {p.dtype.bits / 8:g} B each"
            line = self._line(f"{name}.{part}", path, p.dtype.text, size, words, placed)
            yield replace(line, layout="FRACTAL_NZ" if p.tiled else "ND", taken=_taken(r.readers, p.dtype, part))
        if not packed:
            of, whole = r.share
            size = math.prod(placed.local) * of // whole * r.dtype.itemsize
            cut = f"{_dims(placed.local)} of {placed}" if placed.used else f"{placed}"
            words = f"{cut}, {_text(r.dtype)}, {r.dtype.itemsize} B each" + (f", {of}/{whole} of it" * (whole > 1))
            line = self._line(name + steps, path, _text(r.dtype), size, words, placed)
            yield replace(line, layout="ND", taken=_taken(r.readers, Dtype.of_torch(r.dtype)))

    def _line(self, name: str, path: str, dtype: str, size: int, words: str, placed: Placement) -> Line:
        whole = placed.mesh.stage.world > 1 and not placed.used
        return Line(
            name=name, kind="weights", part=part_of(path), dtype=dtype, bytes=size, derivation=words, whole=whole
        )

    def _placed(self, path: str) -> Placement:
        return place(path, self.specs[path], self.rules, self.c.dtype)

    def _packed(self, path: str) -> Mapping[str, Packed]:
        return self.request.packed(path, None if self.request.mesh is None else self.rules)


def _dims(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- states ----------------------------------------------------------------------------------------------------------

_STATES = {
    "memory": "KDA state", "window": "conv windows", "latent": "MLA latent", "rope": "MLA latent", "index": "DSA keys",
    "index_scale": "DSA keys",
}  # fmt: skip


class _States:
    """Lines of states, those of layers together."""

    def __init__(self, request: Request, rules: Rules, b: Bucket) -> None:
        c = request.config
        self.b, self.rules = b, rules
        specs = caches.state_specs(c, request.kv_dtype, slots=b.slots, pages=b.pages, page=b.page)
        self.specs = [(layer.kinds[0], dict(tree.items(spec))) for layer, spec in zip(c.layers, specs, strict=True)]
        self.dtype = c.dtype

    def lines(self, layers: range) -> Iterator[Line]:
        groups: dict[tuple[str, str, tuple[int, ...], torch.dtype], list[ParamSpec]] = {}
        for i in layers:
            kind, spec = self.specs[i]
            for leaf, s in spec.items():
                groups.setdefault((kind, leaf, s.shape, s.dtype or self.dtype), []).append(s)
        for (kind, leaf, _, dtype), specs in groups.items():
            placed = place(f"s.{kind}.{leaf}", specs[0], self.rules, self.dtype)
            yield Line(
                name=f"s.layers.*.{kind}.{leaf}", kind="states", part=_STATES.get(leaf, "conv windows"),
                dtype=_text(dtype), bytes=placed.bytes * len(specs),
                derivation=self._words(len(specs), placed, dtype), whole=False,
            )  # fmt: skip

    def _words(self, count: int, placed: Placement, dtype: torch.dtype) -> str:
        own, *rest = placed.local
        width = math.prod(rest)
        if placed.axes[0] == "slots":
            slot = count * width * dtype.itemsize
            return f"{own:,} slots x {slot:,} B = {count} layers x {_dims(tuple(rest))} x {dtype.itemsize} B"
        token = count * width // self.b.page * dtype.itemsize
        tokens = f"{own:,} pages x {self.b.page} tokens x {token:,} B"
        return f"{tokens} = {count} layers x {width // self.b.page} x {dtype.itemsize} B"


def stage_states(request: Request, b: Bucket) -> list[int]:
    """Bytes of the states of a rank of each stage, with the slots and pages of a bucket."""
    layout = request.placed
    states = _States(request, layout.rules("decode"), b)
    return [sum(line.bytes for line in states.lines(s.layers)) for s in layout.stages(b)]


# ---- numbers that a deployment is asked for --------------------------------------------------------------------------


def state_bytes(c: ModelConfig, heads_over: int = 1) -> int:
    """Bytes of the KDA states of a sequence, without windows. `heads_over`: ranks that share out heads."""
    mixers = [x.mixer for x in c.layers if isinstance(x.mixer, KdaConfig)]
    return sum(4 * m.heads * m.value * m.key for m in mixers) // heads_over


def window_bytes(c: ModelConfig) -> int:
    """Bytes of the windows of its convolutions."""
    mixers = [x.mixer for x in c.layers if isinstance(x.mixer, KdaConfig)]
    return sum(m.heads * (2 * m.key + m.value) * (m.conv_width - 1) * c.dtype.itemsize for m in mixers)


def hybrid_page(c: ModelConfig, tensor: int, number: int, multiple: int = 128) -> int:
    """Tokens of a page of attention that is as large as a KDA slot: engines that keep both in one pool need that.

    Args:
        tensor: ranks that share out heads of KDA.
        number: bytes of a number of the cache.
        multiple: of tokens.
    """
    kda = [x.mixer for x in c.layers if isinstance(x.mixer, KdaConfig)]
    mla = next(x.mixer for x in c.layers if isinstance(x.mixer, MlaConfig))
    slot = (state_bytes(c) + window_bytes(c)) // len(kda) // tensor
    return -(-slot // ((mla.latent + mla.key_rope) * number) // multiple) * multiple


def statistics_bytes(c: ModelConfig, tokens: int) -> int:
    """Bytes of the sums that the two-phase form of attention residuals keeps: both sites of each layer of a block."""
    return 0 if c.residual_block is None else 2 * c.residual_block * tokens * c.embed * 4


def _asides(request: Request, b: Bucket) -> Iterator[Line]:
    """What is worth knowing and no rank holds."""
    c = request.config

    def aside(name: str, part: str, dtype: str, size: int, words: str) -> Line:
        return Line(name=name, kind="aside", part=part, dtype=dtype, bytes=size, derivation=words)

    if size := state_bytes(c):
        kinds = Counter((m.heads, m.value, m.key) for x in c.layers if isinstance(m := x.mixer, KdaConfig))
        each = " + ".join(f"{count} layers x {' x '.join(map(str, sizes))} x 4 B" for sizes, count in kinds.items())
        words = f"{each}, all heads, on all stages; float32"
        yield aside("KDA state of a sequence", "KDA state", "float32", size, words)
    if size := sum(_row(x.mixer) for x in c.layers if isinstance(x.mixer, MlaConfig)):
        row, tokens = size * c.dtype.itemsize, b.sequence_pages * b.page
        words = f"{row:,} B a token x {tokens:,} tokens, on all stages, in {_text(c.dtype)}"
        yield aside("MLA cache of a sequence", "MLA latent", _text(c.dtype), row * tokens, words)
    if c.residual_block is not None:
        words = f"{2 * c.residual_block} sites x 512 tokens x {c.embed:,} x 4 B; graphs mix in one phase, without them"
        yield aside("attention residuals in two phases", "residuals", "float32", statistics_bytes(c, 512), words)
    if moe := c.moe:
        count = sum(isinstance(x.ffn, MoeConfig) for x in c.layers)
        words = f"{count} layers x {moe.experts} x {c.embed:,} x 4 B, on every rank that has a part of each"
        yield aside("router in float32", "router", "float32", 4 * count * moe.experts * c.embed, words)


def _row(m: MlaConfig) -> int:
    """Numbers of the latent and the rope channels of a token."""
    return m.latent + m.key_rope
