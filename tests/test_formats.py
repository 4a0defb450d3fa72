"""Quantised weights are read as their definitions say, and packing keeps whatever the format can hold."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_graph import formats
from kimi_graph.errors import CheckpointError
from kimi_graph.formats import FORMATS, convert, layout, pack, unpack

WRITTEN = [name for name, f in FORMATS.items() if f.encode is not None]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
seeds = st.integers(0, 2**31)


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(seed, low, high, shape, dtype):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def mxfp4(seed, outs=3, ins=64, low=1, high=253):
    return {
        "weight_packed": integers(seed, 0, 256, (outs, ins // 2), torch.uint8),
        "weight_scale": integers(seed + 1, low, high, (outs, ins // 32), torch.uint8),
    }


# ---- MXFP4 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "byte, scale, pair", [(0x21, 127, [0.5, 1.0]), (0x7F, 130, [-48.0, 48.0]), (0x80, 127, [0.0, -0.0])]
)  # case W3
def test_the_low_nibble_of_an_mxfp4_byte_comes_first(byte, scale, pair):
    parts = {
        "weight_packed": torch.full((1, 16), byte, dtype=torch.uint8),
        "weight_scale": torch.tensor([[scale]], dtype=torch.uint8),
    }
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        weight = unpack("mxfp4", parts, dtype)
        assert weight.shape == (1, 32) and weight.dtype == dtype
        assert weight[0, :2].tolist() == pair
        assert torch.signbit(weight[0, :2]).tolist() == [math.copysign(1, x) < 0 for x in pair]


def test_a_scale_of_255_is_nan_and_refused():  # case W3
    parts = mxfp4(0)
    parts["weight_scale"][2, 1] = 255
    for dtype in (torch.bfloat16, torch.float64):
        with pytest.raises(CheckpointError, match=r"weight_scale\[2, 1\] is 255, which is NaN"):
            unpack("mxfp4", parts, dtype)


@pytest.mark.parametrize("scale", [253, 254])
def test_scales_beyond_bfloat16_are_refused_but_in_float64(scale):
    parts = mxfp4(0)
    parts["weight_packed"][0, 0] = 0x77
    parts["weight_scale"][0, 0] = scale
    with pytest.raises(CheckpointError, match=r"beyond torch\.bfloat16"):
        unpack("mxfp4", parts, torch.bfloat16)
    assert unpack("mxfp4", parts, torch.float64)[0, 0] == 6.0 * 2.0 ** (scale - 127)


@given(seeds)
@settings(max_examples=25, deadline=None)
def test_mxfp4_is_read_as_defined_number_by_number(seed):
    parts = mxfp4(seed, 2, 64, 0, 253)
    weight = unpack("mxfp4", parts, torch.float64)
    for o in range(2):
        for i in range(64):
            nibble = int(parts["weight_packed"][o, i // 2]) >> (4 * (i % 2)) & 15
            value = (-1.0) ** (nibble >> 3) * E2M1[nibble & 7] * 2.0 ** (int(parts["weight_scale"][o, i // 32]) - 127)
            assert weight[o, i] == value


@given(seeds)
@settings(max_examples=25, deadline=None)
def test_mxfp4_is_exact_in_bfloat16_for_every_scale(seed):
    parts = mxfp4(seed, 4, 128, 0, 253)
    assert torch.equal(unpack("mxfp4", parts, torch.bfloat16).double(), unpack("mxfp4", parts, torch.float64))


def test_scales_may_have_their_own_dtype():
    parts = mxfp4(3)
    typed = parts | {"weight_scale": parts["weight_scale"].view(torch.float8_e8m0fnu)}
    assert torch.equal(unpack("mxfp4", parts, torch.float32), unpack("mxfp4", typed, torch.float32))


@pytest.mark.parametrize(
    "amax, exponent",
    [(1.0, -2), (1.74, -2), (1.75, -1), (1.99, -1), (2.0, -1), (6.0, 0), (7.0, 1), (0.0, -127), (2.0**-140, -127)],
)
def test_the_scale_of_mxfp4_is_that_of_the_nearest_power_of_two(amax, exponent):
    """The facts' rule: rounded to a power of two from 1.75 times it upwards, less two; at most 2 ** 125."""
    weight = torch.zeros(1, 32)
    weight[0, 5] = -amax
    assert int(pack("mxfp4", weight)["weight_scale"]) - 127 == exponent


