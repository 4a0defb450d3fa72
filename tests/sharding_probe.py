"""A small strict sharding engine for tests: all ranks of a mesh in one process, in lockstep, on real or meta tensors.

A `Sharded` value is global. It knows the mesh axes that split each dimension and those over which it is still a partial
sum, and holds every rank's local tensor. Torch functions and operators run on those, by one rule each. By itself the
engine only finishes a partial sum, once and where a function is not linear, and slices replicated values; any other
movement is written (`constrain`) or refused. Collectives are computed exactly and kept in the mesh's log.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from kimi_graph import tree
from kimi_graph.errors import ShardingError
from kimi_graph.ops import Operator

MeshAxes = tuple[str, ...]
POOLS = "sp"  # letters of slots and pages: split as the rows `b` that own them, ids count within a device's part


class Mesh:
    """Named axes of devices, outermost first, and the rules: what each logical axis is split over.

    `log` has a `(collective, mesh axes, local shape)` for each one that ran.
    """

    def __init__(self, axes: dict[str, int], rules: dict[str, str | MeshAxes | None]) -> None:
        self.axes, self.rules = axes, rules
        self.ranks = [dict(zip(axes, at, strict=True)) for at in itertools.product(*map(range, axes.values()))]
        self.log: list[tuple[str, MeshAxes, tuple[int, ...]]] = []

    def on(self, name: str | None) -> MeshAxes:
        """The mesh axes (larger than one) that split a logical axis."""
        if name in (None, "_"):
            return ()
        if name not in self.rules:
            raise ShardingError(f"logical axis {name!r} has no rule; there are rules for {', '.join(self.rules)}.")
        axes = self.rules[name] or ()
        return tuple(a for a in ((axes,) if isinstance(axes, str) else axes) if self.axes[a] > 1)

    def size(self, axes: MeshAxes) -> int:
        return math.prod(self.axes[a] for a in axes)

    def at(self, axes: Sequence[str]) -> "Local":
        """Where each rank stands along some axes, the first of them outermost."""
        strides = [(a, math.prod(self.axes[b] for b in axes[i + 1 :])) for i, a in enumerate(axes)]
        return Local(self, [sum(rank[a] * stride for a, stride in strides) for rank in self.ranks])

    def groups(self, axes: MeshAxes) -> list[list[int]]:
        """Ranks that differ only along `axes`, in their order."""
        order, group = self.at(axes).parts, self.at([a for a in self.axes if a not in axes]).parts
        ranks = sorted(range(len(self.ranks)), key=lambda rank: (group[rank], order[rank]))
        return [list(ranks) for _, ranks in itertools.groupby(ranks, key=group.__getitem__)]

    def collective(self, name: str, axes: MeshAxes, x: "Local", f: Callable[[list[Any]], list[Any]]) -> "Local":
        """`f` of the tensors of each group gives each member's result."""
        self.log.append((name, axes, tuple(x.shape)))
        if x.meta:
            return Local(self, f(x.parts * self.size(axes))[:1])
        parts = list(x.parts)
        for group in self.groups(axes):
            for rank, part in zip(group, f([x.parts[r] for r in group]), strict=True):
                parts[rank] = part
        return Local(self, parts)


