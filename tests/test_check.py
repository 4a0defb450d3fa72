"""`kimi-graph check` says whether a checkpoint holds a model, from headers or from names alone."""

import json
import re
import shutil

import pytest
from typer.testing import CliRunner

from kimi_graph import cli
from kimi_graph.check import check_checkpoint
from kimi_graph.checkpoint import index_of, pieces_of, released_formats, split
from kimi_graph.errors import CheckpointError
from kimi_graph.fixture import make_fixture
from kimi_graph.headers import INDEX
from kimi_graph.models import model_specs
from kimi_graph.read_config import load_config


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A small K3, quantised as released. Not to be written to."""
    return make_fixture(load_config("kimi-k3"), tmp_path_factory.mktemp("check") / "tiny", layers=2, quantised=True)


@pytest.fixture
def copy(tiny, tmp_path):
    return shutil.copytree(tiny.folder, tmp_path / "copy")


def run(*arguments):
    return CliRunner().invoke(cli.app, ["check", *map(str, arguments)], prog_name="kimi-graph")


def test_a_checkpoint_that_holds_its_model_is_shown_part_by_part(tiny):
    report = check_checkpoint(tiny.folder, tiny.config)
    assert report.passed
    assert sum(c.tensors for c in report.components) == tiny.tensors
    parts = {c.name: c for c in report.components}
    assert list(parts) == [
        "embed", "kda", "mla", "dense", "router", "latent", "experts", "shared experts", "residuals", "norms", "head",
        "vision", "projector",
    ]  # fmt: skip
    assert dict(parts["experts"].schemes) == {"mxfp4": 48}
    assert parts["experts"].tensors == 96
    assert parts["kda"].schemes["F32"] > 0
    text = report.text()
    assert "routed_expert_down_proj: config says mxfp4, file has BF16: BF16 used (1 tensors)" in text  # case C3
    assert report.summary.endswith(f"{tiny.tensors} tensors, by headers of 4 files")


def test_the_command_ends_with_a_verdict_and_an_exit_code(tiny, copy):
    good = run(tiny.folder)
    assert good.exit_code == 0
    assert " holds tiny: " in good.stdout.splitlines()[-1]
    next(copy.glob("model-00001*")).unlink()
    bad = run(copy)
    assert bad.exit_code == 1
    fault = "1 of 4 files is not here: model-00001-of-00004.safetensors."
    assert (bad.stdout + bad.stderr).count(fault) == 1
    assert re.fullmatch(rf"error: .* does not hold .*: {fault}", bad.stderr.splitlines()[-1])


def test_json_holds_all_that_was_found(tiny):
    found = json.loads(run(tiny.folder, "--json").stdout)
    assert found["passed"] is True
    assert found["files"] == {"read": 4, "named": 4}
    assert {c["name"]: c["schemes"] for c in found["components"]}["experts"] == {"mxfp4": 48}
    assert found["missing"] == found["unexpected"] == found["shapes"] == found["dtypes"] == []
    assert len(found["weights_formats"]) == 12
    wrong = run(tiny.folder, "--model", "kimi-k2.5", "--json")
    assert wrong.exit_code == 1
    assert json.loads(wrong.stdout)["missing"]


def test_an_index_alone_is_enough(tiny, tmp_path):
    shutil.copy(tiny.folder / INDEX, tmp_path / INDEX)
    result = run(tmp_path / INDEX, "--model", tiny.folder)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1].split(" in ")[0].endswith("by names alone")
    size = json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"]
    assert f"the index says {size:,} bytes, as the model's tensors have." in result.stdout
    index = json.loads((tmp_path / INDEX).read_text())
    del index["weight_map"]["language_model.model.norm.weight"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert run(tmp_path / INDEX, "--model", tiny.folder).exit_code == 1


def test_a_folder_with_the_index_and_no_file_is_looked_at_by_names(copy):
    for file in copy.glob("*.safetensors"):
        file.unlink()
    result = run(copy)
    assert result.exit_code == 0
    assert "none of the 4 files is here: names were looked at, not dtypes and shapes." in result.stdout


def test_names_of_another_size_are_noted(copy, tiny):
    index = json.loads((copy / INDEX).read_text())
    index["metadata"]["total_size"] = 12
    (copy / INDEX).write_text(json.dumps(index))
    notes = check_checkpoint(copy / INDEX, tiny.config).notes
    assert len(notes) == 1
    assert notes[0].startswith("the index says 12 bytes, the model's tensors have ")


@pytest.mark.slow
def test_the_whole_of_kimi_k3_by_names(tmp_path):
    """497,220 names as released, and every number of the fact sheet."""
    config = load_config("kimi-k3")
    specs = model_specs(config)
    shards = split(pieces_of(specs, config.dtype, released_formats(config, specs)), 1 << 34)
    names = [f"model-{i:05}.safetensors" for i in range(len(shards))]
    (tmp_path / INDEX).write_text(json.dumps(index_of(names, shards)))
    report = check_checkpoint(tmp_path / INDEX, config)
    assert report.passed
    assert sum(c.tensors for c in report.components) == 497_220
    assert sum(c.bytes for c in report.components) == 1_560_860_324_864
    assert report.notes == ("the index says 1,560,860,324,864 bytes, as the model's tensors have.",)
    rows = {(c.name, c.soc): c for c in report.choices}
    assert rows["native", "950"].taken and not rows["native", "a3"].taken
    assert f"{rows['bf16', 'a3'].bytes / 1e12:.2f}" == "5.56"
    assert f"{rows['int8-g32', 'a3'].bytes / 1e12:.1f}" == "3.0"
    assert rows["int8-g32", "a3"].exact == "exact" and not rows["int8-g32", "a3"].taken


@pytest.mark.parametrize("name", ["native", "bf16", "int8-g32"])
def test_what_is_exact_loses_nothing(tiny, name):
    report = check_checkpoint(tiny.folder, tiny.config, name)
    assert report.loss is not None
    assert (report.loss.mean, report.loss.worst) == (0.0, 0.0)
    assert {c.name for c in report.choices} == {name}


def test_the_error_of_int4_is_measured_and_printed(tiny):
    result = run(tiny.folder, "--weights-format", "int4")
    assert result.exit_code == 0
    assert "int4 changes weights by " in result.stdout
    loss = check_checkpoint(tiny.folder, tiny.config, "int4").loss
    assert loss is not None
    assert 0.03 < loss.mean <= loss.worst < 0.2


def test_an_unknown_format_is_answered_with_the_known(tiny):
    result = run(tiny.folder, "--weights-format", "int3")
    assert result.exit_code == 2
    assert "native, bf16, int8-g32, int4" in result.stderr


def test_what_is_no_checkpoint_is_refused(tmp_path, tiny):
    with pytest.raises(CheckpointError, match="does not exist"):
        check_checkpoint(tmp_path / "nothing.json", tiny.config)
    with pytest.raises(CheckpointError, match="found neither"):
        check_checkpoint(tmp_path, tiny.config)
    assert run(tmp_path / "nothing").exit_code == 1


def test_an_export_of_msmodelslim_is_found_under_its_names(tmp_path, tiny):
    """Its weights and index are called quant_model_weights."""
    shutil.copytree(tiny.folder, tmp_path / "export")
    folder = tmp_path / "export"
    index = json.loads((folder / INDEX).read_text())
    for file in sorted(set(index["weight_map"].values())):
        (folder / file).rename(folder / file.replace("model-", "quant_model_weights-"))
    index["weight_map"] = {k: v.replace("model-", "quant_model_weights-") for k, v in index["weight_map"].items()}
    (folder / INDEX).unlink()
    (folder / "quant_model_weights.safetensors.index.json").write_text(json.dumps(index))
    assert check_checkpoint(folder, tiny.config).passed
