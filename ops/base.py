"""An operator and its five faces: schema, reference, fake, sharding rule, GE lowering. One operator, one file.

Called on plain tensors an operator *is* its reference: plain differentiable torch, so autograd and `torch.func` work
through it. While a graph is captured (`capturing`), the call is recorded as one node `kimi::<name>` instead. Anything
else that answers `__torch_function__` (a sharded value) is asked first.
"""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.overrides import handle_torch_function, has_torch_function

_LIBRARY = torch.library.Library("kimi", "DEF")
_capturing: contextvars.ContextVar[bool] = contextvars.ContextVar("capturing", default=False)
_donating: contextvars.ContextVar[bool] = contextvars.ContextVar("donating", default=False)
OPERATORS: dict[str, "Operator"] = {}


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Inside, operators record themselves as single graph nodes."""
    token = _capturing.set(True)
    try:
        yield
    finally:
        _capturing.reset(token)


@contextlib.contextmanager
def donating() -> Iterator[None]:
    """Inside, operators may write a state's next value into the buffers of the state they were given."""
    token = _donating.set(True)
    try:
        yield
    finally:
        _donating.reset(token)


def may_overwrite(state: torch.Tensor) -> bool:
    """Whether `state` was given away by the caller and autograd does not need it."""
    return _donating.get() and not state.requires_grad


def transformed() -> bool:
    """Whether a `torch.func` transform is at work: then no tensor's values may decide a shape."""
    return torch._C._are_functorch_transforms_active()


def mapped(x: torch.Tensor) -> bool:
    """Whether `torch.func.vmap` maps over `x`: then its values are many, and cannot be asked for."""
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def recorded(*values: torch.Tensor) -> bool:
    """Whether autograd or a `torch.func` transform follows these values: then nothing is written in place."""
    return transformed() or (torch.is_grad_enabled() and any(v.requires_grad for v in values))


@functools.lru_cache(maxsize=1024)
def as_f32(value: float) -> float:
    """`value` rounded to float32: an operator's float attributes are float32 in GE, so they are everywhere."""
    return float(np.float32(value))


class Operator:
    """A function on tensors with a graph node of its own.

    Attributes:
        name: schema name; the node is `kimi::<name>`.
        sharding: one letter group per tensor argument and result, as in einsum: a letter of an operand that no
            result has is a partial sum. A list of tensors is one argument, and its group is that of each of them.
        whole: letters that may not be sharded. Slots `s` and pages `p` are an exception: they are split as the rows `b`
            that own them, and ids count within a device's part.
        linear: it is linear in its first argument, so that a sum over devices that waits there waits in the result.
        lower: `lower(ge, *args)`: GE tensors in, GE tensors out; `ge` is the lowering room of the compiler.
    """

    def __init__(self, reference: Callable[..., Any], sharding: str, whole: str, linear: bool) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.sharding, self.whole, self.linear = sharding, whole, linear
        self.lower: Callable[..., Any] | None = None
        self.__doc__, self.__name__ = reference.__doc__, reference.__name__
        self._signature = inspect.signature(reference)
        self.__signature__ = self._signature
        parameters = self._signature.parameters.values()
        self._arity = len(parameters)
        self._floats = tuple(i for i, p in enumerate(parameters) if p.annotation in (float, float | None))
        self._lists = tuple(i for i, p in enumerate(parameters) if p.annotation == list[torch.Tensor])
        self._qualified_op_name = f"kimi::{self.name}"
        _LIBRARY.define(self.name + torch.library.infer_schema(reference, mutates_args=()))
        _LIBRARY.impl(self.name, reference, "CPU")
        self.op = getattr(torch.ops.kimi, self.name).default

    def fake(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: shapes and dtypes of the results."""
        _LIBRARY.impl(self.name, f, "Meta")
        return f

    def lowering(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: how the node becomes GE nodes."""
        self.lower = f
        return f

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != self._arity:
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            args = bound.args
        if self._floats:
            values = list(args)
            for i in self._floats:
                if values[i] is not None:
                    values[i] = as_f32(values[i])
            args = tuple(values)
        asked = args
        for i in self._lists:  # torch looks for overrides among the arguments themselves, not inside lists
            args = (*args[:i], list(args[i]), *args[i + 1 :])
            asked = (*asked, *args[i])
        # the first, quick question finds nobody in eager code; tensors' subclasses need not be asked
        if has_torch_function(asked) and has_torch_function(tuple(v for v in asked if not isinstance(v, torch.Tensor))):
            given = tuple(v for v in asked if hasattr(v, "__torch_function__"))
            return handle_torch_function(self, given, *args)
        first = asked[-1] if self._lists else args[0]
        if self.lower is not None if _capturing.get() else first.is_meta:
            return self.op(*args)  # a node of the graph; or, without values, the fake
        return self.reference(*args)

    def __repr__(self) -> str:
        return f"<operator kimi::{self.name}: {self.sharding}>"


def operator(*, sharding: str, whole: str = "", linear: bool = False) -> Callable[[Callable[..., Any]], Operator]:
    """Decorator: make a reference function an operator.

    Args:
        sharding: `"b h k, b h k -> b h"`, one group per tensor argument (a list of tensors has one), then per result.
        whole: letters that may not be sharded.
        linear: whether it is linear in its first argument.
    """

    def register(reference: Callable[..., Any]) -> Operator:
        made = Operator(reference, sharding, whole, linear)
        OPERATORS[made.name] = made
        return made

    return register


def empty_like(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`torch.empty_like`, dimensions in the same order; torch asks a Python reference, which imports sympy for it."""
    if 0 in x.stride():
        return torch.empty_like(x, dtype=dtype)
    order = sorted(range(x.ndim), key=lambda i: -x.stride(i))
    made = x.new_empty([x.shape[i] for i in order], dtype=dtype or x.dtype)
    return made.permute([order.index(i) for i in range(x.ndim)])


def at_least_f32(x: torch.Tensor) -> torch.Tensor:
    """float32, but float64 stays float64: the accumulation dtype of a reference."""
    return x.float() if x.dtype.itemsize < 4 else x


BLOCK_BYTES = 1 << 20  # of a float32 temporary: stays in a core's cache, and the allocator gives it again at once


ON_GPU = 256  # times as much: no cache holds it, and a kernel has to be worth its launch


def at_once(size: int, x: torch.Tensor) -> int:
    """Bytes of temporaries worked on together: `size` of a CPU, whose cache they stay in."""
    return size if x.device.type == "cpu" else size * ON_GPU


def by_rows(f: Callable[..., torch.Tensor], *values: torch.Tensor, dims: int = 1, width: int = 0) -> torch.Tensor:
    """`f(*values)`, some rows at a time, for an `f` that treats rows (all dimensions but the last `dims`) alone.

    Fresh memory costs a page fault a page, often more than the elementwise work on it: large temporaries are not made.

    Args:
        width: elements of a temporary's row; by default those of the first value's.
    """
    x = values[0]
    if 4 * x.numel() * max(1, width) <= 2 * BLOCK_BYTES or x.device.type != "cpu" or _capturing.get():
        return f(*values)
    lead, width = x.shape[:-dims], width or x.shape[-dims:].numel()
    blocks = (v.flatten(0, len(lead) - 1).split(max(1, BLOCK_BYTES // (4 * width))) for v in values)
    return torch.cat([f(*block) for block in zip(*blocks, strict=True)]).unflatten(0, lead)