def test_numbers_between_two_of_mxfp4_go_to_the_nearest_and_halves_to_even():
    x = torch.tensor([0.0, 0.25, 0.26, 0.75, 0.74, 1.25, 1.75, 2.5, 2.51, 3.5, 5.0, 5.01, 6.9, 6.0, 3.0, 1.5])
    weight = torch.cat([x, -x])[None]
    got = unpack("mxfp4", pack("mxfp4", weight), torch.float32)[0, :16].tolist()
    assert got == [0.0, 0.0, 0.5, 1.0, 0.5, 1.0, 2.0, 2.0, 3.0, 4.0, 4.0, 6.0, 6.0, 6.0, 3.0, 1.5]


# ---- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITTEN)
@given(seed=seeds)
@settings(max_examples=10, deadline=None)
def test_what_was_packed_keeps_its_values_when_packed_again(name, seed):
    """Values of a packed weight are values of the format. int4's scales are not found again: they are not unique."""
    if name in ("int4", "int4-g32"):
        return
    weight = random(seed, 6, 160) * 10.0 ** (seed % 7 - 3)
    once = unpack(name, pack(name, weight), torch.float64)
    again = unpack(name, pack(name, once), torch.float64)
    # w8 and w4: the scale is a quotient of float32, so the second may differ in its last bit
    assert torch.allclose(once, again, rtol=2**-23 if name in ("w8", "w4") else 0, atol=0)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("shape", [(4, 96), (130, 160), (2, 3, 4, 64)], ids=str)
def test_parts_have_the_dtypes_and_shapes_of_the_layout(name, shape):
    parts = pack(name, random(0, *shape))
    if name == "int4" and len(shape) > 2:
        parts["weight_shape"] = parts["weight_shape"].expand(*shape[:-2], 2)  # a stack has one for each matrix
    assert {k: (v.dtype, tuple(v.shape)) for k, v in parts.items()} == layout(name, shape)


@pytest.mark.parametrize(
    "name, most",
    # Largest error by the largest number that shares its scale: half a step where steps are widest (E2M1: 5 becomes 4).
    [
        ("mxfp4", 1 / 5), ("w4-mx", 1 / 5), ("int4", 1 / 15 + 2**-8), ("int4-g32", 1 / 15 + 2**-8), ("fp8", 1 / 16),
        ("w8", 0.5 / 127), ("w4", 0.5 / 7), ("int8-g32", 1 / 127),
    ],
)  # fmt: skip
@given(seed=seeds)
@settings(max_examples=10, deadline=None)
def test_packing_changes_a_weight_by_at_most_half_a_step(name, most, seed):
    weight = random(seed, 8, 96)
    made = unpack(name, pack(name, weight), torch.float64)
    groups = 1 if name in ("w8", "w4", "fp8") else 3
    amax = weight.unflatten(1, (groups, -1)).abs().amax(2, keepdim=True)
    if name == "fp8":
        amax = weight.abs().amax()[None, None, None]
    error = (made - weight).unflatten(1, (groups, -1)).abs()
    assert bool((error <= amax * most * (1 + 2**-20)).all())


@pytest.mark.parametrize("name", WRITTEN)
def test_a_stack_is_packed_matrix_by_matrix(name):
    stack = random(7, 3, 2, 64)
    parts = pack(name, stack)
    for i in range(3):
        for part, made in pack(name, stack[i]).items():
            assert torch.equal(made, parts[part] if part == "weight_shape" else parts[part][i])
    if name != "int4":
        each = torch.stack([unpack(name, pack(name, m), torch.float32) for m in stack])
        assert torch.equal(unpack(name, parts, torch.float32), each)


