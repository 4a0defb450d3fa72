"""A bundle for another model, target, CANN release or mesh is refused, and the field is named."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from kimi_graph.cli import app
from kimi_graph.compile.bundle import open_bundle
from kimi_graph.compile.expect import Expected
from kimi_graph.compile.verify import verify_bundle
from kimi_graph.errors import BundleError, ConfigError, KimiGraphError
from kimi_graph.fixture import make_fixture
from kimi_graph.parallel import Mesh
from kimi_graph.read_config import load_config


@pytest.fixture(scope="module")
def on_mesh(compile_small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh") / "b"
    compile_small(folder, mesh=Mesh.parse("pp=3,tp=2"), cann="9.1", phases=("decode",))
    return folder


def test_what_a_bundle_is_for_is_accepted(bundle, small, on_mesh):
    said = Expected(model=str(small), target="a3", cann="9.2", mesh="none").check(open_bundle(bundle))
    assert said == f"model {small}, target a3, cann 9.2, mesh none"
    Expected(mesh="tp=2, pp=3", cann="9.1", target="a3").check(open_bundle(on_mesh))
    assert not Expected() and Expected(cann="9.2")


@pytest.mark.parametrize(
    "expected, words",
    [
        ({"target": "950dt"}, r"manifest\.json: target\.name is a3, expected 950dt; compile it again for that"),
        ({"cann": "9.2"}, r"target\.cann is 9\.1, expected 9\.2"),
        ({"mesh": "none"}, r"mesh is pp=3,tp=2, expected none"),
        ({"mesh": "pp=2,tp=2"}, r"mesh is pp=3,tp=2, expected pp=2,tp=2"),
        ({"model": "kimi-linear-48b"}, r"another model than kimi-linear-48b: there the number of layers is 27, was 3"),
        ({"model": "kimi-k3"}, "made for another model than kimi-k3"),
    ],
    ids=str,
)
def test_anything_else_is_refused_and_the_field_named(on_mesh, expected, words):
    with pytest.raises(BundleError, match=words):
        Expected(**expected).check(open_bundle(on_mesh))


@pytest.mark.parametrize("expected", [{"mesh": "qq=2"}, {"model": "kimi-k33"}], ids=str)
def test_what_cannot_be_expected_is_refused(on_mesh, expected):
    with pytest.raises(KimiGraphError, match=r"unknown axis|no preset, file or folder"):
        Expected(**expected).check(open_bundle(on_mesh))


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("rms_norm_eps", 1e-3, r"there norm_eps is 0\.001, was 1e-05 in the bundle"),
        ("num_experts_per_token", 2, r"there layers\.1\.ffn\.top_k is 2, was \d+ in the bundle"),
        ("model_type", "kimi_linears", "model_type"),
    ],
)
def test_a_checkpoint_whose_config_means_another_model_is_refused_before_anything_is_run(
    bundle, small, tmp_path, key, value, words
):
    """Of the same shapes: only the config tells."""
    shutil.copytree(small, tmp_path / "other")
    config = json.loads((small / "config.json").read_bytes())
    assert key in config
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises((BundleError, ConfigError), match=words):
        verify_bundle(bundle, checkpoint=tmp_path / "other", steps=0)


def test_other_weights_of_the_model_and_other_token_ids_are_taken(bundle, tmp_path):
    other = make_fixture(load_config("kimi-linear-48b"), tmp_path / "other", layers=3, seed=5).folder
    config = json.loads((other / "config.json").read_bytes()) | {"eos_token_id": 7}
    (other / "config.json").write_text(json.dumps(config))
    assert verify_bundle(bundle, checkpoint=other, steps=0, modes=("native",)).passed


def test_a_checkpoint_of_another_size_is_refused_by_its_config(bundle, tmp_path):
    other = make_fixture(load_config("kimi-linear-48b"), tmp_path / "other", layers=4).folder
    with pytest.raises(BundleError, match=r"another model than .*other: there the number of layers is 4, was 3"):
        verify_bundle(bundle, checkpoint=other)


def test_lint_says_what_it_was_made_for_or_which_field_differs(on_mesh, host):
    arguments = [
        "lint",
        str(on_mesh),
        "--cache-dir",
        str(host.root.parents[1]),
        "--target",
        "a3",
        "--mesh",
        "pp=3,tp=2",
    ]
    good = CliRunner().invoke(app, [*arguments, "--cann", "9.1"])
    assert good.exit_code == 0, good.output
    assert "ok     made for     target a3, cann 9.1, mesh pp=3,tp=2" in good.stdout
    bad = CliRunner().invoke(app, [*arguments, "--cann", "8.5"])
    assert bad.exit_code == 1
    assert "target.cann is 9.1, expected 8.5" in bad.stderr
