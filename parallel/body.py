"""The body of a `shard_map`: local values, explicit collectives named by logical axis, and the check of what varies.

A `Local` is one device's part, with the logical axes along which devices hold different values. A collective takes them
off or adds them. The check is by logical axis and not by mesh axis: where two logical axes lie on one mesh axis, a sum
over the one would mix the other, and only their names can tell.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from kimi_graph.errors import ShardingError

from . import collectives
from .mesh import Axes
from .rules import Rules
from .value import CallError, Sharded, Value, name_of, rule

Body = Callable[..., Any]
DimAxes = str | tuple[str, ...] | None  # a dimension's logical axes: none, one, or several, the first outermost
BODY: dict[str, Body] = {}


class Local(Value):
    """One device's part of a value.

    Attributes:
        local: its tensor.
        varies: logical axes along which devices hold different ones.
        pending: logical axes along which each device has a summand.
        late: the sum may wait, see `annotate.summand`.
    """

    late = False

    def __init__(self, rules: Rules, local: Tensor, varies: Iterable[str | None], pending: Iterable[str] = ()) -> None:
        self.rules, self.local = rules, local
        self.varies = frozenset(name for name in varies if name is not None and rules.on(name))
        self.pending = frozenset(name for name in pending if rules.on(name))

    def __repr__(self) -> str:
        by = f" by {', '.join(sorted(self.varies))}" if self.varies else ""
        return f"<{list(self.local.shape)}{by}>" + "".join(f"+{name}" for name in sorted(self.pending))

    @classmethod
    def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            locals_ = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Value)]
            if not all(isinstance(x, Local) for x in locals_):
                raise ShardingError("a global value has to be an argument of the shard_map, not taken from around it.")
            if any(x.pending for x in locals_):
                raise ShardingError("a summand is the last thing that a body says.")
            return BODY.get(name_of(f), _each)(f, *args, **kwargs)
        except CallError:
            raise
        except ShardingError as error:
            raise CallError(f, args, error) from None


def _each(f: Any, *args: Any, **kwargs: Any) -> Any:
    """Any function on local tensors: what it gives varies as what it was given."""
    given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Local)]
    varies = frozenset().union(*(x.varies for x in given))
    if name_of(f).startswith("new_") or name_of(f).endswith("_like"):
        varies = frozenset()
    made = f(*pytree.tree_map_only(Local, lambda x: x.local, args), **kwargs)
    return pytree.tree_map_only(Tensor, lambda y: Local(given[0].rules, y, varies), made)


def axes_of(rules: Rules, names: Iterable[str]) -> Axes:
    """The mesh axes of some logical axes, in the order of their rules."""
    return tuple(dict.fromkeys(axis for name in names for axis in rules.on(name)))


def _of_body(f: Body) -> Body:
    BODY[f.__name__.strip("_")] = f
    return f


# ---- collectives by logical axis -------------------------------------------------------------------------------------


def _along(x: Local, names: Iterable[str]) -> tuple[Axes, frozenset[str]]:
    """Mesh axes of a reduction or gather along logical axes, and those of them that have any.

    Raises:
        ShardingError: the value is the same along one of them, or also varies by another on the same mesh axis.
    """
    on = frozenset(name for name in names if x.rules.on(name))
    axes = axes_of(x.rules, on)
    same = sorted(on - x.varies)
    if same:
        raise ShardingError(f"{x} is the same along {', '.join(same)}; was it summed or gathered there before?")
    mixed = sorted(name for name in x.varies - on if set(x.rules.on(name)) & set(axes))
    if mixed:
        raise ShardingError(
            f"{x} also varies by {mixed[0]!r}, on the same mesh axis as {', '.join(sorted(on))}: it would mix "
            f"{mixed[0]!r}. Give them mesh axes of their own."
        )
    return tuple(axis for axis in x.rules.mesh.axes if axis in axes) if len(on) > 1 else axes, on


@_of_body
def _all_reduce(_: Any, x: Local, *names: str, op: str = "sum") -> Local:
    axes, on = _along(x, names)
    return Local(x.rules, collectives.all_reduce(x.local, axes, op), x.varies - on) if axes else x


@_of_body
def _all_gather(_: Any, x: Local, name: str, dim: int) -> Local:
    axes, on = _along(x, (name,))
    return Local(x.rules, collectives.all_gather(x.rules.mesh, x.local, axes, dim), x.varies - on) if axes else x


@_of_body
def _reduce_scatter(_: Any, x: Local, name: str, dim: int) -> Local:
    axes, _on = _along(x, (name,))
    return Local(x.rules, collectives.reduce_scatter(x.rules.mesh, x.local, axes, dim), x.varies) if axes else x


@_of_body
def _all_to_all(_: Any, x: Local, name: str, split_dim: int, cat_dim: int) -> Local:
    axes = x.rules.on(name)
    if not axes:
        return x
    made = collectives.all_to_all(x.rules.mesh, x.local, axes, split_dim, cat_dim)
    return Local(x.rules, made, x.varies | {name})


@_of_body
def _own_slice(_: Any, x: Local, name: str, dim: int) -> Local:
    axes = x.rules.on(name)
    if not axes:
        return x
    return Local(x.rules, collectives.own_slice(x.rules.mesh, x.local, axes, dim), x.varies | {name})


@_of_body
def _own_index(_: Any, x: Local, name: str, times: int = 1) -> Local:
    axes = x.rules.on(name)
    made = collectives.own_index(axes, times) if axes else torch.zeros(1, dtype=torch.int64, device=x.device)
    return Local(x.rules, made, {name})


@_of_body
def _ways(_: Any, x: Local, name: str) -> int:
    return x.rules.ways(name)


@rule("ways", linear=True)
def _ways_globally(_: Any, x: Sharded, name: str) -> int:
    return x.rules.ways(name)


@_of_body
def _splits(_: Any, x: Local, axis: str, other: str) -> bool:
    return _are_split(x.rules, axis, other)


@rule("splits", linear=True)
def _splits_globally(_: Any, x: Sharded, axis: str, other: str) -> bool:
    return _are_split(x.rules, axis, other)


def _are_split(rules: Rules, axis: str, other: str) -> bool:
    return bool(rules.on(other)) and set(rules.on(other)) <= set(rules.on(axis))


@_of_body
def _expert_dispatch(_: Any, x: Local, chosen: Local, name: str, count: int) -> tuple[Local, ...]:
    made = collectives.expert_dispatch(x.rules.mesh, x.local, chosen.local, x.rules.on(name), count)
    return tuple(Local(x.rules, y, x.varies | chosen.varies | {name}) for y in made)


@_of_body
def _expert_combine(
    _: Any, y: Local, chosen: Local, weights: Local, assist: Local, counts: Local, name: str, count: int
) -> Local:
    own = chosen.varies | weights.varies
    if more := sorted(y.varies - own - {name}):
        raise ShardingError(f"{y} also varies by {more[0]!r}: rows come back with a part of what they should be.")
    notes = assist.local, counts.local
    made = collectives.expert_combine(
        y.rules.mesh, y.local, chosen.local, weights.local, notes, y.rules.on(name), count
    )
    return Local(y.rules, made, own)


@_of_body
def _local_ids(_: Any, ids: Local, name: str, count: int) -> Local:
    axes = ids.rules.on(name)
    if not axes:
        return ids
    own = ids.local - collectives.own_index(axes, count, ids.dtype)
    return Local(ids.rules, torch.remainder(own, count * ids.rules.ways(name)), ids.varies | {name})


@_of_body
def _summand(_: Any, x: Local, *names: str, late: bool = False) -> Local:
    _axes, on = _along(x, names)
    made = Local(x.rules, x.local, x.varies - on, on)
    made.late = late
    return made


# ---- in and out ------------------------------------------------------------------------------------------------------


@rule("shard_map", linear=True)
def _shard_map(f: Any, body: Callable[..., Any], in_axes: Any, out_axes: Any, *args: Any) -> Any:
    """Arguments are placed as they are wanted; results have to be the same along what they do not declare."""
    first = next(x for x in args if isinstance(x, Sharded))
    if len(args) != len(in_axes):
        raise ShardingError(f"{len(args)} arguments, but axes of {len(in_axes)}.")
    given = [_local(x, names) for x, names in zip(args, in_axes, strict=True)]
    out = body(*given)
    many, axes = (out, out_axes) if isinstance(out, tuple) else ((out,), (out_axes,))
    if len(many) != len(axes):
        raise ShardingError(f"{len(many)} results, but axes of {len(axes)}.")
    made = [_global(first.rules, y, names) for y, names in zip(many, axes, strict=True)]
    return tuple(made) if isinstance(out, tuple) else made[0]


def _local(x: Sharded, names: Iterable[DimAxes]) -> Local:
    names = tuple(names)
    if len(names) != x.ndim:
        raise ShardingError(f"{len(names)} axes for the {x.ndim} dimensions of {x}.")
    placed = x.placed([_dim_axes(x.rules, name) for name in names]).reduced()
    return Local(x.rules, placed.local, _each_name(names))


def _each_name(names: Iterable[DimAxes]) -> list[str]:
    """The logical axes of all dimensions."""
    return [n for name in names for n in (name if isinstance(name, tuple) else (name,)) if n is not None]


def _dim_axes(rules: Rules, name: DimAxes) -> Axes:
    """The mesh axes of a dimension, of its first logical axis outermost."""
    return axes_of(rules, _each_name((name,)))


def _global(rules: Rules, y: Local, names: Iterable[DimAxes]) -> Sharded:
    names = tuple(names)
    if not isinstance(y, Local) or len(names) != y.ndim:
        raise ShardingError(f"a result {y} for the axes {names}.")
    pending = axes_of(rules, y.pending)
    declared = {axis for name in names for axis in _dim_axes(rules, name)} | set(pending)
    extra = sorted(name for name in y.varies if not set(rules.on(name)) <= declared)
    if extra:
        raise ShardingError(
            f"the result {y} is not the same along {', '.join(extra)}, which {names} do not say; "
            f"is a summand missing, or a collective?"
        )
    made = Sharded(rules, y.local, [_dim_axes(rules, name) for name in names], pending)
    made.late = y.late
    return made
