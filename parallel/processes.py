"""One rank of a mesh in a process of its own: what its collectives are, among the processes of a group.

A `Sharded` value that holds a real tensor computes at once. While a `Member` is at work (`with member.at_work()`), a
collective of it is one of torch.distributed, and what differs by rank is this rank's. So layers run unchanged, by the
rules by which they are compiled: `simulate` runs all ranks of a captured graph, this runs one rank of the layers.

Every process has to run the same calls in the same order; one that does not is waited for.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_graph.errors import ShardingError

from .collectives import Collective, group_axes, running
from .mesh import Mesh

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass(frozen=True)
class Member:
    """One rank among the processes of a group.

    Attributes:
        mesh: its ranks are those of the group, in its order.
        rank: this one.
        group: of torch.distributed; its backend is that of the tensors' device.
        device: of tensors that a collective makes from nothing.
    """

    mesh: Mesh
    rank: int
    group: Any
    device: torch.device

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Inside, collectives of this thread are this rank's."""
        token = running.set(self)
        try:
            yield
        finally:
            running.reset(token)

    def take_part(self, collective: Collective, *args: Any) -> Any:
        """This rank's result of a collective.

        Raises:
            ShardingError: it goes along a part of the mesh: there is one group, of all ranks.
        """
        tensors = [x for x in args if isinstance(x, Tensor)]
        name, *rest = (x for x in args if not isinstance(x, Tensor))
        along = self.mesh.groups(group_axes(name))
        if len(along) > 1 or along[0] != sorted(along[0]):
            raise ShardingError(f"{collective.name} along {name} of the mesh {self.mesh}: only along all of it.")
        if not collective.moves:
            return self._alone(collective, tensors, rest)
        run: Callable[..., Any] = getattr(self, f"_{collective.name}", None) or self._from_all(collective)
        return run(*tensors, *rest)

    def _alone(self, collective: Collective, tensors: list[Tensor], rest: list[Any]) -> Tensor:
        """What needs nothing of the others: an index, or a part of what all have."""
        given = tensors * self.mesh.world or self.mesh.world
        return collective.together(given, *rest)[self.rank].to(self.device)

    def _from_all(self, collective: Collective) -> Callable[..., Any]:
        """A collective that torch.distributed has not: all tensors to everyone, of which each takes its result."""

        def run(*args: Any) -> Any:
            tensors = [x for x in args if isinstance(x, Tensor)]
            parts = zip(*(self._gathered(x).unbind(0) for x in tensors), strict=True)
            return collective.together([*parts], *args[len(tensors) :])[self.rank]

        return run

    # ---- those of torch.distributed, which work along dimension 0 ----

    def _gathered(self, x: Tensor) -> Tensor:
        """`[ranks, ...]`."""
        made = x.new_empty(self.mesh.world, *x.shape)
        dist.all_gather([*made.unbind(0)], x.contiguous(), group=self.group)
        return made

    def _all_reduce(self, x: Tensor, op: str) -> Tensor:
        made = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(made, _OPS[op], group=self.group)
        return made

    def _all_gather(self, x: Tensor, ways: int, dim: int) -> Tensor:
        return torch.cat(self._gathered(x).unbind(0), dim)

    def _reduce_scatter(self, x: Tensor, ways: int, dim: int) -> Tensor:
        parts = [part.contiguous() for part in x.chunk(ways, dim)]
        made = torch.empty_like(parts[0])
        dist.reduce_scatter(made, parts, group=self.group)
        return made

    def _all_to_all(self, x: Tensor, ways: int, split_dim: int, cat_dim: int) -> Tensor:
        parts = torch.stack(x.chunk(ways, split_dim))
        made = torch.empty_like(parts)
        dist.all_to_all_single(made, parts, group=self.group)
        return torch.cat(made.unbind(0), cat_dim)
