"""Verify: what is compared, what passes, what fails, and what is said where there is nothing to compare with."""

import contextlib
import itertools
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch

from kimi_graph import tree
from kimi_graph.compile import verify, weight_formats
from kimi_graph.compile.bundle import LOCAL, MANIFEST, dump, open_bundle, read_json
from kimi_graph.compile.driver import compile_model
from kimi_graph.compile.manifest import GENERATED
from kimi_graph.compile.targets import CANN_VERSIONS, target
from kimi_graph.compile.verify import (
    EXACT_TOLERANCE,
    SMALL,
    Comparison,
    Report,
    Row,
    enough_threads,
    largest,
    native_tolerance,
    norm,
    prompt_chunks,
    row_capacity,
    script,
    verify_bundle,
)
from kimi_graph.compile.weight_formats import as_read
from kimi_graph.config import MlaConfig
from kimi_graph.errors import BundleError, CheckpointError, CompileError, KimiGraphError, VerifyError
from kimi_graph.fixture import make_fixture
from kimi_graph.models import decoder
from kimi_graph.parallel import Mesh
from kimi_graph.read_config import load_config
from tests.compile.family import FAMILY, SPARSE, small_model

PRESET = load_config("kimi-linear-48b")


@pytest.fixture
def copy(bundle, tmp_path):
    """A bundle that may be changed."""
    return Path(shutil.copytree(bundle, tmp_path / "bundle"))


@pytest.fixture(scope="module")
def report(bundle):
    return verify_bundle(bundle, steps=3)


# ---- what passes -----------------------------------------------------------------------------------------------------


def test_a_compiled_bundle_is_its_model(report):
    assert report.passed, report.text()
    kinds = {"logits", "kda.memory", "kda.query", "kda.key", "kda.value", "mla.latent", "mla.rope"}
    assert {(r.mode, r.what) for r in report.rows} == {(m, k) for m in ("exact", "native") for k in kinds}
    assert all(r.error < 1e-13 for r in report.rows if r.mode == "exact")
    assert all(r.error > 0 for r in report.rows if r.mode == "native")  # bfloat16 rounds


def test_every_state_of_every_layer_is_compared_after_every_step(report):
    counts = {r.what: r.count for r in report.rows if r.mode == "exact"}
    assert counts == {"logits": 6, "mla.latent": 6, "mla.rope": 6} | {
        f"kda.{leaf}": 12 for leaf in ("memory", "query", "key", "value")
    }


def test_the_summary_names_the_largest_errors(report):
    assert re.fullmatch(
        r"verified: graphs equal the model over 6 steps \(exact \d\.\de-\d\d, native \d\.\de-\d\d\)", report.summary
    )
    assert "semantics of the operator types executed:" in report.text()
    assert sum(report.provenance.values()) > 20


VERIFIED = [*((name, chip) for name in FAMILY for chip in ("a3", "950dt"))]


def test_our_operators_may_be_run_by_their_kernels(bundle, twin_cache):
    found = verify_bundle(bundle, steps=1, kernels=twin_cache)
    assert found.passed, found.text()
    ran = r"nodes run by their kernels on the twin \(2201\): \d+ GatedRmsNorm, \d+ KdaChunk, \d+ ShortConv"
    assert re.search(ran, found.text())


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"mesh": Mesh.parse("tp=2"), "split_cache": True, "ways": 2}], ids=str)
def test_our_sparse_attention_is_the_models_of_whole_caches_and_of_parts(family_bundle, twin_cache, options):
    bundle = family_bundle("deepseek-v3.2", "a3", providers=("own", "builtin", "composed"), **options)
    found = verify_bundle(bundle, steps=2, kernels=twin_cache)
    assert found.passed, found.text()
    assert all(r.error < 1e-13 for r in found.rows if r.mode == "exact")
    assert re.search(r"on the twin \(2201\): .*\d+ SparseAttend", found.text())


@pytest.mark.parametrize("options", [{"modes": ("exact",)}, {"processes": True}], ids=str)
def test_kernels_run_in_native_mode_and_in_one_process(bundle, options, tmp_path):
    with pytest.raises(VerifyError, match="--kernels twin: runs in this process and in native mode"):
        verify_bundle(bundle, steps=1, kernels=tmp_path, **options)


