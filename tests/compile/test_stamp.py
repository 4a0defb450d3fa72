"""Stamping: pieces are copied to every layer with names of their own, states are in place, inputs are numbered."""

import re

import pytest
import torch

from kimi_graph import tree
from kimi_graph.compile import air
from kimi_graph.compile.bundle import open_bundle
from kimi_graph.compile.capture import capture
from kimi_graph.compile.convert import convert
from kimi_graph.compile.ge_proto import ModelDef, OpDef, describe, get_attr, split_edge
from kimi_graph.compile.prototypes import Prototypes
from kimi_graph.compile.stamp import Assembly, alias_states
from kimi_graph.compile.targets import target
from kimi_graph.models import decoder
from kimi_graph.read_config import load_config


PARTS = "kda|mla|attn_add|dense|moe|ffn_add"


@pytest.fixture(scope="module", params=["prefill", "decode"])
def graph(request, bundle):
    opened = open_bundle(bundle)
    entry = opened.graph(request.param)
    return air.from_bytes(opened.graph_bytes(entry), entry["file"]).graph[0]


def test_names_are_those_of_layers_weights_states_and_inputs(graph):
    inputs = {op.name for op in graph.op if op.type in ("Data", "RefData")}
    assert {"tokens", "p.embed", "p.layers.0.kda.query", "s.layers.0.kda.memory", "s.layers.2.mla.rope"} <= inputs
    batch = {n for n in inputs if n.startswith("batch.")}
    assert batch == {f"batch.{n}" for n in ("slots", "lengths", "counts", "block_table", "slot_mapping")}
    for op in graph.op:
        if op.type not in ("Data", "RefData", "Const", "NetOutput"):
            assert re.fullmatch(rf"(embed|head|layers\.\d\.({PARTS}))/\w+", op.name), op.name
    found = {op.name.rpartition("/")[0].rpartition(".")[2] for op in graph.op if "/" in op.name}
    assert found == {"embed", "head", *PARTS.split("|")}


def test_two_layers_of_a_kind_differ_in_names_alone(graph):
    def nodes(layer):
        found = []
        for op in graph.op:
            if op.name.startswith(f"layers.{layer}.kda/"):
                copy = OpDef.FromString(op.SerializeToString())
                copy.name = op.name.replace(f"layers.{layer}.", "layers.N.")
                copy.input[:] = [edge.replace(f"layers.{layer}.", "layers.N.") for edge in op.input]
                found.append(copy)
        return found

    first, second = nodes(0), nodes(1)
    assert len(first) == len(second) > 20
    entering = {edge for op in first for edge in op.input} ^ {edge for op in second for edge in op.input}
    assert len(entering) == 2  # the residual stream, which comes from elsewhere
    for a, b in zip(first, second, strict=True):
        for i, (x, y) in enumerate(zip(a.input, b.input, strict=True)):
            if {x, y} == entering:
                a.input[i] = b.input[i]
        assert a == b


def test_inputs_are_numbered_inputs_then_weights_then_states(graph):
    inputs = [op for op in graph.op if op.type in ("Data", "RefData")]
    assert [get_attr(op, "index") for op in inputs] == list(range(len(inputs)))
    assert list(graph.op[: len(inputs)]) == inputs
    kinds = ["s" if op.type == "RefData" else "p" if op.name.startswith("p.") else "i" for op in inputs]
    assert kinds == sorted(kinds, key="ips".index)


def test_states_are_written_in_place_and_only_logits_leave(graph):
    states = {op.name for op in graph.op if op.type == "RefData"}
    assert states == {op.name for op in graph.op if op.name.startswith("s.")}
    net = graph.op[-1]
    assert (net.type, len(net.input)) == ("NetOutput", 1)
    assert split_edge(net.input[0])[0].startswith("head/")
    written = set()
    for op in graph.op:
        outputs = {d.name for d in op.output_desc}
        written |= {
            split_edge(op.input[i])[0] for i, d in enumerate(op.input_desc) if d.name in outputs and op.input[i]
        }
    assert states <= written


def test_no_view_reads_a_view_and_nothing_is_dead(graph):
    ops = {op.name: op for op in graph.op}
    read = {split_edge(edge)[0] for op in graph.op for edge in op.input if edge}
    for op in graph.op:
        if op.type == "Reshape":
            assert ops[split_edge(op.input[0])[0]].type != "Reshape", op.name
        assert op.name in read or op.type == "NetOutput", op.name


def test_nodes_come_after_what_they_read(graph):
    seen = set()
    for op in graph.op:
        assert {split_edge(edge)[0] for edge in op.input if edge} <= seen, op.name
        seen.add(op.name)


def test_every_parameter_of_the_model_is_read(bundle, small):
    """No weight of the checkpoint is forgotten, none is read twice in another form but the two halves of kv_b."""
    plan = open_bundle(bundle).weights["weights"]
    parameters = [path for path, _ in tree.items(decoder.model_specs(load_config(small)))]
    used = [entry["parameter"] for entry in plan.values()]
    assert set(used) == set(parameters)
    assert sorted(p for p in used if used.count(p) > 1) == ["layers.2.mla.up"] * (used.count("layers.2.mla.up"))


def meta(*shape):
    return torch.empty(shape, device="meta")


def test_a_state_whose_next_value_is_not_in_place_is_our_fault(host):
    """Were a layer's state an ordinary value, a runtime would lose it."""
    captured = capture(lambda x, s: {"y": x + s["a"], "s": {"a": s["a"] + 1}}, {"x": meta(2), "s": {"a": meta(2)}})
    made = convert(captured.module, name="piece", host=host, target=target("a3"), cann="9.1")
    names = [n.name for n in captured.module.graph.nodes if n.op == "placeholder"]
    inputs = dict(zip(names, captured.inputs, strict=True))
    with pytest.raises(
        AssertionError, match=r"s\.a: its next value comes from Add.*, which does not write it in place"
    ):
        alias_states(made.model, inputs, captured.outputs, Prototypes("a3", host.root))


def data(name, *shape):
    op = OpDef(name=name, type="Data")
    describe(op.output_desc.add(name="y"), shape, torch.float32)
    return op


def test_an_input_asked_for_twice_is_one_and_must_have_one_shape():
    assembly = Assembly("g")
    assert assembly.input("p.w", data("a", 2, 3)) == assembly.input("p.w", data("b", 2, 3)) == "p.w:0"
    assert len(assembly.inputs) == 1
    with pytest.raises(AssertionError, match=r"input p\.w is read as \[2, 3\] and as \[6\]"):
        assembly.input("p.w", data("c", 6))


def test_an_empty_assembly_has_a_result_and_nothing_else(host):
    made = Assembly("g").finish({}, Prototypes("a3", host.root))
    assert isinstance(made, ModelDef)
    assert [op.type for op in made.graph[0].op] == ["NetOutput"]
