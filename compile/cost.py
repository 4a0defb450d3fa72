"""`kimi-graph inspect --cost`: the bytes that every node of a graph reads and writes, from the graph alone.

How it is counted:

* A view costs nothing; every other node reads each operand once and writes each result once.
* `PARTS` says which operators touch a part of an operand only: rows that are taken or replaced, the slots of a step's
  rows, weights of at most as many experts as there are rows, pages of the sequences at capacity, selected rows.
* A result in place is written where it changes; it is no second tensor.

What a step cannot do without is every weight it uses and every state it touches, once: `Needed`. The ratio of the two
is what casts, padding, copies and activations add. Caches of a device are not in it.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kimi_graph.progress import Notify, silent

from . import air
from .bundle import Bundle, as_written, open_bundle
from .ge_proto import Dtype
from .manifest import is_weight
from .view import Desc, Edge, Node, View, view

STRUCTURE = {"Data", "RefData", "Const", "FileConstant", "NetOutput"}
VIEWS = {"Reshape", "Squeeze", "Unsqueeze", "ExpandDims", "Bitcast"}
COPIES = {
    "casts": {"Cast"},
    "padding": {"PadV3", "Slice"},  # Slice takes the padding off again; slices of a model are StridedSliceV2
    "layout changes": {
        "BroadcastTo", "ConcatD", "ConcatV2", "Identity", "Pack", "Split", "SplitD", "SplitV", "StridedSlice",
        "StridedSliceV2", "TensorMove", "Tile", "Transpose",
    },
}  # fmt: skip
CATEGORIES = ("weights", "states", "activations", *COPIES)
CATEGORY_OF = {type_: category for category, types in COPIES.items() for type_ in types}

# ---- parts of operands -----------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Bytes read and written of the operands and results, by name, that a node does not touch whole."""

    read: dict[str, int] = {}  # noqa: RUF012 (never changed)
    written: dict[str, int] = {}  # noqa: RUF012


Parts = Callable[[Node], Part]


