"""Semantics of GE operator types; importing this registers them all."""

from . import (
    attention,
    cache,
    constants,
    elementwise,
    indexing,
    linear_attention,
    matmul,
    moe,
    norm,
    own,
    quantise_rows,
    quantised_cache,
    reduce,
    rotation,
    shape,
    sparse_attention,
)

__all__ = [
    "attention",
    "cache",
    "constants",
    "elementwise",
    "indexing",
    "linear_attention",
    "matmul",
    "moe",
    "norm",
    "own",
    "quantise_rows",
    "quantised_cache",
    "reduce",
    "rotation",
    "shape",
    "sparse_attention",
]
