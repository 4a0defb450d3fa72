"""A document of headings, paragraphs, lists and tables, as Markdown and as one file of HTML that loads nothing."""

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kimi_graph.display import Html, document
from kimi_graph.plan.html import STYLE

MARKS = ("passed", "failed", "skipped")  # cells of these words have a colour
_COLOURS = """
td:not(:last-child) { white-space: normal } td:first-child { white-space: nowrap }
.passed { color: #1d5b26 } .failed { color: #8c1d10; font-weight: bold } .skipped { color: #555 }
td.passed, td.failed, td.skipped { white-space: nowrap }
td.passed { background: #d8ecd8 } td.failed { background: #f6d3cf } td.skipped { background: #e8e8e8 }
pre { background: #f3f3f3; padding: .6em; overflow-x: auto }
"""


@dataclass(frozen=True)
class Heading:
    """A title (level 1) or a section's."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph. `mark`: one of `MARKS`, or nothing."""

    text: str
    mark: str = ""


@dataclass(frozen=True)
class Points:
    """A list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Code:
    """Lines for a shell."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Cells; the first row is the head."""

    rows: Sequence[Sequence[str]]


Block = Heading | Text | Points | Code | Table


def as_markdown(blocks: Iterable[Block]) -> str:
    """The document as Markdown."""
    return "\n".join(line for block in blocks for line in (*_markdown(block), ""))


def _markdown(block: Block) -> Iterator[str]:
    match block:
        case Heading():
            yield f"{'#' * block.level} {block.text}"
        case Text():
            yield f"**{block.text}**" if block.mark == "failed" else block.text
        case Points():
            yield from (f"- {item}" for item in block.items)
        case Code():
            yield from ("```bash", *block.lines, "```")
        case Table():
            head, *rows = block.rows
            for row in (head, ["---"] * len(head), *rows):
                yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |"


def as_html(blocks: Sequence[Block]) -> str:
    """The document as one file; the first heading is its title."""
    title = next(b.text for b in blocks if isinstance(b, Heading))
    return document(title, STYLE + _COLOURS, Html("\n".join(map(_html, blocks))))


def _html(block: Block) -> str:
    match block:
        case Heading():
            return f"<h{block.level}>{html.escape(block.text)}</h{block.level}>"
        case Text():
            return f"<p{_class(block.mark)}>{html.escape(block.text)}</p>"
        case Points():
            return f"<ul>{''.join(f'<li>{html.escape(item)}</li>' for item in block.items)}</ul>"
        case Code():
            return f"<pre>{html.escape(chr(10).join(block.lines))}</pre>"
        case Table():
            head, *rows = block.rows
            lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)]
            lines += ["".join(f"<td{_class(cell)}>{html.escape(cell)}</td>" for cell in row) for row in rows]
            return "<div><table>" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"


def _class(mark: str) -> str:
    return f' class="{mark}"' if mark in MARKS else ""
