"""Where a tensor lies: the mesh axes of each dim, what one rank holds of it, and which ranks hold the same."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kimi_graph import tree
from kimi_graph.errors import ShardingError
from kimi_graph.spec import ParamSpec

from .mesh import Axes, Mesh
from .rules import Padding, Rules


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A tensor on a mesh.

    Attributes:
        path: its name.
        axes: logical axis of each dim.
        given: shape of the whole tensor.
        shape: the same, padded where an axis is.
        dims: mesh axes that split each dim, the first of them outermost.
        dtype: of its elements.
        mesh: of the ranks that hold it (of one stage, where there are stages).
    """

    path: str
    axes: tuple[str, ...]
    given: tuple[int, ...]
    shape: tuple[int, ...]
    dims: tuple[Axes, ...]
    dtype: torch.dtype
    mesh: Mesh

    @property
    def local(self) -> tuple[int, ...]:
        """Shape of what a rank holds."""
        return tuple(size // self.mesh.size(axes) for size, axes in zip(self.shape, self.dims, strict=True))

    @property
    def bytes(self) -> int:
        """Of what a rank holds."""
        return math.prod(self.local) * self.dtype.itemsize

    @property
    def used(self) -> Axes:
        """All mesh axes that split it."""
        return tuple(axis for axes in self.dims for axis in axes)

    @property
    def whole_over(self) -> Axes:
        """Mesh axes, larger than one, along which every rank holds the same."""
        return tuple(a for a, size in self.mesh.axes.items() if size > 1 and a != "pipe" and a not in self.used)

    @property
    def replicas(self) -> int:
        """Ranks of a stage that hold the same part."""
        return self.mesh.size(self.whole_over)

    def holders(self, rank: int) -> list[int]:
        """Ranks that hold the same part as `rank`, itself included."""
        return next(group for group in self.mesh.groups(self.whole_over) if rank in group)

    def own(self, dim: int, rank: int) -> range:
        """The indices of a dim that a rank holds: the vocabulary it looks up, the experts it has."""
        size = self.local[dim]
        first = self.mesh.index(rank, self.dims[dim]) * size
        return range(first, first + size)

    def where(self, dim: int, index: int) -> list[int]:
        """The ranks that hold an index of a dim: those that have expert 17."""
        return [rank for rank in range(self.mesh.world) if index in self.own(dim, rank)]

    def __str__(self) -> str:
        """`[896@tensor, 2, 3072, 3584]`."""
        parts = (
            "@".join((str(n), *filter(None, ["*".join(axes)]))) for n, axes in zip(self.shape, self.dims, strict=True)
        )
        return f"[{', '.join(parts)}]"


def place(path: str, spec: ParamSpec, rules: Rules, dtype: torch.dtype, padding: Padding | None = None) -> Placement:
    """The placement of a parameter or state by its logical axes.

    Args:
        dtype: of a spec that does not fix its own.
        padding: physical sizes, beside those of the rules.

    Raises:
        ShardingError: a size that does not divide, an axis without a rule, a mesh axis that would split two dims.
    """
    rules = rules.padded(padding) if padding else rules
    shape = tuple(rules.physical(name, size) for name, size in zip(spec.axes, spec.shape, strict=True))
    dims = tuple(map(rules.on, spec.axes))
    seen: dict[str, str] = {}
    for name, size, axes in zip(spec.axes, shape, dims, strict=True):
        if size % rules.mesh.size(axes):
            ways = f"{' x '.join(axes)} = {rules.mesh.size(axes)}"
            raise ShardingError(f"{path}: axis {name!r} has size {size:,}, not divisible by {ways}.")
        for axis in axes:
            if axis in seen:
                raise ShardingError(f"{path}: mesh axis {axis!r} would split both {seen[axis]!r} and {name!r}.")
            seen[axis] = name
    return Placement(
        path=path,
        axes=spec.axes,
        given=spec.shape,
        shape=shape,
        dims=dims,
        dtype=spec.dtype or dtype,
        mesh=rules.mesh,
    )


def place_tree(specs: Any, rules: Rules, dtype: torch.dtype, padding: Padding | None = None, prefix: str = "") -> Any:
    """`place` of every spec of a tree.

    Raises:
        ShardingError: the first that `place` refuses; `legality.faults` finds all faults at once.
    """
    return tree.map_with_path(lambda path, spec: place(prefix + path, spec, rules, dtype, padding), specs)


def shard(x: Tensor, placement: Placement, rank: int) -> Tensor:
    """What a rank holds of `x`: its own part, padded with zeros where the placement is.

    Raises:
        ShardingError: `x` has another shape.
    """
    if tuple(x.shape) != placement.given:
        raise ShardingError(f"{placement.path}: found shape {list(x.shape)}, expected {list(placement.given)}.")
    x = with_zeros(x, placement.shape)
    for dim in range(x.ndim):
        own = placement.own(dim, rank)
        x = x.narrow(dim, own.start, len(own))
    return x.contiguous()


def with_zeros(x: Tensor, shape: Sequence[int]) -> Tensor:
    """`x` with zeros after it in every dimension that is longer in `shape`."""
    for dim, (size, padded) in enumerate(zip(x.shape, shape, strict=True)):
        if padded > size:
            x = torch.cat([x, x.new_zeros(*x.shape[:dim], padded - size, *x.shape[dim + 1 :])], dim)
    return x


def unshard(parts: Sequence[Tensor], placement: Placement, *, tolerance: float = 0.0) -> Tensor:
    """The whole tensor from what every rank of the mesh holds, rank 0 first; padding is cut off.

    Args:
        tolerance: largest difference between ranks that hold the same part, absolute.

    Raises:
        ShardingError: a rank is missing, a shape is another, or ranks that should hold the same do not.
    """
    mesh = placement.mesh
    if len(parts) != mesh.world:
        raise ShardingError(f"{placement.path}: found {len(parts)} parts, expected one per rank: {mesh.world}.")
    whole = parts[0].new_empty(placement.shape)
    first: dict[tuple[int, ...], int] = {}
    for rank, part in enumerate(parts):
        if tuple(part.shape) != placement.local:
            raise ShardingError(
                f"{placement.path}: rank {rank} has shape {list(part.shape)}, expected {list(placement.local)}."
            )
        where = [placement.own(dim, rank) for dim in range(part.ndim)]
        view = whole[tuple(slice(own.start, own.stop) for own in where)]
        owner = first.setdefault(tuple(own.start for own in where), rank)
        if owner == rank:
            view.copy_(part)
        elif not _same(view, part, tolerance):
            raise ShardingError(
                f"{placement.path}: ranks {owner} and {rank} should hold the same part but differ by "
                f"{float((view.double() - part.double()).abs().max()):.2e}, allowed {tolerance:.0e}."
            )
    return whole[tuple(slice(size) for size in placement.given)]


def _same(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return torch.equal(a, b) if tolerance == 0 else bool(((a - b).abs() <= tolerance).all())
