"""The API reference is made of docstrings by sphinx, without a warning, and holds every public name."""

import importlib.util
import re
import subprocess
import sys

import pytest

import kimi_graph
from tests.documents import ROOT

pytestmark = [
    pytest.mark.docs,
    pytest.mark.skipif(not (ROOT / "docs" / "conf.py").exists(), reason="needs the repository, not a wheel"),
]


@pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="needs the extra docs")
def test_the_documentation_builds_without_a_warning(tmp_path):
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", str(tmp_path / "trees")]
    run = subprocess.run(
        [*build, str(ROOT / "docs"), str(tmp_path / "html")], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    made = (tmp_path / "html" / "api.html").read_text()
    missing = [name for name in documented() if f'id="kimi_graph.{name}"' not in made]
    assert not missing


def documented():
    """Public names that are functions or classes, of the package and of its folders."""
    for name in kimi_graph.__all__:
        value = getattr(kimi_graph, name)
        if callable(value) and name != "Mesh":  # which is parallel's
            yield name
    for folder in ("layers", "ops", "parallel"):
        module = getattr(kimi_graph, folder)
        yield from (f"{folder}.{name}" for name in module.__all__ if callable(getattr(module, name)))
    for module in (kimi_graph.tree, kimi_graph.errors):
        home = module.__name__.removeprefix("kimi_graph.")
        own = [n for n, x in vars(module).items() if getattr(x, "__module__", None) == module.__name__]
        yield from (f"{home}.{name}" for name in own if not name.startswith("_") and callable(getattr(module, name)))


def test_every_page_is_in_the_table_of_contents():
    listed = re.findall(r"^([\w/-]+)$", (ROOT / "docs" / "index.md").read_text(), re.M)
    there = [str(p.relative_to(ROOT / "docs").with_suffix("")) for p in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted({*there} - {"index"})
