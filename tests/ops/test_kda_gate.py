"""The decay gate: never above zero, bounded where it says so, the softplus of the released code where not."""

import pytest
import torch

from kimi_graph import ops


def raw(*values):
    return torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1)


ONE = torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)  # no bias, rate exp(0)


def test_the_unbounded_gate_is_minus_softplus_times_the_rate():
    z = raw(-30.0, -1.0, 0.0, 1.0, 19.0, 21.0, 40.0)
    rate = torch.full((1,), 2.0, dtype=torch.float64)
    want = -rate.exp() * torch.where(z > 20, z, torch.log1p(z.exp()))  # the released code's softplus, linear from 20
    torch.testing.assert_close(ops.kda_gate(z, ONE[0], rate, None), want)


def test_the_bounded_gate_stays_between_its_bound_and_zero():
    decay = ops.kda_gate(raw(*torch.linspace(-60, 60, 101).tolist()), *ONE, -5.0)
    assert decay.min() >= -5 and decay.max() <= 0
    assert decay[0, 0] > -1e-20 and decay[0, -1] == -5
    assert ops.kda_gate(raw(0.0), *ONE, -5.0) == -2.5


def test_rates_are_per_head_and_biases_per_head_and_channel():
    z, bias, rate = torch.randn(2, 3, 4, 5), torch.randn(4, 5), torch.randn(4)
    for bound in (None, -5.0):
        whole = ops.kda_gate(z, bias, rate, bound)
        for h in range(4):
            alone = ops.kda_gate(z[:, :, h : h + 1], bias[h : h + 1], rate[h : h + 1], bound)
            torch.testing.assert_close(whole[:, :, h : h + 1], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_gate_is_float32_for_narrow_inputs(dtype):
    z, bias, rate = torch.randn(1, 2, 3, 4).to(dtype), torch.randn(3, 4), torch.randn(3)
    assert ops.kda_gate(z, bias, rate, None).dtype == torch.float32
    assert torch.equal(ops.kda_gate(z, bias, rate, None), ops.kda_gate(z.float(), bias, rate, None))
