"""Operators with memory: caches, recurrences, convolutions; against loops and against the model's own operators."""

import pytest
import torch
import torch.nn.functional as F

from kimi_graph import ops
from kimi_graph.compile.executor import infer_shapes
from kimi_graph.compile.ge_proto import get_attr, set_attr
from kimi_graph.errors import KimiGraphError

BF16, F32, F64, I32, I64 = torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64


def rand(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def ints(*values: int, dtype: torch.dtype = I32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def one_node(b, type_, inputs, outputs, attrs, states=()):
    """A graph of one node; inputs are tensors, those named in `states` are RefData."""
    edges = {
        name: None if value is None else (b.state if name in states else b.source)(name, value)
        for name, value in inputs.items()
    }
    b.result(*b.node(type_, edges, outputs=outputs, attrs=attrs, name="it"))
    return b


def assert_attributes_are_noticed(make, before):
    """Every attribute of the node, changed, changes the outputs or is refused."""
    node = next(op for op in make().graph.op if op.name == "it")
    for name in sorted(node.attr):
        b = make()
        changed = next(op for op in b.graph.op if op.name == "it")
        value = get_attr(changed, name)
        set_attr(
            changed, name, f"{value}x" if isinstance(value, str) else [7] if isinstance(value, list) else value + 1
        )
        try:
            after = b.run().outputs
        except KimiGraphError:
            continue
        assert not all(torch.equal(x, y) for x, y in zip(before, after, strict=True)), name


# ---- paged cache ---------------------------------------------------------------------------------------------------


def scatter(b, slots, **attrs):
    inputs = {
        "key": rand(4, 1, 6, dtype=BF16),
        "key_cache": rand(3, 2, 1, 6, dtype=BF16),
        "slot_mapping": slots,
        "value": rand(4, 1, 5, dtype=BF16),
        "value_cache": rand(3, 2, 1, 5, dtype=BF16),
        "compress_lens": None,
    }
    given = {"cache_mode": "Norm", "scatter_mode": "None", "strides": [1, 1], "offsets": [0, 0]} | attrs
    return one_node(b, "ScatterPaKvCache", inputs, "key_cache value_cache", given, ("key_cache", "value_cache"))


@pytest.mark.parametrize("dtype", [I32, I64])
def test_tokens_go_to_their_rows_and_negative_slots_are_skipped(build, dtype):
    b = scatter(build, ints(5, 0, -1, 2, dtype=dtype))
    ran = b.run("native")
    for new, cache in (("key", "key_cache"), ("value", "value_cache")):
        expected = b.values[cache].clone().flatten(0, 1)
        expected[5], expected[0], expected[2] = b.values[new][0], b.values[new][1], b.values[new][3]
        assert torch.equal(ran.states[cache].flatten(0, 1), expected)
    assert all(torch.equal(o, s) for o, s in zip(ran.outputs, ran.states.values(), strict=True))


def test_cache_writes_agree_with_the_models_operator(build):
    b = scatter(build, ints(5, 0, 3, 2, dtype=I64))
    v = b.values
    latent, rope = v["key_cache"][:, :, 0], v["value_cache"][:, :, 0]
    new = ops.cache_write(v["key"].transpose(0, 1), v["value"].transpose(0, 1), latent, rope, v["slot_mapping"])
    states = b.run("native").states
    assert torch.equal(states["key_cache"][:, :, 0], new[0])
    assert torch.equal(states["value_cache"][:, :, 0], new[1])


def test_a_slot_past_the_cache_is_refused(build):
    with pytest.raises(KimiGraphError, match=r"it \(ScatterPaKvCache\): a slot outside 0..5"):
        scatter(build, ints(0, 1, 2, 6)).run()


def test_compressed_writes_are_refused(build):
    b = scatter(build, ints(5, 0, 1, 2))
    node = next(op for op in b.graph.op if op.name == "it")
    node.input[5] = "slot_mapping:0"
    with pytest.raises(KimiGraphError, match="input 'compress_lens' is given; supported is none"):
        b.run()


def test_changed_attributes_of_cache_writes_are_noticed(new_builder):
    before = scatter(new_builder(), ints(5, 0, 1, 2)).run().outputs
    assert_attributes_are_noticed(lambda: scatter(new_builder(), ints(5, 0, 1, 2)), before)


# ---- recurrences ---------------------------------------------------------------------------------------------------


def delta_rule(b, lengths, indices, *, heads=2, key_heads=2, slots=6, g=False, gk=True, **replace):
    tokens = sum(lengths)
    inputs = {
        "query": F.normalize(rand(tokens, key_heads, 8), dim=-1).to(BF16),
        "key": F.normalize(rand(tokens, key_heads, 8) + 1, dim=-1).to(BF16),
        "value": rand(tokens, heads, 5, dtype=BF16),
        "beta": rand(tokens, heads).sigmoid().to(BF16),
        "state": rand(slots, heads, 5, 8),
        "actual_seq_lengths": ints(*lengths),
        "ssm_state_indices": ints(*indices),
        "g": -rand(tokens, heads).abs() if g else None,
        "gk": -rand(tokens, heads, 8).abs() if gk else None,
        "num_accepted_tokens": None,
    } | replace
    return one_node(b, "RecurrentGatedDeltaRule", inputs, "out state", {"scale_value": 0.5}, ("state",))


def expected_delta_rule(v, lengths, indices):
    """The document's formula in float64: S_t = decay S + beta (v - decay S k) k', o = scale S q."""
    d = {n: t.double() if t is not None and t.is_floating_point() else t for n, t in v.items()}
    _, heads, _ = d["value"].shape
    group = heads // d["key"].shape[1]
    state, out, first = d["state"].clone(), torch.zeros_like(d["value"]), 0
    for length in lengths:
        for h in range(heads):
            s = state[indices[first], h].clone()
            for t in range(first, first + length):
                q, k = d["query"][t, h // group], d["key"][t, h // group]
                decay = torch.ones(8, dtype=F64)
                decay = decay * d["g"][t, h].exp() if d.get("g") is not None else decay
                decay = decay * d["gk"][t, h].exp() if d.get("gk") is not None else decay
                s = s @ torch.diag(decay)
                s = s + d["beta"][t, h] * torch.outer(d["value"][t, h] - s @ k, k)
                out[t, h] = 0.5 * (s @ q)
                state[indices[t], h] = s
        first += length
    return out, state


@pytest.mark.parametrize("g, gk", [(False, True), (True, False), (True, True), (False, False)])
def test_the_delta_rule_follows_its_formula(build, g, gk):
    lengths, indices = [1, 3, 1], [4, 2, 2, 5, 0]
    b = delta_rule(build, lengths, indices, heads=4, key_heads=2, g=g, gk=gk)
    ran = b.run()
    out, state = expected_delta_rule(b.values, lengths, indices)
    torch.testing.assert_close(ran.outputs[0], out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ran.states["state"], state, rtol=1e-12, atol=1e-12)


def test_one_step_of_the_delta_rule_is_the_models_step(build):
    b = delta_rule(build, [1, 1, 1], [4, 2, 1])
    v = {n: t.double()[:, None] if t.is_floating_point() and n != "state" else t for n, t in b.values.items()}
    o, memory = ops.kda_step(
        v["query"], v["key"], v["value"], v["gk"], v["beta"], v["state"].double(), v["ssm_state_indices"], 0.5
    )
    ran = b.run()
    torch.testing.assert_close(ran.outputs[0], o[:, 0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ran.states["state"], memory, rtol=1e-10, atol=1e-10)


def test_a_native_delta_rule_rounds_its_output_alone(build):
    lengths, indices = [2, 1], [4, 4, 2]
    b = delta_rule(build, lengths, indices)
    ran = b.run("native")
    out, state = expected_delta_rule(b.values, lengths, indices)
    assert (ran.outputs[0].dtype, ran.states["state"].dtype) == (BF16, F32)
    torch.testing.assert_close(ran.states["state"].double(), state, rtol=1e-5, atol=1e-6)  # float32 sums of 8
    torch.testing.assert_close(ran.outputs[0].double(), out, rtol=2**-8, atol=2**-10)  # one rounding of bfloat16


@pytest.mark.parametrize(
    "change, message",
    [
        ({"slots": 2}, "3 tokens, 2 slots"),
        ({"beta": rand(3, 2)}, "input 'beta' is torch.float32, supported is torch.bfloat16"),
        ({"key": rand(3, 2, 7, dtype=BF16)}, r"query \[3, 2, 8\], key \[3, 2, 7\]"),
        ({"beta": rand(3, 1, dtype=BF16)}, r"beta \[3, 2\] expected, found \[3, 1\]"),
        ({"actual_seq_lengths": ints(1, 1)}, "actual_seq_lengths sum to 2, there are 3 tokens"),
        ({"actual_seq_lengths": ints(0, 3)}, "sequences of 1 to 8 tokens expected"),
        ({"ssm_state_indices": ints(0, 1, 6)}, "a slot outside 0..5"),
    ],
)
def test_delta_rules_outside_the_document_are_refused(build, change, message):
    with pytest.raises(KimiGraphError, match=rf"it \(RecurrentGatedDeltaRule\): {message}"):
        delta_rule(build, [1, 1, 1], [4, 2, 1], **change).run("native")


def test_changed_attributes_of_the_delta_rule_are_noticed(new_builder):
    before = delta_rule(new_builder(), [1, 1], [4, 2]).run().outputs
    assert_attributes_are_noticed(lambda: delta_rule(new_builder(), [1, 1], [4, 2]), before)


def kda_step(b, *, heads=4, key_heads=2, attrs=None, **replace):
    inputs = {
        "query": F.normalize(rand(3, 1, key_heads, 8), dim=-1).to(BF16),
        "key": F.normalize(rand(3, 1, key_heads, 8) + 1, dim=-1).to(BF16),
        "value": rand(3, 1, heads, 5, dtype=BF16),
        "gate": -rand(3, 1, heads, 8).abs(),
        "beta": rand(3, 1, heads).sigmoid(),
        "initial_state": rand(6, heads, 5, 8),
        "cu_seqlens": ints(0, 1, 2, 3),
        "ssm_state_indices": ints(4, 2, 5),
        "A_log": None,
        "dt_bias": None,
        "num_accepted_tokens": None,
    } | replace
    attrs = {"scale": 0.5, "inplace_final_state": True, "state_v_first": True} | (attrs or {})
    return one_node(b, "RecurrentKda", inputs, "attn_out initial_state final_state", attrs, ("initial_state",))


def test_recurrent_kda_is_the_delta_rule_with_a_decay_for_each_channel(build):
    b = kda_step(build)
    ran = b.run()
    v = {n: t[:, 0] if t.ndim > 2 and n != "initial_state" else t for n, t in b.values.items()}
    v |= {"state": v["initial_state"], "gk": v["gate"]}
    out, state = expected_delta_rule(v, [1, 1, 1], [4, 2, 5])
    torch.testing.assert_close(ran.outputs[0][:, 0], out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ran.states["initial_state"], state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bound", [None, -3.0], ids=str)
def test_recurrent_kda_makes_its_gate_and_beta_where_it_is_told_to(build, bound):
    raw, logits, rate, bias = rand(3, 1, 4, 8), rand(3, 1, 4), rand(4), rand(4, 8)
    attrs = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "safe_gate": bound is not None}
    attrs |= {} if bound is None else {"lower_bound": bound}
    given = {"gate": raw, "beta": logits, "A_log": rate, "dt_bias": bias}
    b = kda_step(build, attrs=attrs, **given)
    v = {n: t[:, 0] if t.ndim > 2 and n != "initial_state" else t for n, t in b.values.items()}
    z = raw.double()[:, 0] + bias.double()
    decay = ops.kda_gate(z, torch.zeros(4, 8, dtype=F64), rate.double(), bound)
    v |= {"state": v["initial_state"], "gk": decay, "beta": logits.double()[:, 0].sigmoid()}
    out, state = expected_delta_rule(v, [1, 1, 1], [4, 2, 5])
    ran = b.run()
    torch.testing.assert_close(ran.outputs[0][:, 0], out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ran.states["initial_state"], state, rtol=1e-12, atol=1e-12)


def test_the_last_result_of_recurrent_kda_is_never_written(build):
    assert kda_step(build).run().outputs[2].isnan().all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"ssm_state_indices": ints(0, 1, 6)}, "slot 6 is outside 0..5"),
        ({"cu_seqlens": ints(0, 1, 1, 3)}, r"cu_seqlens are \[0, 1, 1, 3\], one token each expected"),
        ({"A_log": rand(4)}, "A_log belongs to use_gate_in_kernel"),
        ({"dt_bias": rand(4, 8)}, "dt_bias and safe_gate belong to use_gate_in_kernel"),
        ({"gate": -rand(3, 1, 2, 8).abs()}, r"gate \[3, 1, 4, 8\] expected"),
        ({"query": rand(3, 1, 2, 8)}, "input 'query' is torch.float32, supported is torch.bfloat16"),
    ],
)
def test_a_recurrent_kda_that_graphs_of_ours_do_not_have_is_refused(build, change, message):
    with pytest.raises(KimiGraphError, match=rf"it \(RecurrentKda\): {message}"):
        kda_step(build, **change).run("native")


