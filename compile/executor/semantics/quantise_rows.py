"""Rows quantised for a product with quantised weights: E4M3 numbers, with scales for some channels each.

Letters: M rows, K channels. Where floats are exact, so is this: rounding to a shorter float does nothing, as a cast
does, and every scale is one.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_graph.compile.executor.node import Op
from kimi_graph.compile.executor.registry import ge_op
from kimi_graph.ops import at_least_f32

from .norm import situ

E4M3, MOST_E4M3, TOP_EXPONENT = torch.float8_e4m3fn, 448.0, 8
GROUP, LEAST_EXPONENT, MOST_EXPONENT = 32, -127, 127  # of a power of two for 32 channels, an E8M0 number


def _in_blocks(x: Tensor, size: int) -> Tensor:
    """`[M, K]` as `[M, blocks, size]`, padded with zeros."""
    return F.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))


def _rounded(blocks: Tensor, scale: Tensor, width: int) -> Tensor:
    """`[M, blocks, size]` over `[M, blocks]`, saturated and rounded to E4M3: `[M, width]`."""
    scaled = (blocks / scale[..., None]).clamp(-MOST_E4M3, MOST_E4M3)
    return scaled.flatten(-2)[..., :width].to(E4M3)


@ge_op(
    "DynamicMxQuant",
    provenance="public CPU reference",
    source="ops-nn's golden function and document: 2 ** (floor(log2(largest of 32 channels)) - 8), the least power for "
    "zeros; numbers divided by it, saturated, rounded to the nearest even",
    outputs="y mxscale",
)
def dynamic_mx_quant(op: Op, x: Tensor) -> tuple[Tensor, Tensor]:
    op.must(dst_type=36)
    op.expect(round_mode="rint", blocksize=GROUP, scale_alg=0, dst_type_max=0.0, max_low_bound=0.0)
    op.require(op.attr("axis", -1) in (-1, x.ndim - 1) and x.ndim == 2, f"rows expected, found {list(x.shape)}")
    return _in_mx(x, op.exact)


def _in_mx(x: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    pairs = (rows, -(-width // (2 * GROUP)), 2)
    if exact:
        return x, x.new_ones(pairs)
    if x.is_meta:
        return x.new_empty(x.shape, dtype=E4M3), x.new_empty(pairs, dtype=torch.float8_e8m0fnu)
    blocks = _in_blocks(at_least_f32(x), GROUP)
    exponent = torch.frexp(blocks.abs().amax(-1)).exponent - 1 - TOP_EXPONENT
    exponent = exponent.masked_fill(blocks.abs().amax(-1) == 0, LEAST_EXPONENT).clamp(LEAST_EXPONENT, MOST_EXPONENT)
    y = _rounded(blocks.double(), torch.exp2(exponent.double()), width)
    codes = F.pad(exponent + 127, (0, -exponent.shape[-1] % 2)).to(torch.uint8)
    return y, codes.view(torch.float8_e8m0fnu).view(pairs)


@ge_op(
    "SituMxQuant",
    provenance="documented formula",
    source="ops-nn's document: SituGlu of the last dimension, the first half the gate where activate_left, its rows as "
    "DynamicMxQuant has them; float32 between the two (own reading)",
    outputs="y y_scale",
)
def situ_mx_quant(op: Op, x: Tensor) -> tuple[Tensor, Tensor]:
    op.must(dst_type=36, activate_left=True)
    op.expect(round_mode="rint", axis=-1)
    op.require(x.ndim == 2 and x.shape[1] % 2 == 0, f"rows of two halves expected, found {list(x.shape)}")
    gate, up = at_least_f32(x).chunk(2, -1)
    return _in_mx(situ(gate, up, op.attr("beta", 1.0), op.attr("linear_beta", 0.0)), op.exact)


@ge_op(
    "DynamicBlockQuant",
    provenance="public CPU reference",
    source="ops-nn's golden function and document: largest of 128 channels of a row over 448 is the scale, numbers "
    "divided by it and rounded to the nearest even",
    outputs="y scale",
)
def dynamic_block_quant(op: Op, x: Tensor) -> tuple[Tensor, Tensor]:
    op.must(dst_type=36)
    op.expect(min_scale=0.0, round_mode="rint", row_block_size=1, col_block_size=128, dst_type_max=0.0)
    op.require(x.ndim == 2, f"rows expected, found {list(x.shape)}")
    rows, width = x.shape
    scales = (rows, math.ceil(width / 128))
    if op.exact:
        return x, x.new_ones(scales)
    if x.is_meta:
        return x.new_empty(x.shape, dtype=E4M3), x.new_empty(scales, dtype=torch.float32)
    blocks = _in_blocks(at_least_f32(x), 128)
    scale = blocks.abs().amax(-1) / MOST_E4M3
    return _rounded(blocks, torch.where(scale == 0, 1.0, scale), width), scale