class Value:
    """Methods and signs of a tensor, sent through `__torch_function__`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.__torch_function__(getattr(Tensor, name), (), (self, *args), kwargs)


def _sign(name: str) -> Callable[..., Any]:
    return lambda self, *args: self.__torch_function__(getattr(Tensor, name), (), (self, *args))


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "getitem"):
    setattr(Value, f"__{_name}__", _sign(f"__{_name}__"))


class Local(Value):
    """A tensor per rank (one meta tensor stands for all): what the body of a `shard_map` sees.

    `pending`: mesh axes along which each is a summand.
    """

    def __init__(self, mesh: Mesh, parts: Sequence[Any], pending: MeshAxes = ()) -> None:
        self.mesh, self.parts, self.pending = mesh, list(parts), pending

    shape = property(lambda self: self.parts[0].shape)
    dtype = property(lambda self: self.parts[0].dtype)
    meta = property(lambda self: self.parts[0].device.type == "meta")

    @classmethod
    def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(x.pending for x in pytree.tree_leaves(args) if isinstance(x, Local)):
            raise ShardingError(f"{f.__name__}: a summand is the last thing that a body says.")
        if f.__name__ == "summand":
            x, *names = args
            return Local(x.mesh, x.parts, tuple(a for name in names for a in x.mesh.on(name)))
        if f.__name__ == "local_ids":
            ids, axes, count = args[0], args[0].mesh.on(args[1]), args[2]
            total = count * ids.mesh.size(axes)
            return each(lambda x, at: (x - at * count) % total, ids, ids.mesh.at(axes))
        return each(f, *args, **(kwargs or {}))


def each(f: Any, *args: Any, **kwargs: Any) -> Any:
    """`f` on every rank, with its own part of each `Local`; results are `Local` in the structure `f` gives them."""
    run = f.op if isinstance(f, Operator) else f
    first = next(x for x in pytree.tree_leaves(args) if isinstance(x, Local))
    results = []
    for rank in range(len(first.parts)):
        own = pytree.tree_map_only(Local, lambda x: x.parts[rank], args)  # noqa: B023 (used at once)
        results.append(pytree.tree_flatten(run(*own, **kwargs)))
    parts = zip(*(flat for flat, _ in results), strict=True)
    return pytree.tree_unflatten([Local(first.mesh, p) for p in parts], results[0][1])


class Sharded(Value):
    """A global value: local tensors, the mesh axes of each dimension (outermost first) and of a pending partial sum."""

    def __init__(self, local: Local, dims: Sequence[MeshAxes], partial: Sequence[str] = ()) -> None:
        self.mesh, self.local, self.dims = local.mesh, local, tuple(dims)
        self.shape = torch.Size(n * self.mesh.size(d) for n, d in zip(local.shape, self.dims, strict=True))
        self.partial = tuple(a for a in self.mesh.axes if a in partial)
        self._reduced: Sharded | None = None
        self.used = [a for d in self.dims for a in d] + list(self.partial)
        if len(set(self.used)) < len(self.used):
            raise ShardingError(f"{self} uses a mesh axis twice.")

    dtype = property(lambda self: self.local.dtype)
    ndim = property(lambda self: len(self.dims))

    def __repr__(self) -> str:
        sizes = (f"{n}@{'*'.join(d)}" if d else str(n) for n, d in zip(self.shape, self.dims, strict=True))
        return f"[{', '.join(sizes)}]" + "".join(f"+{a}" for a in self.partial)

    def reduced(self) -> "Sharded":
        """Without a pending sum; it is taken once."""
        if self.partial and self._reduced is None:
            add = lambda xs: [sum(xs)] * len(xs)  # noqa: E731
            self._reduced = Sharded(self.mesh.collective("all_reduce", self.partial, self.local, add), self.dims)
        return self._reduced or self

    def split(self, dim: int, axes: MeshAxes) -> "Sharded":
        """With dimension `dim` split over `axes`: free where it is split over fewer or none, else refused."""
        have, ways = self.dims[dim], self.mesh.size(axes)
        if axes == have:
            return self
        if axes[: len(have)] != have:
            raise ShardingError(f"dimension {dim} of {self} is needed over {axes or None}; constrain(x, ...) moves it.")
        if self.shape[dim] % ways:
            raise ShardingError(f"dimension {dim} of {self} is not divisible by {'*'.join(axes)}={ways}.")
        size = self.shape[dim] // ways
        local = each(lambda x, at: x.narrow(dim, at * size, size), self.local, self.mesh.at(axes[len(have) :]))
        return Sharded(local, self.dims_with(dim, axes), self.partial)

    def dims_with(self, dim: int, *axes: MeshAxes) -> tuple[MeshAxes, ...]:
        """Mesh axes of each dimension, with others in place of dimension `dim`."""
        return (*self.dims[:dim], *axes, *self.dims[dim + 1 :])

    def check(self) -> "Sharded":
        """Itself; refused where ranks differ that should hold the same."""
        same = tuple(a for a in self.mesh.axes if a not in self.used)
        for group in [] if self.local.meta else self.mesh.groups(same):
            first, *others = (self.local.parts[rank] for rank in group)
            if not all(torch.allclose(first, x, rtol=1e-12, atol=1e-12) for x in others):
                raise ShardingError(f"{self} is not the same along {', '.join(same)}; is a summand missing?")
        return self

    def whole(self) -> Tensor:
        """The global tensor."""
        x = self.reduced().check()
        out = x.local.parts[0].new_empty(x.shape)
        at = [x.mesh.at(axes).parts for axes in x.dims]
        for rank, part in enumerate(x.local.parts):
            out[tuple(slice(i[rank] * n, (i[rank] + 1) * n) for i, n in zip(at, part.shape, strict=True))] = part
        return out

    @classmethod
    def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, mesh = f.__name__.strip("_"), next(a.mesh for a in pytree.tree_leaves(args) if isinstance(a, Sharded))
        args = pytree.tree_map_only(Tensor, lambda x: replicate(mesh, x), args)
        rule = operator if isinstance(f, Operator) else RULES.get(name)
        try:
            if rule is None:
                raise ShardingError("this function has no sharding rule.")
            if name not in LINEAR:
                args = pytree.tree_map_only(Sharded, Sharded.reduced, args)
            return rule(f, *args, **(kwargs or {}))
        except ShardingError as error:
            shown = ", ".join(str(a) if isinstance(a, Sharded | str | int | float) else type(a).__name__ for a in args)
            raise ShardingError(f"{name}({shown}): {error}") from None


def replicate(mesh: Mesh, x: Tensor) -> Sharded:
    return Sharded(Local(mesh, [x] * (1 if x.device.type == "meta" else len(mesh.ranks))), [()] * x.ndim)


def shard(mesh: Mesh, x: Tensor, axes: str) -> Sharded:
    """A tensor placed by the logical axes of its dimensions: `"heads key embed"`."""
    return constrain(None, replicate(mesh, x), *axes.split())


def place(mesh: Mesh, axes: Any, values: Any) -> Any:
    """A tree of tensors placed by a tree of specs or of axes."""
    return tree.map(lambda a, x: shard(mesh, x, a if isinstance(a, str) else " ".join(a.axes)), axes, values)


def align(values: Sequence[Sharded], letters: Sequence[Sequence[Any]]) -> tuple[list[Sharded], dict[Any, MeshAxes]]:
    """Dimensions of one letter split alike, by slicing where some are not split; and the mesh axes of each letter."""
    values, axes = list(values), {}
    for value, names in zip(values, letters, strict=True):
        for name, dim in zip(names, value.dims, strict=True):
            axes[name] = max(axes.get(name, ()), dim, key=len)
    for i, names in enumerate(letters):
        for d, name in enumerate(names):
            if values[i].shape[d] > 1:  # size 1 is broadcast
                values[i] = values[i].split(d, axes[name])
    return values, axes


def operator(f: Operator, *args: Any) -> Any:
    """An operator by its sharding string: letters are split alike, one that no result has leaves a partial sum."""
    ins, outs = ([group.split() for group in side.split(",")] for side in f.sharding.split("->"))
    first = args[0][0] if isinstance(args[0], list) else args[0]
    dots = [str(i) for i in range(first.ndim - len(ins[0]) + 1)]
    ins, outs = ([[x for n in group for x in (dots if n == "..." else [n])] for group in side] for side in (ins, outs))
    lists = [(i, len(a)) for i, a in enumerate(args) if isinstance(a, list)]
    for i, count in reversed(lists):  # the group of a list is that of each of its tensors
        args, ins = (*args[:i], *args[i], *args[i + 1 :]), [*ins[:i], *[ins[i]] * count, *ins[i + 1 :]]
    values, axes = align(args[: len(ins)], ins)
    for name in f.whole:
        found, wanted = axes.get(name, ()), axes["b"] if name in POOLS else ()
        if found != wanted:
            where = f"is split over {found or None}, and has to be over {wanted or None}"
            raise ShardingError(f"{name!r} of {f.sharding!r} {where}.")
    kept = {"b", *POOLS}.union(*outs)  # rows are never summed: they are in their pools, and pools in their rows
    partial = [a for n in axes if n not in kept for a in axes[n]]
    local: list[Any] = [v.local for v in values]
    for i, count in lists:
        local[i : i + count] = [local[i : i + count]]
    y = each(f, *local, *args[len(ins) :])
    many = y if isinstance(y, tuple) else (y,)
    made = tuple(Sharded(y, [axes.get(n, ()) for n in names], partial) for y, names in zip(many, outs, strict=True))
    return made if isinstance(y, tuple) else made[0]


def elementwise(f: Any, *args: Any, **kwargs: Any) -> Sharded:
    values = [a for a in args if isinstance(a, Sharded)]
    if len(values) == 1 or len({v.partial for v in values}) > 1:
        values = [v.reduced() for v in values]
    ndim = max(v.ndim for v in values)
    values, axes = align(values, [range(ndim - v.ndim, ndim) for v in values])
    rest = iter(values)
    y = each(f, *(next(rest).local if isinstance(a, Sharded) else a for a in args), **kwargs)
    return Sharded(y, [axes[i] for i in range(ndim)], values[0].partial)


def einsum(f: Any, equation: str, *operands: Sharded) -> Sharded:
    groups, result = equation.split("->")
    values, axes = align(operands, groups.split(","))
    partial = [a for n in axes if n not in result for a in axes[n]]
    return Sharded(each(f, equation, *(v.local for v in values)), [axes[n] for n in result], partial)


def unsplit(x: Sharded, *dims: int) -> None:
    for d in dims:
        if x.dims[d]:
            raise ShardingError(f"dimension {d} of {x} may not be split here; keep it a dimension of its own.")


def flatten(f: Any, x: Sharded, start: int, end: int) -> Sharded:
    unsplit(x, *range(start + 1, end + 1))
    return Sharded(each(f, x.local, start, end), (*x.dims[: start + 1], *x.dims[end + 1 :]), x.partial)


def unflatten(f: Any, x: Sharded, dim: int, sizes: Sequence[int]) -> Sharded:
    ways = x.mesh.size(x.dims[dim])
    if sizes[0] % ways:
        raise ShardingError(f"size {sizes[0]} is not divisible by {'*'.join(x.dims[dim])}={ways}.")
    y = each(f, x.local, dim, (sizes[0] // ways, *sizes[1:]))
    return Sharded(y, x.dims_with(dim, x.dims[dim], *[()] * (len(sizes) - 1)), x.partial)


def getitem(f: Any, x: Sharded, index: Any) -> Sharded:
    index = list(index) if isinstance(index, tuple) else [index]
    if not all(i is None or i is ... or isinstance(i, slice) for i in index):
        raise ShardingError("an index may have slices and None; use gather for others.")
    at = index.index(...) if ... in index else len(index)
    index[at : at + 1] = [slice(None)] * (x.ndim - sum(isinstance(i, slice) for i in index))
    dims = iter(range(x.ndim))
    old = [None if i is None else next(dims) for i in index]
    unsplit(x, *(d for i, d in zip(index, old, strict=True) if d is not None and i != slice(None)))
    return Sharded(each(f, x.local, tuple(index)), [() if d is None else x.dims[d] for d in old], x.partial)


def cat(f: Any, xs: Sequence[Sharded], dim: int = 0) -> Sharded:
    names = [[d if d != dim % x.ndim else (d, i) for d in range(x.ndim)] for i, x in enumerate(xs)]
    values, axes = align(xs, names)
    for x in values:
        unsplit(x, dim)
    return Sharded(each(f, [x.local for x in values], dim), [axes[n] for n in names[0]])


def expand(f: Any, x: Sharded, *sizes: int) -> Sharded:
    return Sharded(each(f, x.local, *(-1 if d else n for n, d in zip(sizes, x.dims, strict=True))), x.dims, x.partial)


def gather(f: Any, x: Sharded, dim: int, index: Sharded) -> Sharded:
    """Linear in `x`: a pending sum stays pending, and is taken of what was gathered."""
    names = [[i if i != dim else side for i in range(x.ndim)] for side in ("from", "to")]
    (x, index), axes = align((x, index.reduced()), names)
    unsplit(x, dim)
    return Sharded(each(f, x.local, dim, index.local), [axes[n] for n in names[1]], x.partial)


def embedding(f: Any, ids: Sharded, weight: Sharded, *_: Any, **__: Any) -> Sharded:
    """Each rank looks up the tokens it has: rows of the others' are zeros, the sum is pending."""

    def look(ids: Tensor, weight: Tensor, at: int) -> Tensor:
        own = ids - at * len(weight)
        inside = (own >= 0) & (own < len(weight))
        return f(torch.where(inside, own, 0), weight) * inside[..., None]

    y = each(look, ids.local, weight.local, weight.mesh.at(weight.dims[0]))
    return Sharded(y, (*ids.dims, *weight.dims[1:]), weight.dims[0])


