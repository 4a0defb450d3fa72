"""docs/new-release.md and its workflow say what is so."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

import kimi_graph
from kimi_graph import cli
from kimi_graph.day0.report import MARKDOWN
from kimi_graph.day0.trial import WORDS

ROOT = Path(kimi_graph.__file__).resolve().parent.parent
PAGE, WORKFLOW = ROOT / "docs" / "new-release.md", ROOT / "docs" / "ci" / "day0.yml"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="needs the repository, not a wheel")


@pytest.fixture(scope="module")
def workflow():
    yaml = pytest.importorskip("yaml", reason="comes with transformers")
    return yaml.safe_load(WORKFLOW.read_text())


def test_the_workflow_has_a_job_of_steps_that_run_or_use_something(workflow):
    on = workflow[True]  # YAML 1.1 reads the word `on` so
    assert {"workflow_dispatch", "schedule", "pull_request"} == on.keys()
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert all(("run" in step) != ("uses" in step) for step in job["steps"])
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)


def test_the_workflow_takes_inputs_through_the_environment_alone(workflow):
    """What somebody types in must not become a command."""
    (job,) = workflow["jobs"].values()
    assert not [step for step in job["steps"] if "${{" in step.get("run", "")]


def test_the_workflow_runs_a_command_there_is_and_shows_its_report(workflow):
    (job,) = workflow["jobs"].values()
    runs = {step["name"]: step for step in job["steps"] if "run" in step}
    program, command, *words = shlex.split(runs["day0"]["run"])
    known = {o for p in get_command(cli.app).commands[command].params for o in p.opts}
    assert program == "kimi-graph" and {w for w in words if w.startswith("-")} <= known
    out = words[words.index("-o") + 1]
    assert f"{out}/{MARKDOWN}" in runs["summary"]["run"]
    shown = [step for step in job["steps"] if step.get("with", {}).get("path") == out]
    assert [step.get("if") for step in (*shown, runs["summary"])] == ["always()", "always()"]  # of a failed run too


def test_the_workflow_installs_as_the_readme_does(workflow):
    (job,) = workflow["jobs"].values()
    install = next(step["run"] for step in job["steps"] if step.get("name") == "install")
    assert f"\n{install} && " in (ROOT / "README.md").read_text()


def test_the_page_lists_every_step():
    listed = re.findall(r"^\| (`[^|]+`) \| [^|]+ \| (?:the model|each target)", PAGE.read_text(), re.M)
    assert [name for cell in listed for name in re.findall("`([^`]+)`", cell)] == list(WORDS)


def test_files_and_names_that_the_page_points_to_are_there():
    text = PAGE.read_text()
    paths = re.findall(r"`((?:kimi_graph|compile|tests|ops|\.ci)/[\w/.]*\w)`?", text)
    paths += re.findall(r"\b(tests/[\w/]+\.py)\b", text)
    missing = [path for path in paths if not (ROOT / path).exists() and "NAME" not in path]
    assert len(paths) > 15 and not missing
    for name, path in [
        ("FAMILIES", "kimi_graph/families/__init__.py"),
        ("SMALL", "kimi_graph/fixture.py"),
        ("FAMILY", "tests/compile/family.py"),
        ("DIFFERENCES", "tests/compile/test_prototypes.py"),
        ("WHEELS", "tests/compile/test_torchair_contract.py"),
        ("VERSION", "compile/torchair_host.py"),
        ("SHA256", "compile/torchair_host.py"),
        ("CANN_VERSIONS", "compile/targets.py"),
        ("CANN_DEFAULT", "compile/targets.py"),
    ]:
        assert f"`{name}`" in text and re.search(rf"^{name}\b.*=", (ROOT / path).read_text(), re.M), name


def test_the_python_of_the_page_runs_from_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)
    (code,) = re.findall(r"^ *```python\n(.*?)^ *```$", PAGE.read_text(), re.M | re.S)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(re.sub(r"^   ", "", code, flags=re.M))
    assert said.getvalue().split("\n") == ["inputs as known", "outputs as known", "attributes as known", ""]
