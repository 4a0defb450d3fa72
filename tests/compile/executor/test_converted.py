"""What torchair's converters make of ATen calls, executed: the same as the calls themselves.

So the semantics said to be torch's are checked in the nodes and attributes that really occur.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from kimi_graph.compile.capture import capture
from kimi_graph.compile.convert import convert
from kimi_graph.compile.executor import Executor, infer_shapes

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64


def floats(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def positive(*shape: int) -> torch.Tensor:
    return floats(*shape).abs() + 0.1


def ints(*shape: int, high: int = 4) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def half(*shape: int) -> torch.Tensor:
    return floats(*shape, dtype=BF16)


CALLS: dict[str, tuple[Callable, tuple[torch.Tensor, ...]]] = {
    "embedding": (lambda w, i: F.embedding(i, w), (half(5, 4), ints(2, 3))),
    "mm": (torch.mm, (half(3, 4), half(4, 5))),
    "bmm": (torch.bmm, (half(2, 3, 4), half(2, 4, 5))),
    "addmm": (torch.addmm, (half(5), half(3, 4), half(4, 5))),
    "matmul of four dimensions": (torch.matmul, (half(2, 3, 4, 5), half(2, 3, 5, 6))),
    "add": (torch.add, (half(3, 4), half(4))),
    "add a number": (lambda a: a + 1.5, (half(3),)),
    "add an integer": (lambda a: a + 1, (ints(3),)),
    "add with alpha": (lambda a, b: torch.add(a, b, alpha=2), (half(3), half(3))),
    "subtract": (torch.sub, (half(3, 1), half(4))),
    "subtract from a number": (lambda a: 1 - a, (floats(3),)),
    "multiply": (torch.mul, (half(3, 4), half(3, 1))),
    "multiply by a number": (lambda a: a * 2.5, (half(3),)),
    "divide": (torch.div, (half(3), positive(3).to(BF16))),
    "divide by a number": (lambda a: a / 3, (floats(3),)),
    "divide integers": (torch.div, (ints(3), ints(3) + 1)),
    "floor_divide": (lambda a: a // 3, (ints(5, high=20),)),
    "remainder": (lambda a: a % 3, (ints(5, high=20) - 9,)),
    "power": (lambda a: a**2, (floats(3),)),
    "root of the inverse": (lambda a: a**-0.5, (positive(3),)),
    "neg": (torch.neg, (half(3),)),
    "exp": (torch.exp, (half(3),)),
    "log": (torch.log, (positive(3),)),
    "sqrt": (torch.sqrt, (positive(3),)),
    "rsqrt": (torch.rsqrt, (positive(3),)),
    "reciprocal": (torch.reciprocal, (positive(3),)),
    "sigmoid": (torch.sigmoid, (half(3),)),
    "tanh": (torch.tanh, (floats(3),)),
    "silu": (lambda a: F.silu(a), (half(3),)),
    "relu": (lambda a: F.relu(a), (half(3),)),
    "gelu": (lambda a: F.gelu(a), (floats(9),)),
    "gelu by tanh": (lambda a: F.gelu(a, approximate="tanh"), (floats(9),)),
    "layer_norm": (lambda a, w, b: F.layer_norm(a, (4,), w, b, 1e-6), (half(3, 4), half(4), half(4))),
    "layer_norm without weights": (lambda a: F.layer_norm(a, (4,)), (floats(3, 4),)),
    "abs": (torch.abs, (half(3),)),
    "sin and cos": (lambda a: torch.sin(a) + torch.cos(a), (floats(3),)),
    "to float32": (lambda a: a.float(), (half(3),)),
    "to bfloat16": (lambda a: a.to(BF16), (floats(3),)),
    "to bool": (lambda a: a.bool(), (ints(5),)),
    "to int32": (lambda a: a.int(), (floats(5) * 3,)),
    "view": (lambda a: a.view(6, 2), (half(3, 4),)),
    "reshape of a transpose": (lambda a: a.transpose(0, 1).reshape(-1), (half(3, 4),)),
    "permute": (lambda a: a.permute(2, 0, 1).contiguous(), (half(2, 3, 4),)),
    "slice": (lambda a: a[:, 1:3] * 1, (floats(3, 4),)),
    "slice with a step": (lambda a: a[::2] * 1, (floats(6, 4),)),
    "slice from the end": (lambda a: a[:, -2:] * 1, (floats(3, 4),)),
    "select": (lambda a: a[:, 1] * 1, (floats(3, 4),)),
    "select the last": (lambda a: a[-1] * 1, (floats(3, 4),)),
    "split": (lambda a: [x * 1 for x in a.split(3, 1)], (floats(3, 7),)),
    "split by sizes": (lambda a: [x * 1 for x in a.split([1, 3], 1)], (floats(3, 4),)),
    "chunk": (lambda a: [x * 1 for x in a.chunk(2, -1)], (floats(3, 4),)),
    "unbind": (lambda a: [x * 1 for x in a.unbind(1)], (floats(3, 2),)),
    "cat": (lambda a, b: torch.cat([a, b], 1), (half(3, 4), half(3, 2))),
    "stack": (lambda a, b: torch.stack([a, b], 1), (half(3, 4), half(3, 4))),
    "unsqueeze and squeeze": (lambda a: a.unsqueeze(1).squeeze(1) * 1, (floats(3, 4),)),
    "expand": (lambda a: a.expand(2, 3, 4).contiguous(), (half(3, 1),)),
    "repeat": (lambda a: a.repeat(2, 1), (half(3, 4),)),
    "repeat_interleave": (lambda a: a.repeat_interleave(2, 1), (half(3, 4),)),
    "gather": (lambda a, i: torch.gather(a, 1, i), (floats(3, 4), ints(3, 2))),
    "index": (lambda a, i: a[i], (floats(5, 4), ints(3))),
    "index of a later dimension": (lambda a, i: a[:, i], (floats(5, 4), ints(3))),
    "index_select": (lambda a, i: a.index_select(0, i), (half(5, 4), ints(3))),
    "where": (lambda m, a, b: torch.where(m > 1, a, b), (ints(3, 1), half(3, 4), half(4))),
    "masked_fill": (lambda a, m: a.masked_fill(m > 1, -7.0), (floats(3, 4), ints(3, 4))),
    "arange": (lambda a: torch.arange(5, device=a.device) + a, (ints(5),)),
    "arange with a step": (lambda a: torch.arange(1, 10, 2, device=a.device) + a, (ints(5),)),
    "full": (lambda a: torch.full((3, 4), 2.0, device=a.device, dtype=a.dtype) + a, (half(4),)),
    "zeros": (lambda a: torch.zeros(3, device=a.device) + a.float(), (half(3),)),
    "zeros_like": (lambda a: torch.zeros_like(a) + a, (half(3),)),
    "full_like": (lambda a: torch.full_like(a, 3), (floats(3),)),
    **{n: (getattr(torch, n), (ints(3, 1), ints(4))) for n in ("lt", "le", "gt", "ge", "eq", "ne")},
    "compare with a number": (lambda a: (a < 2) & (a >= 1) | ~(a == 3), (ints(9),)),
    "sum": (lambda a: a.sum(-1), (half(3, 4),)),
    "sum of all": (lambda a: a.sum(), (floats(3, 4),)),
    "sum of bools": (lambda a: (a > 1).sum(-1), (ints(3, 4),)),
    "sum of integers": (lambda a: a.sum(0, keepdim=True), (ints(3, 4),)),
    "mean": (lambda a: a.mean(-1, keepdim=True), (floats(3, 4),)),
    "max": (lambda a: a.max(), (floats(3),)),
    "max with its place": (lambda a: list(a.max(-1)), (floats(3, 4),)),
    "argmax": (lambda a: a.argmax(-1), (floats(3, 4),)),
    "any and all": (lambda a: (a > 2).any(-1) & (a > -1).all(), (ints(3, 4),)),
    "clamp": (lambda a: a.clamp(1, 2), (ints(9),)),
    "clamp from below": (lambda a: a.clamp(min=0), (floats(9),)),
    "maximum and minimum": (lambda a, b: torch.maximum(a, b) - torch.minimum(a, b), (floats(9), floats(9) * 0.5)),
    "cumsum": (lambda a: a.cumsum(1), (floats(3, 4),)),
    "pad": (lambda a: F.pad(a, (1, 2)), (floats(3, 4),)),
    "pad an outer dimension": (lambda a: F.pad(a, (0, 0, 3, 0), value=1.0), (floats(2, 3, 4),)),
    "softmax": (lambda a: a.softmax(-1), (half(3, 4),)),
    "log_softmax": (lambda a: a.log_softmax(-1), (floats(3, 4),)),
    "topk": (lambda a: list(a.topk(2, -1)), (floats(3, 5),)),
    "sort": (lambda a: list(a.sort(-1, descending=True)), (floats(3, 5),)),
    "triangles": (lambda a: a.tril(1) + a.triu(1), (floats(3, 3),)),
    "flip": (lambda a: a.flip(1), (floats(2, 3),)),
    "one_hot": (lambda i: F.one_hot(i, 5), (ints(3),)),
    "scatter": (lambda a, i, s: a.scatter(0, i * 2, s), (floats(9), torch.arange(3), floats(3))),
    "scatter_add": (lambda a, i, s: a.scatter_add(0, i, s), (floats(4), ints(3), floats(3))),
    "addcmul": (lambda a, b, c: torch.addcmul(a, b, c, value=2), (floats(3), floats(3), floats(3))),
    "lerp": (lambda a, b: torch.lerp(a, b, 0.25), (floats(3), floats(3) * 2)),
    "clone and detach": (lambda a: a.clone().detach() * 1, (floats(3),)),
}
# Where floats are exact, casts to a narrower float do nothing and quotients of integers are not float32.
IN_FLOAT64: dict[str, Callable] = {
    "to bfloat16": lambda a: a,
    "divide integers": lambda a, b: a.double() / b.double(),
}


def several(result) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def execute(host, call: Callable, args: tuple[torch.Tensor, ...], mode: str) -> list[torch.Tensor]:
    """Captured, converted, described, executed."""
    names = [f"x{i}" for i in range(len(args))]

    def named(**given):
        return {f"y{i}": y for i, y in enumerate(several(call(*(given[n] for n in names))))}

    captured = capture(named, {n: a.to("meta") for n, a in zip(names, args, strict=True)})
    model = convert(captured.module, name="call", host=host, target=None, cann="").model
    infer_shapes(model)  # holds the shapes torch says against those of the operators
    executor = Executor(model)
    return list(executor.run(dict(zip(executor.inputs, args, strict=True)), {}, mode).outputs)


@pytest.mark.parametrize("name", CALLS)
def test_exact_execution_of_a_converted_call_is_the_call_in_float64(host, name):
    call, args = CALLS[name]
    wide = [a.double() if a.is_floating_point() else a for a in args]
    expected = several(IN_FLOAT64.get(name, call)(*wide))
    for mine, torchs in zip(execute(host, call, args, "exact"), expected, strict=True):
        torchs = torchs.double() if torchs.is_floating_point() else torchs
        torch.testing.assert_close(mine, torchs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CALLS)
def test_native_execution_of_a_converted_call_is_the_call(host, name):
    call, args = CALLS[name]
    for mine, torchs in zip(execute(host, call, args, "native"), several(call(*args)), strict=True):
        # two roundings of the result's dtype; torch's own bfloat16 products may sum in another order
        digits = 2**-7 if torchs.dtype == BF16 else 1e-6
        torch.testing.assert_close(mine, torchs, rtol=digits, atol=digits)
