"""Stamping: pieces are copied to every layer with names of their own, states are in place, inputs are numbered."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kimi_graph import tree
from kimi_graph.compile import air, driver, phases, recipe
from kimi_graph.compile.bundle import open_bundle
from kimi_graph.compile.capture import capture
from kimi_graph.compile.convert import convert
from kimi_graph.compile.ge_proto import ModelDef, OpDef, describe, get_attr, split_edge
from kimi_graph.compile.manifest import GENERATED, bucket_of
from kimi_graph.compile.prototypes import Prototypes
from kimi_graph.compile.stamp import Assembly, alias_states
from kimi_graph.compile.targets import target
from kimi_graph.config import ModelConfig
from kimi_graph.models import decoder
from tests.compile.family import FAMILY, small_model


@dataclass(frozen=True)
class Graph:
    """A graph of a bundle, and what it was made of."""

    config: ModelConfig
    bucket: phases.Bucket
    op: Sequence[OpDef]

    @property
    def uses(self):
        return phases.uses(self.config, self.bucket)

    def inside(self, place: str) -> list[OpDef]:
        return [op for op in self.op if op.name.startswith(place)]


PHASES = {
    name: ("prefill", "decode") if small_model(name).vision is None else ("vision", "prefill", "decode")
    for name in FAMILY
}


@pytest.fixture(scope="module")
def stamped(tmp_path_factory):
    """`stamped(name)`: a bundle of a small model whose chains over parts are left as they were stamped."""

    @functools.cache
    def made(name: str) -> Path:
        config, folder = small_model(name), tmp_path_factory.mktemp("stamped") / name
        sizes = {"batch": 2, "chunk": 16, "max_len": 96, "page": 16, "patches": 16 if config.vision else None}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(driver, "fused", lambda graph, *_: graph)
            driver.compile_model(config, target=target("a3"), out=folder, **sizes)
        return folder

    return made


@pytest.fixture(scope="module", params=[(name, phase) for name in FAMILY for phase in PHASES[name]], ids="-".join)
def graph(request, stamped):
    name, phase = request.param
    opened = open_bundle(stamped(name))
    entry = opened.graph(phase)
    ops = air.from_bytes(opened.graph_bytes(entry), entry["file"]).graph[0].op
    return Graph(small_model(name), bucket_of(opened.manifest, entry), ops)


BATCH = ["tokens", *(f"batch.{n}" for n in ("slots", "lengths", "counts", "block_table", "slot_mapping"))]


def test_names_are_those_of_layers_weights_states_and_inputs(bundle):
    opened, mask = open_bundle(bundle), {"prefill": ["causal_mask"], "decode": []}
    for entry in opened.manifest["graphs"]:
        ops = air.from_bytes(opened.graph_bytes(entry), entry["file"]).graph[0].op
        inputs = {op.name for op in ops if op.type in ("Data", "RefData")}
        assert {"p.embed", "p.layers.0.kda.query", "s.layers.0.kda.memory", "s.layers.2.mla.rope"} <= inputs
        assert sorted(n for n in inputs if n[:2] not in ("p.", "s.")) == sorted(BATCH + mask[entry["phase"]])
        for op in ops:
            if op.type not in ("Data", "RefData", "Const", "NetOutput"):
                assert re.fullmatch(r"(embed|head|layers\.\d\.(kda|mla|attn_add|dense|moe|ffn_add))/\w+", op.name), (
                    op.name
                )


def test_nodes_are_named_by_their_place_in_the_schedule_and_no_place_is_empty(graph):
    computing = [op.name for op in graph.op if op.type not in ("Data", "RefData", "Const", "NetOutput")]
    places = {name[: name.index("/") + 1] for name in computing}
    assert places == {phases.place_of(use) for use in graph.uses}


def test_inputs_are_parameters_states_and_what_the_phase_gives(graph):
    inputs = {op.name for op in graph.op if op.type in ("Data", "RefData")}
    known = {f"p.{path}" for path, _ in tree.items(decoder.model_specs(graph.config))}
    states = {f"s.layers.{i}.{layer.kinds[0]}" for i, layer in enumerate(graph.config.layers)}
    given = set(phases.graph_inputs(graph.config, graph.bucket)) | set(GENERATED)
    for name in inputs:
        if name.startswith("p."):
            assert any(name == path or name.startswith(f"{path}.") for path in known), name
        elif name.startswith("s."):
            assert name.rpartition(".")[0] in states, name
        else:
            assert name in given, name
    written = {name for use in graph.uses for name in use.writes}
    assert {name for use in graph.uses for name in use.reads} - written <= inputs


def test_two_places_of_a_part_differ_in_names_alone(graph):
    """The same nodes in the same order; weights and states of one leaf; values from elsewhere in the same ports."""

    def nodes(use):
        place, prefix, elsewhere, found = phases.place_of(use), f"{use.prefix}.", {}, []
        for op in graph.inside(place):
            copy = OpDef.FromString(op.SerializeToString())
            copy.name = op.name.removeprefix(place)
            for i, edge in enumerate(op.input):
                if edge.startswith(place):
                    copy.input[i] = edge.removeprefix(place)
                elif "/" in edge:
                    copy.input[i] = elsewhere.setdefault(edge, f"value {len(elsewhere)}")
                else:
                    copy.input[i] = edge.replace(f".{prefix}", ".", 1)
            found.append(copy)
        return found, len(elsewhere)

    whole: dict[str, tuple[list[OpDef], int]] = {}
    unread = unread_values(graph.uses)
    for number, use in sorted(enumerate(graph.uses), key=lambda x: bool(unread[x[0]])):
        made, entering = nodes(use)
        assert entering <= len(use.reads)
        full = whole.setdefault(use.part, (made, entering))
        if unread[number]:  # what makes that value alone is left out
            assert set(use.writes) - unread[number]
            names = {op.name for op in made}
            gone = {op.name for op in full[0]} - names
            assert not any(split_edge(edge)[0] in gone for op in full[0] if op.name in names for edge in op.input)
            full = [op for op in full[0] if op.name in names], full[1]
        assert full == (made, entering), (use.part, use.prefix)


def unread_values(uses):
    """Of each use, the values it writes that are overwritten before anybody reads them, or never read."""
    wanted, unread = set(uses[-1].writes), []
    for use in reversed(uses):
        unread.append(set(use.writes) - wanted)
        wanted = (wanted - set(use.writes)) | set(use.reads)
    return unread[::-1]


def test_inputs_are_numbered_inputs_then_weights_then_states(graph):
    inputs = [op for op in graph.op if op.type in ("Data", "RefData")]
    assert [get_attr(op, "index") for op in inputs] == list(range(len(inputs)))
    assert list(graph.op[: len(inputs)]) == inputs
    kinds = ["s" if op.type == "RefData" else "p" if op.name.startswith("p.") else "i" for op in inputs]
    assert kinds == sorted(kinds, key="ips".index)


def writers(graph, ops):
    """States by the operators that write them in place: an output of an input's name."""
    found = {}
    for op in graph.op:
        outputs = {d.name for d in op.output_desc}
        for i, d in enumerate(op.input_desc):
            if d.name in outputs and op.input[i]:
                node = split_edge(op.input[i])[0]
                while ops[node].type in ("Reshape", "Identity"):
                    node = split_edge(ops[node].input[0])[0]
                found.setdefault(node, []).append(op.name)
    return found


