"""Caches in 8 bits: quantisation, bytes of numbers, and sparse attention to a paged cache of such rows.

Where floats are exact nothing is rounded: a quantised number is a float64, and so is each byte of a number, of which
the first stands for the number itself and the others are zero.

Letters: B rows, T tokens, H heads, I index heads, P pages, J selected tokens.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_graph.compile.executor.node import Op
from kimi_graph.compile.executor.registry import ge_op
from kimi_graph.compile.ge_proto import Dtype, shape_of
from kimi_graph.ops import at_least_f32

from .sparse_attention import INDEX_KEY, LATENT, NO_WINDOW, ROPE, chosen_keys, lengths_of, row_of, same_bytes, table_of

LARGEST = {Dtype.INT8.ge: 127.0, Dtype.FLOAT8_E4M3FN.ge: 448.0}
TILE = 128
ROW = LATENT + 2 * ROPE + 4 * LATENT // TILE


@ge_op(
    "DynamicQuant",
    provenance="public CPU reference",
    source="ops-nn's golden function: scale = max |x| of a row / the dtype's largest number, y = x / scale rounded to "
    "nearest even. A row of zeros is 0 / 0: int8 zeros there, as in kernels; no number in an 8-bit float",
    outputs="y scale",
    prototype="x smooth_scales? group_index?",
)
def dynamic_quant(op: Op, x: Tensor) -> tuple[Tensor, Tensor]:
    number = op.attr("dst_type", Dtype.INT8.ge)
    op.require(number in LARGEST, f"dst_type {number}, supported is {' or '.join(map(str, LARGEST))}")
    op.of_dtype(torch.bfloat16, torch.float16, x=x)
    op.require(x.ndim > 1, f"x of 2 dimensions or more expected, found {list(x.shape)}")
    dtype, wide = Dtype.of_ge(number).torch_dtype, at_least_f32(x)
    scale = wide.abs().amax(-1) * (1.0 / LARGEST[number])
    y = wide / scale[..., None]
    if dtype == torch.int8:
        y = torch.where(scale[..., None] == 0, 0, y if op.exact else y.round())
    return y if op.exact else y.to(dtype), scale


@ge_op(
    "Bitcast",
    provenance="documented formula",
    source="prototype text: the same bytes as another dtype; to a narrower one with a dimension more, as TensorFlow's, "
    "with which it is said to be compatible. Lowest byte first: torch's view, of which torchair makes this node",
    view=True,
)
def bitcast(op: Op, x: Tensor) -> Tensor:
    op.expect(keep_dim=False)
    dtype = op.dtype("type")
    if not op.exact:
        op.require(x.dtype.itemsize >= dtype.itemsize, f"from {x.dtype} to {dtype}, supported is to a narrower dtype")
        made = x.contiguous().view(dtype)
        return made if x.dtype.itemsize == dtype.itemsize else made.unflatten(-1, (x.shape[-1], -1))
    size, rest = divmod(math.prod(shape_of(op.node.descs[0])), max(1, x.numel()))
    op.require(size > 1 and rest == 0, "supported where floats are exact is from floats to their bytes")
    return F.pad(x[..., None], (0, size - 1))


@ge_op(
    "QuantLightningIndexer",
    provenance="public CPU reference",
    source="ops-transformer's golden function: the sparse_count largest sums over heads of (weights * query scale) * "
    "relu(query . key), times the key's scale, equal scores to the lower position, -1 after the last. int8: "
    "relu / 1024 and weights * query scale are float16, 32 bits are sorted; float8: scores are bfloat16 when they are "
    "sorted, in the kernel of 950 too",
    outputs="sparse_indices",
)
def quant_lightning_indexer(
    op: Op,
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_key: Tensor | None,
    block_table: Tensor | None,
) -> Tensor:
    count = op.attr("sparse_count", 2048)
    op.must(query_quant_mode=0, key_quant_mode=0, layout_key="PA_BSND")
    op.expect(
        layout_query="BSND", sparse_mode=3, pre_tokens=NO_WINDOW, next_tokens=NO_WINDOW, key_stride0=-1,
        key_dequant_scale_stride0=-1,
    )  # fmt: skip
    op.same_dtype(query, key)
    op.of_dtype(torch.int8, torch.float8_e4m3fn, query=query)
    op.of_dtype(torch.float16, torch.bfloat16, weights=weights)
    op.of_dtype(torch.float16, torch.float32, query_dequant_scale=query_dequant_scale)
    op.same_dtype(query_dequant_scale, key_dequant_scale)
    op.require(query.ndim == key.ndim == 4, f"query {list(query.shape)} and key {list(key.shape)} of 4 dimensions")
    rows, tokens, _, width = query.shape
    op.require(width == INDEX_KEY and key.shape[2:] == (1, width), f"width {width}, key {list(key.shape)}")
    for name, given, shape in (
        ("weights", weights, query.shape[:3]),
        ("query_dequant_scale", query_dequant_scale, query.shape[:3]),
        ("key_dequant_scale", key_dequant_scale, key.shape[:3]),
    ):
        op.require(given.shape == shape, f"{name} {list(shape)} expected, found {list(given.shape)}")
    op.require(1 <= count <= 2048, f"sparse_count {count}")
    table = table_of(op, block_table, rows)
    queries = lengths_of(op, "actual_seq_lengths_query", actual_seq_lengths_query, rows, tokens)
    keys = lengths_of(op, "actual_seq_lengths_key", actual_seq_lengths_key, rows, table.shape[1] * key.shape[1])
    chosen = torch.full((rows, tokens, 1, count), -1, dtype=torch.int32, device=query.device)
    if query.is_meta:
        return chosen
    narrow, sort = torch.float64, torch.float64
    if not op.exact:
        narrow, sort = (torch.float16, torch.float32) if query.dtype == torch.int8 else (torch.float32, torch.bfloat16)
    factors = at_least_f32(weights.to(narrow) * query_dequant_scale.to(narrow))
    divisor = 1024 if narrow == torch.float16 else 1
    for row in range(rows):
        seen = at_least_f32(row_of(op, key, table[row], int(keys[row])))[:, 0]
        scales = at_least_f32(row_of(op, key_dequant_scale, table[row], int(keys[row])))[:, 0]
        for t in range(int(queries[row])):
            visible = max(0, int(keys[row]) - int(queries[row]) + t + 1)
            products = torch.relu(at_least_f32(query[row, t]) @ seen[:visible].mT)
            products = at_least_f32((products / divisor).to(narrow))
            ranked = ((factors[row, t][:, None] * products).sum(0) * scales[:visible]).to(sort)
            best = torch.sort(ranked, descending=True, stable=True).indices[:count]
            chosen[row, t, 0, : len(best)] = best.int()
    return op.select(chosen)


@ge_op(
    "KvQuantSparseFlashAttention",
    provenance="public CPU reference",
    source="ops-transformer's golden function: rows of 512 quantised latents, 64 rope channels in the query's dtype "
    "and 4 float32 scales; latents times their scale are rounded to the query's dtype, then as SparseFlashAttention, "
    "the latents being the values. Rows past the query's length or without a key: zeros",
    outputs="attention_out",
    prototype="query key value sparse_indices key_dequant_scale? value_dequant_scale? block_table? "
    "actual_seq_lengths_query? actual_seq_lengths_kv?",
)
def kv_quant_sparse_flash_attention(
    op: Op,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    block_table: Tensor | None,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_kv: Tensor | None,
) -> Tensor:
    scale = op.need("scale_value", float)
    op.must(key_quant_mode=2, value_quant_mode=2, layout_kv="PA_BSND", attention_mode=2)
    op.expect(
        layout_query="BSND", sparse_block_size=1, sparse_mode=3, pre_tokens=NO_WINDOW, next_tokens=NO_WINDOW,
        quant_scale_repo_mode=1, tile_size=TILE, rope_head_dim=ROPE,
    )  # fmt: skip
    op.same_dtype(key, value)
    op.of_dtype(torch.int8, torch.float8_e4m3fn, key=key)
    op.of_dtype(torch.bfloat16, torch.float16, query=query)
    op.require(op.exact == (key.dtype == torch.float64), f"rows of {key.dtype}; float64 where floats are exact")
    op.of_dtype(torch.int32, sparse_indices=sparse_indices)
    op.require(query.ndim == key.ndim == 4, f"query {list(query.shape)} and key {list(key.shape)} of 4 dimensions")
    rows, tokens, heads, width = query.shape
    op.require(width == LATENT + ROPE and key.shape[2:] == (1, ROW), f"width {width}, key {list(key.shape)}")
    op.require(value.shape == key.shape, f"value {list(value.shape)}, key {list(key.shape)}")
    op.require(1 <= heads <= 128, f"{heads} heads, 1 to 128 expected")  # chips differ: see `limits`
    op.require(
        sparse_indices.ndim == 4 and sparse_indices.shape[:3] == (rows, tokens, 1),
        f"sparse_indices [{rows}, {tokens}, 1, J] expected, found {list(sparse_indices.shape)}",
    )
    table = table_of(op, block_table, rows)
    queries = lengths_of(op, "actual_seq_lengths_query", actual_seq_lengths_query, rows, tokens)
    keys = lengths_of(op, "actual_seq_lengths_kv", actual_seq_lengths_kv, rows, table.shape[1] * key.shape[1])
    out = torch.zeros_like(query[..., :LATENT])
    if query.is_meta:
        return out
    op.require(same_bytes(key, value), "value differs from key, which kernels read in its place")
    for row in range(rows):
        seen = row_of(op, key, table[row], int(keys[row]))[:, 0]
        for t in range(int(queries[row])):
            chosen = chosen_keys(op, sparse_indices[row, t, 0], int(keys[row]) - int(queries[row]) + t)
            if len(chosen):
                k, k_rope = _numbers(seen[chosen], query.dtype)
                q = at_least_f32(query[row, t])
                weights = ((q @ torch.cat([k, k_rope], -1).mT) * scale).softmax(-1).to(query.dtype)
                out[row, t] = (at_least_f32(weights) @ k).to(out.dtype)
    return out


def _numbers(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Latents and rope channels of cache rows `[n, 656]`, rounded to `dtype`, in float32 at least."""
    quantised, ropes, scales = rows.split([LATENT, 2 * ROPE, 4 * LATENT // TILE], -1)
    if rows.dtype == torch.float64:
        rope, scale = ropes[:, ::2], scales[:, ::4]
    else:
        rope, scale = ropes.contiguous().view(dtype), scales.contiguous().view(torch.float32)
    latent = at_least_f32(quantised) * scale.repeat_interleave(TILE, -1)
    return at_least_f32(latent.to(dtype)), at_least_f32(rope)
