"""Where a step reads and writes: the state contract shared by every layer, phase and bundle.

Sequences own KDA slots and cache pages. Slot 0 and page 0 are nobody's: padding writes there. A new sequence needs no
clearing: it starts from zero because `lengths == counts`, whatever its slot held before.

Axes: B sequences (rows), T new tokens of a row, S slots, H heads, V value, K key, P pages, L latent, R rope channels.
"""

from typing import Generic

import torch
from torch import Tensor

from kimi_graph.tree import Leaf, param_tree


@param_tree
class Batch(Generic[Leaf]):
    """Where each row stands.

    Attributes:
        slots: `[B]` int32, KDA slot of each row; 0 for a row that is not used.
        lengths: `[B]` int64, tokens of the row's sequence after this step.
        counts: `[B]` int64, new tokens of the row in this step (0..T); the rest of the row is right padding.
        block_table: `[B, pages of a sequence]` int32, the cache pages of each row, in order.
        slot_mapping: `[B * T]` int64, cache row (page * page size + offset) each new token is written to; padding goes
            to page 0.
    """

    slots: Leaf
    lengths: Leaf
    counts: Leaf
    block_table: Leaf
    slot_mapping: Leaf


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
        rope: `[P, page size, R]`.
    """

    latent: Leaf
    rope: Leaf


def step_batch(
    block_table: Tensor, slots: Tensor, before: Tensor, counts: Tensor, tokens: int, page: int
) -> Batch[Tensor]:
    """The `Batch` of a step of at most `tokens` new tokens a row, for sequences that hold `before` tokens each."""
    rows = torch.arange(tokens, device=before.device)
    position = before[:, None] + rows
    inside = rows < counts[:, None]
    last = block_table.shape[1] - 1
    pages = torch.gather(block_table.long(), 1, (position // page).clamp(max=last))
    mapping = torch.where(inside, pages * page + position % page, rows % page)
    return Batch(
        slots=slots, lengths=before + counts, counts=counts, block_table=block_table, slot_mapping=mapping.reshape(-1)
    )
