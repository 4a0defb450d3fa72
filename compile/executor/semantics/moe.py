"""Mixture of experts: choose, sort rows by expert, grouped products, bring back.

Letters: N rows, K experts per row, E experts, M = N * K copies, D and F widths.
"""

import torch
from torch import Tensor

from kimi_graph.compile.executor.node import Op
from kimi_graph.compile.executor.registry import ge_op
from kimi_graph.ops import at_least_f32
from kimi_graph.parallel import experts

MAX_EXPERTS = 2048
MAX_GROUPS = 1024


@ge_op(
    "MoeGatingTopK",
    provenance="public CPU reference",
    source="ops-transformer's golden function and document: bias takes part in the choice only, the sigmoid weights "
    "chosen are always divided by their sum + eps (renorm acts on softmax alone); equal values go to the lower expert",
    outputs="y expert_idx out",
    prototype="x bias? input_ids? tid2eid?",
)
def moe_gating_top_k(op: Op, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    k, norm_type, renorm = op.need("k", int), op.attr("norm_type", 0), op.attr("renorm", 0)
    groups, kept = op.attr("group_count", 1), op.attr("k_group", 1)
    op.expect(out_flag=False)
    op.require(norm_type in (0, 1), f"norm_type {norm_type}, supported is 0 (softmax) or 1 (sigmoid)")
    op.require(renorm == 0 or (renorm == 1 and norm_type == 0), f"renorm {renorm}, which norm_type {norm_type} ignores")
    experts = x.shape[-1]
    op.require(x.ndim == 2 and experts <= MAX_EXPERTS, f"x [N, E <= {MAX_EXPERTS}] expected, found {list(x.shape)}")
    op.require(
        experts % groups == 0 and 1 <= kept <= groups, f"{experts} experts, {groups} groups, {kept} of them kept"
    )
    op.require(1 <= k <= experts // groups * kept, f"k = {k} of {experts // groups * kept} experts in kept groups")
    x32 = at_least_f32(x)
    weight = x32.softmax(-1) if norm_type == 0 else torch.sigmoid(x32)
    ranked = weight if bias is None else weight + at_least_f32(bias)
    mode = op.attr("group_select_mode", 0)
    op.require(mode == 0 or (mode == 1 and groups > 1), f"group_select_mode {mode} of {groups} groups")
    ranked = _mask_groups(ranked, groups, kept, mode)
    chosen = op.select(torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :k].int())
    y = torch.gather(weight, 1, chosen.long())
    eps, scale = op.attr("eps", 1e-20), op.attr("routed_scaling_factor", 1.0)
    if norm_type == 1 or renorm == 1:
        y = y / (y.sum(-1, keepdim=True) + eps)
    return (y * scale).to(x.dtype), chosen, weight


def _mask_groups(ranked: Tensor, groups: int, kept: int, mode: int) -> Tensor:
    """Experts outside the best groups at -inf; a group is as good as its best expert (0) or its best two (1)."""
    if groups == 1:
        return ranked
    grouped = ranked.unflatten(1, (groups, -1))
    score = grouped.amax(-1) if mode == 0 else grouped.topk(2, -1).values.sum(-1)
    best = torch.sort(score, dim=-1, descending=True, stable=True).indices[:, :kept]
    hidden = torch.ones_like(score, dtype=torch.bool).scatter(1, best, False)
    return grouped.masked_fill(hidden[..., None], float("-inf")).flatten(1)


@ge_op(
    "MoeInitRoutingV3",
    provenance="public CPU reference",
    source="ops-transformer's golden function: copies sorted by expert, stable; row index of type 0 at n * K + k says "
    "where the copy went, of type 1 where row i came from; of experts outside the active range it is -1 (type 0), they "
    "are in no count, and rows after those of active experts are not written (NaN here)",
    outputs="expanded_x expanded_row_idx expert_tokens_count_or_cumsum expanded_scale",
    prototype="x expert_idx scale? offset?",
)
def moe_init_routing_v3(op: Op, x: Tensor, expert_idx: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, k = expert_idx.shape
    experts = op.need("expert_num", int)
    op.of_dtype(torch.int32, expert_idx=expert_idx)
    op.require(x.shape[0] == rows, f"x has {x.shape[0]} rows, expert_idx {rows}")
    # expert_capacity acts only where rows are dropped. The documents disagree on active_num; N * K suits them all.
    op.must(active_num=rows * k, expert_tokens_num_flag=True)
    op.expect(drop_pad_mode=0, expert_capacity=(-1, 0), quant_mode=-1)
    first, active = op.attr("active_expert_range", []) or (0, experts)
    op.require(
        first == 0 < active <= experts, f"active_expert_range {[first, active]}, supported is [0, up to {experts}]"
    )
    kind, count_type = op.attr("row_idx_type", 0), op.attr("expert_tokens_num_type", 0)
    op.require(kind in (0, 1), f"row_idx_type {kind}, supported is 0 or 1")
    op.require(count_type in (0, 1), f"expert_tokens_num_type {count_type}, supported is 0 (cumsum) or 1 (count)")
    flat = expert_idx.reshape(-1).long()
    if not flat.is_meta and flat.numel():
        op.require(int(flat.min()) >= 0 and int(flat.max()) < experts, f"an expert outside 0..{experts - 1}")
    here = flat < active
    op.require(kind == 0 or active == experts, "row_idx_type 1 of some experts, supported is of all")
    origin = torch.sort(flat, stable=True).indices
    went = torch.empty_like(origin).scatter_(0, origin, torch.arange(rows * k, device=x.device))
    counts = torch.zeros(experts, dtype=torch.int64, device=x.device).scatter_add_(0, flat, here.long())[:active]
    counts = counts.cumsum(0) if count_type == 0 else counts
    scale = torch.zeros(rows * k, dtype=torch.float64 if op.exact else torch.float32, device=x.device)
    copies, written = x[origin // k], torch.arange(rows * k, device=x.device) < here.sum()
    if active < experts and x.is_floating_point():
        copies = torch.where(written[:, None], copies, float("nan"))
    return copies, (torch.where(here, went, -1) if kind == 0 else origin).int(), counts, scale


@ge_op(
    "GroupedMatmul",
    provenance="public CPU reference",
    source="ops-transformer's golden function and document: rows of group g times weight[g] (transposed by the flag); "
    "group_list holds sums (0) or sizes (1); rows after the last group are not written (NaN here); quantised weights "
    "and rows are numbers times scales: scenarios A16W4, MX-A8W4 and G-B",
    outputs="y[]",
    prototype="x[] weight[] bias[] scale[] offset[] antiquant_scale[] antiquant_offset[] group_list? per_token_scale?",
)
def grouped_matmul(
    op: Op,
    x: list[Tensor],
    weight: list[Tensor],
    scale: list[Tensor],
    antiquant_scale: list[Tensor],
    group_list: Tensor | None,
    per_token_scale: Tensor | None,
) -> Tensor:
    op.must(group_type=0, split_item=2)
    op.expect(transpose_x=False, act_type=0, tuning_config=[0])
    transposed, list_type = op.attr("transpose_weight", False), op.attr("group_list_type", 0)
    op.require(
        len(x) == len(weight) == 1, f"one x and one stacked weight are supported, found {len(x)} and {len(weight)}"
    )
    op.require(list_type in (0, 1), f"group_list_type {list_type}, supported is 0 (sums) or 1 (sizes)")
    rows, stack = _dequantised(op, x[0], weight[0], scale, antiquant_scale, per_token_scale, transposed)
    made = _result(op, x[0], per_token_scale)
    op.require(rows.ndim == 2 and stack.ndim == 3, f"x [M, D] and weight [E, ., .] expected, found {list(stack.shape)}")
    op.require(rows.shape[1] == stack.shape[1], f"x has width {rows.shape[1]}, weight takes {stack.shape[1]}")
    op.require(stack.shape[0] <= MAX_GROUPS, f"{stack.shape[0]} groups, at most {MAX_GROUPS}")
    if group_list is None:
        op.fail("group_list is required where x is one tensor")
    op.of_dtype(torch.int64, group_list=group_list)
    op.require(
        group_list.shape == (stack.shape[0],), f"{list(group_list.shape)} group_list for {stack.shape[0]} groups"
    )
    out = rows.new_full((rows.shape[0], stack.shape[2]), float("nan"), dtype=made)
    if rows.is_meta:
        return out
    ends = group_list.tolist() if list_type == 0 else group_list.cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    op.require(all(a <= b for a, b in zip(starts, ends, strict=True)), "a negative group size")
    op.require(ends[-1] <= rows.shape[0], f"groups hold {ends[-1]} rows, x has {rows.shape[0]}")
    for start, end, matrix in zip(starts, ends, stack, strict=True):
        if end > start:
            out[start:end] = (at_least_f32(rows[start:end]) @ at_least_f32(matrix)).to(out.dtype)
    return out


def _result(op: Op, x: Tensor, per_token_scale: Tensor | None) -> torch.dtype:
    """Dtype of the product: that of x, or where x is quantised as attribute `dtype` says."""
    number = op.attr("dtype", 0)
    if per_token_scale is None:
        op.require(number == 0, f"dtype {number}, supported is 0 where x is not quantised")
        return x.dtype
    op.require(number in (0, 1), f"dtype {number}, supported is 0 (float16) or 1 (bfloat16)")
    return torch.float64 if op.exact else (torch.float16, torch.bfloat16)[number]


def _dequantised(
    op: Op,
    x: Tensor,
    weight: Tensor,
    scale: list[Tensor],
    antiquant_scale: list[Tensor],
    per_token_scale: Tensor | None,
    transposed: bool,
) -> tuple[Tensor, Tensor]:
    """Rows and stacked weights `[E, D, F]` that are multiplied; numbers times scales where there are scales.

    Three scenarios: INT4 weights (`antiquant_scale` `[E, G, F]`); E2M1 weights (`[E, F, D / 64, 2]`, rows too have a
    scale for 32 channels); E4M3 weights with a scale for blocks of 128 x 128, rows for 128 channels.
    """
    scale, antiquant_scale = ([t for t in given if t.numel()] for given in (scale, antiquant_scale))
    scales = [*scale, *antiquant_scale]
    if not scales:
        op.require(per_token_scale is None, "per_token_scale without a scale of the weights")
        op.same_dtype(x, weight)
        return x, weight.mT if transposed else weight
    op.require(len(scales) == 1 and transposed, "one scale and transpose_weight are supported where weights are packed")
    (found,), (groups, outs, width) = scales, weight.shape
    if per_token_scale is None:
        op.require(not scale, "scale without per_token_scale")
        op.of_dtype(torch.int8, weight=weight)
        op.same_dtype(x, found)
        op.require(found.shape[::2] == (groups, outs), f"antiquant_scale {list(found.shape)} of {list(weight.shape)}")
        return x, _times(op, weight, found.mT).mT
    if antiquant_scale:
        op.of_dtype(torch.float8_e8m0fnu, antiquant_scale=found, per_token_scale=per_token_scale)
        op.of_dtype(torch.bfloat16, weight=weight)
        expected = (groups, outs, width // 64, 2)
        op.require(found.shape == expected, f"antiquant_scale {list(expected)} expected, found {list(found.shape)}")
        return _times(op, x, per_token_scale.flatten(-2)), _times(op, weight, found.flatten(-2)).mT
    op.of_dtype(torch.float32, scale=found, per_token_scale=per_token_scale)
    op.of_dtype(torch.float8_e4m3fn, weight=weight, x=x)
    expected = (groups, -(-outs // 128), -(-width // 128))
    op.require(found.shape == expected, f"scale {list(expected)} expected, found {list(found.shape)}")
    by_row = found.repeat_interleave(128, 1)[:, :outs]
    return _times(op, x, per_token_scale, 128), _times(op, weight, by_row, 128).mT


def _times(op: Op, numbers: Tensor, scale: Tensor, size: int = 0) -> Tensor:
    """Numbers `[..., D]` times scales `[..., G]`, one for D / G (or `size`) numbers each, at least in float32."""
    width = numbers.shape[-1]
    size = size or width // max(1, scale.shape[-1])
    op.require(-(-width // size) == scale.shape[-1], f"{scale.shape[-1]} scales for {width} numbers, {size} to a scale")
    dtype = torch.float64 if op.exact else torch.float32
    return numbers.to(dtype) * scale.to(dtype).repeat_interleave(size, -1)[..., :width]


@ge_op(
    "MoeFinalizeRoutingV2",
    provenance="public CPU reference",
    source="ops-transformer's golden function and document: x1 + x2 + sum over k of scales * (row + bias of its "
    "expert), float32, rounded once; index of copy k of row n at n + k * N (drop_pad_mode 0) or n * K + k (2, 3); in "
    "mode 3 rows are [E, C, D] with E >= K, index E * C counts through them, and -1 is a copy that counts nothing",
    prototype="expanded_x expanded_row_idx x1? x2? bias? scales? expert_idx? x? alpha1? alpha2? v?",
)
def moe_finalize_routing_v2(
    op: Op,
    expanded_x: Tensor,
    expanded_row_idx: Tensor,
    x1: Tensor | None,
    x2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expert_idx: Tensor | None,
) -> Tensor:
    mode = op.attr("drop_pad_mode", 0)
    op.require(mode in (0, 2, 3), f"drop_pad_mode {mode}, supported is 0 (columns), 2 or 3 (rows)")
    op.expect(zero_expert_range=[], copy_expert_range=[], constant_expert_range=[])
    op.of_dtype(torch.int32, expanded_row_idx=expanded_row_idx)
    op.require(x2 is None or x1 is not None, "x2 without x1")
    if scales is None:
        op.fail("scales are required here")
    rows, k = scales.shape
    op.expect(k=1)  # acts where there are no scales
    dims = 3 if mode == 3 else 2
    op.require(expanded_x.ndim == dims, f"expanded_x of {dims} dimensions expected, found {list(expanded_x.shape)}")
    if mode == 3:
        op.require(
            expanded_x.shape[0] >= k, f"expanded_x [E, C, D] with E >= {k} expected, found {expanded_x.shape[0]}"
        )
        op.require(bias is None, "bias with drop_pad_mode 3, supported is none")
        expanded_x = expanded_x.flatten(0, 1)
    op.require(
        expanded_row_idx.shape == (rows * k,), f"{rows * k} row indices expected, found {list(expanded_row_idx.shape)}"
    )
    at = expanded_row_idx.long().view(k, rows).t() if mode == 0 else expanded_row_idx.long().view(rows, k)
    if not at.is_meta and at.numel():
        least = -1 if mode == 3 else 0
        op.require(int(at.min()) >= least, f"row index {int(at.min())}, drop_pad_mode {mode} has {least} and above")
    copies = at_least_f32(expanded_x)[at.clamp(min=0)]
    if mode == 3:
        copies = torch.where(at[..., None] < 0, 0, copies)
    if bias is not None:
        if expert_idx is None:
            op.fail("bias without expert_idx")
        copies = copies + at_least_f32(bias)[expert_idx.long()]
    y = (at_least_f32(scales)[..., None] * copies).sum(1)
    for skip in (x1, x2):
        y = y if skip is None else y + at_least_f32(skip)
    return y.to(expanded_x.dtype)


# ---- rows to experts of other ranks ----------------------------------------------------------------------------------

_PAIR = (
    "documents of both in ops-transformer: AllToAllV of rows to the ranks of their experts and back, then the "
    "sum of scales * rows, here in float32 and rounded once; rows after those that came are not written (NaN here). "
    "The order of rows of an expert, and what one hands to the other, are not documented"
)


def _of_the_pair(op: Op, chosen: Tensor, weights: Tensor | None = None) -> tuple[int, int]:
    """Ranks, and experts of each."""
    op.need("group_ep", str)
    ways, total = op.need("ep_world_size", int), op.need("moe_expert_num", int)
    op.need("ep_rank_id", int)
    op.expect(group_tp="", tp_world_size=(0, 1), tp_rank_id=0, expert_shard_type=0)
    op.expect(shared_expert_num=(1, 0), shared_expert_rank_num=0, global_bs=0, comm_alg="")
    op.expect(zero_expert_num=0, copy_expert_num=0, const_expert_num=0)
    op.require(total % ways == 0, f"{total} experts on {ways} ranks")
    op.of_dtype(torch.int32, expert_ids=chosen)
    op.require(chosen.ndim == 2, f"expert_ids [N, K] expected, found {list(chosen.shape)}")
    return ways, total // ways


def _dispatch_together(op: Op, parts: list[dict[str, Tensor]]) -> list[tuple[Tensor, ...]]:
    ways, own = _of_the_pair(op, parts[0]["expert_ids"])
    op.require(ways == len(parts), f"ep_world_size {ways} in a group of {len(parts)}")
    for part in parts:
        ids = part["expert_ids"]
        op.require(bool(((ids >= 0) & (ids < ways * own)).all()), f"an expert outside 0..{ways * own - 1}")
        op.require(all(len(set(row)) == len(row) for row in ids.tolist()), "an expert twice in a row")
    made = experts.dispatch_together([(p["x"], p["expert_ids"]) for p in parts], ways, own)
    f32 = torch.float64 if op.exact else torch.float32
    return [
        (rows, rows.new_zeros(len(rows), dtype=f32), notes, sizes, counts, counts[:0], rows.new_zeros(0, dtype=f32))
        for rows, sizes, notes, counts in made
    ]


@ge_op(
    "MoeDistributeDispatchV2",
    provenance="documented formula",
    source=_PAIR,
    outputs="expand_x dynamic_scales assist_info_for_combine expert_token_nums ep_recv_count tp_recv_count "
    "expand_scales",
    prototype="x expert_ids scales? x_active_mask? expert_scales? elastic_info? performance_info?",
    together=_dispatch_together,
    group="group_ep",
    own="ep_rank_id",
)
def moe_distribute_dispatch_v2(op: Op, x: Tensor, expert_ids: Tensor) -> tuple[Tensor, ...]:
    ways, own = _of_the_pair(op, expert_ids)
    op.expect(quant_mode=0, expert_token_nums_type=1, y_dtype=28)
    op.require(x.ndim == 2 and len(x) == len(expert_ids), f"x {list(x.shape)} for expert_ids {list(expert_ids.shape)}")
    rows, sizes, notes, counts = experts.dispatch_fake(x, "", expert_ids, ways, own)
    f32 = torch.float64 if op.exact else torch.float32
    return rows, x.new_empty(len(rows), dtype=f32), notes, sizes, counts, counts[:0], x.new_empty(0, dtype=f32)


def _combine_together(op: Op, parts: list[dict[str, Tensor]]) -> list[Tensor]:
    ways, own = _of_the_pair(op, parts[0]["expert_ids"])
    op.require(ways == len(parts), f"ep_world_size {ways} in a group of {len(parts)}")
    names = ("expand_x", "expert_ids", "expert_scales", "assist_info_for_combine", "ep_send_counts")
    return experts.combine_together([tuple(p[name] for name in names) for p in parts], ways, own)


@ge_op(
    "MoeDistributeCombineV2",
    provenance="documented formula",
    source=_PAIR,
    outputs="x",
    prototype="expand_x expert_ids assist_info_for_combine ep_send_counts expert_scales tp_send_counts? x_active_mask? "
    "activation_scale? weight_scale? group_list? expand_scales? shared_expert_x? elastic_info? ori_x? "
    "const_expert_alpha_1? const_expert_alpha_2? const_expert_v? performance_info?",
    together=_combine_together,
    group="group_ep",
    own="ep_rank_id",
)
def moe_distribute_combine_v2(
    op: Op,
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
) -> Tensor:
    ways, own = _of_the_pair(op, expert_ids)
    op.expect(out_dtype=0, comm_quant_mode=0, group_list_type=0)
    most = experts.capacity(len(expert_ids), expert_ids.shape[1], ways, own)
    op.require(expand_x.ndim == 2 and len(expand_x) == most, f"{most} rows expected, found {list(expand_x.shape)}")
    op.of_dtype(torch.int32, assist_info_for_combine=assist_info_for_combine, ep_send_counts=ep_send_counts)
    op.of_dtype(torch.float32, expert_scales=expert_scales)
    op.require(expert_scales.shape == expert_ids.shape, f"expert_scales {list(expert_scales.shape)}")
    op.require(
        assist_info_for_combine.shape == (most * experts.NOTES,) and ep_send_counts.shape == (ways * own,),
        f"what dispatch handed on is {list(assist_info_for_combine.shape)} and {list(ep_send_counts.shape)}",
    )
    return expand_x.new_empty(len(expert_ids), expand_x.shape[1])
