"""Rows to their experts and back, across ranks: what the pair of collectives means, and what it becomes in GE.

A rank has some rows and some experts. `dispatch` sends each row once to each of its experts, wherever that is;
`combine` sends what they made back and sums. Axes: N rows of a rank, K experts of a row, E experts of a rank, R ranks,
A rows that may come to a rank: R * N * min(E, K).

In GE both are one node each where CANN's fused pair (MoeDistributeDispatchV2, MoeDistributeCombineV2) takes the sizes.
Elsewhere every rank of the group reads all of its rows. HcomAllToAllV would move fewer, but has no static shape while
its counts come from the router, and equal parts that can never be too small are all rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

NOTES = 128  # numbers of a row in what the fused pair hands on: the rank it is from, which row, which of its K
MAX_TOP_K, MAX_EXPERTS, MAX_ROWS, WIDTHS = 16, 1024, 512, (1024, 8192)
MAX_RANKS = {"a3": 768, "950": 1024}

Rank = tuple[Tensor, ...]


def capacity(rows: int, top_k: int, ways: int, experts: int) -> int:
    """A: the rows that may come to a rank."""
    return rows * ways * min(experts, top_k)


# ---- meaning ---------------------------------------------------------------------------------------------------------


def dispatch_fake(x: Tensor, axes: str, chosen: Tensor, ways: int, experts: int) -> Rank:
    """Shapes and dtypes of the results of `dispatch`."""
    rows, top_k = chosen.shape
    most = capacity(rows, top_k, ways, experts)
    return (
        x.new_empty(most, x.shape[1]),
        x.new_empty(experts, dtype=torch.int64),
        x.new_empty(most * NOTES, dtype=torch.int32),
        x.new_empty(ways * experts, dtype=torch.int32),
    )


def combine_fake(y: Tensor, axes: str, chosen: Tensor, weights: Tensor, *_: Any) -> Tensor:
    """Shape and dtype of the result of `combine`."""
    return y.new_empty(chosen.shape[0], y.shape[1])


def dispatch_together(parts: Sequence[Rank], ways: int, experts: int) -> list[Rank]:
    """Of each rank: rows by expert, then by the rank they are from, then in order; not a number where none came."""
    return [_received(parts, rank, experts) for rank in range(ways)]


def _received(parts: Sequence[Rank], rank: int, experts: int) -> Rank:
    x, chosen = parts[rank]
    most = capacity(len(chosen), chosen.shape[1], len(parts), experts)
    rows, notes = x.new_full((most, x.shape[1]), float("nan")), torch.zeros(most, NOTES, dtype=torch.int32)
    sizes, counts, at = [], [], 0
    for expert in range(rank * experts, (rank + 1) * experts):
        start = at
        for source, (theirs, ids) in enumerate(parts):
            row, k = (ids == expert).nonzero(as_tuple=True)
            here = slice(at, at + len(row))
            rows[here] = theirs[row]
            notes[here, :3] = torch.stack([torch.full_like(row, source), row, k], 1).int()
            at += len(row)
            counts.append(at)  # a running sum
        sizes.append(at - start)
    return rows, torch.tensor(sizes), notes.flatten(), torch.tensor(counts, dtype=torch.int32)


def combine_together(parts: Sequence[Rank], ways: int, experts: int) -> list[Tensor]:
    """Of each rank: the sum of what its rows' experts made, by weight; in float32 at least, rounded once."""
    wide = [torch.float64 if y.dtype == torch.float64 else torch.float32 for y, *_ in parts]
    made = [y.new_zeros(*chosen.shape, y.shape[1], dtype=d) for (y, chosen, *_), d in zip(parts, wide, strict=True)]
    for y, _, _, notes, counts in parts:
        came = int(counts[-1])
        source, row, k = notes.view(-1, NOTES)[:came, :3].long().unbind(1)
        for rank, copies in enumerate(made):
            mine = source == rank
            copies[row[mine], k[mine]] = y[:came][mine].to(copies.dtype)
    return [
        torch.einsum("nk,nkd->nd", p[2].to(copies.dtype), copies).to(p[0].dtype)
        for p, copies in zip(parts, made, strict=True)
    ]


# ---- lowering --------------------------------------------------------------------------------------------------------


def no_pair(target: Any, rows: int, width: int, top_k: int, ways: int, experts: int) -> str:
    """Why CANN's fused pair cannot do it, in words; empty where it can.

    Source: the documents of both operators in ops-transformer (July 2026), and their tiling where the documents differ
    (ranks on A3: 2 to 768).
    """
    if target.soc not in MAX_RANKS or target.soc_version.startswith("Ascend950PR"):
        return f"its documents do not have it for {target.name} in this form"
    least, widest = WIDTHS
    limits = (
        (not least <= width <= widest, f"rows of {width:,} channels, it takes {least:,} to {widest:,}"),
        (top_k > MAX_TOP_K, f"{top_k} experts of a row, it takes {MAX_TOP_K}"),
        (ways * experts > MAX_EXPERTS, f"{ways * experts:,} experts with their copies, it takes {MAX_EXPERTS:,}"),
        (not 2 <= ways <= MAX_RANKS[target.soc], f"{ways:,} ranks, it takes 2 to {MAX_RANKS[target.soc]}"),
        (rows > MAX_ROWS, f"{rows:,} rows of a rank, it takes {MAX_ROWS}; --moe-chunks {-(-rows // MAX_ROWS)} or more"),
    )
    return next((words for fault, words in limits if fault), "")


