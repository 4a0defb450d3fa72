"""`inspect --cost`: what nodes read and write, by hand for single nodes and by another reader for whole graphs."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from kimi_graph.compile import air
from kimi_graph.compile.bundle import open_bundle
from kimi_graph.compile.cost import bundle_cost, graph_cost, inspect_cost, node_costs
from kimi_graph.compile.driver import compile_model
from kimi_graph.compile.ge_proto import GraphDef, describe, shape_of
from kimi_graph.compile.targets import target
from kimi_graph.compile.view import view
from kimi_graph.errors import BundleError
from kimi_graph.fixture import small_config
from kimi_graph.models.counts import parameter_counts
from kimi_graph.read_config import load_config, parse_config
from tests.compile.count_bytes import Counted

BF16, F32, I8, I32, I64 = torch.bfloat16, torch.float32, torch.int8, torch.int32, torch.int64
MOST = 1.10  # bytes of all nodes of a decode graph / bytes of weights used and states


# ---- single nodes ----------------------------------------------------------------------------------------------------


class Graph:
    """Built by hand: `add` gives the edge of a node's first result."""

    def __init__(self):
        self.graph = GraphDef(name="g")

    def add(self, kind, name, inputs, outputs):
        """inputs: edge by name. outputs: shape and dtype by name."""
        op = self.graph.op.add(name=name, type=kind, input=list(inputs.values()))
        made = {f"{o.name}:{i}": d for o in self.graph.op for i, d in enumerate(o.output_desc)}
        for port, edge in inputs.items():
            op.input_desc.add().CopyFrom(made[edge])
            op.input_desc[-1].name = port
        for port, (shape, dtype) in outputs.items():
            describe(op.output_desc.add(name=port), shape, dtype)
        return f"{name}:0"

    def data(self, name, shape, dtype=BF16):
        return self.add("RefData" if name.startswith("s.") else "Data", name, {}, {"y": (shape, dtype)})

    def cost(self, name):
        """Bytes read and written by a node, by category."""
        (found,) = [n for n in node_costs(view(self.graph)) if n.name == name]
        return {(t.category, t.read, t.written) for t in found.touches if t.read or t.written}


def test_a_view_costs_nothing_and_what_reads_it_reads_its_operand():
    g = Graph()
    weight = g.data("p.w", (6, 4))
    flat = g.add("Reshape", "view", {"x": weight}, {"y": ((24,), BF16)})
    g.add("Mul", "mul", {"x1": flat, "x2": weight}, {"y": ((24,), BF16)})
    assert g.cost("mul") == {("weights", 48, 0), ("activations", 0, 48)}  # the same weight, once
    assert [n.name for n in node_costs(view(g.graph))] == ["mul"]


def test_an_embedding_reads_the_rows_it_takes():
    g = Graph()
    inputs = {"x": g.data("p.embed", (100, 8)), "indices": g.data("tokens", (1, 3), I64)}
    g.add("GatherV2", "take", inputs, {"y": ((1, 3, 8), BF16)})
    assert g.cost("take") == {("weights", 3 * 8 * 2, 0), ("activations", 3 * 8, 0), ("activations", 0, 48)}


@pytest.mark.parametrize("rows, groups", [(3, 3), (40, 10)])
def test_rows_use_the_weights_of_at_most_as_many_experts(rows, groups):
    g = Graph()
    inputs = {"x0": g.data("x", (rows, 4)), "weight0": g.data("p.w", (10, 5, 4)), "group_list": g.data("n", (10,), I64)}
    g.add("GroupedMatmul", "gmm", inputs, {"y0": ((rows, 5), BF16)})
    reads = {("activations", rows * 8, 0), ("weights", groups * 40, 0), ("activations", 80, 0)}
    assert g.cost("gmm") == reads | {("activations", 0, rows * 10)}


def test_experts_in_tensors_of_their_own_count_as_those_in_one():
    g = Graph()
    weights = {f"weight{i}": g.data(f"p.w{i}", (5, 4)) for i in range(10)}
    g.add("GroupedMatmul", "gmm", {"x0": g.data("x", (3, 4)), **weights}, {"y0": ((3, 5), BF16)})
    (found,) = node_costs(view(g.graph))
    assert sum(t.read for t in found.touches if t.category == "weights") == 3 * 40


