"""Causal attention of MLA: expanded over per-head keys (prefill), or absorbed over the paged latent cache (decode).

Letters: B rows, T tokens, C cached tokens, H heads, N key_nope, R key_rope, V value, L latent, P pages.
Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1; fact sheet of models, section 2.4.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kimi_graph.errors import CompileError

from .base import BLOCK_BYTES, at_least_f32, at_once, empty_like, operator

SCORE_BYTES = 4 << 20  # of the scores held at once, float32
MIN_QUERIES = 32  # of a block: fewer make poor matrix products

# optional inputs of CANN's FusedInferAttentionScore after query, key and value, in prototype order
_OPTIONAL = """pse_shift atten_mask actual_seq_lengths actual_seq_lengths_kv dequant_scale1 quant_scale1 dequant_scale2
quant_scale2 quant_offset2 antiquant_scale antiquant_offset block_table query_padding_size kv_padding_size
key_antiquant_scale key_antiquant_offset value_antiquant_scale value_antiquant_offset key_shared_prefix
value_shared_prefix actual_shared_prefix_len query_rope key_rope key_rope_antiquant_scale dequant_scale_query
learnable_sink q_start_idx kv_start_idx""".split()


EXPANDED = (128, 64, 128)  # widths of nope, rope and value that CANN takes with the rope part apart


def power_of_two(heads):
    """The smallest power of two that is not below `heads`."""
    return 1 << (heads - 1).bit_length()


def latent_heads(heads: int, soc: str, cann: str, *, sparse: bool) -> int:
    """Heads of a query that CANN's attention over the latent cache takes for `heads`: as many, or a power of two.

    FusedInferAttentionScore takes any number from CANN 9.2 on, SparseFlashAttention (`sparse`) on 950 alone.
    Source: fact sheet of Ascend, part A, and CANN's documents of both operators.
    """
    every = soc == "950" if sparse else tuple(map(int, cann.split("."))) >= (9, 2)
    return heads if every else power_of_two(heads)


def padded_heads(heads, wanted):
    """What padding heads costs, in words to add to a reason."""
    if wanted == heads:
        return ""
    return f"; {heads} heads padded to {wanted}, a power of two, and stripped: {wanted / heads - 1:.0%} more queries"


def _fused(ge, query, key, value, given, **attrs):
    """CANN's FusedInferAttentionScore with the optional inputs `given` by name: attention and log-sum-exps."""
    assert set(given) <= set(_OPTIONAL)
    inputs = [given.get(name) for name in _OPTIONAL]
    return ge.FusedInferAttentionScore(query, [key], [value], *inputs, inner_precise=0, **attrs)