def buffer_bytes(rows: int, width: int, top_k: int, ways: int, experts: int) -> int:
    """What HCCL_BUFFSIZE has to be for the fused pair (which counts in MiB, 200 unless set)."""

    def up(size: int, step: int) -> int:
        return -(-size // step) * step

    return 2 * (experts * rows * ways * up(up(2 * width, 32) + 64, 512) + top_k * rows * up(2 * width, 512))


def _attrs(axes: str, ways: int, experts: int) -> dict[str, Any]:
    # a group of its own: no other collective may go through the pair's. ep_rank_id is bound for each rank
    return {
        "group_ep": f"experts:{axes}", "ep_world_size": ways, "ep_rank_id": 0, "moe_expert_num": ways * experts,
        "shared_expert_num": 0,
    }  # fmt: skip


def lower_dispatch(ge: Any, x: Any, axes: str, chosen: Any, ways: int, experts: int) -> Any:
    """Graph nodes of `dispatch`: CANN's operator where it takes these sizes, else every rank reads all rows."""
    (rows, width), (_, top_k) = ge.shape(x), ge.shape(chosen)
    if why := no_pair(ge.target, rows, width, top_k, ways, experts):
        reason = f"every rank reads all rows of its group. MoeDistributeDispatchV2: {why}; HcomAllToAllV has no static"
        ge.chose("rows to experts of other ranks", "HcomAllGather", f"{reason} shape where counts come from a router")
        return _read_all(ge, x, axes, chosen, ways, experts)
    need = -(-buffer_bytes(rows, width, top_k, ways, experts) // 2**20)
    reason = f"sorts and sends in one; needs HCCL_BUFFSIZE of {need:,} or more"
    ge.chose("rows to experts of other ranks", "MoeDistributeDispatchV2", reason)
    outputs = "expand_x dynamic_scales assist_info_for_combine expert_token_nums ep_recv_count tp_recv_count"
    sent, _, assist, sizes, counts, *_ = ge.own(
        "MoeDistributeDispatchV2",
        dict.fromkeys(
            ("x", "expert_ids", "scales", "x_active_mask", "expert_scales", "elastic_info", "performance_info")
        )
        | {"x": x, "expert_ids": chosen},
        [*outputs.split(), "expand_scales"],
        _attrs(axes, ways, experts) | {"quant_mode": 0, "global_bs": 0, "expert_token_nums_type": 1},
    )
    return sent, sizes, assist, counts


def lower_combine(
    ge: Any, y: Any, axes: str, chosen: Any, weights: Any, assist: Any, counts: Any, ways: int, experts: int
) -> Any:
    """Graph nodes of `combine`: the way back from what `lower_dispatch` chose."""
    if assist.tensor in ge.placed:
        ge.chose("rows from experts of other ranks", "HcomReduceScatter", "as rows were sent: each rank sums its part")
        return _sum_all(ge, y, axes, weights, ge.placed[assist.tensor], ways)
    ge.chose("rows from experts of other ranks", "MoeDistributeCombineV2", "sends back, weighs and sums in one")
    names = (
        "expand_x expert_ids assist_info_for_combine ep_send_counts expert_scales tp_send_counts x_active_mask "
        "activation_scale weight_scale group_list expand_scales shared_expert_x elastic_info ori_x "
        "const_expert_alpha_1 const_expert_alpha_2 const_expert_v performance_info"
    )
    given = [y, chosen, assist, counts, weights]
    inputs = dict.fromkeys(names.split()) | dict(zip(names.split(), given, strict=False))
    return ge.own("MoeDistributeCombineV2", inputs, ["x"], _attrs(axes, ways, experts) | {"global_bs": 0})


def _gathered(ge: Any, x: Any, axes: str, ways: int) -> Any:
    rows, width = ge.shape(x)
    made = ge.HcomAllGather(x, rank_size=ways, group=axes, fusion=0)
    return ge.mark(made, (ways * rows, width), ge.dtype(x))


def _read_all(ge: Any, x: Any, axes: str, chosen: Any, ways: int, experts: int) -> Any:
    """All rows of the group, sorted so that those of this rank's experts come first."""
    (rows, top_k), total = ge.shape(chosen), ways * experts
    everyone, ids = _gathered(ge, x, axes, ways), _gathered(ge, chosen, axes, ways)
    own = ge.Sub(ids, ge.own_index(axes, experts, torch.int32))
    own = ge.FloorMod(own, ge.const([total], torch.int32))
    copies = rows * ways * top_k
    found, place, sizes, _ = ge.MoeInitRoutingV3(
        everyone, own, None, None, active_num=copies, expert_capacity=0, expert_num=total, drop_pad_mode=0,
        expert_tokens_num_type=1, expert_tokens_num_flag=True, quant_mode=-1, active_expert_range=[0, experts],
        row_idx_type=0,
    )  # fmt: skip
    ge.mark(found, (copies, ge.shape(x)[1]), ge.dtype(x))
    most = capacity(rows, top_k, ways, experts)
    if most < copies:
        begin, end, stride, axis = (ge.const([n], torch.int64) for n in (0, most, 1, 0))
        found = ge.StridedSliceV2(found, begin, end, axes=axis, strides=stride)
    assist, counts = ge.Identity(place), ge.Identity(place)  # read by nobody here, so that no graph has them
    ge.placed[assist.tensor] = place
    return found, sizes, assist, counts


def _sum_all(ge: Any, y: Any, axes: str, weights: Any, place: Any, ways: int) -> Any:
    """This rank's part of the sums of all rows, of which every rank has a summand."""
    (rows, _), (most, width) = ge.shape(weights), ge.shape(y)
    everyone = _gathered(ge, weights, axes, ways)
    sums = ge.MoeFinalizeRoutingV2(
        ge.reshape(y, [most, 1, width]), place, None, None, None, everyone, None, drop_pad_mode=3
    )
    sums = ge.mark(sums, (rows * ways, width), ge.dtype(y))
    return ge.HcomReduceScatter(sums, reduction="sum", group=axes, rank_size=ways, fusion=0)
