"""Collectives have one order on all ranks: edges where nothing else orders them, and a proof without numbers."""

import pytest
import torch

from kimi_graph.compile.capture import capture
from kimi_graph.compile.convert import convert
from kimi_graph.compile.executor import Executor, infer_shapes
from kimi_graph.compile.ge_proto import ModelDef, OpDef, control_edges, describe
from kimi_graph.compile.lint import check_ordered
from kimi_graph.compile.order import (
    LARGE,
    Overlap,
    check_order,
    is_heavy,
    order_collectives,
    overlap_kinds,
    overlaps,
)
from kimi_graph.compile.targets import target
from kimi_graph.errors import BundleError
from kimi_graph.parallel import Mesh, collectives

A3 = target("a3")
MESH = Mesh.parse("dp=2,tp=2")
TENSOR, DATA = ("tensor",), ("data",)


def groups(name):
    return MESH.groups(collectives.group_axes(name))


def graph(host, f) -> ModelDef:
    captured = capture(lambda x: {"y": f(x)}, {"x": torch.empty(6, 4, device="meta")})
    made = convert(captured.module, name="call", host=host, target=A3, cann=A3.cann).model
    infer_shapes(made)
    return made


def hcom(model: ModelDef) -> list:
    return [op for op in model.graph[0].op if op.type.startswith("Hcom")]


def apart(x):
    return collectives.all_reduce(x, TENSOR) + collectives.all_reduce(x.exp(), DATA)


def chained(x):
    return collectives.all_reduce(collectives.all_reduce(x, TENSOR).exp(), DATA)


def test_independent_collectives_get_an_edge_and_dependent_ones_none(host):
    model = graph(host, apart)
    assert order_collectives(model) == 1
    first, second = hcom(model)
    assert list(control_edges(second)) == [f"{first.name}:-1"]
    assert order_collectives(model) == 0
    assert order_collectives(graph(host, chained)) == 0


def test_lint_names_two_collectives_that_no_edge_orders(host):
    model = graph(host, apart)
    first, second = hcom(model)
    with pytest.raises(BundleError, match=f"decode: {second.name} and {first.name} may be started in either order"):
        check_ordered("decode", model)
    order_collectives(model)
    check_ordered("decode", model)


def test_a_chain_of_edges_is_as_long_as_it_needs_to_be(host):
    model = graph(host, lambda x: apart(x) * collectives.all_reduce(x.neg(), TENSOR))
    assert order_collectives(model) == 2
    a, b, c = hcom(model)
    assert [list(control_edges(op)) for op in (a, b, c)] == [[], [f"{a.name}:-1"], [f"{b.name}:-1"]]


def test_ranks_with_one_graph_come_together(host):
    executor = Executor(graph(host, apart))
    check_order([executor] * 4, groups)
    assert [str(m).split(" ", 1)[1] for m in executor.meetings()] == [
        "(HcomAllReduce tensor [6, 4] float32)",
        "(HcomAllReduce data [6, 4] float32)",
    ]


@pytest.mark.parametrize(
    "other, message",
    [
        (
            lambda x: collectives.all_reduce(collectives.all_reduce(x, DATA), TENSOR),
            "rank 0 waits at .* for ever: rank 1",
        ),
        (lambda x: collectives.all_reduce(x, TENSOR), "rank 0 waits at .*data.* for ever: rank 2 .* has finished"),
        (lambda x: chained(x[:2]), r"rank 0 is at .*\[6, 4\].*, rank 1 of its group at .*\[2, 4\]"),
        (lambda x: chained(x.half()), r"rank 0 is at .*float32\), rank 1 of its group at .*float16\)"),
    ],
)
def test_the_first_difference_is_named_without_running_anything(host, other, message):
    one, two = Executor(graph(host, chained)), Executor(graph(host, other))
    with pytest.raises(BundleError, match=message):
        check_order([one, two, two, one], groups)


def beside(x):
    """The sine may run while the first sum travels, not the second, which needs it; the exponential needs the first."""
    return collectives.all_reduce(collectives.all_reduce(x, TENSOR).exp() + x.sin(), DATA)


def works(op) -> bool:
    return op.type in ("Exp", "Sin")


def test_what_travels_beside_a_collective_is_read_off_the_edges(host):
    model = graph(host, beside)
    first, second = hcom(model)
    (sine,) = [op for op in model.graph[0].op if op.type == "Sin"]
    assert overlaps(model, works) == {first.name: [sine.name], second.name: []}
    sine.input.append(f"{first.name}:-1")  # a control edge is an edge
    _before(model, first, sine)
    assert overlaps(model, works) == {first.name: [], second.name: []}


def _before(model: ModelDef, first: OpDef, second: OpDef) -> None:
    """Put a node into the order of the file before another."""
    ops = [OpDef.FromString(op.SerializeToString()) for op in model.graph[0].op]
    moved = [op for op in ops if op.name == second.name]
    rest = [op for op in ops if op.name != second.name]
    at = next(i for i, op in enumerate(rest) if op.name == first.name) + 1
    del model.graph[0].op[:]
    model.graph[0].op.extend([*rest[:at], *moved, *rest[at:]])


def test_overlaps_are_counted_by_part_and_type(host, monkeypatch):
    monkeypatch.setattr("kimi_graph.compile.order.HEAVY", {"Exp", "Sin"})
    model = graph(host, beside)
    for op in model.graph[0].op:
        op.name = f"layers.3.ffn_res2/{op.name}"
        op.input[:] = [f"layers.3.ffn_res2/{edge}" for edge in op.input]
    assert overlap_kinds(model) == [Overlap("ffn_res", "HcomAllReduce", 2, 1, {"Sin": 1})]


@pytest.mark.parametrize("type_, rows, heavy", [
    ("MatMul", LARGE // 2, True), ("MatMul", LARGE // 2 - 1, False), ("KdaChunk", 1, True), ("Add", LARGE, False),
])  # fmt: skip
def test_products_are_heavy_by_size_and_attention_always(type_, rows, heavy):
    op = OpDef(type=type_)
    describe(op.input_desc.add(name="x"), (rows, 1), torch.bfloat16)
    assert is_heavy(op) is heavy
