"""Whole bundles of other providers: what is in them, what the manifest says, and that they are the model."""

import json
from pathlib import Path

import pytest

from kimi_graph.compile import air
from kimi_graph.compile.bundle import MANIFEST, open_bundle
from kimi_graph.compile.inspect import inspect_bundle
from kimi_graph.compile.manifest import check_claims
from kimi_graph.compile.prototype_rows import ROWS
from kimi_graph.compile.verify import bundle_config, verify_bundle
from kimi_graph.errors import BundleError, CompileError

CANN_ALONE = ("builtin", "composed")
VLLM_ASCEND = ("builtin", "vllm-ascend", "composed")


@pytest.fixture(scope="module", params=[("9.2", CANN_ALONE), ("9.1", VLLM_ASCEND)], ids=lambda p: "-".join(p[1]))
def other(request, compile_small, tmp_path_factory) -> Path:
    """A bundle without operators of ours: of CANN alone, or with those of vllm-ascend's package."""
    folder = tmp_path_factory.mktemp("providers") / "b"
    compile_small(folder, cann=request.param[0], providers=request.param[1])
    return folder


def types(folder: Path) -> set[str]:
    return {t for g in open_bundle(folder).manifest["graphs"] for t in g["ops"]}


@pytest.mark.slow
def test_a_bundle_without_operators_of_ours_is_the_model(other):
    """Prefill in chunks that are no multiple of the composition's, and decode."""
    assert not [t for t in types(other) if t in ROWS and ROWS[t].provider == "own"]
    report = verify_bundle(other, steps=3)
    assert report.passed, report.text()


def test_the_manifest_says_whose_operators_were_asked_for_and_which_package_is_needed(other):
    m = open_bundle(other).manifest
    package = [{"provider": "vllm-ascend", "operators": ["RecurrentKda"], "must_not_replace": ["MoeGatingTopK"]}]
    theirs = "vllm-ascend" in m["target"]["providers"]
    assert m["packages"] == (package if theirs else [])
    assert ("RecurrentKda" in types(other)) == theirs == any("RecurrentKda" in line for line in m["unproved"])
    assert not any("operators of this project" in line for line in m["unproved"])
    shown = [line for line in inspect_bundle(other).text().splitlines() if line.startswith("package")]
    assert len(shown) == len(m["packages"]) and all("RecurrentKda" in line for line in shown)
    used = {c["provider"] for c in m["choices"]}
    assert used == ({"builtin", "vllm-ascend", "composed"} if theirs else {"builtin", "composed"})


PACKAGE = {"provider": "own", "operators": ["SituMulQuant"], "must_not_replace": []}  # that no graph has


@pytest.mark.parametrize("key, value", [("packages", [PACKAGE]), ("target", "vllm")])
def test_a_manifest_that_names_another_package_or_provider_is_refused(other, tmp_path, key, value):
    opened = open_bundle(other)
    changed = json.loads((other / MANIFEST).read_text())
    if key == "target":
        changed["target"]["providers"] = ["builtin", value]
    else:
        changed[key] = value
    graphs = {g["name"]: opened.graph_bytes(g) for g in opened.manifest["graphs"]}
    models = {name: air.from_bytes(data, name) for name, data in graphs.items()}
    with pytest.raises(BundleError, match=key):
        check_claims(type(opened)(opened.folder, changed, opened.weights), bundle_config(opened), models)


# ---- --avoid ---------------------------------------------------------------------------------------------------------


def test_an_operator_is_replaced_without_code(compile_small, tmp_path):
    """By who comes next, or by who is named; the rest stays, and the bundle is still the model."""
    compile_small(tmp_path / "usual", phases=("decode",))
    compile_small(tmp_path / "next", phases=("decode",), avoid=("RecurrentGatedDeltaRule", "GatedRmsNorm"))
    compile_small(tmp_path / "named", phases=("decode",), avoid=("RecurrentGatedDeltaRule=own",))
    before = types(tmp_path / "usual")
    assert {"RecurrentGatedDeltaRule", "GatedRmsNorm", "ShortConv"} <= before
    after = types(tmp_path / "next")
    assert not after & {"RecurrentGatedDeltaRule", "GatedRmsNorm", "KdaStep"}
    assert "ShortConv" in after
    assert "KdaStep" in types(tmp_path / "named")
    manifest = open_bundle(tmp_path / "named").manifest
    assert manifest["target"]["avoid"] == ["RecurrentGatedDeltaRule=own"]
    report = verify_bundle(tmp_path / "next", steps=2)
    assert report.passed, report.text()


def test_an_operator_that_nobody_replaces_is_said_to_be_so(compile_small, tmp_path):
    with pytest.raises(CompileError, match=r"--avoid MoeGatingTopK: \d+ nodes of the graphs are it, and nobody else"):
        compile_small(tmp_path / "b", phases=("decode",), avoid=("MoeGatingTopK",))
    with pytest.raises(CompileError, match="--avoid: operator 'KdaStop' is not known; the nearest is 'KdaStep'"):
        compile_small(tmp_path / "b", avoid=("KdaStop",))
    with pytest.raises(CompileError, match="--avoid KdaStep: provider 'vllm-ascend' is not known; the nearest is"):
        compile_small(tmp_path / "b", avoid=("KdaStep=vllm-ascend",))
    with pytest.raises(CompileError, match="an operator is named twice; name each once"):
        compile_small(tmp_path / "b", avoid=("KdaStep", "KdaStep=own"))
    assert not (tmp_path / "b").exists()
