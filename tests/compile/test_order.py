"""Collectives have one order on all ranks: edges where nothing else orders them, and a proof without numbers."""

import pytest
import torch

from kimi_graph.compile.capture import capture
from kimi_graph.compile.convert import convert
from kimi_graph.compile.driver import Request, build_graph
from kimi_graph.compile.executor import Executor, infer_shapes
from kimi_graph.compile.ge_proto import ModelDef, OpDef, control_edges, describe, shape_of, split_edge
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
from kimi_graph.compile.phases import Bucket, pools
from kimi_graph.compile.targets import target
from kimi_graph.errors import BundleError
from kimi_graph.parallel import Mesh, collectives, preset
from tests.compile.family import small_model

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


# ---- what graphs of models allow -------------------------------------------------------------------------------------


def of_model(host, name, phase, mesh, **rules) -> ModelDef:
    """The graph of a small model's ranks; more tokens than it selects."""
    config, on = small_model(name), Mesh.parse(mesh)
    made = preset(config, on, phase, **rules)
    slots, pages = pools(made, 2, 8)
    tokens = 1 if phase == "decode" else 16
    bucket = Bucket(phase=phase, rows=2, tokens=tokens, page=16, pages=pages, sequence_pages=8, slots=slots, images=4)
    return build_graph(Request(config=config, target=A3, phases=(phase,)), bucket, host, rules=made).model


def needed(model: ModelDef, name: str) -> set[str]:
    """A node and all that it needs."""
    ops, todo, found = {op.name: op for op in model.graph[0].op}, [name], set()
    while todo:
        if (at := todo.pop()) not in found:
            found.add(at)
            todo += [split_edge(edge)[0] for edge in ops[at].input if edge]
    return found


def test_keys_of_a_shared_selection_are_found_before_the_layers_that_read_them_and_none_is_sent(host):
    """GLM-5.2 in decode, caches split: where the selected keys lie is known to all layers that share the selection as
    soon as it is made; what a layer sends are numbers of its heads, and its sums, never rows of the cache."""
    model = of_model(host, "glm-5.2", "decode", "cp=2,tp=2")
    shared = [op for op in model.graph[0].op if ".mla_shared/" in op.name]
    layers = list(dict.fromkeys(op.name.partition(".mla")[0] for op in shared))
    assert layers
    for layer in layers:
        own = [op for op in shared if op.name.startswith(f"{layer}.")]
        pages = [op.name for op in own if op.type == "GatherV2" and shape_of(op.output_desc[0])[-1:] == (512,)]
        (rows,) = pages  # of the latents
        (read,) = [op for op in own if op.name == rows]
        places = needed(model, split_edge(read.input[1])[0])
        before = int(layer.partition(".")[2])
        ahead = {n for n in places if n.startswith("layers.") and int(n.split(".")[1]) == before - 1}
        assert not [n for n in places if n.startswith(f"{layer}.") and "MatMul" in n]
        assert not [n for n in ahead if ".moe/" in n or ".dense/" in n], "it needs what the layer before made"
        sent = [op for op in own if op.type.startswith("Hcom")]
        assert [op.type for op in sent] == ["HcomAllGather", "HcomAllReduce"]
        assert shape_of(sent[0].input_desc[0])[-1] < 512  # log-sum-exps


def test_what_follows_from_queries_alone_runs_beside_the_gather_of_a_selection(host, monkeypatch):
    """A prefill, whose indexer shares out the queries: the absorbed query and the output gate do not wait for it."""
    monkeypatch.setattr("kimi_graph.compile.order.LARGE", 1)
    model = of_model(host, "kimi-k3.1-pro", "prefill", "tp=2")
    (gathers,) = [k for k in overlap_kinds(model) if (k.part, k.type) == ("mla", "HcomAllGather")]
    assert gathers.covered == gathers.count and gathers.beside["MatMul"] >= 2 * gathers.count
