"""A GE graph read once: nodes bound to their semantics, an order to run them in, and what may be wrong with it."""

import heapq
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kimi_graph.compile.ge_proto import (
    GraphDef,
    ModelDef,
    OpDef,
    control_edges,
    data_edges,
    is_known,
    shape_of,
    split_edge,
)
from kimi_graph.errors import KimiGraphError

from . import semantics as _semantics  # noqa: F401  registers every operator type
from .memory import Memory, find_memory
from .node import Edge, Node, attrs_of
from .registry import SEMANTICS, Input, Semantics

SOURCES = ("Data", "RefData")


@dataclass(frozen=True)
class Graph:
    """A checked graph.

    Attributes:
        nodes: by name. order: all nodes, each after what it reads; a source comes right before its first reader.
        needed: names of the nodes that NetOutput depends on (all nodes where there is none).
        inputs: Data nodes by name, states: RefData nodes, both by `index`.
        outputs: edges of NetOutput, None where there is no NetOutput.
        memory: which edges share memory, and who writes it.
    """

    nodes: Mapping[str, Node]
    order: tuple[Node, ...]
    needed: frozenset[str]
    inputs: tuple[str, ...]
    states: tuple[str, ...]
    outputs: tuple[Edge, ...] | None
    memory: Memory


def parse(model: ModelDef, error: type[KimiGraphError]) -> Graph:
    """Read a model of one graph.

    Raises:
        error: duplicate names, dangling edges, cycles, Data nodes of one index, operators or inputs that are not known,
            or memory that is written while others may read it.
    """
    if len(model.graph) != 1:
        raise error(f"a model of one graph expected, found {len(model.graph)}")
    graph = model.graph[0]
    ops = _by_name(graph, error)
    nodes = {name: _node(op, ops, position, error) for position, (name, op) in enumerate(ops.items())}
    results = [n for n in nodes.values() if n.type == "NetOutput"]
    if len(results) > 1:
        raise error(f"one NetOutput expected, found {', '.join(n.name for n in results)}")
    order = _order(nodes, error)
    needed = _needed(nodes, results[0]) if results else frozenset(nodes)
    numbered = _numbered(nodes, error)
    return Graph(
        nodes=nodes,
        order=order,
        needed=needed,
        inputs=tuple(n.name for n in numbered if n.type == "Data"),
        states=tuple(n.name for n in numbered if n.type == "RefData"),
        outputs=results[0].edges if results else None,
        memory=find_memory(nodes, order, needed, error),
    )


def check_descriptions(model: ModelDef, error: type[KimiGraphError]) -> None:
    """Every input is described as the output it reads, an input of the graph in one way: GE believes descriptions.

    Raises:
        error: one that is not (what is not described at all is not looked at).
    """
    ops = {op.name: op for op in model.graph[0].op}
    for op in ops.values():
        if op.type in SOURCES:
            made = list(op.output_desc)
        else:
            edges = [split_edge(edge) for edge in data_edges(op)]
            made = [ops[name].output_desc[index] if name else None for name, index in edges]
        for desc, other in zip(op.input_desc, made, strict=False):
            if other is None or not is_known(desc) or not is_known(other):
                continue
            if (desc.dtype, shape_of(desc)) != (other.dtype, shape_of(other)):
                found, read = (f"dtype {d.dtype} {list(shape_of(d))}" for d in (desc, other))
                where = f"{op.name} ({op.type}): input {desc.name!r}"
                raise error(f"{where} is described as {found}, what it reads as {read}")


def _by_name(graph: GraphDef, error: type[KimiGraphError]) -> dict[str, OpDef]:
    ops: dict[str, OpDef] = {}
    for op in graph.op:
        if op.name in ops:
            raise error(f"{op.name}: two nodes have this name ({ops[op.name].type} and {op.type})")
        ops[op.name] = op
    return ops


def _node(op: OpDef, ops: Mapping[str, OpDef], position: int, error: type[KimiGraphError]) -> Node:
    semantics = SEMANTICS.get(op.type)
    if semantics is None and op.type not in (*SOURCES, "NetOutput"):
        raise error(
            f"{op.name}: operator type {op.type!r} has no semantics: nothing could be verified. docs/evidence.md lists "
            "the types that have, docs/development.md says how to add one"
        )
    try:
        attrs = attrs_of(op)
    except ValueError as problem:
        raise error(f"{op.name} ({op.type}): {problem}") from problem
    for edge in op.input:
        if edge:
            _check_edge(op, edge, ops, error)
    return Node(
        name=op.name,
        type=op.type,
        semantics=semantics,
        arguments=_bind(op, semantics, error) if op.type not in SOURCES else {},
        controls=tuple(split_edge(edge)[0] for edge in control_edges(op)),
        attrs=attrs,
        descs=tuple(op.output_desc),
        position=position,
    )


