"""The steps of a release day: what a fault makes of which of them, and what the small meshes are."""

import dataclasses
import json
import shutil
import types
from pathlib import Path

import pytest

from kimi_graph.check import check_checkpoint
from kimi_graph.compile.executor.registry import SEMANTICS
from kimi_graph.compile.targets import target
from kimi_graph.config import MlaConfig
from kimi_graph.day0.run import day0
from kimi_graph.day0.trial import MOST_RANKS, WORDS, fixture_sizes, small_choices
from kimi_graph.headers import INDEX
from kimi_graph.parallel import Mesh
from kimi_graph.plan.sieve import Choice
from kimi_graph.read_config import PRESETS
from tests.compile.family import FAMILY, small_model
from tests.day0.conftest import WHERE


def states(outcomes):
    return {name[1]: o.found.state for name, o in outcomes.items()}


def found(outcomes, step):
    return next(o.found for name, o in outcomes.items() if name[1] == step)


def all_text(f):
    return "\n".join([f.words, *f.lines])


@pytest.fixture
def copy(tiny, tmp_path):
    """A checkpoint that may be changed."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def changed_config(folder, change):
    file = folder / "config.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


# ---- what is there ---------------------------------------------------------------------------------------------------


def test_every_step_of_a_sound_checkpoint_passes(full):
    report, _ = full
    assert report.passed, report.text()
    assert {o.found.state for o in report.outcomes} == {"passed"}
    assert [o.name[1] for o in report.outcomes] == list(WORDS)
    assert report.summary == "tiny for a3: 10 of 10 steps passed"


@pytest.mark.heavy
@pytest.mark.parametrize("name", FAMILY)
def test_every_preset_passes_on_both_chips(name, tmp_path):
    report = day0(name, [target("a3"), target("950dt")], out=tmp_path / "r", **WHERE)
    assert report.passed, report.text()
    assert [o.title for o in report.of("skipped")] == ["audit"]
    assert all(report.found((t, "sharded bundle"))[0]["mesh"]["ranks"] > 1 for t in ("a3", "950dt"))


@pytest.mark.parametrize("kind", ["a preset", "a config.json", "a folder with a config alone"])
def test_without_a_checkpoint_the_audit_is_skipped_with_the_reason(attempt, tmp_path, kind):
    (tmp_path / "new").mkdir()
    file = shutil.copy(PRESETS / "kimi-linear-48b.json", tmp_path / "new" / "config.json")
    source = {"a preset": "kimi-linear-48b", "a config.json": file}.get(kind, file.parent)
    made = attempt(source, "audit")
    assert states(made) == {"config": "passed", "audit": "skipped"}
    assert ("has a config alone" if kind.startswith("a folder") else "is a config") in found(made, "audit").words
    assert "27 layers: 20 kda, 7 mla; 1 dense, 26 moe" in found(made, "config").words


@pytest.mark.parametrize("named", ["the folder", "the index"])
def test_an_index_alone_is_audited_by_its_names(attempt, copy, named):
    for file in copy.glob("*.safetensors"):
        file.unlink()
    made = attempt(copy if named == "the folder" else copy / INDEX, "audit")
    assert states(made) == {"config": "passed", "audit": "passed"}
    assert "by names alone" in found(made, "audit").words


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_an_unknown_key_fails_the_config_and_the_rest_is_of_the_model_without_it(attempt, copy):
    changed_config(copy, lambda data: data["linear_attn_config"].update(novelty=7))
    made = attempt(copy, "audit", "fixture")
    assert states(made) == {"config": "failed", "audit": "passed", "fixture": "passed"}
    said = all_text(found(made, "config"))
    assert "linear_attn_config.novelty: unknown key (its value is 7)" in said
    assert "all other steps are of the model without linear_attn_config.novelty" in said


def test_a_value_that_cannot_be_fails_the_config_and_all_else_is_skipped(attempt, copy):
    changed_config(copy, lambda data: data.update(hidden_size=-1))
    made = attempt(copy, *WORDS)
    assert states(made) == {**dict.fromkeys(WORDS, "skipped"), "config": "failed"}
    assert "hidden_size: found -1, expected an integer" in found(made, "config").words
    assert {o.found.words for o in made.values() if o.found.state == "skipped"} == {"needs config, which failed"}


def test_an_unknown_architecture_is_said_with_those_there_are(attempt, copy):
    changed_config(copy, lambda data: data.update(model_type="kimi_k4"))
    made = attempt(copy, "config")
    assert 'found "kimi_k4", expected one of kimi_linear, kimi_k3,' in found(made, "config").words


def test_a_file_that_is_no_config_is_said(attempt, tmp_path):
    (tmp_path / "config.json").write_text("{")
    made = attempt(tmp_path / "config.json", "config")
    assert "not JSON at line 1" in found(made, "config").words


def test_a_missing_tensor_fails_the_audit_with_its_name_and_nothing_else(attempt, copy):
    index = json.loads((copy / INDEX).read_text())
    name = sorted(index["weight_map"])[7]
    del index["weight_map"][name]
    (copy / INDEX).write_text(json.dumps(index))
    for file in copy.glob("*.safetensors"):
        file.unlink()
    made = attempt(copy, "audit", "fixture")
    assert states(made) == {"config": "passed", "audit": "failed", "fixture": "passed"}
    assert "1 missing" in found(made, "audit").words and name in all_text(found(made, "audit"))


def test_a_tensor_of_another_shape_fails_the_audit_with_both_shapes(attempt, copy):
    changed_config(copy, lambda data: data.update(vocab_size=data["vocab_size"] + 64))
    made = attempt(copy, "audit")
    assert states(made) == {"config": "passed", "audit": "failed"}
    assert "2 of a wrong shape" in found(made, "audit").words  # embedding and head
    assert "found [512, 256], expected [576, 256]" in all_text(found(made, "audit"))


def test_an_operator_that_nobody_else_serves_fails_what_needs_it_with_its_name(attempt, tiny):
    made = attempt(tiny, "operators", "graphs", "bundle", "verify", avoid=("MoeGatingTopK",), cann="9.2")
    got = states(made)
    assert (got["operators"], got["graphs"], got["bundle"], got["verify"]) == ("failed", "failed", "failed", "skipped")
    for step in ("operators", "graphs", "bundle"):
        assert "MoeGatingTopK" in all_text(found(made, step))


def test_an_operator_that_is_avoided_and_served_by_another_passes(attempt, tiny):
    made = attempt(tiny, "operators", avoid=("KdaChunk",))
    assert states(made)["operators"] == "passed"


def test_a_plan_that_cannot_be_leaves_operators_and_graphs_of_one_rank(attempt, tiny, monkeypatch):
    from kimi_graph.day0 import trial
    from kimi_graph.plan.search import PlanError

    def refuse(ask):
        raise PlanError("nothing fits")

    monkeypatch.setattr(trial, "make_plan", refuse)
    made = attempt(tiny, "plan", "graphs", "sharded bundle")
    assert states(made)["plan"] == "failed"
    assert "tiny for a3: prefill" in found(made, "graphs").words
    assert "on pp=2,tp=2 (4 ranks)" in found(made, "sharded bundle").words


def test_graphs_that_differ_from_the_model_fail_verify_with_tensor_and_node(attempt, tiny, monkeypatch):
    right = SEMANTICS["Sigmoid"]

    def wrong(op, x):
        return 1.01 * right.run(op, x=x)

    monkeypatch.setitem(SEMANTICS, "Sigmoid", dataclasses.replace(right, run=wrong))
    made = attempt(tiny, "verify")
    assert states(made) == {"config": "passed", "fixture": "passed", "bundle": "passed", "verify": "failed"}
    said = all_text(found(made, "verify"))
    assert "the graphs differ from the model: " in said and "Sigmoid" in said


def test_a_fault_of_ours_fails_its_step_and_not_the_next(attempt, tiny, monkeypatch):
    from kimi_graph.day0 import trial

    def broken(*args):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(trial, "check_checkpoint", broken)
    made = attempt(tiny, "audit", "fixture")
    assert states(made) == {"config": "passed", "audit": "failed", "fixture": "passed"}
    assert found(made, "audit").words.startswith("a fault of kimi-graph, not of the model: ZeroDivisionError")


# ---- small meshes ----------------------------------------------------------------------------------------------------


def plan_of(**choice):
    choice["mesh"] = Mesh.parse(choice["mesh"])
    return types.SimpleNamespace(best=types.SimpleNamespace(choice=Choice(**choice)))


@pytest.mark.parametrize(
    "mesh, small",
    [
        ("pp=3,tp=32", "pp=2,tp=2"),
        ("tp=16", "tp=2"),
        ("pp=5", "pp=2,tp=2"),
        ("tp=1", "tp=2"),
        ("dp=8,tp=4", "dp=2,tp=2"),
        ("dp=8,tp=4,ep=4", "dp=2,tp=2,ep=2"),
        ("cp=4,tp=8", "cp=2,tp=2"),
        ("pp=4,dp=4,cp=2,tp=8", "dp=2,cp=2,tp=2"),
    ],
)
def test_a_small_mesh_has_the_directions_of_the_plans(mesh, small):
    choices = small_choices(plan_of(mesh=mesh))
    assert choices[0].mesh == Mesh.parse(small)
    assert all(1 < c.mesh.world <= MOST_RANKS for c in choices)


def test_choices_of_a_plan_are_kept_and_copies_are_as_many_as_ranks_take():
    first = small_choices(plan_of(mesh="tp=32", copies=32, exchange=True, chunks=2))[0]
    assert str(first) == "tp=2 --exchange --moe-chunks 2 --redundant-experts 2"


@pytest.mark.parametrize("name", FAMILY)
def test_bundles_of_fixtures_hold_more_keys_than_are_selected_in_several_chunks(name):
    config = small_model(name)
    sizes = fixture_sizes(config, None)
    indexed = [x.mixer.indexer for x in config.layers if isinstance(x.mixer, MlaConfig) and x.mixer.indexer]
    assert all(sizes["max_len"] > x.top_k + 16 for x in indexed)
    assert sizes["max_len"] >= 4 * sizes["chunk"] and sizes["max_len"] % sizes["page"] == 0


def test_rows_are_enough_to_be_exchanged():
    choice = Choice(mesh=Mesh(data=2, tensor=2), exchange=True, chunks=2)
    assert fixture_sizes(small_model("glm-5"), choice)["batch"] == 8


def test_the_fixture_is_stored_as_the_model_is_released(attempt):
    made = attempt("kimi-k3", "fixture")
    fixture = found(made, "fixture").value
    assert "as released, in mxfp4" in found(made, "fixture").words
    parts = {c.name: c.schemes for c in check_checkpoint(fixture.folder, fixture.config).components}
    assert parts["experts"].keys() == {"mxfp4"} and "mxfp4" not in parts["kda"]