def constrain(_: Any, x: Sharded, *names: str | None) -> Sharded:
    """All-gather and slice as the wanted placement asks; without either, a pending sum stays pending."""
    want = [x.mesh.on(n) for n in names]
    if len(want) != x.ndim:
        raise ShardingError(f"{len(want)} axes for {x}.")
    for d, axes in enumerate(want) if list(x.dims) != want else ():
        x, kept = x.reduced(), x.dims[d]
        while axes[: len(kept)] != kept:
            kept = kept[:-1]
        if kept != x.dims[d]:
            join = lambda xs, d=d: [torch.cat(xs, d)] * len(xs)  # noqa: E731
            x = Sharded(x.mesh.collective("all_gather", x.dims[d][len(kept) :], x.local, join), x.dims_with(d, kept))
    for d, axes in enumerate(want):  # after all that had to be gathered
        x = x.split(d, axes)
    return x


def shard_map(_: Any, body: Any, in_axes: Any, out_axes: Any, *args: Sharded) -> Any:
    placed = [constrain(None, x, *names) for x, names in zip(args, in_axes, strict=True)]
    out = body(*(x.local for x in placed))
    many, axes = (out, out_axes) if isinstance(out, tuple) else ((out,), (out_axes,))
    made = [Sharded(y, [y.mesh.on(n) for n in names], y.pending).check() for y, names in zip(many, axes, strict=True)]
    return tuple(made) if isinstance(out, tuple) else made[0]


LINEAR = {"add", "radd", "sub", "flatten", "unflatten", "getitem", "gather", "constrain", "expand"}
ELEMENTWISE = ("add", "radd", "sub", "rsub", "mul", "rmul", "silu", "gelu", "sigmoid", "clamp", "float", "double", "to")
RULES: dict[str, Callable[..., Any]] = dict.fromkeys(ELEMENTWISE, elementwise)
RULES |= {"einsum": einsum, "flatten": flatten, "unflatten": unflatten, "getitem": getitem, "expand": expand}
RULES |= {"cat": cat, "gather": gather, "embedding": embedding, "constrain": constrain, "shard_map": shard_map}