def test_states_are_written_in_place_and_only_the_result_leaves(graph):
    ops = {op.name: op for op in graph.op}
    states = {op.name for op in graph.op if op.type == "RefData"}
    assert states == {op.name for op in graph.op if op.name.startswith("s.")}
    specs = decoder.state_specs(graph.config, slots=2, pages=2, page=16, dtype=torch.bfloat16)
    leaves = [
        f"s.layers.{i}.{layer.kinds[0]}.{leaf}"
        for i, (layer, spec) in enumerate(zip(graph.config.layers, specs, strict=True))
        for leaf, _ in tree.items(spec)
    ]
    assert states == (set() if graph.bucket.phase == "vision" else set(leaves))
    net, written = graph.op[-1], writers(graph, ops)
    data, control = [e for e in net.input if not e.endswith(":-1")], [e for e in net.input if e.endswith(":-1")]
    assert (net.type, len(data), len(net.input_desc)) == ("NetOutput", 1, 1)
    assert split_edge(data[0])[0].startswith(phases.place_of(graph.uses[-1]))
    assert states <= set(written)
    assert {split_edge(e)[0] for e in control} <= {name for state in states for name in written[state]}


def test_no_view_reads_a_view_and_nothing_is_dead(graph):
    """But for the selection of keys that layers share: it is a value of the schedule, which `bisect` compares."""
    ops = {op.name: op for op in graph.op}
    read = {split_edge(edge)[0] for op in graph.op for edge in op.input if edge}
    for op in graph.op:
        if op.type == "Reshape":
            behind = ops[split_edge(op.input[0])[0]]
            shared = "mla_shared/" in op.name and behind.input[0].rpartition("/")[2] == "LightningIndexer:0"
            assert behind.type != "Reshape" or shared, op.name
        assert op.name in read or op.type == "NetOutput", op.name


def test_nodes_come_after_what_they_read(graph):
    seen = set()
    for op in graph.op:
        assert {split_edge(edge)[0] for edge in op.input if edge} <= seen, op.name
        seen.add(op.name)


@pytest.mark.parametrize("name", FAMILY)
def test_every_parameter_of_the_model_is_read(family_bundle, name):
    """No weight of the checkpoint is forgotten, and no element of one is read twice.

    The first layer of a model with attention residuals mixes one source, which is that source; checkpoints have the
    parameters for it all the same.
    """
    plan, config = open_bundle(family_bundle(name)).weights["weights"], small_model(name)
    specs = dict(tree.items(decoder.model_specs(config)))
    used: dict[str, list[torch.Tensor]] = {}
    for entry in plan.values():
        places = torch.arange(specs[entry["parameter"]].numel).view(specs[entry["parameter"]].shape)
        moves = [s for s in recipe.from_json(entry["steps"]) if s.kind in ("view", "slice", "permute")]
        used.setdefault(entry["parameter"], []).append(recipe.apply(moves, places).flatten())
    spare = {f"layers.0.attn_res.{leaf}" for leaf in ("norm", "query")} if config.residual_block else set()
    assert set(used) == set(specs) - spare
    for path, places in used.items():
        assert torch.equal(torch.cat(places).sort().values, torch.arange(specs[path].numel)), path
    halves = {re.sub(r"\d+", "N", path) for path, places in used.items() if len(places) > 1}
    assert halves <= {"layers.N.mla.up", "vision.blocks.N.qkv.weight", "vision.blocks.N.qkv.bias"}


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
