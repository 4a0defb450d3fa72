"""Checks of a GE graph: everything that can be known wrong before GE and a device see it.

GE's own deserialiser looks at names and edges only; its compiler, which looks further, needs CANN and the chip. So
every graph is held against operator prototypes, limits and the rules of this project here, and a fault is reported with
the node, the source line, what was found and what was expected. One function per rule, each giving findings.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from kimi_graph.errors import CompileError

from .air import SIZE_LIMIT
from .ge_proto import AttrDef, Dtype, ModelDef
from .limits import Use, faults_of
from .prototypes import FIELDS, SHORT, Attribute, Port, Prototype, Prototypes
from .targets import Target
from .view import Desc, Edge, Node, View, view

INPUTS = frozenset({"Data", "RefData"})
CONSTANTS = frozenset({"Const", "FileConstant"})
SOURCES = INPUTS | CONSTANTS
# Same memory, other shape or dtype: who reads a view of a state reads the state.
VIEWS = frozenset({"Reshape", "ExpandDims", "Squeeze", "Unsqueeze", "Identity", "Bitcast"})

# Attributes that are not part of a prototype: torchair's and ours, for GE or for people.
PRIVATE = frozenset(
    {
        "_input_name_key",
        "_input_name_value",
        "_output_name_key",
        "_output_name_value",
        "_readable_value",
        "_inference_rule",
        "_enable_storage_format_spread",
        "_inputs_all_sym",
        "_source",
        "input_layout_info",
        "output_layout_info",
    }
)
NAME_LIMIT = 127  # of a communication group; HCCL's GROUP_NAME_MAX_LEN


class Finding(NamedTuple):
    """A fault: where, which rule, what was found and expected, and what to change."""

    node: str
    rule: str
    found: str
    expected: str
    hint: str = ""

    def at(self, source: str) -> str:
        where = f"{self.node} ({source})" if source else self.node
        hint = f" {self.hint}" if self.hint else ""
        return f"{where}: {self.found}; expected {self.expected}.{hint} [{self.rule}]"


@dataclass(frozen=True, kw_only=True)
class Claims:
    """What the compiler says about a graph.

    Attributes:
        weights: names of the Data nodes that hold weights. states: names of the RefData nodes.
        updated: states that the graph must write.
    """

    target: Target
    prototypes: Prototypes
    weights: Set[str]
    states: Set[str]
    updated: Set[str]


Check = Callable[[View, Claims], Iterator[Finding]]


def check_graph(
    model: ModelDef,
    target: Target,
    prototypes: Prototypes,
    *,
    weights: Set[str],
    states: Set[str],
    updated: Set[str] | None = None,
    sources: Mapping[str, str] | None = None,
) -> None:
    """Hold a graph against every rule.

    Args:
        model: one graph, in memory form (descriptions carry the names of inputs and outputs).
        prototypes: for the target's chip family.
        weights, states: names of the Data nodes that hold weights, and of all RefData nodes.
        updated: states the graph must write; by default all.
        sources: source line of nodes, where known; otherwise the node's attribute `_source`.

    Raises:
        CompileError: one or more findings; the first few of every rule are in the message.
    """
    assert prototypes.soc == target.soc, (prototypes.soc, target.soc)
    findings = list(
        find_faults(
            model, target, prototypes, weights=weights, states=states, updated=states if updated is None else updated
        )
    )
    if findings:
        raise CompileError(_message(model, findings, sources or {}))


def find_faults(
    model: ModelDef,
    target: Target,
    prototypes: Prototypes,
    *,
    weights: Set[str],
    states: Set[str],
    updated: Set[str],
) -> Iterator[Finding]:
    """All findings. A graph whose edges do not hold together is not looked at further."""
    claims = Claims(target=target, prototypes=prototypes, weights=weights, states=states, updated=updated)
    if len(model.graph) != 1:
        yield Finding("model", "one-graph", f"{len(model.graph)} graphs", "one, without subgraphs")
        return
    seen = view(model.graph[0])
    for check in STRUCTURE:  # each relies on the ones before
        faults = list(check(seen, claims))
        yield from faults
        if faults:
            return
    for check in CHECKS:
        yield from check(seen, claims)
    yield from size(model)


def _message(
    model: ModelDef, findings: list[Finding], sources: Mapping[str, str], each: int = 3, most: int = 12
) -> str:
    """The first findings of each rule, and how many there are."""
    counts = Counter(f.rule for f in findings)
    per_rule = ", ".join(f"{rule} {n}" for rule, n in counts.most_common())
    written = {op.name: op for op in model.graph[0].op} if model.graph else {}
    shown: Counter[str] = Counter()
    lines = []
    for f in findings:
        shown[f.rule] += 1
        if shown[f.rule] <= each and len(lines) < most:
            source = sources.get(f.node, "")
            if not source and f.node in written and "_source" in written[f.node].attr:
                source = written[f.node].attr["_source"].s.decode()
            lines.append(f"  {f.at(source)}")
    left = len(findings) - len(lines)
    more = [f"  and {left:,} more"] if left else []
    name = model.graph[0].name if model.graph else "model"
    noun = "fault" if len(findings) == 1 else "faults"
    return "\n".join([f"graph {name!r} has {len(findings):,} {noun} ({per_rule}):", *lines, *more])


# ---- structure -------------------------------------------------------------------------------------------------------


def unique_names(graph: View, claims: Claims) -> Iterator[Finding]:
    """Every node has a name of its own."""
    counts = Counter(node.name for node in graph.nodes)
    for name, n in counts.items():
        if not name:
            yield Finding("node without a name", "name", f"{n} nodes without a name", "a name on each")
        elif n > 1:
            types = ", ".join(sorted({node.type for node in graph.nodes if node.name == name}))
            yield Finding(
                name, "name", f"{n} nodes of this name ({types})", "one", "Stamp every copy under its own prefix."
            )


def edges_exist(graph: View, claims: Claims) -> Iterator[Finding]:
    """Data edges lead to an output that exists, control edges to a node, and inputs are as many as descriptions."""
    for node in graph.nodes:
        for edge in node.inputs:
            if edge is not None and not _exists(graph, edge):
                yield Finding(node.name, "edge", f"input {edge} of {node.type}", _outputs_of(graph, edge.node))
        for name in node.after:
            if name not in graph.by_name:
                yield Finding(node.name, "edge", f"control edge from {name!r}", "a node of this graph")
        if len(node.inputs) != len(node.ins) and node.type not in INPUTS:
            yield Finding(
                node.name, "edge", f"{len(node.inputs)} data inputs and {len(node.ins)} input descriptions", "as many"
            )


def _exists(graph: View, edge: Edge) -> bool:
    producer = graph.by_name.get(edge.node)
    return producer is not None and 0 <= edge.index < len(producer.outs)


def _outputs_of(graph: View, name: str) -> str:
    if name not in graph.by_name:
        return f"a node of this graph, and {name!r} is none"
    return f"one of the {len(graph.by_name[name].outs)} outputs of {name}"


def one_result(graph: View, claims: Claims) -> Iterator[Finding]:
    """Exactly one NetOutput, and nothing reads it."""
    results = list(graph.of_type("NetOutput"))
    if len(results) != 1:
        yield Finding(graph.name, "result", f"{len(results)} NetOutput nodes", "one")
    for node in graph.nodes:
        if any(node is not r and r.name in node.after for r in results):
            yield Finding(node.name, "result", "it waits for NetOutput", "NetOutput to be last")


def no_cycle(graph: View, claims: Claims) -> Iterator[Finding]:
    """Edges, control edges included, run one way."""
    left = {node.name for node in graph.nodes} - {node.name for node in graph.order}
    if left:
        few = ", ".join(sorted(left)[:5])
        yield Finding(min(left), "cycle", f"{len(left)} nodes wait for each other ({few})", "edges that run one way")


def numbered_inputs(graph: View, claims: Claims) -> Iterator[Finding]:
    """Data and RefData carry the indexes 0, 1, 2 ..., each once: a runtime binds them by index."""
    indexes: dict[int, str] = {}
    nodes = list(graph.of_type(*INPUTS))
    for node in nodes:
        index = node.op.attr["index"].i if "index" in node.op.attr else None
        if index is None:
            yield Finding(node.name, "index", "no attribute 'index'", f"an index from 0 to {len(nodes) - 1}")
        elif not 0 <= index < len(nodes):
            yield Finding(node.name, "index", f"index {index}", f"0 to {len(nodes) - 1}, without gaps")
        elif index in indexes:
            yield Finding(node.name, "index", f"index {index}, which {indexes[index]} has too", "each index once")
        else:
            indexes[index] = node.name


# ---- prototypes ------------------------------------------------------------------------------------------------------


def operators_hold(graph: View, claims: Claims) -> Iterator[Finding]:
    """Every node is an operator the target has, with its inputs, outputs, attributes and dtypes, within its limits."""
    for node in graph.nodes:
        prototype = claims.prototypes.find(node.type)
        if prototype is None:
            known = "a type with a row in the operator table or a helper in torchair"
            yield Finding(node.name, "operator", f"operator type {node.type!r}", known)
        elif claims.target.soc not in prototype.socs:
            yield _wrong_chip(node, prototype, claims.target)
        elif not prototype.is_in(claims.target.soc, claims.target.cann):
            found = f"operator {node.type} on {claims.target.name} with CANN {claims.target.cann}"
            release = prototype.since.split()[0]
            yield Finding(node.name, "release", found, f"CANN {release} or later", f"Compile with --cann {release}.")
        else:
            faults = [*_ports_hold(node, prototype), *_attributes_hold(node, prototype)]
            yield from faults
            if not faults:  # limits rely on inputs and attributes being what they should be
                for found, expected, hint in faults_of(Use(graph, node, prototype, claims.target)):
                    yield Finding(node.name, "limit", f"{node.type}: {found}", expected, hint)


def _wrong_chip(node: Node, p: Prototype, target: Target) -> Finding:
    runs = " and ".join(p.socs)
    found = f"operator {p.type} on {target.name} ({target.soc})"
    return Finding(
        node.name, "chip", found, f"one of its chips: {runs}", f"Lower it otherwise for this target; {p.source}."
    )


def _ports_hold(node: Node, p: Prototype) -> Iterator[Finding]:
    ports: list[tuple[Port, Desc]] = []
    if node.type == "NetOutput":
        ports += [(p.inputs[0], d) for d in node.ins]
    elif node.type not in INPUTS:  # these describe an input that nothing feeds
        yield from _match(node, p, p.inputs, node.ins, "input", ports)
    yield from _match(node, p, p.outputs, node.outs, "output", ports)
    for position, (edge, desc) in enumerate(zip(node.inputs, node.ins, strict=False)):
        if (edge is None) != desc.unfed and node.type not in INPUTS:
            found = "an edge to an input marked as not given" if desc.unfed else "no edge, but a description"
            yield Finding(node.name, "input", f"input {position} ({desc.name}) has {found}", "both or neither")
    yield from _dtypes_hold(node, p, ports)


def _match(
    node: Node, p: Prototype, ports: tuple[Port, ...], descs: list[Desc], side: str, matched: list[tuple[Port, Desc]]
) -> Iterator[Finding]:
    """Find each description's port, in the order of the registration; a constant's output needs no name."""
    at = 0
    for port in ports:
        if port.kind == "dynamic":
            first = at
            while at < len(descs) and descs[at].name == f"{port.name}{at - first}":
                matched.append((port, descs[at]))
                at += 1
        elif at < len(descs) and (descs[at].name == port.name or (node.type == "Const" and not descs[at].name)):
            matched.append((port, descs[at]))
            if descs[at].unfed and port.kind == "required":
                yield Finding(node.name, side, f"{side} {port.name} of {p.type} is not given", "it is required")
            at += 1
        elif port.kind == "required":
            found = f"{descs[at].name!r}" if at < len(descs) else "nothing"
            yield Finding(node.name, side, f"{found} where {side} {port.name} of {p.type} belongs", _signature(ports))
            return
    if at < len(descs):
        yield Finding(node.name, side, f"{side} {at} is called {descs[at].name!r}", f"the order {_signature(ports)}")


def _signature(ports: tuple[Port, ...]) -> str:
    marks = {"required": "", "optional": "?", "dynamic": "[]"}
    return ", ".join(port.name + marks[port.kind] for port in ports) or "none"


def _dtypes_hold(node: Node, p: Prototype, ports: list[tuple[Port, Desc]]) -> Iterator[Finding]:
    for port, desc in ports:
        if desc.dtype and not desc.unfed and port.dtypes is not None and desc.dtype not in port.dtypes:
            yield Finding(
                node.name,
                "dtype",
                f"{desc.name or port.name} of {p.type} is {_dtype(desc.dtype)}",
                _dtypes(port.dtypes),
            )
    for group in p.same:
        used = {port.name: desc.dtype for port, desc in ports if port.name in group and desc.dtype and not desc.unfed}
        if len(set(used.values())) > 1:
            found = ", ".join(f"{name} {_dtype(d)}" for name, d in used.items())
            yield Finding(node.name, "dtype", f"{p.type} with {found}", "one dtype for all of them", "Cast before it.")


def _dtype(number: int) -> str:
    return SHORT.get(number, f"dtype {number}")


def _dtypes(numbers: Iterable[int]) -> str:
    return "one of " + ", ".join(sorted(map(_dtype, numbers)))


def _attributes_hold(node: Node, p: Prototype) -> Iterator[Finding]:
    for name, value in node.op.attr.items():
        if name in p.attributes:
            if not _has_type(value, p.attributes[name]):
                yield Finding(node.name, "attribute", f"{name} holds {_kind(value)}", f"{p.attributes[name].type}")
        elif name not in PRIVATE and name != "_host_tensor":
            known = ", ".join(p.attributes) or "none"
            yield Finding(node.name, "attribute", f"{p.type} has an attribute {name!r}", f"one of: {known}")
    for name, attribute in p.attributes.items():
        if attribute.required and name not in node.op.attr:
            yield Finding(node.name, "attribute", f"{p.type} without {name!r}", f"it is required ({attribute.type})")


def _has_type(value: AttrDef, attribute: Attribute) -> bool:
    if attribute.type not in FIELDS:
        return True
    field_, list_kind = FIELDS[attribute.type]
    return value.WhichOneof("value") == field_ and (list_kind == 0 or value.list.val_type == list_kind)


def _kind(value: AttrDef) -> str:
    """The type of a value, as attributes are declared; a list says its kind."""
    which = value.WhichOneof("value")
    kinds = {(f, k): name for name, (f, k) in FIELDS.items()}
    if which == "list" and value.list.val_type == 0:
        return "a list without a kind, which GE drops"
    return kinds.get((which or "", value.list.val_type if which == "list" else 0), which or "nothing")


# ---- descriptions ----------------------------------------------------------------------------------------------------


def descriptions_agree(graph: View, claims: Claims) -> Iterator[Finding]:
    """An input is described as the output it reads; an input of the graph in one way."""
    for node in graph.nodes:
        if node.type in INPUTS and node.ins and node.outs and node.ins[0][1:3] != node.outs[0][1:3]:
            found = f"{node.type} described as {_described(node.ins[0])}"
            yield Finding(node.name, "description", found, f"{_described(node.outs[0])}, as its output is")
            continue
        for edge, desc in zip(node.inputs, node.ins, strict=False):
            if edge is None:
                continue
            made = graph.producer(edge)
            if (made.dtype, made.shape) != (desc.dtype, desc.shape):
                found = f"input {desc.name} of {node.type} described as {_described(desc)}"
                yield Finding(node.name, "description", found, f"{_described(made)}, as {edge} is")


def _described(desc: Desc) -> str:
    shape = "unknown shape" if desc.shape is None else str(list(desc.shape))
    return f"{_dtype(desc.dtype) if desc.dtype else 'unknown dtype'} {shape}"


def shapes_are_static(graph: View, claims: Claims) -> Iterator[Finding]:
    """Every output has a dtype and a shape without unknown dims; one that is read is not empty."""
    for node in graph.nodes:
        for index, desc in enumerate(node.outs):
            if not desc.dtype or desc.shape is None:
                yield Finding(node.name, "shape", f"output {index} of {node.type}: {_described(desc)}", "both known")
            elif any(d < 0 for d in desc.shape):
                yield Finding(
                    node.name, "shape", f"output {index} of {node.type}: {list(desc.shape)}", "a static shape"
                )
            elif 0 in desc.shape and Edge(node.name, index) in graph.readers:
                found = f"output {index} of {node.type}, which is read, has no elements: {list(desc.shape)}"
                yield Finding(node.name, "shape", found, "dims of at least 1")


_ITEM_BYTES = {d.proto: d.shared.itemsize for d in Dtype if d.shared is not None}


def constants_are_whole(graph: View, claims: Claims) -> Iterator[Finding]:
    """A constant holds as many bytes as its shape and dtype say, and is described as it is."""
    for node in graph.of_type("Const"):
        if "value" not in node.op.attr:
            continue
        value, desc = node.op.attr["value"].t, node.outs[0] if node.outs else None
        shape, dtype = tuple(value.desc.shape.dim), value.desc.dtype
        if desc is not None and (dtype, shape) != (desc.dtype, desc.shape):
            found = f"a constant of {_dtype(dtype)} {list(shape)} described as {_described(desc)}"
            yield Finding(node.name, "constant", found, "the same in both")
        if dtype in _ITEM_BYTES and len(value.data) != prod(shape) * _ITEM_BYTES[dtype]:
            found = f"{len(value.data):,} bytes for {_dtype(dtype)} {list(shape)}"
            yield Finding(node.name, "constant", found, f"{prod(shape) * _ITEM_BYTES[dtype]:,}")


def no_float64(graph: View, claims: Claims) -> Iterator[Finding]:
    """The matrix and vector units of these chips have no float64."""
    for node in graph.nodes:
        if any(desc.dtype == Dtype.DOUBLE.proto for desc in node.outs):
            hint = "Make the constant or cast that starts it float32."
            yield Finding(node.name, "float64", f"{node.type} gives F64", "no float64 on the device", hint)


def nothing_on_the_host(graph: View, claims: Claims) -> Iterator[Finding]:
    """No input is placed on the CPU: GE would then run small operators there."""
    for node in graph.nodes:
        on_host = "_host_tensor" in node.op.attr and node.op.attr["_host_tensor"].b
        if on_host or any(d.device == "CPU" for d in node.outs):
            found = "marked as a host tensor" if on_host else "placed on the CPU"
            yield Finding(node.name, "host", f"{node.type} is {found}", "placed on the NPU", "Trace with meta tensors.")


def group_names_fit(graph: View, claims: Claims) -> Iterator[Finding]:
    """Names of communication groups are no longer than HCCL takes."""
    for node in graph.nodes:
        if "group" in node.op.attr and len(node.op.attr["group"].s) > NAME_LIMIT:
            found = f"a group name of {len(node.op.attr['group'].s)} bytes"
            yield Finding(node.name, "group", found, f"at most {NAME_LIMIT}", "Name groups, do not list their ranks.")


# ---- weights and states ----------------------------------------------------------------------------------------------


def inputs_are_as_claimed(graph: View, claims: Claims) -> Iterator[Finding]:
    """RefData are exactly the states, and every weight is a Data node."""
    data = {node.name for node in graph.of_type("Data")}
    states = {node.name for node in graph.of_type("RefData")}
    for name in sorted(states - claims.states):
        yield Finding(name, "state", "a RefData node that no state is declared for", "exactly the declared states")
    for name in sorted(claims.states - states):
        found = "a Data node" if name in data else "no such node"
        yield Finding(name, "state", f"{found} for a declared state", "a RefData node of this name")
    for name in sorted(claims.weights - data):
        yield Finding(name, "weight", "no such Data node for a declared weight", "one Data node per weight")


def no_work_on_weights(graph: View, claims: Claims) -> Iterator[Finding]:
    """No node works on weights or constants alone: it would run at every step, and belongs into a weight's recipe."""
    fixed = claims.weights | {node.name for node in graph.of_type(*CONSTANTS)}
    for node in graph.nodes:
        reads = [edge.node for edge in node.inputs if edge is not None]
        if reads and node.type != "NetOutput" and fixed >= set(reads):
            found = f"{node.type} reads only {', '.join(reads[:3])}"
            hint = "Fold it into the weight's recipe, or make it one constant."
            yield Finding(node.name, "weight", found, "at least one activation, batch input or state", hint)


