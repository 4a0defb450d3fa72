"""One rule for each torch function that layers may use on global values, and one for all operators.

A rule says how its function runs on local tensors and how the result is split, or refuses. Most go by letters: a name
for each dimension of each operand, where dimensions of one name are split alike.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from kimi_graph.errors import ShardingError

from . import collectives
from .mesh import Axes
from .value import OPERATOR, Sharded, rule

POOLS = "sp"  # letters of slots and pages: split as the rows `b` that own them, ids count within a device's part

# ---- letters ---------------------------------------------------------------------------------------------------------


def align(values: Sequence[Sharded], letters: Sequence[Sequence[Any]]) -> tuple[list[Sharded], dict[Any, Axes]]:
    """Dimensions of one letter split alike, by slicing where some are not split; and the mesh axes of each letter.

    A dimension of size one is broadcast, and left alone.
    """
    axes: dict[Any, Axes] = {}
    for value, names in zip(values, letters, strict=True):
        for name, split in zip(names, value.dims, strict=True):
            axes[name] = max(axes.get(name, ()), split, key=len)
    aligned = []
    for value, names in zip(values, letters, strict=True):
        for dim, name in enumerate(names):
            if value.shape[dim] > 1:
                value = value.sliced(dim, axes[name])
        aligned.append(value)
    return aligned, axes


def whole(x: Sharded, *dims: int) -> None:
    """Refuse a value that is split along one of these dimensions.

    Raises:
        ShardingError: it is split; the message says what moves it.
    """
    for dim in dims:
        if x.dims[dim]:
            raise ShardingError(
                f"it works along dimension {dim} of {x}, which is split over {' x '.join(x.dims[dim])}; "
                f"constrain(x, ...) gathers it, shard_map lets you write the distributed form."
            )


@rule(OPERATOR, linear=True)
def _operator(f: Any, *args: Any) -> Any:
    """An operator by its signature: letters are split alike, one that no result has leaves a pending sum.

    So does the first argument of one that is linear in it, where its sum may wait.
    """
    waiting = args[0] if f.linear and args[0].waits else None
    args = pytree.tree_map_only(Sharded, lambda v: v if v is waiting else v.reduced(), args)
    ins, outs = ([group.split() for group in side.split(",")] for side in f.sharding.split("->"))
    first = args[0][0] if isinstance(args[0], list) else args[0]
    dots = [str(i) for i in range(first.ndim - len(ins[0]) + 1)]
    ins, outs = ([[x for n in group for x in (dots if n == "..." else [n])] for group in side] for side in (ins, outs))
    lists = [(i, len(a)) for i, a in enumerate(args) if isinstance(a, list) and a and isinstance(a[0], Sharded)]
    for i, count in reversed(lists):  # the letters of a list are those of each of its tensors
        args, ins = (*args[:i], *args[i], *args[i + 1 :]), [*ins[:i], *[ins[i]] * count, *ins[i + 1 :]]
    values, axes = align(args[: len(ins)], ins)
    _check_whole(f, axes)
    kept = {"b", *POOLS}.union(*outs)  # rows are never summed: they are in their pools, and pools in their rows
    partial = [axis for name in axes if name not in kept for axis in axes[name]]
    partial += () if waiting is None else waiting.partial
    local: list[Any] = [v.local for v in values]
    for i, count in lists:
        local[i : i + count] = [local[i : i + count]]
    made = f(*local, *args[len(ins) :])
    many = made if isinstance(made, tuple) else (made,)
    results = tuple(
        values[0].like(y, [axes.get(n, ()) for n in names], partial) for y, names in zip(many, outs, strict=True)
    )
    return results if isinstance(made, tuple) else results[0]


def _check_whole(f: Any, axes: dict[str, Axes]) -> None:
    for name in f.whole:
        found, wanted = axes.get(name, ()), axes.get("b", ()) if name in POOLS else ()
        if found != wanted:
            raise ShardingError(
                f"{name!r} of {f.sharding!r} is split over {found or None}, and has to be over {wanted or None}; "
                f"constrain(x, ...) moves it."
            )


def late(values: Sequence[Sharded]) -> tuple[Sequence[Sharded], Sharded]:
    """Factors without pending sums, but for one whose sum may wait; and that one, else the first of them."""
    waiting = [v for v in values if v.waits]
    keep = waiting[0] if len(waiting) == 1 and sum(bool(v.partial) for v in values) == 1 else None
    found = [v if v is keep else v.reduced() for v in values]
    return found, found[0] if keep is None else keep


@rule("einsum", linear=True)
def _einsum(f: Any, equation: str, *operands: Sharded) -> Sharded:
    """A letter that the result has not leaves a pending sum, and so does an operand whose sum may wait."""
    groups, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow or "." in equation:
        raise ShardingError("an equation has to name every dimension and the result: 'btd,hkd->bthk'.")
    factors, first = late(operands)
    values, axes = align(factors, groups.split(","))
    partial = [axis for name in axes if name not in result for axis in axes[name]]
    dims = [axes[n] for n in result]
    return first.like(f(equation, *(v.local for v in values)), dims, [*first.partial, *partial])


@rule("matmul")
def _matmul(f: Any, x: Sharded, y: Sharded) -> Sharded:
    if y.ndim != 2 or x.ndim < 1:
        raise ShardingError("the right operand has to be a matrix; einsum names the dimensions of others.")
    rows = [str(i) for i in range(x.ndim - 1)]
    (x, y), axes = align((x, y), ([*rows, "in"], ["in", "out"]))
    return x.like(f(x.local, y.local), [axes[n] for n in (*rows, "out")], axes["in"])


# ---- element by element ----------------------------------------------------------------------------------------------

ELEMENTWISE = """
    rdiv pow rpow ge gt le lt eq ne and or xor invert
    exp log sqrt rsqrt sigmoid relu silu gelu tanh softplus abs square reciprocal maximum minimum clamp
    where masked_fill logical_and logical_or logical_not float double bfloat16 half long int bool to
