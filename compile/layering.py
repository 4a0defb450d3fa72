"""Places for the boxes of a graph without cycles: in layers from top to bottom, edges short and few of them crossing.

Layers by longest path; a point of every layer that an edge passes; order by barycentres, the best of some sweeps;
places across by least squares, keeping order and distances. Source: K. Sugiyama et al., 1981, in its usual form.
"""

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

SWEEPS = 16  # of ordering, and of places
ACROSS, DOWN = 18.0, 30.0  # between boxes of a layer, and between layers
POINT = 8.0  # width of the place that an edge takes in a layer it passes

Point = tuple[float, float]


@dataclass(frozen=True)
class Layout:
    """Where boxes are.

    Attributes:
        width, height: of all together. places: of each box, its left upper corner.
        routes: of each edge, points from the lower side of one box to the upper side of another.
    """

    width: float
    height: float
    places: list[Point]
    routes: list[list[Point]]


def lay_out(sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]]) -> Layout:
    """Places for boxes.

    Args:
        sizes: width and height of each box. edges: from box to box, without a cycle.
    """
    if not sizes:
        return Layout(0, 0, [], [])
    layer_of = _layers(len(sizes), edges)
    widths = [width for width, _ in sizes]
    chains = [_chain(layer_of, widths, a, b) for a, b in edges]
    ordered = _order(layer_of, chains)
    centres = _centres(ordered, widths, chains)
    left = min(centres[n] - widths[n] / 2 for n in range(len(widths)))
    right = max(centres[n] + widths[n] / 2 for n in range(len(widths)))
    tops = [0.0]
    for layer in ordered:
        tops.append(tops[-1] + max((sizes[n][1] for n in layer if n < len(sizes)), default=0) + DOWN)
    places = [(centres[n] - widths[n] / 2 - left, tops[layer_of[n]]) for n in range(len(sizes))]
    routes = []
    for chain in chains:
        a, *between, b = chain
        points = [(centres[a] - left, tops[layer_of[a]] + sizes[a][1])]
        for n in between:
            low, high = tops[layer_of[n]], tops[layer_of[n] + 1] - DOWN
            points += [(centres[n] - left, low), (centres[n] - left, high)]
        routes.append([*points, (centres[b] - left, tops[layer_of[b]])])
    return Layout(right - left, tops[-1] - DOWN, places, routes)


def _layers(count: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """Layer of each box: below all it reads; what reads nothing is right above its first reader."""
    before: list[list[int]] = [[] for _ in range(count)]
    after: list[list[int]] = [[] for _ in range(count)]
    for a, b in edges:
        before[b].append(a)
        after[a].append(b)
    layer, waits = [0] * count, [len(b) for b in before]
    ready = [n for n in range(count) if not waits[n]]
    for n in ready:  # grows while it is walked
        for m in after[n]:
            layer[m] = max(layer[m], layer[n] + 1)
            waits[m] -= 1
            if not waits[m]:
                ready.append(m)
    assert len(ready) == count, "a cycle"
    for n in range(count):
        if not before[n] and after[n]:
            layer[n] = min(layer[m] for m in after[n]) - 1
    return layer


def _chain(layer_of: list[int], widths: list[float], a: int, b: int) -> list[int]:
    """The boxes of an edge, and between them a new point for each layer that it passes."""
    chain = [a]
    for layer in range(layer_of[a] + 1, layer_of[b]):
        chain.append(len(widths))
        layer_of.append(layer)
        widths.append(POINT)
    return [*chain, b]


def _order(layer_of: Sequence[int], chains: Iterable[Sequence[int]]) -> list[list[int]]:
    """Layers with their boxes and points from left to right."""
    ordered: list[list[int]] = [[] for _ in range(max(layer_of) + 1)]
    for n, layer in enumerate(layer_of):
        ordered[layer].append(n)
    above, below = _neighbours(len(layer_of), chains)
    best, fewest = [list(layer) for layer in ordered], _crossings(ordered, below)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        near = above if down else below
        for i in range(len(ordered)) if down else reversed(range(len(ordered))):
            other = ordered[i - 1 if down else i + 1] if 0 <= i + (-1 if down else 1) < len(ordered) else []
            at = {n: x for x, n in enumerate(other)}
            own = {n: x for x, n in enumerate(ordered[i])}
            weight = {n: _mean([at[m] for m in near[n]], own[n]) for n in ordered[i]}
            ordered[i].sort(key=lambda n, weight=weight: weight[n])
        if (count := _crossings(ordered, below)) < fewest:
            best, fewest = [list(layer) for layer in ordered], count
    return best


def _neighbours(count: int, chains: Iterable[Sequence[int]]) -> tuple[list[list[int]], list[list[int]]]:
    above: list[list[int]] = [[] for _ in range(count)]
    below: list[list[int]] = [[] for _ in range(count)]
    for chain in chains:
        for a, b in pairwise(chain):
            below[a].append(b)
            above[b].append(a)
    return above, below


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _crossings(ordered: Sequence[Sequence[int]], below: Sequence[Sequence[int]]) -> int:
    """How many pairs of edges cross."""
    total = 0
    for upper, lower in pairwise(ordered):
        at = {n: x for x, n in enumerate(lower)}
        seen: list[int] = []
        for n in upper:
            ends = sorted(at[m] for m in below[n])
            total += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return total


def _centres(ordered: Sequence[Sequence[int]], widths: Sequence[float], chains: Iterable[Sequence[int]]) -> list[float]:
    """Where the middle of each box and point is across: as near to its neighbours as order and widths let it."""
    centres = [0.0] * len(widths)
    for layer in ordered:
        for n, x in zip(layer, _apart(layer, widths, [0.0] * len(layer)), strict=True):
            centres[n] = x
    above, below = _neighbours(len(widths), chains)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for layer in ordered if down else reversed(ordered):
            near = [(above if down else below)[n] or below[n] or above[n] for n in layer]
            wanted = [_mean([centres[m] for m in ms], centres[n]) for n, ms in zip(layer, near, strict=True)]
            for n, x in zip(layer, _apart(layer, widths, wanted), strict=True):
                centres[n] = x
    return centres


def _apart(layer: Sequence[int], widths: Sequence[float], wanted: Sequence[float]) -> list[float]:
    """The places nearest to the wanted ones (least squares) that keep the order and a distance: pooled neighbours."""
    offsets = [0.0]
    for a, b in pairwise(layer):
        offsets.append(offsets[-1] + (widths[a] + widths[b]) / 2 + ACROSS)
    pools: list[tuple[float, int]] = []  # of boxes that touch: their mean, and how many there are
    for x, offset in zip(wanted, offsets, strict=True):
        pools.append((x - offset, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n), (b, m) = pools[-2:]
            pools[-2:] = [((a * n + b * m) / (n + m), n + m)]
    means = [mean for mean, count in pools for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]
