"""FX to GE: every call of a captured graph goes to torchair's converter for it, or to a lowering of ours.

The walk over the graph is ours: torchair's own runs every node again to learn its shape, which capture knows already
(three times faster, the same nodes). Of torchair's passes over the finished GE graph none runs: they number inputs of
dynamic shapes, order printing and prefetching nodes, tidy quantised weights and remove copies made for in-place
operators. Our graphs have static shapes, states alias by name, and weights are arranged before (`passes`).

Sources of nodes: capture notes file and line in `node.meta["source"]`.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from kimi_graph.errors import CompileError
from kimi_graph.ops import OPERATORS
from kimi_graph.parallel.collectives import COLLECTIVES

from .air import NOTES
from .ge_proto import GraphDef, ModelDef, OpDef, describe, describe_inputs, is_tiled, is_unfed, split_edge
from .lower import ATEN, Choice, Recipe, Room, Value, Weights
from .torchair_host import Host

Lowering = Callable[..., Any]


@dataclass(frozen=True)
class Converted:
    """A GE graph.

    Attributes:
        model: one graph: Data in the order of the FX inputs and under their names, then inputs that lowerings added
            (`causal_mask`), all of them even if nobody reads them; NetOutput reads the outputs in order. Every output
            of an FX call is known (shape and dtype); what converters make in between may be unknown.
        sources: file and line by op name. edges: of the results of each FX call, by its name.
        choices: which operators lowerings chose and why, in the order of the graph.
        weights: recipes of weights that lowerings added, by name. added: names of all inputs that they added.
    """

    model: ModelDef
    sources: dict[str, str]
    edges: dict[str, list[str]]
    choices: tuple[Choice, ...] = ()
    weights: Mapping[str, Recipe] = field(default_factory=dict)
    added: tuple[str, ...] = ()


def default_lowerings() -> dict[Any, Lowering]:
    """Ours: of every operator that has one, of collectives, and of ATen operators that torchair lacks."""
    operators = {op.op: op.lower for op in OPERATORS.values() if op.lower is not None}
    return ATEN | operators | {c.op: c.lower for c in COLLECTIVES.values()}


def convert(
    module: fx.GraphModule,
    *,
    name: str,
    host: Host,
    target: Any,
    cann: str,
    lowerings: Mapping[Any, Lowering] | None = None,
    weights: Weights | None = None,
) -> Converted:
    """Turn a captured graph into a GE graph.

    Args:
        module: ATen and `kimi::` calls; `meta["val"]` of each node is a meta tensor (or a list) of static shape.
        name: of the GE graph. target, cann: for lowerings to choose by.
        lowerings: by overload; before torchair's converters. Default: `default_lowerings()`.
        weights: how they are kept. Default: as the captured graph reads them.

    Raises:
        CompileError: a call that neither torchair nor we lower, with its source line.
    """
    graph = host.graph.GeGraph(name=name)
    graph.add_python_code = lambda *_: None  # torchair's transcript of the graph as Python text
    room = Room(host, target, cann, weights=weights or Weights())
    walk = _Walk(host, graph, room, default_lowerings() if lowerings is None else lowerings)
    with host.graph.default_ge_graph(graph), host.shield():
        for node in module.graph.nodes:
            walk.visit(node)
    model = _finish(ModelDef.FromString(graph.SerializeToString()))
    return Converted(
        model, walk.sources, walk.edges(), tuple(room.choices), room.weights.made, tuple(room.extra_inputs)
    )


class _Walk:
    """The walk over the FX graph: GE values by FX node."""

    def __init__(self, host: Host, graph: Any, room: Room, lowerings: Mapping[Any, Lowering]) -> None:
        self.host, self.graph, self.room, self.lowerings = host, graph, room, lowerings
        self.values: dict[fx.Node, Any] = {}
        self.sources: dict[str, str] = {}

    def visit(self, node: fx.Node) -> None:
        made = len(self.graph.op)
        self.values[node] = getattr(self, f"_{node.op}")(node)
        source = node.meta.get("source", "")
        if source:
            self.sources.update((op.name, source) for op in self.graph.op[made:])

    def edges(self) -> dict[str, list[str]]:
        """Edges of the results of each call."""
        calls = {n: v for n, v in self.values.items() if n.op == "call_function" and n.target is not operator.getitem}
        return {n.name: [x.tensor for x, _ in _pairs(v, n.meta["val"])] for n, v in calls.items()}

    def _placeholder(self, node: fx.Node) -> Value:
        meta = node.meta["val"]
        return self.room.input(node.name, meta.shape, meta.dtype)

    def _get_attr(self, node: fx.Node) -> Value:
        value = operator.attrgetter(str(node.target))(node.graph.owning_module)
        return self.room.mark(self.host.ge.Const(value.contiguous().clone()), value.shape, value.dtype)

    def _call_function(self, node: fx.Node) -> Any:
        args, kwargs = self._given(node.args), self._given(node.kwargs)
        if node.target is operator.getitem:
            return args[0][args[1]]
        out = self._lower(node, args, kwargs)
        self.host.converters.set_ge_outputs(out, node.meta["val"])
        for value, meta in _pairs(out, node.meta["val"]):
            describe(value.desc, meta.shape, meta.dtype)
        if isinstance(node.meta["val"], torch.Tensor):
            self.room.calls.setdefault(out.tensor, (str(node.target).removesuffix(".default"), args))
        return out

    def _output(self, node: fx.Node) -> None:
        results = node.args[0] if isinstance(node.args[0], (list, tuple)) else node.args
        self.host.ge.NetOutput(self._given(results))

    def _given(self, arg: Any) -> Any:
        """Arguments as converters take them: values for nodes, plain lists for sequences."""
        if isinstance(arg, fx.Node):
            return self.values[arg]
        if isinstance(arg, Mapping):
            return {k: self._given(v) for k, v in arg.items()}
        if isinstance(arg, (list, tuple)):
            return [self._given(v) for v in arg]
        return arg

    def _lower(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        where = f"{node.meta.get('source') or self.graph.name}: {node.target}"
        ours = self.lowerings.get(node.target)
        if ours is not None:
            self.room.result, self.room.source = node.meta["val"], node.meta.get("source", "")
            try:
                return ours(self.room, *args, **kwargs)
            except CompileError as error:
                raise CompileError(f"{where}: {error}") from error
        converter = getattr(node.target, "_ge_converter", None) or self.host.converters._CONVERTERS.get(node.target)
        if converter is None:
            raise CompileError(
                f"{where} has no lowering to GE: torchair of torch-npu {self.host.version} has no converter for it, "
                "and neither the operators nor the compiler's own lowerings have one. Write the layer with others."
            )
        if converter.require_meta:
            kwargs["meta_outputs"] = node.meta["val"]
        try:
            return converter(*args, **kwargs)
        except Exception as error:
            raise CompileError(
                f"{where}: torchair of torch-npu {self.host.version} cannot lower it: {error}"
            ) from error


def _pairs(values: Any, metas: Any) -> Iterator[tuple[Value, torch.Tensor]]:
    if isinstance(metas, torch.Tensor):
        yield values, metas
    elif isinstance(metas, (list, tuple)):
        for value, meta in zip(values, metas, strict=True):
            yield from _pairs(value, meta)


# ---- the finished graph ----------------------------------------------------------------------------------------------


def _finish(model: ModelDef) -> ModelDef:
    """Inputs first, dead nodes out, descriptions as their producers have them, notes for torchair's users out."""
    graph = model.graph[0]
    alive = _alive(graph)
    inputs = sorted((op for op in graph.op if op.type == "Data"), key=lambda op: op.attr["index"].i)
    out = ModelDef()
    out.graph.add(name=graph.name)
    out.graph[0].op.extend(inputs)
    out.graph[0].op.extend(op for op in graph.op if op.type != "Data" and op.name in alive)
    for op in out.graph[0].op:
        _tidy(op)
    describe_inputs(out.graph[0])
    return out


def _alive(graph: GraphDef) -> set[str]:
    """Names of ops that an output needs."""
    edges = {op.name: op.input for op in graph.op}
    todo = [op.name for op in graph.op if op.type == "NetOutput"]
    alive: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in alive:
            alive.add(name)
            todo.extend(split_edge(edge)[0] for edge in edges[name] if edge)
    return alive


def _tidy(op: OpDef) -> None:
    for note in NOTES & set(op.attr):
        del op.attr[note]
    if op.type == "Const":
        op.output_desc[0].name = "y"  # torchair's helper leaves out what the prototype calls it
    for desc in [*op.input_desc, *op.output_desc]:
        for note in NOTES & set(desc.attr):
            del desc.attr[note]
        if not is_unfed(desc) and not is_tiled(desc):
            desc.layout = "ND"
