"""Which line of a layer is being run: what errors and graph nodes say of where they come from."""

import contextlib
import contextvars
import functools
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

_PACKAGE = Path(__file__).parents[1]
_OTHERS = (Path(torch.__file__).parent, Path(sysconfig.get_paths()["stdlib"]))  # nobody's layers
_MACHINERY = ("ops", "parallel", "compile/capture.py", "compile/sharded.py")  # runs layers, is none

_given: contextvars.ContextVar[str] = contextvars.ContextVar("given", default="")


@contextlib.contextmanager
def attributed(source: str) -> Iterator[None]:
    """Inside, what is made comes from `source` (where that is not empty), not from the line being run."""
    token = _given.set(source or _given.get())
    try:
        yield
    finally:
        _given.reset(token)


def author_line() -> str:
    """`layers/kda.py:112`: the innermost line being run that is an author's; empty where there is none.

    Paths start in the package; of files outside it, a caller's own layers say, only the name is given.
    """
    if _given.get():
        return _given.get()
    frame = sys._getframe(1)
    while frame is not None:
        path = _author_file(frame.f_code.co_filename)
        if path:
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@functools.lru_cache(maxsize=4096)
def _author_file(name: str) -> str:
    path = Path(name)
    if path.is_relative_to(_PACKAGE):
        inside = path.relative_to(_PACKAGE)
        return "" if any(inside.is_relative_to(part) for part in _MACHINERY) else inside.as_posix()
    return "" if name.startswith("<") or any(path.is_relative_to(other) for other in _OTHERS) else path.name