def test_changed_attributes_of_recurrent_kda_are_noticed(new_builder):
    before = kda_step(new_builder()).run().outputs[:2]
    assert_attributes_are_noticed(lambda: kda_step(new_builder()), before)


def test_kda_step_of_ours_is_the_models_step(build):
    inputs = {"q": F.normalize(rand(3, 1, 2, 8), dim=-1), "k": F.normalize(rand(3, 1, 2, 8) + 1, dim=-1)}
    inputs |= {"v": rand(3, 1, 2, 5), "decay": -rand(3, 1, 2, 8).abs(), "beta": rand(3, 1, 2).sigmoid()}
    inputs |= {"memory": rand(6, 2, 5, 8), "slots": ints(4, 2, 5), "bias": None, "log_rate": None}
    ran = one_node(build, "KdaStep", inputs, "o memory", {"scale": 0.5}, ("memory",)).run()
    v = {n: t.double() if t.is_floating_point() else t for n, t in build.values.items()}
    o, memory = ops.kda_step(*v.values(), 0.5)
    torch.testing.assert_close(ran.outputs[0], o, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ran.states["memory"], memory, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bound", [None, -3.0], ids=str)
def test_kda_step_of_ours_makes_norms_gate_and_beta_where_it_is_told_to(build, bound):
    inputs = {"q": rand(3, 1, 2, 8), "k": rand(3, 1, 2, 8), "v": rand(3, 1, 2, 5), "decay": rand(3, 1, 2, 8)}
    inputs |= {"beta": rand(3, 1, 2), "memory": rand(6, 2, 5, 8), "slots": ints(4, 2, 5)}
    inputs |= {"bias": rand(2, 8), "log_rate": rand(2)}
    attrs = {"scale": 0.5, "norm_eps": 2**-10, "beta_logits": True, "lower_bound": bound or 0.0}
    ran = one_node(build, "KdaStep", inputs, "o memory", attrs, ("memory",)).run()
    v = {n: t.double() if t.is_floating_point() else t for n, t in build.values.items()}
    q, k = (ops.l2_norm(v[n], 2**-10) for n in "qk")
    decay = ops.kda_gate(v["decay"], v["bias"], v["log_rate"], bound)
    o, memory = ops.kda_step(q, k, v["v"], decay, v["beta"].sigmoid(), v["memory"], v["slots"], 0.5)
    torch.testing.assert_close(ran.outputs[0], o, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ran.states["memory"], memory, rtol=1e-12, atol=1e-12)


def rows(slots, lengths, counts):
    return {"slots": ints(*slots), "lengths": ints(*lengths, dtype=I64), "counts": ints(*counts, dtype=I64)}


def chunk(b, tokens=5):
    inputs = {
        "q": F.normalize(rand(3, tokens, 2, 4), dim=-1),
        "k": F.normalize(rand(3, tokens, 2, 4) + 1, dim=-1),
        "v": rand(3, tokens, 2, 6),
        "decay": -rand(3, tokens, 2, 4).abs(),
        "beta": rand(3, tokens, 2).sigmoid(),
        "memory": rand(5, 2, 6, 4),
    } | rows([3, 1, 4], [9, 3, 5], [5, 3, 0])
    return one_node(b, "KdaChunk", inputs, "o memory", {"scale": 0.5}, ("memory",))


def test_a_chunk_is_the_models_chunk(build):
    b = chunk(build)
    v = {n: t.double() if t.is_floating_point() else t for n, t in b.values.items()}
    o, memory = ops.kda_chunk(*v.values(), 0.5)
    ran = b.run()
    torch.testing.assert_close(ran.states["memory"], memory, rtol=1e-10, atol=1e-10)
    for row, count in enumerate([5, 3, 0]):
        torch.testing.assert_close(ran.outputs[0][row, :count], o[row, :count], rtol=1e-10, atol=1e-10)


def test_a_chunk_is_as_many_steps_of_the_delta_rule(build, new_builder):
    b = chunk(build)
    ran = b.run()
    v = b.values
    step = {"query": v["q"][0], "key": v["k"][0], "value": v["v"][0], "beta": v["beta"][0], "state": v["memory"]}
    step |= {"actual_seq_lengths": ints(5), "ssm_state_indices": ints(3, 3, 3, 3, 3), "g": None, "gk": v["decay"][0]}
    steps = one_node(
        new_builder(), "RecurrentGatedDeltaRule", step, "out state", {"scale_value": 0.5}, ("state",)
    ).run()
    torch.testing.assert_close(ran.outputs[0][0], steps.outputs[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ran.states["memory"][3], steps.states["state"][3], rtol=1e-12, atol=1e-12)


def test_changed_attributes_of_a_chunk_are_noticed(new_builder):
    assert_attributes_are_noticed(lambda: chunk(new_builder()), chunk(new_builder()).run().outputs)


# ---- convolutions --------------------------------------------------------------------------------------------------


def convolution(b, dtype=F32):
    inputs = {
        "x": rand(3, 5, 2, 4, dtype=dtype),
        "weight": rand(2, 4, 4),
        "window": rand(5, 2, 4, 3, dtype=dtype),
    } | rows([3, 1, 4], [9, 3, 7], [5, 3, 1])
    return one_node(b, "ShortConv", inputs, "y window", {}, ("window",))


def test_a_short_convolution_is_the_models_operator(build):
    b = convolution(build)
    y, window = ops.short_conv(*(t.double() if t.is_floating_point() else t for t in b.values.values()))
    ran = b.run()
    torch.testing.assert_close(ran.states["window"], window, rtol=1e-12, atol=1e-12)
    for row, count in enumerate([5, 3, 1]):
        torch.testing.assert_close(ran.outputs[0][row, :count], y[row, :count], rtol=1e-12, atol=1e-12)


def test_a_short_convolution_is_torchs_depthwise_convolution(build):
    b = convolution(build)
    x, weight, window = (b.values[n].double() for n in ("x", "weight", "window"))
    seen = torch.cat([window[3], x[0].permute(1, 2, 0)], -1).flatten(0, 1)[None]
    made = F.silu(F.conv1d(seen, weight.flatten(0, 1)[:, None], groups=8))[0].view(2, 4, 5).permute(2, 0, 1)
    torch.testing.assert_close(b.run().outputs[0][0], made, rtol=1e-12, atol=1e-12)


def causal(b, x, starts=None, slots=(3, 1), modes=None, **attrs):
    inputs = {
        "x": x,
        "weight": rand(4, 8),
        "conv_states": rand(5, 3, 8),
        "bias": None,
        "query_start_loc": None if starts is None else ints(*starts),
        "cache_indices": ints(*slots),
        "initial_state_mode": None if modes is None else ints(*modes),
    }
    given = {"activation_mode": "silu", "null_block_id": 0} | attrs
    return one_node(b, "CausalConv1d", inputs, "conv_states y", given, ("conv_states",))


def test_a_causal_convolution_over_rows_of_unequal_length_starts_or_goes_on(build):
    b = causal(build, rand(7, 8), starts=(0, 5, 7), modes=(1, 0))
    v = {n: t.double() if t.is_floating_point() else t for n, t in b.values.items()}
    ran = b.run()
    for first, last, slot, past in ((0, 5, 3, v["conv_states"][3]), (5, 7, 1, torch.zeros(3, 8, dtype=F64))):
        seen = torch.cat([past, v["x"][first:last]])
        made = F.silu(F.conv1d(seen.t()[None], v["weight"].t()[:, None], groups=8))[0].t()
        torch.testing.assert_close(ran.outputs[1][first:last], made, rtol=1e-12, atol=1e-12)
        assert torch.equal(ran.states["conv_states"][slot], seen[-3:])


def test_a_step_of_the_causal_convolution_always_goes_on(build):
    b = causal(build, rand(2, 1, 8))
    seen = torch.cat([b.values["conv_states"][3], b.values["x"][0]]).double()
    ran = b.run()
    made = F.silu((seen * b.values["weight"].double()).sum(0))
    torch.testing.assert_close(ran.outputs[1][0, 0], made, rtol=1e-12, atol=1e-12)
    assert torch.equal(ran.states["conv_states"][3], seen[1:])


def test_rows_of_the_null_block_are_skipped(build):
    b = causal(build, rand(2, 1, 8), slots=(0, 1))
    ran = b.run("native")
    assert torch.equal(ran.states["conv_states"][0], b.values["conv_states"][0])
    assert not ran.outputs[1][0].any()


def test_causal_and_short_convolution_agree(build, new_builder):
    short = convolution(build)
    v = short.values
    y, window = short.run().outputs
    lined_up = torch.cat([v["x"][0], v["x"][1, :3], v["x"][2, :1]]).flatten(1)
    inputs = {
        "x": lined_up,
        "weight": v["weight"].flatten(0, 1).t().contiguous(),
        "conv_states": v["window"].flatten(1, 2).mT.contiguous(),
        "bias": None,
        "query_start_loc": ints(0, 5, 8, 9),
        "cache_indices": v["slots"],
        "initial_state_mode": ints(1, 0, 1),
    }
    given = {"activation_mode": "silu", "null_block_id": 0}
    causal = one_node(new_builder(), "CausalConv1d", inputs, "conv_states y", given, ("conv_states",)).run()
    expected = torch.cat([y[0], y[1, :3], y[2, :1]]).flatten(1)
    torch.testing.assert_close(causal.outputs[1], expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(causal.outputs[0].mT.unflatten(1, (2, 4)), window)


def test_changed_attributes_of_the_causal_convolution_are_noticed(new_builder):
    def make():
        return causal(new_builder(), rand(2, 1, 8))  # slot 1 is nobody's where null_block_id becomes 1

    assert_attributes_are_noticed(make, make().run().outputs)


def test_a_gated_norm_is_the_models_operator(build):
    inputs = {"x": rand(3, 2, 8), "gate": rand(3, 2, 8) + 1, "weight": rand(8)}
    b = one_node(build, "GatedRmsNorm", inputs, "y", {"eps": 1e-5})
    expected = ops.gated_rms_norm(*(t.double() for t in inputs.values()), 1e-5)
    torch.testing.assert_close(b.run().outputs[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [chunk, convolution])
def test_shapes_of_own_operators_are_those_of_real_runs(build, make):
    infer_shapes(make(build).model)
    build.run("native")  # checks every output against its description


@pytest.mark.parametrize(
    "make",
    [
        lambda b: scatter(b, ints(5, 0, -1, 2)),
        lambda b: delta_rule(b, [1, 2], [4, 2, 2]),
        lambda b: causal(b, rand(7, 8), starts=(0, 5, 7), modes=(1, 0)),
    ],
    ids=["ScatterPaKvCache", "RecurrentGatedDeltaRule", "CausalConv1d"],
)
def test_shapes_of_operators_with_memory_are_those_of_real_runs(build, make):
    infer_shapes(make(build).model)
    build.run("native")
