"""A bundle whose graphs have operators of this project holds what builds them, and says how."""

import json
import shutil

import pytest

from kimi_graph.compile.bundle import KERNELS, MANIFEST, open_bundle
from kimi_graph.compile.inspect import inspect_bundle
from kimi_graph.compile.lint import lint_bundle
from kimi_graph.compile.packages import own_types
from kimi_graph.compile.verify import verify_bundle
from kimi_graph.errors import BundleError, VerifyError
from kimi_graph.ops import kernel_project
from kimi_graph.ops.kernel_project import export_kernels, operators


@pytest.fixture
def copy(bundle, tmp_path):
    return shutil.copytree(bundle, tmp_path / "copy")


def change(folder, edit):
    manifest = json.loads((folder / MANIFEST).read_text())
    edit(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def fault(folder, host):
    (proof,) = [p for p in lint_bundle(folder, host.root).proofs if not p.passed]
    return f"{proof.name}: {proof.found}"


def test_the_project_in_a_bundle_is_that_which_is_exported_byte_by_byte(bundle, tmp_path):
    exported = export_kernels(tmp_path / "out").folder
    files = {p.relative_to(exported).as_posix(): p.read_bytes() for p in exported.rglob("*") if p.is_file()}
    inside = bundle / KERNELS
    assert {p.relative_to(inside).as_posix(): p.read_bytes() for p in inside.rglob("*") if p.is_file()} == files
    entry = open_bundle(bundle).manifest["kernels"]
    assert list(entry["files"]) == [f"{KERNELS}/{name}" for name in sorted(files)]
    types = {t for g in open_bundle(bundle).manifest["graphs"] for t in g["ops"]}
    assert set(own_types(types)) <= set(entry["operators"]) == set(operators())


def test_a_bundle_without_operators_of_ours_holds_no_project(compile_small, host, tmp_path):
    compile_small(tmp_path / "b", phases=("decode",), providers=("builtin", "composed"))
    assert not (tmp_path / "b" / KERNELS).exists() and open_bundle(tmp_path / "b").manifest["kernels"] is None
    (proof,) = [p for p in lint_bundle(tmp_path / "b", host.root).proofs if p.name == "kernels"]
    assert proof.passed and proof.found == "none"
    assert "cmake" not in inspect_bundle(tmp_path / "b").text()


def test_lint_says_what_the_project_builds(bundle, host):
    (proof,) = [p for p in lint_bundle(bundle, host.root).proofs if p.name == "kernels"]
    assert proof.passed and proof.found.endswith(f"files build {', '.join(operators())}")


def test_a_source_that_was_changed_is_named_by_lint_and_verify(copy, host):
    source = copy / KERNELS / "op_kernel/kda_step/kda_step.cpp"
    source.write_text(source.read_text() + "\n")
    assert "kda_step.cpp: SHA-256 is" in fault(copy, host)
    with pytest.raises(BundleError, match=r"kda_step\.cpp: SHA-256 is .* it was changed or damaged"):
        verify_bundle(copy, steps=1)


def test_a_source_that_is_missing_or_added_is_named(copy, host):
    tiling = copy / KERNELS / "op_host/kda_step/kda_step_tiling.cpp"
    text = tiling.read_text()
    tiling.unlink()
    assert "kda_step_tiling.cpp: SHA-256 is none" in fault(copy, host)
    tiling.write_text(text)
    (copy / KERNELS / "build").mkdir()
    (copy / KERNELS / "build" / "CMakeCache.txt").write_text("")
    assert "kernels/build/CMakeCache.txt: not in the manifest; a build of kernels/ goes elsewhere" in fault(copy, host)


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda m: m.update(kernels=None), "kernels is nothing; the graphs have"),
        (lambda m: m["kernels"]["operators"].remove("GatedRmsNorm"), "kernels has no operator GatedRmsNorm"),
        (lambda m: m["kernels"]["files"].update({"kernels/../manifest.json": "0" * 64}), "is no file of kernels/"),
    ],
    ids=["nothing", "an operator less", "a file elsewhere"],
)
def test_a_manifest_that_says_otherwise_is_refused(copy, edit, message):
    change(copy, edit)
    with pytest.raises(BundleError, match=message):
        verify_bundle(copy, steps=1)


def test_inspect_prints_the_commands_that_build_it_for_the_bundles_chip(bundle):
    text = inspect_bundle(bundle).text()
    for line in kernel_project.commands("ascend910_93", (bundle / KERNELS).as_posix()):
        assert f"  {line}\n" in text
    assert "-DASCEND_COMPUTE_UNIT=ascend910_93" in text


def test_the_twin_is_not_said_to_have_run_kernels_of_another_version(copy, monkeypatch, tmp_path):
    changed = {**kernel_project.project_files(), "op_kernel/kda_step/kda_step.cpp": b"// of tomorrow\n"}
    monkeypatch.setattr("kimi_graph.compile.verify.project_files", lambda: changed)
    with pytest.raises(VerifyError, match=r"kernels of this installation; .*kda_step\.cpp is of another"):
        verify_bundle(copy, steps=1, kernels=tmp_path)
