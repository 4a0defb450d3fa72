"""Attention without a mask: every token of a picture sees all of its tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import _fused
from .base import operator

ALIGNED = 16  # channels of a head, in CANN's attention over 16-bit floats with more than one query


@operator(sharding="b n h k, b n h k, b n h k, b -> b n h k", whole="nk")
def full_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Softmax attention of each row's first `lengths` tokens among themselves.

    Args:
        q, k, v: `[B, N, H, K]`. lengths: `[B]` int64; what lies past it is not read and gives zeros.

    Returns:
        `[B, N, H, K]` in v's dtype.
    """
    outs = []
    for row, length in enumerate(lengths.tolist()):
        heads_first = (x[row, :length].transpose(0, 1)[None] for x in (q, k, v))
        if length:
            outs.append(F.scaled_dot_product_attention(*heads_first, scale=scale)[0].transpose(0, 1))
        outs.append(v.new_zeros(v.shape[1] - length, *v.shape[2:]))
    return torch.cat(outs).unflatten(0, v.shape[:2])


@full_attention.fake
def _(q, k, v, lengths, scale):
    return torch.empty_like(v)


@full_attention.lowering
def _(ge, q, k, v, lengths, scale):
    rows, tokens, heads, width = ge.shape(q)
    missing = -width % ALIGNED  # zeros change no score and give zeros: 72 channels are padded to 80

    def padded(x):
        if not missing:
            return x
        wide = ge.PadV3(x, ge.const([0] * 7 + [missing], torch.int64), ge.const(0.0, ge.dtype(x)))
        return ge.mark(wide, (rows, tokens, heads, width + missing), ge.dtype(x))

    given = {"actual_seq_lengths": lengths, "actual_seq_lengths_kv": lengths}
    o = _fused(
        ge, padded(q), padded(k), padded(v), given,
        num_heads=heads, num_key_value_heads=heads, scale=scale, input_layout="BSND", sparse_mode=0,
    )  # fmt: skip
    if not missing:
        return o
    return ge.Slice(o, ge.const([0] * 4, torch.int64), ge.const([rows, tokens, heads, width], torch.int64))
