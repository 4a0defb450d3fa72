"""Chains over parts are one node each: which, where, whose; what they leave, and that the graph is the model still."""

import functools
from collections import Counter
from pathlib import Path

import pytest
import torch

from kimi_graph.compile import air
from kimi_graph.compile.bundle import open_bundle
from kimi_graph.compile.driver import compile_model
from kimi_graph.compile.fuse import CHAINS, fuse_chains
from kimi_graph.compile.ge_proto import GraphDef, ModelDef, describe, get_attr, set_attr, shape_of
from kimi_graph.compile.prototypes import Prototypes
from kimi_graph.compile.targets import PROVIDERS_DEFAULT, target
from kimi_graph.compile.verify import verify_bundle
from kimi_graph.compile.view import Edge, view
from kimi_graph.fixture import make_fixture
from kimi_graph.read_config import load_config

from .family import small_model

OWN_FIRST = ("own", "builtin", "composed")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """`compiled(name, providers)`: the bundle of a decode step of a small model for A3."""

    @functools.cache
    def made(name: str, providers=OWN_FIRST) -> Path:
        folder = tmp_path_factory.mktemp("fused") / "b"
        sizes = {"batch": 2, "max_len": 96, "page": 16}
        profile = target("a3", providers=providers)
        compile_model(small_model(name), target=profile, out=folder, phases=("decode",), **sizes)
        return folder

    return made


def graph_of(folder: Path) -> GraphDef:
    opened = open_bundle(folder)
    entry = opened.graph("decode")
    return air.from_bytes(opened.graph_bytes(entry), entry["file"]).graph[0]


# ---- which -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "providers, type_",
    [(OWN_FIRST, "ResidualNormGate"), (PROVIDERS_DEFAULT, "AddRmsNorm"), (("builtin", "composed"), "AddRmsNorm")],
    ids=str,
)
def test_every_residual_of_sparse_attention_and_its_norm_are_one_node(providers, type_, compiled):
    """In a model without attention residuals, such as DeepSeek-V3.2: from the first attention to the head."""
    folder = compiled("deepseek-v3.2", providers)
    graph, layers = view(graph_of(folder)), len(small_model("deepseek-v3.2").layers)
    fused = [node for node in graph.nodes if node.type == type_ and len([e for e in node.inputs if e]) == 3]
    assert len(fused) == 2 * layers  # each layer's two halves
    sums = {"AddRmsNorm": 2, "ResidualNormGate": 1}[type_]
    for node in fused[:-1]:  # the running sum goes on; the head's is not read again
        assert graph.readers[Edge(node.name, sums)]
    assert not [n for n in graph.nodes if n.name.endswith(("attn_add/Add", "ffn_add/Add"))]
    (choice,) = [c for c in open_bundle(folder).manifest["choices"] if c["part"] == CHAINS]
    assert (choice["kind"], choice["operator"]) == ("residual and norm", type_)


@pytest.mark.parametrize("providers", [OWN_FIRST, PROVIDERS_DEFAULT], ids=str)
def test_with_attention_residuals_sum_mix_and_norm_are_one_node(providers, compiled):
    graph = view(graph_of(compiled("kimi-k3.1-pro", providers)))
    mixes = [n for n in graph.nodes if n.type == "AttnResMix"]
    assert all(n.input("gain") is not None and get_attr(n.op, "norm_eps") == pytest.approx(1e-5) for n in mixes)
    with_sum = [n for n in mixes if n.input("addend") is not None]
    assert mixes and with_sum
    for node in mixes:
        assert shape_of(node.op.output_desc[1]) == ((2, 1, 256) if node in with_sum else (0,))
    norms = Counter(n.name.rpartition("/")[2] for n in graph.nodes if n.type == "RmsNorm")
    assert norms["RmsNorm"] == 1  # of the first layer, which reads the embedding


def test_the_gate_of_attention_stands_between_two_products_and_is_one_node(compiled):
    graph = view(graph_of(compiled("kimi-k3.1-pro")))
    gates = [n for n in graph.nodes if n.type == "ResidualNormGate"]
    assert {n.name.partition("/")[0].rpartition(".")[2] for n in gates} == {"mla"}
    assert all(n.input("gate") and not n.input("weight") and not n.input("residual") for n in gates)
    products = {"MatMul", "BatchMatMul"}

    def behind(edge):
        node = graph.by_name[edge.node]
        return node if node.type not in ("Reshape", "Transpose") else behind(node.inputs[0])

    for gate in gates:
        assert {behind(e).type for e in gate.inputs if e is not None} <= products


