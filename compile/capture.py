"""Capture: a layer function and a tree of meta tensors become an FX graph with named inputs and outputs.

Operators stay single nodes, `torch.einsum` stays whole, and every node remembers the source line that made it.

The recorder is our own: with static shapes and meta tensors there is nothing to do but to write down the calls that
reach the dispatcher. `make_fx` writes down the same ones, but is made for symbolic shapes and takes four times as long.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kimi_graph import tree
from kimi_graph.ops import capturing
from kimi_graph.ops.base import empty_like
from kimi_graph.ops.einsum import EINSUM
from kimi_graph.parallel.source import author_line
from kimi_graph.parallel.value import Value


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


def capture(f: Callable[..., Any], args: dict[str, Any]) -> Captured:
    """Trace `f(**args)` on meta tensors.

    Args:
        f: returns a dict of trees of tensors; their dotted names are the output names.
        args: trees of meta tensors by argument name.
    """
    leaves, spec = pytree.tree_flatten(args)
    flat = [_plain(x) for x in leaves]  # tracing tells inputs apart by identity: no two may be one object
    names = tuple(name for name, _ in tree.items(args))
    recorder = _Recorder()
    values = [recorder.input(x) for x in flat]
    with capturing(), torch.no_grad(), recorder, _EinsumWhole():
        out = f(**pytree.tree_unflatten(values, spec))
    return Captured(recorder.finish(tree.leaves(out)), names, tuple(name for name, _ in tree.items(out)))


class _EinsumWhole(TorchFunctionMode):
    """`torch.einsum` becomes one node; that of values on a mesh too, once they come down to local tensors."""

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = next((t for t in types if issubclass(t, Value)), None)
        if value is not None:
            with self:  # torch takes a mode off while it is asked
                return value.__torch_function__(f, types, args, kwargs)
        if f is torch.einsum:
            return EINSUM(args[0], list(args[1:]))
        return f(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Every call that reaches the dispatcher becomes a node."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.constants = fx.Graph(), torch.nn.Module()
        self.nodes: dict[int, fx.Node] = {}
        self.kept: list[Tensor] = []  # what an id stands for must live as long as the id is used

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks: by default it puts Dynamo, a second to import, around every call that a mode sees."""
        return False

    def input(self, like: Tensor) -> Tensor:
        """A new input of the graph; a tensor of its own, also where one tensor is given twice."""
        value = _plain(like)
        self._note(value, self.graph.placeholder(f"arg{len(self.kept)}_1"), "")
        return value

    def finish(self, outputs: list[Tensor]) -> fx.GraphModule:
        """The graph, without calls that no output needs."""
        self.graph.output(tuple(self._node(x) for x in outputs)).meta = {"val": None, "source": ""}
        self.graph.eliminate_dead_code()
        return _LazyGraphModule(self.constants, self.graph)  # few graphs are run: nobody needs code of the others

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = _called(f, args, kwargs or {})
        if f is torch.ops.aten.detach.default:  # torch's own, around what factories make
            self.nodes[id(made)] = self._node(args[0])
            self.kept.append(made)
            return made
        given = map_aggregate((args, kwargs or {}), lambda x: self._node(x) if isinstance(x, Tensor) else x)
        self._note(made, self.graph.call_function(f, *given), author_line())
        return made

    def _note(self, made: Any, node: fx.Node, source: str) -> Any:
        """Remember what a node gives; the parts of a tuple get nodes of their own. Returns its `val`."""
        if isinstance(made, Tensor):
            self.nodes[id(made)] = node
            self.kept.append(made)
            val: Any = _plain(made)
        elif isinstance(made, (list, tuple)):
            parts = (self.graph.call_function(operator.getitem, (node, i)) for i in range(len(made)))
            val = [self._note(x, part, source) for x, part in zip(made, parts, strict=True)]
        else:
            val = made
        node.meta = {"val": val, "source": source}
        return val

    def _node(self, x: Tensor) -> fx.Node:
        """The node that made a tensor; a tensor from outside becomes a constant of the graph."""
        if id(x) not in self.nodes:
            name = f"constant_{len(self.kept)}"
            self.constants.register_buffer(name, x)
            self._note(x, self.graph.create_node("get_attr", name), "")
        return self.nodes[id(x)]


aten = torch.ops.aten
CAT, FLOOR = aten.cat.default, aten.floor_divide.default
TAKEN: dict[Any, Callable[..., tuple[int, ...]]] = {  # shape of what is taken of the first argument
    aten.embedding.default: lambda x, at, *rest: (*at.shape, x.shape[1]),
    aten.gather.default: lambda x, dim, at, *rest: tuple(at.shape),
}


def _called(f: Any, args: Any, kwargs: Any) -> Any:
    """What a call gives. Shape and dtype of pointwise calls, concatenations and look-ups are found here.

    torch would ask its Python references for them, which import Dynamo and sympy: longer than tracing a whole model.
    """
    if f in TAKEN and args[0].is_meta:
        return args[0].new_empty(TAKEN[f](*args))
    if f is aten.arange.default and isinstance(args[0], int) and kwargs.get("device") == torch.device("meta"):
        return torch.empty((args[0],), dtype=kwargs.get("dtype") or torch.int64, device="meta")
    given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    known = (torch.Tag.pointwise in f.tags or f in (CAT, FLOOR)) and not f._schema.is_mutable
    shape = _shape(f, given, *args[1:]) if known and any(x.is_meta for x in given) else None
    if shape is None:
        return f(*args, **kwargs)
    # Without elements, on the CPU, the operator itself says the dtype.
    empty = pytree.tree_map_only(Tensor, lambda x: torch.ones((0,) * x.ndim, dtype=x.dtype), (args, kwargs))
    dtype = f(*empty[0], **empty[1]).dtype
    like = next((x for x in given if x.is_meta and x.shape == shape), None)
    if like is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    order = kwargs.get("memory_format") or torch.preserve_format  # of its dimensions: kept, unless told
    if order is torch.preserve_format:
        return empty_like(like, dtype)
    return torch.empty_like(like, dtype=dtype, memory_format=order)


def _shape(f: Any, given: list[Tensor], *rest: Any) -> torch.Size | None:
    """Shape of what a call gives; None where torch should find it, or say what is wrong."""
    if f is not CAT:
        return _broadcast([x.shape for x in given])
    dim = (rest[0] if rest else 0) % max(1, given[0].ndim)
    others = {(*x.shape[:dim], *x.shape[dim + 1 :]) for x in given}
    if len(others) != 1 or not given[0].ndim:
        return None
    return torch.Size((*given[0].shape[:dim], sum(x.shape[dim] for x in given), *given[0].shape[dim + 1 :]))


def _broadcast(shapes: list[torch.Size]) -> torch.Size | None:
    """The shape that all are broadcast to; None where they cannot be. torch's own imports sympy: half a second."""
    longest = max(map(len, shapes))
    columns = zip(*((*(1,) * (longest - len(s)), *s) for s in shapes), strict=True)
    sizes = [{n for n in column if n != 1} or {1} for column in columns]
    return torch.Size(n for (n,) in sizes) if all(len(n) == 1 for n in sizes) else None


def _plain(x: Tensor) -> Tensor:
    """A meta tensor without strides of its own, as GE knows tensors."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta")
