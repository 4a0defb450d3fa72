"""The paged caches of sparse attention in 8 bits. No layer calls these: the compiler puts them in place of others.

A row of `[P, page, W]`, W = L + 2 R + 4 L / 128, is what CANN's KvQuantSparseFlashAttention reads: L quantised latents,
the bytes of R bfloat16 rope channels, and the bytes of a float32 scale for each tile of 128 latents. Index keys are
quantised token by token, and their scales lie in a pool of their own. A quantised number times its scale is the number.

A pool of more than 8 bits holds the same without rounding, so that graphs can be held against the model exactly: a
latent over its scale; and in place of the bytes of a number, the number itself and then zeros.

Letters: B rows, T tokens, C cached tokens, H heads, I index heads, K index key, L latent, R rope, J selected, W row.
Source: CANN's documents of KvQuantSparseFlashAttention and QuantLightningIndexer; fact sheet of models, section 5.4.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_graph.errors import CompileError

from .attention import padded_heads, power_of_two
from .base import at_least_f32, empty_like, operator
from .sparse_attention import INT64_MAX, index_heads, select_keys, sparse_attention

TILE = 128  # latents that share a scale
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
INDEX_SCALE = {torch.int8: torch.float16, torch.float8_e4m3fn: torch.float32}  # what QuantLightningIndexer takes


# ---- rows ------------------------------------------------------------------------------------------------------------


def row_width(latent: int, rope: int) -> int:
    """Bytes of a token's row."""
    return latent + 2 * rope + 4 * (latent // TILE)


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`[..., n]` as numbers of `dtype` and a scale `[...]` of each row; rows of zeros stay zeros.

    The scale takes the largest number of a row to the largest of an 8-bit dtype; a wider dtype is not rounded to.
    """
    wide = at_least_f32(x) if dtype.itemsize == 1 else x.to(dtype)
    scale = wide.abs().amax(-1) * (1.0 / LARGEST.get(dtype, 1.0))
    over = torch.where(scale == 0, 1, scale)[..., None]
    return (wide / over).round().to(dtype) if dtype == torch.int8 else (wide / over).to(dtype), scale


def pack_rows(latent: Tensor, rope: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a cache of `dtype`: `[..., L]`, `[..., R]` -> `[..., W]`."""
    wide = latent.float() if dtype.itemsize == 1 else latent  # the scale's bytes show in which dtype it was computed
    tiles, scale = quantise(wide.unflatten(-1, (-1, TILE)), dtype)
    parts = tiles.flatten(-2), _as_bytes(rope, torch.bfloat16, dtype), _as_bytes(scale, torch.float32, dtype)
    return torch.cat(parts, -1)


def unpack_rows(rows: Tensor, latent: int) -> tuple[Tensor, Tensor]:
    """Latents and rope channels of rows, in float32 at least: `[..., W]` -> `[..., L]`, `[..., R]`."""
    scales = 4 * (latent // TILE)
    tiles, rope, scale = rows.split([latent, rows.shape[-1] - latent - scales, scales], -1)
    values = at_least_f32(tiles).unflatten(-1, (-1, TILE)) * _of_bytes(scale, torch.float32)[..., None]
    return values.flatten(-2), at_least_f32(_of_bytes(rope, torch.bfloat16))


def _as_bytes(x: Tensor, stored: torch.dtype, dtype: torch.dtype) -> Tensor:
    if dtype.itemsize == 1:
        return x.to(stored).contiguous().view(dtype)
    return F.pad(x.to(dtype)[..., None], (0, stored.itemsize - 1)).flatten(-2)


def _of_bytes(x: Tensor, stored: torch.dtype) -> Tensor:
    return x.contiguous().view(stored) if x.dtype.itemsize == 1 else x[..., :: stored.itemsize]


def _write(pool: Tensor, rows: Tensor, slot_mapping: Tensor) -> Tensor:
    flat, new = pool.flatten(0, 1), rows.flatten(0, 1).to(pool.dtype)
    if pool.dtype == torch.float8_e4m3fn:  # torch copies no rows of it
        return flat.view(torch.int8).index_copy(0, slot_mapping, new.view(torch.int8)).view_as(pool).view(pool.dtype)
    return flat.index_copy(0, slot_mapping, new).view_as(pool)


# ---- writes ----------------------------------------------------------------------------------------------------------


@operator(sharding="b t l, b t r, p g w, b -> p g w", whole="tlrpgw")
def quantised_cache_write(latent: Tensor, rope: Tensor, pool: Tensor, slot_mapping: Tensor) -> Tensor:
    """The pool with each new token's row at its place.

    Args:
        latent: `[B, T, L]`.
        rope: `[B, T, R]`.
        pool: `[P, page, W]`, of 8 bits, or wider and then not rounded.
        slot_mapping: `[B * T]` int64, page * page size + offset; padding points into page 0.
    """
    return _write(pool, pack_rows(latent, rope, pool.dtype), slot_mapping)


@quantised_cache_write.fake
def _(latent, rope, pool, slot_mapping):
    return empty_like(pool)


@quantised_cache_write.lowering
def _(ge, latent, rope, pool, slot_mapping):
    (pages, page, width), (count,), dtype = ge.shape(pool), ge.shape(slot_mapping), ge.dtype(pool)
    channels, ropes = ge.shape(latent)[-1], ge.shape(rope)[-1]
    reason = f"a scale for {TILE} latents, and the rope channels unrounded, in one row: no operator of CANN writes it"
    ge.chose("cache of latents", "DynamicQuant, Bitcast, ConcatV2, ScatterNdUpdate", reason)
    tiles, scale = _quantised(ge, ge.reshape(latent, [count * channels // TILE, TILE]), dtype)
    parts = [ge.reshape(tiles, [count, channels])]
    parts.append(_bytes(ge, ge.reshape(ge.cast(rope, torch.bfloat16), [count, ropes]), dtype))
    parts.append(_bytes(ge, ge.reshape(scale, [count, channels // TILE]), dtype))
    return _scattered(ge, pool, [pages * page, width], ge.concat(parts, 1), slot_mapping)


@operator(sharding="b t k, p g k, p g, b -> p g k, p g", whole="tkpg")
def quantised_index_write(key: Tensor, pool: Tensor, scales: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
    """The pools with each new token's index key, and its scale, at their place.

    Args:
        key: `[B, T, K]`.
        pool: `[P, page, K]`, of 8 bits, or wider and then not rounded.
        scales: `[P, page]`.
        slot_mapping: `[B * T]` int64, page * page size + offset; padding points into page 0.
    """
    made, scale = quantise(key, pool.dtype)
    return _write(pool, made, slot_mapping), _write(scales, scale, slot_mapping)


@quantised_index_write.fake
def _(key, pool, scales, slot_mapping):
    return empty_like(pool), empty_like(scales)


@quantised_index_write.lowering
def _(ge, key, pool, scales, slot_mapping):
    (pages, page, width), (count,) = ge.shape(pool), ge.shape(slot_mapping)
    ge.chose("cache of index keys", "DynamicQuant, ScatterNdUpdate", "a scale for each token, in a state of its own")
    made, scale = _quantised(ge, ge.reshape(key, [count, width]), ge.dtype(pool))
    keys = _scattered(ge, pool, [pages * page, width], made, slot_mapping)
    scale = ge.reshape(ge.cast(scale, ge.dtype(scales)), [count, 1])
    return keys, _scattered(ge, scales, [pages * page, 1], scale, slot_mapping)


def _quantised(ge, x, dtype):
    """Rows `[n, width]` and the scale `[n]` of each."""
    if ge.dtype(x) not in (torch.bfloat16, torch.float16):
        raise CompileError(f"DynamicQuant takes bfloat16 or float16, found {ge.dtype(x)}.")
    made, scale = ge.DynamicQuant(x, None, None, dst_type=ge.number(dtype))
    return ge.mark(made, ge.shape(x), dtype), ge.mark(scale, ge.shape(x)[:1], torch.float32)


def _bytes(ge, x, dtype):
    """The bytes of rows `[n, width]`, as a tensor of an 8-bit dtype `[n, bytes]`."""
    (rows, width), size = ge.shape(x), ge.dtype(x).itemsize
    made = ge.mark(ge.Bitcast(x, type=ge.number(dtype)), (rows, width, size), dtype)  # adds a dimension
    return ge.reshape(made, [rows, width * size])


def _scattered(ge, pool, shape, rows, slot_mapping):
    """A state of rows of `shape` with `rows` written into it; the graph's state itself has this shape: no copy."""
    given, count = ge.shape(pool), ge.shape(slot_mapping)[0]
    written = ge.ScatterNdUpdate(ge.declare(pool, shape), ge.reshape(slot_mapping, [count, 1]), rows)
    return ge.reshape(ge.mark(written, shape, ge.dtype(pool)), given)


# ---- reads -----------------------------------------------------------------------------------------------------------


@operator(sharding="b t h k, b t h, p g k, p g, b n, b, b -> b t j", whole="thkpgnj")
def quantised_select_keys(
    q: Tensor,
    weights: Tensor,
    pool: Tensor,
    scales: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    counts: Tensor,
    top_k: int,
) -> Tensor:
    """`select_keys` of a cache in 8 bits: queries are quantised as the keys are, by token and head.

    The arguments that are not named here, and the result, are those of `select_keys`.

    Args:
        pool: `[P, page, K]`.
        scales: `[P, page]`, of the keys.
    """
    made, scale = quantise(q, pool.dtype)
    keys = at_least_f32(pool) * at_least_f32(scales)[..., None]
    aim = (at_least_f32(made) * at_least_f32(scale)[..., None]).to(keys.dtype)
    return select_keys.reference(aim, weights.to(keys.dtype), keys, block_table, lengths, counts, top_k)


@quantised_select_keys.fake
def _(q, weights, pool, scales, block_table, lengths, counts, top_k):
    return q.new_empty(*q.shape[:2], top_k, dtype=torch.int32)


@quantised_select_keys.lowering
def _(ge, q, weights, pool, scales, block_table, lengths, counts, top_k):
    rows, tokens, heads, width = ge.shape(q)
    (pages, page, _), dtype = ge.shape(pool), ge.dtype(pool)
    scaled, wanted = INDEX_SCALE[dtype], index_heads(ge, heads)
    weighed = torch.float16 if scaled == torch.float16 else torch.bfloat16
    reason = f"CANN's operator; weights rounded to {str(weighed).removeprefix('torch.')}"
    reason += "" if dtype == torch.int8 else "; it sorts scores as bfloat16"
    reason += f"; {heads} heads padded to {wanted} with zero weights" if wanted != heads else ""
    ge.chose("selection of keys", "DynamicQuant, QuantLightningIndexer", reason)
    padded = ge.pad(q, 2, wanted, value=1.0)  # a head of zeros has the scale zero, and is no number over it
    made, scale = _quantised(ge, ge.reshape(padded, [rows * tokens * wanted, width]), dtype)
    inputs = {
        "query": ge.reshape(made, [rows, tokens, wanted, width]),
        "key": ge.reshape(pool, [pages, page, 1, width]),
        "weights": ge.pad(ge.cast(weights, weighed), 2, wanted),
        "query_dequant_scale": ge.reshape(ge.cast(scale, scaled), [rows, tokens, wanted]),
        "key_dequant_scale": ge.reshape(scales, [pages, page, 1]),
        "actual_seq_lengths_query": ge.cast(counts, torch.int32),
        "actual_seq_lengths_key": ge.cast(lengths, torch.int32),
        "block_table": block_table,
    }
    attrs = {"query_quant_mode": 0, "key_quant_mode": 0, "layout_query": "BSND", "layout_key": "PA_BSND"}
    attrs |= {"sparse_count": top_k, "sparse_mode": 3, "pre_tokens": INT64_MAX, "next_tokens": INT64_MAX}
    selected = ge.own("QuantLightningIndexer", inputs, ["sparse_indices"], attrs)
    return ge.reshape(ge.mark(selected, (rows, tokens, 1, top_k), torch.int32), [rows, tokens, top_k])


@operator(sharding="b t h l, b t h r, p g w, b t j, b n, b, b -> b t h l", whole="tpglrnjw")
def quantised_sparse_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    pool: Tensor,
    selected: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    counts: Tensor,
    scale: float,
) -> Tensor:
    """`sparse_attention` to a cache of rows; latents are rounded to the query's dtype before anything else.

    The arguments that are not named here, and the result, are those of `sparse_attention`.

    Args:
        pool: `[P, page, W]`.
    """
    latent, rope = (x.to(q_latent.dtype) for x in unpack_rows(pool, q_latent.shape[-1]))
    return sparse_attention.reference(q_latent, q_rope, latent, rope, selected, block_table, lengths, counts, scale)


@quantised_sparse_attention.fake
def _(q_latent, q_rope, pool, selected, block_table, lengths, counts, scale):
    return empty_like(q_latent)


@quantised_sparse_attention.lowering
def _(ge, q_latent, q_rope, pool, selected, block_table, lengths, counts, scale):
    rows, tokens, heads, channels = ge.shape(q_latent)
    pages, page, width = ge.shape(pool)
    wanted = heads if (ge.soc, heads) == ("950", 48) else power_of_two(heads)  # 950 takes 48 heads, of all others
    reason = "CANN's operator; reads the selected rows of the cache alone, a bit more than half the bytes of bfloat16"
    ge.chose("sparse attention", "KvQuantSparseFlashAttention", reason + padded_heads(heads, wanted))
    cache = ge.reshape(pool, [pages, page, 1, width])
    inputs = {
        "query": ge.pad(ge.concat([q_latent, q_rope], 3), 2, wanted),
        "key": cache,
        "value": cache,
        "sparse_indices": ge.reshape(selected, [rows, tokens, 1, ge.shape(selected)[2]]),
        "key_dequant_scale": None,
        "value_dequant_scale": None,
        "block_table": block_table,
        "actual_seq_lengths_query": ge.cast(counts, torch.int32),
        "actual_seq_lengths_kv": ge.cast(lengths, torch.int32),
    }
    # modes: scales by tile; attention absorbed; scales in the rows. Each is the one there is, whatever the default
    attrs = {"scale_value": scale, "key_quant_mode": 2, "value_quant_mode": 2, "sparse_block_size": 1}
    attrs |= {"layout_query": "BSND", "layout_kv": "PA_BSND", "sparse_mode": 3, "pre_tokens": INT64_MAX}
    attrs |= {"next_tokens": INT64_MAX, "attention_mode": 2, "quant_scale_repo_mode": 1, "tile_size": TILE}
    attrs |= {"rope_head_dim": ge.shape(q_rope)[3]}
    o = ge.own("KvQuantSparseFlashAttention", inputs, ["attention_out"], attrs)
    return ge.first(ge.mark(o, (rows, tokens, wanted, channels), ge.dtype(q_latent)), 2, heads)
