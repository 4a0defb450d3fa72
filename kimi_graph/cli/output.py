"""What commands print: results and errors, progress, and the line a command ends with.

Standard output holds the result (with `--json` nothing but JSON, of a refusal an object with `error`); progress, notes
and errors go to standard error. With `--quiet` the last line is all there is, and errors.
"""

import contextlib
import gc
import json
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol, TextIO

import typer

from kimi_graph.progress import Notify

WIDTH = 100  # columns; a narrower terminal has fewer
PATIENCE = 1.0  # seconds of a command before there are bars


class Result(Protocol):
    """What the function behind a command gives back."""

    @property
    def summary(self) -> str:
        """What was made or found, in half a line."""
        ...

    def text(self) -> str:
        """For a reader; may be empty."""
        ...

    def to_json(self) -> Any:
        """For a program."""
        ...


@dataclass(frozen=True)
class Made:
    """The result of a command whose function gives no `Result`. `facts`: for a program."""

    summary: str
    facts: dict[str, Any]
    lines: tuple[str, ...] = ()

    def text(self) -> str:
        return "\n".join(self.lines)

    def to_json(self) -> Any:
        return self.facts


@dataclass(frozen=True)
class Manner:
    """How the command that runs prints; every command takes `--json` and `--quiet` (`frame.command`)."""

    as_json: bool = False
    quiet: bool = False
    started: float = field(default_factory=time.perf_counter)


manner: ContextVar[Manner] = ContextVar("manner", default=Manner())  # noqa: B039 (frozen)


def fail(message: str) -> NoReturn:
    """End the command with an error, and exit code 1."""
    refuse(message)
    raise typer.Exit(1) from None


def refuse(message: str) -> None:
    """Say that something cannot be: an object for a program, and a line for a reader."""
    if manner.get().as_json:
        print(json.dumps({"error": message}, indent=2))
    print_error(message)


def interrupted() -> None:
    """Say that somebody has ended it by Ctrl-C; it is no error."""
    if manner.get().as_json:
        print(json.dumps({"error": "interrupted"}, indent=2))
    print("interrupted", file=sys.stderr)


def print_error(message: str) -> None:
    """On a terminal in lines of whole words; else as it is, so that a program finds its words in one line."""
    print(_fitted(f"error: {message}", sys.stderr), file=sys.stderr)


def _fitted(text: str, stream: TextIO) -> str:
    """For a terminal lines that fit; else as it is."""
    return in_columns(text, min(WIDTH, shutil.get_terminal_size().columns)) if stream.isatty() else text


_COMMAND = re.compile(r"\s*(\w+ +)?kimi-graph ")  # a line to be copied whole


def in_columns(text: str, width: int = WIDTH) -> str:
    """Lines that are too long, broken between words; names and paths stay whole, lines that fit and commands as they
    are."""

    def lines() -> Iterator[str]:
        for line in text.splitlines():
            indent = " " * (len(line) - len(line.lstrip()) + 2)
            broken = textwrap.wrap(
                line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
            )
            yield from broken if len(line) > width and not _COMMAND.match(line) else [line]

    return "\n".join(lines())


def note(words: str) -> None:
    """Something to know, on standard error."""
    if not manner.get().quiet:
        print(_fitted(words, sys.stderr), file=sys.stderr)


def announce(words: str, facts: dict[str, Any]) -> None:
    """A result of a command that goes on: words, or an object on a line of its own."""
    print(json.dumps(facts) if manner.get().as_json else words, flush=True)


def tell(line: str) -> None:
    """A line of the result before it is whole."""
    if not (manner.get().as_json or manner.get().quiet):
        print(line)


def show(result: Result, where: Path | None = None) -> None:
    """Print a result, and the line a command ends with: what was made, where, how long it took."""
    how = manner.get()
    if how.as_json:
        print(json.dumps(result.to_json(), indent=2))
        return
    if not how.quiet and (text := result.text()):
        print(_fitted(text, sys.stdout))
    last = f"{result.summary}{_place(where)} in {time.perf_counter() - how.started:.1f} s"
    print(_fitted(last, sys.stdout))


def _place(where: Path | None) -> str:
    return f" -> {where}" if where else ""


def judge(report: Any, where: Path | None = None) -> None:
    """Show a result that may have failed: then the last line is an error, and the exit code 1."""
    if report.passed or manner.get().as_json:
        show(report, where)
    else:
        tell(report.text())
        print_error(f"{report.summary}{_place(where)}")
    if not report.passed:
        raise typer.Exit(1)


def load_config_aloud(model: str) -> Any:
    """The model's config; what it assumes because no released file says so goes to standard error."""
    from kimi_graph.read_config import load_config

    config = load_config(model)
    for words in config.assumptions:
        note(f"assumed: {words}")
    return config


def check_file(path: Path) -> None:
    """Whether a file can be written there, before there is anything to write. Raises KimiGraphError."""
    from kimi_graph.files import check_writable

    if path.is_dir():
        fail(f"{path}: is a folder; expected the name of a file.")
    check_writable(path)


@contextlib.contextmanager
def progress_shown(*, of_bytes: bool = False, bars_alone: bool = False) -> Iterator[Notify]:
    """On standard error: a line per task, and on a terminal a bar for those whose end is known.

    Args:
        of_bytes: numbers are bytes; they and their speed are shown.
        bars_alone: no lines, of what is done in a few seconds.

    The bar comes late and nothing else is redrawn, as programs that we start (pip) write to the terminal too.
    """
    how = manner.get()  # threads of the work, which say how far they are, do not know it
    with contextlib.ExitStack() as stack:
        begun: set[str] = set()
        bars: dict[str, Callable[[int, int], None]] = {}

        def tell(what: str, done: int, total: int) -> None:
            if how.quiet:
                return
            if total and sys.stderr.isatty():
                if time.perf_counter() - how.started < PATIENCE:
                    return
                if what not in bars:
                    bars[what] = stack.enter_context(_bar(what, of_bytes))
                bars[what](done, total)
            elif what not in begun and not bars_alone:
                begun.add(what)
                print(f"{what} ...", file=sys.stderr, flush=True)

        yield tell


@contextlib.contextmanager
def _bar(what: str, of_bytes: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar with the time that is left, gone when it is over."""
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn(what),
        progress.BarColumn(),
        *((progress.DownloadColumn(), progress.TransferSpeedColumn()) if of_bytes else ()),
        progress.TimeRemainingColumn(elapsed_when_finished=True),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what)

        def move(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total)
            if done >= total:
                bars.stop()

        yield move


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Inside, nobody looks for garbage: a short command makes little, and looking through torch takes long."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