"""


@rule(*ELEMENTWISE.split())
def _elementwise(f: Any, *args: Any, **kwargs: Any) -> Sharded:
    """Operands broadcast, dimensions counted from the last."""
    flat, structure = pytree.tree_flatten((args, kwargs))
    at = [i for i, a in enumerate(flat) if isinstance(a, Sharded)]
    if kwargs.get("inplace") or "out" in kwargs:
        raise ShardingError("global values are never written in place.")
    if f.__name__ == "to" and len(at) > 1:
        raise ShardingError("say the dtype: x.to(y.dtype).")
    values = [flat[i] for i in at]
    ndim = max(v.ndim for v in values)
    values, axes = align(values, [range(ndim - v.ndim, ndim) for v in values])
    for i, v in zip(at, values, strict=True):
        flat[i] = v.local
    args, kwargs = pytree.tree_unflatten(flat, structure)
    return values[0].like(f(*args, **kwargs), [axes[i] for i in range(ndim)], values[0].partial)


@rule("add", "radd", "sub", "rsub", linear=True)
def _sum_of_two(f: Any, x: Any, y: Any, **kwargs: Any) -> Sharded:
    """Linear where both are pending over the same axes: then the sum is, and is taken once for both."""
    if not isinstance(x, Sharded) or not isinstance(y, Sharded) or x.partial != y.partial:
        x, y = pytree.tree_map_only(Sharded, Sharded.reduced, (x, y))
    return _elementwise(f, x, y, **kwargs)


@rule("mul", "rmul", "div", "truediv", linear=True)
def _scaled(f: Any, x: Any, y: Any, **kwargs: Any) -> Sharded:
    """Linear in a value that is multiplied by a number, and in one whose sum may wait."""
    if isinstance(x, Sharded) and isinstance(y, Sharded) and f.__name__ in ("mul", "__mul__"):
        (x, y), first = late((x, y))
        values, axes = align((x, y), [range(max(x.ndim, y.ndim) - v.ndim, max(x.ndim, y.ndim)) for v in (x, y)])
        dims = [axes[i] for i in range(max(x.ndim, y.ndim))]
        return first.like(f(*(v.local for v in values), **kwargs), dims, first.partial)
    if isinstance(y, Sharded) or not isinstance(x, Sharded):
        x, y = pytree.tree_map_only(Sharded, Sharded.reduced, (x, y))
    return _elementwise(f, x, y, **kwargs)


@rule("neg", "clone", "contiguous", linear=True)
def _of_one(f: Any, x: Sharded) -> Sharded:
    return _elementwise(f, x)


@rule("zeros_like", "ones_like", "full_like", "empty_like", linear=True)
def _like(f: Any, x: Sharded, *args: Any, **kwargs: Any) -> Sharded:
    """Split as `x`; a sum that is pending there has nothing to do with it."""
    return x.like(f(x.local, *args, **kwargs), x.dims)


@rule("new_zeros", "new_ones", "new_full", "new_empty", linear=True)
def _new(f: Any, x: Sharded, *args: Any, **kwargs: Any) -> Sharded:
    made = f(x.local, *args, **kwargs)
    return x.like(made, [()] * made.ndim)


# ---- along a dimension -----------------------------------------------------------------------------------------------


def _dims_of(x: Sharded, dim: Any) -> list[int]:
    """Dimensions counted from the front; all where none is given."""
    dims = range(x.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    return [d % x.ndim for d in dims]


@rule("sum", "mean", linear=True)
def _sum(f: Any, x: Sharded, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Sharded:
    """A dimension that was split leaves a pending sum: of sums, or of means of equal parts, each divided."""
    dims = _dims_of(x, dim)
    gone = [axis for d in dims for axis in x.dims[d]]
    if gone and x.partial:
        x = x.reduced()
    made = f(x.local, dims, keepdim, **kwargs)
    if f.__name__ == "mean" and gone:
        made = made / x.mesh.size(gone)
    left = [() if d in dims else axes for d, axes in enumerate(x.dims) if keepdim or d not in dims]
    return x.like(made, left, [*x.partial, *gone])


@rule("softmax", "log_softmax", "cumsum", "sort", "argsort", "argmax", "amax", "amin", "max", "min", "topk")
def _along(f: Any, x: Sharded, *args: Any, **kwargs: Any) -> Any:
    """Works along some dimensions, which have to be whole, and treats the others as rows."""
    takes_count = f.__name__ == "topk"
    given = args[takes_count] if len(args) > takes_count else kwargs.get("dim")
    if isinstance(given, (Sharded, bool)):
        raise ShardingError("give it a dimension; for the larger of two values use torch.maximum.")
    if given is None and f.__name__ in ("sort", "argsort", "topk"):
        given = -1
    dims = _dims_of(x, given)
    whole(x, *dims)
    left = [axes for d, axes in enumerate(x.dims) if d not in dims]
    return pytree.tree_map_only(
        torch.Tensor, lambda y: x.like(y, x.dims if y.ndim == x.ndim else left), f(x.local, *args, **kwargs)
    )


@rule("gather", linear=True)
def _gather(f: Any, x: Sharded, dim: int, index: Sharded) -> Sharded:
    """Linear in `x`: a pending sum stays pending, and is taken of what was gathered."""
    dim, index = dim % x.ndim, index.reduced()
    cut = [d for d in range(x.ndim) if d != dim and x.shape[d] != index.shape[d]]
    whole(index, *cut)
    whole(x, dim, *cut)  # torch takes the first rows where the index has fewer, and one device has those
    names = [[(side, d) if d == dim or d in cut else d for d in range(x.ndim)] for side in ("from", "to")]
    (x, index), axes = align((x, index), names)
    return x.like(f(x.local, dim, index.local), [axes[n] for n in names[1]], x.partial)


@rule("embedding")
def _embedding(f: Any, ids: Sharded, weight: Sharded, padding_idx: int | None = None, **kwargs: Any) -> Sharded:
    """Each rank looks up the ids it has: rows of the others' are zeros, the sum is pending."""
    if kwargs.get("max_norm") is not None:
        raise ShardingError("max_norm would write to the weight.")
    axes = weight.dims[0]
    dims = (*ids.dims, *weight.dims[1:])
    if not axes:
        return weight.like(f(ids.local, weight.local), dims)
    rows = weight.local.shape[0]
    own = ids.local - collectives.own_index(axes, rows, ids.dtype)
    near = own.clamp(0, rows - 1)
    found = f(near, weight.local) * (near == own)[..., None]
    return weight.like(found, dims, axes)


