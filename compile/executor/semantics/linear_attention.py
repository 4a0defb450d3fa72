"""Operators of linear attention that CANN brings.

Letters: T tokens, B sequences, N and M heads of keys and values, K and V widths, S slots, W convolution width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_graph.compile.executor.node import Op
from kimi_graph.compile.executor.registry import ge_op
from kimi_graph.ops import at_least_f32

_BF16, _F32, _I32 = torch.bfloat16, torch.float32, torch.int32
MAX_TOKENS = 8  # of one sequence in one call
_SIGMOID = "use_beta_sigmoid_in_kernel"


@ge_op(
    "RecurrentGatedDeltaRule",
    provenance="public CPU reference",
    source="ops-transformer's golden function: per token state *= exp(g) exp(gk), state += beta (v - state k) k', "
    "out = state (scale q); the state after each token goes to that token's slot; float32 throughout",
    outputs="out state",
    in_place="state",
    prototype="query key value beta state actual_seq_lengths ssm_state_indices g? gk? num_accepted_tokens?",
)
def recurrent_gated_delta_rule(
    op: Op,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    state: Tensor,
    actual_seq_lengths: Tensor,
    ssm_state_indices: Tensor,
    g: Tensor | None,
    gk: Tensor | None,
) -> tuple[Tensor, Tensor]:
    op.of_dtype(_BF16, query=query, key=key, value=value, beta=beta)
    op.of_dtype(_BF16, _F32, state=state)
    op.of_dtype(_F32, g=g, gk=gk)
    op.of_dtype(_I32, actual_seq_lengths=actual_seq_lengths, ssm_state_indices=ssm_state_indices)
    scale = op.attr("scale_value", 1.0)
    tokens, heads, width = value.shape
    slots, keys = state.shape[0], key.shape[2]
    op.require(query.shape == key.shape and key.shape[0] == tokens, f"query {list(query.shape)}, key {list(key.shape)}")
    op.require(heads % key.shape[1] == 0, f"{heads} value heads over {key.shape[1]} key heads")
    op.require(state.shape[1:] == (heads, width, keys), f"state [S, {heads}, {width}, {keys}] expected")
    op.require(beta.shape == (tokens, heads), f"beta [{tokens}, {heads}] expected, found {list(beta.shape)}")
    op.require(g is None or g.shape == (tokens, heads), f"g [{tokens}, {heads}] expected")
    op.require(gk is None or gk.shape == (tokens, heads, keys), f"gk [{tokens}, {heads}, {keys}] expected")
    op.require(ssm_state_indices.shape == (tokens,), f"{tokens} state indices expected")
    op.require(slots >= tokens, f"{tokens} tokens, {slots} slots: a state of at least as many slots is required")
    if value.is_meta:
        return torch.empty_like(value), state
    group = heads // key.shape[1]
    q = at_least_f32(query).repeat_interleave(group, 1) * scale
    k = at_least_f32(key).repeat_interleave(group, 1)
    keep = torch.ones(tokens, heads, keys, dtype=q.dtype)
    keep = keep if g is None else keep * at_least_f32(g).exp()[..., None]
    keep = keep if gk is None else keep * at_least_f32(gk).exp()
    out = torch.empty_like(value)
    lengths = actual_seq_lengths.tolist()
    op.require(sum(lengths) == tokens, f"actual_seq_lengths sum to {sum(lengths)}, there are {tokens} tokens")
    op.require(
        all(0 < n <= MAX_TOKENS for n in lengths), f"sequences of 1 to {MAX_TOKENS} tokens expected, found {lengths}"
    )
    slot = ssm_state_indices.tolist()
    op.require(all(0 <= s < slots for s in slot), f"a slot outside 0..{slots - 1}")
    first = 0
    for length in lengths:
        memory = at_least_f32(state[slot[first]])
        for t in range(first, first + length):
            memory = memory * keep[t, :, None]
            news = at_least_f32(beta[t])[:, None] * (at_least_f32(value[t]) - (memory * k[t, :, None]).sum(-1))
            memory = memory + news[..., None] * k[t, :, None]
            out[t] = (memory * q[t, :, None]).sum(-1).to(out.dtype)
            state[slot[t]] = memory.to(state.dtype)
        first += length
    return out, state


@ge_op(
    "RecurrentKda",
    provenance="documented formula",
    source="its README and API document in vllm-ascend: gate lower_bound sigmoid(exp(A_log) (g + dt_bias)) or "
    "-exp(A_log) softplus(g + dt_bias); a token: state *= exp(gate), state += beta (v - state k) k', out = scale state "
    "q, all in float32; with inplace_final_state the state is written in place, final_state never",
    outputs="attn_out initial_state final_state",
    in_place="initial_state",
    prototype="query key value gate beta initial_state cu_seqlens? ssm_state_indices? A_log? dt_bias? "
    "num_accepted_tokens?",
)
def recurrent_kda(
    op: Op,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    ssm_state_indices: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step a row: the form that graphs of ours have. Its own L2 norm knows no epsilon, so it is not taken."""
    op.of_dtype(_BF16, query=query, key=key, value=value)
    op.of_dtype(_F32, _BF16, torch.float16, gate=gate, beta=beta)
    op.of_dtype(_BF16, _F32, initial_state=initial_state)
    op.of_dtype(_I32, torch.int64, cu_seqlens=cu_seqlens, ssm_state_indices=ssm_state_indices)
    op.expect(layout="BSND", output_final_state=False, inplace_final_state=True, use_qk_l2norm_in_kernel=False)
    op.expect(allow_neg_eigval=False)
    op.must(state_v_first=True)
    op.of_dtype(_F32, A_log=A_log, dt_bias=dt_bias)
    scale, raw, logits = op.attr("scale", 1.0), op.attr("use_gate_in_kernel", False), op.attr(_SIGMOID, False)
    safe, bound = op.attr("safe_gate", False), op.attr("lower_bound", -5.0)
    op.require(raw == (A_log is not None), "A_log belongs to use_gate_in_kernel")
    op.require(raw or (dt_bias is None and not safe), "dt_bias and safe_gate belong to use_gate_in_kernel")
    rows, tokens, heads, width = value.shape
    slots, keys, nk = initial_state.shape[0], key.shape[3], key.shape[2]
    op.require(tokens == 1 and query.shape == key.shape == (rows, 1, nk, keys), f"one token a row, {list(key.shape)}")
    op.require(heads % nk == 0, f"{heads} value heads over {nk} key heads")
    op.require(initial_state.shape[1:] == (heads, width, keys), f"state [S, {heads}, {width}, {keys}] expected")
    op.require(gate.shape == (rows, 1, heads, keys), f"gate [{rows}, 1, {heads}, {keys}] expected")
    op.require(beta.shape == (rows, 1, heads), f"beta [{rows}, 1, {heads}] expected, found {list(beta.shape)}")
    op.require(ssm_state_indices is not None and ssm_state_indices.shape == (rows,), f"{rows} state indices expected")
    op.require(cu_seqlens is None or cu_seqlens.shape == (rows + 1,), f"cu_seqlens [{rows + 1}] expected")
    if value.is_meta:
        return torch.empty_like(value), initial_state, torch.empty_like(initial_state)
    assert ssm_state_indices is not None
    starts = range(rows + 1) if cu_seqlens is None else cu_seqlens.tolist()
    op.require(list(starts) == list(range(rows + 1)), f"cu_seqlens are {list(starts)}, one token each expected")
    out, group = torch.empty_like(value), heads // nk
    for row, slot in enumerate(ssm_state_indices.tolist()):
        op.require(0 <= slot < slots, f"slot {slot} is outside 0..{slots - 1}")
        q, k = (at_least_f32(x[row, 0]).repeat_interleave(group, 0) for x in (query, key))
        kept, share = at_least_f32(gate[row, 0]), at_least_f32(beta[row, 0])
        if A_log is not None:
            z, rate = kept if dt_bias is None else kept + dt_bias.view(heads, keys), A_log.exp()[:, None]
            kept = bound * torch.sigmoid(rate * z) if safe else -rate * F.softplus(z)
        share = torch.sigmoid(share) if logits else share
        memory = at_least_f32(initial_state[slot]) * kept.exp()[:, None]
        news = share[:, None] * (at_least_f32(value[row, 0]) - (memory * k[:, None]).sum(-1))
        memory = memory + news[..., None] * k[:, None]
        out[row, 0] = (memory * (q * scale)[:, None]).sum(-1).to(out.dtype)
        initial_state[slot] = memory.to(initial_state.dtype)
    return out, initial_state, torch.full_like(initial_state, float("nan"))


