"""Lightning indexer of DeepSeek Sparse Attention: a small scorer that picks the tokens an attention layer looks at.

Axes: B sequences, T new tokens, D embed, Q query_latent, I index heads, K index key, J selected tokens.
Source: DeepSeek-V3.2 report (arXiv:2512.02556), section 2.1; fact sheet of models, sections 5.2 and 5.3.
"""

import functools
from typing import Generic

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_graph import ops
from kimi_graph.config import IndexerConfig
from kimi_graph.ops import as_f32, at_least_f32, contract
from kimi_graph.parallel import constrain, shard_map, ways
from kimi_graph.spec import ParamSpec, weight
from kimi_graph.tree import Leaf, param_tree

from .batch import Batch, turn
from .kernels import Kernels, on_gpu
from .stretches import POOL, best_of_all, cache_rows, check_length, own_pages, own_queries


@param_tree
class Indexer(Generic[Leaf]):
    """Weights: `query` `[I, K, Q]` and `weights` `[I, D]` of heads, one `key` `[K, D]` and its LayerNorm for all."""

    query: Leaf
    key: Leaf
    key_norm: Leaf
    key_bias: Leaf
    weights: Leaf


def indexer_specs(c: IndexerConfig, embed: int, query_latent: int) -> Indexer[ParamSpec]:
    """Specs by the checkpoint's names, without what stands before `wk.weight`.

    Heads have an axis of their own: all of them are summed before tokens are chosen, so none may be split off.
    """
    stored = (c.heads * c.key, query_latent)
    axes = "index_heads _ query_latent"
    return Indexer(
        query=weight((c.heads, c.key, query_latent), axes, source="wq_b.weight", stored=stored),
        key=weight((c.key, embed), "_ embed", source="wk.weight"),
        key_norm=weight((c.key,), "_", source="k_norm.weight"),
        key_bias=weight((c.key,), "_", source="k_norm.bias"),
        weights=weight((c.heads, embed), "index_heads embed", source="weights_proj.weight"),
    )


def index_key(p: Indexer[Tensor], c: IndexerConfig, x_BTD: Tensor, batch: Batch[Tensor]) -> Tensor:
    """Keys of the new tokens, as they are cached: normalised, then turned. `[B, T, D]` -> `[B, T, K]`."""
    key_BTK = ops.layer_norm(contract("btd,kd->btk", x_BTD, p.key), p.key_norm, p.key_bias, c.eps)
    return rotate_front(c, key_BTK, batch)


def select(
    p: Indexer[Tensor],
    c: IndexerConfig,
    x_BTD: Tensor,
    query_BTQ: Tensor,
    index: Tensor,
    batch: Batch[Tensor],
    *,
    step: bool,
    kernels: Kernels = "torch",
) -> Tensor:
    """Positions each new token attends to: `[B, T, J]` int32, see `ops.select_keys`.

    All heads are summed before anything is chosen, so on a mesh not they but the queries are shared out, and every
    device gets the positions that the others found. In a step, which has one query a row, each device scores its own
    tokens of the sequence, and all keep the best of what they found.

    Args:
        query_BTQ: the attention query's normalised low-rank form.
        index: `[P, page, K]`, cached keys of all tokens.

    Raises:
        ConfigError: kernels that cannot run here.
        ShardingError: in a step on a mesh, sequences whose pages do not divide, or that are too long to be exact.
    """
    own = ("batch", "index_queries", None)
    query_BTQ, x_BTD = constrain(query_BTQ, *own), constrain(x_BTD, *own)
    q_BTIK = rotate_front(c, contract("btq,ikq->btik", query_BTQ, p.query), batch)
    weights_BTI = at_least_f32(contract("btd,id->bti", x_BTD, p.weights)) * as_f32(c.heads**-0.5)
    if on_gpu("mla", kernels, x_BTD):
        from kimi_graph.ops import gpu

        rows = (batch.block_table, batch.lengths, batch.counts)
        return gpu.select_keys(q_BTIK, weights_BTI, index, *rows, c.top_k)
    body, pool = (select_of_own, POOL) if step else (select_own, ("batch", None, None))
    given = ((*own, None), own, pool, ("batch", None), ("batch",), ("batch",))
    run = shard_map(functools.partial(body, top_k=c.top_k), given, own)
    selected_BTJ = run(q_BTIK, weights_BTI, index, batch.block_table, batch.lengths, batch.counts)
    return constrain(selected_BTJ, "batch", "sequence", None)  # layers that share it, and other stages, read all


def select_own(
    q_BTIK: Tensor,
    weights_BTI: Tensor,
    index: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    counts: Tensor,
    *,
    top_k: int,
) -> Tensor:
    """`ops.select_keys` for the queries of this device, a stretch of each row's: `[B, T, J]` int32.

    The body of a `shard_map`.
    """
    rows = (block_table, *own_queries(q_BTIK, "index_queries", lengths, counts))
    return ops.select_keys(q_BTIK, weights_BTI, index, *rows, top_k)


def select_of_own(
    q_BTIK: Tensor,
    weights_BTI: Tensor,
    index: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    counts: Tensor,
    *,
    top_k: int,
) -> Tensor:
    """`ops.select_keys` of a step's queries among the tokens of all devices: `[B, 1, J]` int32.

    The body of a `shard_map`. CANN's operator returns no scores of a paged cache; those of the few keys it chose are
    computed once more.
    """
    if ways(index, "cached") == 1:
        return ops.select_keys(q_BTIK, weights_BTI, index, block_table, lengths, counts, top_k)
    check_length(block_table, index)
    table, held = own_pages(block_table, lengths, index)
    found_BTJ = ops.select_keys(q_BTIK, weights_BTI, index, table, held, counts, top_k)
    key_BJK = F.embedding(cache_rows(table, found_BTJ[:, 0], index.shape[1]), index.flatten(0, 1))
    score_BTIJ = torch.relu(contract("btik,bjk->btij", at_least_f32(q_BTIK), at_least_f32(key_BJK)))
    score_BTJ = contract("bti,btij->btj", at_least_f32(weights_BTI), score_BTIJ)
    return best_of_all(score_BTJ, found_BTJ, index.shape[1])


def rotate_front(c: IndexerConfig, x: Tensor, batch: Batch[Tensor]) -> Tensor:
    """The first channels of `[B, T, ..., K]` turned by position (attention itself keeps its rope channels last)."""
    if not c.rope:
        return x
    return torch.cat([turn(x[..., : c.rope], batch, c.interleaved), x[..., c.rope :]], -1)
