"""diff names what changed from one bundle to another, and whether it matters."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kimi_graph.cli import app
from kimi_graph.compile import air
from kimi_graph.compile.bundle import LOCAL, MANIFEST, SOURCES, WEIGHTS, dump, open_bundle
from kimi_graph.compile.diff import diff_bundles
from kimi_graph.errors import BundleError
from kimi_graph.fixture import make_fixture
from kimi_graph.parallel import Mesh
from kimi_graph.read_config import load_config


@pytest.fixture
def copy(bundle, tmp_path):
    return Path(shutil.copytree(bundle, tmp_path / "copy"))


def change(folder, edit):
    """Change a manifest in place."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    edit(manifest)
    (folder / MANIFEST).write_bytes(dump(manifest))


def kinds(found):
    return {c.kind for c in found.changes}, {c.kind for c in found.changes if c.matters}


def test_a_bundle_is_the_same_as_itself_moved_whatever_its_machine_knows(bundle, copy):
    (copy / LOCAL).unlink()
    found = diff_bundles(bundle, copy)
    assert found.same
    assert found.summary == f"same: {bundle} and {copy} hold the same bytes"
    assert found.to_json() == {"same": True, "matters": False, "changes": []}


def test_versions_and_source_lines_do_not_matter(bundle, copy):
    change(copy, lambda m: m["made_by"].update(torch="2.14.0"))
    (copy / SOURCES).write_text("{}\n")
    found = diff_bundles(bundle, copy)
    assert kinds(found) == ({"versions", "notes"}, set())
    assert found.summary.startswith("they differ, in nothing that matters")
    assert 'versions  torch is "2.14.0", was ' in found.text()
    assert "does not matter" in found.text()


def test_another_chunk_is_another_graph_for_the_same_weights_and_states(compile_small, bundle, tmp_path):
    compile_small(tmp_path / "b", chunk=32)
    found = diff_bundles(bundle, tmp_path / "b")
    assert kinds(found)[1] == {"graphs"}
    assert {c.what for c in found.changes if c.kind == "graphs"} == {"prefill_b2_t16 is gone", "prefill_b2_t32 is new"}


def test_a_changed_node_is_named_with_what_changed(bundle, copy):
    file = copy / "graphs" / "decode_b2.air"
    model = air.read(file)
    node = next(op for op in model.graph[0].op if op.type == "RmsNorm")
    node.attr["epsilon"].f = 0.5
    data = air.to_bytes(model)
    file.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    change(copy, lambda m: next(g for g in m["graphs"] if g["phase"] == "decode").update(sha256=digest))
    (found,) = diff_bundles(bundle, copy).changes
    assert found.kind == "graphs" and "built again" in found.matters
    assert found.what.startswith(f"decode_b2: {node.name} (RmsNorm): epsilon is 0.5, was 1e-05"[:40])


def test_a_changed_recipe_is_named_and_weights_made_ahead_are_void(bundle, copy):
    plan = json.loads((copy / WEIGHTS).read_bytes())
    plan["weights"]["p.layers.0.kda.query"]["steps"] = [["neg"]]
    (copy / WEIGHTS).write_bytes(dump(plan))
    digest = hashlib.sha256(dump(plan)).hexdigest()
    change(copy, lambda m: m["weights"].update(sha256=digest))
    (found,) = diff_bundles(bundle, copy).changes
    assert found.what.startswith('p.layers.0.kda.query.steps is [["neg"]], was ')
    assert found.matters == "weights that were made ahead have to be made again"


def test_other_targets_meshes_sizes_and_providers_are_named(compile_small, bundle, tmp_path):
    compile_small(tmp_path / "b", target="950dt", cann="9.1", mesh=Mesh.parse("tp=2"), page=32)
    found = diff_bundles(bundle, tmp_path / "b")
    said = [c.what for c in found.changes]
    assert {'name is "950dt", was "a3"', 'cann is "9.1", was "9.2"', "page_tokens is 32, was 16"} <= set(said)
    assert any(what.startswith('text is "tp=2", was not there') for what in said)
    assert kinds(found)[1] >= {"target", "mesh", "state", "weights"}
    compile_small(tmp_path / "c", providers=("builtin", "composed"))
    found = diff_bundles(bundle, tmp_path / "c")
    assert kinds(found)[1] == {"target", "graphs", "weights", "kernels"}
    short = next(c.what for c in found.changes if "short convolution is" in c.what)
    assert 'of composed", was "ShortConv of own"' in short
    assert any(" nodes are new: " in c.what for c in found.changes)


def test_another_model_is_named_by_its_fields(compile_small, bundle, tmp_path):
    config = load_config("kimi-linear-48b")
    other = make_fixture(config, tmp_path / "other", layers=4).folder
    compile_small(tmp_path / "b", model=other, checkpoint=other)
    found = diff_bundles(bundle, tmp_path / "b")
    assert found.changes[0].what == "the number of layers is 4, was 3"
    assert found.changes[0].matters == "it is another model"


def test_what_is_no_bundle_or_damaged_is_refused(bundle, copy, tmp_path):
    with pytest.raises(BundleError, match="a bundle is a folder written by"):
        diff_bundles(bundle, tmp_path)
    (copy / WEIGHTS).write_text("{}")
    with pytest.raises(BundleError, match=r"weights\.json: SHA-256 is"):
        diff_bundles(bundle, copy)


def test_a_bundle_whose_files_are_not_those_of_its_manifest_is_not_the_same(bundle, copy):
    """The manifest's hashes are what it should hold; a flipped byte or a missing graph is neither."""
    graph = copy / open_bundle(copy).manifest["graphs"][-1]["file"]
    data = graph.read_bytes()
    graph.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for pair in ((bundle, copy), (copy, bundle)):
        with pytest.raises(BundleError, match=rf"{graph.name}: SHA-256 is .* it was changed or damaged"):
            diff_bundles(*pair)
    graph.unlink()
    with pytest.raises(BundleError, match=rf"{graph.name}: .*the bundle is incomplete"):
        diff_bundles(bundle, copy)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without named pipes")
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(bundle, copy):
    graph = copy / open_bundle(copy).manifest["graphs"][0]["file"]
    graph.unlink()
    os.mkfifo(graph)
    with pytest.raises(BundleError, match=f"{graph.name}: is neither a file nor a folder"):
        diff_bundles(bundle, copy)


def test_the_exit_code_says_whether_anything_differs(bundle, copy):
    same = CliRunner().invoke(app, ["diff", str(bundle), str(copy)])
    assert (same.exit_code, same.stderr) == (0, "")
    change(copy, lambda m: m["made_by"].update(torch="2.14.0"))
    differs = CliRunner().invoke(app, ["diff", str(bundle), str(copy), "--json"])
    found = json.loads(differs.stdout)
    assert (differs.exit_code, found["same"], found["matters"]) == (1, False, False)
    assert [c["kind"] for c in found["changes"]] == ["versions"]
    assert open_bundle(copy).manifest["made_by"]["torch"] == "2.14.0"
