"""Collectives as graph nodes, and the two nodes that are different on every rank.

A group is named by the mesh axes it goes along (`"tensor"`, `"data,tensor"`, the first outermost), never by ranks: one
graph serves all of them, and none of this needs torch.distributed. They are operators of our own (`kimi::all_reduce`)
and not torch's `_c10d_functional`, because torchair's converters for those look a process group up and write its ranks
into the graph, because torch's meta kernel of all_reduce promises strides that the real one does not keep, and because
a wait node per collective says nothing where dataflow alone orders the graph.

Each has a fake (shapes), an exact meaning on the tensors of a whole group (`together`, what a simulation of all ranks
runs), and a lowering. A single device cannot run one, unless its process is one of a group (`processes`).
"""

import contextvars
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from kimi_graph.errors import ShardingError

from . import experts
from .mesh import Axes, Mesh

Parts = list[Any]  # of each rank of a group, in its order: its tensor, or a tuple of them

_LIBRARY = torch.library.Library("kimi", "FRAGMENT")


@dataclass(frozen=True)
class Collective:
    """A node that needs more than one rank.

    Attributes:
        op: the node's target; its second argument is the group, or its first where it takes no tensor.
        together: the tensors of a group (of several to a rank, tuples; for `own_index`: only the number of ranks) and
            the rest of the node's arguments give each rank's result, or results.
        lower: as an operator's.
        moves: whether ranks wait for each other.
    """

    name: str
    op: Any
    together: Callable[..., Parts]
    lower: Callable[..., Any]
    moves: bool = True


COLLECTIVES: dict[Any, Collective] = {}
running: contextvars.ContextVar[Any] = contextvars.ContextVar("running", default=None)  # `processes.Member`, or None


def group_name(axes: Sequence[str]) -> str:
    """How a group along some mesh axes is called in a graph."""
    return ",".join(axes)


def group_axes(name: str) -> Axes:
    """The mesh axes of a group's name; before a colon stands what it is for alone."""
    return tuple(name.rpartition(":")[2].split(","))


def _define(
    schema: str, fake: Callable[..., Any], together: Callable[..., Parts], lower: Any, moves: bool = True
) -> Any:
    name, takes_tensors = schema.partition("(")[0], "Tensor" in schema.partition("->")[0]
    _LIBRARY.define(schema)
    op = getattr(torch.ops.kimi, name).default
    collective = COLLECTIVES[op] = Collective(name, op, together, lower, moves)

    def real(*args: Any) -> Any:
        if running.get() is not None:
            return running.get().take_part(collective, *args)
        if takes_tensors:
            raise ShardingError(f"{name} is the work of several ranks; run the graph with parallel.simulate.")
        return fake(*args)  # asked while a graph is traced

    _LIBRARY.impl(name, real, "CompositeExplicitAutograd")
    if takes_tensors:
        _LIBRARY.impl(name, fake, "Meta")
    return op


def _resized(x: Tensor, dim: int, up: int = 1, down: int = 1) -> Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] * up // down
    return x.new_empty(shape)


# ---- meaning: of the tensors of a group, in its order ----------------------------------------------------------------

REDUCTIONS: dict[str, Callable[[Parts], Tensor]] = {
    "sum": lambda parts: torch.stack(parts).sum(0),
    "max": lambda parts: torch.stack(parts).amax(0),
}


def _all_reduce_together(parts: Parts, op: str) -> Parts:
    return [REDUCTIONS[op](parts)] * len(parts)


def _all_gather_together(parts: Parts, ways: int, dim: int) -> Parts:
    return [torch.cat(parts, dim)] * len(parts)


def _reduce_scatter_together(parts: Parts, ways: int, dim: int) -> Parts:
    return [x.contiguous() for x in REDUCTIONS["sum"](parts).chunk(ways, dim)]


