"""What there is to see of a bundle: its layers in order, one graph of each kind of layer, and memory as a step goes on.

All of it is read from the bundle's files. What they do not say is not drawn: a value between two nodes has a shape on
one rank, and no note of how it lies on the others; weights, states, inputs and outputs have.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kimi_graph.progress import Notify, silent

from . import air
from .bundle import SOURCES, Bundle, as_written, open_bundle, read_json
from .checks import VIEWS
from .cost import COPIES, STRUCTURE, node_costs, tensor_kinds
from .executor.node import attrs_of
from .ge_proto import Dtype, bytes_of, is_known
from .nodes import SHORT
from .order import COLLECTIVE
from .origins import Origins, source_of
from .view import Edge, Node, View, view

LAYER = re.compile(r"(?P<stem>(?:\w+\.)*(?:layers|blocks))\.(?P<number>\d+)\.(?P<part>\w+)")
MIXERS = {"kda": "KDA", "mla": "MLA", "vision_block": "vision block"}
FEEDS = {"dense": "dense", "moe": "MoE"}
COLUMNS = 600  # points of a curve

# Families of operators, by what they are for; each has a colour. The first that matches counts.
FAMILIES: Mapping[str, tuple[str, str]] = {
    "collective": ("collective", "|".join(f"^{word}" for word in COLLECTIVE)),
    "memory": (
        "attention, state, cache",
        r"Kda|GatedDelta|ShortConv|CausalConv|Attention|Indexer|SparseAttend|ScatterPaKvCache",
    ),
    "product": ("matrix product", r"Mat[Mm]ul"),
    "norm": ("norm, residual mix", r"Norm|AttnResMix"),
    "route": ("routing", r"^Moe|TopK"),
    "move": ("cast, copy, gather", r"^(Cast|Gather|Scatter|" + "|".join(sorted(set().union(*COPIES.values()))) + ")"),
    "view": ("view, costs nothing", "^(" + "|".join(sorted(VIEWS)) + ")$"),
    "other": ("arithmetic", ""),
}


def family_of(type_: str) -> str:
    """The family of an operator."""
    return next(name for name, (_, pattern) in FAMILIES.items() if re.search(pattern, type_))


@dataclass(frozen=True, kw_only=True)
class Value:
    """A tensor of one rank. `name`: of a weight, state or input, else empty; `lies`: how it lies on a mesh."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    name: str = ""
    lies: str = ""

    def __str__(self) -> str:
        return f"{SHORT.get(self.dtype, self.dtype)} [{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, kw_only=True)
class Box:
    """A node that is drawn, or an end of the layer (`type` empty): what comes in from elsewhere, or is read elsewhere.

    Attributes:
        name: within its layer. results, held: what it gives; weights, states and inputs of the graph that it reads.
        attributes: of GE, as text. source: line of layer code. carries: of a collective, its group and bytes.
    """

    name: str
    type: str = ""
    results: tuple[Value, ...] = ()
    held: tuple[Value, ...] = ()
    attributes: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    carries: str = ""


@dataclass(frozen=True)
class Figure:
    """The graph of one layer, or of a part beside layers.

    Attributes:
        title: "KDA + MoE". where: "layers.1" of graph `graph`. note: which layers it stands for.
        boxes, edges: nodes; and from box to box, what is handed on.
        folded: views that are not drawn.
    """

    phase: str
    graph: str
    title: str
    where: str
    note: str
    boxes: tuple[Box, ...]
    edges: tuple[tuple[int, int, str], ...]
    folded: int


@dataclass(frozen=True)
class Cell:
    """A layer in the schedule. `figure`: its kind's title."""

    number: int
    mixer: str
    feed: str
    figure: str


@dataclass(frozen=True)
class Row:
    """A stage of a phase: its graph, and its layers in the order in which they run."""

    phase: str
    graph: str
    stage: int
    cells: tuple[Cell, ...]
    beside: tuple[str, ...]


@dataclass(frozen=True)
class Curve:
    """Activations that live while a graph runs, on one rank.

    Attributes:
        nodes: how many nodes there are. live: bytes, the most in each of equal stretches of nodes. peak: of all, and at
            which node. marks: layers and the node at which each begins. weights, states: bytes that are always there.
    """

    phase: str
    stage: int
    nodes: int
    live: tuple[int, ...]
    peak: tuple[int, str]
    marks: tuple[tuple[int, int], ...]
    weights: int
    states: int


