"""Attention residuals: the two phases a decode step may take are the direct form."""

import pytest
import torch

from kimi_graph import layers, tree
from tests.layers.oracle import values

EPS = 1e-5


def sites(count: int, embed: int = 12) -> list:
    return [values(layers.attn_residual_specs(embed, f"layers.{i}.mlp_res"), torch.float64, i) for i in range(count)]


@pytest.mark.parametrize("stored", [1, 3, 8])
@pytest.mark.parametrize("scale", [1.0, 40.0])  # scores of a few, and scores of which one is nearly all
def test_two_phases_are_one(stored, scale):
    places = [tree.map(lambda x: x * scale, p) for p in sites(5)]
    blocks = [torch.randn(2, 3, 12).double() for _ in range(stored)]
    first = layers.stored_mix(places, blocks, EPS)
    for i, p in enumerate(places):
        running = torch.randn(2, 3, 12).double()
        got = layers.merge_running(p, first, i, running, EPS)
        torch.testing.assert_close(got, layers.attn_residual(p, [*blocks, running], EPS), rtol=1e-12, atol=1e-12)


def test_blocks_may_join_one_after_another():
    """The second phase over a block that was just stored gives what the first phase over all of them gives."""
    (p,) = sites(1)
    blocks = [torch.randn(1, 2, 12).double() for _ in range(3)]
    got = layers.merge_running(p, layers.stored_mix([p], blocks[:2], EPS), 0, blocks[2], EPS)
    whole = layers.stored_mix([p], blocks, EPS)
    torch.testing.assert_close(got, whole.sum[0] / whole.total[0][..., None], rtol=1e-13, atol=1e-13)


def test_two_phases_agree_in_bfloat16_but_for_a_rounding():
    p = tree.map(lambda x: x.bfloat16(), sites(1)[0])
    *blocks, running = (torch.randn(2, 3, 12).bfloat16() for _ in range(4))
    got = layers.merge_running(p, layers.stored_mix([p], blocks, EPS), 0, running, EPS)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, layers.attn_residual(p, [*blocks, running], EPS), rtol=2**-7, atol=2**-9)


def test_released_names_and_shapes():
    specs = layers.attn_residual_specs(7168, "model.layers.3.self_attention_res")
    assert [(s.source[0], s.stored) for s in tree.leaves(specs)] == [
        ("model.layers.3.self_attention_res_norm.weight", (7168,)),
        ("model.layers.3.self_attention_res_proj.weight", (1, 7168)),
    ]
