"""Collectives of HCCL: what each rank of a group gets of what all of them give."""

import torch
from torch import Tensor

from kimi_graph.compile.executor.node import Op
from kimi_graph.compile.executor.registry import ge_op
from kimi_graph.ops import at_least_f32

REDUCTIONS = {"sum": lambda parts: parts.sum(0), "max": lambda parts: parts.amax(0)}
_SOURCE = "HCCL's documentation of the collective; half floats summed in float32 and rounded once"


def _of_a_group(op: Op) -> None:
    op.need("group", str)
    op.expect(fusion_id=-1)


def _known_reduction(op: Op) -> None:
    kind = op.need("reduction", str)
    op.require(kind in REDUCTIONS, f"reduction {kind!r}, supported is {' or '.join(REDUCTIONS)}")


def _reduce(op: Op, parts: list[Tensor]) -> Tensor:
    wide = torch.stack([at_least_f32(x) if x.is_floating_point() else x for x in parts])
    return REDUCTIONS[op.need("reduction", str)](wide).to(parts[0].dtype)


def _ranks(op: Op, parts: list[Tensor]) -> int:
    size = op.need("rank_size", int)
    op.require(size == len(parts), f"rank_size {size} in a group of {len(parts)}")
    return size


def _all_reduce(op: Op, parts: list[Tensor]) -> list[Tensor]:
    return [_reduce(op, parts)] * len(parts)


def _all_gather(op: Op, parts: list[Tensor]) -> list[Tensor]:
    return [torch.cat(parts)] * _ranks(op, parts)


def _reduce_scatter(op: Op, parts: list[Tensor]) -> list[Tensor]:
    return list(_reduce(op, parts).chunk(_ranks(op, parts)))


def _all_to_all(op: Op, parts: list[Tensor]) -> list[Tensor]:
    sent = [x.chunk(len(parts)) for x in parts]
    return [torch.cat([chunks[rank] for chunks in sent]) for rank in range(len(parts))]


@ge_op("HcomAllReduce", provenance="documented formula", source=_SOURCE, together=_all_reduce)
def hcom_all_reduce(op: Op, x: Tensor) -> Tensor:
    _of_a_group(op)
    op.expect(fusion=(1, 0))
    _known_reduction(op)
    return torch.empty_like(x)


@ge_op("HcomAllGather", provenance="documented formula", source=_SOURCE, together=_all_gather)
def hcom_all_gather(op: Op, x: Tensor) -> Tensor:
    """Along dimension 0."""
    _of_a_group(op)
    op.expect(fusion=0)
    return x.new_empty(op.need("rank_size", int) * x.shape[0], *x.shape[1:])


@ge_op("HcomReduceScatter", provenance="documented formula", source=_SOURCE, together=_reduce_scatter)
def hcom_reduce_scatter(op: Op, x: Tensor) -> Tensor:
    """Along dimension 0."""
    _of_a_group(op)
    op.expect(fusion=0)
    _known_reduction(op)
    ranks = op.need("rank_size", int)
    op.require(x.shape[0] % ranks == 0, f"{x.shape[0]} rows for {ranks} ranks")
    return x.new_empty(x.shape[0] // ranks, *x.shape[1:])


@ge_op("HcomAllToAll", provenance="documented formula", source=_SOURCE, together=_all_to_all)
def hcom_all_to_all(op: Op, x: Tensor) -> Tensor:
    """Equal parts of dimension 0."""
    _of_a_group(op)
    return torch.empty_like(x)
