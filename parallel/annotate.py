"""What a layer may say about placement; it never names a device. Without a mesh all of it is the identity.

`constrain` and `shard_map` are for global values, `local_ids` and `summand` for the body of a `shard_map`. A sharded
value is not a tensor; it answers `__torch_function__`, and so do the local values a body gets.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.overrides import handle_torch_function, has_torch_function

X = TypeVar("X")
Axes = tuple[str | None, ...]


def _answers(x: object) -> bool:
    return not isinstance(x, torch.Tensor) and has_torch_function((x,))


def constrain(x: X, *axes: str | None) -> X:
    """Place `x` by logical axes, one per dimension (None: not sharded). The identity on a plain tensor."""
    return handle_torch_function(constrain, (x,), x, *axes) if _answers(x) else x


def shard_map(
    f: Callable[..., Any], in_axes: tuple[Axes, ...], out_axes: tuple[Axes, ...] | Axes
) -> Callable[..., Any]:
    """Run `f` on each device's shards: for the few distributed algorithms a layer writes by hand.

    Args:
        f: a function of local tensors; what crosses devices is explicit and named by logical axis.
        in_axes: logical axes of each argument, one per dimension.
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


def local_ids(ids: X, axis: str, count: int) -> X:
    """Ids among all of a logical axis, turned so that this device's own are 0 to `count` - 1 and the others' follow.

    Args:
        count: how many of the axis this device has.
    """
    return handle_torch_function(local_ids, (ids,), ids, axis, count) if _answers(ids) else ids


def summand(x: X, *axes: str) -> X:
    """The result of a body, of which each device along these logical axes has a summand.

    The sum is taken before its first use that is not linear.
    """
    return handle_torch_function(summand, (x,), x, *axes) if _answers(x) else x
