"""Lines that fit a terminal."""

import textwrap
from collections.abc import Iterable

WIDTH = 100  # of a line


def wrapped(head: str, words: str, then: str | None = None) -> list[str]:
    """Words after a head, no name broken; further lines begin with `then`, by default spaces as wide as the head."""
    rest = " " * max(4, len(head)) if then is None else then
    return textwrap.wrap(
        words, WIDTH, initial_indent=head, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False
    )


def wrapped_items(head: str, items: Iterable[str]) -> list[str]:
    """Items with commas between them, none broken."""
    return [line.replace("\0", " ") for line in wrapped(head, ", ".join(item.replace(" ", "\0") for item in items))]
