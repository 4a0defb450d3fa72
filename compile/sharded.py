"""Capture on a mesh: one FX graph for all ranks, of local shapes, with collectives named by mesh axes.

`check` is the test of a layer and its rules: the graph, run for all ranks in lockstep, equals the unsharded function.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kimi_graph import tree
from kimi_graph.errors import ShardingError
from kimi_graph.parallel import Rules
from kimi_graph.parallel.collectives import Issued, issued
from kimi_graph.parallel.mesh import Axes
from kimi_graph.parallel.placement import with_zeros
from kimi_graph.parallel.simulate import difference, gather, scatter, simulate
from kimi_graph.parallel.value import Sharded, replicated
from kimi_graph.spec import ParamSpec

from .capture import Captured, capture

EXACT = 1e-12  # float64, sums in another order


@dataclass(frozen=True)
class ShardedCapture:
    """A captured piece of all ranks.

    Attributes:
        captured: its graph, of local shapes.
        rules: what it was captured with.
        ins: where each input lies, outs: mesh axes of each dimension, by dotted name in the order of the graph.
    """

    captured: Captured
    rules: Rules
    ins: dict[str, "_Placed"]
    outs: dict[str, tuple[Axes, ...]]

    @property
    def collectives(self) -> list[Issued]:
        """Collectives of the graph in order, by mesh axes."""
        return issued(self.captured.module.graph)


def capture_on(
    rules: Rules, f: Callable[..., Any], args: dict[str, Any], axes: dict[str, Any], out_axes: Any
) -> ShardedCapture:
    """Trace `f(**args)` once for all ranks.

    Args:
        f: returns a dict of trees of values, see `capture.capture`.
        args: trees of meta tensors of global shape, by argument name.
        axes: the same trees of logical axes: a `ParamSpec`, or a text with one word per dimension ("batch _ embed").
        out_axes: the tree of the results' logical axes, to which they are moved at the end.

    Raises:
        ShardingError: a size that does not divide, or a step that the strict values refuse; with the author's line.
    """
    placed = tree.map_with_path(lambda name, x, a: _placed(rules, name, x, _text(a)), args, axes)
    ins = dict(tree.items(placed))
    outs = {name: dims_of(rules, _text(a)) for name, a in tree.items(out_axes)}

    def on_mesh(**local: Any) -> dict[str, Any]:
        out = f(**tree.map(lambda x, p: Sharded(rules, x, p.dims), local, placed))
        return tree.map(lambda x, a: _finished(rules, x, dims_of(rules, _text(a))), out, out_axes)

    captured = capture(on_mesh, tree.map(lambda x, p: _local(rules, x, p), args, placed))
    return ShardedCapture(captured, rules, ins, {name: outs[name] for name in captured.outputs})


@dataclass(frozen=True)
class _Placed:
    """A leaf of a tree: mesh axes of each dimension, and its shape on the mesh, padded where an axis is."""

    dims: tuple[Axes, ...]
    shape: tuple[int, ...]


def dims_of(rules: Rules, axes: str) -> tuple[Axes, ...]:
    """Mesh axes of each dimension, by a text of logical axes."""
    return tuple(rules.on(name) for name in axes.split())


def _text(axes: Any) -> str:
    return " ".join(axes.axes) if isinstance(axes, ParamSpec) else axes


def _placed(rules: Rules, name: str, x: Tensor, axes: str) -> _Placed:
    """Where an input lies; refused where it does not divide."""
    dims = dims_of(rules, axes)
    if len(dims) != x.ndim:
        raise ShardingError(f"{name}: {len(dims)} axes {axes!r} for the {x.ndim} dimensions {list(x.shape)}.")
    shape = tuple(rules.physical(axis, size) for axis, size in zip(axes.split(), x.shape, strict=True))
    for axis, size, split in zip(axes.split(), shape, dims, strict=True):
        if size % rules.mesh.size(split):
            ways = f"{' x '.join(split)} = {rules.mesh.size(split)}"
            raise ShardingError(f"{name}: axis {axis!r} has size {size}, not divisible by {ways}.")
    return _Placed(dims, shape)


def _local(rules: Rules, x: Tensor, placed: _Placed) -> Tensor:
    shape = [n // rules.mesh.size(axes) for n, axes in zip(placed.shape, placed.dims, strict=True)]
    return torch.empty(shape, dtype=x.dtype, device="meta")


def _finished(rules: Rules, x: Sharded | Tensor, dims: tuple[Axes, ...]) -> Tensor:
    """The local tensor of a result where it was asked for."""
    value = x if isinstance(x, Sharded) else replicated(rules, x)
    return value.placed(dims).reduced().local


# ---- proof -----------------------------------------------------------------------------------------------------------


def run(piece: ShardedCapture, values: dict[str, Any]) -> dict[str, Tensor]:
    """All ranks of a piece in lockstep on global tensors, and the global results by name; replicas have to agree.

    What is padded on the mesh is given without its padding, and comes with it.
    """
    mesh = piece.rules.mesh
    given = dict(tree.items(values))
    inputs = [scatter(mesh, with_zeros(given[name], p.shape), p.dims) for name, p in piece.ins.items()]
    parts = simulate(piece.captured.module, mesh, inputs)
    return {name: gather(mesh, part, dims) for (name, dims), part in zip(piece.outs.items(), parts, strict=True)}


def check(
    rules: Rules,
    f: Callable[..., Any],
    values: dict[str, Any],
    axes: dict[str, Any],
    out_axes: Any,
    *,
    unsharded: dict[str, Any] | None = None,
    compared: Callable[[str, Tensor], Tensor] = lambda name, x: x,
    tolerance: float = EXACT,
) -> ShardedCapture:
    """Capture a function on a mesh, run all ranks, and compare every result with the function itself.

    Args:
        values: trees of global tensors (float64). axes, out_axes: see `capture_on`.
        unsharded: what the function itself gets where that is not the same: ids of slots and pages count within a
            device's part on a mesh, through all of them without one.
        compared: what of a result, by its name, has to be the same; all of it, unless told.
        tolerance: of the largest value.

    Raises:
        ShardingError: a result differs.
    """
    piece = capture_on(rules, f, tree.map(lambda x: x.to("meta"), values), axes, out_axes)
    want = dict(tree.items(f(**(values if unsharded is None else unsharded))))
    for name, made in run(piece, values).items():
        got = made[tuple(map(slice, want[name].shape))] if rules.padding else made
        if got.shape != want[name].shape or got.dtype != want[name].dtype:
            found, expected = (f"{x.dtype} {list(x.shape)}" for x in (got, want[name]))
            raise ShardingError(f"{name}: {found} on the mesh {rules.mesh}, {expected} without.")
        error = difference(compared(name, got), compared(name, want[name]))
        if not error <= tolerance:
            raise ShardingError(f"{name}: on the mesh {rules.mesh} it differs by {error:.1e} of the largest value.")
    return piece
