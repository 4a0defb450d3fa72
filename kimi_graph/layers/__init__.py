"""Layers: weights as a tree, and one pure function. What goes in and what comes out is in the signature."""

from .attn_residual import (
    AttnResidual,
    StoredMix,
    attn_residual,
    attn_residual_specs,
    merge_running,
    stored_mix,
)
from .batch import Batch, KdaState, MlaState, row_batch, step_batch, zero_state
from .ffn import Ffn, ffn, ffn_specs
from .indexer import Indexer, indexer_specs
from .kda import Kda, kda, kda_specs, kda_state_specs
from .kernels import gpu_kernels
from .mla import Mla, mla, mla_specs, mla_state_specs
from .moe import Moe, moe, moe_specs
from .rope import mscale, rope_rows, rope_table
from .vision import (
    Vision,
    VisionTables,
    arrange_patches,
    replace_rows,
    vision_block,
    vision_embed,
    vision_forward,
    vision_project,
    vision_rows,
    vision_specs,
    vision_tables,
)

__all__ = [
    "AttnResidual",
    "Batch",
    "Ffn",
    "Indexer",
    "Kda",
    "KdaState",
    "Mla",
    "MlaState",
    "Moe",
    "StoredMix",
    "Vision",
    "VisionTables",
    "arrange_patches",
    "attn_residual",
    "attn_residual_specs",
    "ffn",
    "ffn_specs",
    "gpu_kernels",
    "indexer_specs",
    "kda",
    "kda_specs",
    "kda_state_specs",
    "merge_running",
    "mla",
    "mla_specs",
    "mla_state_specs",
    "moe",
    "moe_specs",
    "mscale",
    "replace_rows",
    "rope_rows",
    "rope_table",
    "row_batch",
    "step_batch",
    "stored_mix",
    "vision_block",
    "vision_embed",
    "vision_forward",
    "vision_project",
    "vision_rows",
    "vision_specs",
    "vision_tables",
    "zero_state",
]
