"""LayerNorm: plain form, rounding."""

import torch

from kimi_graph import ops


def test_layer_norm_is_the_formula():
    x, weight, bias = torch.randn(3, 5, 8).double(), torch.randn(8).double(), torch.randn(8).double()
    centred = x - x.mean(-1, keepdim=True)
    eps = float(torch.tensor(1e-6))
    want = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias
    torch.testing.assert_close(ops.layer_norm(x, weight, bias, 1e-6), want, rtol=1e-13, atol=1e-13)


def test_layer_norm_of_bfloat16_is_rounded_once():
    x, weight, bias = (torch.randn(*s).bfloat16() for s in ((4, 8), (8,), (8,)))
    want = ops.layer_norm(x.float(), weight.float(), bias.float(), 1e-6).bfloat16()
    assert torch.equal(ops.layer_norm(x, weight, bias, 1e-6), want)