def _size(desc: Desc | None) -> int:
    """Bytes of a tensor; 0 where it is not given or its shape not known."""
    if desc is None or desc.shape is None or not desc.dtype:
        return 0
    return -(-math.prod(desc.shape) * Dtype.of_proto(desc.dtype).bits // 8)


def _count(desc: Desc | None) -> int:
    return 0 if desc is None else math.prod(desc.shape or ())


def _fraction(desc: Desc | None, rows: int) -> int:
    """Bytes of `rows` of a tensor's first dimension, at most all."""
    size = _size(desc)
    return size if desc is None or not desc.shape else min(size, size // max(1, desc.shape[0]) * rows)


def _taken(node: Node) -> Part:
    """What is gathered or cut out is read, and no more."""
    return Part({"x": sum(_size(d) for d in node.outs)})


def _replaced(**news: str) -> Parts:
    """Only the rows that a second operand brings are written; nothing is read of what they are written into."""

    def parts(node: Node) -> Part:
        return Part(dict.fromkeys(news, 0), {old: _size(node.input(new)) for old, new in news.items()})

    return parts


def _slots(state: str, of: str, unwritten: str = "") -> Parts:
    """The rows' slots of a state are read and written. `unwritten`: a result that is declared and never written."""

    def parts(node: Node) -> Part:
        size = _fraction(node.input(state), _count(node.input(of)))
        return Part({state: size}, {state: size, unwritten: 0})

    return parts


def _experts(node: Node) -> Part:
    """Rows are sorted by group, so at most as many groups as there are rows have any; the other groups are not read."""
    of_groups = ("weight", "bias", "scale", "offset", "antiquant_scale", "antiquant_offset")
    stacks = {d: _stem(d) for d in node.ins if _stem(d) in of_groups and not d.unfed}
    weights = [d for d, stem in stacks.items() if stem == "weight"]
    stacked = weights[0].shape if len(weights) == 1 else None
    groups = stacked[0] if stacked else len(weights)  # one stacked tensor, or a tensor for each
    rows = sum(_count(d) // (d.shape or (1,))[-1] for d in node.ins if _stem(d) == "x")
    return Part({d.name: _size(d) * min(groups, rows) // groups for d in stacks})


def _stem(desc: Desc) -> str:
    """Name of a dynamic input: `weight` of `weight0`."""
    return desc.name.rstrip("0123456789")


def _pages(*pools: str) -> Parts:
    """The pages of the block table, all of them: sequences at capacity. Without a table the operands are no pools."""

    def parts(node: Node) -> Part:
        table = node.input("block_table")
        return Part({} if table is None else {p: _fraction(node.input(p), _count(table)) for p in pools})

    return parts


def _selected(node: Node) -> Part:
    """Every query token reads the rows selected for it."""
    rows = _count(node.input("sparse_indices") or node.input("selected"))
    pools = [d for d in node.ins if not d.unfed and d.name in ("key", "value", "key_rope", "latent", "rope")]
    return Part({d.name: _size(d) // math.prod((d.shape or ())[:-1]) * rows for d in pools})


PARTS: Mapping[str, Parts] = {
    **dict.fromkeys(("GatherV2", "GatherElements", "StridedSlice", "StridedSliceV2", "Slice"), _taken),
    "ScatterNdUpdate": _replaced(var="updates"),
    "ScatterPaKvCache": _replaced(key_cache="key", value_cache="value"),
    "ShortConv": _slots("window", "slots"),
    "CausalConv1d": _slots("conv_states", "cache_indices"),
    "KdaChunk": _slots("memory", "slots"),
    "KdaStep": _slots("memory", "slots"),
    "RecurrentGatedDeltaRule": _slots("state", "ssm_state_indices"),
    "RecurrentKda": _slots("initial_state", "ssm_state_indices", unwritten="final_state"),
    "GroupedMatmul": _experts,
    "FusedInferAttentionScore": _pages("key0", "value0", "key_rope"),
    "LightningIndexer": _pages("key"),
    "QuantLightningIndexer": _pages("key", "key_dequant_scale"),
    **dict.fromkeys(("SparseFlashAttention", "KvQuantSparseFlashAttention", "SparseAttend"), _selected),
}


# ---- nodes -----------------------------------------------------------------------------------------------------------


class Touch(NamedTuple):
    """What a node reads and writes of one tensor, in bytes. `tensor`: where it comes from, through views."""

    tensor: Edge
    category: str
    read: int
    written: int


class NodeCost(NamedTuple):
    """A node's touches, one a tensor."""

    name: str
    type: str
    touches: tuple[Touch, ...]

    @property
    def read(self) -> int:
        return sum(t.read for t in self.touches)

    @property
    def written(self) -> int:
        return sum(t.written for t in self.touches)


def node_costs(graph: View) -> list[NodeCost]:
    """Of every node that is no view and no structure, in an order in which they can run."""
    origin: dict[Edge, Edge] = {}
    kinds = tensor_kinds(graph)
    costs = []
    for node in graph.order:
        _trace(node, origin)
        if node.type not in STRUCTURE and node.type not in VIEWS:
            costs.append(NodeCost(node.name, node.type, tuple(_touches(node, kinds, origin))))
    return costs


def tensor_kinds(graph: View) -> dict[str, str]:
    """Weights and states by name; every other tensor is an activation."""
    states = {node.name: "states" for node in graph.of_type("RefData")}
    return states | {node.name: "weights" for node in graph.nodes if is_weight(node.op)}


def _trace(node: Node, origin: dict[Edge, Edge]) -> None:
    """Note which results are no new tensors: a view is its operand, and so is a result with an operand's name."""
    for index, desc in enumerate(node.outs):
        old = node.inputs[0] if node.type in VIEWS else node.edge(desc.name)
        if old is not None:
            origin[Edge(node.name, index)] = origin.get(old, old)


def _touches(node: Node, kinds: Mapping[str, str], origin: Mapping[Edge, Edge]) -> Iterator[Touch]:
    part = PARTS[node.type](node) if node.type in PARTS else Part()
    reads: dict[Edge, int] = {}
    for desc, edge in zip(node.ins, node.inputs, strict=False):
        if edge is not None:  # an operand that is given twice is read once
            tensor = origin.get(edge, edge)
            reads[tensor] = max(reads.get(tensor, 0), part.read.get(desc.name, _size(desc)))
    writes: dict[Edge, int] = {}
    for index, desc in enumerate(node.outs):
        edge = Edge(node.name, index)
        writes[origin.get(edge, edge)] = part.written.get(desc.name, _size(desc))
    for tensor in reads | writes:
        category = CATEGORY_OF.get(node.type) or kinds.get(tensor.node, "activations")
        yield Touch(tensor, category, reads.get(tensor, 0), writes.get(tensor, 0))


# ---- graphs ----------------------------------------------------------------------------------------------------------


class Needed(NamedTuple):
    """Bytes that a step cannot do without: weights it uses, and states it reads and writes, each once."""

    weights: int
    states_read: int
    states_written: int


@dataclass(frozen=True)
class GraphCost:
    """Of one graph.

    Attributes:
        weights: bytes of all its weights, used or not.
    """

    name: str
    nodes: list[NodeCost]
    needed: Needed
    weights: int

    @functools.cached_property
    def total(self) -> int:
        """Bytes read and written by all nodes."""
        return sum(node.read + node.written for node in self.nodes)

    @property
    def ratio(self) -> float:
        return self.total / max(1, sum(self.needed))

    def by_category(self) -> dict[str, tuple[int, int]]:
        """Bytes read and written."""
        moved: dict[str, list[tuple[int, int]]] = {category: [] for category in CATEGORIES}
        for t in (t for node in self.nodes for t in node.touches):
            moved[t.category].append((t.read, t.written))
        return {category: _sums(pairs) for category, pairs in moved.items()}

    def by_type(self) -> dict[str, tuple[int, int, int]]:
        """Nodes, bytes read, bytes written; the costliest operator first."""
        nodes: dict[str, list[NodeCost]] = {}
        for node in self.nodes:
            nodes.setdefault(node.type, []).append(node)
        rows = {t: (len(same), *_sums((n.read, n.written) for n in same)) for t, same in nodes.items()}
        return dict(sorted(rows.items(), key=lambda row: (-sum(row[1][1:]), row[0])))


def _sums(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    read, written = 0, 0
    for r, w in pairs:
        read, written = read + r, written + w
    return read, written


def graph_cost(graph: View, entry: Mapping[str, Any], state: Mapping[str, Any]) -> GraphCost:
    """Cost of a graph.

    Args:
        entry, state: the manifest's entry of the graph, and its state contract.
    """
    nodes = node_costs(graph)
    needed = _needed(nodes, tensor_kinds(graph), _most_of_states(entry, state))
    return GraphCost(entry["name"], nodes, needed, sum(_size(n.outs[0]) for n in graph.nodes if is_weight(n.op)))


def _needed(nodes: Iterable[NodeCost], kinds: Mapping[str, str], most: Mapping[str, tuple[int, int]]) -> Needed:
    """Of each weight and state the most that any node touches; of a state no more than `most`, read and written."""
    weights: dict[str, int] = {}
    states: dict[str, tuple[int, int]] = {}
    for name, t in ((t.tensor.node, t) for node in nodes for t in node.touches):
        kind = kinds.get(name)
        if kind == "weights":
            weights[name] = max(weights.get(name, 0), t.read)
        elif kind == "states":
            (read, written), (most_read, most_written) = states.get(name, (0, 0)), most[name]
            states[name] = max(read, min(t.read, most_read)), max(written, min(t.written, most_written))
    return Needed(sum(weights.values()), *_sums(states.values()))


def _most_of_states(entry: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """The most a step has to read and to write of each state, whatever its nodes do: what belongs to its rows."""
    first = state["shards"][0] if "shards" in state else None  # of a mesh: what one rank has
    slots, pages = (state[k] if first is None else first[k][1] - first[k][0] for k in ("slots", "pages"))
    rows, tokens = entry["rows"] if first is None else first["rows"][1] - first["rows"][0], entry["tokens"]
    most = {}
    for s in state["states"]:
        size = math.prod(s["shape" if first is None else "local"]) * getattr(torch, s["dtype"]).itemsize
        if s["axes"][0] == "slots":
            most[s["name"]] = (size // slots * rows,) * 2
        else:
            pools = state.get("pools", 1)  # of which a rank has one
            page, each = size * pools // pages, state["pages_per_sequence"] // pools
            most[s["name"]] = page * each * rows, page // state["page_tokens"] * rows * tokens
    return most


# ---- bundles ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Of the graphs of a bundle. `listed`: the nodes are asked for too."""

    bundle: Bundle
    graphs: list[GraphCost]
    listed: bool

    @property
    def summary(self) -> str:
        ratios = ", ".join(f"{g.name} {g.ratio:.3f}" for g in self.graphs)
        return f"bytes of all nodes / bytes of weights used and states: {ratios}"

    def text(self) -> str:
        tokens = self.bundle.manifest["state"]["tokens_per_sequence"]
        head = f"bytes of a step, sequences at their capacity of {tokens:,} tokens"
        return "\n\n".join([head, *("\n".join(self._lines(g)) for g in self.graphs)])

    def _lines(self, g: GraphCost) -> list[str]:
        n = g.needed
        used = f"{n.weights:,} of {g.weights:,}"
        return [
            f"{g.name}: {g.total:,} bytes read and written, {g.ratio:.3f} x the weights used and the states",
            f"  weights used {used}, states read {n.states_read:,} and written {n.states_written:,}",
            *_table(_category_rows(g)),
            *_table(_type_rows(g)),
            *(_table(_node_rows(g)) if self.listed else ()),
        ]

    def to_json(self) -> Any:
        return {"graphs": [_graph_json(g, self.listed) for g in self.graphs]}


Row = tuple[str, ...]


def _category_rows(g: GraphCost) -> Iterator[Row]:
    yield "category", "read", "written", "share"
    for category, moved in g.by_category().items():
        yield category, *_amounts(g, *moved)


def _type_rows(g: GraphCost) -> Iterator[Row]:
    yield "operator", "nodes", "read", "written", "share"
    for type_, (nodes, read, written) in g.by_type().items():
        yield type_, f"{nodes:,}", *_amounts(g, read, written)


def _node_rows(g: GraphCost) -> Iterator[Row]:
    yield "node", "operator", "read", "written", "share"
    for node in g.nodes:
        yield node.name, node.type, *_amounts(g, node.read, node.written)


def _amounts(g: GraphCost, read: int, written: int) -> Row:
    return f"{read:,}", f"{written:,}", f"{100 * (read + written) / max(1, g.total):.2f}%"


def _table(rows: Iterable[Row]) -> list[str]:
    """Columns, words to the left and numbers to the right, after an empty line."""
    columns = [_column(cells) for cells in zip(*rows, strict=True)]
    return ["", *("  " + "  ".join(row).rstrip() for row in zip(*columns, strict=True))]


def _column(cells: Row) -> Row:
    width = max(map(len, cells))
    return tuple(c.rjust(width) if cells[1][0].isdigit() else c.ljust(width) for c in cells)


def _graph_json(g: GraphCost, listed: bool) -> dict[str, Any]:
    moved = ("read", "written")
    found = {
        "name": g.name,
        "bytes": g.total,
        "ratio": g.ratio,
        "needed": g.needed._asdict(),
        "weights": g.weights,
        "categories": {c: dict(zip(moved, sums, strict=True)) for c, sums in g.by_category().items()},
        "operators": {t: dict(zip(("nodes", *moved), row, strict=True)) for t, row in g.by_type().items()},
    }
    nodes = [{"name": n.name, "type": n.type, "read": n.read, "written": n.written} for n in g.nodes]
    return found | ({"nodes": nodes} if listed else {})


def inspect_cost(folder: Path, phase: str | None = None, progress: Notify = silent) -> Costs:
    """What the nodes of a bundle's graphs read and write; of one phase, node by node, where one is named.

    Raises:
        BundleError: not a bundle, damaged, or without a graph of that phase.
    """
    bundle = open_bundle(folder)
    with as_written(folder):
        entries = bundle.manifest["graphs"] if phase is None else [bundle.graph(phase)]
        graphs = []
        for entry in entries:
            progress("count", len(graphs), len(entries))
            graphs.append(bundle_cost(bundle, entry))
        found = Costs(bundle, graphs, listed=phase is not None)
        found.text()
    return found


def bundle_cost(bundle: Bundle, entry: Mapping[str, Any]) -> GraphCost:
    """Cost of the graph of a manifest's entry."""
    model = air.from_bytes(bundle.graph_bytes(dict(entry)), entry["file"])
    return graph_cost(view(model.graph[0]), entry, bundle.manifest["state"])
