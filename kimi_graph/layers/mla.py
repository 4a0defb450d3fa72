"""Multi-head latent attention: keys and values of all heads are read from one small latent per token.

With an indexer (DSA), a query attends only to the cached tokens that the indexer selects; where a sequence's pages hold
no more than it would select, that is all of them and the layer is dense.

Axes: B sequences, T new tokens, C cached tokens, D embed, Q query_latent, H heads, N key_nope, R key_rope, V value,
L latent, J selected tokens.
Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1; DeepSeek-V3.2 report (arXiv:2512.02556); fact sheet of models,
sections 2.4 and 5. `source=`: released names.
"""

import functools
from typing import Any, Generic

import torch
from torch import Tensor

from kimi_graph import ops, tree
from kimi_graph.config import MlaConfig
from kimi_graph.ops import NO_SCORE, contract
from kimi_graph.parallel import constrain, shard_map, ways
from kimi_graph.spec import ParamSpec, weight
from kimi_graph.taps import tap
from kimi_graph.tree import Leaf, param_tree

from .batch import Batch, MlaState, check_input, new_rows, one_token, turn
from .indexer import Indexer, index_key, indexer_specs, select
from .kernels import Kernels
from .stretches import POOL, in_order, merged, own_pages, own_places, own_queries, own_rows, own_stretch


@param_tree
class Mla(Generic[Leaf]):
    """Weights, in the order of the computation.

    `query_down` and `query_norm` are None where queries are projected by one matrix; `gate` without output gate;
    `indexer` where the layer is dense or reuses another's selection.
    """

    query_down: Leaf | None
    query_norm: Leaf | None
    query: Leaf
    latent: Leaf
    latent_norm: Leaf
    up: Leaf
    gate: Leaf | None
    out: Leaf
    indexer: Indexer[Leaf] | None


def mla_specs(c: MlaConfig, embed: int) -> Mla[ParamSpec]:
    """Specs by the checkpoint's names within the layer: `kv_b_proj.weight` is `[H, N + V, L]`, a head's keys first."""
    keys, up, values = c.heads * c.key, c.key_nope + c.value, c.heads * c.value
    low = c.query_latent
    if low is None:
        query = weight((c.heads, c.key, embed), "heads key embed", source="q_proj.weight", stored=(keys, embed))
    else:
        query = weight((c.heads, c.key, low), "heads key query_latent", source="q_b_proj.weight", stored=(keys, low))
    gate = weight((c.heads, c.value, embed), "heads value embed", source="g_proj.weight", stored=(values, embed))
    indexer = None
    if c.indexer is not None and not c.indexer.shared:
        assert low is not None, "the indexer reads the query's low-rank form"
        indexer = tree.map(lambda s: s.under("indexer."), indexer_specs(c.indexer, embed, low))
    return Mla(
        query_down=None if low is None else weight((low, embed), "query_latent embed", source="q_a_proj.weight"),
        query_norm=None if low is None else weight((low,), "query_latent", source="q_a_layernorm.weight"),
        query=query,
        latent=weight((c.latent + c.key_rope, embed), "latent embed", source="kv_a_proj_with_mqa.weight"),
        latent_norm=weight((c.latent,), "latent", source="kv_a_layernorm.weight"),
        up=weight(
            (c.heads, up, c.latent), "heads key latent", source="kv_b_proj.weight", stored=(c.heads * up, c.latent)
        ),
        gate=gate if c.output_gate else None,
        out=weight((embed, c.heads, c.value), "embed heads value", source="o_proj.weight", stored=(embed, values)),
        indexer=indexer,
    )


def mla_state_specs(c: MlaConfig, pages: int, page: int, dtype: torch.dtype) -> MlaState[ParamSpec]:
    """Shapes, dtypes and axes of the cache (specs without a checkpoint source)."""
    own_index = c.indexer is not None and not c.indexer.shared
    return MlaState(
        latent=weight((pages, page, c.latent), "pages _ latent", source="", dtype=dtype),
        rope=weight((pages, page, c.key_rope), "pages _ _", source="", dtype=dtype),
        index=weight((pages, page, c.indexer.key), "pages _ _", source="", dtype=dtype) if own_index else None,  # type: ignore[union-attr]
    )


