"""Mixture of experts: route, sort rows by expert, grouped matrix products, bring back and sum."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import at_least_f32, operator


@operator(sharding="n e, e -> n k, n k", whole="ek")
def moe_route(scores: Tensor, bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Choose `top_k` experts of each row by `sigmoid(scores) + bias`, weigh them by the normalised sigmoid alone.

    Args:
        scores: `[N, E]` float32. bias: `[E]`, takes part in the selection only.
        scale: multiplies the weights after they were normalised to sum 1.

    Returns:
        weights `[N, K]` float32 and experts `[N, K]` int32, best first; equal scores go to the lower expert.
    """
    probability = torch.sigmoid(at_least_f32(scores))
    chosen = torch.sort(probability + bias, -1, descending=True, stable=True).indices[:, :top_k]
    weights = torch.gather(probability, 1, chosen)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale, chosen.int()


@moe_route.fake
def _(scores, bias, top_k, scale):
    rows = scores.shape[0]
    return scores.new_empty(rows, top_k), scores.new_empty(rows, top_k, dtype=torch.int32)


@operator(sharding="n d, n k -> m d, m, e", whole="nkme")
def moe_dispatch(x: Tensor, chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each row once per chosen expert, sorted by expert (rows of one expert stay in order).

    Args:
        x: `[N, D]`. chosen: `[N, K]` int32. experts: E.

    Returns:
        rows `[N * K, D]`; `[N * K]` int32, where copy k of row n went, at n + k * N; group sizes `[E]` int64.
    """
    rows, top_k = chosen.shape
    flat = chosen.flatten().long()
    order = torch.sort(flat, stable=True).indices
    place = torch.empty_like(order).scatter_(0, order, torch.arange(rows * top_k, device=x.device))
    return (
        x[order // top_k],
        place.view(rows, top_k).t().reshape(-1).int(),
        torch.bincount(flat, minlength=experts),
    )


@moe_dispatch.fake
def _(x, chosen, experts):
    copies = chosen.numel()
    return (
        x.new_empty(copies, x.shape[1]),
        chosen.new_empty(copies, dtype=torch.int32),
        chosen.new_empty(experts, dtype=torch.int64),
    )


@operator(sharding="m d, e f d, e -> m f", whole="me")
def grouped_matmul(x: Tensor, weight: Tensor, group_sizes: Tensor) -> Tensor:
    """Rows of group e times `weight[e]` transposed.

    Args:
        x: `[M, D]`, sorted by group. weight: `[E, F, D]`. group_sizes: `[E]` int64, sums to M.

    Returns:
        `[M, F]`.
    """
    parts = x.split(group_sizes.tolist())
    return torch.cat([part @ w.t() for part, w in zip(parts, weight, strict=True) if len(part)] or [x.new_empty(0, weight.shape[1])])


@grouped_matmul.fake
def _(x, weight, group_sizes):
    return x.new_empty(x.shape[0], weight.shape[1])


@operator(sharding="m d, m, n k -> n d", whole="mnk")
def moe_combine(y: Tensor, place: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of each row's copies; float32 weights and sum, cast to y's dtype.

    Args:
        y: `[N * K, D]`. place: `[N * K]` int32, as `moe_dispatch` gives it. weights: `[N, K]` float32.

    Returns:
        `[N, D]`.
    """
    rows, top_k = weights.shape
    copies = at_least_f32(y)[place.long()].view(top_k, rows, -1)
    return torch.einsum("knd,nk->nd", copies, at_least_f32(weights)).to(y.dtype)


@moe_combine.fake
def _(y, place, weights):
    return y.new_empty(weights.shape[0], y.shape[1])


@operator(sharding="m f -> m g", whole="fg")
def swiglu(x: Tensor) -> Tensor:
    """`silu(first half) * second half` of the last dimension: `[M, 2 F]` -> `[M, F]`."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@swiglu.fake
def _(x):
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