@dataclass
class _Writes:
    """Who writes which state, and which edges show a state's memory before and after that."""

    writers: dict[str, list[Node]] = field(default_factory=dict)
    before: dict[Edge, str] = field(default_factory=dict)
    after: dict[Edge, str] = field(default_factory=dict)


def states_are_written_in_place(graph: View, claims: Claims) -> Iterator[Finding]:
    """Each updated state is written by one in-place operator that reads it directly, and read only in a known order."""
    writes = _Writes(before={Edge(node.name, 0): node.name for node in graph.of_type("RefData")})
    for node in graph.order:
        if node.type in VIEWS and node.inputs and node.inputs[0] is not None:
            for memory in (writes.before, writes.after):
                if node.inputs[0] in memory:
                    memory[Edge(node.name, 0)] = memory[node.inputs[0]]
        prototype = claims.prototypes.find(node.type)
        for output, source in (prototype.inplace if prototype is not None else {}).items():
            yield from _write(graph, writes, node, output, source)
    yield from _each_once(writes, claims)
    yield from _readers_in_order(graph, writes)


def _write(graph: View, writes: _Writes, node: Node, output: str, source: str) -> Iterator[Finding]:
    """Note one in-place output. An activation may be written too; weights, constants and batch inputs may not."""
    edge, given, made = node.edge(source), node.input(source), node.output(output)
    if edge is None or given is None or made is None:
        return
    if (given.dtype, given.shape) != (made.dtype, made.shape):
        found = f"{node.type} writes {_described(made)} over {source}, {_described(given)}"
        yield Finding(node.name, "in-place", found, "one shape and dtype: it is one buffer")
    state = writes.before.get(edge, writes.after.get(edge))
    if state is not None:
        if graph.by_name[edge.node].type in VIEWS:
            found = f"{node.type} writes state {state} through {edge}"
            hint = "Declare the state in the shape that the operator takes."
            yield Finding(node.name, "in-place", found, "an edge from the RefData itself", hint)
        writes.writers.setdefault(state, []).append(node)
        writes.after[Edge(node.name, node.outs.index(made))] = state
    elif graph.by_name[edge.node].type in SOURCES:
        found = f"{node.type} writes into {edge}, a {graph.by_name[edge.node].type} node"
        yield Finding(node.name, "in-place", found, "a state (RefData) or an activation")


