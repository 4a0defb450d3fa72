"""Gather, scatter, and writes into a variable."""

import torch
from torch import Tensor

from kimi_graph.compile.executor.node import Op
from kimi_graph.compile.executor.registry import ge_op

_INDEX = (torch.int32, torch.int64)


@ge_op(
    "GatherV2",
    provenance="torch semantics",
    source="only node of torchair's aten.embedding, aten.index_select and aten.select (which may count from the end)",
    host="axis",
)
def gather_v2(op: Op, x: Tensor, indices: Tensor, axis: Tensor) -> Tensor:
    op.expect(batch_dims=0, is_preprocessed=False)
    return _gather(op, x, indices, op.number(axis))


@ge_op("Gather", provenance="documented formula", source="prototype text: GatherV2 along the first dimension")
def gather(op: Op, x: Tensor, indices: Tensor) -> Tensor:
    op.expect(batch_dims=0, is_preprocessed=False, validate_indices=True)
    return _gather(op, x, indices, 0)


def _gather(op: Op, x: Tensor, indices: Tensor, axis: int) -> Tensor:
    op.of_dtype(*_INDEX, indices=indices)
    axis = op.dim(axis, x.ndim)
    flat = indices.reshape(-1).long()
    if op.attr("negative_index_support", False):
        flat = torch.where(flat < 0, flat + x.shape[axis], flat)
    rows = x.index_select(axis, flat)
    return rows.reshape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])


@ge_op("GatherElements", provenance="torch semantics", source="only node of torchair's aten.gather")
def gather_elements(op: Op, x: Tensor, index: Tensor) -> Tensor:
    op.of_dtype(*_INDEX, index=index)
    return torch.gather(x, op.attr("dim", 0), index.long())


@ge_op("GatherNd", provenance="documented formula", source="prototype text: x[indices[..., 0], indices[..., 1], ...]")
def gather_nd(op: Op, x: Tensor, indices: Tensor) -> Tensor:
    op.of_dtype(*_INDEX, indices=indices)
    op.expect(negative_index_support=False)
    return x[indices.long().unbind(-1)]


@ge_op("IndexByTensor", provenance="torch semantics", source="only node of torchair's aten.index.Tensor")
def index_by_tensor(op: Op, x: Tensor, indices: list[Tensor]) -> Tensor:
    mask = op.need("indices_mask", list)
    op.require(
        sum(mask) == len(indices), f"indices_mask {mask} names {sum(mask)} dimensions, {len(indices)} indices given"
    )
    op.of_dtype(torch.int64, **{f"indices{i}": t for i, t in enumerate(indices)})
    rest = iter(indices)
    return x[tuple(next(rest) if on else slice(None) for on in mask)]


@ge_op(
    "ScatterElements", provenance="torch semantics", source="only node of torchair's aten.scatter and aten.scatter_add"
)
def scatter_elements(op: Op, data: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    op.of_dtype(*_INDEX, indices=indices)
    op.same_dtype(data, updates)
    axis, reduction = op.attr("axis", 0), op.attr("reduction", "none")
    op.require(reduction in ("none", "add"), f"reduction {reduction!r}, supported is 'none' or 'add'")
    scatter = torch.scatter if reduction == "none" else torch.scatter_add
    return scatter(data, axis, indices.long(), updates)


@ge_op(
    "Assign", provenance="documented formula", source="prototype text: ref takes value", outputs="ref", in_place="ref"
)
def assign(op: Op, ref: Tensor, value: Tensor) -> Tensor:
    op.expect(validate_shape=True, use_locking=False)
    op.same_dtype(ref, value)
    op.require(ref.shape == value.shape, f"value {list(value.shape)} for a variable of {list(ref.shape)}")
    return ref.copy_(value)


@ge_op(
    "ScatterNdUpdate",
    provenance="documented formula",
    source="prototype text: var[indices[..., 0], indices[..., 1], ...] = updates",
    outputs="var",
    in_place="var",
)
def scatter_nd_update(op: Op, var: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    op.expect(use_locking=False)
    op.of_dtype(*_INDEX, indices=indices)
    op.same_dtype(var, updates)
    wanted = (*indices.shape[:-1], *var.shape[indices.shape[-1] :])
    op.require(updates.shape == wanted, f"updates of {list(wanted)} expected, found {list(updates.shape)}")
    if indices.shape[-1] == 1 and indices.ndim == 2 and not var.is_meta:
        # The last of several updates of one row (padding) stays, whatever the number of threads; so ranks agree.
        rows, new = (
            x.view(torch.uint8) if x.dtype.itemsize == 1 and x.is_floating_point() else x for x in (var, updates)
        )
        rows.index_copy_(0, indices[:, 0].long(), new)
    else:
        var[indices.long().unbind(-1)] = updates
    return var
