"""Caches that are split by sequence: what one device has of them, and how its part and the others' become the whole.

Page i of a sequence lies in the pool of device i mod W, W devices sharing a sequence's tokens (the axis `cached`), so
that all of them have as much to read at any length. Ids of pages count through the pools of these W devices, the first
pool's pages first; page 0 of each pool is nobody's. What a step is told (`Batch`) is the same on all of them, and is
what it would be without a mesh: each finds its own pages by where it stands.

All functions are for bodies of a `shard_map`, and the plain thing on one device.

Axes: B sequences, T new tokens, C cached tokens, H heads, L latent, J selected tokens, P pages of a pool, W devices.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_graph import ops
from kimi_graph.errors import ShardingError
from kimi_graph.ops import NO_SCORE, at_least_f32
from kimi_graph.parallel import constrain, summand, ways
from kimi_graph.parallel.annotate import all_gather, own_index, own_slice

POOL = (("batch", "cached"), None, None)  # logical axes of a pool in a body: a device has pages of its rows alone
EXACT_F32 = 1 << 24  # whole numbers up to here are exact in float32


def own_rows(slot_mapping: Tensor, pool: Tensor) -> Tensor:
    """Cache rows `[B * T]` of the new tokens within this device's pool; those of others' pages go to the null page."""
    if ways(pool, "cached") == 1:
        return slot_mapping
    rows = pool.shape[0] * pool.shape[1]
    own = slot_mapping - own_index(pool, "cached", rows)
    inside = own.clamp(0, rows - 1)
    return inside * (inside == own)


def own_stretch(x_BTD: Tensor) -> Tensor:
    """Of a prefill's new tokens `[B, T, D]` those whose queries are this device's, as many on each; all in a step.

    Raises:
        ShardingError: the tokens do not divide.
    """
    count, tokens = ways(x_BTD, "queries"), x_BTD.shape[1]
    if tokens % count:
        near = " or ".join(f"{n:,}" for n in (tokens // count * count, -(-tokens // count) * count) if n)
        raise ShardingError(
            f"{tokens:,} new tokens of a row do not divide over the {count} devices that share them out; "
            f"nearest: {near}."
        )
    return constrain(x_BTD, "batch", "queries", None)


def own_queries(x: Tensor, axis: str, lengths: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Where rows stand after this device's stretch of their new tokens, and how many of them are real: `[B]`, `[B]`.

    Args:
        x: `[B, T, ...]`, of that stretch.
        axis: logical axis that splits it.
    """
    if ways(x, axis) == 1:
        return lengths, counts
    tokens, before = x.shape[1], lengths - counts
    first = own_index(x, axis, tokens)
    return before + torch.minimum(counts, first + tokens), (counts - first).clamp(0, tokens)