def _each_once(writes: _Writes, claims: Claims) -> Iterator[Finding]:
    for state in sorted(claims.states):
        nodes = writes.writers.get(state, [])
        names = ", ".join(node.name for node in nodes)
        if len(nodes) > 1:
            yield Finding(state, "in-place", f"written {len(nodes)} times, by {names}", "one operator that writes it")
        elif nodes and state not in claims.updated:
            yield Finding(state, "in-place", f"written by {names}", "no writer: it is declared as only read")
        elif not nodes and state in claims.updated:
            hint = "An operator of IN_PLACE must read it directly and be read, or be waited for, itself."
            yield Finding(state, "in-place", "no operator writes it", "its next value written in place", hint)


def _readers_in_order(graph: View, writes: _Writes) -> Iterator[Finding]:
    """Who reads a state's memory beside its writer must run surely before or surely after it."""
    for edge, state in writes.before.items():
        for writer in writes.writers.get(state, []):
            for reader, _ in graph.readers.get(edge, []):
                if reader is writer or reader.type in VIEWS:
                    continue
                if not _runs_before(graph, reader, writer) and not _runs_before(graph, writer, reader):
                    found = f"{reader.type} reads state {state} while {writer.name} may write it"
                    hint = f"Read the output of {writer.name}, or add a control edge."
                    yield Finding(reader.name, "order", found, "a data or control edge between them", hint)


