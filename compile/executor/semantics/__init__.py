"""Semantics of GE operator types; importing this registers them all."""

from . import (
    attention,
    cache,
    collective,
    constants,
    elementwise,
    indexing,
    linear_attention,
    matmul,
    moe,
    norm,
    own,
    reduce,
    rotation,
    shape,
    sparse_attention,
)

__all__ = [
    "attention",
    "cache",
    "collective",
    "constants",
    "elementwise",
    "indexing",
    "linear_attention",
    "matmul",
    "moe",
    "norm",
    "own",
    "reduce",
    "rotation",
    "shape",
    "sparse_attention",
]
