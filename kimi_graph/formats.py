"""Formats of quantised weights: a matrix `[out, in]` as a few smaller tensors beside each other, and back.

Every format is a pair of functions on tensors. Of a weight `X.weight` a checkpoint then holds the format's parts under
names such as `X.weight_packed`. Leading dimensions (a stack of experts) are carried along.

| format | parts | what they mean |
| --- | --- | --- |
| mxfp4 | weight_packed U8 `[o, i / 2]`, weight_scale U8 `[o, i / 32]` | E2M1, low nibble first; `2 ** (scale - 127)` |
| int4 | weight_packed I32 `[o, i / 8]`, weight_scale `[o, i / 32]`, weight_shape | value + 8 in nibbles, low first |
| fp8 | weight E4M3 `[o, i]`, weight_scale_inv F32 per block of 128 x 128 | product; edge blocks are smaller |
| w8 | weight I8 `[o, i]`, weight_scale and weight_offset per output or per group | `(weight - offset) * scale` |
| w8-static | weight I8 `[o, i]`, deq_scale per output, input_scale | `weight * deq_scale / input_scale` |
| w4 | weight I8 `[o / 2, i]`, weight_scale and weight_offset per output | row 2r in low nibbles, 2r + 1 in high ones |
| w4-mx | weight U8 `[o, i / 2]`, weight_scale U8 `[o, i / 32]` | as mxfp4 |
| int8-g32 | weight I8 `[o, i]`, weight_scale BF16 `[o, i / 32]` | product; scales are powers of two |
| int4-g32 | weight U8 `[o, i / 2]`, weight_scale BF16 `[o, i / 32]` | two's complement nibbles, low first; product |

The last two are not found in checkpoints: they are what a weight plan can make for a kernel.
Source: mxfp4 and int4: fact sheet of models, sections 2.2 and 6.1 (compressed-tensors); fp8: DeepSeek-V3's released
code; w8 to w4-mx: msModelSlim, "AscendV1 format" and the writer of that format. Uncertain there: its text adds
`scale_bias` to a w4 weight, but its writer and CANN's GroupedMatmul make that `8 * sum(weight * scale)` over inputs, a
help for computing with shifted activations and no part of the weight; so it is here. `deq_scale` as I64 holds the bits
of a float32. Exports whose activations are rotated at run time bring matrices of their own, which no model here has.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import CheckpointError

GROUP = 32  # inputs that share a scale
BLOCK = 128  # side of an fp8 block
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MOST_E2M1, MOST_E4M3 = 6.0, 448.0
BIAS = 127  # of an E8M0 exponent
MOST_SCALE = 252  # 6 * 2 ** (252 - 127) is the largest product that bfloat16 and float32 hold
NAN_SCALE = 255

Shape = tuple[int, ...]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Part:
    """One tensor of a packed weight.

    Attributes:
        name: after the module's (`weight_packed`).
        dtypes: legal ones, the one that is written first.
        shapes: legal ones of a weight `(out, in)`, the one that is written first.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    shapes: Callable[[int, int], tuple[Shape, ...]]


@dataclass(frozen=True)
class Format:
    """A way to pack a weight.

    Attributes:
        parts: tensors a weight is read from, in the order `encode` gives and `decode` takes them.
        extras: names of tensors that come with them and say nothing about the weight.
        encode: weight -> parts; None: such weights are only read.
        decode: parts and a float dtype -> weight.
        multiple: outputs and inputs are multiples of these.
    """

    name: str
    parts: tuple[Part, ...]
    encode: Callable[[Tensor], tuple[Tensor, ...]] | None
    decode: Callable[..., Tensor]
    extras: tuple[str, ...] = ()
    multiple: tuple[int, int] = (1, 1)


