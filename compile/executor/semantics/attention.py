"""Attention over contiguous or paged keys and values.

Letters: B sequences, N query heads, M key and value heads, S query tokens, C key tokens, V width of a value, P pages.
"""

import torch
from torch import Tensor

from kimi_graph.compile.executor.node import Op
from kimi_graph.compile.executor.registry import ge_op
from kimi_graph.ops import at_least_f32

UNLIMITED = 2147483647
ROPE = 64
ABSORBED = 512  # width of a latent: keys and values of absorbed MLA
BLOCK = 1 << 19  # scores held at once
MASK = 2048  # side of the triangle that stands for a causal mask of any size

_LAYOUTS = {
    "BSH": ("BSH", "BSH"),
    "BSND": ("BSND", "BSND"),
    "BNSD": ("BNSD", "BNSD"),
    "BNSD_BSND": ("BNSD", "BSND"),
    "BSND_BNSD": ("BSND", "BNSD"),
    "BSH_BNSD": ("BSH", "BNSD"),
    "BNSD_NBSD": ("BNSD", "NBSD"),
    "BSND_NBSD": ("BSND", "NBSD"),
    "BSH_NBSD": ("BSH", "NBSD"),
}
_OF_ABSORBED = ("BSH", "BSND", "BNSD", "BNSD_NBSD", "BSND_NBSD", "BSH_NBSD")
_OF_EXPANDED = ("BSH", "BSND", "BNSD", "BNSD_BSND", "BSND_BNSD", "BSH_BNSD")

_PROTOTYPE = (
    "query key[] value[] pse_shift? atten_mask? actual_seq_lengths? actual_seq_lengths_kv? dequant_scale1? "
    "quant_scale1? dequant_scale2? quant_scale2? quant_offset2? antiquant_scale? antiquant_offset? block_table? "
    "query_padding_size? kv_padding_size? key_antiquant_scale? key_antiquant_offset? value_antiquant_scale? "
    "value_antiquant_offset? key_shared_prefix? value_shared_prefix? actual_shared_prefix_len? query_rope? key_rope? "
    "key_rope_antiquant_scale? dequant_scale_query? learnable_sink? q_start_idx? kv_start_idx?"
)


