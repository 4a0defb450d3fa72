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
    """`torch.einsum` as one graph node: "btd,fd->btf" of `[B, T, D]` and `[F, D]`, say."""
    return torch.einsum(equation, *operands)


def _einsum_fake(equation: str, operands: list[Tensor]) -> Tensor:
    """Of two operands with a sum, in the order of dimensions that torch gives; for others torch is asked.

    torch would ask its Python reference, which imports sympy: half a second.
    """
    given, _, result = equation.replace(" ", "").partition("->")
    words = given.split(",")
    if len(words) != 2 or "." in equation or any(len(set(w)) < len(w) for w in (*words, result)):
        return torch.einsum(equation, *operands)
    left, right = (dict(zip(w, x.shape, strict=True)) for w, x in zip(words, operands, strict=True))
    summed = {k for k in {*left, *right} - {*result} if left.get(k, 1) > 1 or right.get(k, 1) > 1}
    sizes = {k: max(left.get(k, 1), right.get(k, 1)) for k in result}
    if not summed or not summed <= {*left} & {*right} or not set(result) <= {*left, *right}:
        return torch.einsum(equation, *operands)
    if any(left[k] != right[k] for k in {*left, *right} if left.get(k, 1) > 1 and right.get(k, 1) > 1):
        return torch.einsum(equation, *operands)  # it says what is wrong
    both, first, second, ones = ([k for k in result if (left.get(k, 1) > 1, right.get(k, 1) > 1) == of] for of in _OF)
    swapped = bool(first and second) and [k for k in result if k in first + second] == second + first
    if swapped and 1 in (*left.values(), *right.values()):
        return torch.einsum(equation, *operands)
    made = both + (second + first if swapped else first + second) + ones
    x = operands[0].new_empty([sizes[k] for k in made])
    return x.permute([made.index(k) for k in result])


_OF = ((True, True), (True, False), (False, True), (False, False))  # in both, in the first, in the second, of size 1
_LIBRARY = torch.library.Library("kimi", "FRAGMENT")
_LIBRARY.define("einsum(str equation, Tensor[] operands) -> Tensor")
_LIBRARY.impl("einsum", einsum, "CPU")
_LIBRARY.impl("einsum", _einsum_fake, "Meta")
EINSUM = torch.ops.kimi.einsum.default
