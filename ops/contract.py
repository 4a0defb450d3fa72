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
        lead, width = x.shape[:-summed], x.shape[-summed:].numel()
        rows = lead.numel()
        if rows <= FEW:
            return few_rows(x.reshape(rows, width), y.reshape(-1, width)).view(lead + y.shape[:-summed])
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
    """`[M, D]` times `[F, D]` transposed, for small M: the weight's rows are shared out among the threads."""
    ways, (rows, width), size = shares(weight), x.shape, len(weight)
    if ways == 1:
        return F.linear(x, weight)
    y = torch.bmm(x.expand(ways, rows, width), weight.view(ways, -1, width).mT)
    return y.transpose(0, 1).reshape(rows, size)


def shares(weight: Tensor) -> int:
    """How many threads should share the rows of a `[F, D]` weight that meets few rows."""
    ways, (size, width) = torch.get_num_threads(), weight.shape[-2:]
    worth = weight.dtype.itemsize >= 4 and size * width >= LARGE and size % ways == 0 and weight.device.type == "cpu"
    return ways if worth else 1
