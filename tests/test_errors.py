"""Every error that `docs/errors.md` shows is what the command line says, and every command shows some."""

import re
from pathlib import Path

import pytest

from kimi_graph import cli
from tests import errors

PAGE = Path(cli.__file__).resolve().parents[2] / "docs" / "errors.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="needs the repository, not a wheel")


def test_the_page_of_errors_is_what_the_commands_say_and_they_leave_nothing_behind(tmp_path):
    assert errors.page(tmp_path) == PAGE.read_text(encoding="utf-8"), (
        "make it anew: python -m tests.errors > " + PAGE.name
    )


def test_every_command_shows_errors():
    from typer.main import get_command

    assert set(get_command(cli.app).commands) == set(errors.CASES) - {"(none)"}


def test_errors_keep_to_100_columns_and_begin_alike():
    for block in re.findall(r"^```console\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S):
        said = [line for line in block.splitlines() if not line.startswith("$ ")]
        assert max(map(len, said)) <= 100
        starts = [line for line in said if not line.startswith("  ")]
        assert starts and all(line.startswith("error: ") for line in starts)
