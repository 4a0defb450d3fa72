"""Mixture of experts: a float32 sigmoid router, routed experts in groups, shared experts beside them.

Routed experts may work in a space of their own, narrower than the model's (latent experts), between a projection down
and one back up, and their sum may be normalised there; shared experts always have the model's width.

Axes: B sequences, T tokens, N = B * T rows, D embed, E experts, K experts per token, F ffn, L width of latent experts,
X what routed experts read: L or D, S slots: experts and their copies.
Source: DeepSeek-V3 (arXiv:2412.19437), section 2.1.2; the correction bias takes part in the selection only. Fact sheet
of models, section 2.6.
"""

import functools
from collections.abc import Callable
from typing import Generic

import torch
from torch import Tensor

from kimi_graph import ops
from kimi_graph.config import KIMI_NAMES, MoeConfig, Names, SituConfig
from kimi_graph.ops import at_least_f32, contract
from kimi_graph.parallel import (
    constrain,
    expert_combine,
    expert_dispatch,
    local_ids,
    own_index,
    shard_map,
    splits,
    summand,
    ways,
)
from kimi_graph.spec import ParamSpec, weight
from kimi_graph.taps import tap
from kimi_graph.tree import Leaf, param_tree

from .batch import check_input
from .ffn import Ffn, ffn, ffn_specs


@param_tree
class Moe(Generic[Leaf]):
    """`down_latent`, `up_latent` and `latent_norm` are None where routed experts have the model's width."""

    router: Leaf
    bias: Leaf
    down_latent: Leaf | None
    gate_up: Leaf
    down: Leaf
    latent_norm: Leaf | None
    up_latent: Leaf | None
    shared: Ffn[Leaf]


def moe_specs(c: MoeConfig, embed: int, names: Names = KIMI_NAMES) -> Moe[ParamSpec]:
    """Specs by the checkpoint's spelling, without what stands before `gate.weight`.

    The latent projections' `expert_embed` may be split, not the norm between them; experts have it whole. Slots hold
    the experts in order and then again, as many as there are (`parallel.balance.plain_table`).
    """
    gate_name, up_name, down_name = names.experts
    slots = [slot % c.experts for slot in range(c.slots)]
    gate_up = tuple(f"experts.{e}.{w}.weight" for e in slots for w in (gate_name, up_name))
    down = tuple(f"experts.{e}.{down_name}.weight" for e in slots)
    f32 = torch.float32
    shared = ffn_specs(c.shared_ffn, embed)
    width, inner = (embed, "embed") if c.latent is None else (c.latent, "_")
    down_latent = up_latent = None
    if c.latent is not None:
        down_latent = weight((width, embed), "expert_embed embed", source="routed_expert_down_proj.weight")
        up_latent = weight((embed, width), "embed expert_embed", source="routed_expert_up_proj.weight")
    return Moe(
        router=weight((c.experts, embed), "_ embed", source="gate.weight"),
        bias=weight((c.experts,), "_", source="gate.e_score_correction_bias", dtype=f32),
        down_latent=down_latent,
        gate_up=weight((c.slots, 2, c.ffn, width), f"experts _ expert_ffn {inner}", source=gate_up),
        down=weight((c.slots, width, c.ffn), f"experts {inner} expert_ffn", source=down),
        latent_norm=weight((width,), "_", source="routed_expert_norm.weight") if c.latent_norm else None,
        up_latent=up_latent,
        shared=Ffn(
            gate=shared.gate.under("shared_experts."),
            up=shared.up.under("shared_experts."),
            down=shared.down.under("shared_experts."),
        ),
    )


def experts(
    x_NX: Tensor,
    chosen_NK: Tensor,
    weight_NK: Tensor,
    gate_up_EGFX: Tensor,
    down_EXF: Tensor,
    table: Tensor | None = None,
    *,
    situ: SituConfig | None = None,
    chunks: int = 1,
) -> Tensor:
    """Every row through its K experts, and their weighted sum: `[N, X]`. The body of a `shard_map`.

    `chosen_NK` are ids among all experts. Where rows are split over the devices that share out experts, each row goes
    to its experts and what they made comes back. Else a device has every row that its experts may get, and gives their
    part of the sum.

    Args:
        table: int32; the slots of each expert, see `copies`. Without one, slots are experts.
        chunks: rows go to experts of other devices in so many parts, see `exchanged`.
    """
    if table is not None:
        chosen_NK = copies(chosen_NK, table)
    run = functools.partial(own_experts, gate_up_EGFX=gate_up_EGFX, down_EXF=down_EXF, situ=situ)
    count = gate_up_EGFX.shape[0]
    if splits(x_NX, "token", "experts"):
        return exchanged(x_NX, chosen_NK, weight_NK, count, run, chunks)
    others = count * (ways(gate_up_EGFX, "experts") - 1)
    x_MX, row, group_sizes = ops.moe_dispatch(x_NX, local_ids(chosen_NK, "experts", count), count, others)
    y_MX = run(x_MX, group_sizes)
    return summand(ops.moe_combine(y_MX, row, weight_NK, others > 0), "experts", "expert_ffn")


