"""The mesh: named directions of devices, outermost first. A value: it prints, compares, and needs no device.

    mesh = Mesh.parse("pp=4,dp=4,tp=8,ep=16")
    mesh.axes  # {"pipe": 4, "data_outer": 2, "data_inner": 2, "context": 1, "tensor": 8}

A rank counts through the axes, the last one fastest: neighbours along `tensor` are neighbours in the machine, `pipe`
crosses the longest way. Expert parallelism is no axis but a rule: `ep=N` puts experts on the innermost N of
data x tensor and copies them over the rest. Where that takes a part of an axis only, the axis is two atomic ones,
`data_outer` and `data_inner` say, whose product it is.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kimi_graph.display import COLOURS, Html, card, strip, table
from kimi_graph.errors import ShardingError

FLAGS = {"pp": "pipe", "dp": "data", "cp": "context", "tp": "tensor", "ep": "experts"}
NAMES = ("pipe", "data", "context", "tensor")  # outermost first

MAX_RANKS = 2**20  # a hundred times the largest machine; lists of ranks stay short

Axes = tuple[str, ...]


def divisors(n: int) -> list[int]:
    """All of them, smallest first."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def nearest(value: int, legal: Iterable[int]) -> int:
    """The legal value closest to one that is not; the smaller of two that are equally close."""
    return min(legal, key=lambda n: (abs(n - value), n))


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the four directions, and how far experts are split.

    Attributes:
        pipe: pipeline stages.
        data: copies of the model that share out the rows of a batch.
        context: ranks that share out the tokens of a sequence.
        tensor: ranks that share out heads and widths.
        experts: groups of experts, on the inner part of data x tensor; 0: all of it. That is the default because
            experts are nearly all of a model's bytes (96 % of K3's), and a smaller number keeps copies of them.

    Raises:
        ShardingError: a size below 1, more than `MAX_RANKS`, or experts that are no inner part.
    """

    pipe: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1
    experts: int = 0

    def __post_init__(self) -> None:
        for flag, name in list(FLAGS.items())[:4]:
            if getattr(self, name) < 1:
                raise ShardingError(f"mesh: {flag}={getattr(self, name)}, expected 1 or more.")
        if self.world > MAX_RANKS:
            raise ShardingError(f"mesh: {self.world:,} ranks, at most {MAX_RANKS:,}.")
        if self.experts == 0:
            object.__setattr__(self, "experts", self.data * self.tensor)
        if self.experts not in self.expert_sizes:
            raise ShardingError(
                f"mesh: ep={self.experts} is no inner part of data x tensor = {self.data} x {self.tensor}: experts go "
                f"first over tensor, then over data. Legal: {', '.join(map(str, self.expert_sizes))}; nearest "
                f"{nearest(self.experts, self.expert_sizes)}."
            )

    @staticmethod
    def parse(text: str) -> "Mesh":
        """The mesh of `pp=4,dp=2,tp=8,ep=16`: any order, what is missing is 1 (`ep`: data x tensor).

        Raises:
            ShardingError: an axis that is not known or given twice, a size that is not a positive number.
        """
        if not isinstance(text, str):
            raise ShardingError(f"mesh: found {type(text).__name__}, expected a text such as pp=4,dp=2,tp=8.")
        sizes: dict[str, int] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            key, found, size = (p.strip() for p in part.partition("="))
            name = FLAGS.get(key, key)
            if name not in FLAGS.values():
                legal = ", ".join(f"{flag} ({name})" for flag, name in FLAGS.items())
                raise ShardingError(f"mesh {text!r}: unknown axis {key!r}; there are {legal}.")
            if name in sizes:
                raise ShardingError(f"mesh {text!r}: {key} is given twice.")
            if not found or not (size.isascii() and size.isdigit()) or int(size) < 1:
                raise ShardingError(f"mesh {text!r}: {part!r}, expected {key}=N with N of 1 or more.")
            sizes[name] = int(size)
        if not sizes:
            raise ShardingError(f"mesh {text!r}: names no axis; expected pp=4,dp=2,tp=8 or a part of it.")
        return Mesh(**sizes)

    def __str__(self) -> str:
        """The canonical text: axes of size 1 and a default `ep` are left out."""
        given = {flag: getattr(self, name) for flag, name in FLAGS.items()}
        usual = {"ep": self.data * self.tensor}
        return ",".join(f"{f}={n}" for f, n in given.items() if n != usual.get(f, 1)) or "tp=1"

    def _repr_html_(self) -> Html:
        rows: list[tuple[str, ...]] = [("axis", "size", "from a rank to the next", "of")]
        for name in NAMES:
            rows += [(axis, f"{self.axes[axis]:,}", f"{self.strides[axis]:,}", name) for axis in self.atoms(name)]
        ranks = f"{self.world:,} rank{'s' if self.world > 1 else ''}, experts over {self.experts:,}"
        return card(str(self), table(rows), *self._picture(), note=ranks)

    def _picture(self, most: int = 256) -> Iterator[Html]:
        """The ranks, a line for each tensor group and a colour for each stage; nothing of a large mesh."""
        width = len(str(self.world - 1))
        for group in self.groups(self.atoms("tensor")) if self.world <= most else []:
            stage = group[0] // self.stage.world
            what = f"stage {stage}, " if self.pipe > 1 else ""
            yield strip([(f"{r:>{width}}", COLOURS[stage % len(COLOURS)], f"{what}rank {r}")] for r in group)

    @property
    def expert_sizes(self) -> list[int]:
        """What `ep` may be on these axes."""
        return [*divisors(self.tensor), *(self.tensor * d for d in divisors(self.data)[1:])]

    # ---- atomic axes -------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _parts(self) -> dict[str, dict[str, int]]:
        """The atomic axes of each direction, with their sizes."""
        inner = {"tensor": min(self.experts, self.tensor), "data": max(1, self.experts // self.tensor)}

        def split(name: str, size: int) -> dict[str, int]:
            within = inner.get(name, 1)
            if within in (1, size):
                return {name: size}
            return {f"{name}_outer": size // within, f"{name}_inner": within}

        return {name: split(name, getattr(self, name)) for name in NAMES}

    @functools.cached_property
    def axes(self) -> dict[str, int]:
        """Atomic axes with their sizes, outermost first; those of size 1 too."""
        return {axis: size for parts in self._parts.values() for axis, size in parts.items()}

    def atoms(self, name: str) -> Axes:
        """The atomic axes of `pipe`, `data`, `context`, `tensor`, or of `experts`; an atomic axis is its own.

        Raises:
            ShardingError: none of these.
        """
        if name in self._parts:
            return tuple(self._parts[name])
        if name == "experts":
            data = self.atoms("data")[-1:] if self.experts > self.tensor else ()
            return (*data, *(self.atoms("tensor")[-1:] if self.experts > 1 else ()))
        if name in self.axes:
            return (name,)
        raise ShardingError(f"mesh {self}: no axis {name!r}; there are {', '.join(self.axes)}.")

    def size(self, axes: Sequence[str]) -> int:
        """Devices along some atomic axes."""
        return math.prod(self.axes[axis] for axis in axes)

    # ---- ranks -------------------------------------------------------------------------------------------------------

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.pipe * self.data * self.context * self.tensor

    @functools.cached_property
    def strides(self) -> dict[str, int]:
        """Ranks from one device to the next along each atomic axis."""
        sizes = list(self.axes.values())
        return {axis: math.prod(sizes[i + 1 :]) for i, axis in enumerate(self.axes)}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands along each atomic axis.

        Raises:
            ShardingError: the mesh has no such rank.
        """
        if not 0 <= rank < self.world:
            raise ShardingError(f"mesh {self}: no rank {rank}; there are 0 to {self.world - 1}.")
        return {axis: rank // self.strides[axis] % size for axis, size in self.axes.items()}

    def index(self, rank: int, axes: Sequence[str]) -> int:
        """Where a rank stands among those along some axes, the first of them outermost: its part of a split dim."""
        at, index = self.coordinates(rank), 0
        for axis in axes:
            index = index * self.axes[axis] + at[axis]
        return index

    def groups(self, axes: Sequence[str]) -> list[list[int]]:
        """Ranks that differ only along `axes`, each group in their order, the first of them outermost."""

        def steps(names: Iterable[str]) -> list[int]:
            ranges = [range(0, self.strides[a] * self.axes[a], self.strides[a]) for a in names]
            return [sum(at) for at in itertools.product(*ranges)]

        within = steps(axes)
        return [[first + step for step in within] for first in steps(a for a in self.axes if a not in axes)]

    @property
    def stage(self) -> "Mesh":
        """The mesh of one pipeline stage; stage s of it has the ranks from `s * stage.world` on."""
        return Mesh(data=self.data, context=self.context, tensor=self.tensor, experts=self.experts)