@pytest.mark.parametrize("name, chip", VERIFIED)
def test_the_bundle_of_every_fixture_is_its_model(family_bundle, name, chip):
    found = verify_bundle(family_bundle(name, chip), steps=2)
    assert found.passed, found.text()
    config = small_model(name)
    specs = decoder.state_specs(config, slots=1, pages=1, page=16, dtype=torch.float64)
    kinds = {f"{x.kinds[0]}.{leaf}" for x, s in zip(config.layers, specs, strict=True) for leaf, _ in tree.items(s)}
    kinds |= {"logits"} | ({"embeddings"} if config.vision else set())
    assert {(r.mode, r.what) for r in found.rows} == {(m, k) for m in ("exact", "native") for k in kinds}
    assert all(r.error < 1e-13 for r in found.rows if r.mode == "exact")


PACKED = [
    ("kimi-k3", "950dt", "native"),
    ("kimi-k3.1-pro", "a3", "int4"),
    ("kimi-k2.5", "a2", "native"),
    ("kimi-k2.5", "950dt", "int4"),
    ("deepseek-v3.2", "950dt", "native"),
    ("kimi-linear-48b", "a3", "int4"),
]


@pytest.mark.parametrize("name, chip, weights_format", PACKED)
def test_a_bundle_with_packed_experts_is_its_model_with_the_values_they_have_then(
    family_bundle, name, chip, weights_format
):
    found = verify_bundle(family_bundle(name, chip, weights_format=weights_format), steps=2)
    assert found.passed, found.text()
    assert all(r.error < 1e-13 for r in found.rows if r.mode == "exact")
    lossless = weights_format == "native" or name == "kimi-k2.5"
    assert bool(found.notes) != lossless
    if not lossless:
        assert re.fullmatch(r"experts as int4-g32 differ .* by (8|9|10)\.\d\d%, logits by at most .*%", found.notes[0])


@pytest.mark.parametrize("name, chip", [("kimi-k3", "950dt"), ("kimi-k2.5", "a2"), ("deepseek-v3.2", "950dt")])
def test_packed_experts_that_are_read_otherwise_are_noticed(family_bundle, monkeypatch, name, chip):
    def otherwise(desc, raw):
        found = as_read(desc, raw)
        return found.contiguous().view(torch.uint8).flip(1).view(found.dtype)

    monkeypatch.setattr(weight_formats, "as_read", otherwise)
    assert not verify_bundle(family_bundle(name, chip, weights_format="native"), steps=0, modes=("exact",)).passed


def test_rows_in_a_short_float_may_differ_by_more(family_bundle):
    config = small_model("deepseek-v3.2")
    plain, packed = native_tolerance(config), native_tolerance(config, "fp8")
    moes = sum(layer.kinds[1] == "moe" for layer in config.layers)
    assert packed**2 - plain**2 == pytest.approx(2 * moes * 2**-8)


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-k2.5"])
def test_a_bundle_of_vision_alone_is_its_model(family_bundle, name):
    found = verify_bundle(family_bundle(name, "a3", phases=("vision",)))
    assert found.passed, found.text()
    assert {r.what for r in found.rows} == {"embeddings"}


def test_weights_that_are_not_numbers_are_named(bundle, small, tmp_path):
    folder = Path(shutil.copytree(small, tmp_path / "nan"))
    file = next(folder.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-2:] = b"\xff\x7f"  # a bfloat16 that is no number
    file.write_bytes(data)
    with pytest.raises(VerifyError, match=r"nan: parameter [a-z.0-9_]+ has 1 values that are NaN or infinite"):
        verify_bundle(bundle, checkpoint=folder)


