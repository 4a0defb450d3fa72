"""Of which calls of a bundle's graphs a step of an engine is made, and what each of them is given.

Axes: N tokens of a step, R requests, B rows of a graph, T its tokens a row, P pages of a sequence.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_graph import tree
from kimi_graph.compile.buckets import Gear
from kimi_graph.layers import step_batch

from .bundles import Graphs
from .rows import Rows


@dataclass(frozen=True)
class Call:
    """One call of a graph.

    Attributes:
        requests: `[n]` int64, their numbers in the step; n is at most the graph's rows.
        at: `[n, t]` int64, where their tokens are among the step's; padding repeats a row's last.
        before, counts: `[n]` int64, tokens that the caches hold of each, and new ones.
    """

    gear: Gear
    requests: Tensor
    at: Tensor
    before: Tensor
    counts: Tensor


def calls_of(rows: Rows, gears: Mapping[str, Sequence[Gear]], *, shared: bool = False) -> list[Call]:
    """The calls that compute a group of rows, one after another.

    A row with more tokens than a graph takes is several pieces, each in a call of its own. More rows than a graph has
    take turns. Of the graphs that have enough rows the one with the fewest is called.

    Args:
        shared: a row may read pages that another one writes, see `rows_of`: pieces go in the order of their positions.
    """
    of_phase = gears["decode" if rows.step else "prefill"]
    widest = of_phase[-1]
    pieces: list[tuple[int, int, int]] = []  # order, row, first token
    for row, (before, count) in enumerate(zip(rows.before.tolist(), rows.counts.tolist(), strict=True)):
        for first in range(0, count, widest.tokens):
            pieces.append((before + first if shared else first, row, first))
    return [_call(rows, group, of_phase) for group in _packed(sorted(pieces), widest.rows)]


def _packed(pieces: Sequence[tuple[int, int, int]], most: int) -> Iterator[list[tuple[int, int]]]:
    """Rows and first tokens, in order; no more than `most` together, and none of one row twice."""
    some: dict[int, int] = {}
    for _, row, first in pieces:
        if row in some or len(some) == most:
            yield list(some.items())
            some = {}
        some[row] = first
    if some:
        yield list(some.items())


def _call(rows: Rows, group: Sequence[tuple[int, int]], gears: Sequence[Gear]) -> Call:
    gear = next(g for g in gears if g.rows >= len(group))
    row, first = (torch.tensor(x, dtype=torch.int64) for x in zip(*group, strict=True))
    counts = (rows.counts.cpu()[row] - first).clamp(max=gear.tokens)
    column = first[:, None] + torch.minimum(torch.arange(gear.tokens), counts[:, None] - 1)
    at = rows.at.cpu()[row].gather(1, column)
    return Call(gear, rows.requests.cpu()[row], at, rows.before.cpu()[row] + first, counts)


def inputs_of(
    call: Call, graphs: Graphs, values: Mapping[str, Tensor], table: Tensor, slots: Tensor
) -> dict[str, Tensor]:
    """What a graph is given besides weights and states; rows that are left are nobody's.

    Args:
        values: of the tokens of the step, `[N, ..]`: `tokens`, and what stages before have made of them.
        table: `[R, pages]` of each request, in order.
        slots: `[R]`.
    """
    rows, state = call.gear.rows, graphs.contract
    page, most = state["page_tokens"], state["pages_per_sequence"]
    held = -(-(call.before + call.counts) // page)  # pages that a sequence has; what a table says after them is old
    own = table.cpu()[call.requests, :most]
    own = own * (torch.arange(own.shape[1]) < held[:, None])
    batch = step_batch(
        _padded(own, (rows, most)).int(),
        _padded(slots.cpu()[call.requests], (rows,)).int(),
        _padded(call.before, (rows,)),
        _padded(call.counts, (rows,)),
        call.gear.tokens,
        page,
        rope=graphs.config.rotation,
    )
    given = {name: _padded(x.cpu()[call.at], (rows, call.gear.tokens, *x.shape[1:])) for name, x in values.items()}
    return given | _no_pictures(call, graphs) | {f"batch.{name}": x for name, x in tree.items(batch)}


def _no_pictures(call: Call, graphs: Graphs) -> dict[str, Tensor]:
    """Inputs that say where pictures are: nowhere."""
    inputs = graphs.bundle.graph(call.gear.phase)["inputs"]
    named = {i["name"]: (i["shape"], getattr(torch, i["dtype"])) for i in inputs}
    return {n: torch.zeros(shape, dtype=dtype) for n, (shape, dtype) in named.items() if n.startswith("vision.")}


def _padded(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros after what is there, in every dimension."""
    made = x.new_zeros(shape)
    made[tuple(slice(size) for size in x.shape)] = x
    return made
