"""Routing: what decides, what weighs, groups."""

import pytest
import torch

from kimi_graph import ops


def by_sorting(scores, bias, top_k, scale, groups=1, kept=1):
    """Plain Python, row by row."""
    weights, chosen = [], []
    for row in torch.sigmoid(scores).tolist():
        biased = [p + b for p, b in zip(row, bias.tolist(), strict=True)]
        size = len(row) // groups
        worth = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        best = sorted(range(groups), key=lambda g: (-worth[g], g))[:kept]
        allowed = [e for e in range(len(row)) if e // size in best]
        ids = sorted(allowed, key=lambda e: (-biased[e], e))[:top_k]
        total = sum(row[e] for e in ids)
        chosen.append(ids)
        weights.append([row[e] / total * scale for e in ids])
    return torch.tensor(weights, dtype=torch.float64), torch.tensor(chosen, dtype=torch.int32)


@pytest.mark.parametrize("groups, kept", [(1, 1), (4, 2), (4, 4), (8, 3), (12, 4)])
def test_experts_compete_inside_the_best_groups(groups, kept):
    scores, bias = torch.randn(40, 24).double(), 0.3 * torch.randn(24).double()
    weights, chosen = ops.moe_route(scores, bias, 4, 2.5, groups, kept)
    want_weights, want_chosen = by_sorting(scores, bias, 4, 2.5, groups, kept)
    assert torch.equal(chosen, want_chosen)
    torch.testing.assert_close(weights, want_weights, rtol=1e-12, atol=0)


def test_left_out_groups_stay_out_even_where_all_biased_scores_are_negative():
    scores, bias = torch.randn(8, 8).double(), torch.full((8,), -3.0).double()
    chosen = ops.moe_route(scores, bias, 4, 1.0, 2, 1)[1]
    assert all(len({e // 4 for e in row}) == 1 for row in chosen.tolist())


def test_equal_groups_and_equal_experts_go_to_the_lower_one():
    chosen = ops.moe_route(torch.zeros(1, 12), torch.zeros(12), 3, 1.0, 4, 2)[1]
    assert chosen.tolist() == [[0, 1, 2]]


def test_the_bias_decides_between_equal_experts_and_weighs_neither():
    # public case K11: two experts equal but for a bias of 1e-4
    scores = torch.tensor([[2.0, 0.5, 0.5, -1.0]])
    for better in (1, 2):
        bias = torch.zeros(4)
        bias[better] = 1e-4
        weights, chosen = ops.moe_route(scores, bias, 2, 1.0)
        assert chosen.tolist() == [[0, better]]
        probability = torch.sigmoid(scores[0, [0, 1]].double())
        torch.testing.assert_close(weights[0].double(), probability / probability.sum(), rtol=1e-6, atol=0)
    weights, chosen = ops.moe_route(scores[:, 1:3], torch.tensor([0.0, 1e-4]), 2, 1.0)
    assert (chosen.tolist(), weights.tolist()) == ([[1, 0]], [[0.5, 0.5]])


def test_weights_have_gradients_through_the_chosen_scores():
    scores, bias = torch.randn(3, 8).double().requires_grad_(), torch.randn(8).double()
    assert torch.autograd.gradcheck(lambda s: ops.moe_route(s, bias, 3, 2.5, 4, 2)[0], scores)