@ge_op(
    "FusedInferAttentionScore",
    provenance="public CPU reference",
    source="ops-transformer's golden functions and documents (A2/A3: version 4, 950: version 5): softmax(scale * (q k "
    "+ q_rope k_rope)) v per row's real lengths; sparse_mode 3 shows query i the keys up to i + (keys - queries); rows "
    "without a query or a key give zeros; the weights are rounded to the query's dtype before they meet the values",
    outputs="attention_out softmax_lse",
    prototype=_PROTOTYPE,
)
def fused_infer_attention_score(
    op: Op,
    query: Tensor,
    key: list[Tensor],
    value: list[Tensor],
    atten_mask: Tensor | None,
    actual_seq_lengths: Tensor | None,
    actual_seq_lengths_kv: Tensor | None,
    block_table: Tensor | None,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
) -> tuple[Tensor, Tensor]:
    heads = op.need("num_heads", int)
    kv_heads = op.attr("num_key_value_heads", 0) or heads
    sparse, page, layout = op.attr("sparse_mode", 0), op.attr("block_size", 0), op.attr("input_layout", "BSH")
    scale = op.attr("scale", 1.0)
    op.expect(
        pre_tokens=UNLIMITED, next_tokens=UNLIMITED, antiquant_mode=0, softmax_lse_flag=(False, True),
        key_antiquant_mode=0, value_antiquant_mode=0, query_quant_mode=0, pse_type=0, out_dtype=0,
    )  # fmt: skip
    op.must(inner_precise=0)  # the one value the documents allow for bfloat16 everywhere; the prototype's default is 1
    op.require(layout in _LAYOUTS, f"input_layout {layout!r}, supported is {', '.join(_LAYOUTS)}")
    op.require(len(key) == len(value) == 1, "one key and one value tensor are supported")
    op.require((query_rope is None) == (key_rope is None), "query_rope and key_rope come together")
    op.same_dtype(query, key[0], value[0], *(t for t in (query_rope, key_rope) if t is not None))
    entering, leaving = _LAYOUTS[layout]

    q = _heads_first(op, query, entering, heads)
    if block_table is None:
        op.require(page == 0, "block_size without block_table")
        k, v = (_heads_first(op, t[0], entering, kv_heads) for t in (key, value))
        k_rope = None if key_rope is None else _heads_first(op, key_rope, entering, kv_heads)
    else:
        k, v = (_paged(op, t[0], block_table, page, kv_heads) for t in (key, value))
        k_rope = None if key_rope is None else _paged(op, key_rope, block_table, page, kv_heads)
        op.require(actual_seq_lengths_kv is not None, "paged keys need actual_seq_lengths_kv")
    q_rope = None if query_rope is None else _heads_first(op, query_rope, entering, heads)
    _check_mla(op, q, q_rope, k, k_rope, v, layout, actual_seq_lengths)

    lengths_q = _lengths(op, actual_seq_lengths, q.shape[0], q.shape[2], q.device)
    lengths_kv = _lengths(op, actual_seq_lengths_kv, q.shape[0], k.shape[2], q.device)
    hidden = _hidden(op, sparse, atten_mask, q, k, lengths_q, lengths_kv)
    wide = torch.float64 if op.exact else torch.float32
    lse = q.new_full((*q.shape[:3], 1), float("inf"), dtype=wide)  # what rows without a key have is not documented
    out = _attend(q, q_rope, k, k_rope, v, hidden, lengths_q, lengths_kv, scale, lse)
    if not op.attr("softmax_lse_flag", False):
        return _leave(out, leaving), query.new_empty(0, dtype=wide)
    op.require(layout in ("BNSD", "BSND"), f"log-sum-exp in input_layout {layout!r}, supported is BNSD or BSND")
    return _leave(out, leaving), lse


def _heads_first(op: Op, x: Tensor, layout: str, heads: int) -> Tensor:
    """`[B, heads, tokens, width]` of a contiguous tensor."""
    if layout == "BSH":
        op.require(x.ndim == 3 and x.shape[2] % heads == 0, f"BSH of {heads} heads expected, found {list(x.shape)}")
        return x.unflatten(2, (heads, -1)).transpose(1, 2)
    x = x.transpose(1, 2) if layout == "BSND" else x
    op.require(x.ndim == 4 and x.shape[1] == heads, f"{layout} of {heads} heads expected, found {list(x.shape)}")
    return x


def _paged(op: Op, pool: Tensor, table: Tensor, page: int, heads: int) -> Tensor:
    """`[B, heads, tokens, width]` of a pool `[P, page, heads * width]` or `[P, heads, page, width]`."""
    op.of_dtype(torch.int32, block_table=table)
    op.require(page % 16 == 0 and 0 < page <= 1024, f"block_size {page} is not a multiple of 16 up to 1024")
    op.require(pool.ndim in (3, 4), f"a pool of 3 or 4 dimensions expected, found {list(pool.shape)}")
    if pool.ndim == 3:
        op.require(pool.shape[2] % heads == 0, f"pool {list(pool.shape)} for {heads} heads")
        pool = pool.unflatten(2, (heads, -1)).transpose(1, 2)
    op.require(
        pool.shape[1] == heads and pool.shape[2] == page, f"pool {list(pool.shape)}, {heads} heads, pages of {page}"
    )
    pages = table.long()
    if not pages.is_meta and pages.numel():
        op.require(int(pages.max()) < pool.shape[0], f"block_table names page {int(pages.max())} of {pool.shape[0]}")
        pages = pages.clamp(min=0)  # entries past a sequence's length may be anything
    return pool[pages].transpose(1, 2).flatten(2, 3)


