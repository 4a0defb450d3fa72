"""Mixture of experts: route, sort rows by expert, grouped matrix products, bring back and sum.

Letters: N rows, K experts of a row, E experts, D width, F features, M = N * K rows sorted by expert.
Source: DeepSeek-V3 (arXiv:2412.19437), section 2.1.2; SwiGLU (arXiv:2002.05202); fact sheet of models, section 2.6.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import at_least_f32, by_rows, mapped, operator, recorded
from .contract import FEW, few_rows, shares
from .offers import Offer

NARROW_ROWS = 64  # torch builds code of most of a megabyte for every number of rows that a bfloat16 product has


@operator(sharding="n e, e -> n k, n k", whole="ek")
def moe_route(
    scores: Tensor, bias: Tensor, top_k: int, scale: float, groups: int = 1, kept_groups: int = 1
) -> tuple[Tensor, Tensor]:
    """Choose `top_k` experts of each row by `sigmoid(scores) + bias`, weigh them by the normalised sigmoid alone.

    Args:
        scores: `[N, E]` float32.
        bias: `[E]`, takes part in the selection only.
        scale: multiplies the weights after they were normalised to sum 1.
        groups, kept_groups: experts lie in equal groups, and only those of the `kept_groups` best are chosen from; a
            group is as good as the sum of its two best. Equal groups go to the lower one.

    Returns:
        weights `[N, K]` float32 and experts `[N, K]` int32, best first; equal scores go to the lower expert.
    """
    probability = torch.sigmoid(at_least_f32(scores))
    biased = probability + bias
    if kept_groups < groups:
        biased = _in_best_groups(biased.unflatten(1, (groups, -1)), kept_groups).flatten(1)
    chosen = torch.sort(biased, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = torch.gather(probability, 1, chosen)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale, chosen.int()


def _in_best_groups(biased: Tensor, kept: int) -> Tensor:
    """`[N, groups, experts of a group]` with minus infinity in all but the `kept` best groups."""
    best_two = biased.topk(min(2, biased.shape[2]), dim=-1).values.sum(-1)
    order = torch.sort(best_two, dim=-1, descending=True, stable=True).indices
    left_out = torch.zeros_like(best_two, dtype=torch.bool).scatter_(1, order[:, kept:], True)
    return biased.masked_fill(left_out[:, :, None], float("-inf"))


@moe_route.fake
def _(scores, bias, top_k, scale, groups=1, kept_groups=1):  # calls leave out what is the default
    rows = scores.shape[0]
    return scores.new_empty(rows, top_k), scores.new_empty(rows, top_k, dtype=torch.int32)


@moe_route.lowering
def _(ge, scores, bias, top_k, scale, groups=1, kept_groups=1):
    # norm_type 1 is the sigmoid router; it always normalises, whatever `renorm` says. group_select_mode 1: the sum of a
    # group's two best
    if kept_groups == groups:
        groups = kept_groups = 1
    reason = "sigmoid, choice by the biased score and normalisation" + (", best groups first" if groups > 1 else "")
    ge.chose("routing", "MoeGatingTopK", reason)
    weights, chosen, _ = ge.MoeGatingTopK(
        scores, bias, k=top_k, k_group=kept_groups, group_count=groups, group_select_mode=int(groups > 1),
        renorm=0, norm_type=1, out_flag=False, routed_scaling_factor=scale, eps=1e-20,
    )  # fmt: skip
    return weights, chosen


@operator(sharding="n d, n k -> m d, m, e", whole="nkme")
def moe_dispatch(x: Tensor, chosen: Tensor, experts: int, others: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each row once per chosen expert, sorted by expert (rows of one expert stay in order).

    Args:
        x: `[N, D]`.
        chosen: `[N, K]` int32, ids of E + others experts.
        experts: E, those that are here.
        others: those that are on other devices: copies for them go last, into no group.

    Returns:
        rows `[N * K, D]`; `[N * K]` int32, where copy k of row n went, at n * K + k, -1 for those of other devices;
        group sizes `[E]` int64.
    """
    if chosen.numel() <= 4 * FEW and not mapped(chosen):
        return _dispatch_few(x, chosen, experts)
    flat = chosen.flatten().long()
    order = torch.sort(flat, dim=0, stable=True).indices
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(flat), device=x.device))
    return (
        x.index_select(0, order // chosen.shape[1]),
        torch.where(flat < experts, place, -1).int() if others else place.int(),
        (flat == torch.arange(experts, device=x.device)[:, None]).sum(1)
        if mapped(chosen)
        else torch.bincount(flat, minlength=experts)[:experts],
    )


def _dispatch_few(x: Tensor, chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same, sorted by Python: quicker for a decode step's handful of rows."""
    flat = chosen.flatten().tolist()
    order = sorted(range(len(flat)), key=flat.__getitem__)
    place, sizes = [-1] * len(flat), [0] * experts
    for to, copy in enumerate(order):
        if flat[copy] < experts:
            place[copy] = to
            sizes[flat[copy]] += 1
    return (
        x.index_select(
            0, torch.tensor([copy // chosen.shape[1] for copy in order], dtype=torch.int64, device=x.device)
        ),
        torch.tensor(place, dtype=torch.int32, device=x.device),
        torch.tensor(sizes, dtype=torch.int64, device=x.device),
    )


@moe_dispatch.fake
def _(x, chosen, experts, others=0):
    copies = chosen.numel()
    return (
        x.new_empty(copies, x.shape[1]),
        chosen.new_empty(copies, dtype=torch.int32),
        chosen.new_empty(experts, dtype=torch.int64),
    )


@moe_dispatch.lowering
def _(ge, x, chosen, experts, others=0):
    rows, top_k = ge.shape(chosen)
    reason = "sorts rows by expert and counts them; MoeTokenPermute has no kernel for 950"
    ge.chose("rows to experts", "MoeInitRoutingV3", reason)
    sorted_rows, place, counts, _ = ge.MoeInitRoutingV3(
        x, chosen, None, None, active_num=rows * top_k, expert_capacity=0, expert_num=experts + others, drop_pad_mode=0,
        expert_tokens_num_type=1, expert_tokens_num_flag=True, quant_mode=-1, active_expert_range=[0, experts],
        row_idx_type=0,
    )  # fmt: skip
    return sorted_rows, place, counts


@operator(sharding="m d, e f d, e -> m f", whole="me")
def grouped_matmul(x: Tensor, weight: Tensor, group_sizes: Tensor) -> Tensor:
    """Rows of group e times `weight[e]` transposed.

    Args:
        x: `[M, D]`, sorted by group.
        weight: `[E, F, D]`.
        group_sizes: `[E]` int64.

    Returns:
        `[M, F]`, zeros in the rows after the last group.
    """
    if mapped(group_sizes):  # groups of many sizes at once: every row takes its own copy of its matrix
        group_M = (torch.arange(len(x), device=x.device)[:, None] >= group_sizes.cumsum(0)).sum(1)
        y = torch.einsum("md,mfd->mf", x, weight[group_M.clamp(max=len(weight) - 1)])
        return y.masked_fill((group_M == len(weight))[:, None], 0)
    if recorded(x, weight):
        sizes = group_sizes.tolist()
        parts = [
            few_rows(part, w).view(len(part), -1)
            for part, w in zip(x[: sum(sizes)].split(sizes), weight, strict=True)
            if len(part)
        ]
        return torch.cat([*parts, x.new_zeros(len(x) - sum(sizes), weight.shape[1])])
    rows, (groups, features, width) = x.shape[0], weight.shape
    y, start, ways = x.new_empty(rows, features), 0, shares(weight[0], width)
    round_up = NARROW_ROWS if x.dtype.itemsize < 4 and rows > NARROW_ROWS else 1
    share = features // ways
    few = (
        x.expand(ways, rows, width),
        weight.view(groups, ways, -1, width).mT,
        y.view(rows, ways, share).transpose(0, 1),
    )
    for group, size in enumerate(group_sizes.tolist()):
        if not size:
            continue
        stop = start + size
        if size <= FEW and ways > 1:
            torch.bmm(few[0][:, start:stop], few[1][group], out=few[2][:, start:stop])
        else:
            # rows beyond the group's are the next groups', which write them after this
            some = slice(start, min(rows, stop + -size % round_up))
            torch.mm(x[some], weight[group].t(), out=y[some])
        start = stop
    if start < rows:
        y[start:] = 0
    return y


@grouped_matmul.fake
def _(x, weight, group_sizes):
    return x.new_empty(x.shape[0], weight.shape[1])


@grouped_matmul.lowering
def _(ge, x, weight, group_sizes):
    # one row tensor, one stacked weight, cut along rows (group_type 0) by counts (group_list_type 1)
    form, packed = ge.weights.form, ge.packed(weight)
    kept, quantised = _KEPT_AS[form if packed else "plain"]
    ge.chose("products of experts", "GroupedMatmul", f"one stacked weight; a list of weights ends at 128 experts{kept}")
    x, x_scale = (x, None) if quantised is None else quantised(ge, x)
    scale, antiquant_scale = ([packed[k]] if k in packed else [] for k in ("scale", "antiquant_scale"))
    (y,) = ge.GroupedMatmul(
        [x], [packed.get("weight", weight)], [], scale, [], antiquant_scale, [], group_sizes, x_scale, split_item=2,
        dtype=0 if x_scale is None else _RESULT[ge.result.dtype], transpose_weight=True, transpose_x=False,
        group_type=0, group_list_type=1, act_type=0,
    )  # fmt: skip
    return y


_RESULT = {torch.float16: 0, torch.bfloat16: 1}  # of GroupedMatmul's `dtype`, which acts where x is quantised
_E4M3 = 36  # in GE's dtype enum


def _mx_rows(ge, x):
    """Rows in E4M3 with a power of two for every 32 channels."""
    return ge.serve("rows in MXFP8", MX_ROWS, x)


def _dynamic_mx(ge, x):
    attrs = {"axis": -1, "round_mode": "rint", "dst_type": _E4M3, "blocksize": 32, "scale_alg": 0}
    return ge.own("DynamicMxQuant", {"x": x}, ["y", "mxscale"], attrs)


def _situ_mx(ge, x):
    """Of what SiTU was made of: its own result is not made."""
    halves, beta, linear_beta = ge.made_of(x, "kimi.situ")
    attrs = {"beta": beta, "linear_beta": linear_beta, "activate_left": True, "axis": -1, "dst_type": _E4M3}
    return ge.own("SituMxQuant", {"x": halves}, ["y", "y_scale"], attrs | {"round_mode": "rint"})


def _not_of_situ(ge, x) -> str:
    return "" if ge.made_of(x, "kimi.situ") else "quantises what it makes itself by SiTU, and these rows are not that"


MX_ROWS = (
    Offer("builtin", "SituMxQuant", _situ_mx, "SiTU and its rows' quantisation in one operator", _not_of_situ),
    Offer("builtin", "DynamicMxQuant", _dynamic_mx, "a power of two for every 32 channels"),
)


def _block_rows(ge, x):
    """Rows in E4M3 with a float32 scale for every 128 channels."""
    attrs = {"min_scale": 0.0, "round_mode": "rint", "dst_type": _E4M3, "row_block_size": 1, "col_block_size": 128}
    return ge.own("DynamicBlockQuant", {"x": x}, ["y", "scale"], attrs)


# How experts in a form are multiplied: in words, and what is done to the rows before.
_KEPT_AS = {
    "plain": ("", None),
    "int4-g32": ("; weights stay INT4, rows are not quantised", None),
    "mxfp4": ("; weights stay E2M1, rows are quantised to MXFP8", _mx_rows),
    "fp8": ("; weights stay E4M3, rows are quantised to E4M3 by 128 channels", _block_rows),
}


@operator(sharding="m d, m, n k -> n d", whole="mnk")
def moe_combine(y: Tensor, place: Tensor, weights: Tensor, some: bool = False) -> Tensor:
    """Weighted sum of each row's copies; float32 weights and sum, cast to y's dtype.

    Args:
        y: `[N * K, D]`.
        place: `[N * K]` int32, as `moe_dispatch` gives it.
        weights: `[N, K]` float32.
        some: only some of the copies are here; `place` of the others is -1, and they count nothing.

    Returns:
        `[N, D]`.
    """

    if some:
        weights, place = torch.where(place.view(weights.shape) < 0, 0, weights), place.clamp(min=0)

    def combine(place: Tensor, weights: Tensor) -> Tensor:
        copies = at_least_f32(y.index_select(0, place.flatten())).view(*place.shape, y.shape[1])
        return torch.bmm(at_least_f32(weights)[:, None], copies)[:, 0].to(y.dtype)

    return by_rows(combine, place.view(weights.shape), weights, width=weights.shape[1] * y.shape[1])


@moe_combine.fake
def _(y, place, weights, some=False):
    return y.new_empty(weights.shape[0], y.shape[1])


@moe_combine.lowering
def _(ge, y, place, weights, some=False):
    # drop_pad_mode 2 and 3: copy k of row n is at n * K + k. Only 3 knows the place -1; it wants rows as [E, C, D] with
    # E >= K, and looks them up as if that were [E * C, D]
    ge.chose("rows from experts", "MoeFinalizeRoutingV2", "weighs and sums in float32, takes float32 weights")
    if some:
        rows, top_k = ge.shape(weights)
        y = ge.reshape(y, [top_k, rows, ge.shape(y)[1]])
    return ge.MoeFinalizeRoutingV2(y, place, None, None, None, weights, None, drop_pad_mode=3 if some else 2)


@operator(sharding="m f -> m g", whole="fg")
def swiglu(x: Tensor) -> Tensor:
    """`silu(first half) * second half` of the last dimension: `[M, 2 F]` -> `[M, F]`."""

    def glu(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    return by_rows(glu, x)


@swiglu.fake
def _(x):
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@swiglu.lowering
def _(ge, x):
    ge.chose("SwiGLU of two halves", "SwiGlu", "on every chip")
    return ge.SwiGlu(x, dim=-1)