def test_a_cache_is_written_where_rows_are_new_and_read_at_capacity_once():
    g = Graph()
    pools = {"key_cache": g.data("s.latent", (9, 16, 1, 8)), "value_cache": g.data("s.rope", (9, 16, 1, 4))}
    news = {"key": g.data("k", (2, 1, 8)), "value": g.data("v", (2, 1, 4))}
    made = {"key_cache": ((9, 16, 1, 8), BF16), "value_cache": ((9, 16, 1, 4), BF16)}
    g.add("ScatterPaKvCache", "write", {**news, **pools, "slot_mapping": g.data("at", (2,), I64)}, made)
    assert g.cost("write") == {
        ("activations", 32, 0), ("activations", 16, 0),  # the new rows, and where they go: 16 bytes each
        ("states", 0, 32), ("states", 0, 16),
    }  # fmt: skip
    inputs = {
        "query": g.data("q", (2, 4, 1, 8)), "key0": "write:0", "value0": "write:0", "key_rope": "write:1",
        "block_table": g.data("table", (2, 4), I32),
    }  # fmt: skip
    g.add("FusedInferAttentionScore", "attend", inputs, {"attention_out": ((2, 4, 1, 8), BF16)})
    pages = 2 * 4 * 16
    assert g.cost("attend") == {
        ("activations", 128, 0), ("activations", 32, 0), ("activations", 0, 128),
        ("states", pages * 16, 0), ("states", pages * 8, 0),
    }  # fmt: skip


def test_sparse_attention_reads_the_selected_rows_and_the_indexer_every_key():
    g = Graph()
    table, selected = g.data("table", (1, 4), I32), g.data("selected", (1, 2, 1, 5), I32)
    index, latent = g.data("s.index", (9, 16, 1, 4)), g.data("s.latent", (9, 16, 1, 8))
    g.add("LightningIndexer", "select", {"key": index, "block_table": table}, {"sparse_indices": ((1, 2, 1, 5), I32)})
    g.add("SparseFlashAttention", "attend", {"key": latent, "value": latent, "sparse_indices": selected}, {})
    assert g.cost("select") == {("states", 4 * 16 * 8, 0), ("activations", 16, 0), ("activations", 0, 40)}
    assert g.cost("attend") == {("states", 2 * 5 * 16, 0), ("activations", 40, 0)}


def test_our_sparse_attention_reads_the_selected_rows():
    g = Graph()
    table, selected = g.data("table", (1, 4), I32), g.data("selected", (1, 2, 5), I32)
    pools = {"latent": g.data("s.latent", (9, 16, 1, 8)), "rope": g.data("s.rope", (9, 16, 1, 4))}
    made = {"o": ((1, 2, 3, 8), BF16), "lse": ((1, 2, 3), F32)}
    g.add("SparseAttend", "attend", {**pools, "selected": selected, "block_table": table}, made)
    assert g.cost("attend") == {
        ("states", 2 * 5 * 16, 0), ("states", 2 * 5 * 8, 0), ("activations", 40, 0), ("activations", 16, 0),
        ("activations", 0, 96), ("activations", 0, 24),
    }  # fmt: skip


def test_sparse_attention_in_8_bits_reads_rows_and_scales_and_bytes_cost_nothing():
    g = Graph()
    table, selected = g.data("table", (1, 4), I32), g.data("selected", (1, 2, 1, 5), I32)
    index, scale = g.data("s.index", (9, 16, 1, 6), I8), g.data("s.index_scale", (9, 16, 1), F32)
    inputs = {"key": index, "key_dequant_scale": scale, "block_table": table}
    g.add("QuantLightningIndexer", "select", inputs, {"sparse_indices": ((1, 2, 1, 5), I32)})
    pages = 4 * 16
    assert g.cost("select") == {
        ("states", pages * 6, 0), ("states", pages * 4, 0), ("activations", 16, 0), ("activations", 0, 40),
    }  # fmt: skip
    rows = g.data("s.latent", (9, 16, 1, 24), I8)
    g.add("KvQuantSparseFlashAttention", "attend", {"key": rows, "value": rows, "sparse_indices": selected}, {})
    assert g.cost("attend") == {("states", 2 * 5 * 24, 0), ("activations", 40, 0)}
    seen = g.add("Bitcast", "bytes", {"x": g.data("x", (6, 4))}, {"y": ((6, 4, 2), I8)})
    g.add("Mul", "mul", {"x1": seen, "x2": seen}, {"y": ((6, 4, 2), I8)})
    assert g.cost("mul") == {("activations", 48, 0), ("activations", 0, 48)}


