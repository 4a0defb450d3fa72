"""Layers: weights as a tree, and one pure function. What goes in and what comes out is in the signature."""

from .batch import Batch, KdaState, MlaState, row_batch, step_batch, zero_state
from .ffn import Ffn, ffn, ffn_specs
from .kda import Kda, kda, kda_specs, kda_state_specs
from .mla import Mla, mla, mla_specs, mla_state_specs
from .moe import Moe, moe, moe_specs

__all__ = [
    "Batch",
    "Ffn",
    "Kda",
    "KdaState",
    "Mla",
    "MlaState",
    "Moe",
    "ffn",
    "ffn_specs",
    "kda",
    "kda_specs",
    "kda_state_specs",
    "mla",
    "mla_specs",
    "mla_state_specs",
    "moe",
    "moe_specs",
    "row_batch",
    "step_batch",
    "zero_state",
]
