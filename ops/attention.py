"""Causal attention of MLA: expanded over per-head keys (prefill), or absorbed over the paged latent cache (decode)."""

import torch
from torch import Tensor

from .base import at_least_f32, operator

# optional inputs of CANN's FusedInferAttentionScore after query, key and value, in prototype order
_OPTIONAL = """pse_shift atten_mask actual_seq_lengths actual_seq_lengths_kv dequant_scale1 quant_scale1 dequant_scale2
quant_scale2 quant_offset2 antiquant_scale antiquant_offset block_table query_padding_size kv_padding_size
key_antiquant_scale key_antiquant_offset value_antiquant_scale value_antiquant_offset key_shared_prefix
value_shared_prefix actual_shared_prefix_len query_rope key_rope key_rope_antiquant_scale dequant_scale_query
learnable_sink q_start_idx kv_start_idx""".split()


def _fused(ge, query, key, value, given, **attrs):
    """CANN's FusedInferAttentionScore with the optional inputs `given` by name."""
    assert set(given) <= set(_OPTIONAL)
    inputs = [given.get(name) for name in _OPTIONAL]
    return ge.FusedInferAttentionScore(query, [key], [value], *inputs, inner_precise=0, **attrs)[0]


@operator(sharding="b t h n, b t h r, b c h n, b c r, b c h v, b, b -> b t h v", whole="tcnr")
def attention(
    q_nope: Tensor, q_rope: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor, lengths: Tensor, counts: Tensor, scale: float
) -> Tensor:
    """Softmax attention; query i of a row is token `lengths - counts + i` and sees keys up to itself.

    Args:
        q_nope: `[B, T, H, N]`. q_rope: `[B, T, H, R]`.
        k_nope: `[B, C, H, N]`. k_rope: `[B, C, R]`, one for all heads. v: `[B, C, H, V]`.
        lengths, counts: `[B]`, see `Batch`; query rows past `counts` give zeros.

    Returns:
        `[B, T, H, V]` in v's dtype.
    """
    scores = torch.einsum("bthn,bchn->bhtc", at_least_f32(q_nope), at_least_f32(k_nope))
    scores = (scores + torch.einsum("bthr,bcr->bhtc", at_least_f32(q_rope), at_least_f32(k_rope))) * scale
    tokens, cached = q_nope.shape[1], v.shape[1]
    row = torch.arange(tokens, device=v.device)
    last = (lengths - counts)[:, None] + row
    hidden = torch.arange(cached, device=v.device) > last[..., None]
    weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
    o = torch.einsum("bhtc,bchv->bthv", weights, at_least_f32(v))
    return o.masked_fill((row >= counts[:, None])[..., None, None], 0).to(v.dtype)


@attention.fake
def _(q_nope, q_rope, k_nope, k_rope, v, lengths, counts, scale):
    return v.new_empty(*q_nope.shape[:3], v.shape[3])


@attention.lowering
def _(ge, q_nope, q_rope, k_nope, k_rope, v, lengths, counts, scale):
    rows, cached, heads, _ = ge.shape(k_nope)
    shared = ge.reshape(k_rope, [rows, cached, 1, ge.shape(k_rope)[-1]])
    per_head = ge.broadcast(shared, [rows, cached, heads, ge.shape(k_rope)[-1]])
    # sparse_mode 3: query i of a row sees keys up to lengths - counts + i, by the actual lengths
    given = {"query_rope": q_rope, "key_rope": per_head, "atten_mask": ge.causal_mask()}
    given |= {"actual_seq_lengths": counts, "actual_seq_lengths_kv": lengths}
    return _fused(
        ge, q_nope, k_nope, v, given,
        num_heads=heads, num_key_value_heads=heads, scale=scale, input_layout="BSND", sparse_mode=3,
    )  # fmt: skip


@operator(sharding="b t h l, b t h r, p g l, p g r, b n, b -> b t h l", whole="tpglrn")
def latent_attention(
    q_latent: Tensor, q_rope: Tensor, latent_pool: Tensor, rope_pool: Tensor, block_table: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """Attention of one new token a row (T = 1) over the paged latent cache, which is both keys and values.

    Args:
        q_latent: `[B, 1, H, L]`, queries moved into the latent space. q_rope: `[B, 1, H, R]`.
        latent_pool: `[P, page, L]`. rope_pool: `[P, page, R]`. block_table: `[B, pages of a sequence]` int32.
        lengths: `[B]`, tokens of each sequence, the new one included; a row of length 0 gives zeros.

    Returns:
        `[B, 1, H, L]`: weighted latents, still to be moved into the value space.
    """
    table = block_table.long()
    latent, rope = at_least_f32(latent_pool[table].flatten(1, 2)), at_least_f32(rope_pool[table].flatten(1, 2))
    scores = torch.einsum("bthl,bcl->bhtc", at_least_f32(q_latent), latent)
    scores = (scores + torch.einsum("bthr,bcr->bhtc", at_least_f32(q_rope), rope)) * scale
    hidden = torch.arange(latent.shape[1], device=latent.device) >= lengths[:, None]
    weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
    weights = weights.masked_fill((lengths == 0)[:, None, None, None], 0)
    return torch.einsum("bhtc,bcl->bthl", weights, latent).to(q_latent.dtype)


@latent_attention.fake
def _(q_latent, q_rope, latent_pool, rope_pool, block_table, lengths, scale):
    return torch.empty_like(q_latent)


@latent_attention.lowering
def _(ge, q_latent, q_rope, latent_pool, rope_pool, block_table, lengths, scale):
    rows, _, heads, latent = ge.shape(q_latent)

    def paged(pool):
        pages, page, width = ge.shape(pool)
        return ge.reshape(pool, [pages, 1, page, width])

    def one_token(x):
        return ge.reshape(x, [rows, heads, 1, ge.shape(x)[-1]])

    latents = paged(latent_pool)
    given = {"query_rope": one_token(q_rope), "key_rope": paged(rope_pool)}
    given |= {"block_table": block_table, "actual_seq_lengths_kv": lengths}
    o = _fused(
        ge, one_token(q_latent), latents, latents, given, block_size=ge.shape(latent_pool)[1],
        num_heads=heads, num_key_value_heads=1, scale=scale, input_layout="BNSD", sparse_mode=0,
    )  # fmt: skip
    return ge.reshape(o, [rows, 1, heads, latent])