def _check_mla(
    op: Op,
    q: Tensor,
    q_rope: Tensor | None,
    k: Tensor,
    k_rope: Tensor | None,
    v: Tensor,
    layout: str,
    lengths: Tensor | None,
) -> None:
    """Sizes the documents promise: absorbed MLA, expanded MLA with the rope part apart, and the rest."""
    op.require(q.shape[0] == k.shape[0] == v.shape[0], f"{q.shape[0]} queries, {k.shape[0]} keys, {v.shape[0]} values")
    op.require(q.shape[3] == k.shape[3], f"query width {q.shape[3]}, key width {k.shape[3]}")
    op.require(k.shape[2] == v.shape[2], f"{k.shape[2]} keys, {v.shape[2]} values")
    op.require(q.shape[1] % k.shape[1] == 0, f"{q.shape[1]} query heads over {k.shape[1]} key heads")
    if q_rope is None or k_rope is None:
        widths = (q.shape[3], v.shape[3])
        op.require(widths[0] == widths[1] <= 512 or widths == (192, 128), f"query and value widths {widths}")
        return
    op.require(q_rope.shape == (*q.shape[:3], ROPE), f"query_rope {list(q_rope.shape)} beside query {list(q.shape)}")
    op.require(k_rope.shape == (*k.shape[:3], ROPE), f"key_rope {list(k_rope.shape)} beside key {list(k.shape)}")
    op.require(
        q.shape[3] == v.shape[3] and q.shape[3] in (128, ABSORBED), f"width {q.shape[3]} with rope, 128 or 512 expected"
    )
    if q.shape[3] == ABSORBED:
        op.require(layout in _OF_ABSORBED, f"input_layout {layout!r} for width 512, one of {_OF_ABSORBED} expected")
        op.require(k.shape[1] == 1, f"one key head expected for width 512, found {k.shape[1]}")
        op.require(q.shape[1] <= 128, f"{q.shape[1]} heads, at most 128 expected")  # which of them: by CANN, see limits
        op.require(op.attr("block_size", 0) > 0, "width 512 needs paged keys")
        op.require(lengths is None, "actual_seq_lengths for width 512 is for layout TND alone")
    else:
        op.require(
            layout in _OF_EXPANDED, f"input_layout {layout!r} for width 128 with rope, one of {_OF_EXPANDED} expected"
        )


def _lengths(op: Op, given: Tensor | None, rows: int, default: int, device: torch.device) -> Tensor:
    """`[B]` int64: tokens of each row, all of them where not given."""
    if given is None:
        return torch.full((rows,), default, dtype=torch.int64, device=device)
    op.of_dtype(torch.int64, lengths=given)
    op.require(given.ndim == 1 and given.shape[0] in (1, rows), f"{rows} lengths expected, found {list(given.shape)}")
    if not given.is_meta:
        op.require(int(given.min()) >= 0 and int(given.max()) <= default, f"a length outside 0..{default}")
    return given.expand(rows)


def _hidden(
    op: Op, sparse: int, mask: Tensor | None, q: Tensor, k: Tensor, lengths_q: Tensor, lengths_kv: Tensor
) -> Tensor:
    """`[B, S, C]`: keys a query does not see; all of them for a query past its row's length."""
    queries, keys = (torch.arange(n, device=q.device) for n in (q.shape[2], k.shape[2]))
    hidden = (keys >= lengths_kv[:, None])[:, None] | (queries >= lengths_q[:, None])[..., None]
    if sparse == 0:
        return hidden if mask is None else hidden | _full_mask(op, mask, q, k)
    op.require(sparse == 3, f"sparse_mode {sparse}, supported is 0 or 3")
    if mask is None:
        op.fail("sparse_mode 3 needs atten_mask")
    _check_triangle(op, mask)
    last = queries + (lengths_kv - lengths_q)[:, None]
    return hidden | (keys > last[..., None])


