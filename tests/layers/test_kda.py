"""K3's delta attention: bounded decay and full-rank gate, against the recurrence in plain float64."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_graph import layers, tree
from kimi_graph.config import KdaConfig
from tests.layers.oracle import assert_close, values

EMBED = 24
K3 = KdaConfig(
    heads=3, key=8, value=6, conv_width=4, gate_rank=5, gate_lower_bound=-5.0, full_rank_gate=True, stored_rates=(8,),
    conv_dtype=torch.float32,
)  # fmt: skip
LINEAR = dataclasses.replace(
    K3, gate_lower_bound=None, full_rank_gate=False, stored_rates=(1, 1, 3, 1), conv_dtype=None
)


def conv(x: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise, then SiLU: `[T, channels]`, `[channels, W]`."""
    padded = torch.cat([x.new_zeros(weight.shape[1] - 1, x.shape[1]), x])
    y = sum(padded[j : j + len(x)] * weight[:, j] for j in range(weight.shape[1]))
    return y / (1 + (-y).exp())


def plain(p: Any, c: KdaConfig, x: Tensor, eps: float) -> Tensor:
    """One sequence `[T, D]`, head by head and token by token, from the fact sheet of models, sections 3.1 and 3.2."""
    out = torch.zeros_like(x)
    for h in range(c.heads):
        q, k, v = (
            conv(x @ w[h].mT, taps[h])
            for w, taps in ((p.query, p.query_conv), (p.key, p.key_conv), (p.value, p.value_conv))
        )
        q, k = (y / (y.square().sum(-1, keepdim=True) + float(torch.tensor(1e-6))).sqrt() for y in (q, k))
        z = (x @ p.decay_down.mT) @ p.decay_up[h].mT + p.decay_bias[h]
        rate = p.log_rate[h].exp()
        if c.gate_lower_bound is None:
            decay = -rate * torch.log1p(z.exp())
        else:
            decay = c.gate_lower_bound / (1 + (-rate * z).exp())
        beta = 1 / (1 + (-(x @ p.beta[h])).exp())
        gate = x @ p.gate[h].mT if p.gate is not None else (x @ p.gate_down.mT) @ p.gate_up[h].mT
        memory = x.new_zeros(c.key, c.value)
        for t in range(len(x)):
            memory = decay[t].exp()[:, None] * memory
            memory = memory + torch.outer(k[t], beta[t] * (v[t] - k[t] @ memory))
            o = (q[t] * float(torch.tensor(c.key**-0.5))) @ memory
            o = o / (o.square().mean() + eps).sqrt() * p.norm / (1 + (-gate[t]).exp())
            out[t] += p.out[:, h] @ o
    return out


@pytest.mark.parametrize("config", [K3, LINEAR], ids=["k3", "linear"])
@pytest.mark.parametrize("tokens", [1, 3, 67])
def test_a_layer_is_the_plain_recurrence(config, tokens):
    p, x = values(layers.kda_specs(config, EMBED), torch.float64), torch.randn(2, tokens, EMBED).double()
    want = torch.stack([plain(p, config, row, float(torch.tensor(1e-5))) for row in x])
    assert_close(layers.kda(p, config, x)[0], want, 1e-11)


def test_steps_continue_what_a_chunk_left():
    p, x = values(layers.kda_specs(K3, EMBED), torch.float64), torch.randn(2, 9, EMBED).double()
    whole, after = layers.kda(p, K3, x)
    y, state = layers.kda(p, K3, x[:, :6])
    outs = [y]
    for t in range(6, 9):
        y, state = layers.kda(p, K3, x[:, t : t + 1], state, layers.row_batch(2, 1, before=t), step=True)
        outs.append(y)
    assert_close(torch.cat(outs, 1), whole, 1e-12)
    tree.map(lambda got, want: assert_close(got[1:], want[1:], 1e-12), state, after)  # slot 0 is nobody's


def test_the_bounded_decay_of_a_strong_gate_stays_above_its_bound():
    p, x = values(layers.kda_specs(K3, EMBED), torch.float64), 100 * torch.randn(1, 5, EMBED).double()
    from kimi_graph.taps import collect

    with collect(["decay"]) as found:
        layers.kda(p, K3, x)
    assert found["decay"].min() >= -5
    assert found["decay"].max() <= 0


def test_released_names_shapes_and_padding():
    # fact sheet of models, section 2.2: A_log holds 96 rates and 32 zeros (public case W1)
    full = KdaConfig(
        heads=96, key=128, value=128, conv_width=4, gate_rank=128, gate_lower_bound=-5.0, full_rank_gate=True,
        stored_rates=(128,), conv_dtype=torch.float32,
    )  # fmt: skip
    specs = layers.kda_specs(full, 7168)
    assert (specs.log_rate.shape, specs.log_rate.stored, specs.log_rate.padding) == ((96,), (128,), 32)
    named = {s.source[0]: (s.stored, s.dtype) for s in tree.leaves(specs)}
    assert named["g_proj.weight"] == ((12288, 7168), None)
    assert named["q_conv1d.weight"] == ((12288, 1, 4), torch.float32)
    assert named["o_norm.weight"] == ((128,), torch.float32)
    assert not {"g_a_proj.weight", "g_b_proj.weight"} & set(named)
    assert specs.gate.axes == ("heads", "value", "embed")
    linear = layers.kda_specs(dataclasses.replace(full, full_rank_gate=False, stored_rates=(1, 1, 96, 1)), 7168)
    assert (linear.log_rate.padding, linear.gate) == (0, None)