# ---- another order or number of dimensions ---------------------------------------------------------------------------


@rule("cat", "concat", linear=True)
def _cat(f: Any, tensors: Sequence[Sharded], dim: int = 0) -> Sharded:
    values = _same_pending(tensors)
    dim = dim % values[0].ndim
    names = [[d if d != dim else (d, i) for d in range(x.ndim)] for i, x in enumerate(values)]
    for x in values:
        whole(x, dim)
    values, axes = align(values, names)
    return values[0].like(f([x.local for x in values], dim), [axes[n] for n in names[0]], values[0].partial)


@rule("stack", linear=True)
def _stack(f: Any, tensors: Sequence[Sharded], dim: int = 0) -> Sharded:
    values = _same_pending(tensors)
    dim = dim % (values[0].ndim + 1)
    values, axes = align(values, [range(x.ndim) for x in values])
    dims = [axes[d] for d in range(values[0].ndim)]
    dims.insert(dim, ())
    return values[0].like(f([x.local for x in values], dim), dims, values[0].partial)


def _same_pending(values: Sequence[Sharded]) -> Sequence[Sharded]:
    """Values whose sums are pending over the same axes; else without pending sums."""
    return values if len({x.partial for x in values}) == 1 else [x.reduced() for x in values]


def _numbers(given: tuple[Any, ...]) -> list[int]:
    """Of `f(x, 2, 0, 1)` and `f(x, (2, 0, 1))`."""
    return list(given[0] if isinstance(given[0], (tuple, list)) else given)


