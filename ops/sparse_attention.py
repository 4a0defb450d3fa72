"""DeepSeek Sparse Attention in two stages: select the best cached tokens of each query, then attend to those alone.

Letters: B rows, T tokens, C cached tokens, H heads, I index heads, K index key, L latent, R rope channels, J selected.
Source: DeepSeek-V3.2 report (arXiv:2512.02556), section 2.1; fact sheet of models, section 5.3.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import absorbed, latent_heads, padded_heads
from .base import at_least_f32, at_once, empty_like, operator, transformed
from .cache import put_in_pages
from .offers import Offer, cannot

NO_SCORE = -1e30  # below every score, and finite: differences of two are no NaN
INT64_MAX = 2**63 - 1  # of CANN's pre_tokens and next_tokens: no window
INDEX_HEADS_950 = (8, 16, 24, 32, 64)
INDEX_HEADS = 64  # at most, on A2 and A3; the only number CANN 8.5 documents
MOST_LATENT, MOST_ROPE, MOST_HEADS = 512, 64, 128  # of our SparseAttend

SCORE_BYTES = 4 << 20  # of what a block of queries holds at once: scores of all keys, selected rows
PART_BYTES = 8 << 20  # of scores of single index heads; in smaller parts threads wait for each other more often


@operator(sharding="b t k, p g k, b -> p g k", whole="tkpg")
def index_write(key: Tensor, pool: Tensor, slot_mapping: Tensor) -> Tensor:
    """The pool with each new token's index key at its cache row.

    Args:
        key: `[B, T, K]`.
        pool: `[P, page, K]`.
        slot_mapping: `[B * T]` int64, page * page size + offset; padding points into page 0.
    """
    return put_in_pages(pool, slot_mapping, key)


@index_write.fake
def _(key, pool, slot_mapping):
    return empty_like(pool)


@index_write.lowering
def _(ge, key, pool, slot_mapping):
    (pages, page, width), (count,) = ge.shape(pool), ge.shape(slot_mapping)
    ge.chose("cache of index keys", "ScatterNdUpdate", "one form for every chip; ScatterPaCache is for 950 alone")
    rows = ge.declare(pool, [pages * page, width])  # the graph's state itself has this shape: no copy
    new = ge.cast(ge.reshape(key, [count, width]), ge.dtype(pool))
    written = ge.ScatterNdUpdate(rows, ge.reshape(slot_mapping, [count, 1]), new)
    return ge.reshape(ge.mark(written, ge.shape(rows), ge.dtype(pool)), ge.shape(pool))


@operator(sharding="b t h k, b t h, p g k, b n, b, b -> b t j", whole="thkpgnj")
def select_keys(
    q: Tensor, weights: Tensor, pool: Tensor, block_table: Tensor, lengths: Tensor, counts: Tensor, top_k: int
) -> Tensor:
    """Positions of the `top_k` tokens up to itself that score best with each query, one set for all attention heads.

    The score of a query and a cached token is `sum_h weights_h relu(q_h . k * K^-0.5)`, in float32.

    Args:
        q: `[B, T, I, K]`.
        weights: `[B, T, I]` float32, any sign.
        pool: `[P, page, K]`.
        block_table: `[B, pages of a sequence]` int32.
        lengths, counts: `[B]`, see `Batch`.

    Returns:
        `[B, T, top_k]` int32, best first, equal scores in order of position; -1 after the last where fewer tokens are
        visible, and everywhere in rows past `counts`.
    """
    tokens, best = q.shape[1], []
    with torch.no_grad():  # a choice has no derivative
        for row, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
            pages = block_table[row].tolist()
            size = max(1, at_once(SCORE_BYTES, q) // (4 * max(1, length)))
            for start in range(0, count, size):
                some = slice(start, min(start + size, count))
                aim, weigh = at_least_f32(q[row, some]), at_least_f32(weights[row, some])
                best.append(_best(_scores(aim, weigh, pool, pages, length - count + some.stop), top_k))
            best.append(block_table.new_full((tokens - count, top_k), -1))
    return torch.cat(best).unflatten(0, (len(lengths), tokens)).int()


def _scores(q: Tensor, weights: Tensor, pool: Tensor, pages: list[int], seen: int) -> Tensor:
    """Scores of n queries, the last of which sees `seen` tokens: `[n, I, K]`, `[n, I]` -> `[n, seen]`.

    Without the factor K^-0.5, which changes no order. Some tokens at a time, as each has a score of every head. Minus
    infinity where a query does not see a token.
    """
    queries, heads, _ = q.shape
    scores, flat = q.new_empty(queries, seen), q.flatten(0, 1)
    for start, keys in _parts(pool, pages, seen, at_once(PART_BYTES, q) // (4 * queries * heads)):
        per_head = torch.relu_(flat @ at_least_f32(keys).mT).unflatten(0, (queries, heads))
        scores[:, start : start + len(keys)] = torch.bmm(weights[:, None], per_head)[:, 0]
    later = torch.ones(queries, queries, dtype=torch.bool, device=q.device).triu(1)
    scores[:, seen - queries :].masked_fill_(later, float("-inf"))
    return scores


def _parts(pool: Tensor, pages: list[int], length: int, size: int) -> Iterator[tuple[int, Tensor]]:
    """The first `length` rows of a sequence, about `size` at a time, each part with its start.

    A part is a view of the pool where its pages lie one after another.
    """
    page = pool.shape[1]
    group = max(1, size // page)
    for first in range(0, -(-length // page), group):
        some = pages[first : min(first + group, -(-length // page))]
        run = some == list(range(some[0], some[0] + len(some)))
        found = pool[some[0] : some[0] + len(some)] if run else pool[some]
        yield first * page, found.flatten(0, 1)[: length - first * page]


def _best(scores: Tensor, top_k: int) -> Tensor:
    """Places of the `top_k` largest of each row, largest first, equal ones in order; -1 for minus infinity."""
    scores = scores.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))  # NaN must show
    rows, width = scores.shape
    if width > top_k and not transformed():  # a stable sort of all would take longer than everything else
        least = scores.topk(top_k, sorted=False).values.amin(1, keepdim=True)
        above, equal = scores > least, scores == least
        first = equal.cumsum(1, dtype=torch.int32) <= top_k - above.sum(1, keepdim=True)
        at = (above | (equal & first)).nonzero()[:, 1].view(rows, top_k)
    else:
        at = torch.arange(width, device=scores.device).expand(rows, width)
    found, order = torch.sort(scores.gather(1, at), dim=1, descending=True, stable=True)
    at = at.gather(1, order).masked_fill(found == float("-inf"), -1)[:, :top_k]
    return F.pad(at, (0, top_k - at.shape[1]), value=-1)


@select_keys.fake
def _(q, weights, pool, block_table, lengths, counts, top_k):
    return q.new_empty(*q.shape[:2], top_k, dtype=torch.int32)


@select_keys.lowering
def _(ge, q, weights, pool, block_table, lengths, counts, top_k):
    rows, tokens, heads, _ = ge.shape(q)
    pages, page, width = ge.shape(pool)
    wanted = index_heads(ge, heads)
    narrow = ge.soc == "950" or not ge.has("9.1")
    if narrow:
        weights = ge.cast(weights, ge.dtype(q))
    reason = "CANN's operator; K^-0.5 is left out, as a positive factor changes no order"
    reason += f"; weights rounded to {str(ge.dtype(q)).removeprefix('torch.')}" if narrow else ""
    reason += f"; {heads} heads padded to {wanted} with zero weights" if wanted != heads else ""
    ge.chose("selection of keys", "LightningIndexer", reason)
    inputs = {
        "query": ge.pad(q, 2, wanted),
        "key": ge.reshape(pool, [pages, page, 1, width]),
        "weights": ge.pad(weights, 2, wanted),
        "actual_seq_lengths_query": ge.cast(counts, torch.int32),
        "actual_seq_lengths_key": ge.cast(lengths, torch.int32),
        "block_table": block_table,
    }
    attrs = {"layout_query": "BSND", "layout_key": "PA_BSND", "sparse_count": top_k, "sparse_mode": 3}
    attrs |= {"pre_tokens": INT64_MAX, "next_tokens": INT64_MAX, "return_values": False}
    selected = ge.own("LightningIndexer", inputs, ["sparse_indices", "sparse_values"], attrs)[0]
    return ge.reshape(ge.mark(selected, (rows, tokens, 1, top_k), torch.int32), [rows, tokens, top_k])


def index_heads(ge, heads):
    """The nearest number of index heads the operator takes, not below `heads`; `heads` where it takes no more."""
    if ge.soc == "950":
        legal = INDEX_HEADS_950
    else:
        legal = (heads,) if ge.has("9.1") else (INDEX_HEADS,)
    return next((n for n in legal if n >= heads), heads)


@operator(sharding="b t n, b t n -> b t j", whole="tnj")
def best_positions(score: Tensor, position: Tensor, top_k: int) -> Tensor:
    """The positions of the `top_k` best scores: what `select_keys` gives, of keys that others have scored.

    Args:
        score: `[B, T, n]` float32, n >= top_k; `NO_SCORE` where there is no key.
        position: `[B, T, n]` int32, each once where there is a key, in any order.

    Returns:
        `[B, T, top_k]` int32, best first, equal scores in order of position; -1 after the last key.
    """
    position, order = torch.sort(position, dim=2)
    score, order = torch.sort(score.gather(2, order), dim=2, descending=True, stable=True)
    best = position.gather(2, order)[:, :, :top_k]
    return torch.where(score[:, :, :top_k] > NO_SCORE, best, -1)


@best_positions.fake
def _(score, position, top_k):
    return position.new_empty(*position.shape[:2], top_k)


@best_positions.lowering
def _(ge, score, position, top_k):
    ge.chose("best keys of all devices", "Sort", "twice, as TopKV2 does not say which of equal scores it takes")
    shape = ge.shape(score)
    at, order = ge.Sort(position, axis=2)
    score, best = ge.Sort(ge.GatherElements(score, order, dim=2), axis=2, descending=True, stable=True)
    at = ge.mark(ge.GatherElements(at, best, dim=2), shape, torch.int32)
    score = ge.first(ge.mark(score, shape, torch.float32), 2, top_k)
    some = ge.Greater(score, ge.const(NO_SCORE, torch.float32))
    return ge.SelectV2(some, ge.first(at, 2, top_k), ge.const(-1, torch.int32))


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
        q_latent: `[B, T, H, L]`, queries moved into the latent space.
        q_rope: `[B, T, H, R]`.
        latent_pool: `[P, page, L]`.
        rope_pool: `[P, page, R]`.
        selected: `[B, T, J]` int32 positions in the row's sequence, the same for all heads; -1, and positions after
            the query, are not attended to.
        block_table: `[B, pages of a sequence]` int32.
        lengths, counts: `[B]`, see `Batch`.

    Returns:
        `[B, T, H, L]`: weighted latents, still to be moved into the value space; zeros past `counts`.
    """
    rows = (selected, block_table, lengths, counts)
    outs = [o for o, _ in _read_blocks(q_latent, q_rope, latent_pool, rope_pool, *rows, scale)]
    return torch.cat(outs).unflatten(0, (len(lengths), q_latent.shape[1]))