def _all_to_all_together(parts: Parts, ways: int, split_dim: int, cat_dim: int) -> Parts:
    sent = [x.chunk(ways, split_dim) for x in parts]
    return [torch.cat([chunks[rank] for chunks in sent], cat_dim) for rank in range(ways)]


def _own_slice_together(parts: Parts, ways: int, dim: int) -> Parts:
    return [x.chunk(ways, dim)[rank].contiguous() for rank, x in enumerate(parts)]


def _own_index_together(ranks: int, times: int, dtype: torch.dtype) -> Parts:
    return [torch.tensor([rank * times], dtype=dtype) for rank in range(ranks)]


# ---- lowering --------------------------------------------------------------------------------------------------------
#
# HCCL works along dimension 0; another one is brought there and back.


def _split_first(ge: Any, x: Any, ways: int, dim: int) -> Any:
    """`[.., ways * n, ..]` as `[ways, .., n, ..]`."""
    shape = list(ge.shape(x))
    parts = [*shape[:dim], ways, shape[dim] // ways, *shape[dim + 1 :]]
    return _to_front(ge, ge.reshape(x, parts), dim)


def _join(ge: Any, x: Any, dim: int) -> Any:
    """`[ways, .., n, ..]` as `[.., ways * n, ..]`."""
    ways, *shape = ge.shape(x)
    if math.prod(shape[:dim]) > 1:
        order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)]
        x = ge.mark(ge.Transpose(x, ge.const(order, torch.int64)), [*shape[:dim], ways, *shape[dim:]], ge.dtype(x))
    return ge.reshape(x, [*shape[:dim], ways * shape[dim], *shape[dim + 1 :]])


def _to_front(ge: Any, x: Any, dim: int) -> Any:
    shape = list(ge.shape(x))
    front = [shape[dim], *shape[:dim], *shape[dim + 1 :]]
    if math.prod(shape[:dim]) == 1:
        return ge.reshape(x, front)
    order = [dim, *range(dim), *range(dim + 1, len(shape))]
    return ge.mark(ge.Transpose(x, ge.const(order, torch.int64)), front, ge.dtype(x))


def _lower_all_reduce(ge: Any, x: Any, axes: str, op: str) -> Any:
    # fusion 0: GE would else put reductions of one graph together, in an order of its own
    return ge.HcomAllReduce(x, reduction=op, group=axes, fusion=0)


def _lower_all_gather(ge: Any, x: Any, axes: str, ways: int, dim: int) -> Any:
    shape = ge.shape(x)
    flat = ge.reshape(x, [1, *shape])
    made = ge.mark(ge.HcomAllGather(flat, rank_size=ways, group=axes, fusion=0), [ways, *shape], ge.dtype(x))
    return _join(ge, made, dim)


def _lower_reduce_scatter(ge: Any, x: Any, axes: str, ways: int, dim: int) -> Any:
    parts = _split_first(ge, x, ways, dim)
    shape = ge.shape(parts)[1:]
    made = ge.HcomReduceScatter(parts, reduction="sum", group=axes, rank_size=ways, fusion=0)
    return ge.reshape(ge.mark(made, [1, *shape], ge.dtype(x)), shape)


def _lower_all_to_all(ge: Any, x: Any, axes: str, ways: int, split_dim: int, cat_dim: int) -> Any:
    parts = _split_first(ge, x, ways, split_dim)
    ge.chose("equal parts to every rank", "HcomAllToAll", "HcomAllToAllV takes counts and displacements beside them")
    made = ge.mark(ge.HcomAllToAll(parts, group=axes), ge.shape(parts), ge.dtype(x))
    return _join(ge, made, cat_dim)


def _lower_own_index(ge: Any, axes: str, times: int, dtype: torch.dtype) -> Any:
    return ge.own_index(axes, times, dtype)


