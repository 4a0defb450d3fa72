"""`kimi-graph targets`: what there is to run on, every number with its source."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_graph.compile.targets import TARGETS, Target, target
from kimi_graph.hardware import Number


@dataclass(frozen=True)
class Profiles:
    """Targets. `sources`: one was asked for, so that sources are told."""

    targets: tuple[Target, ...]
    sources: bool

    @property
    def summary(self) -> str:
        names = ", ".join(t.name for t in self.targets)
        return f"{names}: numbers of one die"

    def text(self) -> str:
        if self.sources:
            return "\n\n".join("\n".join(_lines(t)) for t in self.targets)
        return "\n".join(
            [
                *table([_HEAD, *map(_row, self.targets)]),
                "rates: T is 10^12 operations a second, a multiplication and an addition being two",
                "",
                *table([_JOINED, *map(_joined, self.targets)]),
                "",
                "kimi-graph targets NAME tells the source of every number",
            ]
        )

    def to_json(self) -> Any:
        return [_json(t) for t in self.targets]


def profiles(name: str | None = None) -> Profiles:
    """All targets, or one.

    Raises:
        CompileError: a name that is not known.
    """
    return Profiles(tuple(target(n) for n in (TARGETS if name is None else [name])), name is not None)


def numbers(t: Target) -> dict[str, Number]:
    """Every number of a target, by a name for readers."""
    die = t.die
    return {
        "memory": die.memory,
        "bandwidth": die.bandwidth,
        "L2": die.l2,
        "L2 bandwidth": die.l2_bandwidth,
        **{f"cube {dtype}": rate for dtype, rate in die.cube.items()},
        "vector fp16": die.vector,
        **{f"buffer {name} of a core": size for name, size in die.buffers.items()},
        **{f"link {link.name}, one way": link.bandwidth for link in t.links},
        **{f"link {link.name}, a step": link.latency for link in t.links},
    }


def groups(t: Target) -> str:
    """`2 of a package, 16 of a host, then the network`."""
    return ", ".join([f"{link.dies:,} of a {link.name}" for link in t.links[:-1]] + [f"then the {t.links[-1].name}"])


_HEAD = ("target", "product", "memory", "bandwidth", "bf16", "fp8", "int8", "fp4", "vector")
_JOINED = ("target", "dies that a link joins, and its rate one way")


def _row(t: Target) -> tuple[str, ...]:
    cube = t.die.cube
    rates = (cube[d].text.removesuffix("FLOP/s") if d in cube else "-" for d in ("bf16", "fp8", "int8", "fp4"))
    memory, moved = t.die.memory.text, t.die.bandwidth.text
    return t.name, t.product, memory, moved, *rates, t.die.vector.text.removesuffix("op/s")


def _joined(t: Target) -> tuple[str, ...]:
    """`2 of a package 270 GB/s, 16 of a host 196 GB/s, then the network 25 GB/s`."""
    levels = zip(groups(t).split(", "), t.links, strict=True)
    return t.name, "; ".join(f"{level} {link.bandwidth.text}" for level, link in levels)


def _lines(t: Target) -> list[str]:
    head = f"{t.name}: {t.product}, {t.soc_version} (also {', '.join(t.soc_versions[1:4])} ...); dies: {groups(t)}"
    rows = [("", "one die", "", "source")]
    rows += [(name, n.text, n.how, n.source) for name, n in numbers(t).items()]
    return [head, *table(rows)]


def _json(t: Target) -> dict[str, Any]:
    found = {
        name: {"value": n.value, "unit": n.unit, "how": n.how, "source": n.source} for name, n in numbers(t).items()
    }
    domains = {link.name: link.dies for link in t.links[:-1]}
    return {"name": t.name, "product": t.product, "soc_version": t.soc_version, "dies": domains, "numbers": found}


WIDTH = 100  # of a line of words; columns of numbers may be wider, and a command is never broken


def wrapped(words: str, indent: int = 10) -> list[str]:
    """Lines of a sentence, all but the first indented."""
    return textwrap.wrap(words, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns, all to the left; the first row is the head. Words of the last one are broken to `WIDTH`."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [line for row in rows for line in _table_row(row, widths)]


def _table_row(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    head = "".join(cell.ljust(w + 2) for cell, w in zip(row[:-1], widths[:-1], strict=True))
    room = max(30, WIDTH - 2 - len(head))  # tables may be indented by two
    first, *rest = textwrap.wrap(row[-1], room, break_on_hyphens=False, break_long_words=False) or [""]
    yield (head + first).rstrip()
    yield from (" " * len(head) + line for line in rest)