def _read_blocks(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_pool: Tensor,
    rope_pool: Tensor,
    selected: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    counts: Tensor,
    scale: float,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of a few queries of a row at a time, in order: weighted latents `[n, H, L]` and scores `[n, H, J']`.

    Scores are minus infinity where nothing is attended to; of padding there are none.
    """
    size = max(1, at_once(SCORE_BYTES, q_latent) // (4 * selected.shape[2] * max(q_latent.shape[2:])))
    for row, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        for start in range(0, count, size):
            some = slice(start, min(start + size, count))
            q, q_r = at_least_f32(q_latent[row, some]) * scale, at_least_f32(q_rope[row, some]) * scale
            at, real = _cache_rows(selected[row, some], block_table[row], latent_pool.shape[1], length - count + start)
            latent, rope = (_rows(pool, at) for pool in (latent_pool, rope_pool))
            scores = torch.baddbmm(torch.bmm(q_r, rope.mT), q, latent.mT)
            scores = scores.masked_fill(~real[:, None], float("-inf"))
            o = torch.bmm(scores.softmax(-1), latent).masked_fill(~real.any(1)[:, None, None], 0)
            yield o.to(q_latent.dtype), scores
        padding = q_latent[row, count:]
        yield torch.zeros_like(padding), at_least_f32(padding[..., :0])


def _rows(pool: Tensor, at: Tensor) -> Tensor:
    """Rows of a pool: `[..., width]`, of at least float32."""
    return at_least_f32(pool.flatten(0, 1).index_select(0, at.flatten()).unflatten(0, at.shape))


def _cache_rows(selected: Tensor, table: Tensor, page: int, first: int) -> tuple[Tensor, Tensor]:
    """Where n queries, the first at position `first`, find their selected tokens: `[n, J]` -> `[n, J']`, and which of
    these are real; others are a real one of the same query, so that nothing else is read. J' drops what no query has.
    """
    own = torch.arange(first, first + len(selected), device=selected.device)
    real = (selected >= 0) & (selected <= own[:, None])
    if not transformed():
        used = real.any(0).nonzero()
        real = real[:, : int(used[-1]) + 1 if len(used) else 1]
    chosen = torch.where(real, selected[:, : real.shape[1]].long(), 0)
    chosen = torch.where(real, chosen, chosen.gather(1, real.int().argmax(1, keepdim=True)))
    return table.long()[chosen // page] * page + chosen % page, real


@sparse_attention.fake
def _(q_latent, q_rope, latent_pool, rope_pool, selected, block_table, lengths, counts, scale):
    return empty_like(q_latent)


@sparse_attention.lowering
def _(ge, *args):
    return ge.serve("sparse attention", OFFERS, *args)


def _paged(ge, pool):
    """A pool as attention takes it: with the dimension of its one head."""
    pages, page, width = ge.shape(pool)
    return ge.reshape(pool, [pages, page, 1, width])


def _built_in(ge, q_latent, q_rope, latent_pool, rope_pool, selected, block_table, lengths, counts, scale):
    rows, tokens, heads, _ = ge.shape(q_latent)
    wanted = latent_heads(heads, ge.soc, ge.cann, sparse=True)
    latents = _paged(ge, latent_pool)
    inputs = {
        "query": ge.pad(q_latent, 2, wanted),
        "key": latents,
        "value": latents,
        "sparse_indices": ge.reshape(selected, [rows, tokens, 1, ge.shape(selected)[2]]),
        "block_table": block_table,
        "actual_seq_lengths_query": ge.cast(counts, torch.int32),
        "actual_seq_lengths_kv": ge.cast(lengths, torch.int32),
        "query_rope": ge.pad(q_rope, 2, wanted),
        "key_rope": _paged(ge, rope_pool),
    }
    # attention_mode 2, absorbed, is the one legal value; the default is another
    attrs = {"scale_value": scale, "sparse_block_size": 1, "layout_query": "BSND", "layout_kv": "PA_BSND"}
    attrs |= {"sparse_mode": 3, "pre_tokens": INT64_MAX, "next_tokens": INT64_MAX, "attention_mode": 2}
    outputs = ["attention_out", "softmax_max", "softmax_sum"]
    o = ge.own("SparseFlashAttention", inputs, outputs, {**attrs, "return_softmax_lse": False})[0]
    return ge.first(ge.mark(o, ge.shape(inputs["query"]), ge.dtype(q_latent)), 2, heads)


def _padding(ge, q_latent, *args):
    heads = ge.shape(q_latent)[2]
    return padded_heads(heads, latent_heads(heads, ge.soc, ge.cann, sparse=True))


def _attend(ge, q_latent, q_rope, latent_pool, rope_pool, selected, block_table, lengths, counts, scale):
    """Our operator: weighted latents, and log-sum-exps."""
    inputs = {"q": q_latent, "q_rope": q_rope, "latent": _paged(ge, latent_pool), "rope": _paged(ge, rope_pool)}
    inputs |= {"selected": selected, "block_table": block_table, "lengths": lengths, "counts": counts}
    return ge.own("SparseAttend", inputs, ["o", "lse"], {"scale": scale})


def _own(ge, *args):
    return _attend(ge, *args)[0]


def _widths(ge, q_latent, q_rope, *args):
    """What our kernel refuses."""
    (*_, heads, latent), rope = ge.shape(q_latent), ge.shape(q_rope)[-1]
    if ge.dtype(q_latent) not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 or float16, these are {ge.dtype(q_latent)}"
    if latent % 16 or rope % 16 or not 16 <= latent <= MOST_LATENT or not 16 <= rope <= MOST_ROPE:
        most = f"{MOST_LATENT} and {MOST_ROPE}"
        return f"takes multiples of 16 channels up to {most}, these are {latent} and {rope}"
    return "" if heads <= MOST_HEADS else f"takes up to {MOST_HEADS} heads, these are {heads}"


OFFERS = (
    Offer(
        "builtin",
        "SparseFlashAttention",
        _built_in,
        "CANN's operator; reads the selected rows of the cache alone",
        costs=_padding,
    ),
    Offer("own", "SparseAttend", _own, "the selected rows of the cache, once, for any number of heads", _widths),
)


@operator(sharding="b t h l, b t h r, p g l, p g r, b t j, b n, b, b -> b t h l, b t h", whole="tpglrnj")
def sparse_attention_lse(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_pool: Tensor,
    rope_pool: Tensor,
    selected: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    counts: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`sparse_attention`, and the logarithm of what its weights were divided by: with it parts of a cache are merged.

    Returns:
        `[B, T, H, L]`, and `[B, T, H]` float32, log(sum(exp(scores))); where nothing is attended to zeros, and
        `NO_SCORE`.
    """
    rows = (selected, block_table, lengths, counts)
    outs, scores = zip(*_read_blocks(q_latent, q_rope, latent_pool, rope_pool, *rows, scale), strict=True)
    lse = torch.cat([x.logsumexp(-1).clamp(min=NO_SCORE) for x in scores])
    shape = (len(lengths), q_latent.shape[1])
    return torch.cat(outs).unflatten(0, shape), lse.unflatten(0, shape)


@sparse_attention_lse.fake
def _(q_latent, q_rope, latent_pool, rope_pool, selected, block_table, lengths, counts, scale):
    wide = torch.promote_types(q_latent.dtype, torch.float32)
    return empty_like(q_latent), q_latent.new_empty(q_latent.shape[:3], dtype=wide)


@sparse_attention_lse.lowering
def _(ge, *args):
    return ge.serve("sparse attention to a part of a cache", OFFERS_LSE, *args)


def _gathered(ge, q_latent, q_rope, latent_pool, rope_pool, selected, block_table, lengths, counts, scale):
    """One query a row: its rows of the cache are gathered, and read by the operator that gives log-sum-exps."""
    rows, _, heads, _ = ge.shape(q_latent)
    top_k = ge.shape(selected)[2]
    places = ge.reshape(selected, [rows, top_k])
    last = ge.reshape(ge.cast(lengths, torch.int32), [rows, 1])
    real = ge.LogicalAnd(ge.GreaterEqual(places, ge.const(0, torch.int32)), ge.Less(places, last))
    real = ge.mark(real, (rows, top_k), torch.bool)
    given = ge.reshape(ge.mark(ge.Greater(counts, ge.const(0, torch.int64)), (rows,), torch.bool), [rows, 1])
    real = ge.mark(ge.LogicalAnd(real, given), (rows, top_k), torch.bool)
    held = ge.ReduceSum(ge.cast(real, torch.float32), ge.const([1], torch.int64), keep_dims=False)
    held = ge.cast(ge.mark(held, (rows,), torch.float32), torch.int64)
    places = ge.mark(ge.SelectV2(real, places, ge.const(-1, torch.int32)), (rows, top_k), torch.int32)
    places = ge.mark(ge.Sort(places, axis=1, descending=True)[0], (rows, top_k), torch.int32)  # real ones first
    latents, ropes = _gathered_pools(ge, places, block_table, latent_pool, rope_pool)
    pages = ge.shape(latents)[0]
    table = ge.const(torch.arange(pages).view(rows, -1).tolist(), torch.int32)
    o, lse = absorbed(ge, q_latent, q_rope, latents, ropes, table, held, scale, lse=True)
    some = ge.mark(ge.Greater(held, ge.const(0, torch.int64)), (rows,), torch.bool)
    some = ge.reshape(some, [rows, 1, 1])
    lse = ge.mark(ge.SelectV2(some, lse, ge.const(NO_SCORE, torch.float32)), (rows, 1, heads), torch.float32)
    return o, lse


def _gathered_pools(ge, places, block_table, *pools):
    """Pools of nothing but the rows at some places `[B, J]` of each sequence, whole pages of them, one after another.

    A place may be -1: its row is any.
    """
    (rows, count), page = ge.shape(places), ge.shape(pools[0])[1]
    size, i32 = -(-count // page) * page, torch.int32
    if size != count:
        places = ge.first(ge.concat([places] * -(-size // count), 1), 1, size)
    places = ge.mark(ge.Maximum(places, ge.const(0, i32)), (rows, size), i32)
    nth = ge.mark(ge.FloorDiv(places, ge.const(page, i32)), (rows, size), i32)
    pages = ge.mark(ge.GatherElements(block_table, nth, dim=1), (rows, size), i32)
    at = ge.Add(ge.Mul(pages, ge.const(page, i32)), ge.FloorMod(places, ge.const(page, i32)))
    at = ge.reshape(ge.mark(at, (rows, size), i32), [rows * size])

    def gathered(pool):
        whole, _, width = ge.shape(pool)
        flat = ge.reshape(pool, [whole * page, width])
        found = ge.GatherV2(flat, at, ge.const([0], torch.int64), negative_index_support=False)
        found = ge.mark(found, (rows * size, width), ge.dtype(pool))
        return ge.reshape(found, [rows * size // page, page, width])

    return [gathered(pool) for pool in pools]


def _several(ge, q_latent, *args):
    tokens = ge.shape(q_latent)[1]
    return "" if tokens == 1 else f"reads for one query a row, these are {tokens}"


def _fused_padding(ge, q_latent, *args):
    heads = ge.shape(q_latent)[2]
    return padded_heads(heads, latent_heads(heads, ge.soc, ge.cann, sparse=False))


OFFERS_LSE = (
    cannot("builtin", "SparseFlashAttention", "gives no log-sum-exp of a paged cache"),
    Offer(
        "builtin",
        "GatherV2, FusedInferAttentionScore",
        _gathered,
        "the selected rows are gathered first, and read by the operator that gives log-sum-exps",
        _several,
        _fused_padding,
    ),
    Offer("own", "SparseAttend", _attend, "the selected rows of the cache, once; log-sum-exps with them", _widths),
)
