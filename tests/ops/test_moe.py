"""Routing, dispatch, grouped products and combination of experts, in the few-rows and the many-rows form."""

import pytest
import torch

from kimi_graph import ops

SIZES = [(1, 3), (7, 2), (90, 4)]  # rows, experts of a row: below and above where the form changes
ROUNDING = 1e-12  # float64, sums in another order


def routed(rows, top_k, experts=11):
    scores, bias = torch.randn(rows, experts, dtype=torch.float64), torch.randn(experts, dtype=torch.float64)
    return ops.moe_route(scores, bias, top_k, 2.0)


def test_a_bias_decides_between_equal_experts_and_leaves_their_weights_equal():
    scores = torch.zeros(1, 32)
    scores[0, :15] = 4.0  # fifteen sure choices; experts 20 and 25 are equal but for the bias
    scores[0, [20, 25]] = 1.0
    bias = torch.zeros(32)
    bias[25] = 1e-4
    weights, chosen = ops.moe_route(scores, bias, 16, 1.0)
    assert chosen[0, 15] == 25 and 20 not in chosen
    both, names = ops.moe_route(scores, bias, 17, 1.0)
    assert sorted(names[0, 15:].tolist()) == [20, 25] and both[0, 15] == both[0, 16]
    unbiased, _ = ops.moe_route(scores, 0 * bias, 16, 1.0)
    assert torch.equal(weights, unbiased)


def test_weights_add_up_to_the_scale_and_come_from_the_unbiased_scores():
    scores, bias = torch.randn(9, 11), 5 * torch.randn(11)
    weights, chosen = ops.moe_route(scores, bias, 4, 2.446)
    torch.testing.assert_close(weights.sum(1), torch.full((9,), 2.446))
    probability = scores.sigmoid().gather(1, chosen.long())
    torch.testing.assert_close(weights / 2.446, probability / probability.sum(1, keepdim=True))


def test_equal_scores_go_to_the_lower_expert():
    _, chosen = ops.moe_route(torch.zeros(3, 40), torch.zeros(40), 5, 1.0)
    assert chosen.tolist() == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize("rows, top_k", SIZES)
def test_dispatched_rows_are_sorted_by_expert_and_keep_their_order(rows, top_k):
    x = torch.arange(rows * 3).view(rows, 3).double()
    _, chosen = routed(rows, top_k)
    copies, place, sizes = ops.moe_dispatch(x, chosen, 11)
    pairs = sorted((expert, row) for row, experts in enumerate(chosen.tolist()) for expert in experts)
    assert torch.equal(copies, x[[row for _, row in pairs]])
    assert sizes.tolist() == [sum(e == expert for e, _ in pairs) for expert in range(11)]
    assert torch.equal(copies[place.long()].view(rows, top_k, 3), x[:, None].expand(-1, top_k, -1))


@pytest.mark.parametrize("rows, top_k", SIZES)
def test_both_forms_of_the_dispatch_agree_also_on_ids_of_no_expert(rows, top_k):
    from kimi_graph.ops import moe

    x, chosen = torch.randn(rows, 3), routed(rows, top_k)[1]
    few = moe._dispatch_few(x, chosen, 8)  # experts 8, 9, 10 are not here
    flat = chosen.flatten().long()
    order = flat.sort(stable=True).indices
    assert torch.equal(few[0], x[order // top_k])
    assert torch.equal(few[1].long()[order], torch.where(flat[order] < 8, torch.arange(len(flat)), -1))
    assert torch.equal(few[2], flat.bincount(minlength=11)[:8])
    for a, b in zip(ops.moe_dispatch(x, chosen, 8, 3), few, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("sizes", [[3, 0, 40, 1], [0, 0, 1, 0], [0, 0, 0, 0], [16, 17, 0, 2]], ids=str)
def test_grouped_products_are_products_group_by_group(sizes, watched, threads, set_threads):
    set_threads(threads)
    x = torch.randn(sum(sizes) + 2, 256, dtype=torch.float64, requires_grad=watched)
    weight = torch.randn(4, 128, 256, dtype=torch.float64)  # large enough to be shared out among threads
    y = ops.grouped_matmul(x, weight, torch.tensor(sizes))
    expert = torch.arange(4).repeat_interleave(torch.tensor(sizes))
    want = torch.einsum("md,mfd->mf", x[: len(expert)], weight[expert])
    torch.testing.assert_close(y, torch.cat([want, want.new_zeros(2, 128)]))


@pytest.mark.parametrize("sizes", [[30, 0, 70, 9], [64, 1, 0, 128], [1, 0, 0, 200]], ids=str)
def test_grouped_products_of_bfloat16_round_their_rows_up_and_give_the_same(sizes):
    x, weight = torch.randn(sum(sizes) + 2, 32).bfloat16(), torch.randn(4, 24, 32).bfloat16()
    y = ops.grouped_matmul(x, weight, torch.tensor(sizes))
    parts = zip(x.split([*sizes, 2]), weight, strict=False)
    want = torch.cat([part.double() @ w.double().T for part, w in parts])
    assert (y[:-2].double() - want).abs().max() <= 2**-8 * want.abs().max() and not y[-2:].any()


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows, top_k", SIZES)
def test_identical_experts_give_back_the_row_times_the_scale(rows, top_k):
    x = torch.randn(rows, 6, dtype=torch.float64)
    weights, chosen = routed(rows, top_k)
    copies, place, _ = ops.moe_dispatch(x, chosen, 11)
    torch.testing.assert_close(ops.moe_combine(copies, place, weights), 2.0 * x, rtol=ROUNDING, atol=ROUNDING)


def test_combining_in_blocks_changes_nothing(monkeypatch):
    weights, chosen = routed(90, 4)
    copies, place, _ = ops.moe_dispatch(torch.randn(90, 6, dtype=torch.float64), chosen, 11)
    whole = ops.moe_combine(copies, place, weights)
    monkeypatch.setattr("kimi_graph.ops.base.BLOCK_BYTES", 7 * 4 * 24)
    assert torch.equal(ops.moe_combine(copies, place, weights), whole)


def test_bfloat16_copies_are_summed_in_float32():
    y = torch.tensor([[256.0], [1.0], [1.0], [1.0], [1.0]], dtype=torch.bfloat16)  # 256 + 1 is 256 in bfloat16
    assert ops.moe_combine(y, torch.arange(5, dtype=torch.int32), torch.ones(1, 5)).item() == 260