@dataclass(frozen=True)
class Picture:
    """All there is to see of a bundle."""

    bundle: Bundle
    rows: tuple[Row, ...]
    figures: tuple[Figure, ...]
    curves: tuple[Curve, ...]

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Nodes by type and phase, of one rank of every stage together; most first."""
        found: dict[str, Counter[str]] = {}
        for entry in self.bundle.manifest["graphs"]:
            for type_, count in entry["ops"].items():
                if type_ not in STRUCTURE:
                    found.setdefault(type_, Counter())[entry["phase"]] += count
        return dict(sorted(found.items(), key=lambda item: (-sum(item[1].values()), item[0])))


def picture(folder: Path, progress: Notify = silent) -> Picture:
    """Look at a bundle. Raises BundleError where it is not one, or a graph's file is not what the manifest says."""
    bundle = open_bundle(folder)
    sources = bundle.folder / SOURCES
    rows: list[Row] = []
    figures: dict[tuple[str, str], Figure] = {}
    curves: list[Curve] = []
    with as_written(folder):
        found = read_json(sources) if sources.is_file() else {}
        drawn = [_Drawn(bundle, e, found.get(e["name"], {})) for e in bundle.manifest["graphs"]]
        for phase in dict.fromkeys(d.entry["phase"] for d in drawn):
            own = [d for d in drawn if d.entry["phase"] == phase]
            for d in own:
                progress("draw", len(rows), len(drawn))
                rows.append(d.row())
                curves.append(d.curve())
            for figure in _figures(own):
                figures[phase, figure.title] = figure
    return Picture(bundle, tuple(rows), tuple(figures.values()), tuple(curves))


def _figures(graphs: Sequence["_Drawn"]) -> Iterator[Figure]:
    """Of one phase: the first layer of each kind, and what is beside layers."""
    kinds: dict[str, list[tuple[_Drawn, str]]] = {}
    for d in graphs:
        for where in d.groups:
            kinds.setdefault(d.title(where), []).append((d, where))
    for title, places in kinds.items():
        first, where = places[0]
        yield first.figure(title, where, _stands_for(places))


def _stands_for(places: Sequence[tuple["_Drawn", str]]) -> str:
    (first, where), *rest = places
    if not rest:
        return "the only one of its kind"
    own = Counter(first.signature(where))
    others = [Counter(d.signature(w)) for d, w in rest]
    differ = {types[1] for other in others for types in [*(own - other), *(other - own)]}
    numbers = [int(w.rpartition(".")[2]) for _, w in places]
    words = f"stands for {len(places)} layers ({_ranges(numbers)})"
    if not differ:
        return f"{words}, all of the same nodes and shapes"
    same = sum(other == own for other in others)
    alike = f"{same + 1} have these nodes and shapes, the others" if same else "the others"
    return f"{words}; {alike} differ in {', '.join(sorted(differ))}"


