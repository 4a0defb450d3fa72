"""Mixture of experts: a float32 sigmoid router, routed experts in groups, shared experts beside them.

Axes: B sequences, T tokens, N = B * T rows, D embed, E experts, K experts per token, F ffn.
Source: DeepSeek-V3 (arXiv:2412.19437), section 2.1.2; the correction bias takes part in the selection only.
"""

from typing import Generic

import torch
from torch import Tensor

from kimi_graph import ops
from kimi_graph.config import MoeConfig
from kimi_graph.ops import at_least_f32, contract
from kimi_graph.parallel import constrain, local_ids, shard_map, summand
from kimi_graph.spec import ParamSpec, weight
from kimi_graph.taps import tap
from kimi_graph.tree import Leaf, param_tree

from .ffn import Ffn, ffn, ffn_specs


@param_tree
class Moe(Generic[Leaf]):
    router: Leaf
    bias: Leaf
    gate_up: Leaf
    down: Leaf
    shared: Ffn[Leaf]


def moe_specs(c: MoeConfig, embed: int) -> Moe[ParamSpec]:
    gate_up = tuple(f"experts.{e}.{w}.weight" for e in range(c.experts) for w in ("w1", "w3"))
    down = tuple(f"experts.{e}.w2.weight" for e in range(c.experts))
    f32 = torch.float32
    shared = ffn_specs(c.shared_ffn, embed)
    return Moe(
        router=weight((c.experts, embed), "_ embed", source="gate.weight"),
        bias=weight((c.experts,), "_", source="gate.e_score_correction_bias", dtype=f32),
        gate_up=weight((c.experts, 2, c.ffn, embed), "experts _ expert_ffn embed", source=gate_up),
        down=weight((c.experts, embed, c.ffn), "experts embed expert_ffn", source=down),
        shared=Ffn(
            gate=shared.gate.under("shared_experts."),
            up=shared.up.under("shared_experts."),
            down=shared.down.under("shared_experts."),
        ),
    )


def experts(x_ND: Tensor, chosen_NK: Tensor, weight_NK: Tensor, gate_up_EGFD: Tensor, down_EDF: Tensor) -> Tensor:
    """Every row through its K experts, and their weighted sum: `[N, D]`. The body of a `shard_map`.

    `chosen_NK` are ids among all experts. A device that has some of them gives their part of the sum. It needs every
    row they may get, so rows may not be split over the mesh axes that split experts.
    """
    count = gate_up_EGFD.shape[0]
    x_MD, row, group_sizes = ops.moe_dispatch(x_ND, local_ids(chosen_NK, "experts", count), count)
    h_MF = ops.swiglu(ops.grouped_matmul(x_MD, gate_up_EGFD.flatten(1, 2), group_sizes))
    y_MD = ops.grouped_matmul(h_MF, down_EDF, group_sizes)
    return summand(ops.moe_combine(y_MD, row, weight_NK), "experts", "expert_ffn")


def moe(p: Moe[Tensor], c: MoeConfig, x_BTD: Tensor) -> Tensor:
    """`[B, T, D]` -> `[B, T, D]`: routed experts plus shared experts."""
    x_ND = constrain(x_BTD.flatten(0, 1), "token", None)
    scores_NE = contract("nd,ed->ne", at_least_f32(x_ND), at_least_f32(p.router))
    weight_NK, chosen_NK = ops.moe_route(scores_NE, p.bias, c.top_k, c.scale)
    tap("experts", chosen_NK)
    rows, gate_up, down = ("token", None), ("experts", None, "expert_ffn", None), ("experts", None, "expert_ffn")
    run = shard_map(experts, (rows, rows, rows, gate_up, down), rows)
    y_ND = run(x_ND, chosen_NK, tap("weights", weight_NK), p.gate_up, p.down)
    y_BTD = constrain(y_ND, "batch", None).unflatten(0, x_BTD.shape[:2])
    return y_BTD + ffn(p.shared, x_BTD)
