"""All ranks of a mesh in one process, in lockstep: a traced graph, which knows no rank, run on real tensors.

Node by node every rank computes before any goes on; a collective sees the tensors of its whole group. So nothing can
wait for ever, and what is left against the unsharded function is the order of sums.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from kimi_graph.errors import ShardingError

from .collectives import COLLECTIVES, Collective, group_axes
from .mesh import Axes, Mesh

Ranks = list[Tensor]  # a tensor for each rank of the mesh


def scatter(mesh: Mesh, x: Tensor, dims: Sequence[Axes], partial: Sequence[str] = ()) -> Ranks:
    """Every rank's part of a global tensor; along `partial` axes, unequal summands of it."""
    return [_summand(mesh, _part(mesh, x, dims, rank), partial, rank) for rank in range(mesh.world)]


def _part(mesh: Mesh, x: Tensor, dims: Sequence[Axes], rank: int) -> Tensor:
    for dim, axes in enumerate(dims):
        if axes:
            size = x.shape[dim] // mesh.size(axes)
            x = x.narrow(dim, mesh.index(rank, axes) * size, size)
    return x.contiguous()


def _summand(mesh: Mesh, x: Tensor, axes: Sequence[str], rank: int) -> Tensor:
    """Unequal shares: along each axis rank i has `i + 2` times the sum, the last one what is left."""
    for axis in axes:
        index, size = mesh.index(rank, (axis,)), mesh.axes[axis]
        x = x * (index + 2 if index < size - 1 else 1 - sum(range(2, size + 1)))
    return x


def gather(mesh: Mesh, parts: Sequence[Tensor], dims: Sequence[Axes], *, rounding: float = 1e-12) -> Tensor:
    """The global tensor of every rank's part.

    Args:
        rounding: how far ranks that should hold the same may differ, of the largest value. Integers may not.

    Raises:
        ShardingError: ranks differ that should hold the same; says which.
    """
    shape = [n * mesh.size(axes) for n, axes in zip(parts[0].shape, dims, strict=True)]
    whole, first = parts[0].new_empty(shape), {}
    for rank, part in enumerate(parts):
        at = tuple(mesh.index(rank, axes) for axes in dims)
        if at in first:
            _check_same(parts[first[at]], part, first[at], rank, rounding)
            continue
        first[at] = rank
        whole[tuple(slice(i * n, (i + 1) * n) for i, n in zip(at, part.shape, strict=True))] = part
    return whole


def _check_same(x: Tensor, y: Tensor, first: int, second: int, rounding: float) -> None:
    error = difference(y, x)
    if not error <= (rounding if x.is_floating_point() else 0):
        raise ShardingError(
            f"ranks {first} and {second} should hold the same {list(x.shape)}, and differ by {error:.1e} of the "
            f"largest value; is a summand missing?"
        )


def difference(x: Tensor, want: Tensor) -> float:
    """Largest difference, of the largest value; infinite where one is not a number and the other is."""
    if not x.numel() or torch.equal(x, want):
        return 0.0
    if x.dtype == torch.bool:
        return 1.0
    same = (x == want) | (x.isnan() & want.isnan()) if x.is_floating_point() else x == want
    off = torch.where(same, 0, x - want).abs().double().max()
    scale = torch.where(want.double().isfinite(), want.double(), 0).abs().max().clamp(min=1e-300)
    return float("inf") if off.isnan() else float(off / scale)


def simulate(module: fx.GraphModule, mesh: Mesh, inputs: Sequence[Sequence[Tensor]]) -> list[Ranks]:
    """Run a graph for all ranks.

    Args:
        module: what capture gives: calls, collectives by mesh axes, `own_slice` and `own_index`.
        inputs: for each placeholder, every rank's tensor.

    Returns:
        for each output, every rank's tensor.
    """
    values: dict[fx.Node, Any] = {}
    given, left = iter(inputs), _last_uses(module.graph)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = list(next(given))
        elif node.op == "get_attr":
            values[node] = [operator.attrgetter(node.target)(module)] * mesh.world
        elif node.op == "output":
            return [values[x] for x in node.args[0]]
        elif node.target in COLLECTIVES:
            values[node] = _together(COLLECTIVES[node.target], mesh, node, values)
        else:
            values[node] = [_run(node, values, rank) for rank in range(mesh.world)]
        for name in left.get(node, ()):
            del values[name]
    raise AssertionError("a graph without output")


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """What nobody reads after each node."""
    last = {read: node for node in graph.nodes for read in node.all_input_nodes}
    found: dict[fx.Node, list[fx.Node]] = {}
    for read, node in last.items():
        if node.op != "output":
            found.setdefault(node, []).append(read)
    return found


def _run(node: fx.Node, values: dict[fx.Node, Any], rank: int) -> Any:
    args, kwargs = pytree.tree_map_only(fx.Node, lambda x: values[x][rank], (node.args, node.kwargs))
    if "device" in kwargs:  # of a factory that was traced on meta tensors
        kwargs = {**kwargs, "device": "cpu"}
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _together(collective: Collective, mesh: Mesh, node: fx.Node, values: dict[fx.Node, Any]) -> Ranks:
    """One collective, group by group."""
    tensors = [x for x in node.args if isinstance(x, fx.Node)]
    name, *rest = (x for x in node.args if not isinstance(x, fx.Node))
    results: dict[int, Any] = {}
    for group in mesh.groups(group_axes(str(name))):
        parts = [tuple(values[x][rank] for x in tensors) for rank in group]
        given = len(group) if not tensors else [p[0] for p in parts] if len(tensors) == 1 else parts
        results.update(zip(group, collective.together(given, *rest), strict=True))
    return [results[rank] for rank in range(mesh.world)]
