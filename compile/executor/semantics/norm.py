"""Norms and gated activations."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_graph.compile.executor.node import Op
from kimi_graph.compile.executor.registry import ge_op
from kimi_graph.ops import at_least_f32


@ge_op(
    "RmsNorm",
    provenance="public CPU reference",
    source="ops-nn's golden function and document: x / sqrt(mean(x^2) + epsilon) * gamma in float32, rounded once; "
    "the mean is over the dimensions of gamma; rstd is float32",
    outputs="y rstd",
)
def rms_norm(op: Op, x: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    op.require(
        x.shape[-gamma.ndim :] == gamma.shape, f"gamma {list(gamma.shape)} does not end the shape {list(x.shape)} of x"
    )
    x32 = at_least_f32(x)
    dims = list(range(x.ndim - gamma.ndim, x.ndim))
    rstd = torch.rsqrt(x32.square().mean(dims, keepdim=True) + op.attr("epsilon", 1e-6))
    return (x32 * rstd * at_least_f32(gamma)).to(x.dtype), rstd


@ge_op(
    "AddRmsNorm",
    provenance="public CPU reference",
    source="ops-nn's golden function and document: x = x1 + x2 in float32, rounded; RmsNorm of that by gamma, in "
    "float32 (A2 and A3 round once more before gamma)",
    outputs="y rstd x",
)
def add_rms_norm(op: Op, x1: Tensor, x2: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    op.same_dtype(x1, x2, gamma)
    op.require(x1.shape == x2.shape, f"x1 {list(x1.shape)}, x2 {list(x2.shape)}")
    x = (at_least_f32(x1) + at_least_f32(x2)).to(x1.dtype)
    return *rms_norm(op, x, gamma), x


@ge_op(
    "LayerNormV4",
    provenance="documented formula",
    source="ops-nn's document: (x - mean) / sqrt(variance + epsilon) * gamma + beta over the dimensions of "
    "normalized_shape, the variance not corrected; mean and rstd are float32",
    outputs="y mean rstd",
    host="normalized_shape",
)
def layer_norm_v4(
    op: Op, x: Tensor, normalized_shape: Tensor, gamma: Tensor | None, beta: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dims = op.ints(normalized_shape)
    op.require(bool(dims) and list(x.shape[-len(dims) :]) == dims, f"normalized_shape {dims} for x {list(x.shape)}")
    for name, given in (("gamma", gamma), ("beta", beta)):
        op.require(given is None or list(given.shape) == dims, f"{name} of {dims} expected")
        op.of_dtype(x.dtype, torch.float32, **{name: given})
    if gamma is not None and beta is not None:
        op.same_dtype(gamma, beta)
    axes, x32 = list(range(x.ndim - len(dims), x.ndim)), at_least_f32(x)
    mean = x32.mean(axes, keepdim=True)
    rstd = torch.rsqrt((x32 - mean).square().mean(axes, keepdim=True) + op.attr("epsilon", 1e-5))
    y = (x32 - mean) * rstd
    y = y if gamma is None else y * at_least_f32(gamma)
    y = y if beta is None else y + at_least_f32(beta)
    return y.to(x.dtype), mean, rstd


@ge_op(
    "SituGlu",
    provenance="documented formula",
    source="ops-nn's document: beta tanh(g / beta) sigmoid(g) times linear_beta tanh(u / linear_beta), times u where "
    "linear_beta is not positive; g is the first half of dim where activate_left; float32, rounded once (own reading)",
)
def situ_glu(op: Op, x: Tensor) -> Tensor:
    dim, beta, bound = op.attr("dim", -1), op.attr("beta", 1.0), op.attr("linear_beta", 0.0)
    op.require(x.shape[dim] % 2 == 0, f"size {x.shape[dim]} of dimension {dim} is odd")
    left, right = at_least_f32(x).chunk(2, dim)
    gate, up = (left, right) if op.attr("activate_left", True) else (right, left)
    return situ(gate, up, beta, bound).to(x.dtype)


def situ(gate: Tensor, up: Tensor, beta: float, bound: float) -> Tensor:
    """The formula alone, in the dtype of the floats."""
    up = bound * torch.tanh(up / bound) if bound > 0 else up
    return beta * torch.tanh(gate / beta) / (1 + torch.exp(-gate)) * up


@ge_op(
    "SwiGlu",
    provenance="public CPU reference",
    source="ops-nn's golden function: silu of the first half of dim times the second half, in float32, rounded once",
)
def swi_glu(op: Op, x: Tensor) -> Tensor:
    dim = op.attr("dim", -1)
    op.require(x.shape[dim] % 2 == 0, f"size {x.shape[dim]} of dimension {dim} is odd")
    gate, up = at_least_f32(x).chunk(2, dim)
    return (F.silu(gate) * up).to(x.dtype)
