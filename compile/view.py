"""A GE graph as plain Python values, for reading: nodes, edges both ways, descriptions.

Reading fields of protobuf messages costs; a graph of ten thousand nodes is walked many times by the checks, so each
field is read once here. The view does not follow later changes of the graph.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .ge_proto import GraphDef, OpDef, TensorDescriptor, shape_of


class Desc(NamedTuple):
    """A description. `shape` is None and `dtype` 0 where unknown; `unfed` marks an optional input that is not given."""

    name: str
    dtype: int
    shape: tuple[int, ...] | None
    unfed: bool
    device: str


class Edge(NamedTuple):
    """Output `index` of the node called `node`."""

    node: str
    index: int

    def __str__(self) -> str:
        return f"{self.node}:{self.index}"


@dataclass(slots=True, eq=False)
class Node:
    """A node. `inputs` are the data inputs in order, None for one that is not given; `after` the control edges."""

    op: OpDef
    name: str
    type: str
    inputs: list[Edge | None]
    after: list[str]
    ins: list[Desc]
    outs: list[Desc]

    def input(self, name: str) -> Desc | None:
        """The description of an input that is given."""
        return next((d for d in self.ins if d.name == name and not d.unfed), None)

    def output(self, name: str) -> Desc | None:
        return next((d for d in self.outs if d.name == name), None)

    def predecessors(self) -> list[str]:
        """Names of the nodes it reads or waits for, in no order and maybe twice."""
        return [edge.node for edge in self.inputs if edge is not None] + self.after

    def edge(self, name: str) -> Edge | None:
        """The edge into an input."""
        return next((e for d, e in zip(self.ins, self.inputs, strict=False) if d.name == name), None)


class Reader(NamedTuple):
    """Data input `position` of a node."""

    node: Node
    position: int


@dataclass
class View:
    """A graph.

    Attributes:
        nodes: in the graph's order. by_name: the first node of each name.
        readers: of each edge.
    """

    name: str
    nodes: list[Node]
    by_name: dict[str, Node]
    readers: dict[Edge, list[Reader]] = field(default_factory=dict)

    def of_type(self, *types: str) -> Iterator[Node]:
        return (node for node in self.nodes if node.type in types)

    def producer(self, edge: Edge) -> Desc:
        return self.by_name[edge.node].outs[edge.index]

    @functools.cached_property
    def order(self) -> list[Node]:
        """Nodes such that each comes after all it reads or waits for; nodes on a cycle are missing."""
        waits: dict[str, int] = {}
        followers: dict[str, list[Node]] = {}
        for node in self.nodes:
            before = {name for name in node.predecessors() if name in self.by_name}
            waits[node.name] = len(before)
            for name in before:
                followers.setdefault(name, []).append(node)
        ready = [node for node in self.nodes if not waits[node.name]]
        for node in ready:  # grows while it is walked
            for follower in followers.get(node.name, ()):
                waits[follower.name] -= 1
                if not waits[follower.name]:
                    ready.append(follower)
        return ready


def view(graph: GraphDef) -> View:
    """Read a graph. Edges may lead nowhere: the checks say so."""
    nodes = [_node(op) for op in graph.op]
    made = View(graph.name, nodes, {})
    for node in nodes:
        made.by_name.setdefault(node.name, node)
        for position, edge in enumerate(node.inputs):
            if edge is not None:
                made.readers.setdefault(edge, []).append(Reader(node, position))
    return made


def _node(op: OpDef) -> Node:
    inputs: list[Edge | None] = []
    after: list[str] = []
    for text in op.input:
        name, _, index = text.rpartition(":")
        if not text:
            inputs.append(None)
        elif index == "-1":
            after.append(name)
        else:
            inputs.append(Edge(name, int(index) if index.isdigit() else -2))
    return Node(
        op, op.name, op.type, inputs, after, [_desc(d) for d in op.input_desc], [_desc(d) for d in op.output_desc]
    )


def _desc(d: TensorDescriptor) -> Desc:
    shape = shape_of(d) if d.HasField("shape") else None
    dtype = d.dtype
    return Desc(d.name, dtype, shape, not dtype and "_is_unfed_optional" in d.attr, d.device_type)
