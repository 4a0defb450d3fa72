"""Of which calls of a bundle's graphs a step of an engine is made, and what each of them is given.

Axes: N tokens of a step, R requests, B rows of a graph, T its tokens a row, P pages of a sequence.
"""

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_graph import tree
from kimi_graph.compile.buckets import Gear
from kimi_graph.layers import arrange_patches, step_batch, vision_tables
from kimi_graph.layers.vision import Grid

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

    @property
    def real(self) -> Tensor:
        """`[n, t]`, False at padding."""
        return torch.arange(self.at.shape[1]) < self.counts[:, None]


def calls_of(
    rows: Rows,
    gears: Mapping[str, Sequence[Gear]],
    *,
    shared: bool = False,
    pictured: Tensor | None = None,
    most: int = 0,
) -> list[Call]:
    """The calls that compute a group of rows, one after another.

    A row with more tokens than a graph takes is several pieces, each in a call of its own. More rows than a graph has
    take turns. Of the graphs that have enough rows the one with the fewest is called.

    Args:
        shared: a row may read pages that another one writes, see `rows_of`: pieces go in the order of their positions.
        pictured: `[N]` bool, tokens of the step that are a picture's; None: none. A call has at most `most` of them.
    """
    of_phase = gears["decode" if rows.step else "prefill"]
    if pictured is None:
        pictured = torch.zeros(int(rows.at.max()) + 1, dtype=torch.bool)
    pieces = sorted(_pieces(rows, of_phase[-1].tokens, pictured.cpu(), most, shared=shared))
    return [_call(rows, group, of_phase) for group in _packed(pieces, of_phase[-1].rows, most)]


@dataclass(frozen=True, order=True)
class Piece:
    """Tokens of a row that one call computes, from `first` on; `pictured` of them are a picture's."""

    order: int
    row: int
    first: int
    count: int
    pictured: int


def _pieces(rows: Rows, tokens: int, pictured: Tensor, most: int, *, shared: bool) -> Iterator[Piece]:
    for row, (before, count) in enumerate(zip(rows.before.tolist(), rows.counts.tolist(), strict=True)):
        seen = [0, *pictured[rows.at[row, :count].cpu()].cumsum(0).tolist()]  # a picture's, up to each token
        first = 0
        while first < count:
            end = min(first + tokens, count, bisect.bisect_right(seen, seen[first] + most) - 1)
            assert end > first, "a call has room for one of a picture's tokens"
            yield Piece(before + first if shared else first, row, first, end - first, seen[end] - seen[first])
            first = end


def _packed(pieces: Sequence[Piece], rows: int, most: int) -> Iterator[list[Piece]]:
    """Pieces in order, as many together as a call takes, and none of one row twice."""
    some: list[Piece] = []
    for piece in pieces:
        full = len(some) == rows or sum(p.pictured for p in some) + piece.pictured > most
        if some and (full or piece.row in [p.row for p in some]):
            yield some
            some = []
        some.append(piece)
    if some:
        yield some


def _call(rows: Rows, group: Sequence[Piece], gears: Sequence[Gear]) -> Call:
    gear = next(g for g in gears if g.rows >= len(group))
    row, first, counts = (
        torch.tensor(x, dtype=torch.int64) for x in zip(*((p.row, p.first, p.count) for p in group), strict=True)
    )
    column = first[:, None] + torch.minimum(torch.arange(gear.tokens), counts[:, None] - 1)
    at = rows.at.cpu()[row].gather(1, column)
    return Call(gear, rows.requests.cpu()[row], at, rows.before.cpu()[row] + first, counts)


def inputs_of(
    call: Call, graphs: Graphs, values: Mapping[str, Tensor], table: Tensor, slots: Tensor
) -> dict[str, Tensor]:
    """What a graph is given besides weights and states; rows that are left are nobody's.

    Args:
        values: of the tokens of the step, `[N, ..]`: `tokens`, what stages before have made of them, and in
            `vision.values` embeddings of a picture's tokens; others' are not numbers.
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
    own = {name: x.cpu()[call.at] for name, x in values.items()}
    pictures = _pictures(call, graphs, own.pop("vision.values", None))
    given = {name: _padded(x, (rows, call.gear.tokens, *x.shape[2:])) for name, x in own.items()}
    return given | pictures | {f"batch.{name}": x for name, x in tree.items(batch)}


def _pictures(call: Call, graphs: Graphs, own: Tensor | None) -> dict[str, Tensor]:
    """Of a graph that takes embeddings of pictures: those of a call in a row, and which token is which of them, from 1.

    Args:
        own: `[n, t, D]`; of a token that is no picture's, not numbers. None: there are no pictures.
    """
    shapes = {i["name"]: i["shape"] for i in graphs.bundle.graph(call.gear.phase)["inputs"]}
    if "vision.values" not in shapes:
        return {}
    rows, values = torch.zeros(call.at.shape), torch.zeros(shapes["vision.values"], dtype=graphs.settings.dtype)
    if own is not None:
        marked = is_picture(own) & call.real
        rows = marked.flatten().cumsum(0).view(marked.shape) * marked
        values[: int(marked.sum())] = own[marked].to(values.dtype)
    return {"vision.rows": _padded(rows, (call.gear.rows, call.gear.tokens)).long(), "vision.values": values}


def is_picture(values: Tensor) -> Tensor:
    """`[.., D]` -> `[..]`, which tokens have an embedding of a picture."""
    return ~values.isnan().all(-1)


def picture_inputs_of(graphs: Graphs, patches: Tensor, grid: Grid) -> dict[str, Tensor]:
    """What the graph of pictures is given besides weights: patches `[frames * rows * columns, P]` and their tables.

    Raises:
        ConfigError: more patches than it takes.
    """
    vision, room = graphs.config.vision, graphs.patches
    assert vision is not None
    exact = graphs.mode == "exact"
    tables = vision_tables(vision, grid, room, torch.float64 if exact else torch.float32)
    arranged = arrange_patches(vision, patches.cpu().to(torch.float64 if exact else graphs.config.dtype), grid, room)
    return {"vision.patches": arranged} | {f"tables.{name}": x for name, x in tree.items(tables)}


def _padded(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros after what is there, in every dimension."""
    made = x.new_zeros(shape)
    made[tuple(slice(size) for size in x.shape)] = x
    return made
