"""Each layer alone: parts and steps give the whole, gradients pass, rows and the future do not matter."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from kimi_graph import layers, ops, tree
from kimi_graph.config import IndexerConfig, KdaConfig, MlaConfig, MoeConfig, RopeConfig
from kimi_graph.errors import ConfigError

D = 10  # embed
KDA = KdaConfig(heads=2, key=6, value=5, conv_width=4, gate_rank=3, stored_rates=(2,))
BOUNDED = dataclasses.replace(KDA, gate_lower_bound=-5.0, full_rank_gate=True, stored_rates=(4,))
MLA = MlaConfig(heads=3, latent=7, key_nope=5, key_rope=4, value=6, scale=1 / 3)
ROPE = RopeConfig(theta=100.0, interleaved=True)
GATED = dataclasses.replace(MLA, query_latent=6, output_gate=True, rope=ROPE)
INDEXER = IndexerConfig(heads=16, key=6, top_k=4, eps=1e-6, rope=4, interleaved=False)
SPARSE = dataclasses.replace(GATED, indexer=INDEXER)
MOE = MoeConfig(experts=6, top_k=2, ffn=4, shared_ffn=5, scale=2.446)
MIXERS = {"kda": KDA, "kda bounded": BOUNDED, "mla": MLA, "mla gated": GATED, "mla sparse": SPARSE}
WIDE: dict[str, Any] = {"rope": (ROPE, 4), "dtype": torch.float64}  # of a batch
ROUNDING = 1e-12  # float64, sums in another order
mixers = pytest.mark.parametrize("c", MIXERS.values(), ids=MIXERS)
narrow = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def params(c: Any, dtype: torch.dtype = torch.float64) -> Any:
    specs = {
        KdaConfig: lambda: layers.kda_specs(c, D),
        MlaConfig: lambda: layers.mla_specs(c, D),
        MoeConfig: lambda: layers.moe_specs(c, D),
        int: lambda: layers.ffn_specs(c, D),
    }[type(c)]()

    def make(spec):
        fixed = spec.dtype if dtype != torch.float64 else None
        return (torch.randn(spec.shape, dtype=torch.float64) * spec.shape[-1] ** -0.5).to(fixed or dtype)

    return tree.map(make, specs)


def mix(p, c, x, state=None, batch=None, **how):
    if isinstance(c, KdaConfig):
        return layers.kda(p, c, x, state, batch, **how)
    return layers.mla(p, c, x, state, batch, **how)[:2]


def room(c, rows, tokens, like):
    """An empty state for rows of up to `tokens` tokens, in the layout of `row_batch`."""
    if isinstance(c, KdaConfig):
        return layers.zero_state(layers.kda_state_specs(c, rows + 1, like.dtype), like)
    return layers.zero_state(layers.mla_state_specs(c, rows + 1, tokens, like.dtype), like)


def run(p, c, x):
    """Any layer on new sequences: its output."""
    if isinstance(c, MoeConfig):
        return layers.moe(p, c, x)
    return layers.ffn(p, x) if isinstance(c, int) else mix(p, c, x)[0]


def normal(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64).to(dtype)


@mixers
@pytest.mark.parametrize("parts", [[1] * 9, [5, 4], [1, 7, 1], [3, 0, 6]], ids=str)
def test_parts_and_steps_equal_the_whole(c, parts):
    p, x = params(c), normal(2, 9, D)
    whole, last = mix(p, c, x)
    state, outs, seen = room(c, 2, 9, x), [], 0
    for size in parts:
        batch = layers.row_batch(2, size, before=seen, room=9, **WIDE)
        y, state = mix(p, c, x[:, seen : seen + size], state, batch, step=size == 1 and seen > 0)
        outs.append(y)
        seen += size
    torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=ROUNDING, atol=ROUNDING)
    for ours, want in zip(tree.leaves(state), tree.leaves(last), strict=True):
        torch.testing.assert_close(ours[1:], want[1:], rtol=ROUNDING, atol=ROUNDING)


@mixers
def test_ragged_rows_are_the_rows_alone(c):
    p, x = params(c), normal(3, 8, D)
    counts = torch.tensor([8, 3, 1])
    slots = table = torch.tensor([2, 3, 1], dtype=torch.int32)
    batch = layers.step_batch(table[:, None], slots, torch.zeros(3, dtype=torch.int64), counts, 8, 8, **WIDE)
    y, state = mix(p, c, x, room(c, 3, 8, x), batch)
    for row, count in enumerate(counts.tolist()):
        alone, own = mix(p, c, x[row : row + 1, :count])
        torch.testing.assert_close(y[row, :count], alone[0], rtol=ROUNDING, atol=ROUNDING)
        for ours, want in zip(tree.leaves(state), tree.leaves(own), strict=True):
            size = count if isinstance(c, MlaConfig) else None
            torch.testing.assert_close(ours[slots[row], :size], want[1, :size], rtol=ROUNDING, atol=ROUNDING)


@mixers
def test_what_slots_and_pages_held_before_does_not_matter(c):
    p, x = params(c), normal(2, 5, D)
    stale = tree.map(lambda s: torch.full_like(s, float("nan")), room(c, 2, 9, x))
    y, state = mix(p, c, x, stale, layers.row_batch(2, 5, room=9, **WIDE))
    torch.testing.assert_close(y, mix(p, c, x)[0], rtol=ROUNDING, atol=ROUNDING)
    more = normal(2, 1, D)
    y, _ = mix(p, c, more, state, layers.row_batch(2, 1, before=5, room=9, **WIDE), step=True)
    torch.testing.assert_close(y, mix(p, c, torch.cat([x, more], 1))[0][:, -1:], rtol=ROUNDING, atol=ROUNDING)


@narrow
@pytest.mark.parametrize("c", [KDA, BOUNDED, MLA, GATED, 7], ids=["kda", "kda bounded", "mla", "mla gated", "ffn"])
def test_a_changed_token_leaves_outputs_before_it_bitwise_equal(c, dtype):
    p, x = params(c, dtype), normal(1, 80, D, dtype=dtype)
    before = run(p, c, x)
    for t in (0, 1, 17, 63, 64, 79):
        changed = x.clone()
        changed[:, t] = normal(D, dtype=dtype)
        after = run(p, c, changed)
        assert torch.equal(after[:, :t], before[:, :t]) and not torch.equal(after[:, t], before[:, t])


def test_a_changed_token_changes_no_other_row_of_the_experts():
    """Not bitwise: it changes how many rows an expert's product has."""
    p, x = params(MOE, torch.float32), normal(1, 80, D, dtype=torch.float32)
    before = run(p, MOE, x)
    for t in (0, 40, 79):
        changed = x.clone()
        changed[:, t] = normal(D, dtype=torch.float32)
        others = torch.arange(80) != t
        worst = (run(p, MOE, changed) - before)[:, others].abs().max()
        assert worst <= 1e-6 * before.abs().max()


