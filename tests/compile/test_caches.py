"""`--kv-dtype`: caches of sparse attention in 8 bits: what is refused, made, held, and found by verify."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from kimi_graph import ops, tree
from kimi_graph.checkpoint import load_params
from kimi_graph.compile import air, verify
from kimi_graph.compile.bisect import first_difference
from kimi_graph.compile.bundle import MANIFEST, dump, file_hash, open_bundle, read_json
from kimi_graph.compile.caches import kept_states, model_states, quantise_caches, state_specs
from kimi_graph.compile.capture import capture
from kimi_graph.compile.checks import check_graph
from kimi_graph.compile.driver import Request, compile_model, convert_piece
from kimi_graph.compile.executor import Executor, Selections
from kimi_graph.compile.ge_proto import ModelDef, dtype_of, get_attr, set_attr, shape_of
from kimi_graph.compile.inspect import inspect_bundle, sizes
from kimi_graph.compile.phases import capture_pieces
from kimi_graph.compile.prototypes import Prototypes
from kimi_graph.compile.stamp import Assembly, Piece
from kimi_graph.compile.targets import CANN_VERSIONS, target
from kimi_graph.compile.torchair_host import Host
from kimi_graph.compile.verify import Overlaps, cache_tolerance, native_tolerance, verify_bundle
from kimi_graph.errors import BundleError, CompileError
from kimi_graph.layers import step_batch
from kimi_graph.models import decoder
from kimi_graph.ops.quantised_cache import pack_rows, quantise
from kimi_graph.parallel import Mesh
from kimi_graph.read_config import load_config
from tests.compile.family import SPARSE, small_model
from tests.compile.test_lowerings_family import COUNTS, LENGTHS, PAGE, TABLE, Case, attended, compare, rand

I8, I32, E4M3, F16, F32 = torch.int8, torch.int32, torch.float8_e4m3fn, torch.float16, torch.float32
DTYPES = {"int8": (I8, F16), "fp8": (E4M3, F32)}
PLACES = [("a3", "int8"), ("950dt", "fp8")]


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, chip, kv_dtype, max_len, message",
    [
        ("kimi-k3.1-pro", "a3", "int4", 4096, "--kv-dtype 'int4': unknown; one of bf16, int8, fp8."),
        ("kimi-k3.1-pro", "a3", "fp8", 4096, "--kv-dtype fp8: a3 has no 8-bit floats; it takes bf16, int8."),
        ("glm-5.2", "a2", "fp8", 4096, "--kv-dtype fp8: a2 has no 8-bit floats; it takes bf16, int8."),
        ("kimi-linear-48b", "a3", "int8", 4096, "and kimi-linear-48b has no indexer; take bf16."),
        ("kimi-k2.5", "950dt", "fp8", 4096, "and kimi-k2.5 has no indexer; take bf16."),
        (
            *("kimi-k3.1-pro", "a3", "int8", 2048),
            "sequences of 2,048 tokens are attended to whole, as the indexer keeps 2,048; take bf16, or --max-len 2049",
        ),
    ],
)
def test_a_cache_that_no_operator_reads_is_refused_with_what_is_legal(name, chip, kv_dtype, max_len, message):
    request = Request(config=load_config(name), target=target(chip), kv_dtype=kv_dtype, max_len=max_len)
    with pytest.raises(CompileError, match=re.escape(message)):
        request.buckets()


@pytest.mark.parametrize("chip, kv_dtype", [("a2", "int8"), ("a3", "int8"), ("950pr", "int8"), ("950dt", "fp8")])
def test_what_a_chip_takes_is_not_refused(chip, kv_dtype):
    config = load_config("kimi-k3.1-pro")
    assert Request(config=config, target=target(chip), kv_dtype=kv_dtype, max_len=2049).buckets()


# ---- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype, dtype, scale", [("int8", I8, F16), ("fp8", E4M3, F32)])
def test_layers_keep_rows_and_those_with_an_indexer_keys_and_their_scales(kv_dtype, dtype, scale):
    config = small_model("glm-5.2")  # some of its layers share a selection
    made = state_specs(config, kv_dtype, slots=3, pages=7, page=16)
    for layer, state in zip(config.layers, made, strict=True):
        shared = layer.mixer.indexer.shared
        kept = {name: (s.shape, s.dtype) for name, s in tree.items(state)}
        index = {} if shared else {"index": ((7, 16, 128), dtype), "index_scale": ((7, 16), scale)}
        assert kept == {"latent": ((7, 16, 656), dtype)} | index
    assert any(x.mixer.indexer.shared for x in config.layers)


def test_layers_without_sparse_attention_keep_what_the_model_says():
    config = small_model("kimi-k3.1-pro")
    made = state_specs(config, "int8", slots=3, pages=7, page=16)
    plain = decoder.state_specs(config, slots=3, pages=7, page=16, dtype=config.dtype)
    for layer, mine, theirs in zip(config.layers, made, plain, strict=True):
        assert (mine == theirs) == (layer.kinds[0] == "kda")
    assert state_specs(config, "bf16", slots=3, pages=7, page=16) == plain


@pytest.mark.parametrize(
    "kv_dtype, row", [("bf16", 2 * 512 + 2 * 64 + 2 * 128), ("int8", 656 + 128 + 2), ("fp8", 656 + 128 + 4)]
)
def test_states_of_a_bundle_have_so_many_bytes_a_token_and_layer(family_bundle, kv_dtype, row):
    found = open_bundle(family_bundle("deepseek-v3.2", "950dt", kv_dtype=kv_dtype))
    layers, tokens = len(small_model("deepseek-v3.2").layers), 13 * 16
    assert found.manifest["memory"]["states"] == sizes(found)["states"] == layers * tokens * row


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_what_is_kept_of_the_models_states_is_read_back_under_their_names(kv_dtype, exact):
    config = small_model("glm-5.2")
    specs = decoder.state_specs(config, slots=3, pages=2, page=16, dtype=torch.float64)
    states = {
        f"s.layers.{i}.mla.{name}": torch.randn(s.shape, dtype=torch.float64)
        for i, state in enumerate(specs)
        for name, s in tree.items(state)
    }
    kept = kept_states(config, kv_dtype, states, exact=exact)
    dtype, scale = DTYPES[kv_dtype]
    assert {x.dtype for x in kept.values()} == ({torch.float64} if exact else {dtype, scale})
    found = model_states(config, kv_dtype, kept)
    assert found.keys() == states.keys()
    # a float of 3 bits of mantissa is off by 2^-4 at most, int8 by half of 1 / 127 of the largest
    tolerance = 1e-14 if exact else 2**-4
    for name, value in states.items():
        assert float((found[name] - value).abs().max() / value.abs().max()) < tolerance, name


def test_the_manifest_says_the_dtype_and_what_rows_hold(family_bundle):
    state = open_bundle(family_bundle("deepseek-v3.2", "a3", kv_dtype="int8")).manifest["state"]
    assert state["kv_dtype"] == "int8"
    assert "latent: a row is the token's 8-bit latents" in " ".join(state["rules"])
    first = {s["name"].rpartition(".")[2]: s for s in state["states"] if s["name"].startswith("s.layers.0.")}
    shapes = {name: (s["shape"], s["graph_shape"], s["dtype"]) for name, s in first.items()}
    assert shapes == {
        "latent": ([13, 16, 656], [208, 656], "int8"),
        "index": ([13, 16, 128], [208, 128], "int8"),
        "index_scale": ([13, 16], [208, 1], "float16"),
    }
    plain = open_bundle(family_bundle("deepseek-v3.2")).manifest["state"]
    assert plain["kv_dtype"] == "bf16" and "8-bit" not in " ".join(plain["rules"])


@pytest.mark.parametrize(
    "kv_dtype, message", [("fp8", r"state\.states\.0\.dtype"), ("int4", 'one of "bf16"'), (None, 'one of "bf16"')]
)
def test_a_manifest_of_another_dtype_is_refused(family_bundle, tmp_path, kv_dtype, message):
    folder = Path(shutil.copytree(family_bundle("deepseek-v3.2", "a3", kv_dtype="int8"), tmp_path / "b"))
    manifest = read_json(folder / MANIFEST)
    manifest["state"]["kv_dtype"] = kv_dtype
    (folder / MANIFEST).write_bytes(dump(manifest))
    with pytest.raises(BundleError, match=message):
        verify_bundle(folder, steps=0, modes=("exact",))


def test_inspect_shows_the_dtype_the_operators_and_what_is_not_proved(family_bundle):
    text = " ".join(inspect_bundle(family_bundle("kimi-k3.1-pro", "a3", kv_dtype="int8")).text().split())
    for line in (  # lines are wrapped
        "tokens a sequence; caches of sparse attention in int8",
        "mla: cache of latents: DynamicQuant, Bitcast, ConcatV2, ScatterNdUpdate (builtin; a scale for 128 latents, ",
        "mla: selection of keys: DynamicQuant, QuantLightningIndexer (builtin; CANN's operator; weights rounded to ",
        "mla: sparse attention: KvQuantSparseFlashAttention (builtin; CANN's operator; reads the selected rows",
        "Rows of 8-bit caches are put together by Bitcast, whose registration lists neither",
    ):
        assert line in text, line
    assert "caches" not in inspect_bundle(family_bundle("kimi-k3.1-pro")).text()


# ---- graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPARSE)
def test_a_graph_in_8_bits_has_no_operator_and_no_state_of_the_plain_cache(family_bundle, name):
    entry = open_bundle(family_bundle(name, "a3", kv_dtype="int8")).graph("decode")
    mla = [x for x in small_model(name).layers if x.kinds[0] == "mla"]
    full = sum(not x.mixer.indexer.shared for x in mla)
    assert entry["ops"]["KvQuantSparseFlashAttention"] == len(mla)
    assert entry["ops"]["QuantLightningIndexer"] == full
    assert not {"ScatterPaKvCache", "SparseFlashAttention", "LightningIndexer"} & set(entry["ops"])
    leaves = Counter(s.rpartition(".")[2] for s in entry["states"] if ".mla." in s)
    assert leaves == {"latent": len(mla), "index": full, "index_scale": full}


@pytest.mark.parametrize("mesh, split", [("cp=2", False), ("tp=2", True)])
def test_caches_that_are_split_by_sequence_are_not_in_8_bits(mesh, split):
    config, a3 = small_model("kimi-k3.1-pro"), target("a3")
    request = Request(
        config=config, target=a3, max_len=96, page=16, chunk=16, kv_dtype="int8", mesh=Mesh.parse(mesh),
        split_cache=split,
    )  # fmt: skip
    with pytest.raises(CompileError, match="--kv-dtype int8: 8-bit caches are not split by sequence yet; take bf16"):
        request.check()


def test_reads_keep_their_names_and_other_parts_are_left_alone():
    config = small_model("kimi-k3.1-pro")
    bucket = Request(config=config, target=target("a3"), phases=("decode",), max_len=96, page=16).buckets()[0]
    for part, captured in capture_pieces(config, bucket).items():
        before = [str(n) for n in captured.module.graph.nodes], captured.inputs
        made = quantise_caches(captured, "int8")
        names = [str(n) for n in made.module.graph.nodes]
        if part != "mla":
            assert (names, made.inputs) == before
            continue
        assert {"select_keys_default", "sparse_attention_default"} <= set(names)
        targets = {str(n.target) for n in made.module.graph.nodes if n.op == "call_function"}
        assert {x for x in targets if "cache" in x or "index" in x or "sparse" in x or "select" in x} == {
            f"kimi.{op}.default"
            for op in (
                "quantised_cache_write",
                "quantised_index_write",
                "quantised_select_keys",
                "quantised_sparse_attention",
            )
        }
        assert [n for n in made.inputs if n.startswith("s.")] == ["s.latent", "s.index", "s.index_scale"]
        assert [n for n in made.outputs if n.startswith("s.")] == ["s.latent", "s.index", "s.index_scale"]


CHIPS = [
    ("a2", "9.1", "int8"),
    ("a3", "8.5", "int8"),
    ("a3", "9.2", "int8"),
    ("950dt", "9.1", "int8"),
    ("950dt", "9.2", "fp8"),
]


def cached(dtype: torch.dtype, heads: int) -> Case:
    """Rows are written, and attended to."""
    args = {n: x for n, x in attended(heads).args.items() if not n.endswith("_pool")}
    args |= {"latent": rand(3, 1, 512), "rope": rand(3, 1, 64), "slots": torch.tensor([24, 32, 0])}
    args |= {"pool": pack_rows(rand(7, PAGE, 512), rand(7, PAGE, 64), dtype)}

    def step(q_latent, q_rope, selected, block_table, lengths, counts, latent, rope, slots, pool):
        pool = ops.quantised_cache_write(latent, rope, pool, slots)
        rows = (selected, block_table, lengths, counts)
        return ops.quantised_sparse_attention(q_latent, q_rope, pool, *rows, 192**-0.5), pool

    return Case(step, args, states=("pool",))


def keyed(dtype: torch.dtype, scale: torch.dtype, heads: int) -> Case:
    """Index keys are written, and selected from."""
    args = {"q": rand(3, 3, heads, 128), "weights": rand(3, 3, heads, dtype=F32), "key": rand(3, 1, 128)}
    pool, scales = quantise(rand(7, PAGE, 128), dtype)
    args |= {"slots": torch.tensor([24, 32, 0]), "block_table": TABLE, "lengths": LENGTHS, "counts": COUNTS}
    args |= {"pool": pool, "scales": scales.to(scale)}

    def step(q, weights, key, slots, block_table, lengths, counts, pool, scales):
        pool, scales = ops.quantised_index_write(key, pool, scales, slots)
        rows = (block_table, lengths, counts)
        return ops.quantised_select_keys(q, weights, pool, scales, *rows, 8), pool, scales

    return Case(step, args, states=("pool", "scales"))


def lower(host: Host, case: Case, where: tuple[str, str]) -> tuple[ModelDef, Piece]:
    """As the compiler lowers a part, held against every rule of the target."""
    profile = target(where[0], cann=where[1])
    prototypes = Prototypes(profile.soc, host.root)

    def call(x: dict[str, torch.Tensor], s: dict[str, torch.Tensor]) -> dict[str, Any]:
        out, *states = case.call(**x, **s)
        return {"out": [out], "s": dict(zip(case.states, states, strict=True))}

    meta = {name: x.to("meta") for name, x in case.args.items()}
    groups = {"x": {n: x for n, x in meta.items() if n not in case.states}, "s": {n: meta[n] for n in case.states}}
    piece = convert_piece("part", capture(call, groups), profile, host, prototypes)
    assembly = Assembly("part")
    model = assembly.finish(assembly.stamp(piece, "a/", assembly.input), prototypes)
    check_graph(model, profile, prototypes, weights=set(), states={f"s.{n}" for n in case.states})
    return model, piece


def run(model: ModelDef, case: Case, args: dict[str, torch.Tensor], mode: str) -> list[torch.Tensor]:
    """The result, then states."""
    executor, ops_ = Executor(model), {op.name: op for op in model.graph[0].op}
    states = {f"s.{n}": args[n].view(shape_of(ops_[f"s.{n}"].output_desc[0])) for n in case.states}
    ran = executor.run({n: args[n.removeprefix("x.")] for n in executor.inputs}, states, mode)
    return [*ran.outputs, *(ran.states[f"s.{n}"].view(args[n].shape) for n in case.states)]


def exactly(args: dict[str, torch.Tensor], **pools: torch.Tensor) -> dict[str, torch.Tensor]:
    return {n: x.double() if x.is_floating_point() else x for n, x in (args | pools).items()}


@pytest.mark.parametrize("chip, cann, kv_dtype", CHIPS)
@pytest.mark.parametrize("heads", [3, 8])
def test_rows_are_written_and_attended_to_as_the_reference_does(host, chip, cann, kv_dtype, heads):
    dtype, _ = DTYPES[kv_dtype]
    case = cached(dtype, heads)
    model, piece = lower(host, case, (chip, cann))
    types = Counter(op.type for op in model.graph[0].op)
    assert types["PadV3"] == types["Slice"] == int(heads == 3)
    (choice,) = [c for c in piece.choices if c.kind == "sparse attention"]
    assert ("3 heads padded to 4" in choice.reason) == (heads == 3)
    theirs = case.call(**case.args)
    mine = run(model, case, case.args, "native")
    compare(mine[:1], theirs[:1], 2**-7)  # weights and result are rounded to 8 bits of mantissa
    assert torch.equal(mine[1].view(I8).flatten(), theirs[1].view(I8).flatten())
    wide = exactly(case.args, pool=pack_rows(rand(7, PAGE, 512).double(), rand(7, PAGE, 64).double(), torch.float64))
    o, pool = run(model, case, wide, "exact")
    compare([o], [case.call(**wide)[0]], 1e-12)
    assert pool.dtype == torch.float64


@pytest.mark.parametrize("chip, cann, kv_dtype", CHIPS)
@pytest.mark.parametrize("heads", [5, 64])
def test_keys_are_written_and_selected_as_the_reference_does(host, chip, cann, kv_dtype, heads):
    case = keyed(*DTYPES[kv_dtype], heads)
    model, piece = lower(host, case, (chip, cann))
    node = next(op for op in model.graph[0].op if op.type == "QuantLightningIndexer")
    wanted = {("a3", "8.5"): 64, ("950dt", "9.1"): 8, ("950dt", "9.2"): 8}.get((chip, cann), 5) if heads == 5 else 64
    given = {d.name: (shape_of(d), dtype_of(d)) for d in node.input_desc}
    weights = F16 if kv_dtype == "int8" else torch.bfloat16
    assert given["weights"] == ((3, 3, wanted), weights)
    assert given["query_dequant_scale"] == ((3, 3, wanted), DTYPES[kv_dtype][1])
    (choice,) = [c for c in piece.choices if c.kind == "selection of keys"]
    assert (f"5 heads padded to {wanted}" in choice.reason) == (wanted != heads)
    mine, theirs = run(model, case, case.args, "native"), case.call(**case.args)
    for m, t in zip(mine[1:], theirs[1:], strict=True):
        assert torch.equal(m.view(I8).flatten(), t.view(I8).flatten())
    same = [torch.isin(a, b).double().mean() for a, b in zip(mine[0].view(-1, 8), theirs[0].view(-1, 8), strict=True)]
    assert min(same) >= 6 / 8  # rounded weights, and rounded scores of 8-bit floats, may swap neighbours at the end
    pool, scales = quantise(rand(7, PAGE, 128).double(), torch.float64)
    wide = exactly(case.args, pool=pool, scales=scales)
    assert torch.equal(run(model, case, wide, "exact")[0], case.call(**wide)[0])


# ---- verify ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kimi-k3.1-pro", "deepseek-v3.2", "glm-5.2"])
@pytest.mark.parametrize("chip, kv_dtype", PLACES)
def test_a_bundle_in_8_bits_is_its_model(family_bundle, name, chip, kv_dtype):
    """Exactly, as then nothing is rounded; natively within what rounding costs."""
    found = verify_bundle(family_bundle(name, chip, kv_dtype=kv_dtype), steps=2, seed=1)
    assert found.passed, found.text()
    kinds = {r.what for r in found.rows if r.mode == "exact"}
    assert {"logits", "mla.latent", "mla.rope", "mla.index"} <= kinds
    assert all(r.error < 1e-13 for r in found.rows if r.mode == "exact")
    config = small_model(name)
    own = [i for i, x in enumerate(config.layers) if x.kinds[0] == "mla" and not x.mixer.indexer.shared]
    assert [o.where for o in found.overlaps] == [f"layers.{i}.mla" for i in own]
    for o in found.overlaps:
        assert o.queries > 8 and o.chance < o.mean <= 1  # better than a guess
    assert {r.bfloat16 for r in found.rows if r.mode == "native"} == {native_tolerance(config)}
    assert json.loads(json.dumps(found.to_json()))["overlaps"][0]["where"] == f"layers.{own[0]}.mla"
    assert "bfloat16" in found.text() and "by chance" in found.text()


@pytest.mark.heavy
@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("chip", ["a2", "a3", "950pr", "950dt"])
@pytest.mark.parametrize("cann", CANN_VERSIONS)
def test_every_fixture_in_8_bits_is_its_model_where_a_chip_and_release_take_it(
    host, family_bundle, tmp_path, name, kv_dtype, chip, cann
):
    checkpoint = verify.find_checkpoint(open_bundle(family_bundle(name)), None).folder
    config, profile = load_config(checkpoint), target(chip, cann=cann)
    sizes_ = {"batch": 3, "chunk": 7, "max_len": 96, "page": 32, "patches": 16 if config.vision else None}

    def make() -> None:
        out = tmp_path / "b"
        compile_model(config, target=profile, out=out, checkpoint=checkpoint, kv_dtype=kv_dtype, **sizes_)

    if (profile.soc != "950" and kv_dtype == "fp8") or (profile.soc, cann) == ("950", "8.5"):
        with pytest.raises(CompileError, match=r"has no 8-bit floats|expected CANN 9\.1 or later"):
            make()
        return
    make()
    found = verify_bundle(tmp_path / "b", steps=3)
    assert found.passed, found.text()


@pytest.mark.parametrize("chip, kv_dtype", PLACES)
def test_a_bundle_that_only_decodes_starts_from_the_models_states(host, family_bundle, tmp_path, chip, kv_dtype):
    checkpoint = verify.find_checkpoint(open_bundle(family_bundle("deepseek-v3.2")), None).folder
    sizes_ = {"batch": 2, "max_len": 96, "page": 16, "phases": ("decode",), "kv_dtype": kv_dtype}
    compile_model(load_config(checkpoint), target=target(chip), out=tmp_path / "b", checkpoint=checkpoint, **sizes_)
    found = verify_bundle(tmp_path / "b", steps=2)
    assert found.passed, found.text()


def test_caches_in_8_bits_and_packed_experts_go_together(family_bundle):
    found = verify_bundle(
        family_bundle("kimi-k3.1-pro", "950dt", kv_dtype="fp8", weights_format="native"), steps=1, seed=1
    )
    assert found.passed, found.text()
    assert found.overlaps and {r.bfloat16 for r in found.rows if r.mode == "native"} == {
        native_tolerance(small_model("kimi-k3.1-pro"), "mxfp4")
    }


def test_a_bundle_of_bfloat16_caches_shows_its_selections_too(family_bundle):
    found = verify_bundle(family_bundle("deepseek-v3.2"), steps=1)
    assert [o.where for o in found.overlaps] == [f"layers.{i}.mla" for i in range(3)]
    assert all(r.bfloat16 is None for r in found.rows)
    assert not verify_bundle(family_bundle("deepseek-v3.2"), steps=1, modes=("exact",)).overlaps


def test_the_tolerance_of_a_cache_grows_with_its_rounding_and_the_layers_that_have_it():
    small, linear = small_model("deepseek-v3.2"), small_model("kimi-linear-48b")
    plain, int8, fp8 = (cache_tolerance(small, kv_dtype) for kv_dtype in ("bf16", "int8", "fp8"))
    assert plain == native_tolerance(small) < int8 < fp8
    assert fp8**2 - plain**2 == pytest.approx(4 * 0.026**2)  # of three layers, and of the state itself
    assert int8 < 1.1 * plain
    assert cache_tolerance(linear, "bf16") == native_tolerance(linear)


def damage(monkeypatch, mode: str, change: Any) -> None:
    """Before each step of a mode, `change` the states."""
    step = verify.GraphSide.step

    def broken(self, *args, **kwargs):
        if self.mode == mode:
            for name, value in self.states.items():
                change(name, value)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(verify.GraphSide, "step", broken)


def test_damaged_keys_are_seen_in_the_keys_that_are_selected(family_bundle, monkeypatch):
    def turn(name: str, value: torch.Tensor) -> None:
        if name == "s.layers.1.mla.index":
            value.copy_(value.flip(-1))

    whole = {
        o.where: o.mean for o in verify_bundle(family_bundle("deepseek-v3.2", "a3", kv_dtype="int8"), steps=2).overlaps
    }
    damage(monkeypatch, "native", turn)
    found = {
        o.where: o.mean for o in verify_bundle(family_bundle("deepseek-v3.2", "a3", kv_dtype="int8"), steps=2).overlaps
    }
    assert found["layers.1.mla"] < whole["layers.1.mla"] - 0.02
    assert found["layers.0.mla"] == whole["layers.0.mla"]


@pytest.mark.parametrize("chip, kv_dtype", PLACES)
@pytest.mark.parametrize("what", ["mla.latent", "mla.index"])
def test_a_scale_that_is_off_by_a_quarter_is_noticed(family_bundle, monkeypatch, chip, kv_dtype, what):
    def stretch(name: str, value: torch.Tensor) -> None:
        if name == "s.layers.0.mla.latent" and what == "mla.latent":
            scales = value[:, 640:].contiguous().view(F32) * 1.25
            value.view(I8)[:, 640:] = scales.view(I8)
        if name == "s.layers.0.mla.index_scale" and what == "mla.index":
            value *= 1.25

    damage(monkeypatch, "native", stretch)
    found = verify_bundle(family_bundle("deepseek-v3.2", chip, kv_dtype=kv_dtype), steps=1)
    assert not found.passed
    assert what in [r.what for r in found.rows if not r.passed and r.mode == "native"]


def changed(folder: Path, out: Path, change: Any) -> Path:
    """A copy of a bundle with its prefill graph changed, and the hash with it."""
    shutil.copytree(folder, out)
    manifest = read_json(out / MANIFEST)
    (entry,) = [g for g in manifest["graphs"] if g["phase"] == "prefill"]
    model = air.from_bytes((out / entry["file"]).read_bytes(), entry["file"])
    change({op.name: op for op in model.graph[0].op})
    (out / entry["file"]).write_bytes(air.to_bytes(model))
    entry |= {"bytes": (out / entry["file"]).stat().st_size, "sha256": file_hash(out / entry["file"])}
    (out / MANIFEST).write_bytes(dump(manifest))
    return out


@pytest.mark.parametrize(
    "name, chip, kv_dtype, node",
    [("deepseek-v3.2", "a3", "int8", "layers.2.mla"), ("kimi-k3.1-pro", "950dt", "fp8", "layers.6.mla")],
)
def test_a_wrong_reader_is_noticed_exactly_and_named(family_bundle, tmp_path, name, chip, kv_dtype, node):
    node += "/KvQuantSparseFlashAttention"

    def scale(found: dict[str, Any]) -> None:
        set_attr(found[node], "scale_value", 1.01 * get_attr(found[node], "scale_value"))

    folder = changed(family_bundle(name, chip, kv_dtype=kv_dtype), tmp_path / "b", scale)
    found = verify_bundle(folder, steps=0, modes=("exact",), bisect=True)
    assert not found.passed
    assert f": {node} (" in found.difference, found.difference


def test_rows_that_end_in_the_scales_of_another_layer_are_noticed_exactly_where_they_are_written(
    family_bundle, tmp_path
):
    def mix(found: dict[str, Any]) -> None:
        (concat,) = [op for n, op in found.items() if n.startswith("layers.1.mla/ConcatV2") and len(op.input) == 4]
        assert concat.input[2].startswith("layers.1.")
        concat.input[2] = concat.input[2].replace("layers.1.", "layers.0.")

    folder = changed(family_bundle("deepseek-v3.2", "a3", kv_dtype="int8"), tmp_path / "b", mix)
    found = verify_bundle(folder, steps=0, modes=("exact",), bisect=True)
    assert not found.passed
    assert "(seen at layers.1.mla/ScatterNdUpdate)" in found.difference, found.difference


@pytest.mark.parametrize("name", ["kimi-k3.1-pro", "glm-5.2"])
def test_nothing_is_named_where_nothing_is_wrong(family_bundle, name):
    opened = open_bundle(family_bundle(name, "a3", kv_dtype="int8"))
    checkpoint = verify.find_checkpoint(opened, None)
    config = load_config(checkpoint.folder)
    params = load_params(checkpoint, config, dtype=torch.float64)
    steps = [s for s in verify.script(opened, config, steps=1, seed=0) if s.phase != "vision"][-2:]
    assert first_difference(opened, config, params, steps).startswith("no single node differs")


# ---- shares of keys --------------------------------------------------------------------------------------------------


def shares(family_bundle, exact: list[list[int]], own: list[list[int]], counts: int, before: int) -> list[Any]:
    """Of one row with `counts` queries after `before` tokens, by a graph's first indexer."""
    bundle = open_bundle(family_bundle("deepseek-v3.2"))
    entry = bundle.graph("decode")
    graph = Executor(air.from_bytes(bundle.graph_bytes(entry), entry["file"]))
    (name,) = [n for n, node in graph.nodes.items() if node.type == "LightningIndexer" and n.startswith("layers.0.")]
    table, slots = torch.tensor([[1, 2]], dtype=I32), torch.tensor([1], dtype=I32)
    batch = step_batch(table, slots, torch.tensor([before]), torch.tensor([counts]), len(exact), 16)
    step = verify.Step(phase="prefill", inputs={}, batch=batch, used=torch.tensor([True]))
    given = Selections(
        {name: torch.tensor(exact)[None, :, None]}, replaying=True, own={name: torch.tensor(own)[None, :, None]}
    )
    overlaps = Overlaps()
    overlaps.add(step, [(name, own[:, :, 0], given.chosen[name][:, :, 0]) for name, own in given.own.items()])
    return overlaps.rows()


