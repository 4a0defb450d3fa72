"""Work memory of a graph: the most bytes of values that are there at once while it runs, its inputs and states aside.

GE may take more (alignment, work space of kernels, several streams) or less (fusion); nobody has compared it with a
device.
"""

from .cut import SOURCES, parsed
from .executor.graph import Graph
from .executor.node import Edge, Node
from .ge_proto import ModelDef, bytes_of


def scratch_bytes(model: ModelDef) -> int:
    """Peak of a graph's values in the order of its file; views and states that are written in place take nothing."""
    graph = parsed(model)
    owner = _owners(graph)
    last: dict[Edge, int] = {}
    order = [node for node in graph.order if node.name in graph.needed]
    for at, node in enumerate(order):
        made = [(node.name, i) for i in range(len(node.descs))]
        last |= {owner[edge]: at for edge in (*made, *node.edges) if edge in owner}
    ends: dict[int, list[Edge]] = {}
    for edge, at in last.items():
        ends.setdefault(at, []).append(edge)
    live = peak = 0
    size: dict[Edge, int] = {}
    for at, node in enumerate(order):
        for i, desc in enumerate(node.descs):
            if owner.get((node.name, i)) == (node.name, i):
                size[node.name, i] = bytes_of(desc)
                live += size[node.name, i]
        peak = max(peak, live)
        live -= sum(size[edge] for edge in ends.get(at, ()))
    return peak


def _owners(graph: Graph) -> dict[Edge, Edge]:
    """Of each value that takes memory the edge that first had it; inputs, states and constants have theirs."""
    found: dict[Edge, Edge] = {}
    for node in graph.order:
        if node.type in (*SOURCES, "Const", "Constant", "NetOutput", "FileConstant"):
            continue
        for i in range(len(node.descs)):
            source = _source(node, i)
            if source is None:
                found[node.name, i] = node.name, i
            elif source in found:
                found[node.name, i] = found[source]
    return found


def _source(node: Node, i: int) -> Edge | None:
    """The input whose memory a result is."""
    assert node.semantics is not None
    names = node.semantics.outputs
    name = node.semantics.inputs[0].name if node.semantics.view else names[i] if len(names) == len(node.descs) else ""
    if not node.semantics.view and name not in node.semantics.in_place:
        return None
    edge = node.arguments[name]
    return edge if isinstance(edge, tuple) else None