@operator(sharding="b t h n, b t h r, b c h n, b c r, b c h v, b, b -> b t h v", whole="tcnr")
def attention(
    q_nope: Tensor,
    q_rope: Tensor,
    k_nope: Tensor,
    k_rope: Tensor,
    v: Tensor,
    lengths: Tensor,
    counts: Tensor,
    scale: float,
) -> Tensor:
    """Softmax attention; query i of a row is token `lengths - counts + i` and sees keys up to itself.

    Args:
        q_nope: `[B, T, H, N]`.
        q_rope: `[B, T, H, R]`.
        k_nope: `[B, C, H, N]`.
        k_rope: `[B, C, R]`, one for all heads.
        v: `[B, C, H, V]`.
        lengths, counts: `[B]`, see `Batch`; query rows past `counts` give zeros.

    Returns:
        `[B, T, H, V]` in v's dtype.
    """
    tokens, heads = q_nope.shape[1:3]
    outs = []
    for row, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        if count:
            q = torch.cat([q_nope[row, :count], q_rope[row, :count]], -1)
            shared = k_rope[row, :length, None].expand(-1, heads, -1)
            k = torch.cat([k_nope[row, :length], shared], -1)
            outs.append(_causal(q.transpose(0, 1), k.transpose(0, 1), v[row, :length].transpose(0, 1), scale))
        outs.append(v.new_zeros(tokens - count, heads, v.shape[3]))
    return torch.cat(outs).unflatten(0, (len(lengths), tokens))


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of the last n of L tokens: `[H, n, K]`, `[H, L, K]`, `[H, L, V]` -> `[n, H, V]`.

    Some heads and queries at a time, so that scores stay in cache; keys after a block of queries are not looked at.
    """
    heads, tokens, length = len(q), q.shape[1], k.shape[1]
    most = at_once(SCORE_BYTES, q)
    group = max(1, min(heads, most // (4 * MIN_QUERIES * length)))
    block = min(tokens, max(MIN_QUERIES, most // (4 * group * length)))
    later = torch.ones(block, block, dtype=torch.bool, device=v.device).triu(1)
    outs = []
    for some in zip(q.split(group), k.split(group), v.split(group), strict=True):
        q32, k32, v32 = map(at_least_f32, some)
        q32, parts = q32 * scale, []
        for start in range(0, tokens, block):
            stop = min(start + block, tokens)
            first, last = length - tokens + start, length - tokens + stop
            scores = torch.bmm(q32[:, start:stop], k32[:, :last].mT)
            scores[:, :, first:].masked_fill_(later[: stop - start, : stop - start], float("-inf"))
            parts.append(torch.bmm(scores.softmax(-1), v32[:, :last]).to(v.dtype))
        outs.append(torch.cat(parts, 1))
    return torch.cat(outs).transpose(0, 1)


@attention.fake
def _(q_nope, q_rope, k_nope, k_rope, v, lengths, counts, scale):
    return v.new_empty(*q_nope.shape[:3], v.shape[3])


@attention.lowering
def _(ge, q_nope, q_rope, k_nope, k_rope, v, lengths, counts, scale):
    rows, cached, heads, nope = ge.shape(k_nope)
    rope, value = ge.shape(k_rope)[-1], ge.shape(v)[-1]
    per_head = ge.broadcast(ge.reshape(k_rope, [rows, cached, 1, rope]), [rows, cached, heads, rope])
    # sparse_mode 3: query i of a row sees keys up to lengths - counts + i, by the actual lengths
    given = {"atten_mask": ge.causal_mask(), "actual_seq_lengths": counts, "actual_seq_lengths_kv": lengths}
    if (nope, rope, value) == EXPANDED:
        ge.chose("attention to expanded keys", "FusedInferAttentionScore", "rope channels apart")
        q, k = q_nope, k_nope
        given |= {"query_rope": q_rope, "key_rope": per_head}
    elif nope + rope == value:
        reason = f"plain attention of width {value}; rope channels apart need widths of {EXPANDED}"
        ge.chose("attention to expanded keys", "ConcatV2, FusedInferAttentionScore", reason)
        q, k = ge.concat([q_nope, q_rope], 3), ge.concat([k_nope, per_head], 3)
    else:
        raise CompileError(
            f"attention of {nope} + {rope} channels to values of {value}: FusedInferAttentionScore takes "
            f"{EXPANDED[0]} + {EXPANDED[1]} with values of {EXPANDED[2]}, or keys as wide as values."
        )
    return _fused(
        ge, q, k, v, given,
        num_heads=heads, num_key_value_heads=heads, scale=scale, input_layout="BSND", sparse_mode=3,
    )[0]  # fmt: skip


@operator(sharding="b t h l, b t h r, p g l, p g r, b n, b -> b t h l", whole="tpglrn")
def latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_pool: Tensor,
    rope_pool: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
) -> Tensor:
    """Attention of one new token a row (T = 1) over the paged latent cache, which is both keys and values.

    Args:
        q_latent: `[B, 1, H, L]`, queries moved into the latent space.
        q_rope: `[B, 1, H, R]`.
        latent_pool: `[P, page, L]`.
        rope_pool: `[P, page, R]`.
        block_table: `[B, pages of a sequence]` int32.
        lengths: `[B]`, tokens of each sequence, the new one included; a row of length 0 gives zeros.

    Returns:
        `[B, 1, H, L]`: weighted latents, still to be moved into the value space.
    """
    outs = [o for o, _ in _read_rows(q_latent, q_rope, latent_pool, rope_pool, block_table, lengths, scale)]
    return torch.stack(outs)[:, None].to(q_latent.dtype)


def _read_rows(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_pool: Tensor,
    rope_pool: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each row: weighted latents `[H, L]` and scores `[H, n]`."""
    queries, ropes = at_least_f32(q_latent[:, 0]) * scale, at_least_f32(q_rope[:, 0]) * scale
    for q, q_r, table, length in zip(queries, ropes, block_table.tolist(), lengths.tolist(), strict=True):
        if length:
            pages = table[: -(-length // latent_pool.shape[1])]
            latent, rope = (_in_order(pool, pages)[:length] for pool in (latent_pool, rope_pool))
            yield _read(q, q_r, latent, rope)
        else:
            yield torch.zeros_like(q), q[:, :0]


def _in_order(pool: Tensor, pages: list[int]) -> Tensor:
    """Rows of some pages, one page after another; a view where the pages lie so already."""
    first, last = pages[0], pages[-1] + 1
    found = pool[first:last] if pages == list(range(first, last)) else pool[pages]
    return found.flatten(0, 1)


def _read(q: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """`[H, L]` and `[H, R]` read a cache `[n, L]`, `[n, R]`: weighted latents `[H, L]`, and scores `[H, n]`."""
    # a bfloat16 cache is widened some tokens at a time, twice: for the scores, then for the sum
    size = max(1, BLOCK_BYTES // (4 * latent.shape[1]) if latent.dtype.itemsize < 4 else latent.shape[0])
    latents, ropes = latent.split(size), rope.split(size)
    scores = [
        torch.addmm(q_rope @ at_least_f32(r).mT, q, at_least_f32(x).mT) for x, r in zip(latents, ropes, strict=True)
    ]
    score = torch.cat(scores, -1)
    weights = score.softmax(-1).split(size, -1)
    return torch.stack([w @ at_least_f32(x) for w, x in zip(weights, latents, strict=True)]).sum(0), score


@latent_attention.fake
def _(q_latent, q_rope, latent_pool, rope_pool, block_table, lengths, scale):
    return empty_like(q_latent)


@latent_attention.lowering
def _(ge, q_latent, q_rope, latent_pool, rope_pool, block_table, lengths, scale):
    return _chosen(ge, q_latent, q_rope, latent_pool, rope_pool, block_table, lengths, scale, lse=False)[0]


@operator(sharding="b t h l, b t h r, p g l, p g r, b n, b -> b t h l, b t h", whole="tpglrn")
def latent_attention_lse(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_pool: Tensor,
    rope_pool: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`latent_attention`, and the logarithm of what its weights were divided by: with it parts of a cache are merged.

    Returns:
        `[B, 1, H, L]`, and `[B, 1, H]` float32, log(sum(exp(scores))); a row of length 0 gives zeros and any number.
    """
    found = [*_read_rows(q_latent, q_rope, latent_pool, rope_pool, block_table, lengths, scale)]
    outs, scores = zip(*found, strict=True)
    o = torch.stack(outs)[:, None].to(q_latent.dtype)
    return o, torch.stack([score.logsumexp(-1) for score in scores])[:, None]


@latent_attention_lse.fake
def _(q_latent, q_rope, latent_pool, rope_pool, block_table, lengths, scale):
    wide = torch.promote_types(q_latent.dtype, torch.float32)
    return empty_like(q_latent), q_latent.new_empty(q_latent.shape[:3], dtype=wide)


@latent_attention_lse.lowering
def _(ge, q_latent, q_rope, latent_pool, rope_pool, block_table, lengths, scale):
    return _chosen(ge, q_latent, q_rope, latent_pool, rope_pool, block_table, lengths, scale, lse=True)


def _chosen(ge, q_latent, *args, lse):
    heads = ge.shape(q_latent)[2]
    reason = "absorbed, paged" + (", with log-sum-exp" if lse else "")
    reason += padded_heads(heads, latent_heads(heads, ge.soc, ge.cann, sparse=False))
    ge.chose("attention to latents", "FusedInferAttentionScore", reason)
    return absorbed(ge, q_latent, *args, lse=lse)


def absorbed(ge, q_latent, q_rope, latent_pool, rope_pool, block_table, lengths, scale, lse):
    """CANN's attention of one query a row over the paged latent cache: weighted latents, and log-sum-exps."""
    rows, _, heads, latent = ge.shape(q_latent)
    wanted = latent_heads(heads, ge.soc, ge.cann, sparse=False)

    def paged(pool):
        pages, page, width = ge.shape(pool)
        return ge.reshape(pool, [pages, 1, page, width])

    def one_token(x):
        return ge.pad(ge.reshape(x, [rows, heads, 1, ge.shape(x)[-1]]), 1, wanted)

    latents = paged(latent_pool)
    given = {"query_rope": one_token(q_rope), "key_rope": paged(rope_pool)}
    given |= {"block_table": block_table, "actual_seq_lengths_kv": lengths}
    o, sums = _fused(
        ge, one_token(q_latent), latents, latents, given, block_size=ge.shape(latent_pool)[1],
        num_heads=wanted, num_key_value_heads=1, scale=scale, input_layout="BNSD", sparse_mode=0, softmax_lse_flag=lse,
    )  # fmt: skip
    o = ge.first(ge.mark(o, (rows, wanted, 1, latent), ge.dtype(q_latent)), 1, heads)
    o = ge.reshape(o, [rows, 1, heads, latent])
    if lse:
        sums = ge.first(ge.mark(sums, (rows, wanted, 1, 1), torch.float32), 1, heads)
        sums = ge.reshape(sums, [rows, 1, heads])
    return o, sums