def test_a_recurrence_reads_and_writes_the_slots_of_its_rows():
    g = Graph()
    state = g.data("s.memory", (7, 2, 4, 4), F32)
    outputs = {"out": ((3, 2, 4), BF16), "state": ((7, 2, 4, 4), F32)}
    g.add("RecurrentGatedDeltaRule", "step", {"state": state, "ssm_state_indices": g.data("slots", (3,), I32)}, outputs)
    assert g.cost("step") == {("states", 3 * 128, 3 * 128), ("activations", 12, 0), ("activations", 0, 48)}


def test_casts_padding_and_layout_changes_are_told_apart():
    g = Graph()
    x = g.data("p.x", (6, 4))
    g.add("Cast", "cast", {"x": x}, {"y": ((6, 4), F32)})
    g.add("PadV3", "pad", {"x": x}, {"y": ((8, 4), BF16)})
    g.add("Transpose", "turn", {"x": x}, {"y": ((4, 6), BF16)})
    assert g.cost("cast") == {("casts", 48, 0), ("casts", 0, 96)}
    assert g.cost("pad") == {("padding", 48, 0), ("padding", 0, 64)}
    assert g.cost("turn") == {("layout changes", 48, 0), ("layout changes", 0, 48)}


# ---- whole graphs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def messages(host):
    with host.shield():
        return importlib.import_module("torchair._ge_concrete_graph.ge_ir_pb2")


def agree(folder: Path, messages) -> dict[str, float]:
    """Compare each graph of a bundle with the other reader: node by node, and the ratio; gives the ratios."""
    found, ratios = open_bundle(folder), {}
    for entry in found.manifest["graphs"]:
        cost = bundle_cost(found, entry)
        counted = Counted((folder / entry["file"]).read_bytes(), messages, found.manifest["state"]["page_tokens"])
        assert {n.name: (n.read, n.written) for n in cost.nodes} == counted.nodes, entry["name"]
        ratios[entry["name"]] = counted.total / (counted.weights + counted.states)
        assert cost.ratio == ratios[entry["name"]]
    return ratios


def test_another_reader_counts_the_same_of_kimi_linear(bundle, messages):
    assert len(agree(bundle, messages)) == 2


SMALL = [
    ("kimi-k3", "a3", "bf16"),
    ("kimi-k3.1-pro", "950dt", "bf16"),
    ("deepseek-v3.2", "a3", "bf16"),
    ("deepseek-v3.2", "a3", "int8"),
    ("glm-5.2", "950dt", "fp8"),
]


@pytest.mark.parametrize("name, chip, kv_dtype", SMALL)
def test_another_reader_counts_the_same_of_a_small_model(host, messages, tmp_path, name, chip, kv_dtype):
    config = parse_config(small_config(load_config(name)), origin=name, name=name)
    sizes = {"batch": 2, "chunk": 16, "max_len": 4096, "patches": 16 if config.vision else None}
    compile_model(config, target=target(chip), out=tmp_path / "b", kv_dtype=kv_dtype, **sizes)
    agree(tmp_path / "b", messages)


@pytest.mark.parametrize(
    "name, chip, form",
    [("kimi-k3", "950dt", "native"), ("kimi-k2.5", "a3", "native"), ("deepseek-v3.2", "950dt", "native")],
)
def test_another_reader_counts_the_same_of_packed_experts(family_bundle, messages, name, chip, form):
    agree(family_bundle(name, chip, weights_format=form), messages)


