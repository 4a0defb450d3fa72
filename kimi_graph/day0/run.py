"""`kimi-graph day0`: all steps, and a report that is whole or not there."""

import contextlib
import datetime
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kimi_graph.compile.targets import Target
from kimi_graph.files import Standing, new_folder
from kimi_graph.progress import Notify, silent

from .report import JSON, WORK, Report, Run, check_place, write_report
from .steps import run_steps
from .trial import Trial


def day0(
    source: str | Path,
    targets: Sequence[Target],
    *,
    out: Path | None = None,
    keep_work: bool = False,
    torch_npu_wheel: Path | None = None,
    cache_dir: Path | None = None,
    keep: bool = False,
    progress: Notify = silent,
) -> Report:
    """Say what of a model is served by what on some targets, and what is not and why.

    What a step finds, a fault of ours too, is in the report; the other steps are tried all the same.

    Args:
        source: a preset, a config.json, a checkpoint's folder, or its index.
        out: the report's folder, replaced if it is a report; None: nothing is written.
        keep_work: leave fixture and bundles in it, under `work`.
        cache_dir, keep: where torchair is, and whether what is compiled is kept there for later compiles.

    Raises:
        ConfigError: something else is at `out`. OSError: the report cannot be written.
    """
    began, started = datetime.datetime.now(datetime.timezone.utc), time.perf_counter()
    with _folder(out) as folder:
        work = folder / WORK
        work.mkdir()
        trial = Trial(
            source=str(source), targets=tuple(targets), work=work, wheel=torch_npu_wheel, cache=cache_dir, keep=keep
        )
        outcomes = []
        for outcome in run_steps(list(trial.steps()), progress, work):
            outcomes.append(outcome)
            if outcome.found.usable:
                trial.values[outcome.name] = outcome.found.value
        run = Run(
            date=f"{began:%Y-%m-%d %H:%M} UTC",
            seconds=round(time.perf_counter() - started, 3),
            machine=f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, "
            f"Python {platform.python_version()}",
        )
        report = Report(
            source=str(source), targets=tuple(targets), outcomes=tuple(outcomes), run=run, without=trial.without
        )
        if not keep_work:
            shutil.rmtree(work)
        if out is not None:
            write_report(report, folder)
    return report


@contextlib.contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """A folder to write to: at the end it is `out`, or gone."""
    if out is not None:
        with new_folder(out, lambda: check_place(out), Standing.of(out, JSON)) as folder:
            yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="kimi-graph-day0-") as folder:
            yield Path(folder)
