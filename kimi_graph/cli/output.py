"""What commands print: results and errors, progress, and the line a command ends with.

Standard output holds the result (with `--json` nothing but JSON, of a refusal an object with `error`); progress and
errors go to standard error.
"""

import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, Protocol

import typer

Progress = Callable[[str, int, int], None]
"""`progress(what, done, total)`: `what` is being done and stands at `done` of `total` (0: nobody knows)."""


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


def fail(message: str, *, as_json: bool = False) -> NoReturn:
    if as_json:
        print(json.dumps({"error": message}, indent=2))
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(1) from None


def show(result: Result, *, as_json: bool, started: float, where: Path | None = None) -> None:
    if as_json:
        print(json.dumps(result.to_json(), indent=2))
        return
    if text := result.text():
        print(text)
    close(result.summary, started, where)


def judge(report: Any, *, as_json: bool, started: float, where: Path | None = None) -> None:
    """Show a result that may have failed: then the last line is an error, and the exit code 1."""
    if report.passed or as_json:
        show(report, as_json=as_json, started=started, where=where)
    else:
        print(report.text())
        fail(report.summary)
    if not report.passed:
        raise typer.Exit(1)


def close(what: str, started: float, where: Path | None = None) -> None:
    """The line a command ends with: what was made, where, how long it took."""
    place = f" -> {where}" if where else ""
    print(f"{what}{place} in {time.perf_counter() - started:.1f} s")


def load_config_aloud(model: str) -> Any:
    """The model's config; what it assumes because no released file says so goes to standard error."""
    from kimi_graph.read_config import load_config

    config = load_config(model)
    for words in config.assumptions:
        print(f"assumed: {words}", file=sys.stderr)
    return config


@contextlib.contextmanager
def progress_shown(*, of_bytes: bool = False) -> Iterator[Progress]:
    """On standard error: a line per task, and on a terminal a bar for those whose end is known.

    Args:
        of_bytes: numbers are bytes; they and their speed are shown.

    The bar comes late and nothing else is redrawn, as programs that we start (pip) write to the terminal too.
    """
    with contextlib.ExitStack() as stack:
        begun: set[str] = set()
        bars: dict[str, Callable[[int, int], None]] = {}

        def tell(what: str, done: int, total: int) -> None:
            if total and sys.stderr.isatty():
                if what not in bars:
                    bars[what] = stack.enter_context(_bar(what, of_bytes))
                bars[what](done, total)
            elif what not in begun:
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
