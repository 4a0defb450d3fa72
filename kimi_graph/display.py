"""What a value looks like: columns in a terminal, HTML in a notebook, from the same rows.

Markup that is made here is `Html`; all else is text, and is escaped on its way in: there is no other place to do it.
A table is one without its style too, since web pages of repositories leave styles out.
"""

import html
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Okabe and Ito's colours, told apart by nearly all eyes; letters and words say the same.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_NUMBER = r"[\d,.]*( [KMGT]i?B)?"
_PLAIN = "border-collapse:collapse;margin:.3em 0 .8em;font-size:12px"


class Html(str):
    """Markup that was made by this module."""

    __slots__ = ()


def columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table: numbers to the right, words to the left; the first row is the head."""
    aligned = []
    for cells in zip(*rows, strict=True):
        width = max(map(len, cells))
        right = _are_numbers(cells[1:])
        aligned.append([cell.rjust(width) if right else cell.ljust(width) for cell in cells])
    return ["  ".join(row).rstrip() for row in zip(*aligned, strict=True)]


def _are_numbers(cells: Sequence[str]) -> bool:
    return all(re.fullmatch(_NUMBER, cell) for cell in cells) and any(cells)


def listed(pairs: Mapping[str, str]) -> list[str]:
    """Lines of names and what they are, wrapped at 100 columns."""
    width = max(map(len, pairs), default=0) + 4
    lines = []
    for name, words in pairs.items():
        first = f"  {name}".ljust(width)
        lines += textwrap.wrap(words, 100, initial_indent=first, subsequent_indent=" " * width) or [first.rstrip()]
    return lines


def tag(name: str, *children: object, **attributes: object) -> Html:
    """An element; children that are no `Html` are text. `class_` is the attribute class, `data_x` is data-x."""
    named = ((key.rstrip("_").replace("_", "-"), html.escape(str(value))) for key, value in attributes.items())
    given = "".join(f' {key}="{value}"' for key, value in named)
    return Html(f"<{name}{given}>{join(children)}</{name}>")


def join(children: Iterable[object]) -> Html:
    """Some after another."""
    return Html("".join(child if isinstance(child, Html) else html.escape(str(child)) for child in children))


def document(title: str, style: str, body: object, head: object = "") -> str:
    """A page of its own that loads nothing. `style`: rules; `head`: what else belongs there."""
    meta = Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">')
    inside = join([meta, head, tag("title", title), tag("style", Html(style))])
    return f"<!doctype html>\n<html lang=en><head>{inside}</head><body>\n{join([body])}\n</body></html>\n"


def card(title: str, *body: object, note: str = "") -> Html:
    """A value: its title, a line about it, and what is in it."""
    said = [tag("span", f"  {note}", style="opacity:.7")] if note else []
    return tag("div", tag("div", tag("b", title), *said, style="margin:.4em 0"), *body)


def table(rows: Iterable[Sequence[object]]) -> Html:
    """Rows of cells, the first of them the head; columns of numbers to the right."""
    head, *rest = [list(row) for row in rows]
    right = [_are_numbers([str(row[i]) for row in rest]) for i in range(len(head))]

    def row(name: str, cells: Sequence[object]) -> Html:
        sides = ["right" if r else "left" for r in right]
        return tag("tr", *(_cell(name, c, side) for c, side in zip(cells, sides, strict=True)))

    made = tag("table", tag("thead", row("th", head)), tag("tbody", *(row("td", r) for r in rest)), style=_PLAIN)
    return tag("div", made, style="overflow-x:auto")


def _cell(name: str, value: object, side: str) -> Html:
    look = f"text-align:{side};padding:.1em .8em .1em 0;vertical-align:top"
    return tag(name, value, style=look + ";white-space:nowrap" * (len(str(value)) <= 24))


def facts(pairs: Mapping[str, object]) -> Html:
    """Names and what they are, a row each."""
    rows = (tag("tr", _cell("th", name, "left"), _cell("td", said, "left")) for name, said in pairs.items())
    return tag("table", *rows, style=_PLAIN)


def fold(title: str, *body: object) -> Html:
    """What is shown when it is asked for."""
    return tag("details", tag("summary", title, style="cursor:pointer"), *body)


Mark = tuple[str, str, str]
"""A square: what is written in it, its colour, and in words what it is."""


def strip(cells: Iterable[Sequence[Mark]]) -> Html:
    """Small squares from left to right, several in one place below each other."""

    def square(letters: str, colour: str, what: str) -> Html:
        look = "display:block;min-width:1.1em;margin:1px;white-space:pre;word-spacing:0"
        look += f";color:{_ink(colour)};background:{colour}"
        return tag("span", letters, style=look, title=what)

    place = "display:inline-block;text-align:center"
    places = [tag("span", *(square(*mark) for mark in marks), style=place) for marks in cells]
    spaced = (x for each in places for x in (each, " "))  # the space is seen where there is no style alone
    return tag("div", *spaced, style="font:11px/1.4 monospace;word-spacing:-.6em")


def _ink(colour: str) -> str:
    """Black or white, whichever is read more easily on a colour `#rrggbb`."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#000" if 0.3 * red + 0.6 * green + 0.1 * blue > 95 else "#fff"


def pictured(cells: Any) -> str:
    """A shape as text: `[896, 2, 3072, 3584]`."""
    return f"[{', '.join(map(str, cells))}]"


def several(count: int, noun: str) -> str:
    """`1 die`, `32 dies`, `3 copies`."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"
