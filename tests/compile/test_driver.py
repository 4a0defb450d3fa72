"""Compile: one input, one set of bytes; illegal requests are refused before any work; a failure changes nothing."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kimi_graph.compile import air, capture, driver, phases
from kimi_graph.compile.bundle import LOCAL, MANIFEST, dump, read_json
from kimi_graph.compile.driver import Request, build_graph, compile_model, convert_piece, legal_phases
from kimi_graph.compile.least import least_weights
from kimi_graph.compile.prototypes import Prototypes
from kimi_graph.compile.targets import CANN_DEFAULT, CANN_VERSIONS, target
from kimi_graph.config import MlaConfig
from kimi_graph.errors import BundleError, CheckpointError, CompileError, ConfigError, KimiGraphError
from kimi_graph.fixture import make_fixture
from kimi_graph.parallel import Mesh
from kimi_graph.read_config import load_config, parse_config
from tests.compile.family import FAMILY, SPARSE, small_model

PRESET = load_config("kimi-linear-48b")
ROOT = Path(__file__).parents[2]


def content(folder, leave_out=(LOCAL,)):
    """Bytes by name of everything in a folder."""
    files = {str(p.relative_to(folder)): p for p in Path(folder).rglob("*") if p.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name not in leave_out}


# ---- the same bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, sizes", [("small", "--max-len 64"), ("kimi-k3.1-pro", "--max-len 96 --patches 16")], ids=["small", "k3.1"]
)
def test_another_process_another_hash_seed_and_another_folder_give_the_same_bytes(
    bundle, family_bundle, tmp_path, name, sizes
):
    bundle = bundle if name == "small" else family_bundle(name)
    source = json.loads((bundle / LOCAL).read_bytes())["checkpoint"]
    wheel = os.environ.get("KIMI_GRAPH_TORCH_NPU_WHEEL")
    command = [sys.executable, "-m", "kimi_graph", "compile", source, "--target", "a3", "-o", "elsewhere/bundle"]
    sizes = ["--batch", "2", "--chunk", "16", "--page", "16", "--no-cache", *sizes.split()]
    environ = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command + sizes + (["--torch-npu-wheel", wheel] if wheel else []),
        cwd=tmp_path, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "elsewhere/bundle") == content(bundle)


@pytest.mark.parametrize("name", FAMILY)
def test_compiling_again_gives_the_same_manifest_and_with_it_the_same_hashes(family_bundle, host, name):
    bundle = family_bundle(name)
    folder = json.loads((bundle / LOCAL).read_bytes())["checkpoint"]
    sizes = {"batch": 2, "chunk": 16, "max_len": 96, "page": 16, "patches": 16 if small_model(name).vision else None}
    again = compile_model(load_config(folder), target=target("a3"), out=None, **sizes).manifest
    assert dump(again) == (bundle / MANIFEST).read_bytes()


def test_only_local_json_knows_where_anything_lies(bundle, small):
    assert json.loads((bundle / LOCAL).read_bytes()) == {"checkpoint": str(small)}
    for name, data in content(bundle).items():
        assert str(small).encode() not in data, name
        assert str(bundle).encode() not in data, name


def test_a_config_alone_gives_the_graphs_of_its_checkpoint(bundle, compile_small, small, tmp_path):
    compile_small(tmp_path / "b", model=small / "config.json", checkpoint=None)
    mine, theirs = content(tmp_path / "b"), content(bundle)
    assert not (tmp_path / "b" / LOCAL).exists()
    assert {name: data for name, data in mine.items() if name.endswith(".air")} == {
        name: data for name, data in theirs.items() if name.endswith(".air")
    }


# ---- what is in the graphs -------------------------------------------------------------------------------------------


def types_by_part(config, profile, host, **numbers):
    """GE operator types of each kind of part and phase; mixes of however many sources are one kind."""
    request = Request(config=config, target=profile, **numbers)
    prototypes = Prototypes(profile.soc, host.root)
    found = {}
    for bucket in replace(request, phases=legal_phases(config)).buckets():
        for name, piece in phases.capture_pieces(config, bucket).items():
            ops = {op.type for op in convert_piece(name, piece, profile, host, prototypes).ops}
            kind = bucket.phase, name.rstrip("0123456789")
            assert found.setdefault(kind, ops) == ops, (kind, name)
    return found


TEXT = {"embed", "mla", "attn_add", "dense", "moe", "ffn_add", "head"}
MIXES = {"attn_res", "ffn_res", "out_res"}
PARTS = {  # besides those of TEXT
    "kimi-linear-48b": {"kda"},
    "kimi-k3": {"kda", *MIXES},
    "kimi-k3.1-pro": {"kda", *MIXES},
    "glm-5.2": {"mla_shared"},
}
TARGET_NAMES = ("a3", "a2", "950dt")
SAME_TYPES = [(name, chip, {}) for name in FAMILY for chip in TARGET_NAMES]
SAME_TYPES += [("kimi-linear-48b", chip, {"rows": 2}) for chip in TARGET_NAMES]
SAME_TYPES += [(name, "a3", {"cann": "9.1"}) for name in ("kimi-linear-48b", "kimi-k3")]
MORE_TYPES = [
    pytest.param(name, chip, {"rows": rows, "cann": cann}, marks=pytest.mark.heavy)
    for name in FAMILY
    for chip in TARGET_NAMES
    for rows in (1, 2, 5)
    for cann in CANN_VERSIONS
]


@pytest.mark.parametrize("name, chip, numbers", [*SAME_TYPES, *MORE_TYPES], ids=str)
def test_a_fixture_has_the_operator_types_of_the_full_model_in_every_kind_of_part(host, name, chip, numbers):
    numbers = {**numbers}
    profile = target(chip, cann=numbers.pop("cann", CANN_DEFAULT))
    full = types_by_part(load_config(name), profile, host, **numbers)
    assert types_by_part(small_model(name), profile, host, **numbers) == full
    decode = {kind for phase, kind in full if phase == "decode"}
    assert decode == TEXT | PARTS.get(name, set())
    prefill = {kind for phase, kind in full if phase == "prefill"}
    sees = load_config(name).vision is not None
    assert prefill == (decode - {"embed"} | {"embed_vision"} if sees else decode)
    assert {kind for phase, kind in full if phase == "vision"} == (
        {"vision_embed", "vision_block", "vision_project"} if sees else set()
    )


def top_k(config):
    return next(m.indexer.top_k for m in (x.mixer for x in config.layers) if isinstance(m, MlaConfig))


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("chip", ["a3", *(pytest.param(chip, marks=pytest.mark.heavy) for chip in TARGET_NAMES[1:])])
def test_a_cache_no_longer_than_top_k_has_the_types_of_the_full_model_too(host, name, chip):
    """Attention without a selection, while index keys are written all the same; in fixtures and presets."""
    full, small = load_config(name), small_model(name)
    dense = [types_by_part(c, target(chip), host, max_len=top_k(c), chunk=32, page=64) for c in (full, small)]
    assert dense[0] == dense[1]
    assert dense[0] != types_by_part(full, target(chip), host, chunk=32, page=64)


@pytest.mark.parametrize("name", ["a3", "a2", "950pr", "950dt", "a3-superpod", "950-superpod"])
def test_every_node_has_a_prototype_on_its_target(host, compile_small, name):
    made = compile_small(None, target=name)
    prototypes = Prototypes(target(name).soc, host.root)
    for graph in made.manifest["graphs"]:
        for type_ in graph["ops"]:
            found = prototypes.find(type_)
            assert found is not None and target(name).soc in found.socs, (graph["name"], type_)


def test_each_kind_of_layer_is_traced_and_converted_once_however_deep_the_model(host, monkeypatch):
    counts = {"capture": 0, "convert": 0}

    def counted(name, f):
        def call(*args, **kwargs):
            counts[name] += 1
            return f(*args, **kwargs)

        return call

    monkeypatch.setattr(phases, "capture", counted("capture", capture.capture))
    monkeypatch.setattr(driver, "convert", counted("convert", driver.convert))
    request = Request(config=PRESET, target=target("a3"), phases=("decode",))
    graph = build_graph(request, request.buckets()[0], host)
    assert counts == {"capture": 8, "convert": 8}
    assert sum(op.type == "RecurrentGatedDeltaRule" for op in graph.model.graph[0].op) == 20
    assert sum(op.type == "FusedInferAttentionScore" for op in graph.model.graph[0].op) == 7


def test_graphs_hold_no_path_of_this_machine(bundle):
    for name, data in content(bundle).items():
        assert str(ROOT).encode() not in data, name


# ---- refusals --------------------------------------------------------------------------------------------------------

REFUSED = {
    "a chunk over the length": ({"chunk": 65}, "--chunk 65 is over --max-len 64; the largest is 64"),
    "a chunk of nothing": ({"chunk": 0}, "--chunk is 0; the smallest is 1"),
    "no rows": ({"batch": 0}, "--batch is 0; the smallest is 1"),
    "no length": ({"max_len": -1}, "--max-len is -1; the smallest is 1"),
    "a page of 120": ({"page": 120}, "--page 120: .* multiples of 16 up to 1,024; the nearest is 128"),
    "a page of 100": ({"page": 100}, "--page 100: .*; the nearest is 96"),
    "a page of 8": ({"page": 8}, "--page 8: .*; the nearest is 16"),
    "a page over the limit": ({"page": 4096}, "--page 4096: .*; the nearest is 1024"),
    "pages for no sequence": ({"pages": 4}, "a sequence of 64 tokens takes 4 pages .* at least 5, 9 for 2"),
    "fewer pages than rows": ({"batch": 7, "pages": 7, "phases": ("decode",)}, "--pages 7: .* at least 8, 29 for 7"),
    "pages for less than a step": ({"batch": 8, "pages": 7, "chunk": 64}, "a step writes 512 tokens, .* at least 32"),
    "fewer slots than rows": ({"batch": 3, "slots": 3}, "--slots 3: .* at least 4, nearest 4"),
    "rows beyond 32 bits": ({"batch": 10**11}, "--batch 100,000,000,000: .* in 32 bits, at most 2,147,483,647"),
    "an unknown phase": (
        {"phases": ("prefill", "train")},
        "--phase 'prefill,train': the phases of small are prefill, decode",
    ),
    "patches without vision": ({"patches": 4096}, "--patches 4096: small has no vision tower"),
    "no phase": ({"phases": ()}, "--phase '': the phases of small are prefill, decode"),
    "a length over the model's": ({"max_len": 1_048_577}, "1,048,577, expected 1 to 1,048,576 .* nearest is 1,048,576"),
    "vision without eyes": ({"phases": ("vision",)}, "--phase 'vision': the phases of small are prefill, decode"),
    "a format without a kernel": ({"weights_format": "int8-g32"}, "int8-g32 on a3: GroupedMatmul with 8-bit weights"),
    "a format nobody knows": ({"weights_format": "int3"}, "int3: unknown; one of native, bf16, int8-g32, int4"),
    "a cache that dense attention reads": ({"kv_dtype": "int8"}, "--kv-dtype int8: .* small has no indexer; take bf16"),
    "a cache of a dtype that the chip lacks": ({"kv_dtype": "fp8"}, "a3 has no 8-bit floats; it takes bf16, int8"),
    "packed constants": ({"weights": "constant", "weights_format": "int4"}, "packed weights need --weights input"),
    "constants without weights": ({"weights": "constant", "checkpoint": None}, "small is no checkpoint.s folder"),
}  # fmt: skip


@pytest.fixture
def no_work(monkeypatch):
    """Whoever starts anything slow fails."""

    def fail(*args, **kwargs):
        raise AssertionError("work was started")

    monkeypatch.setattr(driver, "Late", fail)
    monkeypatch.setattr(driver, "capture_pieces", fail)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused_before_any_work_with_the_nearest_legal_value(
    compile_small, tmp_path, no_work, case
):
    options, message = REFUSED[case]
    start = time.perf_counter()
    with pytest.raises((CompileError, ConfigError), match=message):
        compile_small(tmp_path / "b", **options)
    assert time.perf_counter() - start < 1
    assert list(tmp_path.iterdir()) == []


def test_a_mesh_whose_ranks_cannot_hold_their_weights_is_refused_before_any_work(no_work, tmp_path):
    """Case A10, where it is hopeless: the finished graphs would take 13 s for 128 ranks."""
    words = (
        r"kimi-k3 on pp=2,tp=4: a rank of stage 0 needs [\d,.]+ GiB for the weights of its layers alone, the runtime"
    )
    with pytest.raises(
        CompileError, match=words + r" takes 2\.00, a die of 950dt has \d+\.00\. .* No graph was made\."
    ):
        compile_model(
            load_config("kimi-k3"),
            target=target("950dt"),
            out=tmp_path / "b",
            mesh=Mesh.parse("pp=2,tp=4"),
            weights_format="native",
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["native", "int4", "bf16"])
def test_what_layers_hold_at_least_is_nearly_what_they_hold(host, family_bundle, form):
    """Never more: nothing that fits may be refused. Fixtures have small layers beside their embedding and head."""
    options = {"weights_format": form, "mesh": Mesh.parse("pp=2,tp=2"), "phases": ("decode",), "ways": 2}
    manifest = read_json(family_bundle("kimi-k3.1-pro", "950dt", **options) / MANIFEST)
    source = read_json(family_bundle("kimi-k3.1-pro", "950dt", **options) / LOCAL)["checkpoint"]
    config = load_config(source)
    stored = driver._stored_formats(config, Path(source), form)
    sizes = {"weights_format": form, "mesh": options["mesh"], "stored": stored, "rows": 2, "max_len": 96, "page": 16}
    request = Request(config=config, target=target("950dt"), phases=("decode",), **sizes)
    packed = {path: request.packed(path, request.layout.rules("decode")) for path in request._specs}
    assert any(packed.values()) == (form != "bf16")
    held = least_weights(request.layout, request._specs, packed)
    for stage, found in zip(request.layout.stages(request.buckets()[0]), manifest["memory"]["stages"], strict=True):
        assert 0.5 * found["weights"] < sum(held[i] for i in stage.layers) <= found["weights"]


def test_a_folder_of_something_else_is_refused_before_any_work(compile_small, tmp_path, no_work):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.txt").write_text("years of work")
    with pytest.raises(BundleError, match="exists and is not a bundle; choose another folder"):
        compile_small(tmp_path / "b")
    (tmp_path / "file").write_text("years of work")
    with pytest.raises(BundleError, match="exists and is not a bundle"):
        compile_small(tmp_path / "file")
    assert content(tmp_path) == {"b/thesis.txt": b"years of work", "file": b"years of work"}


def test_weights_of_another_model_are_no_constants(compile_small, tmp_path, no_work):
    other = make_fixture(PRESET, tmp_path / "other", layers=2).folder
    with pytest.raises(CheckpointError, match="missing"):
        compile_small(tmp_path / "b", weights="constant", checkpoint=other)
    assert not (tmp_path / "b").exists()


def test_numbers_that_are_not_given_fit_those_that_are(host, small):
    """A default is never what a request is refused for."""

    def made(**given):
        made = compile_model(load_config(small), target=target("a3"), out=None, phases=("prefill",), **given)
        return made.manifest["graphs"][0]

    assert made(max_len=100)["tokens"] == 100
    assert made(max_len=1)["tokens"] == 1
    assert made()["tokens"] == 512


def test_a_model_shorter_than_the_default_length_is_compiled_for_its_own(host, small):
    source = {**load_config(small).source, "model_max_length": 300}
    made = compile_model(
        parse_config(source, origin="", name="short"), target=target("a3"), out=None, phases=("decode",)
    )
    assert made.manifest["state"]["tokens_per_sequence"] == 384  # three pages of 128


# ---- what is written -------------------------------------------------------------------------------------------------


def test_an_older_bundle_is_replaced_whole(compile_small, bundle, tmp_path):
    compile_small(tmp_path / "b", phases=("decode",), batch=1)
    compile_small(tmp_path / "b")
    assert content(tmp_path / "b") == content(bundle)
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize("where", ["capture_pieces", "convert", "check_graph", "weight_plan", "make_manifest"])
def test_a_compile_that_fails_leaves_the_older_bundle(compile_small, tmp_path, monkeypatch, where):
    compile_small(tmp_path / "b", phases=("decode",))
    before = content(tmp_path / "b", leave_out=())

    def fail(*args, **kwargs):
        raise CompileError("failed here")

    monkeypatch.setattr(driver, where, fail)
    with pytest.raises(CompileError, match="failed here"):
        compile_small(tmp_path / "b")
    assert content(tmp_path / "b", leave_out=()) == before
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_a_full_disk_leaves_the_older_bundle(compile_small, tmp_path, monkeypatch):
    compile_small(tmp_path / "b", phases=("decode",))
    before = content(tmp_path / "b", leave_out=())
    write = Path.write_bytes

    def fail(self, data):
        if self.name == MANIFEST:
            raise OSError(28, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(BundleError, match="No space left on device; nothing was written"):
        compile_small(tmp_path / "b")
    monkeypatch.undo()
    assert content(tmp_path / "b", leave_out=()) == before
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_a_dry_run_makes_and_checks_everything_and_writes_nothing(compile_small, bundle, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = compile_small(None)
    assert list(tmp_path.iterdir()) == []
    assert made.manifest == json.loads((bundle / MANIFEST).read_bytes())


def test_the_summary_says_what_was_made_and_the_text_how(compile_small):
    made = compile_small(None)
    nodes = sum(sum(g["ops"].values()) for g in made.manifest["graphs"])
    assert made.summary == f"small for a3: prefill_b2_t16, decode_b2 ({nodes:,} nodes)"
    text = made.text()
    assert "target    a3 (Atlas 800 A3), CANN 9.2" in text
    assert "prefill_b2_t16: 2 x 16 tokens" in text and "decode_b2: 2 x 1 tokens" in text
    assert "3 slots, 9 pages of 16 tokens, 64 tokens a sequence" in text
    assert set(made.to_json()) == {"manifest", "seconds"}


def test_every_step_is_announced(compile_small):
    seen = []
    compile_small(None, progress=lambda what, done, total: seen.append(what))
    assert list(dict.fromkeys(seen)) == ["torchair", "trace", "convert", "stamp", "check", "write"]


def test_a_fault_found_by_the_checks_names_node_and_line(compile_small, tmp_path, monkeypatch):
    """As a wrong lowering would make it: an operator that CANN does not have."""
    convert = driver.convert

    def wrong(*args, **kwargs):
        made = convert(*args, **kwargs)
        for op in made.model.graph[0].op:
            if op.type == "SwiGlu":
                op.attr["dim"].i = 7
        return made

    monkeypatch.setattr(driver, "convert", wrong)
    monkeypatch.setattr(driver, "infer_shapes", lambda model: None)
    with pytest.raises(KimiGraphError, match=r"layers\.1\.moe/SwiGlu \(layers/moe\.py:\d+\): .*dim 7 of 2 dims"):
        compile_small(tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_graph_files_are_read_back_as_they_were_made(bundle):
    for file in sorted((bundle / "graphs").iterdir()):
        assert air.to_bytes(air.read(file)) == file.read_bytes()
