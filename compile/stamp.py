"""Pieces of GE graph, converted once, copied to every place they serve with names of their own.

A piece has named inputs (`x`, `batch.slots`, `p.kda.query`, `s.memory`) and named outputs (`x`, `s.memory`). A state
output becomes in-place use of the state input. Stamping is a copy in protobuf: no tracing, no conversion.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from .ge_proto import ModelDef, OpDef, set_attr, split_edge
from .lower import Choice
from .origins import Origins
from .prototypes import Prototypes
from .recipe import Step

VIEWS = frozenset({"Reshape", "Identity"})


@dataclass(frozen=True)
class Piece:
    """A converted piece.

    Attributes:
        ops: its nodes without NetOutput; inputs are Data, states RefData.
        inputs: dotted name of each Data and RefData node. outputs: edge of each output that is not a state.
        weights: for each `p.` input, the parameter it is made of and the recipe steps.
        origins: source line of each node, traced value of each edge.
        choices: which operators lowerings chose, and why.
    """

    ops: tuple[OpDef, ...]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    weights: Mapping[str, tuple[str, tuple[Step, ...]]]
    origins: Origins
    choices: tuple[Choice, ...] = ()


def alias_states(
    model: ModelDef, inputs: Mapping[str, str], outputs: Iterable[str], prototypes: Prototypes
) -> dict[str, str]:
    """Make the states of a converted graph in place: their Data become RefData, and NetOutput forgets them.

    Args:
        model: one graph, changed. inputs: dotted name per Data node. outputs: dotted names in NetOutput's order.
        prototypes: say which operators write an input's buffer.

    Returns:
        The edges of the other outputs by dotted name.
    """
    ops = {op.name: op for op in model.graph[0].op}
    results = next(op for op in ops.values() if op.type == "NetOutput")
    edges = dict(zip(outputs, results.input, strict=True))
    node_of = {name: node for node, name in inputs.items()}
    for name, edge in edges.items():
        if name.startswith("s."):
            state, origin = node_of[name], _origin(ops, edge)
            found = _written_state(ops, origin, prototypes)
            assert found == state, f"{name}: its next value comes from {origin}, which does not write it in place"
            ops[state].type = "RefData"
    keep = {name: edge for name, edge in edges.items() if not name.startswith("s.")}
    kept = [d for name, d in zip(edges, results.input_desc, strict=True) if name in keep]
    descs = [type(d).FromString(d.SerializeToString()) for d in kept]
    del results.input[:], results.input_desc[:]
    results.input.extend(keep.values())
    results.input_desc.extend(descs)
    results.input.extend(_unread_writers(ops, keep.values(), prototypes))
    return keep


def _unread_writers(ops: Mapping[str, OpDef], outputs: Iterable[str], prototypes: Prototypes) -> list[str]:
    """Control edges to operators that write a state no output needs: GE drops what NetOutput does not wait for."""
    alive = _alive(ops, [split_edge(edge)[0] for edge in outputs])
    return [f"{name}:-1" for name, op in ops.items() if name not in alive and _in_place(op, prototypes)]


def make_piece(
    model: ModelDef,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    weights: Mapping[str, tuple[str, tuple[Step, ...]]],
    origins: Origins,
    prototypes: Prototypes,
) -> Piece:
    """A piece of a converted graph whose states are in place: views of views shortened, nothing dead.

    Args:
        model: one graph. inputs: dotted name per Data node. outputs: edges by dotted name.
    """
    ops = {op.name: op for op in model.graph[0].op}
    _shorten_views(ops)
    writers = [name for name, op in ops.items() if _in_place(op, prototypes)]
    alive = _alive(ops, [split_edge(edge)[0] for edge in outputs.values()] + writers)
    own = {name for name in alive if ops[name].type not in ("Data", "RefData", "Const")}  # those are the whole graph's
    return Piece(
        ops=tuple(op for name, op in ops.items() if name in alive and op.type != "NetOutput"),
        inputs={node: name for node, name in inputs.items() if node in alive},
        outputs=outputs,
        weights=weights,
        origins=Origins(
            lines={node: line for node, line in origins["lines"].items() if node in own},
            values={call: [_left(ops, edge, own) for edge in edges] for call, edges in origins["values"].items()},
        ),
    )


def _origin(ops: Mapping[str, OpDef], edge: str) -> str:
    """The edge behind views of it."""
    node, _ = split_edge(edge)
    while ops[node].type in VIEWS:
        edge = ops[node].input[0]
        node, _ = split_edge(edge)
    return edge


def _left(ops: Mapping[str, OpDef], edge: str, left: set[str]) -> str:
    """What the edge is a view of, or the edge, whichever is of a node that is left; else empty.

    Rather the first: a last view is gone where no other part reads the value.
    """
    if split_edge(edge)[0] not in ops:  # conversion left it out: a lowering did without the value
        return ""
    for found in (_origin(ops, edge), edge):
        if split_edge(found)[0] in left:
            return found
    return ""


def _in_place(op: OpDef, prototypes: Prototypes) -> Mapping[str, str]:
    found = prototypes.find(op.type)
    return {} if found is None else found.inplace


def _written_state(ops: Mapping[str, OpDef], edge: str, prototypes: Prototypes) -> str | None:
    """The Data node whose memory the edge's value is, if an in-place operator made it."""
    node, index = split_edge(edge)
    op = ops[node]
    aliased = _in_place(op, prototypes).get(op.output_desc[index].name)
    if aliased is None:
        return None
    position = [d.name for d in op.input_desc].index(aliased)
    return split_edge(op.input[position])[0]