@pytest.fixture(scope="module")
def small_bundle(tmp_path_factory):
    """`small_bundle(name)`: all phases but vision, with a checkpoint to verify it by."""

    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        checkpoint = make_fixture(load_config(name), folder / "checkpoint").folder
        sizes = {"batch": 2, "chunk": 16, "max_len": 96, "page": 16, "phases": ("prefill", "decode")}
        profile = target("a3", providers=OWN_FIRST)
        compile_model(load_config(checkpoint), target=profile, out=folder / "bundle", checkpoint=checkpoint, **sizes)
        return folder / "bundle"

    return made


@pytest.mark.slow
def test_a_graph_with_our_chains_is_the_model(small_bundle):
    """Default providers: `test_verify`, for every model."""
    report = verify_bundle(small_bundle("deepseek-v3.2"), steps=1, modes=("exact",))
    assert report.passed, report.text()


# ---- what is left alone ----------------------------------------------------------------------------------------------


def fused(change=lambda ops: None, providers=PROVIDERS_DEFAULT) -> dict[str, str]:
    """Types by name of a sum `add`, its norm and a later reader, after fusing; `change` the graph before."""
    model = ModelDef()
    graph = model.graph.add(name="g")

    def op(name, type_, edges, outputs=1, shape=(2, 16)):
        made = graph.op.add(name=name, type=type_)
        made.input.extend(edges)
        for side, count in ((made.input_desc, len(edges)), (made.output_desc, outputs)):
            for i in range(count):
                describe(side.add(name=f"x{i}"), shape, torch.bfloat16)

    for name in ("a", "b", "gamma"):
        op(name, "Data", [], shape=(16,) if name == "gamma" else (2, 16))
    op("add", "Add", ["a:0", "b:0"])
    op("early", "Neg", ["a:0"])
    op("norm", "RmsNorm", ["add:0", "gamma:0"], 2)
    op("later", "Neg", ["add:0"])
    set_attr(graph.op[5], "epsilon", 1e-6)
    change({o.name: o for o in graph.op})
    fuse_chains(model, target("a3", providers=providers), Prototypes("a3"))
    return {o.name: o.type + ("" if o.name != "later" else f" of {o.input[0]}") for o in graph.op[3:]}


def test_a_sum_that_only_its_norm_and_later_nodes_read_is_fused_and_they_read_it_there():
    assert fused() == {"early": "Neg", "norm": "AddRmsNorm", "later": "Neg of norm:2"}
    own = fused(providers=OWN_FIRST)
    assert own == {"early": "Neg", "norm": "ResidualNormGate", "later": "Neg of norm:1"}


@pytest.mark.parametrize("what", ["read before", "statistics", "broadcast", "dtype", "composed"])
def test_other_sums_are_left_alone(what):
    def change(ops):
        if what == "read before":
            ops["early"].input[0] = "add:0"
        if what == "statistics":
            ops["later"].input[0] = "norm:1"
        if what == "broadcast":
            describe(ops["add"].input_desc[1], (1, 16), torch.bfloat16)
        if what == "dtype":
            describe(ops["norm"].input_desc[1], (16,), torch.float32)

    found = fused(change, ("builtin", "composed") if what != "composed" else ("composed", "builtin"))
    assert found["norm"] == "RmsNorm" and found["add"] == "Add"


# ---- KDA's step ------------------------------------------------------------------------------------------------------


def test_a_step_of_kda_takes_queries_keys_gate_and_beta_as_projections_give_them(compiled):
    """Unit lengths, the decay's gate and beta's sigmoid are in the kernel: no node makes them."""
    graph = view(graph_of(compiled("kimi-k3.1-pro")))
    steps = [n for n in graph.nodes if n.type == "KdaStep"]
    config = small_model("kimi-k3.1-pro")
    assert len(steps) == sum(layer.kinds[0] == "kda" for layer in config.layers)
    for step in steps:
        attrs = {name: get_attr(step.op, name) for name in step.op.attr}
        assert attrs["norm_eps"] == pytest.approx(1e-6) and attrs["beta_logits"] is True and attrs["lower_bound"] == -5
        edges = dict(zip([d.name for d in step.ins], step.inputs, strict=True))
        assert all(graph.by_name[edges[name].node].type == "ShortConv" for name in "qkv")
        for name in ("decay", "beta"):
            assert graph.by_name[edges[name].node].type == "Reshape"
            assert graph.by_name[graph.by_name[edges[name].node].inputs[0].node].type == "MatMul"
        assert edges["bias"].node.endswith(".decay_bias") and edges["log_rate"].node.endswith(".log_rate")
    kda = {n.type for n in graph.nodes if ".kda/" in n.name}
    assert kda == {"AttnResMix", "RmsNorm", "MatMul", "Reshape", "ShortConv", "KdaStep", "GatedRmsNorm"}
