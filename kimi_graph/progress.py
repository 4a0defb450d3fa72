"""How long work says how far it is; who calls it decides what to do with that."""

from collections.abc import Callable

Notify = Callable[[str, int, int], None]
"""`notify(what, done, total)`: `what` is being done and stands at `done` of `total` (0: nobody knows)."""


def silent(what: str, done: int, total: int) -> None:
    """Says nothing."""
