"""Element functions. Half floats are computed in float32 and rounded once; no operator promotes dtypes."""

import operator
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_graph.compile.executor.node import Op
from kimi_graph.compile.executor.registry import ge_op
from kimi_graph.ops import at_least_f32


def wide(x: Tensor) -> Tensor:
    """Half floats in float32; everything else as it is."""
    return at_least_f32(x) if x.is_floating_point() else x


def _unary(type_: str, f: Callable[[Tensor], Tensor], aten: str) -> None:
    @ge_op(type_, provenance="torch semantics", source=f"only node of torchair's aten.{aten}")
    def run(op: Op, x: Tensor) -> Tensor:
        return f(wide(x)).to(x.dtype)


for _type, _f, _aten in (
    ("Abs", torch.abs, "abs"),
    ("Ceil", torch.ceil, "ceil"),
    ("Cos", torch.cos, "cos"),
    ("Erf", torch.erf, "erf"),
    ("Expm1", torch.expm1, "expm1"),
    ("Floor", torch.floor, "floor"),
    ("Log1p", torch.log1p, "log1p"),
    ("Neg", torch.neg, "neg"),
    ("Reciprocal", torch.reciprocal, "reciprocal"),
    ("Relu", torch.relu, "relu"),
    ("Rsqrt", torch.rsqrt, "rsqrt"),
    ("Sigmoid", torch.sigmoid, "sigmoid"),
    ("Sign", torch.sign, "sign"),
    ("Sin", torch.sin, "sin"),
    ("Sqrt", torch.sqrt, "sqrt"),
    ("Tanh", torch.tanh, "tanh"),
):
    _unary(_type, _f, _aten)


@ge_op("Square", provenance="documented formula", source="prototype text: x * x")
def square(op: Op, x: Tensor) -> Tensor:
    return wide(x).square().to(x.dtype)


@ge_op("Exp", provenance="documented formula", source="prototype text: base ** (scale * x + shift), base -1 means e")
def exp(op: Op, x: Tensor) -> Tensor:
    op.expect(base=-1.0, scale=1.0, shift=0.0)
    return wide(x).exp().to(x.dtype)


@ge_op("Log", provenance="documented formula", source="prototype text: log of (scale * x + shift), base -1 means e")
def log(op: Op, x: Tensor) -> Tensor:
    op.expect(base=-1.0, scale=1.0, shift=0.0)
    return wide(x).log().to(x.dtype)


@ge_op("Swish", provenance="documented formula", source="prototype text: x / (1 + exp(-scale * x))")
def swish(op: Op, x: Tensor) -> Tensor:
    x32 = wide(x)
    return (x32 * torch.sigmoid(op.attr("scale", 1.0) * x32)).to(x.dtype)


@ge_op(
    "GeluV2",
    provenance="documented formula",
    source="prototype text: x times the normal distribution function, or its tanh approximation; compatible with torch",
)
def gelu_v2(op: Op, x: Tensor) -> Tensor:
    form = op.attr("approximate", "none")
    op.require(form in ("none", "tanh"), f"approximate {form!r}, supported is 'none' or 'tanh'")
    return F.gelu(wide(x), approximate=form).to(x.dtype)


@ge_op(
    "SoftplusV2",
    provenance="documented formula",
    source="prototype text: ln(1 + exp(beta x)) / beta where beta x <= threshold, else x",
)
def softplus_v2(op: Op, x: Tensor) -> Tensor:
    beta, threshold = op.attr("beta", 1.0), op.attr("threshold", 20.0)
    return F.softplus(wide(x), beta, threshold).to(x.dtype)


@ge_op("LogicalNot", provenance="torch semantics", source="only node of torchair's aten.logical_not")
def logical_not(op: Op, x: Tensor) -> Tensor:
    op.of_dtype(torch.bool, x=x)
    return ~x


@ge_op("Muls", provenance="documented formula", source="prototype text: x times the attribute value")
def muls(op: Op, x: Tensor) -> Tensor:
    return (wide(x) * op.need("value", float)).to(x.dtype)


@ge_op("Adds", provenance="documented formula", source="prototype text: x plus the attribute value")
def adds(op: Op, x: Tensor) -> Tensor:
    return (wide(x) + op.need("value", float)).to(x.dtype)


def _binary(type_: str, f: Callable[[Tensor, Tensor], Tensor], aten: str) -> None:
    @ge_op(type_, provenance="torch semantics", source=f"only node of torchair's aten.{aten}")
    def run(op: Op, x1: Tensor, x2: Tensor) -> Tensor:
        op.same_dtype(x1, x2)
        return f(wide(x1), wide(x2)).to(x1.dtype)


for _type, _g, _aten in (
    ("Add", operator.add, "add.Tensor"),
    ("Sub", operator.sub, "sub.Tensor"),
    ("Maximum", torch.maximum, "maximum"),
    ("Minimum", torch.minimum, "minimum"),
    ("Pow", torch.pow, "pow"),
    ("FloorDiv", torch.floor_divide, "floor_divide"),
    ("FloorMod", torch.remainder, "remainder"),
):
    _binary(_type, _g, _aten)


@ge_op(
    "Mul",
    provenance="documented formula",
    source="prototype text: x1 * x2; the only binary operator that takes bfloat16 or float16 beside float32",
)
def mul(op: Op, x1: Tensor, x2: Tensor) -> Tensor:
    if not (x1.is_floating_point() and x2.is_floating_point()):
        op.same_dtype(x1, x2)
    return (wide(x1) * wide(x2)).to(torch.promote_types(x1.dtype, x2.dtype))