def _shorten_views(ops: Mapping[str, OpDef]) -> None:
    """A reshape of a reshape reads what the first one read."""
    for op in ops.values():
        if op.type == "Reshape":
            op.input[0] = _origin(ops, op.input[0])
            node, index = split_edge(op.input[0])
            op.input_desc[0].CopyFrom(ops[node].output_desc[index])
            op.input_desc[0].name = "x"


def _alive(ops: Mapping[str, OpDef], roots: Iterable[str]) -> set[str]:
    """The nodes that `roots` need, and `roots`."""
    todo = list(roots)
    alive: set[str] = set()
    while todo:
        node = todo.pop()
        if node not in alive:
            alive.add(node)
            todo += [split_edge(edge)[0] for edge in ops[node].input if edge]
    return alive


@dataclass
class Assembly:
    """A whole graph in the making: ops in order, inputs and constants made when first asked for."""

    name: str
    inputs: dict[str, OpDef] = field(default_factory=dict)
    constants: dict[bytes, str] = field(default_factory=dict)
    body: list[OpDef] = field(default_factory=list)

    def input(self, name: str, like: OpDef) -> str:
        """The edge of the graph input `name`, a copy of `like` when it is new."""
        if name not in self.inputs:
            self.inputs[name] = copy = OpDef()
            copy.CopyFrom(like)
            copy.name = name
        elif list(self.inputs[name].output_desc[0].shape.dim) != list(like.output_desc[0].shape.dim):
            mine, other = self.inputs[name].output_desc[0].shape.dim, like.output_desc[0].shape.dim
            raise AssertionError(f"input {name} is read as {list(mine)} and as {list(other)}")
        return f"{name}:0"

    def constant(self, op: OpDef) -> str:
        """The edge of a constant; equal ones are one node, as most are: layers share shapes, axes and indexes."""
        value = op.attr["value"].SerializeToString(deterministic=True)
        if value not in self.constants:
            self.constants[value] = name = f"const.{len(self.constants)}"
            copy = OpDef()
            copy.CopyFrom(op)
            copy.name = name
            self.body.append(copy)
        return f"{self.constants[value]}:0"

    def stamp(self, piece: Piece, prefix: str, bind: Callable[[str, OpDef], str]) -> dict[str, str]:
        """Copy a piece; `bind(input name, its Data op)` gives the edge to read instead.

        Returns:
            The edge of each of the piece's outputs.
        """
        edges: dict[str, str] = {"": ""}
        for op in piece.ops:
            if op.name in piece.inputs:
                edges[f"{op.name}:0"] = bind(piece.inputs[op.name], op)
                continue
            if op.type == "Const":
                edges[f"{op.name}:0"] = self.constant(op)
                continue
            copy = OpDef()
            copy.CopyFrom(op)
            copy.name = prefix + op.name
            copy.input[:] = [edges[e] if e in edges else prefix + e for e in op.input]
            self.body.append(copy)
        return {name: edges.get(e) or prefix + e for name, e in piece.outputs.items()}

    def finish(self, outputs: Mapping[str, str], prototypes: Prototypes) -> ModelDef:
        """The model: inputs, weights, states, numbered in this order; the body; NetOutput reading `outputs`.

        Nodes that nothing needs are left out: a selection, say, that no later layer reuses.
        """
        ops = self.inputs | {op.name: op for op in self.body}
        writers = [op.name for op in self.body if _in_place(op, prototypes)]
        alive = _alive(ops, [split_edge(edge)[0] for edge in outputs.values()] + writers)
        self.body = [op for op in self.body if op.name in alive]
        model = ModelDef()
        graph = model.graph.add(name=self.name)
        graph.op.extend(sorted(self.inputs.values(), key=lambda op: (op.type == "RefData", op.name.startswith("p."))))
        for index, op in enumerate(graph.op):
            set_attr(op, "index", index)
        graph.op.extend(self.body)
        producers = {op.name: op for op in graph.op}
        net = graph.op.add(name="NetOutput", type="NetOutput")
        for index, edge in enumerate(outputs.values()):
            node, output = split_edge(edge)
            net.input.append(edge)
            desc = net.input_desc.add()
            desc.CopyFrom(producers[node].output_desc[output])
            desc.name = f"input{index}"
        net.input.extend(_unread_writers(producers, outputs.values(), prototypes))
        graph.output.extend(outputs.values())
        return model
