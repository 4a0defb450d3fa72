"""Caches in 8 bits: against loops written from the operators' documents and golden functions, and what is refused."""

import math

import pytest
import torch

from kimi_graph.compile.executor import Selections, infer_shapes
from kimi_graph.compile.ge_proto import Dtype, describe, dtype_of, shape_of
from kimi_graph.errors import KimiGraphError

BF16, F16, F32, F64, I8, I32 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int32
E4M3 = torch.float8_e4m3fn
LONG = 2**63 - 1
PAGE = 16
TABLE = torch.tensor([[3, 1], [2, 9]], dtype=I32)  # the second row's second page is never read
QUERIES, KEYS = torch.tensor([2, 1], dtype=I32), torch.tensor([19, 5], dtype=I32)


def rand(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def both(values, b):
    return {name: None if value is None else b.source(name, value) for name, value in values.items()}


# ---- quantisation ----------------------------------------------------------------------------------------------------


def quantised(b, x, dtype):
    made = b.node(
        "DynamicQuant", {"x": b.source("x", x)}, outputs="y scale", attrs={"dst_type": Dtype.of_torch(dtype).ge}
    )
    b.result(*made)
    return b


@pytest.mark.parametrize("dtype, largest", [(I8, 127.0), (E4M3, 448.0)])
def test_a_row_is_divided_by_what_takes_its_largest_number_to_the_dtypes_largest(build, dtype, largest):
    x = rand(3, 5, 16)
    y, scale = quantised(build, x, dtype).run("native").outputs
    assert (y.dtype, scale.dtype, scale.shape) == (dtype, F32, (3, 5))
    for row, made, s in zip(x.view(-1, 16), y.view(-1, 16), scale.flatten(), strict=True):
        assert float(s) == pytest.approx(max(abs(v) for v in row.tolist()) / largest, rel=1e-6)
        for value, code in zip(row.tolist(), made.float().tolist(), strict=True):
            over = value / float(s)
            step = 1.0 if dtype == I8 else max(2.0 ** (math.floor(math.log2(max(abs(over), 2**-9))) - 3), 2**-9)
            assert abs(code - over) <= 0.5001 * step


@pytest.mark.parametrize("dtype", [I8, E4M3])
def test_an_exact_quantisation_rounds_nothing(build, dtype):
    x = rand(4, 16)
    y, scale = quantised(build, x, dtype).run("exact").outputs
    assert y.dtype == scale.dtype == F64
    torch.testing.assert_close(y * scale[:, None], x.double(), rtol=1e-15, atol=0)


def test_a_row_of_zeros_is_zeros_in_int8_and_no_number_in_an_8_bit_float(new_builder):
    x = torch.zeros(2, 16, dtype=BF16)
    for mode in ("exact", "native"):
        y, scale = quantised(new_builder(), x, I8).run(mode).outputs
        assert not y.any() and not scale.any()
        y, _ = quantised(new_builder(), x, E4M3).run(mode).outputs
        assert y.float().isnan().all()


# ---- bytes -----------------------------------------------------------------------------------------------------------


def bitcast(b, x, dtype, **attrs):
    made = b.node("Bitcast", {"x": b.source("x", x)}, attrs={"type": dtype, **attrs})
    op = next(op for op in b.graph.op if op.type == "Bitcast")
    describe(op.output_desc[0], (*x.shape, x.dtype.itemsize // dtype.itemsize), dtype)
    b.result(*made)
    return b


@pytest.mark.parametrize("dtype", [I8, E4M3])
@pytest.mark.parametrize("wide", [BF16, F32])
def test_bytes_of_numbers_are_a_dimension_more_lowest_first(build, wide, dtype):
    x = rand(3, 4, dtype=wide)
    (y,) = bitcast(build, x, dtype).run("native").outputs
    assert (y.shape, y.dtype) == ((3, 4, wide.itemsize), dtype)
    raw = int.from_bytes(bytes(y[1, 2].view(torch.uint8).tolist()), "little")
    assert raw == x[1, 2].view(torch.int16 if wide == BF16 else I32).item() % 2 ** (8 * wide.itemsize)


def test_exact_bytes_are_the_number_and_zeros(build):
    x = rand(3, 4)
    (y,) = bitcast(build, x, I8).run("exact").outputs
    assert torch.equal(y, torch.stack([x.double(), torch.zeros(3, 4, dtype=F64)], -1))


def test_bytes_of_a_wider_dtype_are_refused(build):
    with pytest.raises(KimiGraphError, match=r"supported is to a narrower dtype"):
        bitcast(build, rand(3, 4), F32).run("native")


def test_another_form_of_bitcast_is_refused(build):
    with pytest.raises(KimiGraphError, match=r"attribute 'keep_dim' is True, supported is False"):
        bitcast(build, rand(3, 4), I8, keep_dim=True).run("native")


# ---- selection -------------------------------------------------------------------------------------------------------

SELECT = {
    "query_quant_mode": 0,
    "key_quant_mode": 0,
    "layout_query": "BSND",
    "layout_key": "PA_BSND",
    "sparse_count": 6,
    "sparse_mode": 3,
    "pre_tokens": LONG,
    "next_tokens": LONG,
}


def codes(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (rand(*shape, dtype=F32) * 40).to(dtype)


def indexed(dtype: torch.dtype = I8, **changes):
    weighed, scaled = (F16, F16) if dtype == I8 else (BF16, F32)
    values = {"query": codes(2, 3, 4, 128, dtype=dtype), "key": codes(4, PAGE, 1, 128, dtype=dtype)}
    values |= {"weights": rand(2, 3, 4, dtype=weighed), "query_dequant_scale": rand(2, 3, 4, dtype=scaled).abs() / 64}
    values |= {"key_dequant_scale": rand(4, PAGE, 1, dtype=scaled).abs() / 64}
    values |= {"actual_seq_lengths_query": QUERIES, "actual_seq_lengths_key": KEYS, "block_table": TABLE}
    return values | changes


def select(b, values, **attrs):
    made = b.node(
        "QuantLightningIndexer", both(values, b), outputs="sparse_indices", attrs=SELECT | attrs, name="select"
    )
    b.result(*made)
    return b


def best(values, row: int, t: int, count: int, exact: bool) -> list[int]:
    """By the golden function, number by number."""
    seen = int(KEYS[row]) - int(QUERIES[row]) + t + 1
    int8 = values["query"].dtype == I8
    rounded = (lambda x, dtype: x) if exact else lambda x, dtype: float(torch.tensor(x, dtype=F32).to(dtype))
    scores = []
    for token in range(seen):
        at = (int(TABLE[row, token // PAGE]), token % PAGE, 0)
        key, total = values["key"][at].double(), 0.0
        for q, w, s in zip(
            values["query"][row, t], values["weights"][row, t], values["query_dequant_scale"][row, t], strict=True
        ):
            product = max(0.0, float(q.double() @ key))
            product = rounded(product / 1024, F16) if int8 else product
            total += rounded(float(w) * float(s), F16 if int8 else F32) * product
        scores.append(rounded(total * float(values["key_dequant_scale"][at]), F32 if int8 else BF16))
    return sorted(range(seen), key=lambda i: (-scores[i], i))[:count]


@pytest.mark.parametrize("mode", ["exact", "native"])
@pytest.mark.parametrize("dtype", [I8, E4M3])
def test_keys_are_chosen_as_the_golden_function_chooses_them(build, dtype, mode):
    values = indexed(dtype)
    (chosen,) = select(build, values).run(mode).outputs
    assert chosen.dtype == I32 and chosen.shape == (2, 3, 1, 6)
    for row, t in ((0, 0), (0, 1), (1, 0)):
        wanted = best(values, row, t, 6, mode == "exact")
        assert chosen[row, t, 0].tolist() == wanted + [-1] * (6 - len(wanted))
    assert (chosen[0, 2] == -1).all() and (chosen[1, 1:] == -1).all()  # rows past the number of queries


def test_scores_of_8_bit_floats_that_bfloat16_cannot_tell_apart_go_to_the_lower_position(new_builder):
    """As the kernel of 950 sorts them; int8 scores keep 32 bits."""
    scales = 1 + torch.arange(4 * PAGE).view(4, PAGE, 1) % 4 * 2**-10  # bfloat16 has steps of 2^-7 there
    for dtype, near in ((E4M3, True), (I8, False)):
        ones = torch.ones(4, PAGE, 1, 128).to(dtype)
        values = indexed(
            dtype,
            key=ones,
            query=torch.ones(2, 3, 4, 128).to(dtype),
            weights=torch.ones(2, 3, 4).to(BF16 if near else F16),
        )
        values["key_dequant_scale"] = scales.to(F32 if near else F16)
        (chosen,) = select(new_builder(), values).run("native").outputs
        assert (chosen[0, 1, 0].tolist() == [0, 1, 2, 3, 4, 5]) == near


def test_what_a_native_run_would_have_chosen_is_kept_beside_what_it_is_given(build):
    b = select(build, indexed())
    recorded = Selections()
    exact = b.run("exact", selections=recorded).outputs[0]
    given = Selections({"select": exact.flip(-1)}, replaying=True)
    assert torch.equal(b.run("native", selections=given).outputs[0], exact.flip(-1))
    assert torch.equal(given.own["select"].sort().values, exact.sort().values)


@pytest.mark.parametrize(
    "changes, attrs, message",
    [
        ({}, {"query_quant_mode": 1}, "attribute 'query_quant_mode' is 1, supported is 0"),
        ({}, {"sparse_count": 2049}, "sparse_count 2049"),
        ({}, {"key_stride0": 4}, "attribute 'key_stride0' is 4, supported is -1"),
        ({"key": codes(4, PAGE, 1, 128, dtype=E4M3)}, {}, "inputs of one dtype expected"),
        ({"weights": rand(2, 3, 4, dtype=F32)}, {}, "input 'weights' is torch.float32"),
        ({"key_dequant_scale": rand(4, PAGE, 1, dtype=F32)}, {}, "inputs of one dtype expected"),
        ({"key_dequant_scale": rand(4, PAGE, dtype=F16)}, {}, r"key_dequant_scale \[4, 16, 1\] expected, found \[4,"),
        ({"block_table": TABLE + 3}, {}, "block_table names"),
    ],
)  # fmt: skip
def test_a_selection_outside_the_document_is_refused(build, changes, attrs, message):
    with pytest.raises(KimiGraphError, match=rf"select \(QuantLightningIndexer\): {message}"):
        select(build, indexed(**changes), **attrs).run("native")


# ---- attention -------------------------------------------------------------------------------------------------------

ATTEND = {
    "scale_value": 0.0625,
    "key_quant_mode": 2,
    "value_quant_mode": 2,
    "sparse_block_size": 1,
    "layout_query": "BSND",
    "layout_kv": "PA_BSND",
    "sparse_mode": 3,
    "pre_tokens": LONG,
    "next_tokens": LONG,
    "attention_mode": 2,
    "quant_scale_repo_mode": 1,
    "tile_size": 128,
    "rope_head_dim": 64,
}
CHOSEN = torch.tensor(
    [[[17, 3, 9, -1], [18, 0, 17, 4], [1, 2, 3, 4]], [[4, 2, -1, -1], [0, 1, 2, 3], [-1, -1, -1, -1]]], dtype=I32
)[:, :, None]
LATENTS, ROPES, SCALES = (
    rand(4, PAGE, 1, 512, dtype=F32) * 40,
    rand(4, PAGE, 1, 64),
    rand(4, PAGE, 1, 4, dtype=F32) / 40,
)


def rows(dtype: torch.dtype, exact: bool = False) -> torch.Tensor:
    """As the golden function puts a cache together; exactly: numbers in the places of their first bytes."""
    if not exact:
        parts = LATENTS.to(dtype), ROPES.contiguous().view(dtype), SCALES.contiguous().view(dtype)
        return torch.cat(parts, -1)
    made = torch.zeros(4, PAGE, 1, 656, dtype=F64)
    made[..., :512], made[..., 512:640:2], made[..., 640::4] = (
        LATENTS.to(dtype).double(),
        ROPES.double(),
        SCALES.double(),
    )
    return made


def cached(dtype: torch.dtype = I8, **changes):
    pool = rows(dtype)
    values = {"query": rand(2, 3, 3, 576), "key": pool, "value": pool, "sparse_indices": CHOSEN}
    values |= {"key_dequant_scale": None, "value_dequant_scale": None, "block_table": TABLE}
    values |= {"actual_seq_lengths_query": QUERIES, "actual_seq_lengths_kv": KEYS}
    return values | changes


def attend(b, values, **attrs):
    b.result(
        *b.node(
            "KvQuantSparseFlashAttention", both(values, b), outputs="attention_out", attrs=ATTEND | attrs, name="attend"
        )
    )
    return b


def attended(values, dtype, row: int, t: int, chosen: list[int], rounded: bool) -> torch.Tensor:
    """By the golden function: softmax(scale * q [latent, rope]) latent, of latents times the scale of their tile."""
    outs, at = [], [(int(TABLE[row, i // PAGE]), i % PAGE, 0) for i in chosen]
    latents = torch.stack([LATENTS[i].to(dtype).double() * SCALES[i].double().repeat_interleave(128) for i in at])
    latents = latents.to(BF16).double() if rounded else latents
    keys = torch.cat([latents, torch.stack([ROPES[i].double() for i in at])], -1)
    for head in range(3):
        scores = [0.0625 * float(values["query"][row, t, head].double() @ k) for k in keys]
        shares = [math.exp(s - max(scores)) for s in scores]
        outs.append(sum(share * k for share, k in zip(shares, latents, strict=True)) / sum(shares))
    return torch.stack(outs)


@pytest.mark.parametrize("dtype", [I8, E4M3])
def test_chosen_rows_are_attended_to_as_the_golden_function_does(build, dtype):
    values = cached(dtype)
    b = attend(build, values)
    b.values |= {"key": rows(dtype, exact=True), "value": rows(dtype, exact=True)}
    (out,) = b.run("exact").outputs
    for row, t, chosen in ((0, 0, [17, 3, 9]), (0, 1, [18, 0, 17, 4]), (1, 0, [4, 2])):
        torch.testing.assert_close(out[row, t], attended(values, dtype, row, t, chosen, False), rtol=1e-12, atol=1e-12)
    assert not out[0, 2].any() and not out[1, 1:].any()  # rows past the number of queries
    b.values |= {"key": values["key"], "value": values["value"]}
    (out,) = b.run("native").outputs
    assert out.dtype == BF16 and out.shape == (2, 3, 3, 512)
    wanted = attended(values, dtype, 0, 1, [18, 0, 17, 4], True)
    # weights and result are rounded to 8 bits of mantissa each
    torch.testing.assert_close(out[0, 1].double(), wanted, rtol=0, atol=2 * 2**-8 * float(wanted.abs().max()))


def test_shapes_are_inferred(build):
    b = attend(build, cached())
    infer_shapes(b.model)
    node = next(op for op in b.graph.op if op.name == "attend")
    assert [(shape_of(d), dtype_of(d)) for d in node.output_desc] == [((2, 3, 3, 512), BF16)]


@pytest.mark.parametrize(
    "changes, attrs, message",
    [
        ({}, {"key_quant_mode": 1}, "attribute 'key_quant_mode' is 1, supported is 2"),
        ({}, {"tile_size": 64}, "attribute 'tile_size' is 64, supported is 128"),
        ({}, {"attention_mode": 0}, "attribute 'attention_mode' is 0, supported is 2"),
        ({"key_dequant_scale": torch.ones(4)}, {}, "input 'key_dequant_scale' is given; supported is none"),
        ({"key": rows(I8)[..., :640], "value": rows(I8)[..., :640]}, {}, r"width 576, key \[4, 16, 1, 640\]"),
        ({"value": -rows(I8)}, {}, "value differs from key"),
        ({"query": rand(2, 3, 3, 512)}, {}, "width 512"),
        ({"sparse_indices": CHOSEN.flip(-1)}, {}, "a position after -1, where kernels stop"),
    ],
)
def test_an_attention_outside_the_document_is_refused(build, changes, attrs, message):
    with pytest.raises(KimiGraphError, match=rf"attend \(KvQuantSparseFlashAttention\): {message}"):
        attend(build, cached(**changes), **attrs).run("native")


def test_an_exact_run_does_not_take_rounded_rows_for_exact_ones(build):
    with pytest.raises(KimiGraphError, match=r"rows of torch.int8; float64 where floats are exact"):
        attend(build, cached()).run("exact")