def _ranges(numbers: Iterable[int]) -> str:
    """ "1, 3 to 5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    said = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in runs]
    return ", ".join(said[:6]) + (", ..." if len(said) > 6 else "")


class _Drawn:
    """A graph, read for drawing."""

    def __init__(self, bundle: Bundle, entry: Mapping[str, Any], origins: Mapping[str, Origins]) -> None:
        self.bundle, self.entry, self.origins = bundle, entry, origins
        self.view: View = view(air.from_bytes(bundle.graph_bytes(dict(entry)), entry["file"]).graph[0])
        self.nodes = [n for n in self.view.nodes if n.type not in STRUCTURE]

    @functools.cached_property
    def groups(self) -> dict[str, list[Node]]:
        """Nodes by layer ("layers.3") or, beside layers, by part ("head"), in the order of the graph."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            found.setdefault(_where(node.name), []).append(node)
        return found

    def title(self, where: str) -> str:
        """The kind of a layer in words, or the name of a part."""
        if not LAYER.match(f"{where}.x"):
            return where
        mixer, feed = self.parts(where)
        return " + ".join(word for word in (mixer, feed) if word) or where

    def parts(self, where: str) -> tuple[str, str]:
        """Mixer and feed-forward of a layer, in words."""
        names = {_part(node.name) for node in self.groups[where]}
        mixer = next((words for name, words in MIXERS.items() if name in names), "")
        if mixer == "MLA" and any("Indexer" in n.type or "Sparse" in n.type for n in self.groups[where]):
            mixer = "DSA"
        return mixer, next((words for name, words in FEEDS.items() if name in names), "")

    def signature(self, where: str) -> tuple[tuple[str, str, Any, int], ...]:
        """What two layers have in common that are alike: names, types, results, and how many inputs there are."""
        return tuple(
            (n.name.removeprefix(where), n.type, tuple((d.dtype, d.shape) for d in n.outs), len(n.inputs))
            for n in self.groups[where]
        )

    def row(self) -> Row:
        layers = [w for w in self.groups if LAYER.match(f"{w}.x")]
        cells = [Cell(int(w.rpartition(".")[2]), *self.parts(w), self.title(w)) for w in layers]
        beside = tuple(w for w in self.groups if w not in layers)
        return Row(self.entry["phase"], self.entry["name"], self.entry.get("stage", 0), tuple(cells), beside)

    # ---- one layer ---------------------------------------------------------------------------------------------------

    def figure(self, title: str, where: str, note: str) -> Figure:
        nodes = self.groups[where]
        drawn = [n for n in nodes if n.type not in VIEWS]
        boxes, edges = [self._box(n, where) for n in drawn], dict[tuple[int, int], str]()
        index = {n.name: i for i, n in enumerate(drawn)}
        ends: dict[str, int] = {}

        def end(name: str, value: Value) -> int:
            if name not in ends:
                ends[name] = len(boxes)
                boxes.append(Box(name=name, results=(value,)))
            return ends[name]

        for node in drawn:
            for edge in (self._behind(e) for e in node.inputs if e is not None):
                source = self.view.by_name[edge.node]
                if source.name in index:
                    edges.setdefault((index[source.name], index[node.name]), str(self._value(edge)))
                elif source.type not in STRUCTURE or self._handed_on(source):
                    key = end(f"from {_shown(source.name)}", self._value(edge))
                    edges.setdefault((key, index[node.name]), str(self._value(edge)))
        for name, value, to in self._left(drawn, where):
            edges.setdefault((index[name], end(to, value)), str(value))
        return Figure(
            self.entry["phase"], self.entry["name"], title, where, note, tuple(boxes),
            tuple((a, b, words) for (a, b), words in edges.items()), len(nodes) - len(drawn),
        )  # fmt: skip

    def _behind(self, edge: Edge) -> Edge:
        """The edge behind views of it."""
        node = self.view.by_name[edge.node]
        while node.type in VIEWS and node.inputs and node.inputs[0] is not None:
            edge = node.inputs[0]
            node = self.view.by_name[edge.node]
        return edge

    def _handed_on(self, node: Node) -> bool:
        """Whether an input of the graph is what a pipeline stage before hands on."""
        return node.type == "Data" and node.name in self.entry.get("reads", ())

    def _left(self, drawn: Sequence[Node], where: str) -> Iterator[tuple[str, Value, str]]:
        """What is read outside a layer: the node, the value, and by whom."""
        own = {n.name for n in self.groups[where]}
        for node in drawn:
            for i, _ in enumerate(node.outs):
                places = {_where(r) for r in self._readers(Edge(node.name, i)) if r not in own}
                if places:
                    first, *more = sorted(places, key=_natural)
                    also = f" and {len(more)} more" if more else ""
                    yield node.name, self._value(Edge(node.name, i)), f"to {_shown(first)}{also}"

    def _readers(self, edge: Edge) -> Iterator[str]:
        """Names of the nodes that read a value, through views."""
        for reader in self.view.readers.get(edge, ()):
            if reader.node.type in VIEWS:
                yield from self._readers(Edge(reader.node.name, 0))
            else:
                yield reader.node.name

    def _box(self, node: Node, where: str) -> Box:
        held = []
        for edge in (self._behind(e) for e in node.inputs if e is not None):
            source = self.view.by_name[edge.node]
            if source.type in ("Data", "RefData", "FileConstant") and not self._handed_on(source):
                held.append(self._named(source, where))
        results = tuple(self._value(Edge(node.name, i)) for i, d in enumerate(node.outs) if d.dtype)
        attributes = {k: str(v) for k, v in attrs_of(node.op).items() if not k.startswith("_")}
        return Box(
            name=node.name.removeprefix(f"{where}."), type=node.type, results=results, held=tuple(dict.fromkeys(held)),
            attributes=attributes, source=source_of(self.origins, node.name), carries=self._carries(node, results),
        )  # fmt: skip

    def _carries(self, node: Node, results: Sequence[Value]) -> str:
        """What a collective does, between how many ranks, and the bytes of its result."""
        if not node.type.startswith(COLLECTIVE):
            return ""
        group = str(attrs_of(node.op).get("group", ""))
        lists = (self.bundle.manifest["mesh"] or {}).get("groups", {}).get(group)
        ways = f" of {len(lists[0])} ranks" if lists else ""
        size = sum(v.bytes for v in results)
        return f"over {group}{ways}, {size:,} B" if group else f"{size:,} B"

    def _value(self, edge: Edge) -> Value:
        return _value(self.view.by_name[edge.node], edge.index)

    def _named(self, source: Node, where: str) -> Value:
        over = self._places.get(source.name)
        name = source.name.replace(f".{where}.", ".", 1)
        return replace(_value(source, 0), name=name, lies="" if over is None else _lies(over))

    @functools.cached_property
    def _places(self) -> dict[str, Sequence[Sequence[str]]]:
        """Mesh axes that split each dimension of a weight, state or input; empty without a mesh."""
        if self.bundle.manifest["mesh"] is None:
            return {}
        named = {w: self.bundle.weights["weights"][w] for w in self.entry["weights"]}
        named |= {p["name"]: p for p in (*self.bundle.manifest["state"]["states"], *self.entry["inputs"])}
        return {name: entry["over"] for name, entry in named.items() if "over" in entry}

    # ---- memory ------------------------------------------------------------------------------------------------------

    def curve(self) -> Curve:
        """Liveness in the order of the file: a value lives from its node to its last reader."""
        place = {n.name: i for i, n in enumerate(self.nodes)}
        costs, kinds = sorted(node_costs(self.view), key=lambda c: place[c.name]), tensor_kinds(self.view)
        born: dict[Edge, int] = {}
        dies: dict[Edge, int] = {}
        for i, node in enumerate(costs):
            for touch in node.touches:
                if touch.tensor.node in place and touch.tensor.node not in kinds:
                    born.setdefault(touch.tensor, i)
                    dies[touch.tensor] = i
        change = [0] * (len(costs) + 1)
        for edge, i in born.items():
            size = self._value(edge).bytes
            change[i] += size
            change[dies[edge] + 1] -= size
        live, at = [], 0
        for delta in change[:-1]:
            at += delta
            live.append(at)
        top = max(range(len(live)), key=lambda i: live[i], default=0)
        marks: dict[int, int] = {}
        for i, node in enumerate(costs):
            if m := LAYER.match(node.name):
                marks.setdefault(int(m["number"]), i)
        held = self._always()
        return Curve(
            self.entry["phase"], self.entry.get("stage", 0), len(live), tuple(_thinned(live)),
            (live[top], costs[top].name) if live else (0, ""), tuple(marks.items()), *held,
        )  # fmt: skip

    def _always(self) -> tuple[int, int]:
        """Bytes of weights and states of the graph, on one rank."""
        kinds = tensor_kinds(self.view)
        sums = {"weights": 0, "states": 0}
        for name, kind in kinds.items():
            sums[kind] += self._value(Edge(name, 0)).bytes
        return sums["weights"], sums["states"]