@rule("permute", linear=True)
def _permute(f: Any, x: Sharded, *given: Any) -> Sharded:
    order = _numbers(given)
    return x.like(f(x.local, order), [x.dims[d] for d in order], x.partial)


@rule("transpose", "swapaxes", linear=True)
def _transpose(f: Any, x: Sharded, first: int, second: int) -> Sharded:
    dims = list(x.dims)
    dims[first], dims[second] = dims[second], dims[first]
    return x.like(f(x.local, first, second), dims, x.partial)


@rule("movedim", linear=True)
def _movedim(f: Any, x: Sharded, source: int, destination: int) -> Sharded:
    dims = list(x.dims)
    dims.insert(destination % x.ndim, dims.pop(source % x.ndim))
    return x.like(f(x.local, source, destination), dims, x.partial)


@rule("unsqueeze", linear=True)
def _unsqueeze(f: Any, x: Sharded, dim: int) -> Sharded:
    dims = list(x.dims)
    dims.insert(dim % (x.ndim + 1), ())
    return x.like(f(x.local, dim), dims, x.partial)


@rule("squeeze", linear=True)
def _squeeze(f: Any, x: Sharded, dim: int) -> Sharded:
    """Of one dimension: which ones have size one differs between the global and the local tensor."""
    dim = dim % x.ndim
    return x if x.shape[dim] != 1 else x.like(f(x.local, dim), x.dims_with(dim), x.partial)