def own_experts(
    x_MX: Tensor, group_sizes: Tensor, *, gate_up_EGFX: Tensor, down_EXF: Tensor, situ: SituConfig | None
) -> Tensor:
    """Rows of this device's experts, group by group: `[M, X]`."""
    gate_up_MF = ops.grouped_matmul(x_MX, gate_up_EGFX.flatten(1, 2), group_sizes)
    h_MF = ops.swiglu(gate_up_MF) if situ is None else ops.situ(gate_up_MF, situ.beta, situ.linear_beta)
    return ops.grouped_matmul(h_MF, down_EXF, group_sizes)


def exchanged(
    x_NX: Tensor, chosen_NK: Tensor, weight_NK: Tensor, count: int, run: Callable[..., Tensor], chunks: int
) -> Tensor:
    """Rows to their experts, wherever those are, and back: `[N, X]`.

    The next chunk is sent before this one is computed, so that it is on its way meanwhile.

    Args:
        count: experts of this device.
        run: what they make of rows and group sizes.
    """
    rows = x_NX.shape[0]
    starts = range(0, rows, -(-rows // chunks))

    def part(of: Tensor, chunk: int) -> Tensor:
        return of[starts[chunk] : starts[chunk] + starts.step]

    def send(chunk: int) -> tuple[Tensor, ...]:
        return expert_dispatch(part(x_NX, chunk), part(chosen_NK, chunk), "experts", count)

    sent, made = send(0), []
    for chunk in range(len(starts)):
        x_MX, group_sizes, *notes = sent
        if chunk + 1 < len(starts):
            sent = send(chunk + 1)
        y_MX = run(x_MX, group_sizes)
        own = part(chosen_NK, chunk), part(weight_NK, chunk)
        made.append(expert_combine(y_MX, *own, notes[0], notes[1], "experts", count))
    return made[0] if len(made) == 1 else torch.cat(made)


def copies(chosen_NK: Tensor, table: Tensor) -> Tensor:
    """The slots that serve the chosen experts `[N, K]`. Rows take the copies of an expert in turn, by their number.

    Args:
        table: `[E + 1 + S]` int32: where the slots of each expert begin in it, where those of the last one end, and
            the slots, expert by expert.
    """
    rows, top_k = chosen_NK.shape
    number = torch.arange(rows * top_k, dtype=torch.int32, device=chosen_NK.device)  # n * K + k
    if ways(chosen_NK, "token") > 1:
        number = number + own_index(chosen_NK, "token", rows * top_k).int()
    chosen = chosen_NK.flatten()
    first, end = table.index_select(0, chosen), table.index_select(0, chosen + 1)
    # row n takes copy n modulo their number
    turn = torch.div(torch.remainder(number, (end - first) * top_k), top_k, rounding_mode="floor")
    return table.index_select(0, first + turn).view(rows, top_k)


def moe(p: Moe[Tensor], c: MoeConfig, x_BTD: Tensor, eps: float = 1e-5, table: Tensor | None = None) -> Tensor:
    """`[B, T, D]` -> `[B, T, D]`: routed experts plus shared experts.

    Args:
        eps: of the norm of latent experts.
        table: where there are copies of experts, see `copies`.

    Raises:
        ConfigError: an input of another width or dtype than the weights'.
    """
    check_input("moe", x_BTD, p.shared.gate)
    x_ND = constrain(x_BTD.flatten(0, 1), "token", None)
    scores_NE = contract("nd,ed->ne", at_least_f32(x_ND), at_least_f32(p.router))
    weight_NK, chosen_NK = ops.moe_route(scores_NE, p.bias, c.top_k, c.scale, c.groups, c.kept_groups)
    tap("experts", chosen_NK)
    rows, gate_up, down = ("token", None), ("experts", None, "expert_ffn", None), ("experts", None, "expert_ffn")
    given = (rows, rows, rows, gate_up, down) if table is None else (rows, rows, rows, gate_up, down, (None,))
    run = shard_map(functools.partial(experts, situ=c.situ, chunks=c.chunks), given, rows)
    x_NX = x_ND if p.down_latent is None else contract("nd,ld->nl", x_ND, p.down_latent)
    y_NX = run(x_NX, chosen_NK, tap("weights", weight_NK), p.gate_up, p.down, *([] if table is None else [table]))
    if p.latent_norm is not None:
        y_NX = ops.rms_norm(y_NX, p.latent_norm, eps)
    y_ND = y_NX if p.up_latent is None else contract("nl,dl->nd", y_NX, p.up_latent)
    shared_BTD = ffn(p.shared, x_BTD, c.situ)
    if splits(x_ND, "token", "experts"):  # the shared experts' sum is taken where the rows are: scattered, not reduced
        y_ND = y_ND + constrain(shared_BTD.flatten(0, 1), "token", None)
        return constrain(y_ND, "batch", None).unflatten(0, x_BTD.shape[:2])
    return constrain(y_ND, "batch", None).unflatten(0, x_BTD.shape[:2]) + shared_BTD
