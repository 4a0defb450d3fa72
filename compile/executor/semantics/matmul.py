"""Matrix products: accumulated in float32 (as the Cube unit does), rounded once to the inputs' dtype."""

from torch import Tensor

from kimi_graph.compile.executor.node import Op
from kimi_graph.compile.executor.registry import ge_op
from kimi_graph.ops import at_least_f32


@ge_op(
    "MatMul", provenance="torch semantics", source="only node of torchair's aten.mm; transpose flags by prototype text"
)
def mat_mul(op: Op, x1: Tensor, x2: Tensor, bias: Tensor | None) -> Tensor:
    return _mat_mul(op, x1, x2, bias)


@ge_op(
    "MatMulV2",
    "MatMulV3",
    provenance="torch semantics",
    source="only node of torchair's aten.addmm; transpose flags by prototype text",
    prototype="x1 x2 bias? offset_w?",
)
def mat_mul_v2(op: Op, x1: Tensor, x2: Tensor, bias: Tensor | None) -> Tensor:
    op.expect(offset_x=0)
    return _mat_mul(op, x1, x2, bias)


def _mat_mul(op: Op, x1: Tensor, x2: Tensor, bias: Tensor | None) -> Tensor:
    op.same_dtype(x1, x2)
    op.require(x1.ndim == x2.ndim == 2, f"two matrices expected, found {x1.ndim} and {x2.ndim} dimensions")
    a = x1.t() if op.attr("transpose_x1", False) else x1
    b = x2.t() if op.attr("transpose_x2", False) else x2
    product = at_least_f32(a) @ at_least_f32(b)
    return (product if bias is None else product + bias).to(x1.dtype)


@ge_op(
    "BatchMatMul",
    provenance="torch semantics",
    source="only node of torchair's aten.bmm; adj flags by prototype text",
)
def batch_mat_mul(op: Op, x1: Tensor, x2: Tensor) -> Tensor:
    return _batch_mat_mul(op, x1, x2)


@ge_op(
    "BatchMatMulV2",
    "BatchMatMulV3",
    provenance="documented formula",
    source="prototype text: BatchMatMul with optional bias",
    prototype="x1 x2 bias? offset_w?",
)
def batch_mat_mul_v2(op: Op, x1: Tensor, x2: Tensor) -> Tensor:
    op.expect(offset_x=0)
    return _batch_mat_mul(op, x1, x2)


def _batch_mat_mul(op: Op, x1: Tensor, x2: Tensor) -> Tensor:
    op.same_dtype(x1, x2)
    op.require(min(x1.ndim, x2.ndim) >= 3, f"batches of matrices expected, found {x1.ndim} and {x2.ndim} dimensions")
    a = x1.mT if op.attr("adj_x1", False) else x1
    b = x2.mT if op.attr("adj_x2", False) else x2
    return (at_least_f32(a) @ at_least_f32(b)).to(x1.dtype)
