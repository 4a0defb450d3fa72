"""Public cases: what happened to others, and the right outcome in a compiled bundle.

They are held first where they belong: config parsing (C5, C8, K11, R1, R7), checkpoints (W10, W11, A4), KDA (K1, K4),
SiTU (K10), sums over ranks (K8: `test_sums`), plans (M7) and the router (K11). Here each meets graphs and bundles.
"""

import dataclasses
import functools
import json
import re
import shutil
import time

import pytest
import torch

from kimi_graph import ops
from kimi_graph.checkpoint import Checkpoint, load_params, save_checkpoint
from kimi_graph.compile import air, driver
from kimi_graph.compile.bundle import CONSTANTS, LOCAL, open_bundle
from kimi_graph.compile.driver import compile_model
from kimi_graph.compile.executor import Executor
from kimi_graph.compile.fit import held_by_stage
from kimi_graph.compile.ge_proto import ModelDef, describe, get_attr, set_attr, shape_of, split_edge
from kimi_graph.compile.targets import target
from kimi_graph.compile.verify import verify_bundle
from kimi_graph.errors import CheckpointError, CompileError, ConfigError
from kimi_graph.fixture import make_fixture, small_config
from kimi_graph.models import init_params, model_specs
from kimi_graph.models.decoder import state_specs
from kimi_graph.parallel import Mesh, place, preset
from kimi_graph.read_config import load_config, parse_config

PRESET = load_config("kimi-linear-48b")


def model(name, layers=None, **changes):
    """A small model of the preset with other numbers."""
    source = json.loads(json.dumps(small_config(PRESET, layers)))
    attention = {k.removeprefix("attention__"): v for k, v in changes.items() if k.startswith("attention__")}
    source["linear_attn_config"].update(attention)
    source.update({k: v for k, v in changes.items() if not k.startswith("attention__")})
    return parse_config(source, origin=name, name=name)


def checked(config, folder, **options):
    """Compile a model with random weights and verify the bundle."""
    checkpoint = make_fixture(config, folder / "checkpoint", layers=len(config.layers)).folder
    assert load_config(checkpoint) == config
    sizes = {"batch": 2, "chunk": 16, "max_len": 64, "page": 16, **options}
    compile_model(config, target=target("a3"), out=folder / "bundle", checkpoint=checkpoint, **sizes)
    report = verify_bundle(folder / "bundle", steps=2)
    assert report.passed, report.text()
    return open_bundle(folder / "bundle")


# ---- C: config parsing -----------------------------------------------------------------------------------------------


def test_layers_listed_from_one_and_two_adjacent_full_ones_are_compiled_as_listed(host, tmp_path):  # case C5
    lists = {"attention__full_attn_layers": [2, 4, 5], "attention__kda_layers": [1, 3]}
    found = checked(model("irregular", 5, **lists), tmp_path)
    states = {name["name"].rsplit(".", 1)[0] for name in found.manifest["state"]["states"]}
    assert states == {f"s.layers.{i}.{kind}" for i, kind in enumerate(("kda", "mla", "kda", "mla", "mla"))}


def test_the_preset_has_attention_in_layers_3_7_and_so_on_and_26(host):  # case C5
    made = compile_model(PRESET, target=target("a3"), out=None, phases=("decode",))
    names = {s["name"] for s in made.manifest["state"]["states"]}
    assert {int(n.split(".")[2]) for n in names if ".mla." in n} == {3, 7, 11, 15, 19, 23, 26}


def test_head_sizes_are_those_of_their_sections_whatever_hidden_size_says(bundle):  # case C8
    """hidden_size / heads is 64 here; KDA heads have 128 channels, MLA's 128 + 64 and 128."""
    states = {s["name"]: s["shape"] for s in open_bundle(bundle).manifest["state"]["states"]}
    assert states["s.layers.0.kda.memory"] == [3, 4, 128, 128]
    weights = open_bundle(bundle).weights["weights"]
    assert weights["p.layers.2.mla.query"]["shape"] == [4, 192, 256]
    assert weights["p.layers.0.kda.query"]["shape"] == [4, 128, 256]


