"""What a layer may say about placement; it never names a device. Without a mesh all of it is the identity.

`constrain` and `shard_map` are for global values, the rest for the body of a `shard_map`, where what crosses devices is
written down and named by logical axis. A sharded value is not a tensor; it answers `__torch_function__`, and so do the
local values a body gets.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.overrides import handle_torch_function, has_torch_function

X = TypeVar("X")
Axes = tuple[str | tuple[str, ...] | None, ...]


def _answers(x: object) -> bool:
    return not isinstance(x, torch.Tensor) and has_torch_function((x,))


# ---- for global values -----------------------------------------------------------------------------------------------


def constrain(x: X, *axes: str | None) -> X:
    """Place `x` by logical axes, one per dimension (None: not sharded). The identity on a plain tensor."""
    return handle_torch_function(constrain, (x,), x, *axes) if _answers(x) else x


def shard_map(
    f: Callable[..., Any], in_axes: tuple[Axes, ...], out_axes: tuple[Axes, ...] | Axes
) -> Callable[..., Any]:
    """Run `f` on each device's shards: for the few distributed algorithms a layer writes by hand.

    Args:
        f: a function of local tensors; what crosses devices is explicit and named by logical axis.
        in_axes: logical axes of each argument, one per dimension; several where they split one dimension together,
            as rows and stretches of a sequence do with pages.
        out_axes: logical axes of each result.

    Returns:
        A function of global values. On plain tensors it is `f`.
    """

    def mapped(*args: Any) -> Any:
        sharded = tuple(a for a in args if _answers(a))
        if sharded:
            return handle_torch_function(shard_map, sharded, f, in_axes, out_axes, *args)
        return f(*args)

    return mapped


# ---- for bodies ------------------------------------------------------------------------------------------------------


def local_ids(ids: X, axis: str, count: int) -> X:
    """Ids among all of a logical axis, turned so that this device's own are 0 to `count` - 1 and the others' follow.

    Args:
        count: how many of the axis this device has.
    """
    return handle_torch_function(local_ids, (ids,), ids, axis, count) if _answers(ids) else ids


def summand(x: X, *axes: str, late: bool = False) -> X:
    """The result of a body, of which each device along these logical axes has a summand.

    The sum is taken before its first use that is not linear.

    Args:
        late: products with values that have no pending sum (`*`, einsum) are linear too: the sum waits for one that
            follows them, and is taken with it.
    """
    return handle_torch_function(summand, (x,), x, *axes, late=late) if _answers(x) else x


def all_reduce(x: X, *axes: str, op: str = "sum") -> X:
    """The sum (or `op="max"`) of what the devices along these logical axes have, on each of them."""
    return handle_torch_function(all_reduce, (x,), x, *axes, op=op) if _answers(x) else x


def all_gather(x: X, axis: str, dim: int) -> X:
    """What the devices along a logical axis have, one after another along `dim`, on each of them."""
    return handle_torch_function(all_gather, (x,), x, axis, dim) if _answers(x) else x


def reduce_scatter(x: X, axis: str, dim: int) -> X:
    """This device's part along `dim` of the sum over the devices along a logical axis."""
    return handle_torch_function(reduce_scatter, (x,), x, axis, dim) if _answers(x) else x


def all_to_all(x: X, axis: str, split_dim: int, cat_dim: int) -> X:
    """Part i of `x` along `split_dim` goes to device i of a logical axis; what comes is joined along `cat_dim`."""
    return handle_torch_function(all_to_all, (x,), x, axis, split_dim, cat_dim) if _answers(x) else x


def own_slice(x: X, axis: str, dim: int) -> X:
    """This device's part along `dim` of what all devices along a logical axis have."""
    return handle_torch_function(own_slice, (x,), x, axis, dim) if _answers(x) else x


def own_index(x: Any, axis: str, times: int = 1) -> Any:
    """Where this device stands along a logical axis, times a number: `[1]` int64. `x`: any value of the body."""
    if _answers(x):
        return handle_torch_function(own_index, (x,), x, axis, times)
    return torch.zeros(1, dtype=torch.int64, device=x.device)


def splits(x: Any, axis: str, other: str) -> bool:
    """Whether what splits `other` also splits `axis`: rows over the devices that share out experts, say."""
    return handle_torch_function(splits, (x,), x, axis, other) if _answers(x) else False


def expert_dispatch(x: Any, chosen: Any, axis: str, count: int) -> tuple[Any, ...]:
    """Rows to the devices that have their experts, sorted by expert; in a body, and where `splits`.

    Args:
        x: `[N, D]`, this device's rows.
        chosen: `[N, K]` int32, ids among all experts, each once in a row.
        axis: that of experts.
        count: experts E that this device has.

    Returns:
        rows `[A, D]`, as many as may come: N of each device, once for each of its K experts that can be here; what is
        after the last group has no meaning. Group sizes `[E]` int64. Two tensors that are for `expert_combine` alone.
    """
    return handle_torch_function(expert_dispatch, (x,), x, chosen, axis, count)


def expert_combine(y: Any, chosen: Any, weights: Any, assist: Any, counts: Any, axis: str, count: int) -> Any:
    """Rows back to where they came from, and the weighted sum of each one's K: `[N, D]`.

    Args:
        y: `[A, D]`.
        weights: `[N, K]` float32.
        assist, counts: as `expert_dispatch` gave them.
    """
    return handle_torch_function(expert_combine, (y,), y, chosen, weights, assist, counts, axis, count)


def ways(x: Any, axis: str) -> int:
    """Into how many parts a logical axis is split. `x`: any value, of a body or global."""
    return handle_torch_function(ways, (x,), x, axis) if _answers(x) else 1
