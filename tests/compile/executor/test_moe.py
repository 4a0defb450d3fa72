"""The operators of a mixture of experts: against loops written from their documents, and together."""

import pytest
import torch
import torch.nn.functional as F

from kimi_graph import ops
from kimi_graph.compile.executor import Selections, infer_shapes
from kimi_graph.compile.ge_proto import dtype_of, get_attr, set_attr, shape_of
from kimi_graph.errors import KimiGraphError

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64


def rand(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


GATING = {
    "k": 3,
    "k_group": 1,
    "group_count": 1,
    "group_select_mode": 0,
    "renorm": 0,
    "norm_type": 1,
    "out_flag": False,
    "routed_scaling_factor": 2.5,
    "eps": 2.0**-60,
}


def gating(b, x, bias, **attrs):
    inputs = {"x": b.source("x", x), "bias": None if bias is None else b.source("bias", bias)}
    b.result(*b.node("MoeGatingTopK", inputs, outputs="y expert_idx out", attrs=GATING | attrs, name="gate"))
    return b


def test_sigmoid_gating_chooses_with_the_bias_and_weighs_without_it(build):
    x, bias = rand(6, 8), rand(8)
    y, chosen, _ = gating(build, x, bias).run().outputs
    for row in range(6):
        p = [1 / (1 + torch.exp(-x[row, e].double())) for e in range(8)]
        best = sorted(range(8), key=lambda e: -float(p[e] + bias[e].double()))[:3]
        assert chosen[row].tolist() == best
        total = sum(float(p[e]) for e in best)
        torch.testing.assert_close(y[row].tolist(), [2.5 * float(p[e]) / total for e in best], rtol=1e-12, atol=0)


def test_gating_agrees_with_the_models_router(build):
    x, bias = rand(6, 8), rand(8)
    y, chosen, _ = gating(build, x, bias, eps=1e-20).run().outputs
    weights, experts = ops.moe_route(x.double(), bias.double(), 3, 2.5)
    assert torch.equal(chosen, experts)
    torch.testing.assert_close(y, weights, rtol=1e-12, atol=0)


def test_renorm_normalises_softmax(new_builder):
    x = rand(4, 8)
    plain = gating(new_builder(), x, None, norm_type=0, renorm=0, routed_scaling_factor=1.0).run().outputs[0]
    whole = gating(new_builder(), x, None, norm_type=0, renorm=1, routed_scaling_factor=1.0).run().outputs[0]
    torch.testing.assert_close(plain, x.double().softmax(-1).topk(3).values, rtol=1e-12, atol=0)
    torch.testing.assert_close(whole.sum(-1), torch.ones(4, dtype=torch.float64), rtol=1e-12, atol=0)


def test_equal_scores_go_to_the_lower_expert(build):
    _, chosen, _ = gating(build, torch.zeros(2, 8), None).run("native").outputs
    assert chosen.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("mode, kept", [(0, [4, 5]), (1, [0, 1])], ids=["best expert", "best two"])
def test_groups_are_chosen_before_experts(build, mode, kept):
    p = torch.tensor([[0.6, 0.6, 0.1, 0.1, 0.9, 0.1, 0.2, 0.2]])
    attrs = {"k": 2, "group_count": 4, "k_group": 1, "group_select_mode": mode}
    _, chosen, _ = gating(build, torch.logit(p), None, **attrs).run().outputs
    assert chosen.tolist() == [kept]


def test_a_native_gate_takes_the_choice_of_the_exact_run(build):
    x = torch.tensor([[1.0, 1.0 + 2**-20, 0.0, 0.0]])
    b = gating(build, x, None, k=1)
    recorded = Selections()
    exact = b.run("exact", selections=recorded).outputs
    assert recorded.chosen["gate"].tolist() == [[1]]
    flipped = Selections({"gate": torch.tensor([[2]], dtype=I32)}, replaying=True)
    assert b.run("native", selections=flipped).outputs[1].item() == 2
    assert torch.equal(b.run("native", selections=recorded.replay()).outputs[1], exact[1])


@pytest.mark.parametrize(
    "attrs, message",
    [
        ({"k": 9}, "k = 9 of 8 experts in kept groups"),
        ({"norm_type": 2}, "norm_type 2, supported is 0"),
        ({"renorm": 1}, "renorm 1, which norm_type 1 ignores"),
        ({"group_select_mode": 1}, "group_select_mode 1 of 1 groups"),
        ({"group_count": 3}, "8 experts, 3 groups"),
        ({"k": 3.0}, "attribute 'k' is 3.0, the prototype requires a int"),
    ],
)
def test_gating_outside_the_document_is_refused(build, attrs, message):
    with pytest.raises(KimiGraphError, match=rf"gate \(MoeGatingTopK\): {message}"):
        gating(build, rand(2, 8), None, **attrs).run()


# ---- sorting rows by expert ----------------------------------------------------------------------------------------

ROUTING = {
    "expert_capacity": -1,
    "drop_pad_mode": 0,
    "expert_tokens_num_type": 1,
    "expert_tokens_num_flag": True,
    "quant_mode": -1,
    "row_idx_type": 0,
}
ROUTED = "expanded_x expanded_row_idx expert_tokens_count_or_cumsum expanded_scale"
# the example of the operator's document
EXAMPLE_X = torch.tensor([[0.1, 0.1], [0.2, 0.2], [0.3, 0.3]])
EXAMPLE_EXPERTS = torch.tensor([[1, 2, 0, 3], [0, 2, 1, 3], [0, 1, 3, 2]], dtype=I32)


def routing(b, x, experts, count, **attrs):
    given = ROUTING | {"active_num": experts.numel(), "expert_num": count, "active_expert_range": [0, count]} | attrs
    inputs = {"x": b.source("x", x), "expert_idx": b.source("e", experts), "scale": None, "offset": None}
    return b.node("MoeInitRoutingV3", inputs, outputs=ROUTED, attrs=given, name="route")


def test_copies_are_sorted_by_expert_and_found_by_row_times_k_plus_k(build):
    build.result(*routing(build, EXAMPLE_X, EXAMPLE_EXPERTS, 4))
    rows, place, counts, _ = build.run("native").outputs
    assert counts.tolist() == [3, 3, 3, 3]
    assert [round(v, 1) for v in rows[:, 0].tolist()] == [0.1, 0.2, 0.3] * 4
    # row 0 went to experts 1, 2, 0, 3: its copies lie first in the groups that begin at 3, 6, 0, 9
    assert place.tolist() == [3, 6, 0, 9, 1, 7, 4, 10, 2, 5, 11, 8]


def test_the_other_row_index_says_where_each_copy_came_from(build):
    build.result(*routing(build, EXAMPLE_X, EXAMPLE_EXPERTS, 4, row_idx_type=1, expert_tokens_num_type=0))
    _, origin, sums, _ = build.run("native").outputs
    assert origin.tolist() == [2, 4, 8, 0, 6, 9, 1, 5, 11, 3, 7, 10]
    assert sums.tolist() == [3, 6, 9, 12]


def test_routing_agrees_with_the_models_dispatch(build):
    x, chosen = rand(5, 6, dtype=BF16), torch.tensor([[3, 0], [1, 0], [3, 1], [0, 3], [1, 3]], dtype=I32)
    build.result(*routing(build, x, chosen, 4))
    found = build.run("native").outputs[:3]
    assert all(torch.equal(a, b) for a, b in zip(found, ops.moe_dispatch(x, chosen, 4), strict=True))


@pytest.mark.parametrize(
    "attrs, message",
    [
        ({"active_num": 5}, "attribute 'active_num' is 5, supported is 12"),
        ({"drop_pad_mode": 1}, "attribute 'drop_pad_mode' is 1"),
        ({"quant_mode": 1}, "attribute 'quant_mode' is 1"),
        ({"active_expert_range": [1, 4]}, r"active_expert_range \[1, 4\], supported is \[0, up to 4\]"),
        ({"active_expert_range": [0, 2], "row_idx_type": 1}, "row_idx_type 1 of some experts, supported is of all"),
        ({"expert_tokens_num_flag": False}, "attribute 'expert_tokens_num_flag' is False"),
        ({"expert_num": 3, "active_expert_range": [0, 3]}, "an expert outside 0..2"),
    ],
)
def test_routing_that_drops_or_quantises_is_refused(build, attrs, message):
    build.result(*routing(build, EXAMPLE_X, EXAMPLE_EXPERTS, 4, **attrs))
    with pytest.raises(KimiGraphError, match=rf"route \(MoeInitRoutingV3\): {message}"):
        build.run()


# ---- grouped products ----------------------------------------------------------------------------------------------

GROUPED = {
    "split_item": 2,
    "dtype": 0,
    "transpose_weight": True,
    "transpose_x": False,
    "group_type": 0,
    "group_list_type": 1,
    "act_type": 0,
    "tuning_config": [0],
}


def grouped(b, x, weight, groups, **attrs):
    inputs = {"x": [x], "weight": [weight], "group_list": groups, "per_token_scale": None}
    (y,) = b.node("GroupedMatmul", inputs, outputs="y0", attrs=GROUPED | attrs, name="")
    return y


@pytest.mark.parametrize("by_sums", [False, True], ids=["sizes", "sums"])
@pytest.mark.parametrize("transposed", [False, True])
def test_each_group_meets_its_own_weight(build, by_sums, transposed):
    x, weight, sizes = rand(7, 4), rand(3, 5, 4), torch.tensor([4, 0, 3])
    stored = weight if transposed else weight.mT.contiguous()
    groups = build.source("g", sizes.cumsum(0) if by_sums else sizes)
    attrs = {"transpose_weight": transposed, "group_list_type": 0 if by_sums else 1}
    build.result(grouped(build, build.source("x", x), build.source("w", stored), groups, **attrs))
    (y,) = build.run().outputs
    expected = torch.cat([x[:4].double() @ weight[0].double().t(), x[4:].double() @ weight[2].double().t()])
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


def test_rows_past_the_last_group_are_not_numbers(build):
    edges = [build.source(n, t) for n, t in (("x", rand(7, 4)), ("w", rand(3, 5, 4)), ("g", torch.tensor([4, 0, 1])))]
    build.result(grouped(build, *edges))
    (y,) = build.run().outputs
    assert y[5:].isnan().all()
    assert not y[:5].isnan().any()


def test_an_empty_tensor_stands_for_a_dynamic_input_that_is_not_given(build):
    x, w, g = (build.source(n, t) for n, t in (("x", rand(3, 4)), ("w", rand(2, 5, 4)), ("g", torch.tensor([1, 2]))))
    (empty,) = build.node("Fill", {"dims": build.const([0]), "value": build.const(0.0, F32)})
    inputs = {"x": [x], "weight": [w], "bias": [empty], "scale": [empty], "group_list": g}
    build.result(*build.node("GroupedMatmul", inputs, outputs="y0", attrs=GROUPED))
    infer_shapes(build.model)
    assert build.run("native").outputs[0].shape == (3, 5)


# ---- bringing copies back ------------------------------------------------------------------------------------------


def finalize(b, **attrs):
    """The example of the operator's document: three rows of two copies, two shared results, a bias per expert."""
    rows = torch.arange(12).reshape(3, 4) + 0.1
    inputs = {
        "expanded_x": b.source("copies", torch.cat([rows, rows])),
        "expanded_row_idx": b.source("place", torch.tensor([2, 1, 4, 3, 0, 5], dtype=I32)),
        "x1": b.source("x1", rows + 0.1),
        "x2": b.source("x2", rows + 0.1),
        "bias": b.source("bias", torch.tensor([[0.2, 0.4, 0.2, 0.4]] * 2)),
        "scales": b.source("scales", torch.tensor([[1.3, 1.6], [1.2, 1.8], [1.2, 2.3]])),
        "expert_idx": b.source("experts", torch.tensor([[0, 1]] * 3, dtype=I32)),
    }
    b.result(*b.node("MoeFinalizeRoutingV2", inputs, attrs={"drop_pad_mode": 0, "k": 1} | attrs, name="back"))
    return b


@pytest.mark.parametrize(
    "mode, at", [(0, lambda n, k: n + 3 * k), (2, lambda n, k: 2 * n + k)], ids=["columns", "rows"]
)
def test_copies_are_weighed_and_summed_as_the_document_says(build, mode, at):
    b = finalize(build, drop_pad_mode=mode)
    v = {name: t.double() if t.is_floating_point() else t for name, t in b.values.items()}
    expected = v["x1"] + v["x2"]
    for n in range(3):
        for k in range(2):
            row = v["copies"][v["place"][at(n, k)]] + v["bias"][v["experts"][n, k]]
            expected[n] += v["scales"][n, k] * row
    torch.testing.assert_close(b.run().outputs[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "attrs, message", [({"drop_pad_mode": 1}, "drop_pad_mode 1"), ({"k": 3}, "attribute 'k' is 3")]
)
def test_padded_copies_are_refused(build, attrs, message):
    with pytest.raises(KimiGraphError, match=rf"back \(MoeFinalizeRoutingV2\): {message}"):
        finalize(build, **attrs).run()


def layer(b, x, chosen, weights, gate_up, down, others=0):
    """Dispatch, two grouped products, SwiGLU, combine; `others`: experts that are on other devices."""
    experts = gate_up.shape[0]
    rows, place, counts, _ = routing(b, x, chosen, experts + others, active_expert_range=[0, experts])
    hidden = grouped(b, rows, b.source("gate_up", gate_up), counts)
    (active,) = b.node("SwiGlu", {"x": hidden}, attrs={"dim": -1})
    made = grouped(b, active, b.source("down", down), counts)
    inputs = {"expanded_x": made, "expanded_row_idx": place, "x1": None, "x2": None, "bias": None}
    inputs["scales"] = b.source("weights", weights)
    if others:
        (inputs["expanded_x"],) = b.node("Reshape", {"x": made, "shape": b.const([2, 5, 6], I64)})
    b.result(*b.node("MoeFinalizeRoutingV2", inputs, attrs={"drop_pad_mode": 3 if others else 2, "k": 1}))
    return b


@pytest.mark.parametrize("here", [4, 2, 1])
def test_a_layer_of_experts_is_a_sum_over_the_chosen_ones_that_are_here(build, here):
    x, chosen = rand(5, 6), torch.tensor([[3, 0], [1, 0], [3, 1], [0, 3], [1, 3]], dtype=I32)
    weights, gate_up, down = rand(5, 2).sigmoid(), rand(4, 8, 6), rand(4, 6, 4)
    (y,) = layer(build, x, chosen, weights, gate_up[:here], down[:here], 4 - here).run().outputs
    for n in range(5):
        expected = torch.zeros(6, dtype=torch.float64)
        for k in range(2):
            e = int(chosen[n, k])
            if e >= here:
                continue
            gate, up = (gate_up[e].double() @ x[n].double()).chunk(2)
            expected += weights[n, k].double() * (down[e].double() @ (F.silu(gate) * up))
        torch.testing.assert_close(y[n], expected, rtol=1e-12, atol=1e-12)


def test_shapes_of_a_layer_of_experts_are_inferred(build):
    chosen = torch.zeros(5, 2, dtype=I32)
    layer(build, rand(5, 6, dtype=BF16), chosen, rand(5, 2), rand(4, 8, 6, dtype=BF16), rand(4, 6, 4, dtype=BF16))
    infer_shapes(build.model)
    found = {op.type: [(shape_of(d), dtype_of(d)) for d in op.output_desc] for op in build.graph.op}
    assert found["MoeInitRoutingV3"] == [((10, 6), BF16), ((10,), I32), ((4,), I64), ((10,), F32)]
    assert found["MoeFinalizeRoutingV2"] == [((5, 6), BF16)]
    build.run("native")  # checks every output against these


@pytest.mark.parametrize("type_", ["MoeGatingTopK", "MoeInitRoutingV3", "GroupedMatmul", "MoeFinalizeRoutingV2"])
def test_every_changed_attribute_is_noticed(new_builder, type_):
    ineffective = {
        ("MoeInitRoutingV3", "expert_capacity"),  # rows are not dropped
        ("MoeInitRoutingV3", "expert_num"),  # more experts, elsewhere, that nobody chooses
    }

    def graph():
        b = new_builder()
        if type_ == "MoeGatingTopK":
            return gating(b, rand(6, 8), rand(8) / 10)
        chosen = torch.tensor([[3, 0], [1, 0], [3, 1], [0, 3], [1, 3]], dtype=I32)
        return layer(b, rand(5, 6), chosen, rand(5, 2), rand(4, 8, 6), rand(4, 6, 4))

    before = graph().run().outputs
    node = next(op for op in graph().graph.op if op.type == type_)
    for name in sorted(n for n in node.attr if (type_, n) not in ineffective):
        b = graph()
        changed = next(op for op in b.graph.op if op.type == type_)
        value = get_attr(changed, name)
        set_attr(changed, name, not value if isinstance(value, bool) else [1] if isinstance(value, list) else value + 1)
        try:
            after = b.run().outputs
        except KimiGraphError:
            continue
        assert not all(torch.equal(x, y) for x, y in zip(before, after, strict=True)), name