@pytest.mark.slow
def test_a_decode_step_with_packed_experts_moves_little_more_than_its_weights_and_states(host, messages, tmp_path):
    config = load_config("kimi-k3.1-pro")
    compile_model(config, target=target("950dt"), out=tmp_path / "b", phases=("decode",), weights_format="native")
    (ratio,) = agree(tmp_path / "b", messages).values()
    assert 1 < ratio <= MOST


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, chip, kv_dtype",
    [
        ("kimi-k3", "a3", "bf16"),
        ("kimi-k3.1-pro", "950dt", "bf16"),
        ("kimi-k3.1-pro", "a3", "bf16"),
        ("kimi-k3.1-pro", "a3", "int8"),
    ],
)
def test_a_decode_step_moves_little_more_than_its_weights_and_states(host, messages, tmp_path, name, chip, kv_dtype):
    config = load_config(name)
    compile_model(config, target=target(chip), out=tmp_path / "b", phases=("decode",), kv_dtype=kv_dtype)
    (ratio,) = agree(tmp_path / "b", messages).values()
    assert 1 < ratio <= MOST
    (cost,) = inspect_cost(tmp_path / "b").graphs
    counts = parameter_counts(config)
    # bfloat16, and one row of the token table; routers and short convolutions are float32 in the graph: under 1 %.
    plain = 2 * (counts.active - counts.embedding)
    assert 1 <= cost.needed.weights / plain < 1.01


def test_a_cast_of_a_whole_pool_is_cost_and_no_need(bundle):
    found = open_bundle(bundle)
    entry, state = found.graph("decode"), found.manifest["state"]
    graph = air.from_bytes(found.graph_bytes(entry), entry["file"]).graph[0]
    before = graph_cost(view(graph), entry, state)
    pool = next(op for op in graph.op if op.type == "RefData" and op.name.endswith("latent"))
    size = torch.Size(shape_of(pool.output_desc[0])).numel() * 2
    op = graph.op.add(name="cast", type="Cast", input=[f"{pool.name}:0"])
    op.input_desc.add().CopyFrom(pool.output_desc[0])
    describe(op.output_desc.add(name="y"), shape_of(pool.output_desc[0]), F32)
    after = graph_cost(view(graph), entry, state)
    assert after.needed == before.needed
    casts = [sum(cost.by_category()["casts"]) for cost in (before, after)]
    assert after.total - before.total == casts[1] - casts[0] == size + 2 * size  # read, and written twice as wide


# ---- the command -----------------------------------------------------------------------------------------------------


def test_categories_operators_and_nodes_sum_to_the_same(bundle):
    (graph,) = json.loads(json.dumps(inspect_cost(bundle, "decode").to_json()))["graphs"]
    sums = [sum(row["read"] + row["written"] for row in graph[part].values()) for part in ("categories", "operators")]
    assert sums == [graph["bytes"]] * 2
    assert sum(n["read"] + n["written"] for n in graph["nodes"]) == graph["bytes"]
    assert graph["ratio"] == graph["bytes"] / sum(graph["needed"].values())
    assert sum(row["nodes"] for row in graph["operators"].values()) == len(graph["nodes"])


def test_without_a_phase_there_is_every_graph_and_no_list_of_nodes(bundle):
    graphs = inspect_cost(bundle).to_json()["graphs"]
    assert [g["name"] for g in graphs] == [g["name"] for g in open_bundle(bundle).manifest["graphs"]]
    assert not any("nodes" in g for g in graphs)


def test_the_text_shows_the_ratio_and_tables_whose_lines_end_together(bundle):
    cost = inspect_cost(bundle, "decode")
    assert f"{cost.graphs[0].ratio:.3f} x the weights used and the states" in cost.text()
    tables = [block.splitlines() for block in cost.text().split("\n\n")[2:]]
    assert [lines[0].split()[0] for lines in tables] == ["category", "operator", "node"]
    for lines in tables:
        assert len({len(line) for line in lines}) == 1
        assert all(line.endswith("%") for line in lines[1:])


def test_a_phase_that_a_bundle_does_not_have_is_an_error(bundle):
    with pytest.raises(BundleError, match="no graph of phase 'vision'"):
        inspect_cost(bundle, "vision")
