"""The decoder every model of the family is made of: the config's schedule says which layer is of which kind.

Axes: B sequences, T tokens, D embed, V vocab.
Source: fact sheet of models, sections 1.2 (tensor names) and 1.3 (block order).
"""

from collections.abc import Sequence
from typing import Any, Generic

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_graph import layers, ops, tree
from kimi_graph.config import DenseConfig, KdaConfig, LayerConfig, MlaConfig, ModelConfig, MoeConfig
from kimi_graph.layers import Batch, Ffn, Kda, KdaState, Mla, MlaState, Moe
from kimi_graph.spec import ParamSpec, weight
from kimi_graph.taps import scope, tap
from kimi_graph.tree import Leaf, param_tree


@param_tree
class Block(Generic[Leaf]):
    """One decoder layer: a mixer (`kda` or `mla`), then a feed-forward part (`dense` or `moe`); the others are None."""

    mixer_norm: Leaf
    kda: Kda[Leaf] | None
    mla: Mla[Leaf] | None
    ffn_norm: Leaf
    dense: Ffn[Leaf] | None
    moe: Moe[Leaf] | None


@param_tree
class Decoder(Generic[Leaf]):
    """A whole model; `head` is None where it is tied to `embed`."""

    embed: Leaf
    layers: tuple[Block[Leaf], ...]
    norm: Leaf
    head: Leaf | None


LayerState = KdaState[Tensor] | MlaState[Tensor]


def block_specs(c: ModelConfig, layer: LayerConfig, prefix: str) -> Block[ParamSpec]:
    mixer, ffn = layer.mixer, layer.ffn
    kda = layers.kda_specs(mixer, c.embed) if isinstance(mixer, KdaConfig) else None
    mla = layers.mla_specs(mixer, c.embed) if isinstance(mixer, MlaConfig) else None
    dense = layers.ffn_specs(ffn.ffn, c.embed) if isinstance(ffn, DenseConfig) else None
    moe = layers.moe_specs(ffn, c.embed) if isinstance(ffn, MoeConfig) else None

    def under(part: Any, name: str) -> Any:
        return tree.map(lambda s: s.under(f"{prefix}{name}"), part)

    return Block(
        mixer_norm=weight((c.embed,), "embed", source=f"{prefix}input_layernorm.weight"),
        kda=under(kda, "self_attn."),
        mla=under(mla, "self_attn."),
        ffn_norm=weight((c.embed,), "embed", source=f"{prefix}post_attention_layernorm.weight"),
        dense=under(dense, "mlp."),
        moe=under(moe, "block_sparse_moe."),
    )


def model_specs(c: ModelConfig) -> Decoder[ParamSpec]:
    """Every parameter of the model, with the released checkpoint's names."""
    return Decoder(
        embed=weight((c.vocab, c.embed), "vocab embed", source="model.embed_tokens.weight"),
        layers=tuple(block_specs(c, layer, f"model.layers.{i}.") for i, layer in enumerate(c.layers)),
        norm=weight((c.embed,), "embed", source="model.norm.weight"),
        head=None if c.tied else weight((c.vocab, c.embed), "vocab embed", source="lm_head.weight"),
    )


def state_specs(c: ModelConfig, *, slots: int, pages: int, page: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """The state of every layer, in order: `KdaState` or `MlaState` of specs.

    Args:
        slots: KDA slots, the null slot included. pages: cache pages, the null page included. page: tokens of a page.
        dtype: of windows and caches; the KDA memory is float32 (float64 when `dtype` is).
    """

    def state(layer: LayerConfig) -> Any:
        if isinstance(layer.mixer, KdaConfig):
            return layers.kda_state_specs(layer.mixer, slots, dtype)
        return layers.mla_state_specs(layer.mixer, pages, page, dtype)

    return tuple(state(layer) for layer in c.layers)


def embed(embed_VD: Tensor, tokens_BT: Tensor) -> Tensor:
    """`[B, T]` token ids -> `[B, T, D]`."""
    return F.embedding(tokens_BT, embed_VD)


def mix(
    p: Block[Tensor], c: ModelConfig, layer: LayerConfig, x_BTD: Tensor, state: LayerState, batch: Batch[Tensor], *, step: bool
) -> tuple[Tensor, LayerState]:
    """The mixer half of a layer, with its norm and residual."""
    h_BTD = ops.rms_norm(x_BTD, p.mixer_norm, c.norm_eps)
    if isinstance(layer.mixer, KdaConfig):
        assert p.kda is not None and isinstance(state, KdaState)
        with scope("kda"):
            y_BTD, state = layers.kda(p.kda, layer.mixer, h_BTD, state, batch, c.norm_eps, step=step)
    else:
        assert p.mla is not None and isinstance(state, MlaState)
        with scope("mla"):
            y_BTD, state = layers.mla(p.mla, layer.mixer, h_BTD, state, batch, step=step)
    return x_BTD + y_BTD, state


def feed(p: Block[Tensor], c: ModelConfig, layer: LayerConfig, x_BTD: Tensor) -> Tensor:
    """The feed-forward half of a layer, with its norm and residual."""
    h_BTD = ops.rms_norm(x_BTD, p.ffn_norm, c.norm_eps)
    if isinstance(layer.ffn, DenseConfig):
        assert p.dense is not None
        with scope("dense"):
            return x_BTD + layers.ffn(p.dense, h_BTD)
    assert p.moe is not None
    with scope("moe"):
        return x_BTD + layers.moe(p.moe, layer.ffn, h_BTD)


def last_token(x_BTD: Tensor, counts_B: Tensor) -> Tensor:
    """The last real token of each row: `[B, T, D]` -> `[B, 1, D]` (the first of a row without tokens)."""
    at_B = (counts_B - 1).clamp(min=0)
    return torch.gather(x_BTD, 1, at_B[:, None, None].expand(x_BTD.shape[0], 1, x_BTD.shape[2]))


def head(norm_D: Tensor, head_VD: Tensor, c: ModelConfig, x_BTD: Tensor) -> Tensor:
    """Final norm and output projection: `[B, T, D]` -> `[B, T, V]`."""
    return ops.contract("btd,vd->btv", ops.rms_norm(x_BTD, norm_D, c.norm_eps), head_VD)


def forward(
    p: Decoder[Tensor],
    c: ModelConfig,
    tokens_BT: Tensor,
    states: Sequence[LayerState],
    batch: Batch[Tensor],
    *,
    step: bool,
    last_only: bool,
) -> tuple[Tensor, tuple[LayerState, ...]]:
    """The whole model on a batch: logits `[B, T or 1, V]` and the next state of every layer."""
    x_BTD = embed(p.embed, tokens_BT)
    after = []
    for i, (block, layer, state) in enumerate(zip(p.layers, c.layers, states, strict=True)):
        with scope(f"layers.{i}"):
            x_BTD, state = mix(block, c, layer, x_BTD, state, batch, step=step)
            x_BTD = tap("out", feed(block, c, layer, x_BTD))
        after.append(state)
    if last_only:
        x_BTD = last_token(x_BTD, batch.counts)
    return head(p.norm, p.embed if p.head is None else p.head, c, x_BTD), tuple(after)


def count_parameters(c: ModelConfig) -> int:
    """Number of parameters, from the specs alone."""
    return sum(spec.numel for spec in tree.leaves(model_specs(c)))
