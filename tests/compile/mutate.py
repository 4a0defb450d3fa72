"""Random changes to a bundle: what a bug of the compiler, or of a hand, could do to graphs, weight plan and manifest.

Each kind of change is a generator of one class: it takes a random number generator and a bundle's parts, changes the
parts in place and says in words what it did, or None where the draw does not fit (the caller draws again). Descriptions
are changed along where the compiler would have written them so: a change has to be noticed by what it does, not by its
untidiness.
"""

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kimi_graph.compile.executor import SEMANTICS
from kimi_graph.compile.ge_proto import (
    Dtype,
    ModelDef,
    OpDef,
    TensorDescriptor,
    data_edges,
    fill_attr,
    get_attr,
    is_known,
    is_unfed,
    set_attr,
    split_edge,
    tensor_def,
    tensor_value,
)

INPUTS = ("Data", "RefData")
COMMUTATIVE = ("Add", "Mul", "Maximum", "Minimum", "Equal", "NotEqual", "LogicalAnd", "LogicalOr")


@dataclass
class Parts:
    """What a bundle consists of: graphs by name, weight plan, manifest."""

    models: dict[str, ModelDef]
    plan: dict[str, Any]
    manifest: dict[str, Any]

    def copy(self) -> "Parts":
        models = {}
        for name, model in self.models.items():
            models[name] = ModelDef()
            models[name].CopyFrom(model)
        return Parts(models, copy.deepcopy(self.plan), copy.deepcopy(self.manifest))


Mutation = Callable[[random.Random, Parts], str | None]
MUTATIONS: dict[str, Mutation] = {}


def mutation(f: Mutation) -> Mutation:
    MUTATIONS[f.__name__] = f
    return f


def mutants(parts: Parts, seed: int, each: int) -> Iterator[tuple[str, str, Parts]]:
    """`each` different changes of every kind (fewer where there are not as many): kind, words, changed parts."""
    for kind, change in MUTATIONS.items():
        rng, seen = random.Random(f"{seed} {kind}"), set()
        for _ in range(20 * each):
            if len(seen) == each:
                break
            mutant = parts.copy()
            words = change(rng, mutant)
            if words is not None and words not in seen:
                seen.add(words)
                if kind != "graph_entry":
                    count_again(mutant)
                yield kind, words, mutant


def count_again(parts: Parts) -> None:
    """The manifest's counts of nodes, as compile would have written them: they alone would notice most changes."""
    for entry in parts.manifest["graphs"]:
        entry["ops"] = dict(Counter(op.type for op in parts.models[entry["name"]].graph[0].op))


# ---- helpers ---------------------------------------------------------------------------------------------------------


def a_graph(rng: random.Random, parts: Parts) -> tuple[str, list[OpDef]]:
    name = rng.choice(sorted(parts.models))
    return name, list(parts.models[name].graph[0].op)


def inner(ops: list[OpDef]) -> list[OpDef]:
    """Nodes that compute something."""
    return [op for op in ops if op.type not in (*INPUTS, "Const", "NetOutput")]


def alike(a: TensorDescriptor, b: TensorDescriptor) -> bool:
    return (a.dtype, list(a.shape.dim)) == (b.dtype, list(b.shape.dim))


def describe_as(desc: TensorDescriptor, like: TensorDescriptor) -> None:
    """Another description under the name it has."""
    name = desc.name
    desc.CopyFrom(like)
    desc.name = name


def producer(ops: list[OpDef], edge: str) -> tuple[OpDef, int]:
    name, index = split_edge(edge)
    return next(op for op in ops if op.name == name), index


def fed(op: OpDef) -> list[int]:
    """Positions of the inputs that are given."""
    return [i for i, edge in enumerate(data_edges(op)) if edge]


class Values(dict[str, Any]):
    """What the value of an edge is made of, as something that can be compared: equal ones are equal values."""

    def __init__(self, ops: list[OpDef]) -> None:
        super().__init__()
        self.ops, self.known = {op.name: op for op in ops}, {}

    def __missing__(self, edge: str) -> int:
        name, index = split_edge(edge)
        op = self.ops[name]
        if op.type in INPUTS:
            made: Any = (name,)
        else:
            attributes = tuple((k, op.attr[k].SerializeToString(deterministic=True)) for k in sorted(op.attr))
            made = (op.type, attributes, index, tuple(self[e] if e else 0 for e in data_edges(op)))
        self[edge] = self.known.setdefault(made, len(self.known) + 1)
        return self[edge]


