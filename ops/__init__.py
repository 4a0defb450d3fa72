"""Operators: each is plain torch in eager code, one node in a captured graph, and one or a few nodes in GE."""

from .attention import attention, latent_attention, latent_attention_lse
from .base import OPERATORS, Operator, as_f32, at_least_f32, capturing, donating, operator
from .cache import cache_read, cache_write, numbered_pages
from .contract import contract
from .full_attention import full_attention
from .kda_chunk import kda_chunk
from .kda_gate import kda_gate
from .kda_step import kda_step
from .moe import grouped_matmul, moe_combine, moe_dispatch, moe_route, swiglu
from .norm import gated_rms_norm, l2_norm, layer_norm, rms_norm, sigmoid_gate
from .quantised_cache import (
    quantised_cache_write,
    quantised_index_write,
    quantised_select_keys,
    quantised_sparse_attention,
)
from .residual_mix import residual_mix
from .rope import rope
from .short_conv import short_conv
from .situ import situ, situ_mul
from .sparse_attention import NO_SCORE, best_positions, index_write, select_keys, sparse_attention, sparse_attention_lse
from .state import state_write

__all__ = [
    "NO_SCORE",
    "OPERATORS",
    "Operator",
    "as_f32",
    "at_least_f32",
    "attention",
    "best_positions",
    "cache_read",
    "cache_write",
    "capturing",
    "contract",
    "donating",
    "full_attention",
    "gated_rms_norm",
    "grouped_matmul",
    "index_write",
    "kda_chunk",
    "kda_gate",
    "kda_step",
    "l2_norm",
    "latent_attention",
    "latent_attention_lse",
    "layer_norm",
    "moe_combine",
    "moe_dispatch",
    "moe_route",
    "numbered_pages",
    "operator",
    "quantised_cache_write",
    "quantised_index_write",
    "quantised_select_keys",
    "quantised_sparse_attention",
    "residual_mix",
    "rms_norm",
    "rope",
    "select_keys",
    "short_conv",
    "sigmoid_gate",
    "situ",
    "situ_mul",
    "sparse_attention",
    "sparse_attention_lse",
    "state_write",
    "swiglu",
]
