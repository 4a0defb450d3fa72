"""Shapes and dtypes of every tensor of a graph, by running the operators' semantics on meta tensors."""

import torch
from torch import Tensor

from kimi_graph.compile.ge_proto import ModelDef, describe, describe_inputs, dtype_of, is_known, shape_of
from kimi_graph.errors import CompileError

from .graph import SOURCES, parse
from .node import Edge, Node, Op, disagreement, evaluate, gather_arguments

KNOWN_VALUES = 1 << 16  # constants up to this many elements keep their values, so that shapes can depend on them


def infer_shapes(model: ModelDef) -> None:
    """Fill in what descriptions lack, and check those of outputs there are. Changes `model`.

    Raises:
        CompileError: a node whose inputs do not fit its operator, or whose description says something else; and
            whatever makes the graph unrunnable.
    """
    graph = parse(model, CompileError)
    ops = {op.name: op for op in model.graph[0].op}
    values: dict[Edge, Tensor] = {}
    for node in graph.order:
        if node.type == "NetOutput":
            continue
        for index, (desc, value) in enumerate(zip(ops[node.name].output_desc, _outputs(node, values), strict=True)):
            problem = disagreement(desc, value, exact=False)
            if problem:
                raise CompileError(f"{node.name} ({node.type}): output {desc.name or index} {problem}.")
            if not is_known(desc):
                describe(desc, value.shape, value.dtype)
            values[node.name, index] = value
    describe_inputs(model.graph[0])


def _outputs(node: Node, values: dict[Edge, Tensor]) -> tuple[Tensor, ...]:
    """Meta tensors; real ones where all inputs are known constants, so that shapes can be computed from them."""
    if node.type in SOURCES:
        return tuple(_input(node) for _ in node.descs)
    given = gather_arguments(node, values.__getitem__)
    tensors = [t for g in given.values() if g is not None for t in (g if isinstance(g, list) else [g])]
    assert node.semantics is not None
    if any(t.is_meta for t in tensors):
        host = node.semantics.host
        given = {name: g if name in host else _to_meta(g) for name, g in given.items()}
    made = evaluate(Op(node, exact=False, error=CompileError), given)
    return tuple(t if t.is_meta or t.numel() <= KNOWN_VALUES else t.to("meta") for t in made)


def _input(node: Node) -> Tensor:
    desc = node.descs[0]
    if not is_known(desc):
        raise CompileError(f"{node.name} ({node.type}): an input of the graph must be described.")
    return torch.empty(shape_of(desc), dtype=dtype_of(desc), device="meta")


def _to_meta(given: Tensor | list[Tensor] | None) -> Tensor | list[Tensor] | None:
    if isinstance(given, list):
        return [t.to("meta") for t in given]
    return None if given is None else given.to("meta")
