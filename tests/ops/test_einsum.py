"""Shapes and orders of dimensions without values, found here so that torch need not import sympy: as torch has them."""

import random

import pytest
import torch
from torch import Tensor

from kimi_graph.ops.base import empty_like
from kimi_graph.ops.einsum import EINSUM


def order(x: Tensor) -> list[int]:
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


@pytest.mark.parametrize("seed", range(20))
def test_a_product_without_values_has_the_shape_and_the_strides_of_one_with_values(seed):
    draw = random.Random(seed)
    for _ in range(50):
        words = [draw.sample("abcde", draw.randint(1, 4)) for _ in range(2)]
        letters = sorted({*words[0], *words[1]})
        result = draw.sample(letters, draw.randint(0, len(letters)))
        size = {k: draw.choice([1, 2, 3, 5]) for k in letters}
        equation = f"{','.join(map(''.join, words))}->{''.join(result)}"
        x, y = (torch.zeros([size[k] for k in word]) for word in words)
        want, got = torch.einsum(equation, x, y), EINSUM(equation, [x.to("meta"), y.to("meta")])
        assert (got.shape, order(got)) == (want.shape, order(want)), (equation, size)


def test_sizes_that_differ_are_refused_without_values_too():
    with pytest.raises(RuntimeError):
        EINSUM("ab,cb->ac", [torch.empty(2, 3, device="meta"), torch.empty(2, 4, device="meta")])


@pytest.mark.parametrize("seed", range(10))
def test_an_empty_tensor_like_another_has_its_order_of_dimensions(seed):
    draw = random.Random(seed)
    for _ in range(50):
        ndim = draw.randint(1, 4)
        x = torch.empty([draw.choice([1, 2, 3, 4]) for _ in range(ndim)]).permute(draw.sample(range(ndim), ndim))
        x = x.narrow(0, 0, draw.randint(1, x.shape[0]))
        assert order(empty_like(x)) == order(torch.empty_like(x)) and empty_like(x).shape == x.shape