# ---- K: state, attention, kernels ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[1, 3], [63, 64], [65, 127], [200, 1]], ids=str)
def test_the_chunk_operator_of_a_graph_is_the_token_by_token_recurrence(lengths):  # case K1
    """As the executor reads KdaChunk, against the one-step operator; padding leaves the memory as it was."""
    rows, heads, width = len(lengths), 2, 8
    counts, tokens = torch.tensor(lengths), max(lengths) + 2
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, tokens, heads, width, generator=generator, dtype=torch.float64) for _ in range(3))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    decay = -torch.rand(rows, tokens, heads, width, generator=generator, dtype=torch.float64) * 5
    beta = torch.rand(rows, tokens, heads, generator=generator, dtype=torch.float64)
    start = torch.randn(rows + 1, heads, width, width, generator=generator, dtype=torch.float64)
    slots = torch.arange(rows, 0, -1, dtype=torch.int32)
    given = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta}
    batch = {"slots": slots, "lengths": counts + 5, "counts": counts}
    ran = kda_chunk(given, start, batch)

    memory = start.clone()
    for t in range(max(lengths)):
        live = torch.tensor([r for r in range(rows) if t < lengths[r]])
        at = slots[live]
        step = [x[live, t : t + 1] for x in (q, k, v, decay, beta)]
        out, memory = ops.kda_step(*step, memory, at, 0.5)
        torch.testing.assert_close(ran.outputs[0][live, t], out[:, 0], rtol=0, atol=1e-12)
    torch.testing.assert_close(ran.states["memory"], memory, rtol=0, atol=1e-12)


def kda_chunk(given, memory, batch):
    """One KdaChunk node in the executor, exactly."""
    graph = ModelDef()
    ops_ = graph.graph.add(name="g").op
    names = [*given, "memory", *batch]
    for index, name in enumerate(names):
        value = {**given, "memory": memory, **batch}[name]
        op = ops_.add(name=name, type="RefData" if name == "memory" else "Data")
        describe(op.output_desc.add(name="y"), value.shape, _described(name, value))
        set_attr(op, "index", index)
    node = ops_.add(name="node", type="KdaChunk", input=[f"{n}:0" for n in names])
    for name in names:
        value = {**given, "memory": memory, **batch}[name]
        describe(node.input_desc.add(name=name), value.shape, _described(name, value))
    describe(node.output_desc.add(name="o"), given["v"].shape, torch.bfloat16)
    describe(node.output_desc.add(name="memory"), memory.shape, torch.float32)
    set_attr(node, "scale", 0.5)
    net = ops_.add(name="out", type="NetOutput", input=["node:0"])
    describe(net.input_desc.add(name="input0"), given["v"].shape, torch.bfloat16)
    return Executor(graph).run({**given, **batch}, {"memory": memory}, "exact")


def _described(name, value):
    if not value.is_floating_point():
        return value.dtype
    return torch.bfloat16 if name in ("q", "k", "v") else torch.float32


@pytest.mark.parametrize("width", [60, 100])
def test_head_sizes_that_are_no_power_of_two_are_compiled_right(host, tmp_path, width):  # case K4
    checked(model("odd", 2, attention__head_dim=width), tmp_path)


@pytest.mark.parametrize("cann, used", [("9.1", 16), ("9.2", 12)])
def test_heads_that_attention_over_the_latent_cache_does_not_take_are_padded_and_said_to_be(host, tmp_path, cann, used):
    """Case K4: 12 heads. Before CANN 9.2 the operator takes powers of two; what it is given more is stripped again."""
    config = model("twelve", 2, num_attention_heads=12, num_key_value_heads=12)
    save_checkpoint(tmp_path / "twelve", model_specs(config), init_params(config, 0, config.dtype), config)
    sizes = {"batch": 2, "chunk": 16, "max_len": 64, "page": 16}
    chip = target("a3", cann=cann)
    compile_model(config, target=chip, out=tmp_path / "b", checkpoint=tmp_path / "twelve", **sizes)
    report = verify_bundle(tmp_path / "b", steps=2)
    assert report.passed, report.text()
    opened = open_bundle(tmp_path / "b")
    graph = air.from_bytes(opened.graph_bytes(opened.graph("decode")), "decode").graph[0]
    (node,) = [op for op in graph.op if op.type == "FusedInferAttentionScore"]
    assert get_attr(node, "num_heads") == used
    (reason,) = {c["reason"] for c in opened.manifest["choices"] if c["kind"] == "attention to latents"}
    assert ("12 heads padded to 16, a power of two" in reason) == (used == 16)


