"""SwiGLU feed-forward layer. Axes: B sequences, T tokens, D embed, F ffn."""

from typing import Generic

import torch.nn.functional as F
from torch import Tensor

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


def ffn(p: Ffn[Tensor], x_BTD: Tensor) -> Tensor:
    """`down(silu(gate x) * up x)` over the last dimension: `[B, T, D]` -> `[B, T, D]`."""
    gate_BTF = contract("btd,fd->btf", x_BTD, p.gate)
    up_BTF = contract("btd,fd->btf", x_BTD, p.up)
    return contract("btf,df->btd", F.silu(gate_BTF) * up_BTF, p.down)