def test_the_experts_equal_a_loop_over_rows():
    p, x = params(MOE), normal(2, 20, D)
    probability = (x @ p.router.T).sigmoid()
    y = torch.zeros_like(x)
    for b, t in ((b, t) for b in range(2) for t in range(20)):
        best = (probability[b, t] + p.bias).argsort(descending=True)[: MOE.top_k]
        share = probability[b, t, best] / probability[b, t, best].sum() * float(torch.tensor(MOE.scale))
        for e, w in zip(best, share, strict=True):
            gate, up = p.gate_up[e] @ x[b, t]
            y[b, t] += w * (p.down[e] @ (F.silu(gate) * up))
    torch.testing.assert_close(layers.moe(p, MOE, x), y + layers.ffn(p.shared, x))


@pytest.mark.parametrize("c", [*MIXERS.values(), MOE, 7], ids=[*MIXERS, "moe", "ffn"])
def test_gradients_of_input_and_every_weight_are_those_of_finite_differences(c):
    p, x = params(c), normal(2, 5, D).requires_grad_()
    leaves, rebuild = tree.leaves(p), lambda values: _like(p, values)
    assert torch.autograd.gradcheck(
        lambda x, *values: run(rebuild(values), c, x), [x, *(v.requires_grad_() for v in leaves)], fast_mode=True
    )


