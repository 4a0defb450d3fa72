"""The paged cache of MLA: write new tokens into pages, read a sequence's pages back in order."""

import torch
from torch import Tensor

from .base import empty_like, may_overwrite, operator


@operator(sharding="b t l, b t r, p g l, p g r, b -> p g l, p g r", whole="tlrpg")
def cache_write(
    latent: Tensor, rope: Tensor, latent_pool: Tensor, rope_pool: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """The pools with each new token's latent and rope channels at its cache row.

    Args:
        latent: `[B, T, L]`.
        rope: `[B, T, R]`.
        latent_pool: `[P, page, L]`.
        rope_pool: `[P, page, R]`.
        slot_mapping: `[B * T]` int64, page * page size + offset; padding points into page 0.
    """

    return put_in_pages(latent_pool, slot_mapping, latent), put_in_pages(rope_pool, slot_mapping, rope)


def put_in_pages(pool: Tensor, slot_mapping: Tensor, new: Tensor) -> Tensor:
    """`pool` `[P, page, W]` with `new` `[B, T, W]` at its cache rows; written into it where the caller gave it away."""
    rows, page = new.flatten(0, 1).to(pool.dtype), pool.shape[1]
    if not may_overwrite(pool):
        return pool.flatten(0, 1).index_copy(0, slot_mapping, rows).view(pool.shape)
    if pool.stride(0) == page * pool.stride(1):
        pool.flatten(0, 1).index_copy_(0, slot_mapping, rows)
    else:  # pages that lie apart, as an engine may have them: flattened they would be a copy
        pool[slot_mapping // page, slot_mapping % page] = rows
    return pool


@cache_write.fake
def _(latent, rope, latent_pool, rope_pool, slot_mapping):
    return empty_like(latent_pool), empty_like(rope_pool)


@cache_write.lowering
def _(ge, latent, rope, latent_pool, rope_pool, slot_mapping):
    # the operator writes [P, page, heads, width] pools: one head, the same memory
    def with_head(pool):
        pages, page, width = ge.shape(pool)
        return ge.declare(pool, [pages, page, 1, width])  # the graph's state itself has this shape: no copy

    def rows(x):
        batch, tokens, width = ge.shape(x)
        return ge.reshape(x, [batch * tokens, 1, width])

    pools = with_head(latent_pool), with_head(rope_pool)
    written = ge.ScatterPaKvCache(
        rows(latent), pools[0], slot_mapping, rows(rope), pools[1], None, None, None,
        cache_mode="Norm", scatter_mode="None", strides=[1, 1], offsets=[0, 0],
    )  # fmt: skip
    reason = "latent and rope channels as key and value; KvRmsNormRopeCache always rotates, and moves pairs apart"
    ge.chose("cache of latents", "ScatterPaKvCache", reason)
    known = (ge.mark(x, ge.shape(pool), ge.dtype(pool)) for x, pool in zip(written[:2], pools, strict=True))
    return tuple(ge.reshape(x, ge.shape(pool)) for x, pool in zip(known, (latent_pool, rope_pool), strict=True))


@operator(sharding="b n -> b n", whole="bn")
def numbered_pages(block_table: Tensor) -> Tensor:
    """The block table `[B, pages]` of a pool that holds just these sequences, page after page: 0, 1, 2 ... int32."""
    return torch.arange(block_table.numel(), dtype=torch.int32, device=block_table.device).view(block_table.shape)


@numbered_pages.fake
def _(block_table):
    return block_table.new_empty(block_table.shape, dtype=torch.int32)


@numbered_pages.lowering
def _(ge, block_table):
    rows, pages = ge.shape(block_table)
    return ge.const(torch.arange(rows * pages).view(rows, pages).tolist(), torch.int32)


@operator(sharding="p g l, p g r, b n -> b c l, b c r", whole="pglrnc")
def cache_read(latent_pool: Tensor, rope_pool: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of each sequence in order, up to its capacity C = pages of a sequence * page size.

    Args:
        latent_pool: `[P, page, L]`.
        rope_pool: `[P, page, R]`.
        block_table: `[B, pages of a sequence]` int32.

    Returns:
        `[B, C, L]` and `[B, C, R]`.
    """
    table = block_table.long()
    return latent_pool[table].flatten(1, 2), rope_pool[table].flatten(1, 2)


@cache_read.fake
def _(latent_pool, rope_pool, block_table):
    rows, capacity = block_table.shape[0], block_table.shape[1] * latent_pool.shape[1]
    return (
        latent_pool.new_empty(rows, capacity, latent_pool.shape[2]),
        rope_pool.new_empty(rows, capacity, rope_pool.shape[2]),
    )


@cache_read.lowering
def _(ge, latent_pool, rope_pool, block_table):
    def read(pool):
        rows, pages = ge.shape(block_table)
        _, page, width = ge.shape(pool)
        found = ge.GatherV2(pool, block_table, ge.const([0], torch.int64), negative_index_support=False)
        return ge.reshape(found, [rows, pages * page, width])

    return read(latent_pool), read(rope_pool)
