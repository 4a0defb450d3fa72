"""A step of an engine as rows of the library: which requests are computed together, and where each of them stands.

An engine lays the new tokens of all requests end to end. The library takes right-padded rows, and one token a row is a
step of its own. So requests that decode are one group, and those that read are grouped by length, so that no group is
more than half padding.

Axes: N tokens of a step, R requests, B rows of a group, T tokens of the longest, P pages of a sequence.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_PADDING = 2  # the longest row of a group over its shortest


@dataclass(frozen=True)
class Rows:
    """Requests that are computed together.

    Attributes:
        requests: `[B]` int64, their numbers in the step.
        at: `[B, T]` int64, where their tokens are among the step's; padding repeats a row's last.
        before, counts: `[B]` int64, tokens that the caches hold of each, and new ones.
        step: one token a row, of sequences that have begun.
    """

    requests: Tensor
    at: Tensor
    before: Tensor
    counts: Tensor
    step: bool

    @property
    def real(self) -> Tensor:
        """`[B, T]`, False at padding."""
        return torch.arange(self.at.shape[1], device=self.at.device) < self.counts[:, None]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence after the step."""
        return int((self.before + self.counts).max())


def rows_of(
    starts: Sequence[int], lengths: Sequence[int], *, shared: bool = False, ways: int = 1, device: str = "cpu"
) -> list[Rows]:
    """The groups of a step, in an order in which they can be computed one after another.

    Args:
        starts: `[R + 1]`, where the tokens of each request begin in the step, and where the last ones end.
        lengths: `[R]`, tokens of each sequence after the step.
        shared: a request may read pages that another one writes in this step (`reads_new_pages`). What it reads comes
            before what it writes, so the writer has fewer tokens already: rows go in the order of those, and only
            neighbours in it are put together.
        ways: T is padded to a multiple of it in groups that read: ranks share their queries out.
    """
    rows = []
    for request, ((start, end), length) in enumerate(zip(itertools.pairwise(starts), lengths, strict=True)):
        count = end - start
        before = length - count
        if count:
            step = count == 1 and before > 0  # a sequence that starts is read, not stepped: that is what clears it
            rows.append((before if shared else 0, not step, count, before, start, request))
    rows.sort()
    return [_group(some, ways, device) for some in _cuts(rows)]


Row = tuple[int, bool, int, int, int, int]  # order, whether it reads, count, before, start, request


def _cuts(rows: list[Row]) -> Iterator[list[Row]]:
    """Rows in order, cut where they are of another kind or another length."""
    some: list[Row] = []
    for row in rows:
        counts = [row[2], *(r[2] for r in some)]
        if some and (some[0][1] != row[1] or max(counts) > MOST_PADDING * min(counts)):
            yield some
            some = []
        some.append(row)
    if some:
        yield some


def _group(rows: list[Row], ways: int, device: str) -> Rows:
    _, reads, counts, before, starts, requests = zip(*rows, strict=True)
    count, start = (torch.tensor(x, dtype=torch.int64) for x in (counts, starts))
    tokens = -(-max(counts) // ways) * ways if reads[0] else 1
    at = start[:, None] + torch.minimum(torch.arange(tokens), count[:, None] - 1)
    parts = torch.tensor(requests), at, torch.tensor(before, dtype=torch.int64), count
    return Rows(*(x.to(device) for x in parts), step=not reads[0])


def reads_new_pages(block_table: Tensor, before: Tensor, counts: Tensor, page: int) -> bool:
    """Whether a request reads pages that another writes in this step: a prefix that was found before it is computed.

    Args:
        block_table: `[R, P]`.
        before, counts: `[R]`, see `Rows`.
    """
    column = torch.arange(block_table.shape[1], device=block_table.device)
    before, counts = before.to(column.device), counts.to(column.device)
    first, last = before[:, None] // page, (before + counts - 1)[:, None] // page
    read = block_table[column < first]
    return bool(torch.isin(read, block_table[(column >= first) & (column <= last)]).any())
