"""Reductions, sums along an axis, sorting. Half floats are summed in float32 and rounded once."""

from collections.abc import Callable

import torch
from torch import Tensor

from kimi_graph.compile.executor.node import Op
from kimi_graph.compile.executor.registry import ge_op
from kimi_graph.compile.ge_proto import Dtype

from .elementwise import wide


def _axes(op: Op, x: Tensor, axes: Tensor) -> list[int]:
    found = sorted({op.dim(a, x.ndim) for a in op.ints(axes)})
    op.require(bool(found), "axes is empty, which operators read differently")
    return found


def _reduce(type_: str, f: Callable[[Tensor, list[int], bool], Tensor], aten: str, **expected: object) -> None:
    @ge_op(type_, provenance="torch semantics", source=f"last node of torchair's aten.{aten}", host="axes")
    def run(op: Op, x: Tensor, axes: Tensor) -> Tensor:
        op.expect(**expected)
        return f(wide(x), _axes(op, x, axes), op.attr("keep_dims", False)).to(x.dtype)


_reduce("ReduceSum", lambda x, axes, keep: x.sum(axes, keep), "sum.dim_IntList")
_reduce("ReduceMean", lambda x, axes, keep: x.mean(axes, keep), "mean.dim", noop_with_empty_axes=(True, False))
_reduce("ReduceMax", lambda x, axes, keep: x.amax(axes, keep), "max")
_reduce("ReduceMin", lambda x, axes, keep: x.amin(axes, keep), "min")
_reduce("ReduceAny", lambda x, axes, keep: x.any(axes, keep), "any.dim")
_reduce("ReduceAll", lambda x, axes, keep: x.all(axes, keep), "all.dim")


@ge_op(
    "Cumsum",
    provenance="documented formula",
    source="prototype text: as TensorFlow's, exclusive and reverse",
    host="axis",
)
def cumsum(op: Op, x: Tensor, axis: Tensor) -> Tensor:
    dim, exclusive, reverse = op.number(axis), op.attr("exclusive", False), op.attr("reverse", False)
    values = wide(x).flip(dim) if reverse else wide(x)
    sums = values.cumsum(dim, dtype=values.dtype)
    sums = sums - values if exclusive else sums
    return (sums.flip(dim) if reverse else sums).to(x.dtype)


@ge_op("SoftmaxV2", provenance="torch semantics", source="only node of torchair's aten._softmax")
def softmax_v2(op: Op, x: Tensor) -> Tensor:
    op.expect(half_to_float=False)
    return wide(x).softmax(_one_axis(op)).to(x.dtype)


@ge_op(
    "LogSoftmaxV2",
    provenance="torch semantics",
    source="only node of torchair's aten._log_softmax",
    outputs="logsoftmax",
)
def log_softmax_v2(op: Op, logits: Tensor) -> Tensor:
    return wide(logits).log_softmax(_one_axis(op)).to(logits.dtype)


def _one_axis(op: Op) -> int:
    axes = op.attr("axes", [-1])
    op.require(len(axes) == 1, f"one axis is supported, found {axes}")
    return axes[0]


@ge_op(
    "TopKV2",
    provenance="torch semantics",
    source="first node of torchair's aten.topk; equal values go to the lower index (own reading)",
    outputs="values indices",
    host="k",
)
def top_k_v2(op: Op, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    op.expect(sorted=True, sort_policy=1, indices_dtype=(Dtype.INT32, 3))
    dim, largest = op.attr("dim", -1), op.attr("largest", True)
    order = torch.sort(x, dim=dim, descending=largest, stable=True).indices.narrow(dim, 0, op.number(k))
    chosen = op.select(order.int())
    return torch.gather(x, dim, chosen.long()), chosen


@ge_op(
    "Sort",
    provenance="torch semantics",
    source="first node of torchair's aten.sort; equal values stay in order (own reading where not stable)",
    outputs="y1 y2",
)
def sort(op: Op, x: Tensor) -> tuple[Tensor, Tensor]:
    op.expect(stable=(False, True))
    axis = op.attr("axis", -1)
    order = torch.sort(x, dim=axis, descending=op.attr("descending", False), stable=True).indices.int()
    if x.is_floating_point():  # who is sorted by a score is chosen by it
        order = op.select(order)
    return torch.gather(x, axis, order.long()), order


@ge_op(
    "ArgMaxV2",
    provenance="torch semantics",
    source="only node of torchair's aten.argmax; first of equal values",
    host="dimension",
)
def arg_max_v2(op: Op, x: Tensor, dimension: Tensor) -> Tensor:
    return x.argmax(op.number(dimension)).to(op.dtype("dtype", 9))


@ge_op(
    "ArgMaxWithValue",
    provenance="torch semantics",
    source="first node of torchair's aten.max.dim",
    outputs="indice values",
)
def arg_max_with_value(op: Op, x: Tensor) -> tuple[Tensor, Tensor]:
    values, index = x.max(op.need("dimension", int), keepdim=op.attr("keep_dims", False))
    return index.int(), values
