"""Steps that are tried one after the other. Each says what it found; one that fails stops those alone that need it."""

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from kimi_graph.errors import KimiGraphError
from kimi_graph.progress import Notify

State = Literal["passed", "failed", "skipped"]
Name = tuple[str, str]
"""A step: the target's name ("" for the model's own), and what is tried."""

SURE = 10.0  # seconds after which what was measured tells more than what was written down
PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a step found.

    Attributes:
        words: a sentence.
        lines: the rest, for a reader.
        value: for later steps, and for the report.
        goes_on: what needs the step is tried though it failed, with the value.
    """

    words: str
    state: State = "passed"
    lines: tuple[str, ...] = ()
    value: Any = None
    goes_on: bool = False

    @property
    def usable(self) -> bool:
        """Whether steps that need this one can be tried."""
        return self.state == "passed" or self.goes_on


@dataclass(frozen=True, kw_only=True)
class Step:
    """One thing to try.

    Attributes:
        run: gives what was found; a KimiGraphError is a finding too.
        needs: earlier steps whose values it takes.
        seconds: what it takes on two cores for K3.1-Pro; the time that is left is told by it.
    """

    name: Name
    run: Callable[[], Found]
    seconds: float
    needs: tuple[Name, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a step. `seconds`: measured, no part of what was found."""

    name: Name
    found: Found
    seconds: float = field(default=0.0, compare=False)

    @property
    def title(self) -> str:
        """`a3: plan`, or `config`."""
        return title(self.name)

    def to_json(self) -> dict[str, Any]:
        target, step = self.name
        found = self.found
        return {
            "target": target or None,
            "step": step,
            "state": found.state,
            "found": found.words,
            "lines": found.lines,
        }


def title(name: Name) -> str:
    """A step in words."""
    target, step = name
    return f"{target}: {step}" if target else step


def run_steps(steps: Sequence[Step], notify: Notify, work: Path) -> Iterator[Outcome]:
    """Try every step in turn; what a step needs comes before it.

    Args:
        work: a folder that is elsewhere afterwards, or gone; in what is found it is called `work`.
    """
    before: dict[Name, Found] = {}
    done = spent = 0.0
    for i, step in enumerate(steps):
        started = time.perf_counter()
        lacking = [name for name in step.needs if not before[name].usable]
        if lacking:
            first = before[lacking[0]]
            words = f"needs {title(lacking[0])}, which failed" if first.state == "failed" else first.words
            found = Found(words=words, state="skipped")
        else:
            left = sum(s.seconds for s in steps[i:]) * (spent + SURE) / (done + SURE)
            notify(f"{title(step.name)} ({i + 1} of {len(steps)}, about {left:.0f} s left)", 0, 0)
            found = _named(work, _found(step))
            done += step.seconds
        before[step.name] = found
        seconds = time.perf_counter() - started
        spent += seconds
        yield Outcome(name=step.name, found=found, seconds=seconds)


def _found(step: Step) -> Found:
    """What a step finds; a fault of ours is one of its findings, so that the others are still tried."""
    try:
        return step.run()
    except KimiGraphError as error:
        words, *lines = str(error).splitlines() or [type(error).__name__]
        return Found(words=words, state="failed", lines=tuple(lines))
    except OSError as error:
        return Found(words=f"{error.filename or 'a file'}: {error.strerror or error}", state="failed")
    except Exception as error:
        words = f"a fault of kimi-graph, not of the model: {type(error).__name__}: {error}".splitlines()
        return Found(words=words[0], state="failed", lines=(*words[1:], *_places(error)))


def _places(error: Exception) -> Iterator[str]:
    """Lines of ours that an error came through, the innermost first."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename).resolve()
        for root in (PACKAGE, PACKAGE.parent):
            if path.is_relative_to(root):
                yield f"at {path.relative_to(root)}:{frame.lineno}, in {frame.name}"
                break


def _named(work: Path, found: Found) -> Found:
    def plain(text: str) -> str:
        return text.replace(str(work), "work")

    return replace(found, words=plain(found.words), lines=tuple(map(plain, found.lines)))
