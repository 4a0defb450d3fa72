"""`torch.einsum` of two operands, quick where few rows meet a large weight: in a decode step the weights' bytes count.

With one row, torch's product of float32 runs on one thread, and einsum's of bfloat16 at a fifth of `linear`'s speed.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import has_torch_function

FEW = 16  # rows; from here on the general product keeps all threads busy
LARGE = 1 << 15  # elements of a weight that are worth a second thread


def contract(equation: str, x: Tensor, y: Tensor) -> Tensor:
    """`torch.einsum(equation, x, y)`; whoever follows torch's functions (capture, a sharded value) sees just that."""
    summed = _trailing(equation)
    if summed and not has_torch_function((x, y)):
        width = y.shape[-1] if summed == 1 else y.shape[-summed:].numel()
        if x.numel() <= FEW * width:
            shape = x.shape[:-summed] + y.shape[:-summed]
            return few_rows(x.reshape(-1, width), y.reshape(-1, width)).view(shape)
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
    """`[M, D]` times `[F, D]` transposed, for small M: the weight's rows are shared out among the threads.

    The result holds the elements of `[M, F]` in order; its shape is to be viewed.
    """
    ways = shares(weight)
    if ways == 1:
        return F.linear(x, weight)
    (rows, width), size = x.shape, weight.shape[0]
    y = torch.bmm(x.expand(ways, rows, width), weight.view(ways, -1, width).mT)
    return y if rows == 1 else y.transpose(0, 1).reshape(rows, size)


def shares(weight: Tensor) -> int:
    """How many threads should share the rows of a `[..., F, D]` weight that meets few rows."""
    size, width = weight.shape[-2:]
    if size * width < LARGE or weight.dtype.itemsize < 4 or weight.device.type != "cpu":
        return 1
    ways = torch.get_num_threads()
    return ways if size % ways == 0 else 1
