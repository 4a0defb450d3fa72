"""Memory that is written in place: who shares it, who writes it, and whether every reader's turn is certain.

An in-place operator writes the memory of one of its inputs. GE runs nodes in any order the edges allow, so each reader
of that memory must be before or after each writer by data or control edges. A reader of the RefData node itself that
comes after a writer sees the new value; a reader of an earlier version, or of a view taken before the write, would read
either, which is refused.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kimi_graph.errors import KimiGraphError

from .node import Edge, Node


@dataclass(frozen=True)
class Memory:
    """`written`: edges whose tensor is memory that some node writes, mapped to the edge that owns the memory."""

    written: Mapping[Edge, Edge]


def find_memory(
    nodes: Mapping[str, Node], order: tuple[Node, ...], needed: frozenset[str], error: type[KimiGraphError]
) -> Memory:
    """Raises `error` for a write into something that is not a state, a write that GE would drop, or a race."""
    owner = _owners(nodes, order)
    writers: dict[Edge, list[tuple[Node, Edge]]] = {}
    for node in order:
        for name in node.semantics.in_place if node.semantics else ():
            target = node.arguments[name]
            if not isinstance(target, tuple):
                continue
            root = owner[target]
            _check_target(node, name, target, root, nodes, error)
            if node.name not in needed:
                raise error(
                    f"{node.name} ({node.type}): writes {root[0]} but NetOutput does not depend on it; GE drops it"
                )
            writers.setdefault(root, []).append((node, target))
    if not writers:
        return Memory({})
    before = _Before(order)
    for root, reader, edge in _readers(nodes, owner, writers):
        _check_races(root, reader, edge, writers[root], nodes, before, error)
    return Memory({edge: root for edge, root in owner.items() if root in writers})


def _aliased(node: Node, index: int) -> Edge | None:
    """The input edge whose memory an output is."""
    semantics = node.semantics
    if semantics is None or (not semantics.view and not semantics.in_place):
        return None
    name = semantics.inputs[0].name if semantics.view else semantics.outputs[index]
    if not semantics.view and name not in semantics.in_place:
        return None
    given = node.arguments[name]
    return given if isinstance(given, tuple) else None


def _owners(nodes: Mapping[str, Node], order: tuple[Node, ...]) -> dict[Edge, Edge]:
    """Each edge -> the edge that first held its memory."""
    owner: dict[Edge, Edge] = {}
    for node in order:
        for index in range(len(node.descs)):
            source = _aliased(node, index)
            owner[node.name, index] = owner[source] if source else (node.name, index)
    return owner


def _check_target(
    node: Node, name: str, target: Edge, root: Edge, nodes: Mapping[str, Node], error: type[KimiGraphError]
) -> None:
    holder = nodes[root[0]]
    if holder.type == "Data" or holder.type in ("Const", "Constant"):
        raise error(f"{node.name} ({node.type}): writes input {name!r} in place, which is {holder.type} {holder.name}")
    giver = nodes[target[0]]
    if giver.semantics and giver.semantics.view:
        raise error(
            f"{node.name} ({node.type}): writes input {name!r} in place through {giver.name} ({giver.type}), "
            "which GE may have made a copy; keep the state in the shape the operator takes"
        )


class _Before:
    """`a before b`: b depends on a. One bit per node in one integer per node."""

    def __init__(self, order: tuple[Node, ...]) -> None:
        self._bit = {node.name: 1 << i for i, node in enumerate(order)}
        self._known: dict[str, int] = {}
        for node in order:
            bits = 0
            for source in (*(e[0] for e in node.edges), *node.controls):
                bits |= self._bit[source] | self._known[source]
            self._known[node.name] = bits
        self._last = {node.name for node in order if node.type == "NetOutput"}

    def __call__(self, a: Node, b: Node) -> bool:
        return (b.name in self._last and a.name != b.name) or bool(self._known[b.name] & self._bit[a.name])


def _readers(
    nodes: Mapping[str, Node], owner: Mapping[Edge, Edge], written: Iterable[Edge]
) -> Iterator[tuple[Edge, Node, Edge]]:
    """Who reads memory that is written, and by which edge, memory by memory."""
    found: dict[Edge, list[tuple[Node, Edge]]] = {root: [] for root in written}
    for reader in nodes.values():
        for edge in dict.fromkeys(reader.edges):
            if (root := owner[edge]) in found:
                found[root].append((reader, edge))
    return ((root, reader, edge) for root, readers in found.items() for reader, edge in readers)


def _check_races(
    root: Edge,
    reader: Node,
    edge: Edge,
    wrote: list[tuple[Node, Edge]],
    nodes: Mapping[str, Node],
    before: _Before,
    error: type[KimiGraphError],
) -> None:
    """A reader of memory against every writer of it."""
    for writer, target in wrote:
        if writer is reader and edge == target:
            continue
        if problem := _problem(reader, edge, writer, nodes, root, before):
            pair = f"{reader.name} ({reader.type}) reads {root[0]}, {writer.name} ({writer.type}) writes it"
            raise error(f"{pair}: {problem}")


def _problem(
    reader: Node, edge: Edge, writer: Node, nodes: Mapping[str, Node], root: Edge, before: _Before
) -> str | None:
    giver = nodes[edge[0]]
    if giver is writer or (edge != root and before(writer, giver)):
        return None  # the value was made after the write
    if reader is not writer and before(reader, writer):
        return None
    if edge == root and reader is not writer and before(writer, reader):
        return None  # a variable read after the write
    if reader is writer or before(writer, reader):
        return f"the value read was taken from {giver.name}, before the write"
    return "neither is before the other by data or control edges"