def mla(
    p: Mla[Tensor],
    c: MlaConfig,
    x_BTD: Tensor,
    state: MlaState[Tensor] | None = None,
    batch: Batch[Tensor] | None = None,
    *,
    step: bool = False,
    selected: Tensor | None = None,
    kernels: Kernels = "torch",
) -> tuple[Tensor, MlaState[Tensor], Tensor | None]:
    """Attend causally over the cache and the new tokens: `[B, T, D]` -> `[B, T, D]`, the next cache and the selection.

    Args:
        state, batch: what the sequences have seen and where they stand; without both, B sequences start here, in a
            cache with room for just these tokens.
        step: one token a row. Where the layer is dense, a step has the absorbed form (queries go into the latent
            space), else the expanded form; same result.
        selected: `[B, T, J]`, selection of the last layer that has an indexer, for one that shares it.
        kernels: of the indexer: "torch" everywhere; "gpu": those of the extra `gpu`, see `gpu_kernels`.

    Returns:
        the selection too, None where the layer is dense.

    Raises:
        ConfigError: kernels that cannot run here, `step` with more than one token a row, `state` or `batch` alone,
            an input of another width or dtype than the weights'.
        ShardingError: on a mesh, new tokens that do not divide over the devices that share them out, or a sequence
            whose pages do not.
    """
    rotation = None if c.rope is None else (c.rope, c.key_rope)
    if state is None or batch is None:
        check_input("mla", x_BTD, p.latent)
        rows, tokens, _ = x_BTD.shape
        specs = mla_state_specs(c, rows + 1, tokens, x_BTD.dtype)
        new: tuple[MlaState[Tensor], Batch[Tensor]] = new_rows("mla", (state, batch), specs, x_BTD, rotation)
        state, batch = new
    # On a mesh the queries of a prefill are shared out, and what follows from them alone; keys are everybody's.
    own_BTD = own_stretch(x_BTD)
    query_BTX = own_BTD
    if p.query_down is not None and p.query_norm is not None:
        query_BTX = ops.rms_norm(contract("btd,qd->btq", own_BTD, p.query_down), p.query_norm, c.latent_eps)
    q_BTHK = contract("btx,hkx->bthk", query_BTX, p.query)
    q_BTHN, q_BTHR = q_BTHK[..., : c.key_nope], rotate(c, q_BTHK[..., c.key_nope :], batch)
    low_BTL = contract("btd,ld->btl", x_BTD, p.latent)
    latent_BTL = ops.rms_norm(low_BTL[..., : c.latent], p.latent_norm, c.latent_eps)
    rope_BTR = rotate(c, low_BTL[..., c.latent :], batch)
    write = shard_map(write_own, (NEW, NEW, POOL, POOL, ("batch",)), (POOL, POOL))
    latent, rope = write(latent_BTL, rope_BTR, state.latent, state.rope, batch.slot_mapping)
    index = state.index
    if p.indexer is not None:
        assert c.indexer is not None and index is not None, "an indexer without its configuration or its cache"
        write = shard_map(write_own_index, (NEW, POOL, ("batch",)), POOL)
        index = write(index_key(p.indexer, c.indexer, x_BTD, batch), index, batch.slot_mapping)
    after = MlaState(latent=tap("latent", latent), rope=rope, index=index)
    if not step:
        latent, rope, index, batch = whole_caches(latent, rope, index, batch)

    if c.indexer is None or batch.block_table.shape[1] * latent.shape[1] <= c.indexer.top_k:
        selected = None
        o_BTHV = dense(p, c, q_BTHN, q_BTHR, latent, rope, batch, step=step)
    else:
        if p.indexer is not None:
            assert index is not None
            selected = select(p.indexer, c.indexer, own_BTD, query_BTX, index, batch, step=step, kernels=kernels)
        assert selected is not None, "a layer that shares a selection was given none"
        selected = tap("selected", selected)
        o_BTHV = sparse(p, c, q_BTHN, q_BTHR, latent, rope, selected, batch, step=step)
    o_BTHV = tap("heads", o_BTHV)
    if p.gate is not None:
        o_BTHV = ops.sigmoid_gate(o_BTHV, contract("btd,hvd->bthv", own_BTD, p.gate))
    y_BTD = contract("bthv,dhv->btd", o_BTHV, p.out)
    return constrain(y_BTD, "batch", "sequence", None), after, selected


# ---- the cache -------------------------------------------------------------------------------------------------------

