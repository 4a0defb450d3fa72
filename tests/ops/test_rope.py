"""Rotation against complex numbers, in both layouts of pairs."""

import pytest
import torch

from kimi_graph import ops

EXACT = 1e-14  # a few roundings of float64 at values of order one


def angles(tokens: int = 5, pairs: int = 3) -> torch.Tensor:
    return torch.randn(2, tokens, pairs, dtype=torch.float64)


def turned(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Neighbouring channels as complex numbers, times exp(i angle)."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, :, None]).flatten(-2)


def test_neighbouring_channels_turn_like_complex_numbers():
    x, angle = torch.randn(2, 5, 4, 6).double(), angles()
    got = ops.rope(x, angle.cos(), angle.sin(), True)
    torch.testing.assert_close(got, turned(x, angle), rtol=0, atol=EXACT)


def test_halves_turn_as_the_neighbours_they_would_be_in_the_other_layout():
    x, angle = torch.randn(2, 5, 4, 6).double(), angles()
    order = torch.tensor([0, 3, 1, 4, 2, 5])  # the neighbours' places among halves
    want = torch.empty_like(x)
    want[..., order] = turned(x[..., order], angle)
    torch.testing.assert_close(ops.rope(x, angle.cos(), angle.sin(), False), want, rtol=0, atol=EXACT)


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_product_of_two_rotated_vectors_depends_on_their_distance_alone(interleaved):
    q, k, rate = torch.randn(6).double(), torch.randn(6).double(), torch.rand(3).double()
    positions = torch.arange(9)
    angle = positions[None, :, None] * rate
    q_T, k_T = (ops.rope(x.expand(1, 9, 1, 6), angle.cos(), angle.sin(), interleaved)[0, :, 0] for x in (q, k))
    product = q_T @ k_T.mT
    for distance in range(-8, 9):
        same = product.diagonal(distance)
        torch.testing.assert_close(same, same[:1].expand_as(same), rtol=0, atol=1e-13)


@pytest.mark.parametrize("interleaved", [True, False])
def test_bfloat16_is_rotated_in_float32_and_rounded_once(interleaved):
    x, angle = torch.randn(2, 5, 4, 6).bfloat16(), angles().float()
    got = ops.rope(x, angle.cos(), angle.sin(), interleaved)
    want = ops.rope(x.float(), angle.cos(), angle.sin(), interleaved).bfloat16()
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want)
