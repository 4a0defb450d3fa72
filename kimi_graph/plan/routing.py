"""How unevenly experts are chosen: a distribution, not its mean.

Popularity of experts is drawn log-normal with a spread that is assumed and can be set (0: all are as popular), choices
of a step are drawn by it, and what counts is the busiest rank, as all others wait for it. Copies of experts are placed
as `kimi_graph.parallel.balance` does, from the popularity.
"""

import functools
from dataclasses import dataclass

import numpy as np

from kimi_graph.parallel import balance

DRAWS, BALANCED_DRAWS = 64, 6  # placing copies takes longer


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Of the rows of one step in one layer.

    Attributes:
        median, high: rows of the busiest rank in means of all ranks: half of the draws have less, nine in ten.
        touched: the part of a rank's experts that have any row.
    """

    median: float = 1.0
    high: float = 1.0
    touched: float = 1.0


@functools.lru_cache(maxsize=256)
def routing(experts: int, choices: int, ranks: int, redundant: int = 0, spread: float = 0.5) -> Routing:
    """Args:
    choices: rows of all ranks that share the experts, times experts of a row. ranks: that share them.
    spread: standard deviation of the logarithm of an expert's popularity.
    """
    rng = np.random.default_rng(0)
    slots = experts + redundant
    popular = rng.lognormal(0.0, spread, (BALANCED_DRAWS if redundant else DRAWS, experts))
    popular /= popular.sum(1, keepdims=True)
    held = np.stack([_in_slots(p, slots, ranks) for p in popular]) if redundant else popular
    rows = rng.poisson(held * choices)
    by_rank = rows.reshape(len(rows), ranks, slots // ranks).sum(2)
    skew = by_rank.max(1) / np.maximum(by_rank.mean(1), 1e-9)
    median, high = (max(1.0, float(q)) for q in np.quantile(skew, (0.5, 0.9)))
    return Routing(median=median, high=high, touched=float((rows > 0).mean()))


def _in_slots(popular: np.ndarray, slots: int, ranks: int) -> np.ndarray:
    """What each slot gets, by the table that `balance` makes."""
    table = balance([float(p) for p in popular], slots, ranks).table
    counts = np.bincount(table.slots, minlength=len(popular))
    return np.array([popular[e] / counts[e] for e in table.slots])
