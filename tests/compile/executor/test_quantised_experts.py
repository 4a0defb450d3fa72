"""Experts kept packed: rows that are quantised before, and grouped products of numbers and scales."""

import pytest
import torch

from kimi_graph import ops
from kimi_graph.compile.executor import infer_shapes
from kimi_graph.compile.ge_proto import Dtype, describe, dtype_of, get_attr, set_attr, shape_of
from kimi_graph.errors import KimiGraphError

BF16, F32, E4M3, E8M0 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e8m0fnu
MX = {"axis": -1, "round_mode": "rint", "dst_type": 36, "blocksize": 32, "scale_alg": 0}
BLOCK = {"min_scale": 0.0, "round_mode": "rint", "dst_type": 36, "row_block_size": 1, "col_block_size": 128}
GROUPED = {"split_item": 2, "transpose_weight": True, "group_type": 0, "group_list_type": 1}


def rand(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def quantised(b, x, type_="DynamicMxQuant", **attrs):
    outputs = "y mxscale" if type_ == "DynamicMxQuant" else "y scale"
    kinds = MX if type_ == "DynamicMxQuant" else BLOCK
    b.result(*b.node(type_, {"x": b.source("x", x)}, outputs=outputs, attrs=kinds | attrs, name="it"))
    return b


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_a_power_of_two_brings_the_largest_of_32_channels_near_the_largest_e4m3(build):
    x = torch.zeros(1, 70, dtype=BF16)
    x[0, 3], x[0, 40], x[0, 64], x[0, 65] = 300.0, -3.0, 500.0, 1.0
    y, scale = quantised(build, x).run("native").outputs
    assert scale.shape == (1, 2, 2)
    assert scale.dtype == E8M0
    assert scale.double().flatten().tolist() == [1.0, 2.0**-7, 1.0, 2.0**-127]  # floor(log2(largest)) - 8; a pad
    assert y[0, [3, 40, 64, 65]].tolist() == [288.0, -384.0, 448.0, 1.0]  # nearest, nearest, saturated, itself


def test_a_block_scale_brings_the_largest_of_128_channels_to_the_largest_e4m3(build):
    x = rand(3, 200, dtype=BF16)
    x[1, 128:] = 0
    y, scale = quantised(build, x, "DynamicBlockQuant").run("native").outputs
    wide = x.float()
    expected = torch.stack([wide[:, :128].abs().amax(1), wide[:, 128:].abs().amax(1)], 1) / 448
    assert torch.equal(scale, expected)
    back = y.float() * scale.repeat_interleave(128, 1)[:, :200]
    assert float((back - wide).norm() / wide.norm()) < 0.03  # 3 bits of mantissa: 2 ** -4 / sqrt(3) at most, less
    assert float(y.float().abs().max()) == 448


@pytest.mark.parametrize("type_", ["DynamicMxQuant", "DynamicBlockQuant"])
def test_rounding_to_a_shorter_float_does_nothing_where_floats_are_exact(build, type_):
    x = rand(2, 130)
    y, scale = quantised(build, x, type_).run().outputs
    assert torch.equal(y, x.double())
    assert (scale == 1).all()


@pytest.mark.parametrize("type_", ["DynamicMxQuant", "DynamicBlockQuant"])
def test_shapes_are_inferred_as_rows_come_out(new_builder, type_):
    b = quantised(new_builder(), rand(2, 130, dtype=BF16), type_)
    outputs = b.run("native").outputs
    infer_shapes(b.model)
    node = next(op for op in b.graph.op if op.name == "it")
    assert [(shape_of(d), dtype_of(d)) for d in node.output_desc] == [(tuple(t.shape), t.dtype) for t in outputs]


@pytest.mark.parametrize("type_", ["DynamicMxQuant", "DynamicBlockQuant"])
def test_every_attribute_of_a_quantisation_has_one_value(new_builder, type_):
    for name in MX if type_ == "DynamicMxQuant" else BLOCK:
        b = quantised(new_builder(), rand(2, 130, dtype=BF16), type_)
        node = next(op for op in b.graph.op if op.name == "it")
        value = get_attr(node, name)
        set_attr(node, name, f"{value}x" if isinstance(value, str) else value + 1)
        with pytest.raises(KimiGraphError, match=r"it \("):
            b.run("native")


def test_situ_and_its_quantisation_are_one_after_the_other(new_builder):
    attrs, x = {"beta": 4.0, "linear_beta": 25.0, "activate_left": True}, rand(3, 260, dtype=BF16)
    kinds = {"axis": -1, "round_mode": "rint", "dst_type": 36, **attrs}
    b = new_builder()
    b.result(*b.node("SituMxQuant", {"x": b.source("x", x)}, outputs="y y_scale", attrs=kinds, name="it"))
    both = b.run("native").outputs
    glu = new_builder()  # float32 between the two
    glu.result(*glu.node("SituGlu", {"x": glu.source("x", x.float())}, attrs={"dim": -1, **attrs}))
    (made,) = glu.run("native").outputs
    for mine, theirs in zip(both, quantised(new_builder(), made).run("native").outputs, strict=True):
        assert torch.equal(mine.float(), theirs.float())
    infer_shapes(b.model)
    node = next(op for op in b.graph.op if op.name == "it")
    assert [(shape_of(d), dtype_of(d)) for d in node.output_desc] == [(tuple(t.shape), t.dtype) for t in both]
    for name, value in (("dst_type", 35), ("activate_left", False), ("axis", 0), ("round_mode", "floor")):
        set_attr(node, name, value)
        with pytest.raises(KimiGraphError, match=r"it \("):
            b.run("native")
        set_attr(node, name, kinds[name])
    set_attr(node, "beta", 3.0)
    assert not torch.equal(b.run("native").outputs[0].float(), both[0].float())


def test_situ_by_our_own_operator_is_quantised_by_rows(new_builder):
    gate, up = 3 * rand(4, 64, dtype=BF16), 9 * rand(4, 64, dtype=BF16) + 1
    up[2] = 0
    b = new_builder()
    inputs = {"gate": b.source("gate", gate), "up": b.source("up", up)}
    b.result(*b.node("SituMulQuant", inputs, outputs="y scale", attrs={"beta": 4.0, "linear_beta": 25.0}, name="it"))
    y, scale = b.run("native").outputs
    wide = ops.situ_mul(gate.float(), up.float(), 4.0, 25.0)
    assert y.dtype == torch.int8 and y.abs().amax(1).tolist() == [127, 127, 0, 127] and scale[2] == 0
    assert ((y * scale[:, None] - wide).abs() <= 0.5001 * scale[:, None]).all()
    exact, one = b.run("exact").outputs
    torch.testing.assert_close(exact, ops.situ_mul(gate.double(), up.double(), 4.0, 25.0), rtol=1e-12, atol=1e-12)
    assert (one == 1).all()
    infer_shapes(b.model)
    node = next(op for op in b.graph.op if op.name == "it")
    assert [(shape_of(d), dtype_of(d)) for d in node.output_desc] == [((4, 64), torch.int8), ((4,), F32)]


# ---- grouped products ------------------------------------------------------------------------------------------------


def packed_source(b, name, values, dtype):
    """A source whose values are of a dtype that torch does not have."""
    edge = b.source(name, values)
    describe(next(op for op in b.graph.op if op.name == name).output_desc[0], values.shape, dtype)
    return edge


def product(b, x, weight, kind, scale=None, antiquant_scale=None, x_scale=None, **attrs):
    """Five rows, three of the first expert and two of the last."""
    inputs = {"x": [b.source("x", x)], "weight": [packed_source(b, "w", weight, kind)]}
    inputs["scale"] = [] if scale is None else [b.source("scale", scale)]
    inputs["antiquant_scale"] = [] if antiquant_scale is None else [b.source("antiquant", antiquant_scale)]
    inputs["group_list"] = b.source("groups", torch.tensor([3, 0, 2]))
    inputs["per_token_scale"] = None if x_scale is None else b.source("x_scale", x_scale)
    b.result(*b.node("GroupedMatmul", inputs, outputs="y0", attrs=GROUPED | attrs, name="gmm"))
    return b


def by_group(x, weight):
    return torch.cat([x[:3] @ weight[0].mT, x[3:] @ weight[2].mT])


def int4(b, **attrs):
    weight = torch.randint(-8, 8, (3, 6, 64), dtype=torch.int8)
    return product(b, rand(5, 64, dtype=BF16), weight, Dtype.INT4, antiquant_scale=rand(3, 2, 6, dtype=BF16), **attrs)


def mx(b, **attrs):
    weight = torch.tensor([0.5, -3.0, 6.0, 0.0], dtype=BF16)[torch.randint(4, (3, 64, 128))]
    scales = (torch.randint(120, 130, shape, dtype=torch.uint8).view(E8M0) for shape in ((3, 64, 2, 2), (5, 2, 2)))
    antiquant, x_scale = scales
    x = rand(5, 128).to(E4M3)
    return product(b, x, weight, Dtype.FLOAT4_E2M1, None, antiquant, x_scale, **{"dtype": 1} | attrs)


def blocks(b, **attrs):
    x, weight = rand(5, 200).to(E4M3), rand(3, 130, 200).to(E4M3)
    return product(b, x, weight, Dtype.FLOAT8_E4M3FN, rand(3, 2, 2), None, rand(5, 2), **{"dtype": 1} | attrs)


SCENARIOS = {"int4": int4, "mx": mx, "blocks": blocks}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_product_is_that_of_numbers_times_their_scales(new_builder, name):
    b = SCENARIOS[name](new_builder())
    v = {key: value.double() for key, value in b.values.items()}
    if name == "int4":
        weight, x = v["w"] * v["antiquant"].mT.repeat_interleave(32, -1), v["x"]
    elif name == "mx":
        weight = v["w"] * v["antiquant"].flatten(-2).repeat_interleave(32, -1)
        x = v["x"] * v["x_scale"].flatten(-2).repeat_interleave(32, -1)
    else:
        weight = v["w"] * v["scale"].repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :130, :200]
        x = v["x"] * v["x_scale"].repeat_interleave(128, 1)[:, :200]
    (exact,), (native,) = b.run().outputs, b.run("native").outputs
    torch.testing.assert_close(exact, by_group(x, weight), rtol=1e-12, atol=1e-12 * float(exact.abs().max()))
    assert native.dtype == BF16
    torch.testing.assert_close(native.double(), exact, rtol=2**-8, atol=1e-5 * float(exact.abs().max()))  # one rounding


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_product_has_the_shape_and_dtype_that_are_inferred(new_builder, name):
    b = SCENARIOS[name](new_builder())
    (y,) = b.run("native").outputs
    infer_shapes(b.model)
    desc = next(op for op in b.graph.op if op.name == "gmm").output_desc[0]
    assert (shape_of(desc), dtype_of(desc)) == (tuple(y.shape), y.dtype)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda b: int4(b, dtype=1), "dtype 1, supported is 0 where x is not quantised"),
        (lambda b: mx(b, dtype=2), r"dtype 2, supported is 0 \(float16\) or 1 \(bfloat16\)"),
        (lambda b: int4(b, transpose_weight=False), "transpose_weight are supported where weights are packed"),
        (lambda b: product(b, rand(5, 64), rand(3, 6, 64), Dtype.FLOAT, None, None, rand(5, 2)), "without a scale"),
        (
            lambda b: product(
                b, rand(5, 64, dtype=BF16), torch.ones(3, 6, 64, dtype=torch.int8), Dtype.INT4, None, rand(3, 5, 6)
            ),
            "inputs of one dtype expected",
        ),
    ],
)
def test_what_no_scenario_has_is_refused(new_builder, change, message):
    with pytest.raises(KimiGraphError, match=message):
        change(new_builder()).run("native")
