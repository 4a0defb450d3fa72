"""Notebooks: they run, assert what they say, and show what is committed."""

import ast
import base64
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kimi_graph

ROOT = Path(kimi_graph.__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
NAMES = ["01_a_layer", "02_sparse_attention", "03_a_model", "04_a_mesh", "05_a_graph", "06_vision"]
COMMITTED_ON = "2.13."  # the torch of what is committed, and of continuous integration

pytestmark = [
    pytest.mark.notebooks,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="needs the repository, not a wheel"),
]


def cells(name, folder=FOLDER):
    return json.loads((folder / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]


def joined(text):
    return text if isinstance(text, str) else "".join(text)


def code(name):
    return [joined(cell["source"]) for cell in cells(name) if cell["cell_type"] == "code"]


def outputs(name, folder=FOLDER):
    """Of every cell: (kind, what it shows)."""
    for number, cell in enumerate(cells(name, folder)):
        for output in cell.get("outputs", ()):
            if output["output_type"] == "stream":
                yield number, output["name"], joined(output["text"])
            for kind, shown in output.get("data", {}).items():
                yield number, kind, joined(shown)


def steady(text):
    """A text without what changes when lines of layer code move or another torch-npu is there."""
    text = re.sub(r"\.py:\d+", ".py:N", text)
    return re.sub(r"torch-npu \d[\w.]*", "torch-npu V", text)


def said(name, folder=FOLDER):
    """What is compared: texts. Pictures depend on fonts, and show errors of the last digit."""
    return [(number, kind, steady(text)) for number, kind, text in outputs(name, folder) if kind != "image/png"]


def test_the_notebooks_are_these():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_says_what_is_committed(name, tmp_path):
    command = [sys.executable, str(FOLDER / "run.py"), name, "--to", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    if torch.__version__.startswith(COMMITTED_ON):  # another release's torchair may make other nodes
        assert said(name, tmp_path) == said(name), f"run: python notebooks/run.py {name}"
    pictures = [sum(kind == "image/png" for _, kind, _ in outputs(name, folder)) for folder in (tmp_path, FOLDER)]
    assert pictures[0] == pictures[1] >= 3


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_opens_with_its_question_and_asserts_answers(name):
    first, *rest = cells(name)
    text = joined(first["source"])
    assert first["cell_type"] == "markdown" and re.match(rf"# {int(name[:2])}\. .*\?\n", text)
    assert re.search(r"\*\*[^*]+\?\*\*", text), "the question, in bold"
    assert sum("assert " in source for source in code(name)) >= 4
    assert sum("?**" in joined(cell["source"]) for cell in rest) >= 3, "asks before it answers"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_needs_public_names_alone(name):
    """`kg` for nearly all; what is asked for by its module is public there, and rare."""
    inner = []
    for source in code(name):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "kg":
                assert node.attr in {*kimi_graph.__all__, "__file__"}, f"kg.{node.attr} is not public"
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kimi_graph"):
                inner += [f"{node.module}.{alias.name}" for alias in node.names]
    assert len(inner) <= 2 and not [x for x in inner if "._" in x]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_committed_is_small_and_of_no_machine(name):
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    for cell in notebook["cells"]:
        assert not cell["metadata"] and cell.get("execution_count") is None
        for output in cell.get("outputs", ()):
            assert output.get("execution_count") is None and output.get("name") != "stderr"
    for _, kind, shown in outputs(name):
        if kind == "image/png":
            assert len(base64.b64decode(shown)) < 150_000
        else:
            assert not re.search(r"(?<![\w.])/(tmp|home|root|work|Users|var)/|[A-Z]:\\", shown), shown
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 400_000


def test_links_between_notebooks_lead_somewhere():
    for name in NAMES:
        text = "".join(joined(cell["source"]) for cell in cells(name) if cell["cell_type"] == "markdown")
        targets = re.findall(r"\]\(([^)#:]+)\)", text)
        assert targets and all((FOLDER / target).is_file() for target in targets)


@pytest.fixture(scope="module")
def runner():
    spec = importlib.util.spec_from_file_location("run_notebooks", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ran(*outputs):
    """A notebook of one cell that was run."""
    from nbformat.v4 import new_code_cell, new_notebook, new_output

    made = [new_output("stream", name=name, text=text) for name, text in outputs]
    result = new_output("execute_result", data={"text/plain": "2"}, execution_count=7)
    cell = new_code_cell(
        "1 + 1", execution_count=7, outputs=[*made, result], metadata={"execution": {"started": "now"}}
    )
    return new_notebook(cells=[cell], metadata={"language_info": {"name": "python", "version": "3.11.7"}})


def test_what_is_kept_of_a_run_is_what_every_run_gives(runner):
    whole = runner.tidy(ran(("stdout", "one two"), ("stderr", "fetching ...")))
    cut = runner.tidy(ran(("stderr", "fetching ..."), ("stdout", "one "), ("stdout", "two")))
    assert whole == cut
    (cell,) = whole.cells
    assert [output.get("text") for output in cell.outputs] == ["one two", None]
    assert (cell.id, cell.metadata, cell.execution_count, cell.outputs[1].execution_count) == (
        "cell-00",
        {},
        None,
        None,
    )


def test_a_notebook_that_warns_is_noticed(runner):
    assert runner.warnings(ran(("stderr", "x.py:1: DeprecationWarning: old"))) == ["x.py:1: DeprecationWarning: old"]
    assert not runner.warnings(ran(("stderr", "torch-npu: fetching 44 MB"), ("stdout", "UserWarning is a class")))
