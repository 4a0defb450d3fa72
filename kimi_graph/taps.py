"""Named intermediates without hooks: `tap("state", x)` gives `x` back, and keeps it if somebody asked for the name.

Names are dotted paths such as `layers.3.kda.state`; a request is a shell-style pattern (`layers.*.moe.experts`).
"""

import contextlib
import contextvars
import fnmatch
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor

X = TypeVar("X")


class _Wanted:
    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(patterns)
        self.found: dict[str, Tensor] = {}


_wanted: contextvars.ContextVar[_Wanted | None] = contextvars.ContextVar("wanted", default=None)
_scope: contextvars.ContextVar[str] = contextvars.ContextVar("scope", default="")


@contextlib.contextmanager
def collect(patterns: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Inside, every tapped value whose name fits a pattern lands in the yielded dict."""
    wanted = _Wanted(patterns)
    token = _wanted.set(wanted)
    try:
        yield wanted.found
    finally:
        _wanted.reset(token)


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Inside, tapped names start with `name.` (scopes nest)."""
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
        if any(fnmatch.fnmatchcase(full, p) for p in wanted.patterns):
            wanted.found[full] = view(value)
    return value
