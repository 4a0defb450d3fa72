"""Operators that move elements without changing them."""

import torch
from torch import Tensor

from kimi_graph.compile.executor.node import Op
from kimi_graph.compile.executor.registry import ge_op


@ge_op(
    "Reshape",
    provenance="documented formula",
    source="prototype text: same elements in row-major order, one -1 is worked out",
    host="shape",
    view=True,
)
def reshape(op: Op, x: Tensor, shape: Tensor) -> Tensor:
    op.expect(axis=0, num_axes=-1)
    wanted = op.ints(shape)
    op.require(0 not in wanted or x.numel() == 0, f"shape {wanted} has a zero, which GE reads as 'keep this dimension'")
    return x.reshape(wanted)


@ge_op("Identity", provenance="documented formula", source="prototype text: returns x", view=True)
def identity(op: Op, x: Tensor) -> Tensor:
    return x


@ge_op("TensorMove", provenance="documented formula", source="prototype text: moves x to new memory")
def tensor_move(op: Op, x: Tensor) -> Tensor:
    return x.clone()


@ge_op(
    "Squeeze", provenance="documented formula", source="prototype text: drops the dimensions named in axis", view=True
)
def squeeze(op: Op, x: Tensor) -> Tensor:
    axes = sorted(op.dim(a, x.ndim) for a in op.need("axis", list))
    op.require(all(x.shape[a] == 1 for a in axes), f"axis {axes} of {list(x.shape)} are not all of size 1")
    op.require(bool(axes), "axis is empty, which drops whatever has size 1")
    return x.reshape([s for a, s in enumerate(x.shape) if a not in axes])


@ge_op(
    "Unsqueeze",
    provenance="documented formula",
    source="prototype text: new dimensions at axes of the result",
    view=True,
)
def unsqueeze(op: Op, x: Tensor) -> Tensor:
    axes = op.need("axes", list)
    rank = x.ndim + len(axes)
    at, sizes = {op.dim(a, rank) for a in axes}, iter(x.shape)
    op.require(len(at) == len(axes), f"axes {axes} name a dimension twice")
    return x.reshape([1 if a in at else next(sizes) for a in range(rank)])


@ge_op(
    "ExpandDims",
    provenance="documented formula",
    source="prototype text: a new dimension at axis",
    host="axis",
    view=True,
)
def expand_dims(op: Op, x: Tensor, axis: Tensor) -> Tensor:
    return x.unsqueeze(op.number(axis))


@ge_op("Transpose", provenance="torch semantics", source="only node of torchair's aten.permute", host="perm")
def transpose(op: Op, x: Tensor, perm: Tensor) -> Tensor:
    return x.permute(op.ints(perm))


@ge_op("BroadcastTo", provenance="torch semantics", source="only node of torchair's aten.expand", host="shape")
def broadcast_to(op: Op, x: Tensor, shape: Tensor) -> Tensor:
    wanted = op.ints(shape)
    op.require(min(wanted, default=0) >= 0, f"shape {wanted} has a negative size")
    return x.expand(wanted)


@ge_op("Tile", provenance="torch semantics", source="only node of torchair's aten.repeat", host="multiples")
def tile(op: Op, x: Tensor, multiples: Tensor) -> Tensor:
    times = op.ints(multiples)
    op.require(len(times) == x.ndim, f"{len(times)} multiples for {x.ndim} dimensions")
    return x.repeat(times)


@ge_op("Pack", provenance="torch semantics", source="only node of torchair's aten.stack")
def pack(op: Op, x: list[Tensor]) -> Tensor:
    op.must(N=len(x))
    op.same_dtype(*x)
    return torch.stack(x, op.attr("axis", 0))


@ge_op("Unpack", provenance="torch semantics", source="only node of torchair's aten.unbind", outputs="y[]")
def unpack(op: Op, x: Tensor) -> tuple[Tensor, ...]:
    axis = op.attr("axis", 0)
    op.must(num=x.shape[axis])
    return x.unbind(axis)


@ge_op("ConcatV2", provenance="torch semantics", source="only node of torchair's aten.cat", host="concat_dim")
def concat_v2(op: Op, x: list[Tensor], concat_dim: Tensor) -> Tensor:
    op.must(N=len(x))
    op.same_dtype(*x)
    return torch.cat(x, op.number(concat_dim))


@ge_op(
    "ConcatD",
    "ConcatV2D",
    provenance="documented formula",
    source="prototype text: ConcatV2 with the axis as attribute",
)
def concat_d(op: Op, x: list[Tensor]) -> Tensor:
    op.must(N=len(x))
    op.same_dtype(*x)
    return torch.cat(x, op.need("concat_dim", int))


@ge_op(
    "SplitV",
    provenance="torch semantics",
    source="only node of torchair's aten.split_with_sizes; one size may be -1",
    outputs="y[]",
    host="size_splits split_dim",
)
def split_v(op: Op, x: Tensor, size_splits: Tensor, split_dim: Tensor) -> tuple[Tensor, ...]:
    sizes, dim = op.ints(size_splits), op.number(split_dim)
    op.must(num_split=len(sizes))
    rest = x.shape[dim] - sum(s for s in sizes if s >= 0)
    return x.split([rest if s == -1 else s for s in sizes], dim)


