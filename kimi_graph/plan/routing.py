"""How unevenly experts are chosen: a distribution, not its mean.

Popularity of experts is drawn log-normal with a spread that is assumed and can be set (0: all are as popular), choices
of a step are drawn by it, and what counts is the busiest rank, as all others wait for it. Copies of experts are placed
as `kimi_graph.parallel.balance` does, from the popularity.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

from kimi_graph.parallel import balance

DRAWS, BALANCED_DRAWS = 64, 4  # placing copies takes longer


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Of the rows of one step in one layer.

    Attributes:
        rows: of the busiest rank, in means of all ranks.
        touched: the part of its experts that have any row, of the rank that has most such.
    """

    rows: float = 1.0
    touched: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Routing if all experts are as popular and none is luckier, of half of the draws at most, and of nine in ten."""

    even: Routing = Routing()
    median: Routing = Routing()
    high: Routing = Routing()


@functools.lru_cache(maxsize=256)
def routing(experts: int, choices: int, ranks: int, redundant: int = 0, spread: float = 0.5) -> Spread:
    """Args:
    choices: rows of all ranks that share the experts, times experts of a row. ranks: that share them.
    spread: standard deviation of the logarithm of an expert's popularity.
    """
    slots = experts + redundant
    held = _popularity(experts, slots, ranks, spread)
    rows = np.random.default_rng(1).poisson(held * choices).reshape(len(held), ranks, slots // ranks)
    by_rank = rows.sum(2)
    skew = by_rank.max(1) / np.maximum(by_rank.mean(1), 1e-9)
    touched = (rows > 0).mean(2).max(1)
    even = Routing(touched=1 - math.exp(-choices / slots))

    def at(part: float) -> Routing:
        most = max(even.touched, float(np.quantile(touched, part)))
        return Routing(rows=max(1.0, float(np.quantile(skew, part))), touched=most)

    return Spread(even=even, median=at(0.5), high=at(0.9))


@functools.lru_cache(maxsize=16)
def _popularity(experts: int, slots: int, ranks: int, spread: float) -> np.ndarray:
    """The part of all choices that each slot gets, of some draws: `[draws, slots]`."""
    draws = DRAWS if slots == experts else BALANCED_DRAWS
    popular = np.random.default_rng(0).lognormal(0.0, spread, (draws, experts))
    popular /= popular.sum(1, keepdims=True)
    return popular if slots == experts else np.stack([_in_slots(p, slots, ranks) for p in popular])


def _in_slots(popular: np.ndarray, slots: int, ranks: int) -> np.ndarray:
    """What each slot gets, by the table that `balance` makes."""
    table = balance([float(p) for p in popular], slots, ranks).table
    counts = np.bincount(table.slots, minlength=len(popular))
    return np.array([popular[e] / counts[e] for e in table.slots])