def pack(name: str, weight: Tensor) -> dict[str, Tensor]:
    """The parts of a weight `[..., out, in]` in a format, by their names.

    Raises:
        CheckpointError: the format cannot hold it: a size that is no multiple, infinity or NaN.
    """
    f = FORMATS[name]
    assert f.encode is not None, f"{name} is only read"
    _check_size(f, tuple(weight.shape[-2:]))
    if not bool(torch.isfinite(weight).all()):
        raise CheckpointError(f"{name}: a weight that is infinite or NaN cannot be quantised.")
    return dict(zip((p.name for p in f.parts), f.encode(weight), strict=True))


def unpack(name: str, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The weight `[..., out, in]`, rounded once to `dtype`.

    mxfp4 is exact in bfloat16 and wider; int4, w8, w4 and int8-g32 are products of a small integer and a scale, exact
    in float64 (and in float32 for a bfloat16 scale); fp8 is computed in float32, as released code does, then rounded,
    in float64 exactly.

    Raises:
        CheckpointError: a part holds what it may not.
    """
    return FORMATS[name].decode(*(parts[p.name] for p in FORMATS[name].parts), dtype)


def layout(name: str, shape: Shape) -> dict[str, tuple[torch.dtype, Shape]]:
    """Dtype and shape of every part, as `pack` gives them, of a weight `[..., out, in]`.

    Raises:
        CheckpointError: a weight whose size the format does not take.
    """
    f, lead, last = FORMATS[name], shape[:-2], (shape[-2], shape[-1])
    _check_size(f, last)
    return {p.name: (p.dtypes[0], (*lead, *p.shapes(*last)[0])) for p in f.parts}


def convert(source: str, parts: Mapping[str, Tensor], to: str) -> dict[str, Tensor]:
    """A packed weight in another format: as it is if it has that format, else with the least loss.

    int4 keeps its numbers and scales in int4-g32 and int8-g32; all others go through float64. So mxfp4 stays exact in
    int8-g32: twice an E2M1 number is an integer of at most 12.
    """
    if source == to:
        return dict(parts)
    if source == "int4" and to in ("int4-g32", "int8-g32") and parts["weight_scale"].dtype == torch.bfloat16:
        biased = parts["weight_packed"].contiguous().view(torch.uint8)
        signed = biased ^ 0x88  # value + 8 and two's complement differ in the upper bit of each nibble
        weight = signed if to == "int4-g32" else _nibbles(signed, torch.int8, _SIGNED)
        return {"weight": weight, "weight_scale": parts["weight_scale"]}
    return pack(to, unpack(source, parts, torch.float64))


def _check_size(f: Format, shape: Shape) -> None:
    if any(size % m for size, m in zip(shape, f.multiple, strict=True)):
        raise CheckpointError(f"{f.name}: a weight {list(shape)} is not a multiple of {list(f.multiple)}.")


# ---- nibbles ---------------------------------------------------------------------------------------------------------

_SIGNED = tuple(float(i - 16 * (i > 7)) for i in range(16))  # two's complement
_BIASED = tuple(float(i - 8) for i in range(16))
_FP4 = E2M1 + tuple(-x for x in E2M1)


def _nibbles(packed: Tensor, dtype: torch.dtype, table: tuple[float, ...]) -> Tensor:
    """What two numbers of four bits in each byte stand for: `[..., n]` bytes -> `[..., 2 n]`."""
    byte = torch.arange(256)
    pairs = torch.tensor(table, dtype=dtype)[torch.stack([byte & 15, byte >> 4], 1)]
    return pairs.index_select(0, packed.reshape(-1).int()).view(*packed.shape[:-1], -1)


def int4_numbers(packed: Tensor) -> Tensor:
    """Bytes `[..., n]` of two's complement nibbles, low first, as int8 `[..., 2 n]`."""
    return _nibbles(packed, torch.int8, _SIGNED)


def e2m1_numbers(packed: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Bytes `[..., n]` of E2M1 numbers, low nibble first, as `[..., 2 n]` of a float dtype, exactly."""
    return _nibbles(packed, dtype, _FP4)


def _join(codes: Tensor) -> Tensor:
    """Numbers below 16 `[..., 2 n]` as bytes `[..., n]`, the first of two in the low bits."""
    low, high = codes.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


def _grouped(x: Tensor, groups: int) -> Tensor:
    return x.unflatten(-1, (groups, -1))


def _scaled(numbers: Tensor, scale: Tensor) -> Tensor:
    """Numbers `[..., out, in]`, changed in place, times a scale `[..., out, groups]`."""
    _grouped(numbers, scale.shape[-1]).mul_(scale[..., None])
    return numbers


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Where products are computed before they are rounded to `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- E2M1 with E8M0 scales -------------------------------------------------------------------------------------------


def _decode_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    exponent = scale.view(torch.uint8)
    top = int(exponent.max()) if exponent.numel() else 0
    if top == NAN_SCALE or (top > MOST_SCALE and dtype != torch.float64):
        meaning = "NaN" if top == NAN_SCALE else f"2 ** {top - BIAS}: the product may be beyond {dtype}"
        at = (exponent == top).nonzero()[0].tolist()
        raise CheckpointError(f"weight_scale{at} is {top}, which is {meaning}.")
    work = dtype if dtype in (torch.bfloat16, torch.float64) else torch.float32  # all exact; float16 may round
    powers = torch.exp2(torch.arange(256, dtype=torch.float64) - BIAS).to(work)
    return _scaled(_nibbles(packed, work, _FP4), powers[exponent.int()]).to(dtype)


def _encode_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    groups = _grouped(weight.float(), weight.shape[-1] // GROUP)
    amax = groups.abs().amax(-1)
    # To the nearest power of two, from 1.75 on upwards, and the exponent two lower: 6 is the largest number.
    exponent = ((amax.contiguous().view(torch.int32) + 0x200000 >> 23) - 2).clamp(0, MOST_SCALE)
    a = groups.abs().double() * torch.exp2(BIAS - exponent.double())[..., None]
    # On each binade of the grid; torch rounds halves to even, which is an even code on all three.
    code = torch.where(a < 2, (2 * a).round(), torch.where(a < 4, a.round() + 2, (a / 2).round() + 4)).clamp(max=7)
    code = code.to(torch.uint8) | torch.signbit(groups).to(torch.uint8) << 3
    return _join(code.flatten(-2)), exponent.to(torch.uint8)


# ---- integers with float scales --------------------------------------------------------------------------------------


def _integers(weight: Tensor, scale: Tensor, most: int) -> Tensor:
    """`weight / scale` in int8, between `-most - 1` and `most`; a scale of zero stands for zeros."""
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)[..., None]
    whole = (_grouped(weight, scale.shape[-2]) / scale).round_().clamp_(-most - 1, most)
    return whole.flatten(-2).to(torch.int8)


def _amax(weight: Tensor, groups: int) -> Tensor:
    return _grouped(weight, groups).abs().amax(-1)


def _decode_int4(packed: Tensor, scale: Tensor, shape: Tensor, dtype: torch.dtype) -> Tensor:
    weight = _nibbles(packed.contiguous().view(torch.uint8), _wide(dtype), _BIASED)
    if shape.numel() != 2 or shape.tolist() != list(weight.shape[-2:]):
        raise CheckpointError(f"weight_shape is {shape.tolist()}, but weight_packed holds {list(weight.shape[-2:])}.")
    return _scaled(weight, scale.to(_wide(dtype))).to(dtype)


def _encode_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Symmetric: the largest of a group becomes 7.5, halfway between 7 and 8 (compressed-tensors' rule)."""
    x = weight.to(_wide(weight.dtype))
    scale = (_amax(x, x.shape[-1] // GROUP) / 7.5).to(torch.bfloat16)
    words = _join(_integers(x, scale.to(x.dtype), 7) + 8).view(torch.int32)
    return words, scale, torch.tensor(weight.shape[-2:], dtype=torch.int64)


def _decode_group(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return _scaled(weight.to(_wide(dtype)), scale.to(_wide(dtype))).to(dtype)


def _encode_int8_group(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Scales are the smallest powers of two that fit: mxfp4, whose scales are powers of two, comes out exact."""
    x = weight.to(_wide(weight.dtype))
    mantissa, exponent = torch.frexp(_amax(x, x.shape[-1] // GROUP))
    # amax = mantissa * 2 ** exponent, mantissa in [1/2, 1); -133 is the smallest power of two of bfloat16.
    exponent = (exponent - 7 + (mantissa > 127 / 128)).clamp(min=-133)
    scale = torch.exp2(exponent.double())
    return _integers(x, scale.to(x.dtype), 127), scale.to(torch.bfloat16)


def _decode_int4_group(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return _scaled(_nibbles(packed, _wide(dtype), _SIGNED), scale.to(_wide(dtype))).to(dtype)


def _encode_int4_group(weight: Tensor) -> tuple[Tensor, Tensor]:
    packed, scale, _ = _encode_int4(weight)
    return packed.view(torch.uint8) ^ 0x88, scale


# ---- FP8 blocks ------------------------------------------------------------------------------------------------------


def _decode_fp8(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(weight.shape, dtype=dtype)
    columns = scale.to(_wide(dtype)).repeat_interleave(BLOCK, -1)[..., : weight.shape[-1]]
    for block in range(scale.shape[-2]):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        out[..., rows, :] = weight[..., rows, :].to(_wide(dtype)) * columns[..., block, None, :]
    return out


def _encode_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Scales are the smallest powers of two that fit (scale_fmt ue8m0)."""
    *_, outs, ins = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -ins % BLOCK, 0, -outs % BLOCK))
    blocks = padded.unflatten(-2, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax((-3, -1))
    mantissa, exponent = torch.frexp(amax / MOST_E4M3)
    power = torch.exp2((exponent - (mantissa == 0.5).int()).float().clamp(-126, 127))  # 2 ** ceil(log2)
    scale = torch.where(amax > 0, power, 1.0)
    numbers = (blocks / scale[..., :, None, :, None]).to(torch.float8_e4m3fn)
    return numbers.flatten(-2).flatten(-3, -2)[..., :outs, :ins].contiguous(), scale


# ---- msModelSlim -----------------------------------------------------------------------------------------------------


def _affine(weight: Tensor, scale: Tensor, offset: Tensor, dtype: torch.dtype) -> Tensor:
    numbers = weight.to(_wide(dtype))
    scale, offset = (x.to(_wide(dtype)).reshape(*weight.shape[:-1], -1) for x in (scale, offset))
    _grouped(numbers, scale.shape[-1]).sub_(offset[..., None]).mul_(scale[..., None])
    return numbers.to(dtype)


def _encode_w8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = weight.float()
    scale = _amax(x, 1) / 127
    return _integers(x, scale, 127), scale, torch.zeros_like(scale)


def _decode_w8_static(weight: Tensor, deq_scale: Tensor, input_scale: Tensor, dtype: torch.dtype) -> Tensor:
    if deq_scale.dtype == torch.int64:
        deq_scale = deq_scale.to(torch.int32).view(torch.float32)
    scale = deq_scale.to(_wide(dtype)).view(-1, 1) / input_scale.to(_wide(dtype)).view(())
    return (weight.to(_wide(dtype)) * scale).to(dtype)


def _decode_w4(packed: Tensor, scale: Tensor, offset: Tensor, dtype: torch.dtype) -> Tensor:
    pairs = _nibbles(packed.view(torch.uint8)[..., None], _wide(dtype), _SIGNED)  # [o / 2, i, 2]
    return _affine(pairs.transpose(-1, -2).flatten(-3, -2), scale, offset, dtype)


def _encode_w4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = weight.float()
    scale = _amax(x, 1) / 7
    rows = _integers(x, scale, 7).unflatten(-2, (-1, 2)).transpose(-1, -2) & 15  # [o / 2, i, 2]
    return _join(rows)[..., 0].contiguous().view(torch.int8), scale, torch.zeros_like(scale)


# ---- all of them -----------------------------------------------------------------------------------------------------

_U8, _I8, _F32 = (torch.uint8,), (torch.int8,), (torch.float32,)
_E8M0 = (torch.uint8, torch.float8_e8m0fnu)
_BF16 = (torch.bfloat16, torch.float16, torch.float32)


def _whole(o: int, i: int) -> tuple[Shape, ...]:
    return ((o, i),)


def _half(o: int, i: int) -> tuple[Shape, ...]:
    return ((o, i // 2),)


def _groups(o: int, i: int) -> tuple[Shape, ...]:
    return ((o, i // GROUP),)


def _outputs(o: int, i: int) -> tuple[Shape, ...]:
    return ((o, 1), (o,))


def _outputs_or_groups(o: int, i: int) -> tuple[Shape, ...]:
    return ((o, 1), (o,), *((o, i // size) for size in (32, 64, 128, 256) if i % size == 0))


FORMATS = {
    f.name: f
    for f in (
        Format(
            "mxfp4",
            (Part("weight_packed", _U8, _half), Part("weight_scale", _E8M0, _groups)),
            _encode_mxfp4,
            _decode_mxfp4,
            multiple=(1, GROUP),
        ),
        Format(
            "int4",
            (
                Part("weight_packed", (torch.int32,), lambda o, i: ((o, i // 8),)),
                Part("weight_scale", _BF16, _groups),
                Part("weight_shape", (torch.int64, torch.int32), lambda o, i: ((2,),)),
            ),
            _encode_int4,
            _decode_int4,
            multiple=(1, GROUP),
        ),
        Format(
            "fp8",
            (
                Part("weight", (torch.float8_e4m3fn,), _whole),
                Part("weight_scale_inv", FLOATS, lambda o, i: ((math.ceil(o / BLOCK), math.ceil(i / BLOCK)),)),
            ),
            _encode_fp8,
            _decode_fp8,
        ),
        Format(
            "w8",
            (
                Part("weight", _I8, _whole),
                Part("weight_scale", FLOATS, _outputs_or_groups),
                Part("weight_offset", FLOATS, _outputs_or_groups),
            ),
            _encode_w8,
            _affine,
            extras=("quant_bias", "input_scale", "input_offset", "deq_scale"),
        ),
        Format(
            "w8-static",
            (
                Part("weight", _I8, _whole),
                Part("deq_scale", (torch.float32, torch.int64), lambda o, i: ((o,), (o, 1))),
                Part("input_scale", FLOATS, lambda o, i: ((1,), ())),
            ),
            None,
            _decode_w8_static,
            extras=("quant_bias", "input_offset"),
        ),
        Format(
            "w4",
            (
                Part("weight", _I8, lambda o, i: ((o // 2, i),)),
                Part("weight_scale", FLOATS, _outputs),
                Part("weight_offset", FLOATS, _outputs),
            ),
            _encode_w4,
            _decode_w4,
            extras=("scale_bias",),
            multiple=(2, 1),
        ),
        Format(
            "w4-mx",
            (Part("weight", _U8, _half), Part("weight_scale", _E8M0, _groups)),
            _encode_mxfp4,
            _decode_mxfp4,
            multiple=(1, GROUP),
        ),
        Format(
            "int8-g32",
            (Part("weight", _I8, _whole), Part("weight_scale", _BF16, _groups)),
            _encode_int8_group,
            _decode_group,
            multiple=(1, GROUP),
        ),
        Format(
            "int4-g32",
            (Part("weight", _U8, _half), Part("weight_scale", _BF16, _groups)),
            _encode_int4_group,
            _decode_int4_group,
            multiple=(1, GROUP),
        ),
    )
}
IN_CHECKPOINTS = ("mxfp4", "int4", "fp8", "w8", "w8-static", "w4", "w4-mx")
