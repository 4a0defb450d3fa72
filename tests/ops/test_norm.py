"""Norms against their formulas; float32 inside, one rounding at the end, the same in blocks of rows."""

import pytest
import torch

from kimi_graph import ops

F32 = 2**-21  # a few roundings in float32


def rms(x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def test_rms_norm_is_its_formula():
    x, weight = torch.randn(4, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    torch.testing.assert_close(ops.rms_norm(x, weight, 0.5), rms(x, 0.5) * weight)


def test_rms_norm_of_bfloat16_is_rounded_before_it_meets_the_weight():
    x, weight = torch.randn(50, 64).bfloat16(), torch.randn(64).bfloat16()
    rounded = rms(x.float(), float(torch.tensor(1e-5))).bfloat16()
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), rounded * weight)


def test_gated_rms_norm_is_rounded_once_after_weight_and_gate():
    x, gate, weight = torch.randn(50, 64).bfloat16(), torch.randn(50, 64).bfloat16(), torch.randn(64).bfloat16()
    exact = rms(x.double(), 1e-5) * weight.double() * gate.double().sigmoid()
    y = ops.gated_rms_norm(x, gate, weight, 1e-5)
    assert (y.double() - exact).abs().max() <= 2**-8 * exact.abs().max()
    wide = ops.gated_rms_norm(x.float(), gate.float(), weight.float(), 1e-5)
    assert torch.equal(y, wide.bfloat16())


def test_l2_norm_adds_its_epsilon_inside_the_root():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [3e-4, 4e-4]], dtype=torch.float64)
    eps = float(torch.tensor(1e-6))
    torch.testing.assert_close(ops.l2_norm(x, 1e-6), x / (x.square().sum(-1, keepdim=True) + eps).sqrt())


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_norms_are_finite_for_tiny_and_huge_inputs(scale):
    x, weight = scale * torch.randn(3, 8), torch.ones(8)
    for y in (ops.rms_norm(x, weight, 1e-5), ops.gated_rms_norm(x, x, weight, 1e-5), ops.l2_norm(x, 1e-6)):
        assert y.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_of_rows_change_nothing(dtype, monkeypatch):
    x, gate, weight = torch.randn(2, 9, 3, 8).to(dtype), torch.randn(2, 9, 3, 8).to(dtype), torch.randn(8).to(dtype)
    raw, bias, rate = gate, torch.randn(3, 8), torch.randn(3)
    calls = [
        lambda: ops.rms_norm(x, weight, 1e-5),
        lambda: ops.gated_rms_norm(x, gate, weight, 1e-5),
        lambda: ops.l2_norm(x, 1e-6),
        lambda: ops.kda_gate(raw, bias, rate, None),
        lambda: ops.swiglu(x.flatten(0, 2)),
    ]
    whole = [call() for call in calls]
    monkeypatch.setattr("kimi_graph.ops.base.BLOCK_BYTES", 5 * 4 * 8)
    for call, want in zip(calls, whole, strict=True):
        torch.testing.assert_close(
            call(), want
        )  # not bitwise: ends of a block are computed without vector instructions
