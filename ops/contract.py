"""`torch.einsum` of two operands, quick where few rows meet a large weight: in a decode step the weights' bytes count.

With one row, torch's product of float32 runs on one thread, and einsum's of bfloat16 at a fifth of `linear`'s speed.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import has_torch_function

FEW = 16  # rows; from here on the general product keeps all threads busy
LARGE = 1 << 16  # elements of a weight that are worth waking a second thread for


def contract(equation: str, x: Tensor, y: Tensor) -> Tensor:
    """`torch.einsum(equation, x, y)`, such as "btd,fd->btf": `[B, T, D]`, `[F, D]` -> `[B, T, F]`.

    Whoever follows torch's functions (capture, a sharded value) sees just that.
    """
    summed = _trailing(equation)
    if summed and not has_torch_function((x, y)):
        width = y.shape[-1] if summed == 1 else y.shape[-summed:].numel()
        if x.numel() <= FEW * width:
            if summed == 1 and y.ndim == 2 and shares(y, width) == 1:
                return F.linear(x, y)  # as below, in one call
            shape = x.shape[:-summed] + y.shape[:-summed]
            return few_rows(x.reshape(-1, width), y.flatten(-summed) if summed > 1 else y).view(shape)
    return torch.einsum(equation, x, y)


@functools.lru_cache(maxsize=1024)
def _trailing(equation: str) -> int:
    """How many trailing letters are summed, if the result is simply the rest of `x`, then the rest of `y`; else 0."""
    operands, result = equation.split("->")
    x, y = operands.split(",")
    for n in range(1, min(len(x), len(y)) + 1):
        if x[-n:] == y[-n:] and x[:-n] + y[:-n] == result and not set(x[:-n]) & set(y[:-n]):
            return n
    return 0


def few_rows(x: Tensor, weight: Tensor) -> Tensor:
    """`[M, D]` times `[..., D]` transposed, for small M: the weight's rows are shared out among the threads.

    The result holds the elements of `[M, ...]` in order; its shape is to be viewed.
    """
    (rows, width), ways = x.shape, shares(weight, x.shape[1])
    if ways == 1:
        return torch.mm(x, weight.reshape(-1, width).t())
    y = torch.bmm(x.expand(ways, rows, width), weight.reshape(ways, -1, width).mT)
    return y if rows == 1 else y.transpose(0, 1).reshape(rows, -1)


def shares(weight: Tensor, width: int) -> int:
    """How many threads should share the rows of a weight `[..., width]` that meets few rows."""
    size = weight.numel()
    if size < LARGE or weight.dtype.itemsize < 4 or weight.device.type != "cpu":
        return 1
    ways = torch.get_num_threads()
    return 1 if size // width % ways else ways
