"""Other layouts of a batch, moved to right-padded rows and back. Positions count a row's real tokens: moving is exact.

Axes: N sequences, T tokens of the longest, B rows; `...` is anything, and gradients pass.
"""

import torch
from torch import Tensor

from kimi_graph.errors import ConfigError


def unpack(packed: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences laid end to end, moved to rows of their own.

    Args:
        packed: `[1, total, ...]`.
        cu_seqlens: `[N + 1]` integers: where each sequence starts, and the total.

    Returns:
        right-padded `[N, T, ...]` (padding repeats a token, whose value must not matter) and counts `[N]` int64.

    Raises:
        ConfigError: boundaries that do not go from 0 up to the total.
    """
    bounds = cu_seqlens.tolist()
    total = packed.shape[1]
    if packed.shape[0] != 1 or len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != total or bounds != sorted(bounds):
        raise ConfigError(
            f"cu_seqlens {bounds[:8]} for packed tokens of shape {list(packed.shape[:2])}; "
            f"expected one row, and boundaries that rise from 0 to {total}."
        )
    counts = cu_seqlens.long().diff()
    at = cu_seqlens[:-1, None] + torch.arange(int(counts.max()), device=packed.device)
    return packed[0, at.clamp(max=total - 1)], counts


def pack(rows: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Right-padded `[N, T, ...]` -> `[1, total, ...]`, the inverse of `unpack`."""
    counts = cu_seqlens.diff()
    real = torch.arange(rows.shape[1], device=rows.device) < counts[:, None]
    return rows[real][None]


def left_to_right(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Real tokens moved to the left of their row, in order, wherever they were.

    Args:
        x: `[B, T, ...]`.
        mask: `[B, T]`, False or 0 at padding.

    Returns:
        right-padded `[B, T, ...]` and counts `[B]` int64.

    Raises:
        ConfigError: a mask of another shape.
    """
    if mask.shape != x.shape[:2]:
        raise ConfigError(f"mask has shape {list(mask.shape)}; the tokens' is {list(x.shape[:2])}.")
    return _take(x, _order(mask)), mask.bool().sum(1)


def right_to_left(x: Tensor, mask: Tensor) -> Tensor:
    """The inverse of `left_to_right`: rows `[B, T, ...]` as they were; padding becomes zero."""
    order = _order(mask)
    positions = torch.arange(x.shape[1], device=x.device).expand_as(order)
    moved = _take(x, torch.empty_like(order).scatter_(1, order, positions))
    return moved.masked_fill(~mask.bool().view(*mask.shape, *[1] * (x.ndim - 2)), 0)


def _order(mask: Tensor) -> Tensor:
    return torch.sort(mask.bool().int(), dim=1, descending=True, stable=True).indices


def _take(x: Tensor, at: Tensor) -> Tensor:
    return x[torch.arange(len(x), device=x.device)[:, None], at]