@mixers
def test_gradients_of_steps_reach_the_state_and_the_weights(c):
    p, x = params(c), normal(1, 2, D)
    _, state = mix(p, c, x[:, :1], room(c, 1, 6, x), layers.row_batch(1, 1, room=6, **WIDE))
    values = tree.leaves(p) + tree.leaves(state)

    def f(*values):
        weights, before = values[: -len(tree.leaves(state))], values[-len(tree.leaves(state)) :]
        batch = layers.row_batch(1, 1, before=1, room=6, **WIDE)
        y, after = mix(_like(p, weights), c, x[:, 1:], _like(state, before), batch, step=True)
        return y, *tree.leaves(after)

    assert torch.autograd.gradcheck(f, [v.detach().requires_grad_() for v in values], fast_mode=True)


def _like(node, values):
    values = iter(values)
    return tree.map(lambda _: next(values), node)


@pytest.mark.parametrize("c", [KDA, MLA, SPARSE, 7], ids=["kda", "mla", "mla sparse", "ffn"])
def test_gradients_per_sequence_by_vmap_are_those_of_a_loop(c):
    p, x = params(c), normal(3, 5, D)

    def loss(p, row):
        return run(p, c, row[None]).square().sum()

    each = vmap(grad(loss), in_dims=(None, 0))(p, x)
    for i in range(3):
        for a, b in zip(tree.leaves(each), tree.leaves(grad(loss)(p, x[i])), strict=True):
            torch.testing.assert_close(a[i], b)


def test_layers_train():
    """Plain functions, plain optimiser: a stack of all layers learns to copy the token before."""
    torch.manual_seed(1)
    cs = [KDA, 7, MLA, MOE]
    ps = [tree.map(lambda w: w.requires_grad_(), params(c, torch.float32)) for c in cs]
    optimiser = torch.optim.Adam(tree.leaves(tuple(ps)), lr=2e-2)
    x = normal(4, 12, D, dtype=torch.float32)
    losses = []
    for _ in range(30):
        h = x
        for p, c in zip(ps, cs, strict=True):
            h = h + run(p, c, h)
        loss = (h[:, 1:] - x[:, :-1]).square().mean()
        losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < 0.5 * losses[0]


@narrow
@pytest.mark.parametrize("c", [*MIXERS.values(), MOE, 7], ids=[*MIXERS, "moe", "ffn"])
def test_narrow_dtypes_agree_with_float64_on_the_same_numbers(c, dtype):
    p, x = params(c, dtype), normal(2, 40, D, dtype=dtype)
    y = run(p, c, x)
    assert y.dtype == dtype
    want = run(tree.map(torch.Tensor.double, p), c, x.double())
    worst = (y.double() - want).abs().amax(-1) / want.abs().max()
    # about ten roundings on the way (2^-9 each in bfloat16); a row whose experts change with a rounding is another sum
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5
    assert (worst < tolerance).double().mean() >= (0.95 if isinstance(c, MoeConfig) else 1)


def test_state_goes_with_batch():
    p, x = params(KDA), normal(1, 3, D)
    with pytest.raises(ConfigError, match="`state` or `batch` without the other"):
        layers.kda(p, KDA, x, room(KDA, 1, 3, x))
    with pytest.raises(ConfigError, match="mla"):
        layers.mla(params(MLA), MLA, x, batch=layers.row_batch(1, 3))


@mixers
def test_a_step_takes_one_token(c):
    with pytest.raises(ConfigError, match=r"step=True takes one token a row, found 3"):
        mix(params(c), c, normal(1, 3, D), step=True)


@pytest.mark.parametrize("c", [KDA, MLA, MOE, 7], ids=["kda", "mla", "moe", "ffn"])
def test_shapes_are_known_without_values(c):
    p, x = params(c, torch.bfloat16), normal(2, 5, D, dtype=torch.bfloat16)
    y = run(p, c, x)
    hollow = run(tree.map(lambda w: w.to("meta"), p), c, x.to("meta"))
    assert hollow.is_meta and (hollow.shape, hollow.dtype, hollow.stride()) == (y.shape, y.dtype, y.stride())


@mixers
def test_a_state_given_away_is_written_in_place(c):
    p, x = params(c), normal(1, 4, D)
    state, batch = room(c, 1, 6, x), layers.row_batch(1, 4, room=6, **WIDE)
    _, pure = mix(p, c, x, state, batch)
    assert not any(s.any() for s in tree.leaves(state))
    with ops.donating():
        _, same = mix(p, c, x, state, batch)
    for s, given, want in zip(tree.leaves(same), tree.leaves(state), tree.leaves(pure), strict=True):
        assert s.data_ptr() == given.data_ptr() and torch.equal(s, want)
