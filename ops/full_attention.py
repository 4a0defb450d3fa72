"""Attention without a mask: every token of a picture sees all of its tokens.

Source: Attention Is All You Need (arXiv:1706.03762), equation 1; fact sheet of models, section 6.1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import _fused
from .base import empty_like, operator

ALIGNED = 16  # channels of a head that CANN's attention wants a multiple of, for 16-bit floats and several queries


@operator(sharding="b n h k, b n h k, b n h k, b -> b n h k", whole="nk")
def full_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Softmax attention of each row's first `lengths` tokens among themselves.

    Args:
        q, k, v: `[B, N, H, K]`.
        lengths: `[B]` int64; what lies past it is not read and gives zeros.

    Returns:
        `[B, N, H, K]` in v's dtype.
    """
    outs = []
    for row, length in enumerate(lengths.tolist()):
        if length:  # with a batch dimension torch takes its blockwise form, which holds no matrix of all scores
            q_1HNK, k_1HNK, v_1HNK = (x[row : row + 1, :length].transpose(1, 2) for x in (q, k, v))
            outs.append(F.scaled_dot_product_attention(q_1HNK, k_1HNK, v_1HNK, scale=scale)[0].transpose(0, 1))
        outs.append(v.new_zeros(v.shape[1] - length, *v.shape[2:]))
    return torch.cat(outs).unflatten(0, v.shape[:2])


@full_attention.fake
def _(q, k, v, lengths, scale):
    return empty_like(v)


@full_attention.lowering
def _(ge, q, k, v, lengths, scale):
    heads, width = ge.shape(q)[2:]
    wanted = -(-width // ALIGNED) * ALIGNED
    cost = (
        "" if wanted == width else f"; {width} channels padded to {wanted} and stripped: {wanted / width - 1:.0%} more"
    )
    ge.chose("attention inside a picture", "FusedInferAttentionScore", "the picture's length is an input" + cost)
    q, k, v = (ge.pad(x, 3, wanted) for x in (q, k, v))
    o, _ = _fused(
        ge, q, k, v, {"actual_seq_lengths": lengths, "actual_seq_lengths_kv": lengths},
        num_heads=heads, num_key_value_heads=heads, scale=scale, input_layout="BSND", sparse_mode=0,
    )  # fmt: skip
    return ge.first(ge.mark(o, ge.shape(q), ge.dtype(q)), 3, width)
