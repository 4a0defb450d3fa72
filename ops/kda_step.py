"""KDA, one token: forget, correct what the memory says of `k` towards `v`, read along `q`."""

import torch
from torch import Tensor

from .base import at_least_f32, operator
from .state import put_rows

FLOAT32_STATE = "9.2"  # first CANN release whose operator takes a float32 state


@operator(sharding="b t h k, b t h k, b t h v, b t h k, b t h, s h v k, b -> b t h v, s h v k", whole="tsk")
def kda_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, memory: Tensor, slots: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One step of the recurrence for every row (T = 1).

    Args:
        q, k: `[B, 1, H, K]`, unit length along K. v: `[B, 1, H, V]`.
        decay: `[B, 1, H, K]` natural log <= 0. beta: `[B, 1, H]` write strength in (0, 1).
        memory: `[S, H, V, K]` float32. slots: `[B]` int32.
        scale: multiplies q.

    Returns:
        `[B, 1, H, V]` in v's dtype, and the memory with the rows' slots updated.

    Source: Kimi Linear (arXiv:2510.26692), equation of the delta rule with per-channel decay; fact sheet of models 3.2.
    """
    rows, _, heads, key = q.shape
    q32, k32, decay32 = (at_least_f32(x).reshape(rows * heads, 1, key) for x in (q, k, decay))
    v32, beta32 = at_least_f32(v).reshape(rows * heads, 1, -1), at_least_f32(beta).reshape(-1, 1, 1)
    kept = memory.index_select(0, slots).flatten(0, 1) * decay32.exp()
    news = beta32 * (v32 - torch.bmm(k32, kept.mT))
    new = torch.baddbmm(kept, news.mT, k32)
    o = torch.bmm(q32 * scale, new.mT)
    return o.view_as(v).to(v.dtype), put_rows(memory, slots, new.unflatten(0, (rows, heads)))


@kda_step.fake
def _(q, k, v, decay, beta, memory, slots, scale):
    return torch.empty_like(v), torch.empty_like(memory)


@kda_step.lowering
def _(ge, q, k, v, decay, beta, memory, slots, scale):
    if not ge.has(FLOAT32_STATE):
        return _composed(ge, q, k, v, decay, beta, memory, slots, scale)
    rows, _, heads, key = ge.shape(q)
    value = ge.shape(v)[-1]
    half = ge.dtype(v)
    reason = "on every chip; decay, L2 norm and beta are computed before it"
    ge.chose("recurrent KDA", "RecurrentGatedDeltaRule", reason)
    o, memory = ge.RecurrentGatedDeltaRule(
        ge.reshape(q, [rows, heads, key]),
        ge.reshape(k, [rows, heads, key]),
        ge.reshape(v, [rows, heads, value]),
        ge.reshape(ge.cast(beta, half), [rows, heads]),
        memory,
        ge.const([1] * rows, torch.int32),
        slots,
        gk=ge.reshape(decay, [rows, heads, key]),
        scale=scale,
    )
    return ge.reshape(o, [rows, 1, heads, value]), memory


def _composed(ge, q, k, v, decay, beta, memory, slots, scale):
    """The same by element functions and sums, all float32: matrix products of float32 may be rounded on the device."""
    reason = f"RecurrentGatedDeltaRule takes a float32 memory since CANN {FLOAT32_STATE}, this is for {ge.cann}"
    ge.chose("recurrent KDA", "GatherV2, Mul, ReduceSum, ScatterNdUpdate", reason)
    rows, _, heads, key = ge.shape(q)
    value, f32 = ge.shape(v)[-1], torch.float32
    along_key = [rows, heads, 1, key]
    q32, k32, decay32 = (ge.reshape(ge.cast(x, f32), along_key) for x in (q, k, decay))
    v32 = ge.reshape(ge.cast(v, f32), [rows, heads, value, 1])
    beta32 = ge.reshape(ge.cast(beta, f32), [rows, heads, 1, 1])

    def read(state, x):
        return ge.ReduceSum(ge.Mul(state, x), ge.const([3], torch.int64), keep_dims=True)

    old = ge.GatherV2(memory, slots, ge.const([0], torch.int64), negative_index_support=False)
    kept = ge.Mul(old, ge.Exp(decay32))
    news = ge.Mul(ge.Sub(v32, read(kept, k32)), beta32)
    new = ge.Add(kept, ge.Mul(news, k32))
    o = ge.mark(read(new, ge.Mul(q32, ge.const(scale, f32))), (rows, heads, value, 1), f32)
    written = ge.ScatterNdUpdate(memory, ge.reshape(slots, [rows, 1]), new)
    return ge.reshape(ge.cast(o, ge.dtype(v)), [rows, 1, heads, value]), written
