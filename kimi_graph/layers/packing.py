"""Other layouts of a batch, moved to right-padded rows and back. No layer knows positions, so moving is exact.

Axes: N sequences, T longest, ... anything.
"""

import torch
from torch import Tensor


def unpack(packed: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """`[1, total, ...]` with boundaries `[N + 1]` -> right-padded `[N, T, ...]` and counts `[N]`."""
    counts = cu_seqlens.diff()
    at = cu_seqlens[:-1, None] + torch.arange(int(counts.max()))
    return packed[0][at.clamp(max=packed.shape[1] - 1)], counts


def pack(rows: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Right-padded `[N, T, ...]` -> `[1, total, ...]`."""
    counts = cu_seqlens.diff()
    real = torch.arange(rows.shape[1]) < counts[:, None]
    return rows[real][None]


def left_to_right(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows `[B, T, ...]` with their real tokens (mask True) moved to the left, and counts `[B]`."""
    order = torch.sort(mask.int(), dim=1, descending=True, stable=True).indices
    return x[torch.arange(len(x))[:, None], order], mask.sum(1)


def right_to_left(x: Tensor, mask: Tensor) -> Tensor:
    """The inverse of `left_to_right`; padding becomes zero."""
    order = torch.sort(mask.int(), dim=1, descending=True, stable=True).indices
    back = torch.empty_like(order).scatter_(1, order, torch.arange(x.shape[1]).expand_as(order))
    moved = x[torch.arange(len(x))[:, None], back]
    return moved.masked_fill(~mask.view(*mask.shape, *[1] * (x.ndim - 2)), 0)
