"""What does not divide, before anything is traced: every fault at once, each with its nearest remedies.

    for fault in faults(sizes_of(specs), rules):
        print(fault)  # layers.0.kda.query: heads=96 does not divide over tensor=64 ...

Sizes are collected once (a model has about a dozen); trying a mesh on them takes microseconds.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kimi_graph import tree
from kimi_graph.errors import ShardingError
from kimi_graph.spec import ParamSpec

from .mesh import FLAGS, Axes, Mesh, divisors, nearest
from .placement import Padding
from .presets import directions
from .rules import Rules

PADDED = ("vocab", "experts")  # axes that may be padded and stay exact: ids never reach what is added
MAX_EXPERTS = 1024  # of CANN's dispatch, redundant ones included (fact sheet of Ascend, B)


@dataclass(frozen=True, kw_only=True)
class Size:
    """A size that a logical axis has.

    Attributes:
        path: the first parameter that has it.
        count: how many parameters have; 0: it is chosen (a batch), not given.
        bytes_per_index: what one more index would cost, all of them together.
    """

    axis: str
    size: int
    path: str
    count: int = 1
    bytes_per_index: int = 0


def sizes_of(specs: Any, dtype: torch.dtype = torch.bfloat16, prefix: str = "") -> list[Size]:
    """All sizes of the named axes of a tree of specs. `dtype`: of specs that do not fix their own."""
    found: dict[tuple[str, int], Size] = {}
    for path, spec in tree.items(specs):
        assert isinstance(spec, ParamSpec)
        for axis, size in zip(spec.axes, spec.shape, strict=True):
            if axis == "_":
                continue
            cost = spec.numel // size * (spec.dtype or dtype).itemsize
            old = found.get((axis, size), Size(axis=axis, size=size, path=prefix + path, count=0))
            found[axis, size] = Size(
                axis=axis, size=size, path=old.path, count=old.count + 1, bytes_per_index=old.bytes_per_index + cost
            )
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A size that does not divide.

    Attributes:
        size: what it is.
        over: mesh axes of its rule.
        ways: their product.
        remedies: in words, the nearest first.
        padding: what --pad would do, in words; empty where it cannot be had.
    """

    size: Size
    over: Axes
    ways: int
    remedies: tuple[str, ...]
    padding: str = ""

    def __str__(self) -> str:
        s = self.size
        others = f" (and {s.count - 1:,} more)" if s.count > 1 else ""
        rule = f"rule {s.axis} -> {' x '.join(self.over)}"
        return f"{s.path}{others}: {s.axis}={s.size:,} does not divide over {self.ways:,} ({rule}). " + "; ".join(
            remedy for remedy in (*self.remedies, self.padding) if remedy
        )


def faults(sizes: Iterable[Size], rules: Rules, padding: Padding | None = None) -> list[Fault]:
    """Every size that the rules do not divide.

    Args:
        padding: physical sizes that replace some, beside those of the rules; see `pad`.

    Raises:
        ShardingError: an axis without a rule.
    """
    rules, found = rules.padded(padding or {}), []
    for s in sizes:
        over = rules.on(s.axis)
        ways = rules.mesh.size(over)
        if rules.physical(s.axis, s.size) % ways:
            words = _padding_words(s, ways) if s.axis in PADDED else ""
            remedies = tuple(_remedies(s, over, ways, rules.mesh))
            found.append(Fault(size=s, over=over, ways=ways, remedies=remedies, padding=words))
    return found


def require(found: Iterable[Fault]) -> None:
    """Refuse faults, all of them, one line each.

    Raises:
        ShardingError: there is one.
    """
    lines = [str(fault) for fault in found]
    if lines:
        raise ShardingError("\n".join(lines))


def refusal(
    name: str, mesh: Mesh, sizes: Iterable[Size], found: Iterable[Fault], rules_of: Callable[[Mesh], Rules]
) -> str:
    """Why a model cannot be on a mesh: every fault, and the tensor axis at which there is none.

    Args:
        sizes: of the parameters.
        rules_of: rules on a mesh.
    """
    found = list(found)
    lines = [f"{name} cannot be on {mesh}:", *(f"  {fault}" for fault in found)]
    if any("tensor" in directions(mesh, fault.over) and fault.size.count for fault in found):
        best = nearest_tensor(sizes, mesh, rules_of)
        if best is not None:
            lines.append(f"  The nearest tp at which everything divides, nothing padded: {best}.")
    return "\n".join(lines)


