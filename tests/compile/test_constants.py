"""`--weights constant`: the weights in one file, byte for byte what the plan makes of the checkpoint."""

import hashlib
import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch

from kimi_graph import tree
from kimi_graph.checkpoint import Checkpoint, load_params, load_tree
from kimi_graph.compile import air, constants, recipe
from kimi_graph.compile.bundle import CONSTANTS, MANIFEST, WEIGHTS, dump, open_bundle, read_json
from kimi_graph.compile.ge_proto import get_attr, set_attr
from kimi_graph.compile.verify import verify_bundle
from kimi_graph.errors import BundleError, CheckpointError, VerifyError
from kimi_graph.fixture import make_fixture
from kimi_graph.models import decoder
from kimi_graph.read_config import load_config


@pytest.fixture(scope="module")
def constant(compile_small, tmp_path_factory):
    """A bundle with its weights inside. Read only."""
    folder = tmp_path_factory.mktemp("constant") / "bundle"
    compile_small(folder, weights="constant")
    return folder


@pytest.fixture
def copy(constant, tmp_path):
    return Path(shutil.copytree(constant, tmp_path / "bundle"))


def graph(folder, phase="decode"):
    opened = open_bundle(folder)
    return air.from_bytes(opened.graph_bytes(opened.graph(phase)), phase)


def test_a_bundle_with_constants_is_the_model(constant):
    report = verify_bundle(constant, steps=1)
    assert report.passed, report.text()


def test_the_file_holds_what_the_plan_makes_of_the_checkpoint(constant, small):
    params = dict(tree.items(load_params(small, load_config(small))))
    data = (constant / CONSTANTS).read_bytes()
    for name, entry in open_bundle(constant).weights["weights"].items():
        made = recipe.apply(recipe.from_json(entry["steps"]), params[entry["parameter"]]).contiguous()
        expected = made.view(-1).view(torch.uint8).numpy().tobytes()
        assert data[entry["offset"] : entry["offset"] + entry["bytes"]] == expected, name