DAMAGE = {
    "a target that is another's": (("target", "soc_version"), "Ascend310P", "target.soc_version"),
    "no target there is": (("target", "name"), "zz", "target: target 'zz' is not known"),
    "weights of one byte": (("memory", "weights"), 1, "memory.weights"),
    "no place": (("graphs", 0, "file"), None, "no entry 'graphs.0.file'; the file was changed or damaged"),
    "a number in place of weights": (("weights",), 7, "weights is 7; expected an object"),
    "no images": (("graphs", 0, "images"), "none", "manifest.json"),
    "no model": (("model", "fingerprint"), None, "no entry 'model.fingerprint'; the file was changed or damaged"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_manifest_that_someone_changed_is_refused_in_one_line(copy, case):
    path, value, message = DAMAGE[case]
    manifest = read_json(copy / MANIFEST)
    place = manifest
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    (copy / MANIFEST).write_bytes(dump(manifest))
    with pytest.raises(KimiGraphError, match=re.escape(message)):
        verify_bundle(copy)


MORE = [
    {"batch": 1, "max_len": 64},
    {"batch": 5, "chunk": 7, "max_len": 160, "page": 32},
    {"phases": ("decode",), "max_len": 96},
    {"weights": "constant", "max_len": 96},
]


@pytest.mark.heavy
@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("chip", ["a3", "a2", "950pr", "950dt", "a3-superpod", "950-superpod"])
@pytest.mark.parametrize("cann", CANN_VERSIONS)
@pytest.mark.parametrize("options", MORE, ids=str)
def test_every_fixture_on_every_chip_and_release_is_its_model(host, tmp_path, name, chip, cann, options):
    checkpoint = make_fixture(load_config(name), tmp_path / name).folder
    sizes = {"batch": 2, "chunk": 16, "page": 16, **options}
    if small_model(name).vision is not None:
        sizes = {"patches": 16, **sizes}
    profile = target(chip, cann=cann)
    long = options["max_len"] > 64  # the fixtures' top-k
    refused = profile.soc == "950" and cann == "8.5" and name in SPARSE and long
    with pytest.raises(CompileError, match=r"expected CANN 9\.1 or later") if refused else contextlib.nullcontext():
        compile_model(load_config(checkpoint), target=profile, out=tmp_path / "b", checkpoint=checkpoint, **sizes)
    if refused:
        return
    found = verify_bundle(tmp_path / "b", steps=3)
    assert found.passed, found.text()


@pytest.mark.parametrize(
    "options",
    [
        {"phases": ("decode",)},
        {"phases": ("prefill",)},
        {"batch": 1},
        {"batch": 3},
        {"batch": 3, "pages": 5},
        {"batch": 1, "chunk": 1, "max_len": 3},
        {"page": 32, "chunk": 7, "max_len": 40},
        {"target": "950dt"},
    ],
    ids=str,
)
def test_bundles_of_other_shapes_phases_and_targets_are_their_model(compile_small, tmp_path, options):
    compile_small(tmp_path / "b", **options)
    found = verify_bundle(tmp_path / "b", steps=2)
    assert found.passed, found.text()


def test_one_mode_alone_can_be_asked_for(bundle):
    found = verify_bundle(bundle, steps=1, modes=("exact",))
    assert found.passed
    assert {r.mode for r in found.rows} == {"exact"}


def test_another_seed_is_other_tokens_and_passes_too(bundle):
    first, second = (
        [s.inputs["tokens"].tolist() for s in script(open_bundle(bundle), PRESET, steps=2, seed=seed)]
        for seed in (0, 1)
    )
    assert first != second
    assert verify_bundle(bundle, steps=1, modes=("exact",), seed=1).passed


# ---- the script ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILY)
def test_the_script_is_the_same_every_time(family_bundle, name):
    runs = [list(script(open_bundle(family_bundle(name)), small_model(name), steps=2, seed=0)) for _ in range(2)]
    for a, b in zip(*runs, strict=True):
        assert a.phase == b.phase
        assert torch.equal(a.used, b.used)
        assert a.named.keys() == b.named.keys()
        assert all(torch.equal(x, b.named[name]) for name, x in a.named.items())


@pytest.mark.parametrize("name", FAMILY)
def test_steps_hold_what_their_graph_reads_and_nothing_else(family_bundle, name):
    """Their shapes and dtypes too; floats are float64, which stands for exact numbers."""
    bundle = open_bundle(family_bundle(name))
    phases = [g["phase"] for g in bundle.manifest["graphs"]]
    steps = list(script(bundle, small_model(name), steps=2, seed=0))
    assert list(dict.fromkeys(s.phase for s in steps)) == phases
    for step in steps:
        entry = bundle.graph(step.phase)
        read = {i["name"]: i for i in entry["inputs"] if i["name"] not in GENERATED}
        assert set(read) <= set(step.named)
        for name_, x in step.named.items():
            assert name_ not in read or list(x.shape) == read[name_]["shape"], name_
            exact = "float64" if x.is_floating_point() else read.get(name_, {}).get("dtype", "")
            assert name_ not in read or str(x.dtype) == f"torch.{exact}", name_
        assert step.used.dtype == torch.bool and bool(step.used.any())
        rows = entry["images"] if step.phase == "vision" else entry["rows"]
        assert len(step.used) == rows
        if step.phase != "vision":
            assert torch.equal(step.used, step.batch.counts > 0)


@pytest.mark.parametrize("name", [n for n in FAMILY if small_model(n).vision])
def test_pictures_fill_the_bucket_and_are_narrow_and_text_holds_rows_of_images(family_bundle, name):
    bundle = open_bundle(family_bundle(name))
    steps = list(script(bundle, small_model(name), steps=0, seed=0))
    pictures = [s for s in steps if s.phase == "vision"]
    assert [int(s.used.sum()) for s in pictures] == [4, 1]
    assert [int(s.batch.count) for s in pictures] == [16, 4]
    rows = torch.cat([s.inputs["vision.rows"].flatten() for s in steps if s.phase == "prefill"])
    assert set(rows.tolist()) == {0, 1, 2, 3, 4}  # text, and each row of values
    values = [s.inputs["vision.values"] for s in steps if s.phase == "prefill"]
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(values))


def test_slots_and_pages_are_neither_in_order_nor_shared(bundle):
    steps = list(script(open_bundle(bundle), PRESET, steps=2, seed=0))
    table = max((s.batch.block_table for s in steps), key=lambda t: int((t > 0).sum()))
    pages = table.flatten().tolist()
    assert sorted(pages) == list(range(1, 9))
    assert pages != sorted(pages)
    assert {slot for s in steps for slot in s.batch.slots.tolist()} == {0, 1, 2}


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_prompts_come_whole_in_part_alone_late_and_not_at_all(rows):
    chunks = torch.stack(list(prompt_chunks(rows, 16, 60, longest=0))).t().tolist()
    assert chunks == [[[16, 9, 1], [0, 16, 1], [13, 0, 1]][r % 3] for r in range(rows)]


@pytest.mark.parametrize("chunk, room", [(1, 1), (2, 1), (1, 2), (16, 5), (16, 16), (512, 3)])
@pytest.mark.parametrize("longest", [0, 1, 9, 1000])
def test_prompts_fit_the_room_and_every_row_has_one(chunk, room, longest):
    chunks = torch.stack(list(prompt_chunks(4, chunk, room, longest)))
    assert int(chunks.max()) <= chunk and int(chunks.min()) >= 0
    assert all(1 <= total <= room for total in chunks.sum(0).tolist())
    assert all(int(c.sum()) for c in chunks)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("longest, room", [(73, 94), (73, 73), (200, 94), (40, 94)])
def test_the_first_row_goes_on_until_a_selection_leaves_something_out(rows, longest, room):
    chunks = torch.stack(list(prompt_chunks(rows, 16, room, longest)))
    assert int(chunks[:, 0].sum()) == min(longest, room)
    assert int(chunks.max()) == 16
    assert int(chunks[3:, 1:].sum()) == 0  # the others have what they have


@pytest.mark.parametrize("name", SPARSE)
def test_the_script_of_a_sparse_model_has_more_keys_than_are_selected(family_bundle, name):
    """In prefill, inside a chunk, and in decode; and rows with fewer keys beside it."""
    indexers = [layer.mixer.indexer for layer in small_model(name).layers if isinstance(layer.mixer, MlaConfig)]
    (top_k,) = {x.top_k for x in indexers if x is not None}
    steps = list(script(open_bundle(family_bundle(name)), small_model(name), steps=2, seed=0))
    for phase in ("prefill", "decode"):
        before, after = zip(*[
            (int((s.batch.lengths - s.batch.counts).max()), int(s.batch.lengths.max()))
            for s in steps
            if s.phase == phase
        ], strict=True)  # fmt: skip
        assert max(after) > top_k
        assert phase == "decode" or any(a < top_k < b for a, b in zip(before, after, strict=True))
    assert any(
        0 < int(s.batch.lengths.min()) < top_k < int(s.batch.lengths.max()) for s in steps if s.phase != "vision"
    )


def test_decode_steps_leave_each_row_empty_once(bundle):
    decode = [
        s.batch.counts.tolist() for s in script(open_bundle(bundle), PRESET, steps=4, seed=0) if s.phase == "decode"
    ]
    assert decode == [[0, 1], [1, 0], [1, 1], [0, 1]]


def test_a_row_holds_what_its_share_of_the_pages_holds():
    contract = {"tokens_per_sequence": 64, "pages": 9, "page_tokens": 16}
    assert [row_capacity(contract, rows) for rows in (1, 2, 3, 8)] == [64, 64, 32, 16]


@pytest.mark.parametrize("steps", [-1, 64, 1000])
def test_more_steps_than_a_row_holds_are_refused_with_the_most(bundle, steps):
    with pytest.raises(VerifyError, match=rf"--steps {steps}: .* takes 0 to 63; a row holds 64 tokens"):
        verify_bundle(bundle, steps=steps)


def test_a_row_can_be_filled_to_its_last_token(compile_small, tmp_path):
    compile_small(tmp_path / "b", batch=1, chunk=16, max_len=16)
    assert verify_bundle(tmp_path / "b", steps=15, modes=("exact",)).passed


def test_a_bundle_that_only_decodes_needs_a_step(compile_small, tmp_path):
    compile_small(tmp_path / "b", phases=("decode",))
    with pytest.raises(VerifyError, match=r"--steps 0: .* takes 1 to 63"):
        verify_bundle(tmp_path / "b", steps=0)


# ---- what fails ------------------------------------------------------------------------------------------------------


def row(error, tolerance=1e-12):
    return Row(mode="exact", what="logits", count=1, error=error, tolerance=tolerance, where="logits, step 0 (decode)")


@pytest.mark.parametrize("error", [math.nan, math.inf, 1.1e-12, 1.0])
def test_an_error_over_the_tolerance_fails_and_nan_is_one(error):
    found = Report([row(0.0), row(error)], steps=1, provenance={})
    assert not found.passed
    assert "DIFFERS" in found.text()
    assert found.summary.startswith("the graphs differ from the model: logits, step 0 (decode) (exact: ")
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["passed"] is False


def test_a_report_of_nothing_is_no_success():
    found = Report([], steps=0, provenance={})
    assert not found.passed
    assert found.summary == "nothing was compared"


def test_nan_is_the_worst_of_all_whenever_it_comes():
    for values in ([math.nan, 1.0], [1.0, math.nan], [math.nan, math.inf]):
        comparison = Comparison("exact", EXACT_TOLERANCE, largest)
        for value in values:
            comparison.add("logits", f"of {value}", torch.tensor([value]), torch.tensor([1.0], dtype=torch.float64))
        (worst,) = comparison.worst.values()
        assert math.isnan(worst.error) and not worst.passed
        assert worst.count == 2


@pytest.mark.parametrize("measure", [largest, norm])
@pytest.mark.parametrize(
    "mine, theirs, error",
    [
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1.0, 0.0], [0.0, 0.0], math.inf),
        ([math.nan, 0.0], [0.0, 0.0], math.inf),
        ([math.nan, 1.0], [1.0, 1.0], math.nan),
        ([1.0, 1.0], [math.nan, 1.0], math.nan),
        ([math.nan, 1.0], [math.nan, 1.0], math.nan),
        ([math.inf, 1.0], [math.inf, 1.0], math.nan),
        ([3.0, 0.0], [4.0, 0.0], 0.25),
    ],
)
def test_differences_are_relative_to_the_model(measure, mine, theirs, error):
    found = measure(torch.tensor(mine), torch.tensor(theirs, dtype=torch.float64))
    assert found == error or (math.isnan(found) and math.isnan(error))


