"""Angles of rotary positions, YaRN bands included: what a step's `cos` and `sin` are rows of.

Computed in float64: at a million tokens an angle in float32 is wrong by a tenth. Axes: R rotated channels.
Source: YaRN (arXiv:2309.00071), section 3.2; fact sheet of models, section 7.
"""

import math

import torch
from torch import Tensor

from kimi_graph.config import RopeConfig, YarnConfig


def rope_table(config: RopeConfig, dims: int) -> tuple[Tensor, float]:
    """Radians per token of each pair of channels, `[R / 2]` float64; and what multiplies cosine and sine.

    Args:
        dims: R, channels that rotate.
    """
    powers = torch.arange(0, dims, 2, dtype=torch.float64) / dims
    rates = config.theta**-powers
    if config.yarn is None:
        return rates, 1.0
    slow = _slowed(config.yarn, config.theta, dims)
    multiplier = mscale(config.yarn.factor, config.yarn.mscale) / mscale(config.yarn.factor, config.yarn.mscale_all)
    return rates * (1 - slow) + rates / config.yarn.factor * slow, multiplier


def _slowed(yarn: YarnConfig, theta: float, dims: int) -> Tensor:
    """How much of each pair slows down: 0 where it turns often within the original length, 1 where hardly at all."""

    def pair_that_turns(times: float) -> float:
        return dims * math.log(yarn.original_len / (2 * math.pi * times)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), dims - 1)
    width = high - low or 0.001
    return ((torch.arange(dims // 2, dtype=torch.float64) - low) / width).clamp(0, 1)


def mscale(factor: float, weight: float) -> float:
    """YaRN's attention temperature for a context `factor` times the original."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def rope_rows(config: RopeConfig, dims: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine at integer positions of any shape: `[..., R / 2]` float64 each."""
    rates, multiplier = rope_table(config, dims)
    angles = positions[..., None].double() * rates.to(positions.device)
    return angles.cos() * multiplier, angles.sin() * multiplier