def test_weights_are_aligned_and_do_not_overlap(constant):
    plan = open_bundle(constant).weights["weights"]
    spans = sorted((e["offset"], e["offset"] + e["bytes"]) for e in plan.values())
    assert all(start % constants.ALIGNMENT == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert (constant / CONSTANTS).stat().st_size == constants.place(dict(plan))


def test_both_phases_point_into_one_file_and_have_no_weight_inputs(constant):
    places = []
    for phase in ("prefill", "decode"):
        ops = graph(constant, phase).graph[0].op
        assert not [op.name for op in ops if op.type == "Data" and op.name.startswith("p.")]
        found = {op.name: (get_attr(op, "offset"), get_attr(op, "length")) for op in ops if op.type == "FileConstant"}
        assert {get_attr(op, "location") for op in ops if op.type == "FileConstant"} == {CONSTANTS}
        places.append(found)
        inputs = [get_attr(op, "index") for op in ops if op.type in ("Data", "RefData")]
        assert inputs == list(range(len(inputs)))
    shared = places[0].keys() & places[1].keys()
    assert len(shared) > 50
    assert all(places[0][name] == places[1][name] for name in shared)


def test_writing_twice_gives_the_same_bytes(constant, small, tmp_path):  # case W10
    plan = open_bundle(constant).weights["weights"]
    constants.write(tmp_path / "again", plan, load_config(small), Checkpoint.open(small), lambda *_: None)
    assert (tmp_path / "again").read_bytes() == (constant / CONSTANTS).read_bytes()


def test_progress_ends_at_the_total(constant, small, tmp_path):
    seen = []
    plan = open_bundle(constant).weights["weights"]
    constants.write(
        tmp_path / "c",
        plan,
        load_config(small),
        Checkpoint.open(small),
        lambda what, done, total: seen.append((done, total)),
    )
    assert seen[-1] == (sum(e["bytes"] for e in plan.values()),) * 2
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_weight_that_is_not_contiguous_is_written_in_order(tmp_path):  # case A4
    """A permuted view of the checkpoint's tensor: its elements in the order of the result."""
    config = load_config("kimi-linear-48b")
    small = make_fixture(config, tmp_path / "ck", layers=2)
    plan = {"p.head": {"parameter": "head", "steps": [["permute", 1, 0], ["slice", 0, 1, 3]], "bytes": 2 * 512 * 2}}
    constants.place(plan)
    constants.write(tmp_path / "c", plan, small.config, Checkpoint.open(small.folder), lambda *_: None)
    head = load_tree(decoder.model_specs(small.config).head, Checkpoint.open(small.folder), torch.bfloat16)
    expected = head.t()[1:3].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    assert (tmp_path / "c").read_bytes() == expected


def test_a_checkpoint_that_lacks_a_tensor_gives_no_constants(small, tmp_path):  # case W11
    folder = Path(shutil.copytree(small, tmp_path / "ck"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = index["weight_map"]["lm_head.weight"]
    assert file
    del index["weight_map"]["lm_head.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        constants.write(tmp_path / "c", {}, load_config(folder), Checkpoint.open(folder), lambda *_: None)
    assert not (tmp_path / "c").exists()


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 12345, -1])
def test_a_flipped_byte_is_refused_with_the_file(copy, at):
    data = bytearray((copy / CONSTANTS).read_bytes())
    data[at] ^= 1
    (copy / CONSTANTS).write_bytes(data)
    with pytest.raises(BundleError, match=r"constants\.bin: SHA-256 is"):
        verify_bundle(copy)


def test_a_missing_file_is_refused(copy):
    (copy / CONSTANTS).unlink()
    with pytest.raises(BundleError, match=r"constants\.bin"):
        verify_bundle(copy)


def test_constants_of_another_checkpoint_differ_from_the_one_given(constant, tmp_path):
    """Same names and shapes, other numbers."""
    other = make_fixture(load_config("kimi-linear-48b"), tmp_path / "other", layers=3, seed=1).folder
    with pytest.raises(VerifyError, match=r"constant p\.\S+ is not what the weight plan makes of the checkpoint"):
        verify_bundle(constant, checkpoint=other)


def test_two_exchanged_weights_are_noticed(copy, small):
    """Offsets in plan and graphs alike, hashes made again: the graphs then read each other's weights."""
    plan = read_json(copy / WEIGHTS)
    a, b = "p.layers.0.kda.query", "p.layers.0.kda.key"
    weights = plan["weights"]
    weights[a]["offset"], weights[b]["offset"] = weights[b]["offset"], weights[a]["offset"]
    rewrite(copy, plan, lambda op: op.name in (a, b), lambda op: set_attr(op, "offset", weights[op.name]["offset"]))
    with pytest.raises(VerifyError, match=rf"constant ({a}|{b}) is not what the weight plan makes"):
        verify_bundle(copy)


def rewrite(folder, plan, chosen, change):
    """Change nodes of all graphs and write plan, graphs and manifest again with their hashes."""
    manifest = read_json(folder / MANIFEST)
    for entry in manifest["graphs"]:
        model = air.read(folder / entry["file"])
        for op in model.graph[0].op:
            if op.type == "FileConstant" and chosen(op):
                change(op)
        (folder / entry["file"]).write_bytes(air.to_bytes(model))
        entry["sha256"] = hashlib.sha256((folder / entry["file"]).read_bytes()).hexdigest()
        entry["bytes"] = (folder / entry["file"]).stat().st_size
    (folder / WEIGHTS).write_bytes(dump(plan))
    manifest["weights"]["sha256"] = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    (folder / MANIFEST).write_bytes(dump(manifest))


@pytest.mark.parametrize(
    "attribute, value, message",
    [
        (
            "location",
            "../elsewhere.bin",
            r"p\.head: FileConstant reads '\.\./elsewhere\.bin'; .* are in constants\.bin",
        ),
        ("offset", 1 << 40, r"p\.head: bytes 1,099,511,627,776 to .* are not in .*constants\.bin"),
        ("offset", -512, r"p\.head: bytes -512 to .* are not in"),
        ("length", 512, r"p\.head: FileConstant of 512 bytes does not hold torch\.bfloat16 \[512, 256\]"),
        ("shape", [1, 2], r"p\.head: FileConstant of .* does not hold"),
        ("offset", 2, r"p\.head: starts at byte 2 of .*constants\.bin; constants start at multiples of 512"),
        ("offset", None, r"p\.head: FileConstant with offset None, expected a number of bytes\."),
        ("offset", "0", r"p\.head: FileConstant with offset '0', expected a number of bytes\."),
        ("length", None, r"p\.head: FileConstant with length None, expected a number of bytes\."),
        ("location", None, r"p\.head: FileConstant with location None, expected the name of a file\."),
        ("shape", 512, r"p\.head: FileConstant with shape 512, expected a list of sizes\."),
        ("dtype", None, r"p\.head: FileConstant with dtype None, expected a dtype\."),
        ("dtype", 3, r"p\.head: FileConstant with dtype 3, expected a dtype\."),
    ],
)
def test_a_constant_that_points_elsewhere_is_refused(copy, attribute, value, message):
    model = graph(copy)
    for op in model.graph[0].op:
        if op.name == "p.head":
            op.attr.pop(attribute)
            if value is not None:
                set_attr(op, attribute, value)
    with pytest.raises(BundleError, match=message):
        constants.to_inputs(model, copy)


def test_a_constant_of_a_dtype_that_nobody_knows_is_refused(copy):
    model = graph(copy)
    for op in model.graph[0].op:
        if op.name == "p.head":
            op.attr["dtype"].dt = 9999
    with pytest.raises(BundleError, match=r"p\.head: FileConstant: .*9999"):
        constants.to_inputs(model, copy)


def test_reading_constants_gives_the_graph_its_inputs_back(constant):
    model = graph(constant)
    found = constants.to_inputs(model, constant)
    inputs = {op.name: get_attr(op, "index") for op in model.graph[0].op if op.type in ("Data", "RefData")}
    assert set(found) <= set(inputs)
    assert sorted(inputs.values()) == list(range(len(inputs)))
    assert found["p.head"].shape == (512, 256)


def test_a_placed_plan_is_in_the_order_of_names():
    plan = {name: {"bytes": 700} for name in ("b", "a")}
    assert constants.place(plan) == 2048
    assert (plan["a"]["offset"], plan["b"]["offset"]) == (0, 1024)