def test_more_heads_than_the_latent_cache_serves_are_refused_with_the_line(host):
    config = model("wide", 2, num_attention_heads=256, num_key_value_heads=256)
    with pytest.raises(CompileError, match=r"layers/mla\.py:\d+: .*256 heads, at most 128"):
        compile_model(config, target=target("a3"), out=None, phases=("decode",))


def test_the_bias_takes_part_in_the_selection_alone(bundle, small):  # case K11
    """Two experts equal but for a bias 1e-4 apart, in the graph's own router."""
    opened = open_bundle(bundle)
    entry = opened.graph("decode")
    graph = air.from_bytes(opened.graph_bytes(entry), "decode").graph[0]
    router = next(op for op in graph.op if op.type == "MoeGatingTopK")
    assert router.input_desc[0].dtype == 1  # float32
    assert (get_attr(router, "norm_type"), get_attr(router, "k")) == (1, 4)

    alone = ModelDef()
    made = alone.graph.add(name="router").op
    for index, (name, desc) in enumerate(zip(("x", "bias"), router.input_desc, strict=True)):
        op = made.add(name=name, type="Data")
        op.output_desc.add().CopyFrom(desc)
        set_attr(op, "index", index)
    node = made.add()
    node.CopyFrom(router)
    node.input[:] = ["x:0", "bias:0"]
    net = made.add(name="out", type="NetOutput", input=[f"{node.name}:0", f"{node.name}:1"])
    for i in range(2):
        net.input_desc.add().CopyFrom(node.output_desc[i])

    scores = torch.full((2, 16), -3.0)
    scores[:, [2, 5, 7]], scores[:, [9, 11]] = 2.0, 0.5  # three are clear, two equal ones compete for the fourth place
    bias = torch.zeros(16)
    bias[11] = 1e-4
    ran = Executor(alone).run({"x": scores, "bias": bias}, {}, "native")
    weights, chosen = ran.outputs
    assert chosen.tolist() == [[2, 5, 7, 11]] * 2
    expected = torch.sigmoid(torch.tensor([2.0, 2.0, 2.0, 0.5]))
    torch.testing.assert_close(weights[0], expected / expected.sum() * 2.446, rtol=1e-6, atol=0)


def test_more_experts_than_the_routing_operator_takes_are_refused(host):  # case K11
    with pytest.raises((ConfigError, CompileError), match=r"2,?048"):
        compile_model(model("many", 2, num_experts=2049), target=target("a3"), out=None)


# ---- M: meshes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chip, used", [("a3", 16), ("950dt", 12)])
def test_heads_that_attention_to_selected_keys_does_not_take_are_padded_and_stripped(family_bundle, chip, used):
    """Case M7: 12 heads. SparseFlashAttention takes powers of two on A3, any number on 950."""
    folder = family_bundle("kimi-k3.1-pro", chip)
    opened = open_bundle(folder)
    graph = air.from_bytes(opened.graph_bytes(opened.graph("decode")), "decode").graph[0]
    (heads,) = {shape_of(op.input_desc[0])[2] for op in graph.op if op.type == "SparseFlashAttention"}
    assert heads == used
    (reason,) = {c["reason"] for c in opened.manifest["choices"] if c["operator"] == "SparseFlashAttention"}
    assert ("12 heads padded to 16, a power of two, and stripped: 33% more queries" in reason) == (used == 16)
    report = verify_bundle(folder, steps=1, modes=("exact",))
    assert report.passed, report.text()


def test_a_page_of_120_tokens_is_refused_and_one_of_128_is_not():  # case M10
    ask = functools.partial(driver.Request, config=PRESET, target=target("a3"), mesh=Mesh.parse("tp=32"))
    with pytest.raises(CompileError, match=r"--page 120: .*multiples of 16 up to 1,024; the nearest is 128"):
        ask(page=120).check()
    ask(page=128).check()


def test_a_page_of_16_tokens_is_taken_at_32_ways():
    """Case M10, which is refused elsewhere: there a page is cut over tp. Here pages stay whole, on each rank."""
    request = driver.Request(config=PRESET, target=target("a3"), mesh=Mesh.parse("tp=32"), page=16, max_len=4096)
    request.check()
    for split in (False, True):
        rules = preset(PRESET, Mesh.parse("tp=32"), "decode", split_cache=split)
        specs = state_specs(PRESET, slots=64, pages=64, page=16, dtype=PRESET.dtype)
        placed = place("s.layers.3.mla.latent", specs[3].latent, rules, PRESET.dtype)
        assert placed.local == (2 if split else 64, 16, 512)


