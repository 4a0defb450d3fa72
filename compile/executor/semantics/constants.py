"""Constants, fills and ranges."""

import torch
from torch import Tensor

from kimi_graph.compile.executor.node import Op
from kimi_graph.compile.executor.registry import ge_op
from kimi_graph.compile.ge_proto import TensorDef, tensor_value


@ge_op("Const", "Constant", provenance="documented formula", source="attribute value holds dtype, shape and bytes")
def const(op: Op) -> Tensor:
    value = tensor_value(op.need("value", TensorDef))
    return value.to(op.dtype_of(value))


@ge_op(
    "Fill",
    provenance="documented formula",
    source="prototype text: a tensor of shape dims filled with value",
    host="dims",
)
def fill(op: Op, dims: Tensor, value: Tensor) -> Tensor:
    op.require(value.numel() == 1, f"value of one element expected, found {list(value.shape)}")
    return value.reshape(()).expand(op.ints(dims)).clone()


@ge_op(
    "Range",
    provenance="documented formula",
    source="prototype text: start, start + delta, ... below limit; dtype of start (torchair mixes int32 and int64)",
    host="start limit delta",
)
def range_(op: Op, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    first, last, step = op.number(start), op.number(limit), op.number(delta)
    return torch.arange(first, last, step, dtype=start.dtype)


@ge_op("ZerosLike", provenance="torch semantics", source="only node of torchair's aten.zeros_like")
def zeros_like(op: Op, x: Tensor) -> Tensor:
    return torch.zeros_like(x)


@ge_op("OnesLike", provenance="torch semantics", source="only node of torchair's aten.ones_like")
def ones_like(op: Op, x: Tensor) -> Tensor:
    return torch.ones_like(x)


@ge_op("Shape", provenance="documented formula", source="prototype text: the shape of x as a tensor of dtype")
def shape(op: Op, x: Tensor) -> Tensor:
    return torch.tensor(list(x.shape), dtype=op.dtype("dtype", 3))