def test_tensors_of_unequal_size_cannot_be_compared():
    comparison = Comparison("exact", EXACT_TOLERANCE, largest)
    with pytest.raises(VerifyError, match=r"logits at step 0: the graph gives \[2\], the model \[3\]"):
        comparison.add("logits", "step 0", torch.ones(2), torch.ones(3))


def test_nan_in_a_graph_fails_the_verification(bundle, monkeypatch):
    step = verify.GraphSide.step

    def broken(self, *args, **kwargs):
        made = step(self, *args, **kwargs)
        return made * torch.nan if self.mode == "exact" else made

    monkeypatch.setattr(verify.GraphSide, "step", broken)
    found = verify_bundle(bundle, steps=0)
    assert not found.passed
    assert [(r.mode, r.what) for r in found.rows if not r.passed] == [("exact", "logits")]


def test_the_tolerance_of_native_dtypes_grows_with_the_root_of_the_layers(small):
    three = native_tolerance(load_config(small))
    assert three == pytest.approx(2**-7 * math.sqrt(48))
    assert native_tolerance(PRESET) == pytest.approx(3 * three)


def test_weights_of_another_seed_are_another_model_and_the_graphs_equal_that_too(bundle, tmp_path):
    """The bundle holds no weights: it is verified with whatever checkpoint of its model is given."""
    other = make_fixture(PRESET, tmp_path / "other", layers=3, seed=5).folder
    assert verify_bundle(bundle, checkpoint=other, steps=1, modes=("exact",)).passed


