"""Kimi Delta Attention: a matrix of memory per head, decayed per key channel, corrected by the delta rule.

Axes: B sequences, T tokens, D embed, H heads, K key, V value, R gate_rank, S slots.
Source: Kimi Linear (arXiv:2510.26692), sections 3 and 4; fact sheet of models, section 3. `source=`: released names.
"""

import math
from typing import Generic

import torch
from torch import Tensor

from kimi_graph import ops
from kimi_graph.config import KdaConfig
from kimi_graph.ops import at_least_f32, contract
from kimi_graph.parallel import constrain, ways
from kimi_graph.spec import ParamSpec, weight
from kimi_graph.taps import tap
from kimi_graph.tree import Leaf, param_tree

from . import handover
from .batch import Batch, KdaState, check_input, new_rows, one_token
from .kernels import Kernels, fla_kda, on_gpu
from .stretches import own_stretch


@param_tree
class Kda(Generic[Leaf]):
    """Weights, in the order of the computation.

    The output gate is one matrix (`gate`) or a product of two (`gate_down`, `gate_up`); the others are None.
    """

    query: Leaf
    key: Leaf
    value: Leaf
    query_conv: Leaf
    key_conv: Leaf
    value_conv: Leaf
    decay_down: Leaf
    decay_up: Leaf
    decay_bias: Leaf
    log_rate: Leaf
    beta: Leaf
    gate: Leaf | None
    gate_down: Leaf | None
    gate_up: Leaf | None
    norm: Leaf
    out: Leaf


def kda_specs(c: KdaConfig, embed: int) -> Kda[ParamSpec]:
    """Specs by the checkpoint's names within the layer: `q_proj.weight` is `[H, K, D]`, stored as `[H * K, D]`."""
    keys, values = c.heads * c.key, c.heads * c.value
    f32 = torch.float32

    def project(name: str, size: int) -> ParamSpec:
        axes = "heads value embed" if name in ("v_proj", "g_proj") else "heads key embed"
        return weight((c.heads, size, embed), axes, source=f"{name}.weight", stored=(c.heads * size, embed))

    def conv(name: str, size: int) -> ParamSpec:
        axes = "heads key _" if name != "v_conv1d" else "heads value _"
        stored = (c.heads * size, 1, c.conv_width)
        return weight((c.heads, size, c.conv_width), axes, source=f"{name}.weight", stored=stored, dtype=c.conv_dtype)

    def up(name: str, size: int, axis: str) -> ParamSpec:
        stored = (c.heads * size, c.gate_rank)
        return weight((c.heads, size, c.gate_rank), f"heads {axis} gate_rank", source=f"{name}.weight", stored=stored)

    return Kda(
        query=project("q_proj", c.key),
        key=project("k_proj", c.key),
        value=project("v_proj", c.value),
        query_conv=conv("q_conv1d", c.key),
        key_conv=conv("k_conv1d", c.key),
        value_conv=conv("v_conv1d", c.value),
        decay_down=weight((c.gate_rank, embed), "gate_rank embed", source="f_a_proj.weight"),
        decay_up=up("f_b_proj", c.key, "key"),
        decay_bias=weight((c.heads, c.key), "heads key", source="dt_bias", stored=(keys,), dtype=f32),
        log_rate=weight(
            (c.heads,),
            "heads",
            source="A_log",
            stored=c.stored_rates,
            padding=math.prod(c.stored_rates) - c.heads,
            dtype=f32,
        ),
        beta=weight((c.heads, embed), "heads embed", source="b_proj.weight"),
        gate=project("g_proj", c.value) if c.full_rank_gate else None,
        gate_down=None
        if c.full_rank_gate
        else weight((c.gate_rank, embed), "gate_rank embed", source="g_a_proj.weight"),
        gate_up=None if c.full_rank_gate else up("g_b_proj", c.value, "value"),
        norm=weight((c.value,), "value", source="o_norm.weight", dtype=c.conv_dtype),
        out=weight((embed, c.heads, c.value), "embed heads value", source="o_proj.weight", stored=(embed, values)),
    )


def kda_state_specs(c: KdaConfig, slots: int, dtype: torch.dtype) -> KdaState[ParamSpec]:
    """Shapes, dtypes and axes of the state (specs without a checkpoint source)."""

    def window(size: int, axis: str) -> ParamSpec:
        return weight((slots, c.heads, size, c.conv_width - 1), f"slots heads {axis} _", source="", dtype=dtype)

    memory = (slots, c.heads, c.value, c.key)
    return KdaState(
        memory=weight(memory, "slots heads value key", source="", dtype=torch.float32),
        query=window(c.key, "key"),
        key=window(c.key, "key"),
        value=window(c.value, "value"),
    )


