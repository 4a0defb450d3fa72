"""DeepSeek Sparse Attention over a paged cache: which tokens a query attends to, and attention to those.

Letters: B rows, T tokens, H heads, I index heads, P pages, D and K widths, J selected tokens.
"""

import torch
from torch import Tensor

from kimi_graph.compile.executor.node import Op
from kimi_graph.compile.executor.registry import ge_op
from kimi_graph.ops import at_least_f32

NO_WINDOW = 2**63 - 1
INDEX_KEY = 128
LATENT, ROPE = 512, 64


@ge_op(
    "LightningIndexer",
    provenance="public CPU reference",
    source="ops-transformer's golden function: the sparse_count largest sums over heads of weights * relu(query . key) "
    "among the keys up to i + (keys - queries), equal scores to the lower position, -1 after the last one and in rows "
    "past the query's length. It rounds scores to bfloat16 before it sorts, kernels sort 32 bits: so does this",
    outputs="sparse_indices sparse_values",
)
def lightning_indexer(
    op: Op,
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_key: Tensor | None,
    block_table: Tensor | None,
) -> tuple[Tensor, Tensor]:
    count = op.attr("sparse_count", 2048)
    op.must(layout_key="PA_BSND")
    op.expect(
        layout_query="BSND", sparse_mode=3, pre_tokens=NO_WINDOW, next_tokens=NO_WINDOW, return_values=False
    )  # fmt: skip
    op.same_dtype(query, key)
    op.of_dtype(query.dtype, torch.float32, weights=weights)
    op.require(query.ndim == key.ndim == 4, f"query {list(query.shape)} and key {list(key.shape)} of 4 dimensions")
    rows, tokens, _, width = query.shape
    op.require(width == INDEX_KEY and key.shape[2:] == (1, width), f"width {width}, key {list(key.shape)}")
    op.require(weights.shape == query.shape[:3], f"weights {list(weights.shape)} for query {list(query.shape)}")
    op.require(count >= 1, f"sparse_count {count}")
    table = table_of(op, block_table, rows)
    queries = lengths_of(op, "actual_seq_lengths_query", actual_seq_lengths_query, rows, tokens)
    keys = lengths_of(op, "actual_seq_lengths_key", actual_seq_lengths_key, rows, table.shape[1] * key.shape[1])
    values = query.new_empty(0)
    chosen = torch.full((rows, tokens, 1, count), -1, dtype=torch.int32, device=query.device)
    if query.is_meta:
        return chosen, values
    for row in range(rows):
        seen = at_least_f32(row_of(op, key, table[row], int(keys[row])))[:, 0]
        for t in range(int(queries[row])):
            visible = int(keys[row]) - int(queries[row]) + t + 1
            scores = torch.relu(at_least_f32(query[row, t]) @ seen[: max(visible, 0)].mT)
            ranked = (at_least_f32(weights[row, t])[:, None] * scores).sum(0)
            best = torch.sort(ranked, descending=True, stable=True).indices[:count]
            chosen[row, t, 0, : len(best)] = best.int()
    return op.select(chosen), values


