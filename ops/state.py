"""States by slot: rows of a batch read from their slots, and written back.

Letters: B rows, S slots, H heads, V and K the rest of a slot.
"""

import torch
from torch import Tensor

from .base import empty_like, may_overwrite, operator


def state_rows(state: Tensor, slots: Tensor, lengths: Tensor, counts: Tensor) -> Tensor:
    """The rows' slots of a state, `[S, ...]` -> `[B, ...]`; zeros where a sequence starts, whatever its slot holds."""
    rows = state.index_select(0, slots)
    starts = [length <= count for length, count in zip(lengths.tolist(), counts.tolist(), strict=True)]
    if any(starts):
        rows = rows.masked_fill(torch.tensor(starts, device=rows.device).view(-1, *[1] * (rows.ndim - 1)), 0)
    return rows


def put_rows(state: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """`state` `[S, ...]` with `rows` `[B, ...]` at `slots`; written into `state` itself where the caller gave it up."""
    rows = rows if rows.dtype == state.dtype else rows.to(state.dtype)
    if may_overwrite(state):
        return state.index_copy_(0, slots.long(), rows)
    return state.index_copy(0, slots.long(), rows)


@operator(sharding="b h v k, s h v k, b -> s h v k", whole="s")
def state_write(rows: Tensor, state: Tensor, slots: Tensor) -> Tensor:
    """The state with each row's next value at its slot: for what no operator computes in place.

    Args:
        rows: `[B, H, V, K]`.
        state: `[S, H, V, K]`.
        slots: `[B]` int32.
    """
    return put_rows(state, slots, rows)


@state_write.fake
def _(rows, state, slots):
    return empty_like(state)


@state_write.lowering
def _(ge, rows, state, slots):
    reason = "what went on from rank to rank is written once, into the state itself"
    ge.chose("state after all stretches", "ScatterNdUpdate", reason)
    return ge.ScatterNdUpdate(state, ge.reshape(slots, [*ge.shape(slots), 1]), ge.cast(rows, ge.dtype(state)))
