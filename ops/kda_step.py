"""KDA, one token: forget, correct what the memory says of `k` towards `v`, read along `q`."""

import torch
from torch import Tensor

from .base import at_least_f32, empty_like, operator
from .offers import Offer, own_widths
from .state import put_rows

FLOAT32_STATE = "9.2"  # first CANN release whose operator takes a float32 state


@operator(sharding="b t h k, b t h k, b t h v, b t h k, b t h, s h v k, b -> b t h v, s h v k", whole="tsk")
def kda_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, memory: Tensor, slots: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One step of the recurrence for every row (T = 1).

    Args:
        q, k: `[B, 1, H, K]`, unit length along K.
        v: `[B, 1, H, V]`.
        decay: `[B, 1, H, K]` natural log <= 0.
        beta: `[B, 1, H]` write strength in (0, 1).
        memory: `[S, H, V, K]` float32.
        slots: `[B]` int32.
        scale: multiplies q.

    Returns:
        `[B, 1, H, V]` in v's dtype, and the memory with the rows' slots updated.

    Source: Kimi Linear (arXiv:2510.26692), equation of the delta rule with per-channel decay; fact sheet of models,
    section 3.2.
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
    return empty_like(v), empty_like(memory)


@kda_step.lowering
def _(ge, *args):
    return ge.serve("recurrent KDA", OFFERS, *args)


def _too_old(ge, *args) -> str:
    if ge.has(FLOAT32_STATE):
        return ""
    return f"takes a float32 memory since CANN {FLOAT32_STATE}, this is for {ge.cann}"


def _builtin(ge, q, k, v, decay, beta, memory, slots, scale):
    rows, _, heads, key = ge.shape(q)
    value = ge.shape(v)[-1]
    half = ge.dtype(v)
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


def _gate(ge, decay):
    """What a decay was made of: raw values, bias, logarithms of rates, lower bound; None where that is not known."""
    found = ge.made_of(decay, "kimi.kda_gate")
    return None if found is None else (found[0], ge.weight_as(found[1], torch.float32), *found[2:])


def _logits(ge, beta):
    """What beta is the sigmoid of, before it was widened; None where that is not known."""
    found = ge.made_of(beta, "aten.sigmoid")
    if found is None:
        return None
    narrow = ge.made_of(found[0], "aten._to_copy")
    return found[0] if narrow is None else narrow[0]


def _vllm_ascend(ge, q, k, v, decay, beta, memory, slots, scale):
    """Gate and beta's sigmoid in the kernel, as vllm-ascend has it; the L2 norm before it: its own has no epsilon."""
    rows, gate, logits = ge.shape(q)[0], _gate(ge, decay), _logits(ge, beta)
    attrs = {"layout": "BSND", "scale": scale, "inplace_final_state": True, "state_v_first": True}
    bias = rates = None
    if gate is not None and (gate[3] is None or -5.0 <= gate[3] < 0.0):
        decay, bias, rates, bound = gate
        attrs |= {"use_gate_in_kernel": True, "safe_gate": bound is not None}
        attrs |= {} if bound is None else {"lower_bound": bound}
    if logits is not None:
        beta, attrs["use_beta_sigmoid_in_kernel"] = logits, True
    inputs = {
        "query": q, "key": k, "value": v, "gate": decay, "beta": beta, "initial_state": memory,
        "cu_seqlens": ge.const(list(range(rows + 1)), torch.int32), "ssm_state_indices": slots, "A_log": rates,
        "dt_bias": bias, "num_accepted_tokens": None,
    }  # fmt: skip
    o, memory, _ = ge.own("RecurrentKda", inputs, ["attn_out", "initial_state", "final_state"], attrs)
    return o, memory


def _own(ge, q, k, v, decay, beta, memory, slots, scale):
    """Unit lengths, gate and beta's sigmoid in the kernel where that is what they are made by."""
    attrs, bias, rates = {"scale": scale}, None, None
    gate, logits = _gate(ge, decay), _logits(ge, beta)
    norms = [ge.made_of(x, "kimi.l2_norm") for x in (q, k)]
    if norms[0] is not None and norms[1] is not None and norms[0][1] == norms[1][1]:
        (q, eps), (k, _) = norms
        attrs["norm_eps"] = eps
    if gate is not None:
        decay, bias, rates, bound = gate
        attrs["lower_bound"] = 0.0 if bound is None else bound
    if logits is not None:
        beta, attrs["beta_logits"] = logits, True
    if ge.dtype(decay) != ge.dtype(beta):
        decay, beta = (ge.cast(x, torch.float32) for x in (decay, beta))
    inputs = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta, "memory": memory, "slots": slots}
    return ge.own("KdaStep", inputs | {"bias": bias, "log_rate": rates}, ["o", "memory"], attrs)


def _widths_of_vllm_ascend(ge, q, k, v, *args) -> str:
    key, value = ge.shape(k)[-1], ge.shape(v)[-1]
    if key == 128 and value in (128, 256):
        return ""
    return f"takes keys of 128 channels and values of 128 or 256, these are {key} and {value}"


OFFERS = (
    Offer(
        "builtin",
        "RecurrentGatedDeltaRule",
        _builtin,
        "on every chip; decay, L2 norm and beta are computed before it",
        _too_old,
    ),
    Offer(
        "vllm-ascend",
        "RecurrentKda",
        _vllm_ascend,
        "gate and beta in the kernel; its third result is never written and costs memory of a layer's state",
        _widths_of_vllm_ascend,
    ),
    Offer("composed", "GatherV2, Mul, ReduceSum, ScatterNdUpdate", _composed, "float32 throughout, on every release"),
    Offer("own", "KdaStep", _own, "norms, gate and beta in the kernel, a memory read and written once", own_widths),
)
