"""Time of collectives by algorithm and link, in seconds.

A group's ranks are joined by levels (package, host, superpod, network). On each level a rank talks to all of its peers
at once. Algorithms, the quickest of which is taken:

* direct: everybody to everybody in one step; every level carries what its peers need.
* by levels: outermost level first, so that each byte crosses the slow links once; a step a level.
* one shot (all_reduce): all_gather of whole tensors and a local sum, which suits few bytes; two shots: reduce_scatter,
  then all_gather.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from kimi_graph.hardware import Link
from kimi_graph.parallel import Mesh
from kimi_graph.parallel.collectives import Issued

from .factors import Factors


@dataclass(frozen=True)
class Hop:
    """A level that a group spans. `inside`: ranks of the group within the level below; `ranks`: within this one."""

    link: Link
    inside: int
    ranks: int


@functools.lru_cache(maxsize=512)
def hops(mesh: Mesh, axes: tuple[str, ...], links: tuple[Link, ...]) -> tuple[Hop, ...]:
    """The levels that the ranks of a group spread over, innermost first; the group that spreads the widest counts."""
    first = _group(mesh, axes)
    found, inside = [], 1
    for link in links:
        ranks = len(first) if not link.dies else _most(first, link.dies)
        if ranks > inside:
            found.append(Hop(link, inside, ranks))
            inside = ranks
    return tuple(found)


def _group(mesh: Mesh, axes: tuple[str, ...]) -> list[int]:
    """The first group along some axes."""
    ranks = [0]
    for axis in axes:
        ranks = [r + i * mesh.strides[axis] for r in ranks for i in range(mesh.axes[axis])]
    return ranks


def _most(ranks: list[int], dies: int) -> int:
    counts: dict[int, int] = {}
    for rank in ranks:
        counts[rank // dies] = counts.get(rank // dies, 0) + 1
    return max(counts.values())


@dataclass(frozen=True)
class Crossing:
    """Seconds of a collective; by which algorithm, and the link that it spends most of them on."""

    seconds: float
    algorithm: str
    link: str


def crossing(issued: Issued, mesh: Mesh, links: tuple[Link, ...], f: Factors, skew: float = 1.0) -> Crossing:
    """Time of one collective. `skew`: rows of the busiest rank, of those that go to experts."""
    levels = hops(mesh, issued.axes, links)
    if not levels:
        return Crossing(0.0, "none", "none")
    n, size = levels[-1].ranks, float(issued.bytes)
    name = issued.name
    if name == "all_gather":
        found = _gather(levels, size, f)
    elif name == "reduce_scatter":
        found = _gather(levels, size / n, f)
    elif name == "all_reduce":
        one, two = _direct(levels, size, f), _gather(levels, size / n, f)
        twice = Crossing(2 * two.seconds, f"two shots {two.algorithm}", two.link)
        found = min(Crossing(one.seconds, "one shot", one.link), twice, key=lambda c: c.seconds)
    else:  # rows to experts, and equal parts to every rank
        found = _direct(levels, size * skew / n, f)
    return Crossing(found.seconds + f.collective_us * 1e-6, found.algorithm, found.link)


def edge(size: float, links: tuple[Link, ...], distance: int, f: Factors) -> float:
    """Seconds to hand bytes to a rank so many ranks away."""
    link = next((x for x in links if x.dies > distance), links[-1])
    return link.latency.value + size / (link.bandwidth.value * f.network)


def _gather(levels: tuple[Hop, ...], shard: float, f: Factors) -> Crossing:
    direct, by_levels = _direct(levels, shard, f), _by_levels(levels, shard, f)
    return min(direct, by_levels, key=lambda c: c.seconds)


def _direct(levels: tuple[Hop, ...], shard: float, f: Factors) -> Crossing:
    """Every rank gets `shard` bytes of every other."""
    return _sum(levels, lambda hop: (hop.ranks - hop.inside) * shard, "direct", f, steps=False)


def _by_levels(levels: tuple[Hop, ...], shard: float, f: Factors) -> Crossing:
    total = levels[-1].ranks

    def size(hop: Hop) -> float:
        return (hop.ranks / hop.inside - 1) * shard * total / hop.ranks

    return _sum(levels, size, "by levels", f, steps=True)


def _sum(levels: tuple[Hop, ...], size: Callable[[Hop], float], algorithm: str, f: Factors, *, steps: bool) -> Crossing:
    times = {hop.link.name: size(hop) / (hop.link.bandwidth.value * f.network) for hop in levels}
    waits = [hop.link.latency.value for hop in levels]
    peers = sum(hop.ranks / hop.inside - 1 for hop in levels) if steps else levels[-1].ranks - 1
    seconds = sum(times.values()) + (sum(waits) if steps else max(waits)) + peers * f.message_us * 1e-6
    return Crossing(seconds, algorithm, max(times, key=lambda name: times[name]))
