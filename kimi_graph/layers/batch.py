"""Where a step reads and writes: the state contract shared by every layer, phase and bundle.

Sequences own KDA slots and cache pages. Slot 0 and page 0 are nobody's: padding writes there. A new sequence needs no
clearing: it starts from zero because `lengths == counts`, whatever its slot held before.

Where W devices share a sequence's tokens (context parallelism, split caches), each has a pool of its own, with a page 0
that is nobody's. Page i of a sequence is one of device i mod W, and ids of pages and rows count through the pools of
these devices, one after another; what a step is told is the same on all of them. W divides the pages of a sequence.

Axes: B sequences (rows), T new tokens of a row, S slots, H heads, V value, K key, P pages, L latent, R rope channels.
"""

from typing import Any, Generic

import torch
from torch import Tensor

from kimi_graph import ops, tree
from kimi_graph.config import RopeConfig
from kimi_graph.errors import ConfigError
from kimi_graph.spec import ParamSpec
from kimi_graph.tree import Leaf, param_tree

from .rope import rope_rows


@param_tree
class Batch(Generic[Leaf]):
    """Where each row stands.

    Attributes:
        slots: `[B]` int32, KDA slot of each row; 0 for a row that is not used.
        lengths: `[B]` int64, tokens of the row's sequence after this step.
        counts: `[B]` int64, new tokens of the row in this step (0..T); the rest of the row is right padding.
            Lengths and counts decide shapes: on a GPU they are best left on the host, so that nothing waits for them.
        block_table: `[B, pages of a sequence]` int32, the cache pages of each row, in order.
        slot_mapping: `[B * T]` int64, cache row (page * page size + offset) each new token is written to; padding goes
            to page 0.
        cos, sin: `[B, T, R / 2]` float32, of the angles that the new tokens' rope channels turn by; None without
            rotation.
    """

    slots: Leaf
    lengths: Leaf
    counts: Leaf
    block_table: Leaf
    slot_mapping: Leaf
    cos: Leaf | None = None
    sin: Leaf | None = None


@param_tree
class KdaState(Generic[Leaf]):
    """Memory of one KDA layer: fixed size.

    Attributes:
        memory: `[S, H, V, K]` float32, what has been written, read along the key.
        query, key, value: `[S, H, K or V, conv width - 1]`, the last inputs of each short convolution, oldest first.
    """

    memory: Leaf
    query: Leaf
    key: Leaf
    value: Leaf


@param_tree
class MlaState(Generic[Leaf]):
    """Cache of one MLA layer: grows by a row per token.

    Attributes:
        latent: `[P, page size, L]`, after its norm.
        rope: `[P, page size, R]`, turned by its position where the model rotates.
        index: `[P, page size, index key]`, keys of the layer's own indexer; None where it has none.
    """

    latent: Leaf
    rope: Leaf
    index: Leaf | None = None


def step_batch(
    block_table: Tensor,
    slots: Tensor,
    before: Tensor,
    counts: Tensor,
    tokens: int,
    page: int,
    *,
    rope: tuple[RopeConfig, int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Batch[Tensor]:
    """The `Batch` of a step of at most `tokens` new tokens a row.

    Args:
        block_table: `[B, pages of a sequence]` int32.
        slots: `[B]` int32.
        before: `[B]` int64, tokens that the sequences hold already.
        counts: `[B]` int64, new tokens of each row.
        tokens: T, width of the rows.
        page: tokens of a page.
        rope: rotation of the model and its channels; None: the model has none.
        dtype: of `cos` and `sin`.
    """
    rows, device = torch.arange(tokens, device=before.device), block_table.device
    position = before[:, None] + rows
    inside = rows < counts[:, None]
    last = block_table.shape[1] - 1
    pages = torch.gather(block_table.long(), 1, (position // page).clamp(max=last).to(device))
    mapping = torch.where(inside.to(device), pages * page + (position % page).to(device), (rows % page).to(device))
    cos, sin = (None, None) if rope is None else (x.to(device, dtype) for x in rope_rows(*rope, position))
    return Batch(
        slots=slots,
        lengths=before + counts,
        counts=counts,
        block_table=block_table,
        slot_mapping=mapping.reshape(-1),
        cos=cos,
        sin=sin,
    )


def row_batch(
    rows: int,
    tokens: int,
    *,
    before: int = 0,
    room: int | None = None,
    device: Any = None,
    rope: tuple[RopeConfig, int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Batch[Tensor]:
    """The `Batch` of full rows in the plainest layout: row i owns slot i + 1 and page i + 1. Lengths are on the host.

    Args:
        before: tokens every sequence holds already.
        room: tokens a sequence can hold, which is the page size; by default just these.
        rope, dtype: see `step_batch`.
    """
    own = torch.arange(1, rows + 1, dtype=torch.int32, device=device)
    held, counts = torch.tensor([[before], [tokens]]).expand(2, rows)
    return step_batch(own[:, None], own, held, counts, tokens, room or before + tokens, rope=rope, dtype=dtype)


def turn(x: Tensor, batch: Batch[Tensor], interleaved: bool) -> Tensor:
    """Channels `[B, T, R]` or `[B, T, H, R]` of the new tokens, rotated by their positions."""
    assert batch.cos is not None and batch.sin is not None, "a batch without the angles of this model's rotation"
    if x.ndim == 3:
        return ops.rope(x[:, :, None], batch.cos, batch.sin, interleaved).flatten(2, 3)
    return ops.rope(x, batch.cos, batch.sin, interleaved)


def zero_state(specs: Any, like: Tensor) -> Any:
    """An empty state: zeros for every spec, on the device of `like` (`[...]`, any shape); float64 where `like` is."""

    def zeros(spec: ParamSpec) -> Tensor:
        return like.new_zeros(spec.shape, dtype=like.dtype if like.dtype == torch.float64 else spec.dtype)

    return tree.map(zeros, specs)


def one_token(layer: str, x: Tensor) -> None:
    """Refuse a step `[B, T, ...]` with more than one token a row.

    Raises:
        ConfigError: T is not 1.
    """
    if x.shape[1] != 1:
        raise ConfigError(f"{layer}: step=True takes one token a row, found {x.shape[1]}; use step=False for more.")


def check_input(layer: str, x: Tensor, weight: Tensor) -> None:
    """Refuse what a layer that is called alone cannot read: `x` is `[B, T, D]`, of the dtype and width of `weight`.

    Raises:
        ConfigError: another number of dimensions, width or dtype.
    """
    found = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
    if x.ndim != 3 or x.shape[-1] != weight.shape[-1]:
        raise ConfigError(f"{layer}: x: found {found}, expected [B, T, {weight.shape[-1]}].")
    if x.dtype != weight.dtype:
        wanted = str(weight.dtype).removeprefix("torch.")
        raise ConfigError(f"{layer}: x: found {found}, expected the weights' dtype, {wanted}.")


def new_rows(
    layer: str, given: tuple[Any, Any], specs: Any, x: Tensor, rope: tuple[RopeConfig, int] | None = None
) -> tuple[Any, Batch[Tensor]]:
    """State and batch of sequences that start with `x`, `[B, T, D]`, for a layer called with neither.

    Raises:
        ConfigError: one of the two was given.
    """
    if given != (None, None):
        raise ConfigError(
            f"{layer}: `state` or `batch` without the other; give both, or neither to start new sequences."
        )
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return zero_state(specs, x), row_batch(*x.shape[:2], device=x.device, rope=rope, dtype=dtype)
