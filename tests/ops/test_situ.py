"""SiTU: published numbers, bounds, both forms."""

import math

import pytest
import torch

from kimi_graph import ops

# public case K10: beta 4, linear beta 25
NUMBERS = [((1, 1), 0.71582), ((4, 25), 56.9593), ((100, 1000), 100.0), ((-100, 5), 0.0)]


@pytest.mark.parametrize("pair, expected", NUMBERS)
@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float64, 1e-6), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)],  # printed digits; bfloat16 as the case says
)
def test_numbers_of_the_public_case(pair, expected, dtype, tolerance):
    gate, up = (torch.tensor([[float(v)]], dtype=dtype) for v in pair)
    for got in (ops.situ_mul(gate, up, 4.0, 25.0), ops.situ(torch.cat([gate, up], -1), 4.0, 25.0)):
        assert got.dtype == dtype
        assert float(got) == pytest.approx(expected, rel=max(tolerance, 1e-5), abs=tolerance)


def test_it_is_the_formula_in_plain_numbers():
    gate, up = torch.randn(7).double() * 5, torch.randn(7).double() * 40
    got = ops.situ_mul(gate, up, 4.0, 25.0)
    for g, u, y in zip(gate.tolist(), up.tolist(), got.tolist(), strict=True):
        want = 4 * math.tanh(g / 4) / (1 + math.exp(-g)) * 25 * math.tanh(u / 25)
        assert y == pytest.approx(want, rel=1e-13)


def test_both_forms_are_one_in_blocks_too():
    gate, up = torch.randn(3, 700, 1024), torch.randn(3, 700, 1024)  # larger than a block of rows
    assert torch.equal(ops.situ(torch.cat([gate, up], -1), 4.0, 25.0), ops.situ_mul(gate, up, 4.0, 25.0))


def test_it_is_bounded_by_the_product_of_its_betas():
    wild = torch.tensor([[3e38, -3e38], [-3e38, 3e38]])
    assert ops.situ(wild, 4.0, 25.0).tolist() == [[-100.0], [0.0]]