# ---- W: weights ------------------------------------------------------------------------------------------------------


def test_verifying_twice_is_verifying_once(bundle):  # case W10
    """Nothing that was loaded is changed by running."""
    first, second = (verify_bundle(bundle, steps=1).to_json() for _ in range(2))
    assert first == second


def test_a_checkpoint_without_one_parameter_verifies_nothing(bundle, small, tmp_path):  # case W11
    shutil.copytree(small, tmp_path / "ck")
    index = tmp_path / "ck" / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    name = "model.layers.1.block_sparse_moe.experts.7.w2.weight"
    file = tmp_path / "ck" / listed["weight_map"].pop(name)
    index.write_text(json.dumps(listed))
    data = file.read_bytes()
    file.write_bytes(data.replace(name.encode(), name.replace("w2", "w9").encode()))  # the header names another
    listed["weight_map"][name.replace("w2", "w9")] = file.name
    index.write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match=re.escape(name)):
        verify_bundle(bundle, checkpoint=tmp_path / "ck")


# ---- R: no rotation, long context ------------------------------------------------------------------------------------

ROTATIONS = re.compile("rotary|rope|sin$|cos$|interleave", re.IGNORECASE)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_nothing_is_rotated_and_the_64_channels_go_raw_into_the_cache(bundle, phase):  # case R1
    opened = open_bundle(bundle)
    graph = air.from_bytes(opened.graph_bytes(opened.graph(phase)), phase).graph[0]
    assert not [op.type for op in graph.op if ROTATIONS.search(op.type)]
    by_name = {op.name: op for op in graph.op}
    write = next(op for op in graph.op if op.type == "ScatterPaKvCache")
    value = [d.name for d in write.input_desc].index("value")
    node = by_name[split_edge(write.input[value])[0]]
    passed = [node]
    while node.type != "MatMul":
        node = by_name[split_edge(node.input[0])[0]]
        passed.append(node)
    assert [n.type for n in passed if n.type != "Reshape"] == ["StridedSliceV2", "MatMul"]
    assert passed[-1].input[1] == "p.layers.2.mla.latent:0"  # the last 64 channels of this projection
    assert list(write.input_desc[value].shape.dim)[1:] == [1, 64]


def test_cached_channels_are_the_projections(bundle, small):  # case R1
    """Not a number of the 64 channels is touched: what decode caches is the product of weight and normed input."""
    params = load_params(small, load_config(small), dtype=torch.float64)
    assert params.layers[2].mla is not None
    assert params.layers[2].mla.latent.shape[0] == 512 + 64
    report = verify_bundle(bundle, steps=1, modes=("exact",))
    assert next(r for r in report.rows if r.what == "mla.rope").error < 1e-13