@ge_op(
    "SplitD",
    provenance="documented formula",
    source="prototype text: num_split equal parts along split_dim",
    outputs="y[]",
)
def split_d(op: Op, x: Tensor) -> tuple[Tensor, ...]:
    dim, parts = op.need("split_dim", int), op.need("num_split", int)
    op.require(x.shape[dim] % parts == 0, f"size {x.shape[dim]} does not split into {parts} equal parts")
    return x.split(x.shape[dim] // parts, dim)


@ge_op(
    "Slice",
    provenance="documented formula",
    source="prototype text: size elements from offsets, -1 is the rest",
    host="offsets size",
)
def slice_(op: Op, x: Tensor, offsets: Tensor, size: Tensor) -> Tensor:
    starts, sizes = op.ints(offsets), op.ints(size)
    op.require(len(starts) == len(sizes) == x.ndim, f"offsets and size of {x.ndim} numbers expected")
    for dim, (start, count) in enumerate(zip(starts, sizes, strict=True)):
        x = x.narrow(dim, start, x.shape[dim] - start if count == -1 else count)
    return x


_NO_MASKS = {f"{m}_mask": 0 for m in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}


@ge_op(
    "StridedSliceV2",
    provenance="documented formula",
    source="prototype text: as ONNX Slice; numbers past the end are clamped, negative ones count from the end",
    host="begin end axes strides",
)
def strided_slice_v2(
    op: Op, x: Tensor, begin: Tensor, end: Tensor, axes: Tensor | None, strides: Tensor | None
) -> Tensor:
    op.expect(**_NO_MASKS)
    starts, stops = op.ints(begin), op.ints(end)
    dims = list(range(len(starts))) if axes is None else op.ints(axes)
    steps = [1] * len(starts) if strides is None else op.ints(strides)
    op.require(
        len(starts) == len(stops) == len(dims) == len(steps), "begin, end, axes and strides of one length expected"
    )
    return _slice(op, x, dims, starts, stops, steps)


@ge_op(
    "StridedSlice",
    provenance="documented formula",
    source="prototype text: as TensorFlow's; a bit of begin_mask or end_mask takes the whole side",
    host="begin end strides",
)
def strided_slice(op: Op, x: Tensor, begin: Tensor, end: Tensor, strides: Tensor) -> Tensor:
    op.expect(ellipsis_mask=0, new_axis_mask=0, shrink_axis_mask=0)
    starts, stops, steps = op.ints(begin), op.ints(end), op.ints(strides)
    first, last = op.attr("begin_mask", 0), op.attr("end_mask", 0)
    starts = [0 if first >> i & 1 else s for i, s in enumerate(starts)]
    stops = [x.shape[i] if last >> i & 1 else s for i, s in enumerate(stops)]
    return _slice(op, x, list(range(len(starts))), starts, stops, steps)


def _slice(op: Op, x: Tensor, dims: list[int], starts: list[int], stops: list[int], steps: list[int]) -> Tensor:
    op.require(all(s > 0 for s in steps), f"positive strides are supported, found {steps}")
    index = [slice(None)] * x.ndim
    for dim, start, stop, step in zip(dims, starts, stops, steps, strict=True):
        index[dim] = slice(start, stop, step)
    return x[tuple(index)]


@ge_op(
    "PadV3",
    provenance="documented formula",
    source="prototype text: paddings are (before, after) of each dimension in turn when paddings_contiguous",
    host="paddings",
)
def pad_v3(op: Op, x: Tensor, paddings: Tensor, constant_values: Tensor | None) -> Tensor:
    op.expect(mode="constant", paddings_contiguous=True)
    sides = op.ints(paddings)
    op.require(len(sides) == 2 * x.ndim, f"{2 * x.ndim} paddings expected, found {len(sides)}")
    op.require(min(sides, default=0) >= 0, f"negative paddings {sides}")
    before, after = sides[::2], sides[1::2]
    value = x.new_zeros(()) if constant_values is None else constant_values.reshape(())
    op.same_dtype(x, value)
    out = value.expand([b + s + a for b, s, a in zip(before, x.shape, after, strict=True)]).clone()
    out[tuple(slice(b, b + s) for b, s in zip(before, x.shape, strict=True))] = x
    return out


@ge_op("Tril", provenance="torch semantics", source="only node of torchair's aten.tril")
def tril(op: Op, x: Tensor) -> Tensor:
    return x.tril(op.attr("diagonal", 0))


@ge_op("Triu", provenance="torch semantics", source="only node of torchair's aten.triu")
def triu(op: Op, x: Tensor) -> Tensor:
    return x.triu(op.attr("diagonal", 0))


@ge_op("ReverseV2", provenance="torch semantics", source="only node of torchair's aten.flip", host="axis")
def reverse_v2(op: Op, x: Tensor, axis: Tensor) -> Tensor:
    return x.flip(op.ints(axis))
