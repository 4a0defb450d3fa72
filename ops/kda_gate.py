"""KDA decay gate: how much of the memory each key channel keeps per token."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import at_least_f32, by_rows, empty_like, operator


@operator(sharding="b t h k, h k, h -> b t h k")
def kda_gate(raw: Tensor, bias: Tensor, log_rate: Tensor, lower_bound: float | None) -> Tensor:
    """Natural-log decay `[B, T, H, K]`, always <= 0; float32 because a chunk sums it.

    Args:
        raw: `[B, T, H, K]`.
        bias: `[H, K]`.
        log_rate: `[H]`, per head.
        lower_bound: None: `-rate * softplus(raw + bias)`, unbounded; else `lower_bound * sigmoid(rate * (raw + bias))`.

    Source: Kimi Linear (arXiv:2510.26692) and the released code; fact sheet of models, section 3.1.
    """
    rate = log_rate.exp()[:, None]

    def gate(raw: Tensor) -> Tensor:
        z = at_least_f32(raw) + bias
        if lower_bound is None:
            return -rate * F.softplus(z)
        return lower_bound * torch.sigmoid(rate * z)

    return by_rows(gate, raw, dims=2)


@kda_gate.fake
def _(raw, bias, log_rate, lower_bound):
    return empty_like(raw, dtype=torch.float64 if raw.dtype == torch.float64 else torch.float32)


@kda_gate.lowering
def _(ge, raw, bias, log_rate, lower_bound):
    f32 = torch.float32
    z, each = ge.Add(ge.cast(raw, f32), bias), [*ge.shape(log_rate), 1]
    if lower_bound is None:
        return ge.Mul(ge.SoftplusV2(z, beta=1.0, threshold=20.0), ge.exp_of(log_rate, each, negative=True))
    return ge.Mul(ge.Sigmoid(ge.Mul(z, ge.exp_of(log_rate, each))), ge.const(lower_bound, f32))
