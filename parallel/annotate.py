"""`constrain` and `shard_map`: what a layer may say about placement. It never names a device."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.overrides import handle_torch_function, has_torch_function

X = TypeVar("X")
Axes = tuple[str | None, ...]


def constrain(x: X, *axes: str | None) -> X:
    """Place `x` by logical axes, one per dimension (None: not sharded). The identity on a plain tensor."""
    if not isinstance(x, torch.Tensor) and has_torch_function((x,)):
        return handle_torch_function(constrain, (x,), x, *axes)
    return x


def shard_map(f: Callable[..., Any], in_axes: tuple[Axes, ...], out_axes: tuple[Axes, ...] | Axes) -> Callable[..., Any]:
    """Run `f` on each device's shards: for the few distributed algorithms a layer writes by hand.

    Args:
        f: a function of local tensors; collectives inside are explicit and named by logical axis.
        in_axes: logical axes of each argument, one per dimension.
        out_axes: logical axes of each result.

    Returns:
        A function of global values. On plain tensors it is `f`.
    """

    def mapped(*args: Any) -> Any:
        sharded = tuple(a for a in args if not isinstance(a, torch.Tensor) and has_torch_function((a,)))
        if sharded:
            return handle_torch_function(shard_map, sharded, f, in_axes, out_axes, *args)
        return f(*args)

    return mapped
