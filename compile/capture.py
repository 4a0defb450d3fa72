"""Capture: a layer function and a tree of meta tensors become an FX graph with named inputs and outputs.

Operators stay single nodes, `torch.einsum` stays whole, and every node remembers the source line that made it.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback as traceback
import torch.utils._pytree as pytree
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from kimi_graph import tree
from kimi_graph.ops import capturing
from kimi_graph.ops.einsum import EINSUM

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_HERE = os.path.abspath(__file__)


@dataclass(frozen=True)
class Captured:
    """An FX graph of one piece.

    Attributes:
        module: ATen and `kimi::` calls on static shapes; node.meta: `val` (meta tensor), `source` (file:line).
        inputs: dotted names in placeholder order. outputs: dotted names in order.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class _KeepWhole(TorchFunctionMode):
    """`torch.einsum` becomes one node; every call is annotated with the line of layer code that made it."""

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with traceback.annotate({"source": _caller()}):
            if f is torch.einsum:
                return EINSUM(args[0], list(args[1:]))
            return f(*args, **(kwargs or {}))


def _caller() -> str:
    """`layers/kda.py:112` of the innermost frame that belongs to this project."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_ROOT) and name != _HERE and not name.endswith(("ops/base.py", "ops/contract.py")):
            return f"{os.path.relpath(name, _ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def capture(f: Callable[..., Any], args: dict[str, Any]) -> Captured:
    """Trace `f(**args)` on meta tensors.

    Args:
        f: returns a dict of trees of tensors; their dotted names are the output names.
        args: trees of meta tensors by argument name.
    """
    leaves, spec = pytree.tree_flatten(args)
    flat = [_plain(x) for x in leaves]  # tracing tells inputs apart by identity: no two may be one object
    names = tuple(name for name, _ in tree.items(args))
    outputs: list[str] = []

    def run(*values: torch.Tensor) -> list[torch.Tensor]:
        with _KeepWhole():
            out = f(**pytree.tree_unflatten(list(values), spec))
        outputs[:] = [name for name, _ in tree.items(out)]
        return tree.leaves(out)

    with capturing(), traceback.preserve_node_meta(), torch.no_grad():
        module = make_fx(run)(*flat)
    for node in module.graph.nodes:
        node.meta["source"] = (node.meta.get("custom") or {}).get("source", "")
        node.meta["val"] = pytree.tree_map_only(torch.Tensor, _plain, node.meta.get("val"))
    module.graph.eliminate_dead_code()
    return Captured(module, names, tuple(outputs))


def _plain(x: torch.Tensor) -> torch.Tensor:
    """A meta tensor without strides of its own, as GE knows tensors."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta")
