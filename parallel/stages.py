"""Pipeline stages: which layers each has, and what crosses from one to the next.

A stage is a range of layers. What crosses a boundary is read off the model's schedule: the values that are written
before it and read after it. So attention residuals need nothing of their own here: the running sum crosses, and with
it every block that is closed by then.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kimi_graph.errors import ShardingError
from kimi_graph.spec import ParamSpec


class Step(Protocol):
    """A part of a model's schedule: the number of its layer, and names of the values it reads and writes."""

    @property
    def layer(self) -> int | None: ...
    @property
    def reads(self) -> tuple[str, ...]: ...
    @property
    def writes(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, kw_only=True)
class Edge:
    """What one stage hands to the next: `values`, a spec of each by its name in the schedule."""

    values: dict[str, ParamSpec]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of all values together."""
        return sum(spec.numel * (spec.dtype or self.dtype).itemsize for spec in self.values.values())


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A range of layers.

    Attributes:
        index: which stage.
        layers: its layers.
        first, last: whether it has the embedding, and the head.
        cost: of its layers and ends, as it was split by.
        edge: what it hands on; None for the last.
    """

    index: int
    layers: range
    first: bool
    last: bool
    cost: int
    edge: Edge | None


def split(costs: Sequence[int], stages: int) -> list[range]:
    """Layers as ranges, so that the dearest range is as cheap as can be; of equal ones the earlier is the longer.

    Raises:
        ShardingError: more stages than layers.
    """
    return list(_split(tuple(costs), stages))


@functools.lru_cache(maxsize=64)
def _split(costs: tuple[int, ...], stages: int) -> tuple[range, ...]:
    count = len(costs)
    if not 1 <= stages <= count:
        raise ShardingError(f"pp={stages}: there are {count} layers, a stage has one or more; nearest {count}.")
    total = [0, *itertools.accumulate(costs)]
    # best[n]: the least possible dearest range, for the layers from n on in the stages that are left.
    best: list[list[float]] = [[math.inf] * count + [0]]
    for _ in range(stages):
        rest = best[-1]
        best.append(
            [min((max(total[m] - total[n], rest[m]) for m in range(n + 1, count + 1)), default=math.inf)
             for n in range(count)] + [math.inf]
        )  # fmt: skip
    ranges, start, limit = [], 0, best[stages][0]
    for left in range(stages - 1, -1, -1):  # each as long as the best allows
        end = max(m for m in range(start + 1, count + 1) if total[m] - total[start] <= limit >= best[left][m])
        ranges.append(range(start, end))
        start = end
    return tuple(ranges)


def stage_of(step: Step, position: int, first_layer: int, ranges: Sequence[range]) -> int:
    """The stage that runs a part of a schedule: that of its layer; what comes before the layers is in the first.

    Args:
        position: of the part in the schedule.
        first_layer: position of the first part that has a layer.
    """
    if step.layer is None:
        return 0 if position < first_layer else len(ranges) - 1
    return next(i for i, layers in enumerate(ranges) if step.layer in layers)


def parts_by_stage(schedule: Sequence[Step], ranges: Sequence[range]) -> list[list[Step]]:
    """The parts of a schedule that each stage runs, in order."""
    first = next(i for i, step in enumerate(schedule) if step.layer is not None)
    parts: list[list[Step]] = [[] for _ in ranges]
    for position, step in enumerate(schedule):
        parts[stage_of(step, position, first, ranges)].append(step)
    return parts


def crossing(parts: Sequence[Sequence[Step]], boundary: int) -> tuple[str, ...]:
    """Values that cross from stage `boundary` to the next: written in it or before, read after it; oldest first."""
    before = [name for stage in parts[: boundary + 1] for step in stage for name in step.writes]
    after = {name for stage in parts[boundary + 1 :] for step in stage for name in step.reads}
    fresh = {name for stage in parts[boundary + 1 :] for name in _read_before_written(stage)}
    return tuple(name for name in dict.fromkeys(before) if name in after & fresh)


def _read_before_written(steps: Sequence[Step]) -> set[str]:
    """Names whose first mention in a stage is a read: a value that is written anew there does not cross for it."""
    written: set[str] = set()
    read: set[str] = set()
    for step in steps:
        read |= set(step.reads) - written
        written |= set(step.writes)
    return read


def make_stages(
    schedule: Sequence[Step],
    costs: Sequence[int],
    stages: int,
    spec_of: Callable[[str], ParamSpec],
    dtype: torch.dtype,
    *,
    ends: tuple[int, int] = (0, 0),
) -> list[Stage]:
    """The stages of a model.

    Args:
        costs: of each layer.
        ends: of what comes before the layers, and after.
        spec_of: what a value of the schedule is.
        dtype: of specs that do not fix their own.

    Raises:
        ShardingError: more stages than layers.
    """
    all_costs = [*costs]
    all_costs[0] += ends[0]
    all_costs[-1] += ends[1]
    ranges = split(all_costs, stages)
    parts = parts_by_stage(schedule, ranges)

    def edge(i: int) -> Edge | None:
        if i == stages - 1:
            return None
        return Edge(values={name: spec_of(name) for name in crossing(parts, i)}, dtype=dtype)

    return [
        Stage(
            index=i,
            layers=layers,
            first=i == 0,
            last=i == stages - 1,
            cost=sum(all_costs[n] for n in layers),
            edge=edge(i),
        )
        for i, layers in enumerate(ranges)
    ]