NEW, TABLE = ("batch", "sequence", None), ("batch", None)
QUERY = ("batch", "sequence", "attn_heads", None)  # of a step
QUERIES = ("batch", "queries", "heads", None)  # of a prefill


def write_own(
    latent_BTL: Tensor, rope_BTR: Tensor, latent: Tensor, rope: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """`ops.cache_write` into this device's pools `[P, page, L]` and `[P, page, R]`. The body of a `shard_map`."""
    return ops.cache_write(latent_BTL, rope_BTR, latent, rope, own_rows(slot_mapping, latent))


def write_own_index(key_BTK: Tensor, index: Tensor, slot_mapping: Tensor) -> Tensor:
    """`ops.index_write` into this device's pool `[P, page, K]`. The body of a `shard_map`."""
    return ops.index_write(key_BTK, index, own_rows(slot_mapping, index))


def whole_caches(
    latent: Tensor, rope: Tensor, index: Tensor | None, batch: Batch[Tensor]
) -> tuple[Tensor, Tensor, Tensor | None, Batch[Tensor]]:
    """Pools that hold the batch's sequences whole on every device, and the batch in them; see `in_order`.

    Args:
        latent: `[P, page, L]`.
        rope: `[P, page, R]`.
        index: `[P, page, K]`, or None.
    """
    pools = [pool for pool in (latent, rope, index) if pool is not None]
    rows = ("batch", None, None)
    read = shard_map(in_order, (TABLE, ("batch",), *[POOL] * len(pools)), (TABLE, *[rows] * len(pools)))
    table, latent, rope, *rest = read(batch.block_table, batch.lengths, *pools)
    return latent, rope, rest[0] if rest else None, tree.replace(batch, block_table=table)


# ---- attention -------------------------------------------------------------------------------------------------------


def rotate(c: MlaConfig, x: Tensor, batch: Batch[Tensor]) -> Tensor:
    """Rope channels `[B, T, R]` or `[B, T, H, R]` turned by position; as they are where the model does not rotate."""
    return x if c.rope is None else turn(x, batch, c.rope.interleaved)


def dense(
    p: Mla[Tensor],
    c: MlaConfig,
    q_BTHN: Tensor,
    q_BTHR: Tensor,
    latent: Tensor,
    rope: Tensor,
    batch: Batch[Tensor],
    *,
    step: bool,
) -> Tensor:
    """Attention to all tokens up to each query: `[B, T, H, V]`.

    Raises:
        ConfigError: a step with more than one token a row.
    """
    up_key_HNL, up_value_HVL = p.up[:, : c.key_nope], p.up[:, c.key_nope :]
    if step:
        one_token("mla", q_BTHN)
        q_BTHL = contract("bthn,hnl->bthl", q_BTHN, up_key_HNL)
        o_BTHL = _on_parts(dense_own, c, q_BTHL, q_BTHR, latent, rope, batch)
        return contract("bthl,hvl->bthv", o_BTHL, up_value_HVL)
    latent_BCL, rope_BCR = ops.cache_read(latent, rope, batch.block_table)
    k_BCHN = contract("bcl,hnl->bchn", latent_BCL, up_key_HNL)
    v_BCHV = contract("bcl,hvl->bchv", latent_BCL, up_value_HVL)
    keys = ("batch", None, "heads", None)
    given = (QUERIES, QUERIES, keys, ("batch", None, None), keys, ("batch",), ("batch",))
    run = shard_map(functools.partial(attend_own, scale=c.scale), given, QUERIES)
    return run(q_BTHN, q_BTHR, k_BCHN, rope_BCR, v_BCHV, batch.lengths, batch.counts)


def sparse(
    p: Mla[Tensor],
    c: MlaConfig,
    q_BTHN: Tensor,
    q_BTHR: Tensor,
    latent: Tensor,
    rope: Tensor,
    selected_BTJ: Tensor,
    batch: Batch[Tensor],
    *,
    step: bool,
) -> Tensor:
    """Attention to the selected tokens, absorbed: `[B, T, H, V]`."""
    q_BTHL = contract("bthn,hnl->bthl", q_BTHN, p.up[:, : c.key_nope])
    if step:
        o_BTHL = _on_parts(sparse_own, c, q_BTHL, q_BTHR, latent, rope, batch, selected_BTJ)
    else:
        rows, pool = (batch.block_table, batch.lengths, batch.counts), ("batch", None, None)
        given = (QUERIES, QUERIES, pool, pool, ("batch", "queries", None), TABLE, ("batch",), ("batch",))
        run = shard_map(functools.partial(attend_own_sparsely, scale=c.scale), given, QUERIES)
        o_BTHL = run(q_BTHL, q_BTHR, latent, rope, selected_BTJ, *rows)
    return contract("bthl,hvl->bthv", o_BTHL, p.up[:, c.key_nope :])


def attend_own(
    q_BTHN: Tensor,
    q_BTHR: Tensor,
    k_BCHN: Tensor,
    k_BCR: Tensor,
    v_BCHV: Tensor,
    lengths: Tensor,
    counts: Tensor,
    *,
    scale: float,
) -> Tensor:
    """`ops.attention` of this device's queries: `[B, T, H, V]`. The body of a `shard_map`."""
    lengths, counts = own_queries(q_BTHN, "queries", lengths, counts)
    return ops.attention(q_BTHN, q_BTHR, k_BCHN, k_BCR, v_BCHV, lengths, counts, scale)


def attend_own_sparsely(
    q_BTHL: Tensor,
    q_BTHR: Tensor,
    latent: Tensor,
    rope: Tensor,
    selected_BTJ: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    counts: Tensor,
    *,
    scale: float,
) -> Tensor:
    """`ops.sparse_attention` of this device's queries: `[B, T, H, L]`. The body of a `shard_map`."""
    rows = (block_table, *own_queries(q_BTHL, "queries", lengths, counts))
    return ops.sparse_attention(q_BTHL, q_BTHR, latent, rope, selected_BTJ, *rows, scale)


def _on_parts(
    body: Any,
    c: MlaConfig,
    q_BTHL: Tensor,
    q_BTHR: Tensor,
    latent: Tensor,
    rope: Tensor,
    batch: Batch[Tensor],
    *selected_BTJ: Tensor,
) -> Tensor:
    """A step's attention, each device reading its own pages of the cache: weighted latents `[B, T, H, L]`.

    Where a device's heads are fewer than it reads for, those of the queries are gathered and results scattered.
    """
    given = (QUERY, QUERY, POOL, POOL, TABLE, ("batch",), ("batch",), *[NEW] * len(selected_BTJ))
    run = shard_map(functools.partial(body, scale=c.scale), given, QUERY)
    q_BTHX = constrain(torch.cat([q_BTHL, q_BTHR], -1), *QUERY)
    q_BTHL, q_BTHR = q_BTHX[..., : c.latent], q_BTHX[..., c.latent :]
    o_BTHL = run(q_BTHL, q_BTHR, latent, rope, batch.block_table, batch.lengths, batch.counts, *selected_BTJ)
    return constrain(o_BTHL, "batch", "sequence", "heads", None)


def dense_own(
    q_BTHL: Tensor,
    q_BTHR: Tensor,
    latent: Tensor,
    rope: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    counts: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Attention to this device's tokens of each sequence: `[B, 1, H, L]`. The body of a `shard_map`."""
    if ways(latent, "cached") == 1:
        return ops.latent_attention(q_BTHL, q_BTHR, latent, rope, block_table, lengths, scale)
    table, held = own_pages(block_table, lengths, latent)
    o_BTHL, lse_BTH = ops.latent_attention_lse(q_BTHL, q_BTHR, latent, rope, table, held, scale)
    return merged(o_BTHL, lse_BTH, held[:, None, None] > 0)


def sparse_own(
    q_BTHL: Tensor,
    q_BTHR: Tensor,
    latent: Tensor,
    rope: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    counts: Tensor,
    selected_BTJ: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Attention to those of the selected tokens that this device has: `[B, 1, H, L]`. The body of a `shard_map`."""
    if ways(latent, "cached") == 1:
        rows = (block_table, lengths, counts)
        return ops.sparse_attention(q_BTHL, q_BTHR, latent, rope, selected_BTJ, *rows, scale)
    table, held = own_pages(block_table, lengths, latent)
    places_BTJ = own_places(selected_BTJ, latent)
    o_BTHL, lse_BTH = ops.sparse_attention_lse(q_BTHL, q_BTHR, latent, rope, places_BTJ, table, held, counts, scale)
    return merged(o_BTHL, lse_BTH, lse_BTH > NO_SCORE)