def _check_edge(op: OpDef, edge: str, ops: Mapping[str, OpDef], error: type[KimiGraphError]) -> None:
    try:
        name, index = split_edge(edge)
    except ValueError:
        name, index = edge, 0
    if name not in ops:
        raise error(f"{op.name} ({op.type}): reads {edge!r}, but there is no node {name!r}")
    count = len(ops[name].output_desc)
    if not -1 <= index < count:
        raise error(f"{op.name} ({op.type}): reads {edge!r}, but {name!r} has {count} outputs")


def _bind(op: OpDef, semantics: Semantics | None, error: type[KimiGraphError]) -> dict[str, Any]:
    """Edges by input name. Positions decide in GE, so names must come in prototype order."""
    edges = [split_edge(edge) if edge else None for edge in data_edges(op)]
    if semantics is None:
        return {f"input{i}": edge for i, edge in enumerate(edges)}
    names = [desc.name for desc in op.input_desc]
    if len(names) != len(edges):
        raise error(f"{op.name} ({op.type}): {len(edges)} data edges for {len(names)} described inputs")
    _check_outputs(op, semantics, error)
    given = list(zip(names, edges, strict=True))
    bound: dict[str, Any] = {}
    for wanted in semantics.inputs:
        bound[wanted.name] = _take(given, wanted, op, error)
    if given:
        raise error(
            f"{op.name} ({op.type}): input {given[0][0]!r} is unknown or out of order; "
            f"the prototype has {', '.join(i.name for i in semantics.inputs)}"
        )
    return bound


def _take(
    given: list[tuple[str, Edge | None]], wanted: Input, op: OpDef, error: type[KimiGraphError]
) -> Edge | list[Edge] | None:
    """Remove the next input from `given`, which must be the wanted one; only optional ones may be missing."""
    if wanted.dynamic:
        found: list[Edge] = []
        while given and given[0][0] == f"{wanted.name}{len(found)}":
            edge = given.pop(0)[1]
            if edge is None:
                raise error(f"{op.name} ({op.type}): input {wanted.name}{len(found)} is described but not fed")
            found.append(edge)
        return found
    edge = given.pop(0)[1] if given and given[0][0] == wanted.name else None
    if edge is None and not wanted.optional:
        raise error(f"{op.name} ({op.type}): required input {wanted.name!r} is missing or out of order")
    return edge


def _check_outputs(op: OpDef, semantics: Semantics, error: type[KimiGraphError]) -> None:
    """Names of outputs, where they are written: they say which output is which input's memory."""
    names = [desc.name for desc in op.output_desc]
    if any(name.endswith("[]") for name in semantics.outputs) or not any(names):
        return
    if names != list(semantics.outputs):
        raise error(f"{op.name} ({op.type}): outputs are {names}, the prototype has {list(semantics.outputs)}")


def _order(nodes: Mapping[str, Node], error: type[KimiGraphError]) -> tuple[Node, ...]:
    """File order as far as edges allow; nodes that read nothing come as late as possible, so that less is held."""
    before = {n.name: {*(e[0] for e in n.edges), *n.controls} for n in nodes.values()}
    after: dict[str, list[str]] = defaultdict(list)
    waiting = {}
    for name, sources in before.items():
        waiting[name] = sum(1 for s in sources if before[s])
        for source in sources:
            after[source].append(name)
    ready = [nodes[n].position for n, count in waiting.items() if count == 0 and before[n]]
    heapq.heapify(ready)
    by_position = {n.position: n for n in nodes.values()}
    order: list[Node] = []
    placed: set[str] = set()
    while ready:
        node = by_position[heapq.heappop(ready)]
        for source in sorted(before[node.name], key=lambda n: nodes[n].position):
            if source not in placed:
                placed.add(source)
                order.append(nodes[source])
        placed.add(node.name)
        order.append(node)
        for reader in after[node.name]:
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heapq.heappush(ready, nodes[reader].position)
    left = [n for n in nodes.values() if n.name not in placed]
    if any(before[n.name] for n in left):
        raise error(f"a cycle: {', '.join(n.name for n in left if before[n.name])[:500]} wait for each other")
    return (*order, *left)


def _needed(nodes: Mapping[str, Node], result: Node) -> frozenset[str]:
    todo, found = [result.name], set()
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += [edge[0] for edge in nodes[name].edges] + list(nodes[name].controls)
    return frozenset(found)


def _numbered(nodes: Mapping[str, Node], error: type[KimiGraphError]) -> list[Node]:
    """Data and RefData nodes by index."""
    found: dict[int, Node] = {}
    for node in nodes.values():
        if node.type not in SOURCES:
            continue
        left = sorted(set(node.attrs) - {"index"})
        index = node.attrs.get("index")
        if left or type(index) is not int:
            raise error(
                f"{node.name} ({node.type}): one attribute, an integer index, expected; found {dict(node.attrs)}"
            )
        if index in found:
            raise error(f"{node.name} and {found[index].name}: two inputs have index {index}")
        found[index] = node
    return [found[i] for i in sorted(found)]