@pytest.mark.parametrize("page, tokens", [(128, 1_000_064), (384, 1_000_320)])
def test_a_length_between_pages_is_rounded_up_and_reported(host, page, tokens):  # case R7
    made = compile_model(PRESET, target=target("a3"), out=None, phases=("decode",), max_len=1_000_000, page=page)
    state = made.manifest["state"]
    assert (state["tokens_per_sequence"], state["page_tokens"]) == (tokens, page)
    assert state["pages"] == tokens // page + 1  # and the page that is nobody's
    assert f"{tokens:,} tokens a sequence" in made.text()
    latent = next(s for s in state["states"] if s["name"] == "s.layers.3.mla.latent")
    assert latent["shape"] == [tokens // page + 1, page, 512]


def test_a_length_over_the_limit_is_refused_before_anything_expensive(tmp_path, monkeypatch):  # case R7
    monkeypatch.setattr(driver, "Late", None)  # calling it would be an error
    start = time.perf_counter()
    with pytest.raises(ConfigError, match="found 1,048,577, expected 1 to 1,048,576"):
        compile_model(PRESET, target=target("a3"), out=tmp_path / "b", max_len=1_048_577)
    assert time.perf_counter() - start < 1
    assert not (tmp_path / "b").exists()


# ---- A: artifacts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["input", "constant"])
def test_a_bundle_that_moved_is_verified_where_it_is(compile_small, tmp_path, weights):  # case A1
    (tmp_path / "a").mkdir()
    compile_small(tmp_path / "a" / "bundle", weights=weights, phases=("prefill",))
    (tmp_path / "b").mkdir()
    shutil.move(tmp_path / "a" / "bundle", tmp_path / "b" / "moved")
    shutil.rmtree(tmp_path / "a")
    assert (tmp_path / "b" / "moved" / CONSTANTS).exists() == (weights == "constant")
    report = verify_bundle(tmp_path / "b" / "moved", steps=0)
    assert report.passed, report.text()


def test_a_bundle_is_whole_without_what_only_this_machine_knows(compile_small, small, tmp_path):  # case A1
    compile_small(tmp_path / "bundle", phases=("decode",))
    (tmp_path / "bundle" / LOCAL).unlink()
    assert verify_bundle(tmp_path / "bundle", checkpoint=small, steps=1, modes=("exact",)).passed


def test_a_checkpoint_that_is_not_contiguous_in_memory_is_contiguous_in_the_bundle(
    compile_small, small, tmp_path
):  # A4
    """Stacked experts come from many tensors, kv_b is cut in two: in the file of constants each is one run of bytes."""
    compile_small(tmp_path / "b", weights="constant", phases=("decode",))
    plan = open_bundle(tmp_path / "b").weights["weights"]
    up = load_params(Checkpoint.open(small), load_config(small)).layers[2].mla.up
    part = up[:, 128:]
    assert not part.is_contiguous()
    entry = plan["p.layers.2.mla.up.slice1_128_256"]
    data = (tmp_path / "b" / CONSTANTS).read_bytes()[entry["offset"] : entry["offset"] + entry["bytes"]]
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.bfloat16), part.reshape(-1))


def test_a_rank_that_its_die_has_no_room_for_is_refused_and_scratch_is_named(host, tmp_path):  # case A10
    """Weights, states and what is reserved fit; the work memory of the largest graph does not. Nothing is written."""
    config, mesh, out = model("small", 4), Mesh.parse("pp=2,tp=2"), tmp_path / "b"
    sizes = {"batch": 2, "chunk": 64, "max_len": 64, "page": 16, "out": out, "mesh": mesh}
    compile_model(config, target=target("a3"), **sizes)
    bundle = open_bundle(out)
    models = {g["name"]: air.from_bytes(bundle.graph_bytes(g), g["file"]) for g in bundle.manifest["graphs"]}
    held = held_by_stage(bundle.manifest, models)
    fullest = max(held, key=lambda h: sum(h.bytes.values()))
    need, scratch = sum(fullest.bytes.values()), fullest.bytes["scratch"]
    assert scratch > 0 and fullest.largest.startswith("prefill")
    shutil.rmtree(out)

    just, less = (dataclasses.replace(target("a3"), memory_bytes=need - n) for n in (0, 1))
    said = (
        rf"^small on pp=2,tp=2: a rank of stage {fullest.stage} needs .*scratch is that of {fullest.largest}\), a die"
    )
    with pytest.raises(CompileError, match=said):
        compile_model(config, target=less, **sizes)
    with pytest.raises(CompileError, match=said):  # what is not written either
        compile_model(config, target=less, **sizes | {"out": None})
    assert not out.exists()
    compile_model(config, target=just, **sizes)
    compile_model(config, target=less, **sizes, must_fit=False)
    one = compile_model(config, target=less, **sizes | {"mesh": None})  # a model whole, to look at: it is said
    tiny = dataclasses.replace(less, memory_bytes=1 << 20)
    assert "NOT ENOUGH" not in one.text()
    assert "NOT ENOUGH for one rank" in compile_model(config, target=tiny, **sizes | {"mesh": None}).text()


def test_what_a_compile_refused_is_refused_again_from_the_cache(host, tmp_path):  # case A10
    less = dataclasses.replace(target("a3"), memory_bytes=(2 << 30) + (50 << 20))  # enough for weights of layers alone
    given = {"target": less, "mesh": Mesh.parse("tp=2"), "max_len": 64, "page": 16, "chunk": 16, "out": None}
    given |= {"phases": ("decode",), "cache_dir": host.root.parents[1]}
    compile_model(model("small", 4), **given, must_fit=False, keep=True)
    for _ in range(2):
        with pytest.raises(CompileError, match="a rank of stage 0 needs"):
            compile_model(model("small", 4), **given, keep=True)
