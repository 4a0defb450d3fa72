"""Rows of an attention page in fewer bits: a code for each number, and a scale for each run of channels. No engine.

Axes: N rows, W numbers of a row, C of a run, R runs of a row.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

RUN = 64  # channels that share a scale: latent, rope and index key have their own, each a multiple of it

CODES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}  # dtype, and its largest number


@dataclass(frozen=True)
class Layout:
    """Where the rows of attention layers lie in a chunk of shared memory, and how they are coded.

    Attributes:
        pages: `[(offset, rows)]` in bytes of the chunk, one for each layer and rank.
        width: numbers of a row.
        run: that share a scale; divides width.
        dtype: of a number.
        code: one of `CODES`.
    """

    pages: Sequence[tuple[int, int]]
    width: int
    run: int
    dtype: torch.dtype
    code: str

    @property
    def size(self) -> int:
        """Bytes of a chunk in code."""
        return sum(rows for _, rows in self.pages) * (self.width + 4 * self.width // self.run)

    def coded(self, chunk: Tensor) -> Tensor:
        """`[size]` uint8 of a chunk's bytes `[..]` uint8: scales, then codes, of one page after another.

        A number that is not finite is not finite afterwards.
        """
        dtype, most = CODES[self.code]
        parts = []
        for offset, rows in self.pages:
            x_NRC = self._page(chunk, offset, rows).float()
            scale_NR1 = x_NRC.abs().amax(-1, keepdim=True) / most
            y_NRC = x_NRC / scale_NR1.clamp(min=torch.finfo(torch.float32).tiny)
            y_NRC = y_NRC.round() if dtype is torch.int8 else y_NRC
            parts += [scale_NR1.flatten().view(torch.uint8), y_NRC.to(dtype).view(torch.uint8).flatten()]
        return torch.cat(parts)

    def decode(self, coded: Tensor, chunk: Tensor) -> None:
        """Write the rows of `coded` `[size]` where they lie in a chunk's bytes; the rest of them stays."""
        dtype, _ = CODES[self.code]
        start = 0
        for offset, rows in self.pages:
            runs = rows * (self.width // self.run)
            scales, codes = coded[start : start + 4 * runs], coded[start + 4 * runs :][: rows * self.width]
            start += 4 * runs + rows * self.width
            x_NRC = codes.view(dtype).view(rows, -1, self.run).float() * scales.view(torch.float32).view(rows, -1, 1)
            self._page(chunk, offset, rows).copy_(x_NRC)

    def _page(self, chunk: Tensor, offset: int, rows: int) -> Tensor:
        page = chunk[offset : offset + rows * self.width * self.dtype.itemsize]
        return page.view(self.dtype).view(rows, -1, self.run)


def bytes_of(view: memoryview) -> Tensor:
    """`[chunks, bytes]` uint8 of shared memory, nothing copied."""
    return torch.from_numpy(np.asarray(view)).view(torch.uint8)


def layout_of(
    groups: Mapping[int, tuple[Sequence[str], int]],
    attention: Collection[int],
    width: int,
    *,
    bytes_of_rank: int,
    ranks: int,
    dtype: torch.dtype,
    code: str,
) -> dict[int, Layout]:
    """Layouts of the groups that have attention layers alone, as the engine packs a chunk: rank after rank, and of
    each its pages, as many as the largest group has layers; a smaller group leaves the last ones out.

    Args:
        groups: names of layers (`layers.3.mixer`) and tokens of a page, of each group.
        attention: numbers of the layers that have rows, each of `width` numbers.
        bytes_of_rank: of a chunk.
    """
    places = max(len(names) for names, _ in groups.values())
    assert bytes_of_rank % places == 0, (bytes_of_rank, places)
    page = bytes_of_rank // places
    found = {}
    for group, (names, tokens) in groups.items():
        if all(int(name.split(".")[1]) in attention for name in names):
            assert tokens * width * dtype.itemsize == page, (tokens, width, dtype, page)  # memories are padded to it
            at = [(rank * bytes_of_rank + place * page, tokens) for rank in range(ranks) for place in range(len(names))]
            found[group] = Layout(at, width, math.gcd(width, RUN), dtype, code)
    return found
