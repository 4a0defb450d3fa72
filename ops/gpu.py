"""On a GPU: the indexer's choice by a Triton kernel, for callers that ask for it (`kernels="gpu"`).

The scores of single index heads stay on the chip: a plain product would write 32 numbers for every pair of a query
and a cached token, where their sum is one. Imported where it is used: Triton comes with torch's builds for GPUs alone.

Letters: n queries, S cached tokens, I index heads, K index key, J selected.
"""

import torch
import torch.nn.functional as F
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

SCORE_BYTES = 1 << 30  # of what is chosen from at once


@triton.jit
def _index_scores(q, weights, keys, out, queries, seen, HEADS: tl.constexpr, K: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip # noqa: E501
    """One tile of `out` `[n, S]`: all heads over the same keys, which are read once."""
    row = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    column = tl.program_id(1).to(tl.int64) * KEYS + tl.arange(0, KEYS)
    channel = tl.arange(0, K)
    inside = row < queries
    total = tl.zeros([QUERIES, KEYS], tl.float32)
    key_KS = tl.load(keys + column[None, :] * K + channel[:, None], mask=column[None, :] < seen, other=0.0)
    for head in range(HEADS):
        at = row * HEADS + head
        q_nK = tl.load(q + at[:, None] * K + channel[None, :], mask=inside[:, None], other=0.0)
        weight_n = tl.load(weights + at, mask=inside, other=0.0)
        total += tl.maximum(tl.dot(q_nK, key_KS, input_precision="ieee"), 0.0) * weight_n[:, None]
    visible = column[None, :] <= seen - queries + row[:, None]  # query i is the token at seen - queries + i
    place = out + row.to(tl.int64)[:, None] * seen + column[None, :]
    tl.store(place, tl.where(visible, total, float("-inf")), mask=inside[:, None] & (column[None, :] < seen))


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, out: Tensor | None = None) -> Tensor:
    """`sum_h weights_h relu(q_h . k)`, products of the dtype given, sums in float32; minus infinity after a query.

    Args:
        q: `[n, I, K]`.
        weights: `[n, I]` float32.
        keys: `[S, K]`; the queries are its last n tokens.
        out: `[n, S]` float32, contiguous, which is written and returned; a new one by default.

    Returns:
        `[n, S]` float32.
    """
    (queries, heads, width), seen = q.shape, len(keys)
    if out is None:
        out = q.new_empty(queries, seen, dtype=torch.float32)
    rows, columns, warps = (128, 128, 8) if q.dtype.itemsize < 4 else (32, 32, 4)
    grid = (triton.cdiv(queries, rows), triton.cdiv(seen, columns))
    _index_scores[grid](  # pyright: ignore[reportIndexIssue]
        q.contiguous(), weights.contiguous(), keys.contiguous(), out, queries, seen, heads, width, rows, columns,
        num_warps=warps, num_stages=2,
    )  # fmt: skip
    return out


def select_keys(
    q: Tensor, weights: Tensor, pool: Tensor, block_table: Tensor, lengths: Tensor, counts: Tensor, top_k: int
) -> Tensor:
    """`ops.select_keys` of a GPU: `[B, T, J]` int32. Of keys whose scores are equal any may be chosen, in any order."""
    tokens, best = q.shape[1], []
    with torch.no_grad():
        for row, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
            keys = _in_order(pool, block_table[row], length)
            size = min(count, max(1, SCORE_BYTES // (4 * max(1, length))))
            room = q.new_empty(size * length, dtype=torch.float32)  # one for all: torch keeps blocks of every size
            for start in range(0, count, size):
                stop = min(start + size, count)
                seen = length - count + stop
                scores = room[: (stop - start) * seen].view(stop - start, seen)
                index_scores(q[row, start:stop], weights[row, start:stop], keys[:seen], scores)
                found, at = scores.topk(min(top_k, scores.shape[1]), dim=1)
                at = at.int().masked_fill(found == float("-inf"), -1)
                best.append(F.pad(at, (0, top_k - at.shape[1]), value=-1))
            best.append(q.new_full((tokens - count, top_k), -1, dtype=torch.int32))
    return torch.cat(best).unflatten(0, (len(lengths), tokens))


def _in_order(pool: Tensor, table: Tensor, length: int) -> Tensor:
    """The rows of a sequence, `[S, K]`: one page after another."""
    pages = table[: -(-length // pool.shape[1])]
    return pool.index_select(0, pages).flatten(0, 1)[:length]
