"""The nodes of a graph for a reader: what each computes from what, and which line of layer code it is of."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from kimi_graph.display import Html, card, columns, fold, pictured, table

from .cost import NodeCost, node_costs
from .ge_proto import Dtype, GraphDef, OpDef, data_edges, get_attr, is_known, shape_of
from .origins import Origins, source_of
from .view import view

SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
STRUCTURE = ("Const", "Data", "RefData", "FileConstant", "NetOutput")


@dataclass(frozen=True, kw_only=True)
class GraphNode:
    """A node of a GE graph.

    Attributes:
        name: `layers.3.kda/MatMul`: its part, and its name there. type: GE's operator.
        inputs: names of the nodes, weights (`p.`), states (`s.`) and inputs it reads; "name:1" is a second result, ""
            an optional input that is not given.
        results: dtype and shape of each. attributes: by name, without GE's own.
        source: line of layer code it is of; empty where a pass made it.
        read, written: bytes it moves, as `inspect --cost` counts them; a view moves none.
    """

    name: str
    type: str
    inputs: tuple[str, ...]
    results: tuple[tuple[str, tuple[int, ...]], ...]
    attributes: Mapping[str, Any] = field(compare=False)
    source: str
    read: int = 0
    written: int = 0

    @property
    def part(self) -> str:
        """The part of the model it is in: `layers.3.kda`."""
        return self.name.partition("/")[0]


class Nodes(Sequence[GraphNode]):
    """Nodes in the graph's order. Inputs, weights, states and constants are not among them, but named by readers."""

    def __init__(self, nodes: Sequence[GraphNode], name: str) -> None:
        self._nodes, self.name = tuple(nodes), name

    @overload
    def __getitem__(self, index: int) -> GraphNode: ...
    @overload
    def __getitem__(self, index: slice) -> "Nodes": ...
    def __getitem__(self, index: Any) -> Any:
        return Nodes(self._nodes[index], self.name) if isinstance(index, slice) else self._nodes[index]

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[GraphNode]:
        return iter(self._nodes)

    @property
    def types(self) -> dict[str, int]:
        """How many there are of each type, most first."""
        return dict(Counter(node.type for node in self).most_common())

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts of the model they are in, in order: `layers.0.kda`, `layers.0.dense`."""
        return tuple(dict.fromkeys(node.part for node in self))

    def within(self, part: str) -> "Nodes":
        """Those of a part of the model (`layers.3.kda`) or of a layer (`layers.3`); empty where there is none."""
        return Nodes([n for n in self if n.part == part or n.part.startswith(f"{part}.")], f"{self.name}: {part}")

    def of_type(self, *types: str) -> "Nodes":
        """Those of some types."""
        return Nodes([node for node in self if node.type in types], self.name)

    def __repr__(self) -> str:
        return "\n".join([self._said, *(f"  {line}" for line in columns(self._rows(most=20, letters=48)))])

    def _repr_html_(self) -> Html:
        counts = ", ".join(f"{count} {type_}" for type_, count in self.types.items())
        parts = (self.within(part) for part in self.parts)
        return card(self._said, counts, *(fold(f"{p.parts[0]}: {len(p)}", table(p._rows())) for p in parts))

    @property
    def _said(self) -> str:
        return f"{self.name}: {len(self):,} nodes"

    def _rows(self, most: int = 2000, letters: int = 2000) -> list[tuple[str, ...]]:
        """Of some nodes, with so many letters of what each reads; names within the part where there is one alone."""
        alone = f"{self.parts[0]}/" if len(self.parts) == 1 else ""
        rows = [("node", "type", "reads", "gives", "source")]
        for node in self[:most]:
            gives = ", ".join(f"{SHORT.get(dtype, dtype)}{pictured(shape)}" for dtype, shape in node.results)
            rows.append((node.name.removeprefix(alone), node.type, _reads(node, letters), gives, node.source))
        return rows if len(self) <= most else [*rows, (f"... {len(self) - most:,} more", "", "", "", "")]


def _reads(node: GraphNode, letters: int) -> str:
    text = ", ".join(name.removeprefix(f"{node.part}/") or "-" for name in node.inputs)
    return text if len(text) <= letters else f"{text[: letters - 4]} ..."


def read_nodes(graph: GraphDef, origins: Mapping[str, Origins]) -> Nodes:
    """The nodes of a graph that compute something."""
    moved = {cost.name: cost for cost in node_costs(view(graph))}
    return Nodes([_node(op, origins, moved.get(op.name)) for op in graph.op if op.type not in STRUCTURE], graph.name)


def _node(op: OpDef, origins: Mapping[str, Origins], cost: NodeCost | None) -> GraphNode:
    return GraphNode(
        name=op.name,
        type=op.type,
        inputs=tuple(edge.removesuffix(":0") for edge in data_edges(op)),
        results=tuple((Dtype.of_proto(d.dtype).text, shape_of(d)) for d in op.output_desc if is_known(d)),
        attributes={name: get_attr(op, name) for name in op.attr if not name.startswith("_")},
        source=source_of(origins, op.name),
        read=0 if cost is None else cost.read,
        written=0 if cost is None else cost.written,
    )