# ---- the checkpoint --------------------------------------------------------------------------------------------------


def test_without_a_checkpoint_it_says_how_to_get_one(copy):
    (copy / LOCAL).unlink()
    with pytest.raises(BundleError) as error:
        verify_bundle(copy)
    assert "compiled from a config alone, so there are no weights to run it with" in str(error.value)
    assert "--checkpoint DIR" in str(error.value)
    assert "kimi-graph fixture small -o DIR" in str(error.value)


def test_a_checkpoint_that_moved_is_explained(copy, small, tmp_path):
    (copy / LOCAL).write_bytes(dump({"checkpoint": str(tmp_path / "gone")}))
    with pytest.raises(
        BundleError, match=r"local\.json: the checkpoint .*gone is not there any more; .* --checkpoint DIR"
    ):
        verify_bundle(copy)
    assert verify_bundle(copy, checkpoint=small, steps=0, modes=("exact",)).passed


def test_a_damaged_local_json_is_explained(copy):
    for text in ("{", "{}", "[]", "null", '{"checkpoint": 3}', "[" * 100_000):
        (copy / LOCAL).write_text(text)
        with pytest.raises(BundleError, match=r"local\.json: does not say .*; delete it, and give --checkpoint DIR\."):
            verify_bundle(copy)


def test_a_checkpoint_of_another_model_is_refused(bundle, tmp_path):
    other = make_fixture(PRESET, tmp_path / "other", layers=2).folder
    with pytest.raises(BundleError, match=r"made for another model than .*: there the number of layers is 2, was 3"):
        verify_bundle(bundle, checkpoint=other)