def test_the_same_keys_in_another_order_are_the_same(family_bundle):
    (found,) = shares(family_bundle, [[0, 3, 5], [6, 2, 1]], [[5, 0, 3], [1, 2, 6]], counts=2, before=6)
    assert (found.where, found.queries, found.worst, found.mean) == ("layers.0.mla", 2, 1.0, 1.0)
    assert found.chance == pytest.approx((3 / 7 + 3 / 8) / 2)


def test_keys_that_only_one_side_selects_lower_the_share(family_bundle):
    (found,) = shares(family_bundle, [[0, 3, 5], [6, 2, 1]], [[4, 0, 2], [1, 2, 6]], counts=2, before=6)
    assert (found.worst, found.mean) == (pytest.approx(1 / 3), pytest.approx(2 / 3))


def test_queries_that_see_no_more_than_is_selected_and_padding_do_not_count(family_bundle):
    exact = [[0, 1, -1], [0, 1, 2], [0, 1, 3], [7, 8, 9]]
    (found,) = shares(family_bundle, exact, [[9, 9, 9], [9, 9, 9], [0, 1, 9], [9, 9, 9]], counts=3, before=1)
    assert (found.queries, found.mean) == (1, pytest.approx(2 / 3))
    assert shares(family_bundle, exact[:2], exact[:2], counts=2, before=1) == []