def _lower_own_slice(ge: Any, x: Any, axes: str, ways: int, dim: int) -> Any:
    shape = list(ge.shape(x))
    parts = ge.reshape(x, [*shape[:dim], ways, shape[dim] // ways, *shape[dim + 1 :]])
    # a Gather of one part has a static shape whatever the index; a Slice of a start that is no constant has not
    index, axis = ge.own_index(axes, 1, torch.int64), ge.const([dim], torch.int64)
    own = ge.GatherV2(parts, index, axis, negative_index_support=False)
    one = [*shape[:dim], 1, shape[dim] // ways, *shape[dim + 1 :]]
    return ge.reshape(ge.mark(own, one, ge.dtype(x)), ge.result.shape)


# ---- the nodes -------------------------------------------------------------------------------------------------------

_ALL_REDUCE = _define(
    "all_reduce(Tensor x, str axes, str op) -> Tensor",
    lambda x, axes, op: x.new_empty(x.shape),
    _all_reduce_together,
    _lower_all_reduce,
)
_ALL_GATHER = _define(
    "all_gather(Tensor x, str axes, int ways, int dim) -> Tensor",
    lambda x, axes, ways, dim: _resized(x, dim, up=ways),
    _all_gather_together,
    _lower_all_gather,
)
_REDUCE_SCATTER = _define(
    "reduce_scatter(Tensor x, str axes, int ways, int dim) -> Tensor",
    lambda x, axes, ways, dim: _resized(x, dim, down=ways),
    _reduce_scatter_together,
    _lower_reduce_scatter,
)
_ALL_TO_ALL = _define(
    "all_to_all(Tensor x, str axes, int ways, int split_dim, int cat_dim) -> Tensor",
    lambda x, axes, ways, split_dim, cat_dim: _resized(_resized(x, split_dim, down=ways), cat_dim, up=ways),
    _all_to_all_together,
    _lower_all_to_all,
)
_OWN_SLICE = _define(
    "own_slice(Tensor x, str axes, int ways, int dim) -> Tensor",
    lambda x, axes, ways, dim: _resized(x, dim, down=ways),
    _own_slice_together,
    _lower_own_slice,
    moves=False,
)
_OWN_INDEX = _define(
    "own_index(str axes, int times, ScalarType dtype) -> Tensor",
    lambda axes, times, dtype: torch.empty(1, dtype=dtype, device="meta"),
    _own_index_together,
    _lower_own_index,
    moves=False,
)
_EXPERT_DISPATCH = _define(
    "expert_dispatch(Tensor x, str axes, Tensor chosen, int ways, int experts) -> (Tensor, Tensor, Tensor, Tensor)",
    experts.dispatch_fake,
    experts.dispatch_together,
    experts.lower_dispatch,
)
_EXPERT_COMBINE = _define(
    "expert_combine(Tensor y, str axes, Tensor chosen, Tensor weights, Tensor assist, Tensor counts, int ways, "
    "int experts) -> Tensor",
    experts.combine_fake,
    experts.combine_together,
    experts.lower_combine,
)
OPS = {c.name: c.op for c in COLLECTIVES.values()}


def all_reduce(x: Tensor, axes: Axes, op: str = "sum") -> Tensor:
    """The sum (or `op="max"`) of every rank's `x`, on each of them."""
    return _ALL_REDUCE(x, group_name(axes), op)


def all_gather(mesh: Mesh, x: Tensor, axes: Axes, dim: int) -> Tensor:
    """Every rank's `x` one after another along `dim`, on each of them."""
    return _ALL_GATHER(x, group_name(axes), mesh.size(axes), dim % x.ndim)


def reduce_scatter(mesh: Mesh, x: Tensor, axes: Axes, dim: int) -> Tensor:
    """This rank's part along `dim` of the sum of every rank's `x`.

    Raises:
        ShardingError: the dimension does not divide over the ranks.
    """
    dim = _divisible(mesh, "reduce_scatter", x, axes, dim)
    return _REDUCE_SCATTER(x, group_name(axes), mesh.size(axes), dim)


def all_to_all(mesh: Mesh, x: Tensor, axes: Axes, split_dim: int, cat_dim: int) -> Tensor:
    """Part r of `x` along `split_dim` goes to rank r; what comes from all is joined along `cat_dim`.

    Raises:
        ShardingError: `split_dim` does not divide over the ranks.
    """
    split_dim = _divisible(mesh, "all_to_all", x, axes, split_dim)
    return _ALL_TO_ALL(x, group_name(axes), mesh.size(axes), split_dim, cat_dim % x.ndim)


def own_slice(mesh: Mesh, x: Tensor, axes: Axes, dim: int) -> Tensor:
    """This rank's part of `x` along `dim`.

    Raises:
        ShardingError: the dimension does not divide over the ranks.
    """
    dim = _divisible(mesh, "own_slice", x, axes, dim)
    return _OWN_SLICE(x, group_name(axes), mesh.size(axes), dim)


def own_index(axes: Axes, times: int = 1, dtype: torch.dtype = torch.int64) -> Tensor:
    """Where this rank stands along `axes`, times a number: `[1]`. The same node on every rank, bound to each later."""
    return _OWN_INDEX(group_name(axes), times, dtype)


def expert_dispatch(mesh: Mesh, x: Tensor, chosen: Tensor, axes: Axes, experts: int) -> tuple[Tensor, ...]:
    """Rows to the ranks that have their experts, see `annotate.expert_dispatch`."""
    return _EXPERT_DISPATCH(x, group_name(axes), chosen, mesh.size(axes), experts)


def expert_combine(
    mesh: Mesh, y: Tensor, chosen: Tensor, weights: Tensor, notes: tuple[Tensor, Tensor], axes: Axes, experts: int
) -> Tensor:
    """Rows back, and their weighted sums, see `annotate.expert_combine`."""
    return _EXPERT_COMBINE(y, group_name(axes), chosen, weights, *notes, mesh.size(axes), experts)


def _divisible(mesh: Mesh, name: str, x: Tensor, axes: Axes, dim: int) -> int:
    """`dim` counted from the front; refused where `x` cannot be cut along it."""
    ways, dim = mesh.size(axes), dim % x.ndim
    if x.shape[dim] % ways:
        where = f"dimension {dim} of {list(x.shape)} on each device"
        raise ShardingError(f"{name}: {where} is not divisible by {' x '.join(axes)} = {ways}.")
    return dim


# ---- what a graph issues ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Issued:
    """One collective of a graph.

    Attributes:
        name: "all_reduce" ...
        axes: mesh axes of its group.
        shape, dtype: of what one rank gives; of rows of experts, one for each that they have chosen.
        arguments: the rest, by name.
        source: file and line of the layer that needs it.
    """

    name: str
    axes: Axes
    shape: tuple[int, ...]
    dtype: torch.dtype
    arguments: tuple[tuple[str, Any], ...] = ()
    source: str = ""

    @property
    def bytes(self) -> int:
        """Of what one rank gives."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {group_name(self.axes)} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


def issued(graph: fx.Graph) -> list[Issued]:
    """The collectives of a captured graph in its order; what differs by rank but moves nothing is not among them."""
    found = []
    for node in graph.nodes:
        collective = COLLECTIVES.get(node.target) if node.op == "call_function" else None
        if collective is not None and collective.moves:
            x, axes, *rest = node.args
            names = [a.name for a in collective.op._schema.arguments[2:]]
            val, source = x.meta["val"], node.meta.get("source", "")
            arguments = tuple((k, v) for k, v in zip(names, rest, strict=True) if not isinstance(v, fx.Node))
            shape = tuple(val.shape)
            if node.target in (_EXPERT_DISPATCH, _EXPERT_COMBINE):
                shape = (rest[0].meta["val"].numel(), shape[1])
            found.append(Issued(collective.name, group_axes(axes), shape, val.dtype, arguments, source))
    return found