@ge_op(
    "CausalConv1d",
    provenance="public CPU reference",
    source="ops-transformer's golden function (950): depthwise, weight[0] is the oldest tap as in the golden function "
    "and the kernel (its document says the newest); the last inputs of a sequence become its state",
    outputs="conv_states y",
    in_place="conv_states",
    prototype="x weight conv_states bias? query_start_loc? cache_indices? initial_state_mode? num_accepted_tokens?",
)
def causal_conv1d(
    op: Op,
    x: Tensor,
    weight: Tensor,
    conv_states: Tensor,
    bias: Tensor | None,
    query_start_loc: Tensor | None,
    cache_indices: Tensor | None,
    initial_state_mode: Tensor | None,
) -> tuple[Tensor, Tensor]:
    activation, nobody = op.attr("activation_mode", "silu"), op.attr("null_block_id", 0)
    op.require(activation in ("silu", "none"), f"activation_mode {activation!r}, supported is 'silu' or 'none'")
    op.same_dtype(x, weight, conv_states)
    op.of_dtype(
        _I32, query_start_loc=query_start_loc, cache_indices=cache_indices, initial_state_mode=initial_state_mode
    )
    taps, channels = weight.shape
    op.require(taps in (2, 3, 4), f"width 2, 3 or 4 expected, found {taps}")
    op.require(x.shape[-1] == channels == conv_states.shape[2], f"{channels} channels, x {list(x.shape)}")
    op.require(
        conv_states.shape[1] == taps - 1, f"states of {taps - 1} tokens are supported, found {conv_states.shape[1]}"
    )
    update = x.ndim == 3 and x.shape[1] == 1  # a step always goes on from the state
    op.require(x.ndim == 3 or query_start_loc is not None, "x of two dimensions needs query_start_loc")
    op.require(not update or initial_state_mode is None, "initial_state_mode belongs to more than one token")
    if x.is_meta:
        return conv_states, torch.empty_like(x)
    rows = x.flatten(0, -2)
    starts = query_start_loc.tolist() if query_start_loc is not None else list(range(0, len(rows) + 1, x.shape[1]))
    op.require(starts[0] == 0 and starts[-1] == len(rows), f"query_start_loc runs from {starts[0]} to {starts[-1]}")
    count = len(starts) - 1
    slots = list(range(count)) if cache_indices is None else cache_indices.tolist()
    goes_on = [update] * count if initial_state_mode is None else [bool(m) for m in initial_state_mode.tolist()]
    y = torch.zeros_like(rows)
    for i, slot in enumerate(slots):
        if (cache_indices is not None and slot == nobody) or starts[i] == starts[i + 1]:
            continue
        past = conv_states[slot] if goes_on[i] else torch.zeros_like(conv_states[slot])
        seen = torch.cat([past, rows[starts[i] : starts[i + 1]]])
        windows = at_least_f32(seen).unfold(0, taps, 1)
        made = (windows * at_least_f32(weight).t()).sum(-1)
        made = made if bias is None else made + bias
        y[starts[i] : starts[i + 1]] = (F.silu(made) if activation == "silu" else made).to(y.dtype)
        conv_states[slot] = seen[-(taps - 1) :]
    return conv_states, y.view(x.shape)
