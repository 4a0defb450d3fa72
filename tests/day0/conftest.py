import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimi_graph.compile import torchair_host
from kimi_graph.compile.targets import target
from kimi_graph.day0.report import Report
from kimi_graph.day0.run import day0
from kimi_graph.day0.steps import Name, Outcome, run_steps
from kimi_graph.day0.trial import Trial

CACHE = torchair_host.default_cache(os.environ)
WHEEL = os.environ.get("KIMI_GRAPH_TORCH_NPU_WHEEL")
WHERE: dict[str, Any] = {"torch_npu_wheel": None if WHEEL is None else Path(WHEEL), "cache_dir": CACHE}

Try = Callable[..., dict[Name, Outcome]]


@pytest.fixture(scope="session")
def full(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    """All steps of a fixture of Kimi Linear for A3, and the folder of the report, with the work. Read only."""
    out = tmp_path_factory.mktemp("day0") / "report"
    return day0(tiny, [target("a3")], out=out, keep_work=True, **WHERE), out


@pytest.fixture
def attempt(tmp_path: Path) -> Try:
    """`attempt(source, "config", "audit")`: only these steps, and those they need; other options are `target`'s."""

    def run(source: str | Path, *wanted: str, chip: str = "a3", **options: Any) -> dict[Name, Outcome]:
        work = tmp_path / "work"
        work.mkdir()
        trial = Trial(
            source=str(source),
            targets=(target(chip, **options),),
            work=work,
            wheel=WHERE["torch_npu_wheel"],
            cache=CACHE,
        )
        steps = {step.name: step for step in trial.steps()}

        @functools.cache
        def needed(name: Name) -> frozenset[Name]:
            return frozenset({name}.union(*(needed(n) for n in steps[name].needs)))

        names = frozenset().union(*(needed(name) for name in steps if name[1] in wanted))
        found = {}
        for outcome in run_steps([step for name, step in steps.items() if name in names], lambda *what: None, work):
            found[outcome.name] = outcome
            if outcome.found.usable:
                trial.values[outcome.name] = outcome.found.value
        return found

    return run
