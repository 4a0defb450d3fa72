"""Operators of ours that have a kernel, run by it: on the CPU twin, in place of their semantics, in native runs."""

import contextlib
import contextvars
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kimi_graph.errors import KernelError
from kimi_graph.ops.kernel_project import type_of
from kimi_graph.ops.twin import Kernel, kernels

if TYPE_CHECKING:
    from .node import Op

ARCH = {"a2": 2201, "a3": 2201, "950": 3510}  # of a family of chips
_ON: contextvars.ContextVar["Kernels | None"] = contextvars.ContextVar("kernels", default=None)


class Kernels:
    """Kernels of one chip.

    Args:
        arch: 2201 (A2, A3) or 3510 (950). cache: folder of built libraries.

    Attributes:
        ran: how many nodes of each type ran on the twin.
    """

    def __init__(self, arch: int, cache: Path) -> None:
        self.arch, self._cache = arch, cache
        self._names = {type_of(name): name for name in kernels()}
        self._kernels: dict[str, Kernel] = {}
        self.ran: Counter[str] = Counter()

    def serve(self, op: "Op", arguments: Mapping[str, Any]) -> bool:
        """Whether a node is run by its kernel: one of ours, in its own dtypes, with values."""
        if op.exact or op.node.type not in self._names:
            return False
        given = [x for v in arguments.values() for x in (v if isinstance(v, list) else [v]) if x is not None]
        return not any(x.is_meta for x in given)

    def run(self, op: "Op", arguments: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """The node's outputs; those that are written in place are the tensors that were given."""
        kernel = self._kernel(op.node.type)
        inputs = {name: _contiguous(given) for name, given in arguments.items()}
        written = [p.name for p in kernel.definition.outputs if p.name in arguments]
        try:
            run = kernel.run(inputs, op.all_attrs(), arch=self.arch, nobody=dict.fromkeys(written, 1))
        except KernelError as error:
            op.fail(str(error))
        for name in written:
            run.outputs[name] = arguments[name].copy_(run.outputs[name])
        self.ran[op.node.type] += 1
        return tuple(run.outputs[p.name] for p in kernel.definition.outputs)

    def _kernel(self, type: str) -> Kernel:  # noqa: A002
        if type not in self._kernels:
            self._kernels[type] = Kernel(self._names[type], self._cache)
        return self._kernels[type]

    def __str__(self) -> str:
        ran = ", ".join(f"{count} {name}" for name, count in sorted(self.ran.items()))
        return f"nodes run by their kernels on the twin ({self.arch}): {ran or 'none'}"


def _contiguous(given: Any) -> Any:
    if isinstance(given, list):
        return [x.contiguous() for x in given]
    return None if given is None else given.contiguous()


@contextlib.contextmanager
def kernels_on_twin(arch: int, cache: Path) -> Iterator[Kernels]:
    """Inside, native runs take the kernels of ours in place of their semantics."""
    made = Kernels(arch, cache)
    token = _ON.set(made)
    try:
        yield made
    finally:
        _ON.reset(token)


def running() -> Kernels | None:
    """The kernels that native runs are to take, if any."""
    return _ON.get()