def own_pages(block_table: Tensor, lengths: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
    """This device's pages of each sequence, in order, and how many tokens they hold: `[B, pages / W]`, `[B]`.

    Raises:
        ShardingError: the pages of a sequence do not divide.
    """
    count, (pages, page) = ways(pool, "cached"), pool.shape[:2]
    if count == 1:
        return block_table, lengths
    if block_table.shape[1] % count:
        raise ShardingError(
            f"sequences of {block_table.shape[1]} pages do not divide over the {count} devices that share them; "
            f"nearest: {-(-block_table.shape[1] // count) * count} pages."
        )
    mine = own_slice(block_table.unflatten(1, (-1, count)), "cached", 2)[..., 0]
    table = (mine - own_index(pool, "cached", pages).int()).clamp(0, pages - 1)  # those past a length may be anything
    rounds = lengths // (count * page)
    rest = lengths - rounds * (count * page) - own_index(pool, "cached", page)
    return table, rounds * page + rest.clamp(0, page)


def in_order(block_table: Tensor, lengths: Tensor, *pools: Tensor) -> tuple[Tensor, ...]:
    """The block table `[B, pages of a sequence]` of pools that hold every sequence of the batch whole, and these pools.

    Each device gives its pages of these sequences to the others: what a prefill reads, whose queries each see another
    number of tokens. On one device the pools as they are.

    Raises:
        ShardingError: the pages of a sequence do not divide.
    """
    count, page = ways(pools[0], "cached"), pools[0].shape[1]
    if count == 1:
        return (block_table, *pools)
    table, _ = own_pages(block_table, lengths, pools[0])
    rows = torch.cat([F.embedding(table, pool.flatten(1)).unflatten(2, (page, -1)) for pool in pools], -1)
    whole = all_gather(rows[:, :, None], "cached", 2).flatten(0, 2)  # [B * pages of a sequence, page, widths]
    return (ops.numbered_pages(block_table), *whole.split([pool.shape[2] for pool in pools], -1))


def cache_rows(table: Tensor, positions: Tensor, page: int) -> Tensor:
    """Rows of a pool where positions `[B, n]` of each sequence lie; that of position 0 for one below."""
    at = positions.clamp(min=0)
    return torch.gather(table, 1, (at // page).long()) * page + at % page


def merged(o_BTHL: Tensor, lse_BTH: Tensor, real: Tensor) -> Tensor:
    """This device's summand of attention to all stretches, from attention to its own and the log-sum-exp of its scores.

    Only the log-sum-exps, a number a head, are gathered; the weighted sum waits for the layer's own. What is computed
    where there is no token here does not matter: `real`, over `[B, T, H]`, says where there is one.
    """
    lse = torch.where(real, lse_BTH, NO_SCORE)
    all_WBTH = all_gather(lse[None], "cached", 0)
    peak = all_WBTH.amax(0)
    share = torch.exp(lse - peak) / torch.exp(all_WBTH - peak).sum(0)
    o = torch.where(real[..., None], at_least_f32(o_BTHL) * share[..., None], 0.0)
    return summand(o.to(o_BTHL.dtype), "cached", late=True)


def best_of_all(score_BTJ: Tensor, found_BTJ: Tensor, page: int) -> Tensor:
    """The J best of what all devices found: positions `[B, T, J]` int32, best first, equal scores in order of position.

    Args:
        score_BTJ: float32, not smaller than `NO_SCORE`.
        found_BTJ: places among the tokens that this device holds; -1 after the last.
    """
    count, top_k = ways(score_BTJ, "cached"), found_BTJ.shape[2]
    at = found_BTJ + found_BTJ // page * (page * (count - 1)) + own_index(score_BTJ, "cached", page).int()
    score = torch.where(found_BTJ >= 0, score_BTJ, NO_SCORE)
    both = all_gather(torch.cat([score, at.to(score.dtype)], 2)[:, :, None], "cached", 2)  # positions are exact
    score, at = both[..., :top_k].flatten(2), both[..., top_k:].flatten(2)
    return ops.best_positions(score, at.int(), top_k)


def own_places(selected_BTJ: Tensor, pool: Tensor) -> Tensor:
    """Those of the selected positions that lie in this device's pages, as places among its tokens: `[B, T, J]`.

    -1 in place of the others. A place is below the number of tokens that the device holds where its position is below
    the sequence's length.
    """
    count, page = ways(pool, "cached"), pool.shape[1]
    nth = selected_BTJ // page
    mine = (selected_BTJ >= 0) & (nth % count == own_index(pool, "cached").int())
    return torch.where(mine, nth // count * page + selected_BTJ % page, -1)


def check_length(block_table: Tensor, pool: Tensor) -> None:
    """Refuse sequences whose positions are not exact in float32, in which they cross devices beside scores.

    Args:
        block_table: `[B, pages of a sequence]`.
        pool: `[P, page, ...]`.

    Raises:
        ShardingError: a sequence may be longer than 2^24 tokens.
    """
    if block_table.shape[1] * pool.shape[1] > EXACT_F32:
        raise ShardingError(
            f"sequences of {block_table.shape[1] * pool.shape[1]:,} tokens, selected from on several devices: "
            f"at most {EXACT_F32:,}."
        )
