"""Attention residuals over blocks of layers: each half of a layer reads a mix of what earlier blocks left.

Axes: B sequences, T tokens, D embed, N stored blocks, S sites (places that mix).
Source: fact sheet of models, section 2.3.
"""

from collections.abc import Sequence
from typing import Generic

import torch
from torch import Tensor

from kimi_graph import ops
from kimi_graph.ops import at_least_f32
from kimi_graph.ops.base import as_f32
from kimi_graph.spec import ParamSpec, weight
from kimi_graph.tree import Leaf, param_tree


@param_tree
class AttnResidual(Generic[Leaf]):
    """One site: the weight of the sources' norm, and the query."""

    norm: Leaf
    query: Leaf


@param_tree
class StoredMix(Generic[Leaf]):
    """What the stored blocks give to some sites, before the running sum is known.

    Attributes:
        peak: `[S, B, T]`, largest score.
        total: `[S, B, T]`, sum of `exp(score - peak)`.
        sum: `[S, B, T, D]`, the sources in these proportions.
    """

    peak: Leaf
    total: Leaf
    sum: Leaf


def attn_residual_specs(embed: int, name: str) -> AttnResidual[ParamSpec]:
    """Specs of the site `name` ("self_attention_res" of a layer, say)."""
    return AttnResidual(
        norm=weight((embed,), "embed", source=f"{name}_norm.weight"),
        query=weight((embed,), "embed", source=f"{name}_proj.weight", stored=(1, embed)),
    )


def attn_residual(p: AttnResidual[Tensor], sources: Sequence[Tensor], eps: float) -> Tensor:
    """The mix of the stored blocks and the running sum, `[B, T, D]` each: `[B, T, D]` (`ops.residual_mix`)."""
    return ops.residual_mix(list(sources), p.norm, p.query, eps)


def stored_mix(sites: Sequence[AttnResidual[Tensor]], stored: Sequence[Tensor], eps: float) -> StoredMix[Tensor]:
    """First phase: S sites of a block of layers read the stored blocks together, so that these are read once.

    Args:
        stored: N blocks, `[B, T, D]` each.
        eps: epsilon of the sources' norm.
    """
    aim_SD = torch.stack([at_least_f32(p.norm) * at_least_f32(p.query) for p in sites])
    values_NBTD = torch.stack([at_least_f32(x) for x in stored])
    scale_NBT = torch.rsqrt(values_NBTD.square().mean(-1) + as_f32(eps))
    score_SNBT = torch.einsum("nbtd,sd->snbt", values_NBTD, aim_SD) * scale_NBT
    peak_SBT = score_SNBT.amax(1)
    share_SNBT = (score_SNBT - peak_SBT[:, None]).exp()
    return StoredMix(
        peak=peak_SBT, total=share_SNBT.sum(1), sum=torch.einsum("snbt,nbtd->sbtd", share_SNBT, values_NBTD)
    )


def merge_running(
    p: AttnResidual[Tensor], first: StoredMix[Tensor], site: int, running_BTD: Tensor, eps: float
) -> Tensor:
    """Second phase, one site: the running sum joins by online softmax. Equal to `attn_residual` of all sources.

    Args:
        site: which of the sites of `first` this is.

    Returns:
        `[B, T, D]` in the dtype of the running sum.
    """
    value_BTD = at_least_f32(running_BTD)
    scale_BT = torch.rsqrt(value_BTD.square().mean(-1) + as_f32(eps))
    score_BT = torch.einsum("btd,d->bt", value_BTD, at_least_f32(p.norm) * at_least_f32(p.query)) * scale_BT
    peak_BT = torch.maximum(first.peak[site], score_BT)
    kept_BT, share_BT = (first.peak[site] - peak_BT).exp(), (score_BT - peak_BT).exp()
    mixed_BTD = first.sum[site] * kept_BT[..., None] + value_BTD * share_BT[..., None]
    return (mixed_BTD / (first.total[site] * kept_BT + share_BT)[..., None]).to(running_BTD.dtype)