def test_a_folder_without_weights_is_refused(bundle, tmp_path):
    with pytest.raises(CheckpointError, match=r"found neither model\.safetensors\.index\.json nor model\.safetensors"):
        verify_bundle(bundle, checkpoint=tmp_path)


# ---- what a bundle says of itself ------------------------------------------------------------------------------------


def changed(folder, change):
    manifest = read_json(folder / MANIFEST)
    change(manifest)
    (folder / MANIFEST).write_bytes(dump(manifest))


CLAIMS = {
    "another model": (
        lambda m: m["model"]["config"].update(rms_norm_eps=1e-3),
        "the fingerprint .*; the bundle was made for another model",
    ),
    "states in another order": (
        lambda m: m["state"]["states"].reverse(),
        r"state\.states\.0\.\w+ is .*; the graphs and the model make it",
    ),
    "another page": (lambda m: m["state"].update(page_tokens=32), r"state\.states\.\d+\.shape\.1 is 16; .* make it 32"),
    "another dtype": (
        lambda m: m["state"]["states"][0].update(dtype="bfloat16"),
        r'state\.states\.0\.dtype is "bfloat16"; the graphs and the model make it "float32"',
    ),
    "another chunk": (
        lambda m: m["graphs"][0].update(tokens=8),
        r'graphs\.0\.name is "prefill_b2_t16"; .* "prefill_b2_t8"',
    ),
    "weights in another order": (
        lambda m: m["graphs"][1]["weights"].reverse(),
        r"graphs\.1\.weights\.0 is .*; the graphs and the model make it",
    ),
    "a state more": (
        lambda m: m["state"]["states"].append(dict(m["state"]["states"][0])),
        r"state\.states is .*make it",
    ),
    "a rule less": (lambda m: m["state"]["rules"].pop(), r"state\.rules is"),
}


@pytest.mark.parametrize("what", CLAIMS)
def test_a_manifest_that_says_something_else_is_refused_with_the_key(copy, what):
    change, message = CLAIMS[what]
    changed(copy, change)
    with pytest.raises(KimiGraphError, match=message):
        verify_bundle(copy, steps=0, modes=("exact",))


def test_a_small_model_runs_on_one_thread_and_the_caller_keeps_his():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with enough_threads(SMALL - 1):
            assert torch.get_num_threads() == 1
        with enough_threads(SMALL):
            assert torch.get_num_threads() == 2
        with pytest.raises(ZeroDivisionError), enough_threads(1):
            raise ZeroDivisionError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