def sweep(model: ModelDef) -> None:
    """Remove what nothing reads any more."""
    ops = {op.name: op for op in model.graph[0].op}
    todo, alive = [n for n, op in ops.items() if op.type == "NetOutput"], set()
    while todo:
        name = todo.pop()
        if name not in alive:
            alive.add(name)
            todo += [split_edge(edge)[0] for edge in ops[name].input if edge]
    keep = [op for name, op in ops.items() if name in alive or op.type in INPUTS]
    copies = [OpDef.FromString(op.SerializeToString()) for op in keep]
    del model.graph[0].op[:]
    model.graph[0].op.extend(copies)


# ---- nodes -----------------------------------------------------------------------------------------------------------


@mutation
def another_type(rng: random.Random, parts: Parts) -> str | None:
    """A node of another operator with as many inputs and outputs, as if a lowering had called the wrong helper."""
    graph, ops = a_graph(rng, parts)
    op = rng.choice(inner(ops))
    old, given = SEMANTICS[op.type], len(data_edges(op))
    if any(i.dynamic for i in old.inputs) or any("[]" in o for o in old.outputs):
        return None
    near = [
        s
        for s in SEMANTICS.values()
        if s.type != op.type
        and len(s.outputs) == len(old.outputs)
        and not any(i.dynamic for i in s.inputs)
        and not any("[]" in o for o in s.outputs)
        and sum(not i.optional for i in s.inputs) <= given <= len(s.inputs)
        and s.in_place == old.in_place
    ]
    if not near:
        return None
    new = rng.choice(sorted(near, key=lambda s: s.type))
    words = f"{graph}: {op.name} {op.type} -> {new.type}"
    op.type = new.type
    for desc, port in zip(op.input_desc, new.inputs, strict=False):
        desc.name = port.name
    for desc, name in zip(op.output_desc, new.outputs, strict=True):
        desc.name = name
    return words


@mutation
def attribute(rng: random.Random, parts: Parts) -> str | None:
    """Another value of an attribute."""
    graph, ops = a_graph(rng, parts)
    kinds: dict[str, list[OpDef]] = {}
    for op in inner(ops):
        kinds.setdefault(op.type, []).append(op)
    op = rng.choice(kinds[rng.choice(sorted(kinds))])  # every type as often, however many nodes it has
    names = sorted(name for name in op.attr if not name.startswith("_"))
    if not names:
        return None
    name = rng.choice(names)
    old = get_attr(op, name)
    new = another_value(rng, old)
    if new is None or (
        name in ("dim", "axis") and new - old == len(op.input_desc[0].shape.dim)
    ):  # counted from the end
        return None
    op.attr[name].Clear()
    fill_attr(op.attr[name], new)
    return f"{graph}: {op.name} {op.type}.{name} {old!r} -> {new!r}"


TEXTS = {"BNSD": "BSND", "BSND": "BNSD", "Norm": "PA_NZ", "None": "NHSD"}


