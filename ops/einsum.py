"""Matrix products. Layers say `torch.einsum`; capture keeps it whole as `kimi::einsum`; a pass turns that into these.

A weight operand ends up in the checkpoint's order: it is only viewed, and the product is told to transpose it.
"""

import torch
from torch import Tensor

from .base import operator


@operator(sharding="m k, n k -> m n")
def matmul(x: Tensor, y: Tensor, transpose: bool) -> Tensor:
    """`[M, K]` times `[N, K]` transposed (or `[K, N]` where not `transpose`): `[M, N]`."""
    return x @ (y.t() if transpose else y)


@matmul.fake
def _(x, y, transpose):
    return x.new_empty(x.shape[0], y.shape[0 if transpose else 1])


@matmul.lowering
def _(ge, x, y, transpose):
    return ge.MatMul(x, y, transpose_x1=False, transpose_x2=transpose)


@operator(sharding="g m k, g n k -> g m n")
def batch_matmul(x: Tensor, y: Tensor, transpose: bool) -> Tensor:
    """`[G, M, K]` times `[G, N, K]` transposed (or `[G, K, N]` where not `transpose`): `[G, M, N]`."""
    return torch.bmm(x, y.transpose(1, 2) if transpose else y)


@batch_matmul.fake
def _(x, y, transpose):
    return x.new_empty(x.shape[0], x.shape[1], y.shape[1 if transpose else 2])


@batch_matmul.lowering
def _(ge, x, y, transpose):
    return ge.BatchMatMul(x, y, adj_x1=False, adj_x2=transpose)


def einsum(equation: str, operands: list[Tensor]) -> Tensor:
    """`torch.einsum` as one graph node."""
    return torch.einsum(equation, *operands)


_LIBRARY = torch.library.Library("kimi", "FRAGMENT")
_LIBRARY.define("einsum(str equation, Tensor[] operands) -> Tensor")
_LIBRARY.impl("einsum", einsum, "CPU")
_LIBRARY.impl("einsum", lambda equation, operands: torch.einsum(equation, *operands), "Meta")
EINSUM = torch.ops.kimi.einsum.default
