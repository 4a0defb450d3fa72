"""Every rule, every placement of its operands: what is accepted is exact, everything else is refused.

A case is a function of a few tensors, a mesh of two axes, and for each operand what each axis does to it: splits one of
its dimensions, leaves it whole, or leaves a summand on each rank. It is traced once, run for all ranks in lockstep and
compared with the function on whole tensors.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from kimi_graph.compile.capture import capture
from kimi_graph.errors import ShardingError
from kimi_graph.parallel import Mesh, Rules
from kimi_graph.parallel.mesh import Axes
from kimi_graph.parallel.simulate import difference, gather, scatter, simulate
from kimi_graph.parallel.value import Sharded, replicated

# Why a placement may be refused; anything else is a fault of a rule, not a placement without a meaning.
REASONS = re.compile("is split over|uses a mesh axis twice|not divisible by|may not be merged")
ROUNDING = 1e-11  # float64; summands of the inputs are some times as large as their sum
RULES = {"first": ("data",), "last": ("tensor",), "both": ("data", "tensor"), "turned": ("tensor", "data")}


@dataclass(frozen=True)
class Place:
    """Where an operand is: mesh axes of each dimension, and those of a pending sum."""

    dims: tuple[Axes, ...]
    partial: Axes = ()

    @property
    def used(self) -> bool:
        return any(self.dims) or bool(self.partial)


def places(mesh: Mesh, x: Tensor) -> list[Place]:
    """Every placement of a tensor that divides."""
    axes = ("data", "tensor")
    found = []
    for where in itertools.product([*range(x.ndim), "whole", "partial"], repeat=2):
        dims = [tuple(a for a, at in zip(axes, where, strict=True) if at == d) for d in range(x.ndim)]
        partial = tuple(a for a, at in zip(axes, where, strict=True) if at == "partial")
        turns = [dims] + [[split[::-1] for split in dims]] * any(len(split) > 1 for split in dims)
        for turned in turns:
            divides = all(n % mesh.size(split) == 0 for n, split in zip(x.shape, turned, strict=True))
            if divides and (x.is_floating_point() or not partial):
                found.append(Place(tuple(turned), partial))
    return found


def tensors(args: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]


def run(f: Callable[..., Any], mesh: Mesh, args: Sequence[Any], at: Sequence[Place]) -> float | None:
    """Largest difference of the placed function, of the largest value; None where it was refused."""
    given = dict(enumerate(tensors(args)))
    rules = Rules(mesh, RULES)

    def on_mesh(local: dict[str, Tensor]) -> dict[str, Any]:
        left = iter(zip(local.values(), at, strict=True))
        values = pytree.tree_map_only(Tensor, lambda _: _sharded(rules, *next(left)), tuple(args))
        return {"out": [_whole(rules, y) for y in _results(f(*values))]}

    parts = [scatter(mesh, x, p.dims, p.partial) for x, p in zip(given.values(), at, strict=True)]
    try:
        captured = capture(on_mesh, {"local": {str(i): x[0].to("meta") for i, x in enumerate(parts)}})
    except ShardingError as error:
        if not REASONS.search(str(error)):
            raise
        return None
    want = _results(f(*args))
    got = simulate(captured.module, mesh, parts)
    assert len(got) == len(want)
    assert all(y[0].shape == w.shape and y[0].dtype == w.dtype for y, w in zip(got, want, strict=True))
    whole = [gather(mesh, y, [()] * y[0].ndim, rounding=ROUNDING) for y in got]
    return max(difference(y, w) for y, w in zip(whole, want, strict=True))


def _sharded(rules: Rules, x: Tensor, place: Place) -> Sharded:
    return Sharded(rules, x, place.dims, place.partial)


def _results(y: Any) -> list[Any]:
    return list(y) if isinstance(y, (tuple, list)) else [y]


def _whole(rules: Rules, y: Sharded | Tensor) -> Tensor:
    value = y if isinstance(y, Sharded) else replicated(rules, y)
    return value.placed([()] * value.ndim).reduced().local


@dataclass
class Count:
    """How the cases of a form ended; `split` are those of `accepted` where something was split or pending."""

    accepted: int = 0
    split: int = 0
    refused: int = 0

    def add(self, error: float | None, at: Sequence[Place]) -> None:
        self.refused += error is None
        self.accepted += error is not None
        self.split += error is not None and any(p.used for p in at)


def every(
    f: Callable[..., Any], mesh: Mesh, args: Sequence[Any], cases: Iterator[Sequence[Place]] | Sequence[Any]
) -> Count:
    """All of some cases. Fails at the first that is neither exact nor refused."""
    count = Count()
    for at in cases:
        error = run(f, mesh, args, at)
        assert error is None or error <= ROUNDING, (error, at)
        count.add(error, at)
    return count
