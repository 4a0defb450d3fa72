"""docs/guides/add-a-layer.md and docs/guides/add-a-model.md are followed to the letter, in a copy of the repository."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kimi_graph

ROOT = Path(kimi_graph.__file__).resolve().parent.parent
COPIED = ("kimi_graph", "ops", "parallel", "compile", "pyproject.toml")

pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="needs the repository, not a wheel")


def blocks(page):
    """The page's code in order: language, the file that the text before it names (None of commands), and the code."""
    file = None
    for part in re.finditer(r"^`([\w./-]+)`(?:, new)?:$|^```(\w+)\n(.*?)^```$", page, re.M | re.S):
        named, language, code = part.groups()
        if named:
            file = named
        else:
            yield language, file, code


def change(text, diff):
    """`text` with a diff's lines in place of those it removes; what it keeps or removes is there once."""
    lines = diff.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] != "+")
    new = "".join(line[1:] for line in lines if line[0] != "-")
    assert text.count(old) == 1, f"found {text.count(old)} times:\n{old}"
    return text.replace(old, new)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["add-a-layer", "add-a-model"])
def test_the_page_compiles_and_verifies(page, tmp_path):
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, tmp_path / name, **({"symlinks": True} if copy is shutil.copytree else {}))
    commands = tmp_path / "bin" / "kimi-graph"
    commands.parent.mkdir()
    commands.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kimi_graph "$@"\n')
    (commands.parent / "python").symlink_to(sys.executable)
    (commands.parent / "pytest").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pytest -q "$@"\n')
    for command in commands.parent.iterdir():
        if not command.is_symlink():
            command.chmod(0o755)
    env = os.environ | {"PATH": f"{commands.parent}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path)}
    said = ""
    for language, file, code in blocks((ROOT / "docs" / "guides" / f"{page}.md").read_text()):
        if language == "bash":
            run = subprocess.run(["sh", "-ec", code], cwd=tmp_path, env=env, capture_output=True, text=True)
            assert run.returncode == 0, f"{code}\n{run.stdout}{run.stderr}"
            said = run.stdout
        elif language == "diff":
            (tmp_path / file).write_text(change((tmp_path / file).read_text(), code))
        else:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(code)
    assert "verified: graphs equal the model" in said
