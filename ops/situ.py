"""SiTU: a gated activation whose two factors are both bounded, `beta tanh(g / beta) sigmoid(g) * lb tanh(u / lb)`.

Source: fact sheet of models, section 2.6.
"""

import torch
from torch import Tensor

from .base import at_least_f32, by_rows, empty_like, operator
from .offers import Offer, cannot


def _situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    g, u = at_least_f32(gate), at_least_f32(up)
    y = beta * torch.tanh(g / beta) * torch.sigmoid(g) * (linear_beta * torch.tanh(u / linear_beta))
    return y.to(gate.dtype)


@operator(sharding="m f -> m g", whole="fg")
def situ(x: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU of the two halves of the last dimension, gate first: `[M, 2 F]` -> `[M, F]`; float32 inside."""

    def glu(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return _situ(gate, up, beta, linear_beta)

    return by_rows(glu, x)


@situ.fake
def _(x, beta, linear_beta):
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@situ.lowering
def _(ge, *args):
    return ge.serve("SiTU", HALVES, *args)


def _split(ge, x, beta, linear_beta):
    gate, up = _parts(ge, x)
    return _composed(ge, gate, up, beta, linear_beta)


def _parts(ge, x):
    width = ge.shape(x)[-1] // 2
    dim = ge.const(len(ge.shape(x)) - 1, torch.int64)
    parts = ge.SplitV(x, ge.const([width, width], torch.int64), dim, num_split=2)
    return [ge.mark(part, (*ge.shape(x)[:-1], width), ge.dtype(x)) for part in parts]


def _fused(ge, x, beta, linear_beta):
    attrs = {"dim": -1, "beta": beta, "linear_beta": linear_beta, "activate_left": True}
    return ge.own("SituGlu", {"x": x}, ["y"], attrs)


def _composed(ge, gate, up, beta, linear_beta):
    """Element functions in float32; constants as operands, since an attribute would round their reciprocals."""
    f32 = torch.float32
    shape, dtype = ge.shape(gate), ge.dtype(gate)
    g, u, b, lb = ge.cast(gate, f32), ge.cast(up, f32), ge.const(beta, f32), ge.const(linear_beta, f32)
    left = ge.Mul(ge.Mul(ge.Tanh(ge.RealDiv(g, b)), b), ge.Sigmoid(g))
    right = ge.Mul(ge.Tanh(ge.RealDiv(u, lb)), lb)
    return ge.cast(ge.mark(ge.Mul(left, right), shape, f32), dtype)


@operator(sharding="... f, ... f -> ... f")
def situ_mul(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU of a gate and a linear part of one shape: `[..., F]`; float32 inside."""
    return by_rows(lambda gate, up: _situ(gate, up, beta, linear_beta), gate, up)


@situ_mul.fake
def _(gate, up, beta, linear_beta):
    return empty_like(gate)


@situ_mul.lowering
def _(ge, *args):
    return ge.serve("SiTU", PAIRS, *args)


def _joined(ge, gate, up, beta, linear_beta):
    """To put the two side by side moves fewer bytes than twelve element functions do."""
    return _fused(ge, ge.concat([gate, up], len(ge.shape(gate)) - 1), beta, linear_beta)


def _own(ge, gate, up, beta, linear_beta):
    return ge.own("SituMul", {"gate": gate, "up": up}, ["y"], {"beta": beta, "linear_beta": linear_beta})


def _own_split(ge, x, beta, linear_beta):
    gate, up = _parts(ge, x)
    return _own(ge, gate, up, beta, linear_beta)


# What quantises too. Experts of these graphs are bfloat16, or INT4 whose rows are not quantised, or packed floats whose
# rows are E4M3: none reads rows in INT8 with a scale each, whosever operator makes them.
_INT8_ROWS = "gives rows in INT8, which no product of these graphs takes: with experts in bf16 or INT4 rows stay bf16"
_QUANTISING = (
    cannot("builtin", "SituMxQuant", "gives rows in MXFP8: it serves the rows of MXFP4 experts, not SiTU alone"),
    cannot("builtin", "DequantSituQuant", _INT8_ROWS),
    cannot("vllm-ascend", "DequantSituQuant", _INT8_ROWS),
    cannot("own", "SituMulQuant", _INT8_ROWS),
)


def _offers(builtin, composed, own) -> tuple[Offer, ...]:
    return (
        *_QUANTISING,
        Offer("builtin", "SituGlu", builtin, "one operator"),
        Offer("composed", "Tanh, Sigmoid, Mul", composed, "element functions in float32"),
        Offer("own", "SituMul", own, "one kernel"),
    )


HALVES, PAIRS = _offers(_fused, _split, _own_split), _offers(_joined, _composed, _own)
