"""Rotary position embedding."""

import torch
from torch import Tensor

from kimi_graph.compile.executor.node import Op
from kimi_graph.compile.executor.registry import ge_op
from kimi_graph.ops import at_least_f32


@ge_op(
    "RotaryPositionEmbedding",
    provenance="documented formula",
    source="ops-transformer's document: x cos + turned sin, where turned is (-second half, first half) in mode 0 and "
    "(-x[2m + 1], x[2m]) at each pair in mode 1; an angle for each channel; float32, rounded once (own reading)",
    prototype="x cos sin rotate?",
)
def rotary_position_embedding(op: Op, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    mode = op.attr("mode", 0)
    op.require(mode in (0, 1), f"mode {mode}, supported is 0 (half) or 1 (interleave)")
    op.same_dtype(x, cos, sin)
    op.require(cos.shape == sin.shape, f"cos {list(cos.shape)}, sin {list(sin.shape)}")
    fits = x.ndim == cos.ndim and all(b in (1, a) for a, b in zip(x.shape, cos.shape, strict=False))
    op.require(x.ndim in (3, 4) and fits, f"x {list(x.shape)} with angles {list(cos.shape)}")
    op.require(x.shape[-1] == cos.shape[-1] and x.shape[-1] % 2 == 0, f"width {x.shape[-1]}, angles {cos.shape[-1]}")
    x32, half = at_least_f32(x), x.shape[-1] // 2
    if mode == 0:
        turned = torch.cat([-x32[..., half:], x32[..., :half]], -1)
    else:
        turned = torch.stack([-x32[..., 1::2], x32[..., 0::2]], -1).reshape(x.shape)
    return (x32 * at_least_f32(cos) + turned * at_least_f32(sin)).to(x.dtype)