def pad(sizes: Iterable[Size], rules: Rules) -> dict[tuple[str, int], int]:
    """Physical sizes of the axes that may be padded and do not divide: the vocabulary and experts.

    It stays exact. No token has an id in the padded vocabulary, and its logits are minus infinity; the router knows the
    model's own experts alone, so added ones get no rows, or serve as copies of busy ones (see `balance`).
    """
    padded = {}
    for s in sizes:
        ways = rules.ways(s.axis)
        if s.axis in PADDED and s.size % ways:
            padded[s.axis, s.size] = -(-s.size // ways) * ways
    return padded


def check_redundant(experts: int, redundant: int, ways: int) -> None:
    """Whether so many copies can be added to the experts of a model.

    Args:
        experts: the model's.
        redundant: copies beside one of each.
        ways: ranks that share out an expert's copies.

    Raises:
        ShardingError: slots that do not divide over the ranks, more copies than ranks; with the nearest legal numbers.
    """
    most = experts * (ways - 1)
    if not 0 <= redundant <= most:
        raise ShardingError(
            f"--redundant-experts {redundant:,}: an expert is at most once on each of {ways:,} ranks, so that there "
            f"are 0 to {most:,} copies of {experts:,} experts."
        )
    if (experts + redundant) % ways:
        near = [n - experts for n in _multiples(experts + redundant, ways) if experts <= n <= experts + most]
        raise ShardingError(
            f"--redundant-experts {redundant:,}: {experts + redundant:,} slots do not divide over {ways:,} ranks. "
            f"Nearest: {', '.join(f'{n:,}' for n in near)}."
        )


def _remedies(s: Size, over: Axes, ways: int, mesh: Mesh) -> Iterator[str]:
    flags = {name: flag for flag, name in FLAGS.items()}
    if s.axis == "experts":
        legal = [n for n in mesh.expert_sizes if s.size % n == 0]
        yield f"Legal ep on this mesh: {_some(legal, ways)}; nearest {nearest(ways, legal)}, with copies over the rest"
    elif s.count == 0:
        yield f"Nearest: {', '.join(f'{n:,}' for n in _multiples(s.size, ways))}"
    else:
        (direction, *_) = directions(mesh, over)
        legal = divisors(s.size)
        near = nearest(mesh.size(mesh.atoms(direction)), legal)
        yield f"Legal {flags[direction]}: {_some(legal, ways)}; nearest {near}"
        if direction == "tensor" and (inner := math.gcd(s.size, ways)) not in (1, ways):
            yield f"or the same ranks as dp={mesh.data * ways // inner},tp={inner}"


def _padding_words(s: Size, ways: int) -> str:
    padded = -(-s.size // ways) * ways
    more = padded - s.size
    what = "physical experts, copies of busy ones or empty" if s.axis == "experts" else "rows, the last ones zero"
    over = "; too many for CANN's dispatch, at most 1,024" if s.axis == "experts" and padded > MAX_EXPERTS else ""
    return f"or --pad: {padded:,} {what} (+{more:,}, {more * s.bytes_per_index:,} bytes in all{over})"


def _multiples(size: int, ways: int) -> list[int]:
    below, above = size // ways * ways, -(-size // ways) * ways
    return [n for n in (below, above) if n]


def _some(legal: list[int], near: int) -> str:
    """Legal sizes; of many the closest ones."""
    if len(legal) > 16:
        at = sum(n < near for n in legal)
        first = max(0, min(at - 4, len(legal) - 8))
        first = 0 if first == 1 else first  # "..." would be as long as the number it stands for
        legal, ends = legal[first : first + 8], ("..., " if first else "", ", ..." if first + 8 < len(legal) else "")
        return ends[0] + ", ".join(map(str, legal)) + ends[1]
    return ", ".join(map(str, legal))


# ---- meshes that fit -------------------------------------------------------------------------------------------------


def legal_meshes(
    sizes: Iterable[Size], devices: int, rules_of: Callable[[Mesh], Rules], *, stages: int = 1
) -> list[Mesh]:
    """Every mesh of so many devices that all sizes divide over, without context parallelism.

    Experts are split as far as they divide; where that is not data x tensor, they are copied over the rest.

    Args:
        devices: ranks in all.
        rules_of: rules on a mesh.
        stages: the most pipeline stages, the model's layers.
    """
    sizes = list(sizes)
    experts = [s.size for s in sizes if s.axis == "experts"]
    legal = []
    for pipe in (p for p in divisors(devices) if p <= stages):
        for tensor in divisors(devices // pipe):
            plain = Mesh(pipe=pipe, data=devices // pipe // tensor, tensor=tensor)
            split = [n for n in plain.expert_sizes if all(size % n == 0 for size in experts)]
            mesh = Mesh(pipe=pipe, data=plain.data, tensor=tensor, experts=split[-1])
            if not faults(sizes, rules_of(mesh)):
                legal.append(mesh)
    return legal


def nearest_tensor(sizes: Iterable[Size], mesh: Mesh, rules_of: Callable[[Mesh], Rules]) -> int | None:
    """The size of the tensor axis nearest to the mesh's at which everything divides; None: there is none but 1."""
    sizes, rules = list(sizes), rules_of(mesh)
    split = [s.size for s in sizes if "tensor" in directions(mesh, rules.on(s.axis)) and s.axis != "experts"]

    def fits(tensor: int) -> bool:
        made = Mesh(pipe=mesh.pipe, context=mesh.context, tensor=tensor, experts=1)
        return not faults(sizes, rules_of(made))

    legal = [n for n in divisors(min(split, default=1))[1:] if n != mesh.tensor and fits(n)]
    return nearest(mesh.tensor, legal) if legal else None