@rule("expand", linear=True)
def _expand(f: Any, x: Sharded, *given: Any) -> Sharded:
    sizes = _numbers(given)
    dims = [()] * (len(sizes) - x.ndim) + list(x.dims)
    local = [n if n < 0 else n // x.mesh.size(axes) for n, axes in zip(sizes, dims, strict=True)]
    return x.like(f(x.local, *local), dims, x.partial)


@rule("getitem", linear=True)
def _getitem(f: Any, x: Sharded, index: Any) -> Sharded:
    index = list(index) if isinstance(index, tuple) else [index]
    if not all(i is None or i is ... or isinstance(i, (slice, int)) for i in index):
        raise ShardingError("an index may have slices, whole numbers and None; use gather for tensors.")
    at = next((i for i, part in enumerate(index) if part is ...), len(index))
    index[at : at + 1] = [slice(None)] * (x.ndim - sum(isinstance(i, (slice, int)) for i in index))
    dims: list[Axes] = []
    left = iter(range(x.ndim))
    for i, part in enumerate(index):
        if part is None:
            dims.append(())
            continue
        dim = next(left)
        if isinstance(part, slice) and part.indices(x.shape[dim]) == (0, x.shape[dim], 1):
            index[i] = slice(None)
        else:
            whole(x, dim)
        if isinstance(part, slice):
            dims.append(x.dims[dim])
    return x.like(f(x.local, tuple(index)), dims, x.partial)


@rule("split", "chunk", "unbind", linear=True)
def _split(f: Any, x: Sharded, *args: Any, **kwargs: Any) -> tuple[Sharded, ...]:
    before = f.__name__ != "unbind"  # the number or sizes of the parts
    dim = kwargs.get("dim", args[before] if len(args) > before else 0) % x.ndim
    whole(x, dim)
    dims = x.dims if before else x.dims_with(dim)
    return tuple(x.like(y, dims, x.partial) for y in f(x.local, *args, **kwargs))


@rule("reshape", "view", linear=True)
def _reshape(f: Any, x: Sharded, *sizes: Any) -> Sharded:
    """Neighbouring dimensions are joined and cut; one that is split has to be the first of what it is joined with."""
    if isinstance(sizes[0], torch.dtype):
        raise ShardingError("bytes are not seen as another dtype here.")
    return _resized(x, _numbers(sizes))


@rule("flatten", linear=True)
def _flatten(f: Any, x: Sharded, start: int = 0, end: int = -1) -> Sharded:
    start, end = start % x.ndim, end % x.ndim
    return _resized(x, [*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :]])


@rule("unflatten", linear=True)
def _unflatten(f: Any, x: Sharded, dim: int, sizes: Sequence[int]) -> Sharded:
    dim, sizes = dim % x.ndim, list(sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.shape[dim] // -math.prod(sizes)
    if math.prod(sizes) != x.shape[dim]:
        raise ShardingError(f"dimension {dim} of {x} does not hold {sizes}.")
    return _resized(x, [*x.shape[:dim], *sizes, *x.shape[dim + 1 :]])


def _resized(x: Sharded, sizes: list[int]) -> Sharded:
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.numel() // -math.prod(sizes)
    if math.prod(sizes) != x.numel() or not x.numel():
        raise ShardingError(f"{sizes} does not have the elements of {x}.")
    dims: list[Axes] = [()] * len(sizes)
    for old, new in _groups(list(x.shape), sizes):
        for dim in old:
            axes = x.dims[dim]
            if not axes:
                continue
            ways = x.mesh.size(axes)
            if dim != old[0]:
                raise ShardingError(
                    f"dimension {dim} of {x} is split and may not be merged into the one before it; "
                    f"keep it a dimension of its own."
                )
            if sizes[new[0]] % ways:
                raise ShardingError(
                    f"{sizes[new[0]]}, the first part of dimension {dim} of {x}, is not divisible by "
                    f"{' x '.join(axes)} = {ways}; constrain(x, ...) gathers it."
                )
            dims[new[0]] = axes
    local = [n // x.mesh.size(axes) for n, axes in zip(sizes, dims, strict=True)]
    return x.like(x.local.reshape(local), dims, x.partial)


def _groups(old: list[int], new: list[int]) -> list[tuple[list[int], list[int]]]:
    """Dimensions of two shapes of as many elements that hold the same ones; those of size one are in no group."""
    olds, news = ([d for d, n in enumerate(shape) if n != 1] for shape in (old, new))
    groups = []
    while olds:
        left, right = [olds.pop(0)], [news.pop(0)]
        while (a := math.prod(old[d] for d in left)) != (b := math.prod(new[d] for d in right)):
            if a < b:
                left.append(olds.pop(0))
            else:
                right.append(news.pop(0))
        groups.append((left, right))
    return groups


# ---- what a layer says -----------------------------------------------------------------------------------------------


@rule("constrain", linear=True)
def _constrain(f: Any, x: Sharded, *names: str | None) -> Sharded:
    if len(names) != x.ndim:
        raise ShardingError(f"{len(names)} axes for the {x.ndim} dimensions of {x}.")
    return x.placed([x.rules.on(name) for name in names])
