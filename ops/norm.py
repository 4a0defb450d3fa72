"""Norms over the last dimension: RMSNorm, with a sigmoid gate, LayerNorm, L2 norm; and the gate alone.

Source: RMSNorm (arXiv:1910.07467), LayerNorm (arXiv:1607.06450); for what is rounded when, fact sheet of models,
notation and section 3.1. Statistics are float32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import at_least_f32, by_rows, empty_like, operator
from .offers import Offer


@operator(sharding="... d, d -> ... d", whole="d")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)`, scaled in float32, cast, then multiplied by the weight.

    Args:
        x: `[..., D]`.
        weight: `[D]`.
    """

    def norm(x: Tensor) -> Tensor:
        if x.dtype.itemsize >= 4:
            return F.rms_norm(x, x.shape[-1:], weight, eps)
        return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype) * weight

    return by_rows(norm, x)


@rms_norm.fake
def _(x, weight, eps):
    return empty_like(x)


@rms_norm.lowering
def _(ge, x, weight, eps):
    return ge.RmsNorm(x, weight, epsilon=eps)[0]


@operator(sharding="... d, d, d -> ... d", whole="d")
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`weight * (x - mean) / sqrt(variance + eps) + bias`, float32 throughout, cast at the end.

    Args:
        x: `[..., D]`.
        weight, bias: `[D]`.
    """

    def norm(x: Tensor) -> Tensor:
        x32, weight32, bias32 = map(at_least_f32, (x, weight, bias))
        return F.layer_norm(x32, x.shape[-1:], weight32, bias32, eps).to(x.dtype)

    return by_rows(norm, x)


@layer_norm.fake
def _(x, weight, bias, eps):
    return empty_like(x)


@layer_norm.lowering
def _(ge, x, weight, bias, eps):
    return ge.LayerNormV4(x, ge.const([ge.shape(x)[-1]], torch.int64), weight, bias, epsilon=eps)[0]


@operator(sharding="... d, ... d, d -> ... d", whole="d")
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of `x`, times the sigmoid of `gate`; float32 throughout, cast at the end.

    Args:
        x, gate: `[..., D]`.
        weight: `[D]`.
    """

    def norm(x: Tensor, gate: Tensor) -> Tensor:
        normed = F.rms_norm(at_least_f32(x), x.shape[-1:], at_least_f32(weight), eps)
        return (normed * torch.sigmoid(at_least_f32(gate))).to(x.dtype)

    return by_rows(norm, x, gate)


@gated_rms_norm.fake
def _(x, gate, weight, eps):
    return empty_like(x)


@gated_rms_norm.lowering
def _(ge, *args):
    return ge.serve("gated norm", GATED, *args)


def _gated(ge, x, gate, weight, eps):
    return ge.own("GatedRmsNorm", {"x": x, "gate": gate, "weight": weight}, ["y"], {"eps": eps})


def _gated_composed(ge, x, gate, weight, eps):
    f32, shape = torch.float32, ge.shape(x)
    normed = ge.RmsNorm(ge.cast(x, f32), ge.weight_as(weight, f32), epsilon=eps)[0]
    made = ge.mark(ge.Mul(normed, ge.Sigmoid(ge.cast(gate, f32))), shape, f32)
    return ge.cast(made, ge.dtype(x))


def _own_width(ge, x, *args) -> str:
    width = ge.shape(x)[-1]
    return "" if width % 16 == 0 and 16 <= width <= 512 else f"takes multiples of 16 up to 512, this is {width}"


GATED = (
    Offer("own", "GatedRmsNorm", _gated, "CANN has no norm that multiplies by a sigmoid", _own_width),
    Offer("composed", "RmsNorm, Sigmoid, Mul", _gated_composed, "float32 between the operators"),
)


@operator(sharding="... d, ... d -> ... d", linear=True)
def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """`x` times the sigmoid of `gate`, in their dtype: `[..., D]`. The output gate of attention."""
    return x * torch.sigmoid(gate)


@sigmoid_gate.fake
def _(x, gate):
    return empty_like(x)


@sigmoid_gate.lowering
def _(ge, *args):
    return ge.serve("gate of attention", SIGMOID_GATE, *args)


def _sigmoid_gate(ge, x, gate):
    """The last part of the chain around attention by itself: products stand before and after it."""
    inputs = {"x": x, "residual": None, "weight": None, "gate": gate}
    y, total = ge.own("ResidualNormGate", inputs, ["y", "sum"], {})
    ge.mark(total, (0,), ge.dtype(x))
    return y


def _sigmoid_gate_composed(ge, x, gate):
    made = ge.mark(ge.Sigmoid(gate), ge.shape(gate), ge.dtype(gate))
    return ge.Mul(x, made)


SIGMOID_GATE = (
    Offer("composed", "Sigmoid, Mul", _sigmoid_gate_composed, "rounded between the two, as released code does"),
    Offer("own", "ResidualNormGate", _sigmoid_gate, "one kernel, rounded once"),
)


@operator(sharding="... d -> ... d", whole="d")
def l2_norm(x: Tensor, eps: float) -> Tensor:
    """`x / sqrt(sum(x^2) + eps)` over the last dimension; the result has x's dtype.

    Args:
        x: `[..., D]`.
    """

    def norm(x: Tensor) -> Tensor:
        x32 = at_least_f32(x)
        return (x32 * torch.rsqrt(x32.square().sum(-1, keepdim=True) + eps)).to(x.dtype)

    return by_rows(norm, x)


@l2_norm.fake
def _(x, eps):
    return empty_like(x)


@l2_norm.lowering
def _(ge, x, eps):
    f32, shape = torch.float32, ge.shape(x)
    x32 = ge.cast(x, f32)
    total = ge.ReduceSum(ge.Square(x32), ge.const([len(shape) - 1], torch.int64), keep_dims=True)
    made = ge.Mul(x32, ge.Rsqrt(ge.Add(total, ge.const(eps, f32))))
    return ge.cast(ge.mark(made, shape, f32), ge.dtype(x))