@ge_op(
    "SparseFlashAttention",
    provenance="public CPU reference",
    source="ops-transformer's golden function: softmax(scale * (q k + q_rope k_rope)) v over the chosen keys up to "
    "i + (keys - queries), the first -1 ends a row's list; zeros in rows past the query's length or without a key; the "
    "weights are rounded to the query's dtype before they meet the values; value is the key",
    outputs="attention_out softmax_max softmax_sum",
    prototype="query key value sparse_indices block_table? actual_seq_lengths_query? actual_seq_lengths_kv? "
    "query_rope? key_rope? sinks?",
)
def sparse_flash_attention(
    op: Op,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    block_table: Tensor | None,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_kv: Tensor | None,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    scale = op.need("scale_value", float)
    op.must(layout_kv="PA_BSND", attention_mode=2)
    op.expect(
        layout_query="BSND", sparse_block_size=1, sparse_mode=3, pre_tokens=NO_WINDOW, next_tokens=NO_WINDOW,
        return_softmax_lse=False,
    )  # fmt: skip
    if query_rope is None or key_rope is None:
        op.fail("query_rope and key_rope are required, also of a model without rotation")
    op.same_dtype(query, key, value, query_rope, key_rope)
    op.of_dtype(torch.int32, sparse_indices=sparse_indices)
    op.require(query.ndim == key.ndim == 4, f"query {list(query.shape)} and key {list(key.shape)} of 4 dimensions")
    rows, tokens, heads, width = query.shape
    op.require(width == LATENT and key.shape[2:] == (1, width), f"width {width}, key {list(key.shape)}")
    op.require(value.shape == key.shape, f"value {list(value.shape)}, key {list(key.shape)}")
    op.require(query_rope.shape == (rows, tokens, heads, ROPE), f"query_rope {list(query_rope.shape)}")
    op.require(key_rope.shape == (*key.shape[:3], ROPE), f"key_rope {list(key_rope.shape)}")
    op.require(1 <= heads <= 128, f"{heads} heads, 1 to 128 expected")  # chips differ: see `limits`
    op.require(
        sparse_indices.ndim == 4 and sparse_indices.shape[:3] == (rows, tokens, 1),
        f"sparse_indices [{rows}, {tokens}, 1, J] expected, found {list(sparse_indices.shape)}",
    )
    table = table_of(op, block_table, rows)
    queries = lengths_of(op, "actual_seq_lengths_query", actual_seq_lengths_query, rows, tokens)
    keys = lengths_of(op, "actual_seq_lengths_kv", actual_seq_lengths_kv, rows, table.shape[1] * key.shape[1])
    out = torch.zeros_like(query)
    peak, total = (query.new_empty(0, dtype=torch.float64 if op.exact else torch.float32) for _ in range(2))
    if query.is_meta:
        return out, peak, total
    op.require(same_bytes(key, value), "value differs from key, which kernels read in its place")
    for row in range(rows):
        latent, rope = (row_of(op, pool, table[row], int(keys[row]))[:, 0] for pool in (key, key_rope))
        for t in range(int(queries[row])):
            chosen = chosen_keys(op, sparse_indices[row, t, 0], int(keys[row]) - int(queries[row]) + t)
            if len(chosen):
                k, k_rope = at_least_f32(latent[chosen]), at_least_f32(rope[chosen])
                scores = at_least_f32(query[row, t]) @ k.mT + at_least_f32(query_rope[row, t]) @ k_rope.mT
                weights = (scores * scale).softmax(-1).to(query.dtype)
                out[row, t] = (at_least_f32(weights) @ k).to(out.dtype)
    return out, peak, total


_PLAIN = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same: NaNs, which pages may hold past their sequences, and 8-bit floats too."""
    plain = _PLAIN[a.itemsize]
    return torch.equal(a.view(plain), b.view(plain))


def chosen_keys(op: Op, indices: Tensor, last: int) -> Tensor:
    """Positions before the first -1 and not after `last`; real ones after a -1 would be lost."""
    real = indices >= 0
    op.require(not (~real[:-1] & real[1:]).any(), "a position after -1, where kernels stop")
    chosen = indices[real].long()
    return chosen[chosen <= last]


def table_of(op: Op, block_table: Tensor | None, rows: int) -> Tensor:
    if block_table is None:
        op.fail("a paged cache needs block_table")
    op.of_dtype(torch.int32, block_table=block_table)
    op.require(block_table.ndim == 2 and block_table.shape[0] == rows, f"block_table of {rows} rows expected")
    return block_table.long()


def lengths_of(op: Op, name: str, given: Tensor | None, rows: int, most: int) -> Tensor:
    """`[B]`: tokens of each row. The operators may do without those of queries; a paged cache needs those of keys."""
    if given is None:
        op.fail(f"{name} is required here")
    op.of_dtype(torch.int32, **{name: given})
    op.require(given.shape == (rows,), f"{name} of {rows} rows expected, found {list(given.shape)}")
    if not given.is_meta:
        op.require(int(given.min()) >= 0 and int(given.max()) <= most, f"{name} outside 0..{most}")
    return given


def row_of(op: Op, pool: Tensor, table: Tensor, length: int) -> Tensor:
    """The first `length` tokens of a sequence, `[length, 1, width]`; page numbers after them may be anything."""
    page = pool.shape[1]
    op.require(page % 16 == 0 and page <= 1024, f"pages of {page} tokens, a multiple of 16 up to 1024 expected")
    pages = table[: -(-length // page)]
    if len(pages):
        op.require(int(pages.min()) >= 0 and int(pages.max()) < pool.shape[0], f"block_table names {pages.tolist()}")
    return pool[pages].flatten(0, 1)[:length]