def _full_mask(op: Op, mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    op.of_dtype(torch.bool, torch.int8, torch.uint8, atten_mask=mask)
    mask = mask.squeeze(1) if mask.ndim == 4 else mask
    op.require(
        mask.ndim == 3
        and mask.shape[0] in (1, q.shape[0])
        and mask.shape[1] >= q.shape[2]
        and mask.shape[2] >= k.shape[2],
        f"atten_mask {list(mask.shape)} for {list(q.shape)} and {k.shape[2]} keys",
    )
    return mask[:, : q.shape[2], : k.shape[2]].bool()


def _check_triangle(op: Op, mask: Tensor) -> None:
    """The kernel cuts tiles out of a triangle of fixed size; anything else in it would be used where it falls."""
    op.of_dtype(torch.bool, torch.int8, torch.uint8, atten_mask=mask)
    op.require(
        mask.numel() == MASK * MASK and mask.shape[-2:] == (MASK, MASK), f"atten_mask of [{MASK}, {MASK}] expected"
    )
    if not mask.is_meta:
        triangle = torch.ones(MASK, MASK, dtype=torch.bool).triu(1)
        op.require(
            torch.equal(mask.reshape(MASK, MASK).bool(), triangle), "atten_mask is not true above its diagonal only"
        )


def _attend(
    q: Tensor,
    q_rope: Tensor | None,
    k: Tensor,
    k_rope: Tensor | None,
    v: Tensor,
    hidden: Tensor,
    lengths_q: Tensor,
    lengths_kv: Tensor,
    scale: float,
    lse: Tensor,
) -> Tensor:
    """`[B, N, S, V]`, zeros where there is no key to see; `lse` `[B, N, S, 1]` is filled where there is one.

    Cache rows past a length are never read. Some queries at a time, so that scores stay in cache.
    """
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    if q.is_meta:
        return out
    for row, (queries, keys) in enumerate(zip(lengths_q.tolist(), lengths_kv.tolist(), strict=True)):
        seen = [None if t is None else at_least_f32(t[row, :, :keys]) for t in (k, k_rope, v)]
        size = max(1, BLOCK // max(1, q.shape[1] * keys))
        for start in range(0, queries if keys else 0, size):
            some = slice(start, min(start + size, queries))
            aims = q[row, :, some], None if q_rope is None else q_rope[row, :, some]
            out[row, :, some], lse[row, :, some, 0] = _attend_some(aims, seen, hidden[row, some, :keys], scale, q.dtype)
    return out


def _attend_some(
    aims: tuple[Tensor, Tensor | None],
    seen: list[Tensor | None],
    hidden: Tensor,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Of one sequence: queries and their rope part `[N, n, .]` to keys, their rope part and values `[M, C, .]`.

    Returns:
        `[N, n, V]` and log-sum-exps `[N, n]`, infinite where there is no key to see.
    """
    k, k_rope, v = seen
    assert k is not None and v is not None
    scores = _scores(aims[0], k)
    if aims[1] is not None and k_rope is not None:
        scores = scores + _scores(aims[1], k_rope)
    scores = (scores * scale).masked_fill(hidden, float("-inf"))
    empty = hidden.all(-1)[:, None]
    top = scores.amax(-1, keepdim=True).masked_fill(empty, 0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True).masked_fill(empty, 1)
    o = at_least_f32(weights.to(dtype)) @ v[:, None] / total
    lse = (top + total.log()).masked_fill(empty, float("inf"))
    return o.masked_fill(empty, 0).flatten(0, 1).to(dtype), lse[..., 0].flatten(0, 1)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """`[M, N / M, n, C]`."""
    return at_least_f32(q).unflatten(0, (len(k), -1)) @ k[:, None].mT


def _leave(out: Tensor, layout: str) -> Tensor:
    """`[B, N, S, V]` in the output's layout."""
    if layout == "NBSD":
        return out.transpose(0, 1)
    if layout == "BNSD":
        return out
    return out.transpose(1, 2) if layout == "BSND" else out.transpose(1, 2).flatten(2)
