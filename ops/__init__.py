"""Operators: each is plain torch in eager code, one node in a captured graph, and one or a few nodes in GE."""

from .attention import attention, latent_attention
from .base import OPERATORS, Operator, at_least_f32, capturing, donating, operator
from .cache import cache_read, cache_write
from .contract import contract
from .kda_chunk import kda_chunk
from .kda_gate import kda_gate
from .kda_step import kda_step
from .moe import grouped_matmul, moe_combine, moe_dispatch, moe_route, swiglu
from .norm import gated_rms_norm, l2_norm, rms_norm
from .short_conv import short_conv

__all__ = [
    "OPERATORS",
    "Operator",
    "at_least_f32",
    "attention",
    "cache_read",
    "cache_write",
    "capturing",
    "contract",
    "donating",
    "gated_rms_norm",
    "grouped_matmul",
    "kda_chunk",
    "kda_gate",
    "kda_step",
    "l2_norm",
    "latent_attention",
    "moe_combine",
    "moe_dispatch",
    "moe_route",
    "operator",
    "rms_norm",
    "short_conv",
    "swiglu",
]
