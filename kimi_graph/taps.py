"""Named intermediates without hooks: `tap("state", x)` gives `x` back, and keeps it if somebody asked for the name.

Names are dotted paths such as `layers.3.kda.state`; a request is a shell-style pattern (`layers.*.moe.experts`).
"""

import contextlib
import contextvars
import difflib
import fnmatch
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor

from .errors import ConfigError

X = TypeVar("X")


class _Wanted:
    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        self.found: dict[str, Tensor] = {}
        self.seen: list[str] = []

    def check(self) -> None:
        for pattern in self.patterns:
            if not fnmatch.filter(self.seen, pattern):
                near = difflib.get_close_matches(pattern, self.seen, n=1, cutoff=0.0)
                kinds = sorted({name.rpartition(".")[2] for name in self.seen})
                raise ConfigError(
                    f"taps: nothing is called {pattern!r}; the nearest is {near[0] if near else 'none'}. "
                    f"Names end in {', '.join(kinds)}."
                )


_wanted: contextvars.ContextVar[_Wanted | None] = contextvars.ContextVar("wanted", default=None)
_scope: contextvars.ContextVar[str] = contextvars.ContextVar("scope", default="")


@contextlib.contextmanager
def collect(patterns: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Inside, every tapped value whose name fits a pattern lands in the yielded dict.

    Raises:
        ConfigError: at the end, where no value has the name of a pattern.
    """
    wanted = _Wanted(patterns)
    token = _wanted.set(wanted)
    try:
        yield wanted.found
        wanted.check()
    finally:
        _wanted.reset(token)


def scope(name: str) -> contextlib.AbstractContextManager[None]:
    """Inside, tapped names start with `name.` (scopes nest); of no effect where nobody collects."""
    return _NOBODY if _wanted.get() is None else _scoped(name)


_NOBODY = contextlib.nullcontext()


@contextlib.contextmanager
def _scoped(name: str) -> Iterator[None]:
    token = _scope.set(f"{_scope.get()}{name}." if name else _scope.get())
    try:
        yield
    finally:
        _scope.reset(token)


def tap(name: str, value: X, view: Callable[[X], Any] = lambda x: x) -> X:
    """`value` itself; `view(value)` is kept under the scoped name when asked for."""
    wanted = _wanted.get()
    if wanted is not None:
        full = _scope.get() + name
        wanted.seen.append(full)
        if any(fnmatch.fnmatchcase(full, p) for p in wanted.patterns):
            wanted.found[full] = view(value)
    return value
