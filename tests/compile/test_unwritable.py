"""Where nothing can be written, every command that writes says so in a line, before its work, and leaves nothing."""

import re
import shutil

import pytest
from typer.testing import CliRunner

from kimi_graph import cli, fixture
from kimi_graph.compile import bringup, deploy, driver, making
from kimi_graph.day0 import run as day0_run
from kimi_graph.ops import kernel_project
from kimi_graph.plan import search

SIZES = "--batch 1 --chunk 16 --max-len 64"
COMMANDS = {
    "compile": (f"compile SMALL --target a3 {SIZES} -o OUT", driver, "bundle_files"),
    "fixture": ("fixture kimi-linear-48b -o OUT", fixture, "init_params"),
    "kernels": ("kernels export OUT", kernel_project, "project_files"),
    "deploy": ("deploy BUNDLE -o OUT", deploy, "bundle_config"),
    "bringup": ("bringup BUNDLE -o OUT", bringup.Known, "of"),
    "day0": ("day0 kimi-linear-48b --target a3 -o OUT", day0_run, "run_steps"),
    "plan": ("plan kimi-linear-48b --target a3 --html OUT", search, "make_plan"),
    "inspect": ("inspect BUNDLE --html OUT", cli.looking, "show"),
}


def run(line, **paths):
    return CliRunner().invoke(cli.app, [str(paths.get(word, word)) for word in line.split()])


def no_work(monkeypatch, command):
    """Its work would be noticed."""

    def fail(*_, **__):
        raise AssertionError("this is work")

    monkeypatch.setattr(*COMMANDS[command][1:], fail)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_below_a_file_is_refused_before_work(small, bundle, tmp_path, monkeypatch, command):
    (tmp_path / "notes").write_text("mine")
    no_work(monkeypatch, command)
    result = run(COMMANDS[command][0], SMALL=small, BUNDLE=bundle, OUT=tmp_path / "notes" / "out")
    words = f"error: {tmp_path}/notes/out.*: {tmp_path}/notes is a file, not a folder; choose another place.\n"
    assert result.exit_code == 1 and re.search(words, result.stderr), result.output
    assert [p.name for p in tmp_path.iterdir()] == ["notes"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_of_somebody_else_is_refused_before_work(small, bundle, tmp_path, monkeypatch, nobody, command):
    monkeypatch.setattr("kimi_graph.compile.verify.find_checkpoint", lambda *_, **__: None)
    no_work(monkeypatch, command)
    paths = {"SMALL": small, "BUNDLE": shutil.copytree(bundle, tmp_path / "bundle"), "OUT": tmp_path / "theirs" / "out"}
    (tmp_path / "theirs").write_text("")  # everything is imported once: nobody may not read our Python
    run(COMMANDS[command][0], **paths)
    (tmp_path / "theirs").unlink()
    (tmp_path / "theirs").mkdir(mode=0o555)
    small.parent.chmod(0o755)
    small.parent.parent.chmod(0o755)
    with nobody():
        result = run(COMMANDS[command][0], **paths)
    words = f"error: {tmp_path}/theirs/out.*: {tmp_path}/theirs cannot be written to (Permission denied); choose"
    assert result.exit_code == 1 and re.search(re.escape(words).replace(r"\.\*", ".*"), result.stderr), result.output
    assert list((tmp_path / "theirs").iterdir()) == []


def test_weights_of_a_bundle_of_somebody_else_are_refused_before_they_are_made(
    small, bundle, tmp_path, monkeypatch, nobody
):
    """And what is there already is read again."""
    copy = shutil.copytree(bundle, tmp_path / "bundle")
    assert run("weights BUNDLE --verify", BUNDLE=copy).exit_code == 0
    for folder in (*small.parents[:2], copy):
        folder.chmod(0o755)
    (copy / "weights").chmod(0o555)
    with nobody():
        again = run("weights BUNDLE --verify", BUNDLE=copy)
    assert again.exit_code == 0 and "all were there" in again.stdout, (again.output, again.exception)
    shutil.rmtree(copy / "weights")
    copy.chmod(0o555)
    monkeypatch.setattr(making.Maker, "make", lambda *_: pytest.fail("this is work"))
    with nobody():
        result = run("weights BUNDLE", BUNDLE=copy)
    assert result.exit_code == 1
    assert f"{copy} cannot be written to (Permission denied)" in result.stderr