def another_value(rng: random.Random, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([v for v in (value - 1, value + 1, 2 * value, 0, 1, 2, 3) if v != value])
    if isinstance(value, float):
        return value * 1.01 if value else 0.01
    if isinstance(value, str):
        return TEXTS.get(value, value + "_")
    if isinstance(value, list) and value:
        at = rng.randrange(len(value))
        if rng.random() < 0.3:
            return value[:at] + value[at + 1 :]
        return [another_value(rng, v) if i == at else v for i, v in enumerate(value)]
    return None


@mutation
def bypass(rng: random.Random, parts: Parts) -> str | None:
    """A node left out: who read it reads what it read. What is dead then goes."""
    graph, ops = a_graph(rng, parts)
    op = rng.choice(inner(ops))
    same = [i for i in fed(op) if list(op.input_desc[i].shape.dim) == list(op.output_desc[0].shape.dim)]
    if not same:
        return None
    position = rng.choice(same)
    edge = op.input[position]
    found = False
    for reader in ops:
        for i, read in enumerate(reader.input):
            if read == f"{op.name}:0":
                reader.input[i] = edge
                describe_as(reader.input_desc[i], op.input_desc[position])
                found = True
    if not found:
        return None
    sweep(parts.models[graph])
    return f"{graph}: {op.name} {op.type} bypassed by {edge}"


@mutation
def constant(rng: random.Random, parts: Parts) -> str | None:
    """Another value in a constant."""
    graph, ops = a_graph(rng, parts)
    op = rng.choice([op for op in ops if op.type == "Const"])
    reader = next(r for r in ops if f"{op.name}:0" in r.input)
    old = tensor_value(op.attr["value"].t)
    new = old.clone().reshape(-1)
    at = rng.randrange(new.numel())
    how = rng.choice(("more", "less", "swap"))
    if how == "swap" and new.numel() > 1:
        other = rng.randrange(new.numel())
        new[at], new[other] = old.reshape(-1)[other], old.reshape(-1)[at]
    elif new.dtype.is_floating_point:
        new[at] = new[at] * 1.01 if new[at] else 0.01
    else:
        new[at] += 1 if how == "more" else -1
    if torch.equal(new.reshape(old.shape), old):
        return None
    op.attr["value"].t.CopyFrom(tensor_def(new.reshape(old.shape)))
    return f"{graph}: {op.name} (read by {reader.type}) {old.tolist()} -> {new.reshape(old.shape).tolist()}"


# ---- edges -----------------------------------------------------------------------------------------------------------


@mutation
def another_edge(rng: random.Random, parts: Parts) -> str | None:
    """An input that reads another edge of the same shape and dtype, from before the node."""
    graph, ops = a_graph(rng, parts)
    at = rng.randrange(len(ops))
    op = ops[at]
    if op.type in (*INPUTS, "Const") or not fed(op):
        return None
    position = rng.choice(fed(op))
    edges = [
        f"{before.name}:{i}"
        for before in ops[:at]
        for i, desc in enumerate(before.output_desc)
        if alike(desc, op.input_desc[position]) and f"{before.name}:{i}" != op.input[position]
    ]
    if not edges:
        return None
    old, new = op.input[position], rng.choice(edges)
    values = Values(ops)
    if values[old] == values[new]:  # as angles, which every layer arranges for itself
        return None
    if op.input_desc[position].name == "axes":  # counted from the other end they are the same
        places = [tensor_value(producer(ops, edge)[0].attr["value"].t) for edge in (old, new)]
        rank = len(op.input_desc[0].shape.dim)
        if torch.equal(places[0] % rank, places[1] % rank):
            return None
    op.input[position] = new
    sweep(parts.models[graph])
    return f"{graph}: {op.name} {op.type} input {op.input_desc[position].name} {old} -> {new}"


@mutation
def swapped_inputs(rng: random.Random, parts: Parts) -> str | None:
    """Two inputs of a node the other way round, where that means something else."""
    graph, ops = a_graph(rng, parts)
    op = rng.choice([op for op in inner(ops) if len({op.input[i] for i in fed(op)}) > 1])
    a, b = rng.sample(fed(op), 2)
    if op.input[a] == op.input[b] or op.type in COMMUTATIVE:
        return None
    op.input[a], op.input[b] = op.input[b], op.input[a]
    first, second = (TensorDescriptor.FromString(op.input_desc[i].SerializeToString()) for i in (a, b))
    describe_as(op.input_desc[a], second)
    describe_as(op.input_desc[b], first)
    return f"{graph}: {op.name} {op.type} inputs {op.input_desc[a].name} and {op.input_desc[b].name} swapped"


@mutation
def another_output(rng: random.Random, parts: Parts) -> str | None:
    """An input that reads another output of its producer."""
    graph, ops = a_graph(rng, parts)
    reads = [
        (op, position, source, index)
        for op in ops
        for position in fed(op)
        for source, index in [producer(ops, op.input[position])]
        if len(source.output_desc) > 1
    ]
    op, position, source, index = rng.choice(reads)
    new = rng.choice([i for i in range(len(source.output_desc)) if i != index])
    op.input[position] = f"{source.name}:{new}"
    describe_as(op.input_desc[position], source.output_desc[new])
    return f"{graph}: {op.name} {op.type} reads {source.name}:{new} instead of :{index}"


@mutation
def fewer_results(rng: random.Random, parts: Parts) -> str | None:
    """An entry of NetOutput, or a control edge, that is not there."""
    graph, ops = a_graph(rng, parts)
    controls = [(op, i) for op in ops for i, edge in enumerate(op.input) if edge.endswith(":-1")]
    if controls and rng.random() < 0.8:
        op, i = rng.choice(controls)
        edge = op.input.pop(i)
        return f"{graph}: {op.name} does not wait for {edge}"
    net = ops[-1]
    at = rng.randrange(len(net.input_desc))  # control edges come after the results
    del net.input[at], net.input_desc[at]
    return f"{graph}: NetOutput without entry {at}"


# ---- descriptions, inputs --------------------------------------------------------------------------------------------


@mutation
def another_dtype(rng: random.Random, parts: Parts) -> str | None:
    """A description with another dtype."""
    graph, op, side, at, desc = a_description(rng, parts)
    new = rng.choice((Dtype.FLOAT, Dtype.BF16, Dtype.FLOAT16, Dtype.INT32, Dtype.INT64, Dtype.BOOL))
    if new.proto == desc.dtype:
        return None
    words = f"{graph}: {op.name} {op.type} {side} {at} described as {Dtype.of_proto(desc.dtype).name} -> {new.name}"
    desc.dtype = new.proto
    return words


@mutation
def another_shape(rng: random.Random, parts: Parts) -> str | None:
    """A description with another shape."""
    graph, op, side, at, desc = a_description(rng, parts)
    old = list(desc.shape.dim)
    if not old:
        return None
    new = list(old)
    i = rng.randrange(len(old))
    how = rng.choice(("more", "less", "swap", "drop", "unknown"))
    if how == "swap":
        j = rng.randrange(len(old))
        new[i], new[j] = new[j], new[i]
    elif how == "drop":
        del new[i]
    else:
        new[i] = {"more": new[i] + 1, "less": new[i] - 1, "unknown": -1}[how]
    if new == old:
        return None
    desc.shape.dim[:] = new
    return f"{graph}: {op.name} {op.type} {side} {at} described as {old} -> {new}"


def a_description(rng: random.Random, parts: Parts) -> tuple[str, OpDef, str, int, TensorDescriptor]:
    graph, ops = a_graph(rng, parts)
    every = [
        (graph, op, side, i, desc)
        for op in ops
        for side, descs in (("input", op.input_desc), ("output", op.output_desc))
        for i, desc in enumerate(descs)
        if is_known(desc) and not is_unfed(desc)
    ]
    return rng.choice(every)


@mutation
def swapped_indexes(rng: random.Random, parts: Parts) -> str | None:
    """Two inputs of a graph with each other's index: a runtime would bind each to the other's memory."""
    graph, ops = a_graph(rng, parts)
    a, b = rng.sample([op for op in ops if op.type in INPUTS], 2)
    first, second = get_attr(a, "index"), get_attr(b, "index")
    set_attr(a, "index", second)
    set_attr(b, "index", first)
    return f"{graph}: indexes of {min(a.name, b.name)} and {max(a.name, b.name)} swapped"


@mutation
def swapped_states(rng: random.Random, parts: Parts) -> str | None:
    """Two states of equal shape in each other's place in a graph."""
    return swapped_names(rng, parts, "RefData")


@mutation
def swapped_weights(rng: random.Random, parts: Parts) -> str | None:
    """Two weights of equal shape in each other's place in a graph."""
    return swapped_names(rng, parts, "Data")


def swapped_names(rng: random.Random, parts: Parts, kind: str) -> str | None:
    graph, ops = a_graph(rng, parts)
    inputs = [op for op in ops if op.type == kind and op.name.startswith(("p.", "s."))]
    if not inputs:  # a graph without states
        return None
    a = rng.choice(inputs)
    others = [b for b in inputs if b is not a and alike(a.output_desc[0], b.output_desc[0])]
    if not others:
        return None
    b = rng.choice(others)
    swap = {f"{a.name}:0": f"{b.name}:0", f"{b.name}:0": f"{a.name}:0"}
    for op in ops:
        op.input[:] = [swap.get(edge, edge) for edge in op.input]
    return f"{graph}: {min(a.name, b.name)} and {max(a.name, b.name)} swapped"


# ---- weight plan and manifest ----------------------------------------------------------------------------------------


@mutation
def plan_swapped(rng: random.Random, parts: Parts) -> str | None:
    """Two entries of the weight plan with each other's parameter, tensors, or both."""
    weights = parts.plan["weights"]
    a = rng.choice(sorted(weights))
    keys = rng.choice((("parameter",), ("tensors",), ("parameter", "tensors")))
    same = [
        b
        for b in sorted(weights)
        if weights[a]["parameter"] != weights[b]["parameter"]
        and all(weights[a][key] == weights[b][key] for key in ("shape", "stored", "dtype"))
    ]
    if not same:
        return None
    b = rng.choice(same)
    for key in keys:
        weights[a][key], weights[b][key] = weights[b][key], weights[a][key]
    return f"weights.json: {' and '.join(keys)} of {min(a, b)} and {max(a, b)} swapped"


@mutation
def plan_tensors(rng: random.Random, parts: Parts) -> str | None:
    """A checkpoint tensor left out, doubled, or two in the wrong order."""
    weights = parts.plan["weights"]
    name = rng.choice(sorted(n for n, w in weights.items() if len(w["tensors"]) > 1))
    tensors, how = weights[name]["tensors"], rng.choice(("dropped", "doubled", "swapped"))
    at = rng.randrange(len(tensors) - 1)
    if how == "dropped":
        del tensors[at]
    elif how == "doubled":
        tensors[at] = tensors[at + 1]
    else:
        tensors[at], tensors[at + 1] = tensors[at + 1], tensors[at]
    return f"weights.json: {name} tensor {at} {how}"


@mutation
def plan_step(rng: random.Random, parts: Parts) -> str | None:
    """A recipe step left out, doubled, or with another argument."""
    weights = parts.plan["weights"]
    name = rng.choice(sorted(n for n, w in weights.items() if w["steps"]))
    steps = weights[name]["steps"]
    at = rng.randrange(len(steps))
    how = rng.choice(("dropped", "doubled", "changed", "swapped"))
    old = list(steps[at])
    if how == "dropped":
        del steps[at]
    elif how == "doubled":
        steps.insert(at, list(old))
    elif how == "swapped":
        steps[at], steps[at - 1] = steps[at - 1], steps[at]
        if steps[at] == old:
            return None
    else:
        steps[at] = changed_step(rng, old)
        if steps[at] == old:
            return None
    return f"weights.json: {name} step {at} {old} {how} -> {steps}"


def changed_step(rng: random.Random, step: list[Any]) -> list[Any]:
    kind, *args = step
    if kind == "slice":
        dim, start, end = args
        size = end - start
        return rng.choice(
            [[kind, dim, start + 1, end + 1], [kind, dim, start + 1, end], [kind, dim, start - 1, end - 1],
             [kind, dim, start, end - 1], [kind, dim, start ^ size, (start ^ size) + size], [kind, 0, start, end]]
        )  # fmt: skip
    if kind == "cast":
        return [kind, rng.choice(["bfloat16", "float16", "float64", "int32"])]
    if kind == "view":
        return [kind, *rng.sample(args, len(args))]
    return [{"exp": "neg", "neg": "exp"}.get(kind, kind), *args]


@mutation
def contract(rng: random.Random, parts: Parts) -> str | None:
    """Two states swapped in the manifest, or a number, dtype or name of it changed."""
    state = parts.manifest["state"]
    how = rng.choice(("places", "names", "number", "dtype", "shape"))
    a, b = sorted(rng.sample(range(len(state["states"])), 2))
    states = state["states"]
    if how == "places":
        states[a], states[b] = states[b], states[a]
        return f"manifest.json: states {a} and {b} swapped"
    if how == "names":
        states[a]["name"], states[b]["name"] = states[b]["name"], states[a]["name"]
        return f"manifest.json: names of states {a} and {b} swapped"
    if how == "number":
        key = rng.choice(sorted(k for k, v in state.items() if isinstance(v, int)))
        state[key] += rng.choice((-1, 1))
        return f"manifest.json: state.{key} is {state[key]}"
    key = "dtype" if how == "dtype" else rng.choice(("shape", "graph_shape"))
    if key == "dtype":
        narrower = {"float32": "bfloat16", "int8": "float8_e4m3fn"}
        states[a][key] = narrower.get(states[a][key], "float32")
    else:
        old = list(states[a][key])
        rng.shuffle(states[a][key])
        if states[a][key] == old:
            return None
    return f"manifest.json: {key} of state {a} is {states[a][key]}"


@mutation
def graph_entry(rng: random.Random, parts: Parts) -> str | None:
    """A graph's entry in the manifest with two names swapped, or a number or dtype changed."""
    entry = rng.choice(parts.manifest["graphs"])
    how = rng.choice(("inputs", "weights", "states", "rows", "tokens", "dtype", "ops"))
    if how in ("rows", "tokens"):
        entry[how] += 1
        return f"manifest.json: {entry['name']}.{how} is {entry[how]}"
    if how == "dtype":
        given = rng.choice(entry["inputs"] + entry["outputs"])
        given["dtype"] = {"int32": "int64", "int64": "int32"}.get(given["dtype"], "float16")
        return f"manifest.json: {entry['name']} {given['name']} is {given['dtype']}"
    if how == "ops":
        key = rng.choice(sorted(entry["ops"]))
        entry["ops"][key] += 1
        return f"manifest.json: {entry['name']} has {entry['ops'][key]} {key}"
    if len(entry[how]) < 2:
        return None
    a, b = sorted(rng.sample(range(len(entry[how])), 2))
    entry[how][a], entry[how][b] = entry[how][b], entry[how][a]
    return f"manifest.json: {how} {a} and {b} of {entry['name']} swapped"
