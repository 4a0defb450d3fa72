"""Norms and the SwiGLU activation."""

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
    "SwiGlu",
    provenance="public CPU reference",
    source="ops-nn's golden function: silu of the first half of dim times the second half, in float32, rounded once",
)
def swi_glu(op: Op, x: Tensor) -> Tensor:
    dim = op.attr("dim", -1)
    op.require(x.shape[dim] % 2 == 0, f"size {x.shape[dim]} of dimension {dim} is odd")
    gate, up = at_least_f32(x).chunk(2, dim)
    return (F.silu(gate) * up).to(x.dtype)