def kda(
    p: Kda[Tensor],
    c: KdaConfig,
    x_BTD: Tensor,
    state: KdaState[Tensor] | None = None,
    batch: Batch[Tensor] | None = None,
    eps: float = 1e-5,
    *,
    step: bool = False,
    kernels: Kernels = "torch",
) -> tuple[Tensor, KdaState[Tensor]]:
    """Mix tokens through the memory: `[B, T, D]` -> `[B, T, D]` and the next state.

    Args:
        state, batch: what the sequences have seen and where they stand; without both, B sequences start here.
        eps: epsilon of the output norm.
        step: one token a row (T = 1) by the one-step recurrence; else chunkwise, from zero where the row's sequence
            starts in this call.
        kernels: "torch" everywhere; "gpu": those of the extra `gpu`, see `gpu_kernels`.

    Raises:
        ConfigError: kernels that cannot run here, `step` with more than one token a row, `state` or `batch` alone,
            an input of another width or dtype than the weights'.
        ShardingError: on a mesh, new tokens that do not divide over the devices that share them out.
    """
    if state is None or batch is None:
        check_input("kda", x_BTD, p.query)
        specs = kda_state_specs(c, len(x_BTD) + 1, x_BTD.dtype)
        new: tuple[KdaState[Tensor], Batch[Tensor]] = new_rows("kda", (state, batch), specs, x_BTD)
        state, batch = new
    rows, shared = (batch.slots, batch.lengths, batch.counts), ways(x_BTD, "queries") > 1
    own_BTD = own_stretch(x_BTD)  # on a mesh the new tokens of a prefill are shared out, see `handover`
    inputs = (contract("btd,hkd->bthk", own_BTD, w) for w in (p.query, p.key, p.value))
    taps, windows = (p.query_conv, p.key_conv, p.value_conv), (state.query, state.key, state.value)
    if shared:
        convolved = handover.short_convs([*inputs], taps, windows, rows)
    else:
        convolved = [ops.short_conv(*conv, *rows) for conv in zip(inputs, taps, windows, strict=True)]
    (q_BTHK, query), (k_BTHK, key), (v_BTHV, value) = convolved

    low_BTR = contract("btd,rd->btr", own_BTD, p.decay_down)
    raw_BTHK = contract("btr,hkr->bthk", low_BTR, p.decay_up)
    if step:
        one_token("kda", x_BTD)
    scale = c.key**-0.5
    if on_gpu("kda", kernels, x_BTD):
        made = q_BTHK, k_BTHK, v_BTHV, raw_BTHK, p.decay_bias, p.log_rate, write_strength(p, own_BTD), state.memory
        o_BTHV, memory = fla_kda(*made, batch, scale=scale, lower_bound=c.gate_lower_bound, step=step)
    else:
        decay_BTHK = tap("decay", ops.kda_gate(raw_BTHK, p.decay_bias, p.log_rate, c.gate_lower_bound))
        beta_BTH = write_strength(p, own_BTD)
        q_BTHK, k_BTHK = ops.l2_norm(q_BTHK, 1e-6), ops.l2_norm(k_BTHK, 1e-6)
        made = q_BTHK, k_BTHK, v_BTHV, decay_BTHK, beta_BTH, state.memory
        if step:
            o_BTHV, memory = ops.kda_step(*made, batch.slots, scale)
        elif shared:
            o_BTHV, memory = handover.kda_chunk(*made, rows, scale)
        else:
            o_BTHV, memory = ops.kda_chunk(*made, *rows, scale)
    memory = tap("state", memory, lambda m: m[batch.slots.long()])

    if p.gate is not None:
        gate_BTHV = contract("btd,hvd->bthv", own_BTD, p.gate)
    else:
        assert p.gate_down is not None and p.gate_up is not None
        gate_BTHV = contract("btr,hvr->bthv", contract("btd,rd->btr", own_BTD, p.gate_down), p.gate_up)
    o_BTHV = ops.gated_rms_norm(o_BTHV, gate_BTHV, p.norm, eps)
    y_BTD = contract("bthv,dhv->btd", o_BTHV, p.out)
    return constrain(y_BTD, "batch", "sequence", None), KdaState(memory=memory, query=query, key=key, value=value)


def write_strength(p: Kda[Tensor], x_BTD: Tensor) -> Tensor:
    """How much of what a key lacks is written, in (0, 1): `[B, T, H]`, at least float32."""
    return tap("beta", torch.sigmoid(at_least_f32(contract("btd,hd->bth", x_BTD, p.beta))))
