"""DeepSeek Sparse Attention in two stages: select the best cached tokens of each query, then attend to those alone.

Letters: B rows, T tokens, C cached tokens, H heads, I index heads, K index key, L latent, R rope channels, J selected.
"""

import torch
from torch import Tensor

from .base import at_least_f32, may_overwrite, operator


@operator(sharding="b t k, p g k, b -> p g k", whole="tkpg")
def index_write(key: Tensor, pool: Tensor, slot_mapping: Tensor) -> Tensor:
    """The pool with each new token's index key at its cache row.

    Args:
        key: `[B, T, K]`. pool: `[P, page, K]`.
        slot_mapping: `[B * T]` int64, page * page size + offset; padding points into page 0.
    """
    flat, rows = pool.flatten(0, 1), key.flatten(0, 1).to(pool.dtype)
    if may_overwrite(pool):
        flat.index_copy_(0, slot_mapping, rows)
        return pool
    return flat.index_copy(0, slot_mapping, rows).view(pool.shape)


@index_write.fake
def _(key, pool, slot_mapping):
    return torch.empty_like(pool)


@operator(sharding="b t h k, b t h, p g k, b n, b, b -> b t j", whole="thkpgnj")
def select_keys(
    q: Tensor, weights: Tensor, pool: Tensor, block_table: Tensor, lengths: Tensor, counts: Tensor, top_k: int
) -> Tensor:
    """Positions of the `top_k` tokens up to itself that score best with each query, one set for all attention heads.

    The score of a query and a cached token is `sum_h weights_h relu(q_h . k * K^-0.5)`, in float32.

    Args:
        q: `[B, T, I, K]`. weights: `[B, T, I]` float32, any sign. pool: `[P, page, K]`.
        block_table: `[B, pages of a sequence]` int32. lengths, counts: `[B]`, see `Batch`.

    Returns:
        `[B, T, top_k]` int32, best first, equal scores in order of position; -1 after the last where fewer tokens are
        visible, and everywhere in rows past `counts`.
    """
    rows, tokens, _, key = q.shape
    selected = torch.full((rows, tokens, top_k), -1, dtype=torch.int32, device=q.device)
    for row, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        keys = at_least_f32(pool[block_table[row].long()].flatten(0, 1)[:length])
        for t in range(count):
            seen = length - count + t + 1
            score = torch.relu(at_least_f32(q[row, t]) @ keys[:seen].mT * key**-0.5)
            best = torch.sort(at_least_f32(weights[row, t]) @ score, descending=True, stable=True).indices[:top_k]
            selected[row, t, : len(best)] = best.int()
    return selected


@select_keys.fake
def _(q, weights, pool, block_table, lengths, counts, top_k):
    return q.new_empty(*q.shape[:2], top_k, dtype=torch.int32)


@operator(sharding="b t h l, b t h r, p g l, p g r, b t j, b n, b, b -> b t h l", whole="tpglrnj")
def sparse_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_pool: Tensor,
    rope_pool: Tensor,
    selected: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    counts: Tensor,
    scale: float,
) -> Tensor:
    """Softmax attention of each query over its selected tokens of the paged latent cache, keys and values at once.

    Args:
        q_latent: `[B, T, H, L]`, queries moved into the latent space. q_rope: `[B, T, H, R]`.
        latent_pool: `[P, page, L]`. rope_pool: `[P, page, R]`.
        selected: `[B, T, J]` int32 positions in the row's sequence, the same for all heads; -1, and positions after
            the query, are not attended to.
        block_table: `[B, pages of a sequence]` int32. lengths, counts: `[B]`, see `Batch`.

    Returns:
        `[B, T, H, L]`: weighted latents, still to be moved into the value space; zeros past `counts`.
    """
    tokens, page = q_latent.shape[1], latent_pool.shape[1]
    outs = []
    for row, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        for t in range(tokens):
            chosen = selected[row, t].long()
            chosen = chosen[(chosen >= 0) & (chosen < length - count + t + 1)]
            if t >= count or not len(chosen):
                outs.append(torch.zeros_like(q_latent[row, t]))
                continue
            at = block_table[row].long()[chosen // page] * page + chosen % page
            latent = at_least_f32(latent_pool.flatten(0, 1)[at])
            scores = at_least_f32(q_latent[row, t]) @ latent.mT
            scores = scores + at_least_f32(q_rope[row, t]) @ at_least_f32(rope_pool.flatten(0, 1)[at]).mT
            outs.append(((scores * scale).softmax(-1) @ latent).to(q_latent.dtype))
    return torch.stack(outs).view(q_latent.shape)


@sparse_attention.fake
def _(q_latent, q_rope, latent_pool, rope_pool, selected, block_table, lengths, counts, scale):
    return torch.empty_like(q_latent)