def _thinned(values: Sequence[int]) -> Iterator[int]:
    """The most of each stretch, of at most `COLUMNS` stretches."""
    step = -(-len(values) // COLUMNS) or 1
    return (max(values[i : i + step]) for i in range(0, len(values), step))


def _where(name: str) -> str:
    """The layer of a node's name, or its part where it is of none."""
    part = name.partition("/")[0]
    found = LAYER.fullmatch(part)
    return f"{found['stem']}.{found['number']}" if found else part


def _part(name: str) -> str:
    return name.partition("/")[0].rpartition(".")[2].rstrip("0123456789")


def _shown(name: str) -> str:
    """A place in words: "layer 3"."""
    where = _where(name)
    found = re.fullmatch(r"(?:\w+\.)*(layer|block)s\.(\d+)", where)
    return f"{found[1]} {found[2]}" if found else "the graph's results" if where == "NetOutput" else where


def _natural(text: str) -> list[Any]:
    return [(int(x), "") if x.isdigit() else (-1, x) for x in re.split(r"(\d+)", text)]


def _value(node: Node, index: int) -> Value:
    d, proto = node.outs[index], node.op.output_desc[index]
    if not is_known(proto):
        return Value(dtype="unknown", shape=(), bytes=0)
    return Value(dtype=Dtype.of_proto(d.dtype).text, shape=d.shape or (), bytes=bytes_of(proto))


def _lies(over: Sequence[Sequence[str]]) -> str:
    split = [f"dim {i} over {' x '.join(axes)}" for i, axes in enumerate(over) if axes]
    return ", ".join(split) or "whole on every rank"