@ge_op(
    "RealDiv", provenance="torch semantics", source="last node of torchair's aten.div.Tensor, integers are cast before"
)
def real_div(op: Op, x1: Tensor, x2: Tensor) -> Tensor:
    op.same_dtype(x1, x2)
    op.require(x1.is_floating_point(), f"floats expected, found {x1.dtype}")
    return (wide(x1) / wide(x2)).to(x1.dtype)


@ge_op("Mod", provenance="documented formula", source="prototype text: remainder with the sign of x1, as C's fmod")
def mod(op: Op, x1: Tensor, x2: Tensor) -> Tensor:
    op.same_dtype(x1, x2)
    return torch.fmod(wide(x1), wide(x2)).to(x1.dtype)


@ge_op("AxpyV2", provenance="torch semantics", source="only node of torchair's aten.add.Tensor with alpha")
def axpy_v2(op: Op, x1: Tensor, x2: Tensor, alpha: Tensor) -> Tensor:
    op.same_dtype(x1, x2)
    return (wide(x1) + wide(alpha) * wide(x2)).to(x1.dtype)


@ge_op("Sxpy", provenance="torch semantics", source="only node of torchair's aten.rsub: x1 - alpha * x2")
def sxpy(op: Op, x1: Tensor, x2: Tensor, alpha: Tensor | None) -> Tensor:
    op.same_dtype(x1, x2)
    return (wide(x1) - (wide(x2) if alpha is None else wide(alpha) * wide(x2))).to(x1.dtype)


@ge_op("Addcmul", provenance="torch semantics", source="only node of torchair's aten.addcmul")
def addcmul(op: Op, input_data: Tensor, x1: Tensor, x2: Tensor, value: Tensor) -> Tensor:
    op.same_dtype(input_data, x1, x2)
    return (wide(input_data) + wide(value) * wide(x1) * wide(x2)).to(input_data.dtype)


@ge_op("Lerp", provenance="torch semantics", source="only node of torchair's aten.lerp.Scalar")
def lerp(op: Op, start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    op.same_dtype(start, end)
    return (wide(start) + wide(weight) * (wide(end) - wide(start))).to(start.dtype)


def _compare(type_: str, f: Callable[[Tensor, Tensor], Tensor], aten: str) -> None:
    @ge_op(type_, provenance="torch semantics", source=f"only node of torchair's aten.{aten}")
    def run(op: Op, x1: Tensor, x2: Tensor) -> Tensor:
        op.same_dtype(x1, x2)
        return f(x1, x2)


for _type, _g, _aten in (
    ("Less", torch.lt, "lt"),
    ("LessEqual", torch.le, "le"),
    ("Greater", torch.gt, "gt"),
    ("GreaterEqual", torch.ge, "ge"),
    ("Equal", torch.eq, "eq"),
    ("NotEqual", torch.ne, "ne"),
):
    _compare(_type, _g, _aten)


def _logical(type_: str, f: Callable[[Tensor, Tensor], Tensor], aten: str, *dtypes: torch.dtype) -> None:
    @ge_op(type_, provenance="torch semantics", source=f"only node of torchair's aten.{aten}")
    def run(op: Op, x1: Tensor, x2: Tensor) -> Tensor:
        op.same_dtype(x1, x2)
        op.of_dtype(*dtypes, x1=x1, x2=x2)
        return f(x1, x2)


_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_logical("LogicalAnd", torch.logical_and, "logical_and", torch.bool)
_logical("LogicalOr", torch.logical_or, "logical_or", torch.bool)
_logical("BitwiseAnd", torch.bitwise_and, "bitwise_and", *_INTEGERS)
_logical("BitwiseOr", torch.bitwise_or, "bitwise_or", *_INTEGERS)


@ge_op("ClipByValueV2", provenance="torch semantics", source="only node of torchair's aten.clamp")
def clip_by_value_v2(op: Op, x: Tensor, clip_value_min: Tensor, clip_value_max: Tensor) -> Tensor:
    op.same_dtype(x, clip_value_min, clip_value_max)
    return torch.minimum(torch.maximum(x, clip_value_min), clip_value_max)


@ge_op("SelectV2", provenance="torch semantics", source="only node of torchair's aten.where.self", outputs="result")
def select_v2(op: Op, condition: Tensor, then: Tensor, else_: Tensor) -> Tensor:
    op.of_dtype(torch.bool, condition=condition)
    op.same_dtype(then, else_)
    return torch.where(condition, then, else_)


@ge_op("Select", provenance="documented formula", source="prototype text: elements of x1 where condition, else of x2")
def select(op: Op, condition: Tensor, x1: Tensor, x2: Tensor) -> Tensor:
    op.of_dtype(torch.bool, condition=condition)
    op.same_dtype(x1, x2)
    op.require(condition.shape == x1.shape == x2.shape, "condition, x1 and x2 of one shape are supported")
    return torch.where(condition, x1, x2)


@ge_op("MaskedFill", provenance="torch semantics", source="only node of torchair's aten.masked_fill")
def masked_fill(op: Op, x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    op.of_dtype(torch.bool, mask=mask)
    op.same_dtype(x, value)
    return torch.where(mask, value.reshape(()), x)


@ge_op(
    "Cast",
    provenance="documented formula",
    source="prototype text: to dst_type; to integers it truncates, to a narrower float it rounds to nearest even",
)
def cast(op: Op, x: Tensor) -> Tensor:
    op.expect(truncate=False)
    return x.to(op.dtype("dst_type"))