def _runs_before(graph: View, first: Node, last: Node) -> bool:
    """Whether a path of edges leads from `first` to `last`."""
    todo, seen = [last], {last.name}
    while todo:
        for name in todo.pop().predecessors():
            if name == first.name:
                return True
            if name not in seen:
                seen.add(name)
                todo.append(graph.by_name[name])
    return False


def nothing_is_dead(graph: View, claims: Claims) -> Iterator[Finding]:
    """Everything but an input leads to NetOutput: GE removes the rest, a state's writer included."""
    todo = list(graph.of_type("NetOutput"))
    alive = {node.name for node in todo}
    while todo:
        for name in todo.pop().predecessors():
            if name not in alive:
                alive.add(name)
                todo.append(graph.by_name[name])
    for node in graph.nodes:
        if node.name not in alive and node.type not in INPUTS:
            hint = "Remove it, or let NetOutput wait for it by a control edge."
            yield Finding(node.name, "dead", f"no result needs this {node.type}", "a path to NetOutput", hint)


def size(model: ModelDef) -> Iterator[Finding]:
    """GE reads no file of 2 GiB or more."""
    n = model.ByteSize()
    if n > SIZE_LIMIT:
        hint = "Keep weights out of the graph (--weights input)."
        yield Finding("model", "size", f"{n:,} bytes", f"at most {SIZE_LIMIT:,}", hint)


STRUCTURE: tuple[Check, ...] = (unique_names, edges_exist, one_result, no_cycle, numbered_inputs)
CHECKS: tuple[Check, ...] = (
    operators_hold,
    descriptions_agree,
    shapes_are_static,
    constants_are_whole,
    no_float64,
    nothing_on_the_host,
    group_names_fit,
    inputs_are_as_claimed,
    no_work_on_weights,
    states_are_written_in_place,
    nothing_is_dead,
)
