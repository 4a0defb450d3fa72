"""NoPE multi-head latent attention: keys and values of all heads are read from one small latent per token.

Axes: B sequences, T new tokens, C cached tokens, D embed, H heads, N key_nope, R key_rope, V value, L latent.
Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1; Kimi Linear (arXiv:2510.26692) uses it without rotation.
"""

from typing import Generic

import torch
from torch import Tensor

from kimi_graph import ops
from kimi_graph.config import MlaConfig
from kimi_graph.ops import contract
from kimi_graph.spec import ParamSpec, weight
from kimi_graph.taps import tap
from kimi_graph.tree import Leaf, param_tree

from .batch import Batch, MlaState, new_rows

LATENT_EPS = 1e-6  # released code builds this norm with its class default, not with rms_norm_eps


@param_tree
class Mla(Generic[Leaf]):
    query: Leaf
    latent: Leaf
    latent_norm: Leaf
    up: Leaf
    out: Leaf


def mla_specs(c: MlaConfig, embed: int) -> Mla[ParamSpec]:
    up = c.key_nope + c.value
    return Mla(
        query=weight(
            (c.heads, c.key, embed), "heads key embed", source="q_proj.weight", stored=(c.heads * c.key, embed)
        ),
        latent=weight((c.latent + c.key_rope, embed), "latent embed", source="kv_a_proj_with_mqa.weight"),
        latent_norm=weight((c.latent,), "latent", source="kv_a_layernorm.weight"),
        up=weight(
            (c.heads, up, c.latent), "heads key latent", source="kv_b_proj.weight", stored=(c.heads * up, c.latent)
        ),
        out=weight(
            (embed, c.heads, c.value), "embed heads value", source="o_proj.weight", stored=(embed, c.heads * c.value)
        ),
    )


def mla_state_specs(c: MlaConfig, pages: int, page: int, dtype: torch.dtype) -> MlaState[ParamSpec]:
    """Shapes, dtypes and axes of the cache (specs without a checkpoint source)."""
    return MlaState(
        latent=weight((pages, page, c.latent), "pages _ latent", source="", dtype=dtype),
        rope=weight((pages, page, c.key_rope), "pages _ _", source="", dtype=dtype),
    )


def mla(
    p: Mla[Tensor],
    c: MlaConfig,
    x_BTD: Tensor,
    state: MlaState[Tensor] | None = None,
    batch: Batch[Tensor] | None = None,
    *,
    step: bool = False,
) -> tuple[Tensor, MlaState[Tensor]]:
    """Attend causally over the cache and the new tokens: `[B, T, D]` -> `[B, T, D]` and the next cache.

    Args:
        state, batch: what the sequences have seen and where they stand; without both, B sequences start here, in a
            cache with room for just these tokens.
        step: one token a row, absorbed form (queries go into the latent space); else the expanded form. Same result.
    """
    if state is None or batch is None:
        rows, tokens, _ = x_BTD.shape
        specs = mla_state_specs(c, rows + 1, tokens, x_BTD.dtype)
        new: tuple[MlaState[Tensor], Batch[Tensor]] = new_rows("mla", (state, batch), specs, x_BTD)
        state, batch = new
    q_BTHK = contract("btd,hkd->bthk", x_BTD, p.query)
    q_BTHN, q_BTHR = q_BTHK[..., : c.key_nope], q_BTHK[..., c.key_nope :]
    low_BTL = contract("btd,ld->btl", x_BTD, p.latent)
    latent_BTL = ops.rms_norm(low_BTL[..., : c.latent], p.latent_norm, LATENT_EPS)
    rope_BTR = low_BTL[..., c.latent :]
    latent, rope = ops.cache_write(latent_BTL, rope_BTR, state.latent, state.rope, batch.slot_mapping)

    up_key_HNL, up_value_HVL = p.up[:, : c.key_nope], p.up[:, c.key_nope :]
    scale = c.scale
    if step:
        q_BTHL = contract("bthn,hnl->bthl", q_BTHN, up_key_HNL)
        o_BTHL = ops.latent_attention(q_BTHL, q_BTHR, latent, rope, batch.block_table, batch.lengths, scale)
        o_BTHV = contract("bthl,hvl->bthv", o_BTHL, up_value_HVL)
    else:
        latent_BCL, rope_BCR = ops.cache_read(latent, rope, batch.block_table)
        k_BCHN = contract("bcl,hnl->bchn", latent_BCL, up_key_HNL)
        v_BCHV = contract("bcl,hvl->bchv", latent_BCL, up_value_HVL)
        o_BTHV = ops.attention(q_BTHN, q_BTHR, k_BCHN, rope_BCR, v_BCHV, batch.lengths, batch.counts, scale)
    y_BTD = contract("bthv,dhv->btd", tap("heads", o_BTHV), p.out)
    return y_BTD, MlaState(latent=tap("latent", latent), rope=rope)
