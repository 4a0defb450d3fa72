"""Parts of a graph as graphs of their own, and graphs that give more than they did: to look at them piece by piece."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kimi_graph.errors import BundleError

from .executor.graph import Graph, parse
from .executor.node import Edge, Node
from .executor.registry import SEMANTICS
from .ge_proto import ModelDef, OpDef, control_edges, data_edges, results_of, set_attr, split_edge

CONSTANTS = ("Const", "Constant")
SOURCES = ("Data", "RefData")


@dataclass(frozen=True)
class Part:
    """Some nodes of a graph as a graph.

    Attributes:
        boundary: new inputs by name, with the edge of the whole graph whose value they take.
        outputs: edges of the whole graph that it gives, in order.
    """

    model: ModelDef
    boundary: dict[str, str]
    outputs: tuple[str, ...]


def cut(model: ModelDef, keep: Iterable[str], name: str) -> Part:
    """The nodes named `keep`, with the inputs, states and constants they read; values of other nodes become inputs."""
    ops = {op.name: op for op in model.graph[0].op}
    kept = set(keep)
    boundary: dict[str, str] = {}
    sources: dict[str, OpDef] = {}
    body: list[OpDef] = []
    for op in model.graph[0].op:
        if op.name not in kept:
            continue
        copy = OpDef.FromString(op.SerializeToString())
        written = _written(copy)
        edges = [_bound(e, i in written, ops, kept, boundary, sources) for i, e in enumerate(data_edges(copy))]
        copy.input[:] = [*edges, *(e for e in control_edges(copy) if split_edge(e)[0] in kept)]
        body.append(copy)
    outputs = tuple(_given(ops, kept))
    return Part(_assembled(name, sources.values(), body, outputs), boundary, outputs)


def _written(op: OpDef) -> set[int]:
    """Places of the inputs that an operator writes."""
    in_place = SEMANTICS[op.type].in_place if op.type in SEMANTICS else ()
    return {i for i, desc in enumerate(op.input_desc) if desc.name in in_place}


def _bound(
    edge: str, written: bool, ops: dict[str, OpDef], kept: set[str], boundary: dict[str, str], sources: dict[str, OpDef]
) -> str:
    """The edge that a kept node reads in the part."""
    if not edge:
        return edge
    producer, index = split_edge(edge)
    op = ops[producer]
    if producer in kept:
        return edge
    if op.type in (*SOURCES, *CONSTANTS):
        sources.setdefault(producer, OpDef.FromString(op.SerializeToString()))
        return edge
    made = f"in.{producer.replace('/', '~')}.{index}"  # it names a file too
    if made not in sources:
        desc = op.output_desc[index]
        source = OpDef(name=made, type="RefData" if written else "Data")
        for described, port in ((source.input_desc.add(), "x"), (source.output_desc.add(), "y")):
            described.CopyFrom(desc)
            described.name = port
        sources[made], boundary[made] = source, edge
    if written:
        sources[made].type = "RefData"
    return f"{made}:0"


def _given(ops: dict[str, OpDef], kept: set[str]) -> Iterable[str]:
    """Edges of kept nodes that others read, or nobody; not those that are a state's memory."""
    inside, outside = set[str](), set[str]()
    for op in ops.values():
        (inside if op.name in kept else outside).update(data_edges(op))
    for name, op in ops.items():
        if name not in kept:
            continue
        in_place = SEMANTICS[op.type].in_place if op.type in SEMANTICS else ()
        edges = [f"{name}:{i}" for i, desc in enumerate(op.output_desc) if desc.name not in in_place]
        yield from (e for e in edges if e in outside or e not in inside)


def _assembled(name: str, sources: Iterable[OpDef], body: Sequence[OpDef], outputs: Sequence[str]) -> ModelDef:
    model = ModelDef()
    graph = model.graph.add(name=name)
    graph.op.extend(sorted(sources, key=lambda op: op.type == "RefData"))
    for index, op in enumerate(op for op in graph.op if op.type in SOURCES):
        set_attr(op, "index", index)
    graph.op.extend(body)
    producers = {op.name: op for op in graph.op}
    net = graph.op.add(name="NetOutput", type="NetOutput")
    _read(net, producers, outputs)
    net.input.extend(f"{op.name}:-1" for op in body if _written(op))
    return model


def _read(net: OpDef, producers: dict[str, OpDef], edges: Iterable[str]) -> None:
    for edge in edges:
        producer, index = split_edge(edge)
        net.input.append(edge)
        desc = net.input_desc.add()
        desc.CopyFrom(producers[producer].output_desc[index])
        desc.name = f"input{len(net.input_desc) - 1}"


# ---- more results ----------------------------------------------------------------------------------------------------


def probes(graph: Graph) -> list[Edge]:
    """Edges whose value a run can give beside its results: made by a node that computes, and no state's memory."""
    return [
        (node.name, i)
        for node in graph.order
        if node.type not in (*SOURCES, *CONSTANTS, "NetOutput") and node.name in graph.needed
        for i in range(len(node.descs))
        if (node.name, i) not in graph.memory.written
    ]


def probed(model: ModelDef, edges: Iterable[Edge]) -> ModelDef:
    """The graph with these edges among its results, after its own."""
    made = ModelDef.FromString(model.SerializeToString())
    ops = {op.name: op for op in made.graph[0].op}
    net = results_of(ops.values())
    controls = list(control_edges(net))
    own = data_edges(net)
    net.input[:] = own
    _read(net, ops, (f"{name}:{index}" for name, index in edges))
    net.input.extend(controls)
    return made


def parsed(model: ModelDef) -> Graph:
    """A graph's nodes in the order they run."""
    return parse(model, BundleError)


def computing(graph: Graph) -> list[Node]:
    """Nodes that compute something, in the order they run."""
    left = (*SOURCES, *CONSTANTS, "NetOutput")
    return [node for node in graph.order if node.name in graph.needed and node.type not in left]
