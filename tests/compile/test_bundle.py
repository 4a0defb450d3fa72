"""A bundle: a folder that is whole or not there, and that notices damage."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kimi_graph.cli import app
from kimi_graph.compile.bundle import (
    GRAPHS,
    MANIFEST,
    WEIGHTS,
    check_place,
    dump,
    fetch_checkpoint,
    file_hash,
    open_bundle,
    read_json,
    writing,
)
from kimi_graph.errors import BundleError


@pytest.fixture
def copy(bundle, tmp_path):
    """A bundle that may be changed."""
    return Path(shutil.copytree(bundle, tmp_path / "bundle"))


def test_a_bundle_opens_with_its_manifest_and_plan(bundle):
    opened = open_bundle(str(bundle))
    assert opened.manifest["model"]["name"] == "small"
    assert opened.graph("prefill")["name"] == "prefill_b2_t16"
    assert opened.graph("decode_b2") is opened.graph("decode")
    assert "p.layers.0.kda.query" in opened.weights["weights"]


def test_a_phase_that_is_not_there_is_named_with_those_that_are(bundle):
    words = r"no graph of phase 'train'; its phases are prefill, decode, its graphs prefill_b2_t16, decode_b2\."
    with pytest.raises(BundleError, match=words):
        open_bundle(bundle).graph("train")


def test_what_is_no_bundle_is_refused(tmp_path):
    with pytest.raises(BundleError, match=r"no manifest\.json; a bundle is a folder written by `kimi-graph compile`"):
        open_bundle(tmp_path)
    with pytest.raises(BundleError, match="a bundle is a folder"):
        open_bundle(tmp_path / "nothing")


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "not JSON"),
        ("[]", r"the top is \[\]; expected an object\."),
        ("null", r"the top is null; expected an object\."),
        ("{}", "no entry 'format'; the file was changed or damaged"),
        ('{"format": 1}', "bundle format 1; this version reads format 4"),
        ('{"format": null}', "bundle format null; this version reads format 4"),
        ('{"format": 4}', "no entry 'made_by'; the file was changed or damaged"),
        ("\x00\xff", "not JSON"),
        ("[" * 100_000, "its brackets are nested thousands deep"),
        ("1" * 5_000, "a number in it has thousands of digits"),
    ],
)
def test_a_damaged_manifest_is_refused(copy, text, message):
    (copy / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(BundleError, match=message):
        open_bundle(copy)


def test_a_changed_weight_plan_is_refused_with_its_file(copy):
    data = (copy / WEIGHTS).read_bytes()
    (copy / WEIGHTS).write_bytes(data.replace(b"q_proj", b"k_proj", 1))
    with pytest.raises(BundleError, match=r"weights\.json: SHA-256 is \w{16}\.\.\., the manifest says"):
        open_bundle(copy)


@pytest.mark.parametrize("at", [0, 1000, -1])
def test_a_flipped_byte_in_a_graph_is_refused_with_its_file(copy, at):
    opened = open_bundle(copy)
    file = copy / opened.graph("decode")["file"]
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(BundleError, match=r"graphs/decode_b2\.air: SHA-256 is"):
        opened.graph_bytes(opened.graph("decode"))
    opened.graph_bytes(opened.graph("prefill"))  # which is whole


@pytest.mark.parametrize("name", [WEIGHTS, f"{GRAPHS}/decode_b2.air"])
def test_a_missing_file_is_named(copy, name):
    (copy / name).unlink()
    with pytest.raises(BundleError, match=rf"{name}: .*; the bundle is incomplete"):
        read_all(copy)


@pytest.mark.parametrize("damage", [os.remove, lambda path: os.truncate(path, 100)], ids=["gone", "cut"])
def test_a_graph_that_is_not_whole_is_noticed_when_a_bundle_is_opened(copy, damage):
    """By commands too that read no graph, such as buckets and deploy --example: a size is looked at at once."""
    damage(copy / GRAPHS / "decode_b2.air")
    words = (
        r"graphs/decode_b2\.air: (.*; the bundle is incomplete|has 100 bytes, the manifest says [\d,]+; it was changed)"
    )
    for command in ("buckets", "inspect", "deploy"):
        result = CliRunner().invoke(app, [command, str(copy), *(["--example"] if command == "deploy" else [])])
        assert result.exit_code == 1 and re.search(words, result.stderr)
    with pytest.raises(BundleError, match=words):
        open_bundle(copy)


def read_all(folder):
    opened = open_bundle(folder)
    return [opened.graph_bytes(entry) for entry in opened.manifest["graphs"]]


@pytest.mark.parametrize("file", ["/etc/passwd", "../other/graphs/a.air", "graphs/../../a.air"])
def test_a_graph_outside_the_bundle_is_refused(copy, file):
    manifest = read_json(copy / MANIFEST)
    manifest["graphs"][0]["file"] = file
    (copy / MANIFEST).write_bytes(dump(manifest))
    with pytest.raises(BundleError, match=f"file '{file}' leaves the bundle"):
        open_bundle(copy)


def test_json_is_written_in_one_way():
    assert dump({"b": 1, "a": ["é"]}) == dump({"a": ["é"], "b": 1})
    assert json.loads(dump({"a": ["é"]})) == {"a": ["é"]}


def test_every_path_in_a_manifest_is_relative(bundle):
    for entry in read_json(bundle / MANIFEST)["graphs"]:
        assert not Path(entry["file"]).is_absolute()
        assert file_hash(bundle / entry["file"]) == entry["sha256"]


def test_a_new_folder_appears_whole(tmp_path):
    with writing(tmp_path / "deep" / "bundle") as work:
        (work / MANIFEST).write_text("{}")
        assert not (tmp_path / "deep" / "bundle").exists()
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["bundle"]


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    def write():
        with writing(tmp_path / "bundle") as work:
            (work / MANIFEST).write_text("{}")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_and_a_bundle_may_be_replaced(copy, tmp_path):
    (tmp_path / "empty").mkdir()
    for place in (copy, tmp_path / "empty", tmp_path / "new"):
        check_place(place)


@pytest.mark.parametrize("what", ["a file", "a folder of files", "a folder of folders"])
def test_nothing_else_is_replaced(tmp_path, what):
    place = tmp_path / "place"
    if what == "a file":
        place.write_text("mine")
    else:
        (place / "inner").mkdir(parents=True)
        if what == "a folder of files":
            (place / "mine").write_text("mine")
    with pytest.raises(BundleError, match="exists and is not a bundle; choose another folder"), writing(place):
        pass
    assert place.exists()


def test_files_that_no_bundle_has_are_not_thrown_away(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("manifest.json", "weights.json", "notes.txt"):
        (tmp_path / "b" / name).write_text("{}")
    with pytest.raises(BundleError, match=r"holds notes\.txt, which no bundle has and which would be lost"):
        check_place(tmp_path / "b")
    with pytest.raises(BundleError, match="lies inside the bundle"):
        check_place(tmp_path / "b" / "inner")
    (tmp_path / "b" / "notes.txt").unlink()
    check_place(tmp_path / "b")


def test_the_checkpoint_is_fetched_while_the_program_starts_where_weights_are_to_be_written(tmp_path, monkeypatch):
    asked, folder, source = [], tmp_path / "bundle", tmp_path / "source"

    def ask(paths, most):
        asked.append((list(paths), most > 0))

    monkeypatch.setattr("kimi_graph.compile.bundle.fetch_ahead", ask)
    folder.mkdir()
    source.mkdir()
    shards = [source / "a.safetensors", source / "b.safetensors"]
    for file in shards:
        file.touch()
    for text in (None, "[]", "{}", "{", '{"checkpoint": 3}'):
        if text is not None:
            (folder / "local.json").write_text(text)
        fetch_checkpoint(folder, None)
    assert asked == []
    (folder / "local.json").write_text(json.dumps({"checkpoint": str(source)}))
    fetch_checkpoint(folder, None)
    fetch_checkpoint(tmp_path / "other", source)
    assert asked == [(shards, True)] * 2
    (folder / "weights").mkdir()
    fetch_checkpoint(folder, None)
    assert len(asked) == 2
