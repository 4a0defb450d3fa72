"""Gated feed-forward layer, SwiGLU or SiTU. Axes: B sequences, T tokens, D embed, F ffn."""

from typing import Generic

import torch.nn.functional as F
from torch import Tensor

from kimi_graph import ops
from kimi_graph.config import SituConfig
from kimi_graph.ops import contract
from kimi_graph.spec import ParamSpec, weight
from kimi_graph.tree import Leaf, param_tree


@param_tree
class Ffn(Generic[Leaf]):
    gate: Leaf
    up: Leaf
    down: Leaf


def ffn_specs(ffn: int, embed: int) -> Ffn[ParamSpec]:
    return Ffn(
        gate=weight((ffn, embed), "ffn embed", source="gate_proj.weight"),
        up=weight((ffn, embed), "ffn embed", source="up_proj.weight"),
        down=weight((embed, ffn), "embed ffn", source="down_proj.weight"),
    )


def ffn(p: Ffn[Tensor], x_BTD: Tensor, situ: SituConfig | None = None) -> Tensor:
    """`down(silu(gate x) * up x)` over the last dimension, or SiTU in place of silu: `[B, T, D]` -> `[B, T, D]`."""
    gate_BTF = contract("btd,fd->btf", x_BTD, p.gate)
    up_BTF = contract("btd,fd->btf", x_BTD, p.up)
    if situ is None:
        h_BTF = F.silu(gate_BTF) * up_BTF
    else:
        h_BTF = ops.situ_mul(gate_BTF, up_BTF, situ.beta, situ.linear_beta)
    return contract("btf,df->btd", h_BTF, p.down)