@pytest.mark.parametrize("name", WRITTEN)
def test_zeros_stay_zeros(name):
    assert not unpack(name, pack(name, torch.zeros(2, 64)), torch.bfloat16).any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_not_finite_is_not_packed(name, bad):
    weight = torch.ones(2, 64)
    weight[1, 3] = bad
    with pytest.raises(CheckpointError, match="infinite or NaN"):
        pack(name, weight)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(CheckpointError, match=r"mxfp4: a weight \[2, 48\] is not a multiple of \[1, 32\]"):
        pack("mxfp4", torch.ones(2, 48))
    with pytest.raises(CheckpointError, match=r"w4: a weight \[3, 64\] is not a multiple of \[2, 1\]"):
        layout("w4", (3, 64))


# ---- INT4, FP8, msModelSlim ------------------------------------------------------------------------------------------


@given(seeds)
@settings(max_examples=15, deadline=None)
def test_int4_words_hold_eight_inputs_from_the_lowest_bits_up(seed):
    words = integers(seed, -(2**31), 2**31, (2, 8), torch.int32)
    scale = random(seed, 2, 2).bfloat16()
    parts = {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor([2, 64])}
    weight = unpack("int4", parts, torch.float64)
    for o in range(2):
        for i in range(64):
            nibble = int(words[o, i // 8]) >> (4 * (i % 8)) & 15
            assert weight[o, i] == (nibble - 8) * float(scale[o, i // 32])


def test_int4_is_rounded_once_to_bfloat16():
    parts = pack("int4", random(1, 16, 256))
    exact = unpack("int4", parts, torch.float64)
    assert torch.equal(unpack("int4", parts, torch.float32).double(), exact)
    assert torch.equal(unpack("int4", parts, torch.bfloat16), exact.bfloat16())


def test_the_shape_beside_an_int4_weight_must_be_its_own():
    parts = pack("int4", random(1, 4, 64)) | {"weight_shape": torch.tensor([64, 4])}
    with pytest.raises(CheckpointError, match=r"weight_shape is \[64, 4\], but weight_packed holds \[4, 64\]"):
        unpack("int4", parts, torch.bfloat16)


@pytest.mark.parametrize("shape", [(128, 128), (130, 160), (576, 200), (3, 64)], ids=str)
def test_every_block_of_fp8_has_its_scale_and_edges_are_smaller(shape):
    outs, ins = shape
    weight = random(0, *shape).to(torch.float8_e4m3fn)
    scale = random(1, math.ceil(outs / 128), math.ceil(ins / 128)).abs()
    parts = {"weight": weight, "weight_scale_inv": scale}
    rows, columns = torch.arange(outs) // 128, torch.arange(ins) // 128
    every = scale[rows][:, columns]
    assert torch.equal(unpack("fp8", parts, torch.float64), weight.double() * every.double())
    assert torch.equal(unpack("fp8", parts, torch.bfloat16), (weight.float() * every).bfloat16())


def test_fp8_is_exact_in_bfloat16_where_scales_are_powers_of_two():
    parts = pack("fp8", random(2, 256, 256))
    assert torch.equal(torch.frexp(parts["weight_scale_inv"])[0], torch.full((2, 2), 0.5))
    assert torch.equal(unpack("fp8", parts, torch.bfloat16).double(), unpack("fp8", parts, torch.float64))


def test_fp8_uses_its_whole_range():
    parts = pack("fp8", torch.full((4, 64), 448.0))
    assert float(parts["weight_scale_inv"]) == 1.0
    assert float(pack("fp8", torch.full((4, 64), 448.5))["weight_scale_inv"]) == 2.0


@pytest.mark.parametrize("scale_shape", [(6, 1), (6,), (6, 2)], ids=str)
def test_an_offset_is_subtracted_before_the_scale(scale_shape):
    weight = integers(0, -128, 128, (6, 64), torch.int8)
    scale, offset = random(1, *scale_shape).abs(), integers(2, -5, 6, scale_shape, torch.float32)
    got = unpack("w8", {"weight": weight, "weight_scale": scale, "weight_offset": offset}, torch.float64)
    wide = [x.reshape(6, -1).repeat_interleave(64 // x.reshape(6, -1).shape[1], 1).double() for x in (scale, offset)]
    assert torch.equal(got, (weight - wide[1]) * wide[0])


@pytest.mark.parametrize("as_bits", [False, True])
def test_a_static_weight_has_its_scale_times_that_of_its_input(as_bits):
    weight, scale, given = integers(0, -128, 128, (6, 64), torch.int8), random(1, 6).abs(), torch.tensor([0.02])
    product = scale * given
    stored = product.view(torch.int32).to(torch.int64) if as_bits else product
    got = unpack("w8-static", {"weight": weight, "deq_scale": stored, "input_scale": given}, torch.float64)
    assert torch.equal(got, weight * (product.double()[:, None] / given.double()))


def test_two_rows_of_a_w4_weight_share_a_row_of_bytes():
    """As msModelSlim packs: outputs 2r and 2r + 1 in the low and the high bits, two's complement."""
    low, high = -3, 5
    byte = (low & 15) | (high & 15) << 4
    parts = {
        "weight": torch.full((1, 32), byte, dtype=torch.uint8).view(torch.int8),
        "weight_scale": torch.tensor([[2.0], [10.0]]),
        "weight_offset": torch.zeros(2, 1),
    }
    weight = unpack("w4", parts, torch.float32)
    assert weight.shape == (2, 32)
    assert weight[:, 0].tolist() == [-6.0, 50.0]


def test_msmodelslims_mxfp4_is_mxfp4_under_other_names():
    parts = mxfp4(5)
    renamed = {"weight": parts["weight_packed"], "weight_scale": parts["weight_scale"]}
    assert torch.equal(unpack("w4-mx", renamed, torch.bfloat16), unpack("mxfp4", parts, torch.bfloat16))


# ---- conversion ------------------------------------------------------------------------------------------------------


@given(seeds)
@settings(max_examples=25, deadline=None)
def test_mxfp4_is_exact_in_int8_groups(seed):
    """Twice an E2M1 number is an integer of at most 12."""
    parts = mxfp4(seed, 4, 128, 0, 253)
    made = convert("mxfp4", parts, "int8-g32")
    assert torch.equal(unpack("int8-g32", made, torch.float64), unpack("mxfp4", parts, torch.float64))


@given(seeds)
@settings(max_examples=25, deadline=None)
def test_a_packed_weight_is_packed_again_without_a_loss(seed):
    parts = mxfp4(seed, 4, 128, 3, 253)  # below 3, a smaller scale would be needed than there is
    again = pack("mxfp4", unpack("mxfp4", parts, torch.bfloat16))
    assert torch.equal(unpack("mxfp4", again, torch.float64), unpack("mxfp4", parts, torch.float64))


@pytest.mark.parametrize("to", ["int4-g32", "int8-g32"])
def test_int4_keeps_its_numbers_and_scales(to):
    parts = pack("int4", random(4, 8, 128))
    made = convert("int4", parts, to)
    assert torch.equal(made["weight_scale"], parts["weight_scale"])
    assert torch.equal(unpack(to, made, torch.float64), unpack("int4", parts, torch.float64))


@pytest.mark.parametrize("name", formats.IN_CHECKPOINTS)
def test_a_weight_that_has_the_format_is_left_alone(name):
    parts = {"a": torch.ones(1)}
    assert convert(name, parts, name) == parts


def test_int4_changes_mxfp4_by_a_tenth():
    """Why int4 is not a free choice: E2M1 has its numbers where weights are, int4 evenly."""
    parts = mxfp4(6, 64, 1024, 120, 124)
    exact = unpack("mxfp4", parts, torch.float64)
    made = unpack("int4-g32", convert("mxfp4", parts, "int4-g32"), torch.float64)
    assert 0.05 < float((made - exact).square().mean().sqrt() / exact.square().mean().sqrt()) < 0.12
