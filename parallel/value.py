"""A global value on a mesh: what layer code computes with while one graph for all ranks is traced.

A `Sharded` value knows its global shape, the mesh axes that split each dimension, and the axes over which it is still a
pending sum (each rank has a summand). It holds one local tensor, a meta tensor of the recorder: what happens to that is
the graph. Torch functions and operators come here before they are decomposed and follow one rule each
(`rules_of_torch`).

The value is strict. By itself it finishes a pending sum, once and before the first use that is not linear, and slices
what is the same everywhere; both are exact and the second is free. Everything else is written (`constrain`,
`shard_map`) or is a `ShardingError` at the author's line. So no weight or cache is ever gathered silently.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from kimi_graph.errors import ShardingError

from . import collectives
from .mesh import Axes
from .rules import Rules
from .source import attributed, author_line

# ---- what answers for a tensor ---------------------------------------------------------------------------------------


class Value:
    """Not a tensor, but its methods and signs go the way of a tensor's: through `__torch_function__`."""

    local: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.local.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        return self.local.device

    @property
    def ndim(self) -> int:
        return self.local.ndim

    @property
    def is_meta(self) -> bool:
        return self.local.is_meta

    @property
    def mT(self) -> Any:  # noqa: N802 (torch's name)
        return self.transpose(-2, -1)

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Any:
        return iter(self.unbind(0))

    def __bool__(self) -> NoReturn:
        raise ShardingError(f"{author_line()}: the truth of {self} is not known while a graph is traced; use where().")

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not callable(getattr(Tensor, name, None)):
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return lambda *args, **kwargs: self.__torch_function__(getattr(Tensor, name), (), (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def _sign(name: str) -> Callable[..., Any]:
    return lambda self, *args: self.__torch_function__(getattr(Tensor, name), (), (self, *args))


SIGNS = """
    add radd sub rsub mul rmul truediv rtruediv floordiv mod pow rpow neg ge gt le lt eq ne and or xor invert
    getitem matmul
"""
for _name in SIGNS.split():
    setattr(Value, f"__{_name}__", _sign(f"__{_name}__"))


def name_of(f: Any) -> str:
    """What a torch function, method, sign or operator is called: `add` for `torch.add`, `Tensor.add` and `+`."""
    name = f.__name__
    return name.strip("_") if name.startswith("__") else name


def shown(values: Iterable[Any]) -> str:
    """Arguments as an error prints them."""

    def show(x: Any) -> str:
        if isinstance(x, (list, tuple)):
            return f"[{shown(x)}]"
        plain = x is None or isinstance(x, (Value, str, int, float, torch.dtype))
        return str(x) if plain else type(x).__name__

    return ", ".join(map(show, values))


class CallError(ShardingError):
    """A call that has no rule, or whose rule refuses: where, what, why. The innermost call is the one that is named."""

    def __init__(self, f: Any, args: Iterable[Any], error: object) -> None:
        where = author_line()
        super().__init__(f"{where + ': ' if where else ''}{name_of(f)}({shown(args)}): {error}")


# ---- the global value ------------------------------------------------------------------------------------------------


class Sharded(Value):
    """A global value.

    Attributes:
        rules, mesh: of the values it may be used with.
        local: what one rank has of it.
        dims: mesh axes that split each dimension, the first outermost.
        partial: mesh axes along which each rank has a summand only, in the mesh's order.
        source: line that made the pending sum.
        late: it may wait, see `annotate.summand`.

    Raises:
        ShardingError: a mesh axis is used twice.
    """

    def __init__(self, rules: Rules, local: Tensor, dims: Sequence[Axes], partial: Sequence[str] = ()) -> None:
        assert len(dims) == local.ndim, (dims, local.shape)
        self.rules, self.mesh, self.local = rules, rules.mesh, local
        self.dims = tuple(tuple(axes) for axes in dims)
        self.partial = tuple(a for a in self.mesh.axes if a in partial)
        self.source, self.late = author_line() if partial else "", False
        self._global = torch.Size(n * self.mesh.size(axes) for n, axes in zip(local.shape, self.dims, strict=True))
        self._reduced: Sharded | None = None
        used = [axis for axes in self.dims for axis in axes] + list(partial)
        twice = sorted({axis for axis in used if used.count(axis) > 1})
        if twice:
            raise ShardingError(
                f"the result {self} uses a mesh axis twice ({', '.join(twice)}); constrain(x, ...) one operand so that "
                f"only one dimension, or the sum, goes along it."
            )

    @property
    def shape(self) -> torch.Size:
        return self._global

    def __repr__(self) -> str:
        sizes = (f"{n}@{'*'.join(axes)}" if axes else str(n) for n, axes in zip(self._global, self.dims, strict=True))
        return f"[{', '.join(sizes)}]" + "".join(f"+{axis}" for axis in self.partial)

    def like(self, local: Tensor, dims: Sequence[Axes], partial: Sequence[str] = ()) -> "Sharded":
        """Another value on the same mesh; a sum that was pending here keeps the line that left it so."""
        made = Sharded(self.rules, local, dims, partial)
        if self.partial and self.partial == made.partial:
            made.source = self.source
        made.late = self.late and bool(self.partial)
        return made

    def dims_with(self, dim: int, *axes: Axes) -> tuple[Axes, ...]:
        """Mesh axes of each dimension, with others in place of dimension `dim`."""
        return (*self.dims[:dim], *axes, *self.dims[dim + 1 :])

    @property
    def waits(self) -> bool:
        """Whether it is a pending sum that may wait for a later one."""
        return self.late and bool(self.partial) and self._reduced is None

    # ---- movement ----

    def reduced(self) -> "Sharded":
        """Without a pending sum. It is taken once per value, and said to be of the line that left it pending."""
        if not self.partial:
            return self
        if self._reduced is None:
            with attributed(self.source):
                self._reduced = self.like(collectives.all_reduce(self.local, self.partial), self.dims)
        return self._reduced

    def sliced(self, dim: int, axes: Axes) -> "Sharded":
        """With `dim` split over `axes`: a slice where it is split over the first of them or none, else refused.

        Raises:
            ShardingError: the dimension is split over other axes.
        """
        have = self.dims[dim]
        if axes == have:
            return self
        if axes[: len(have)] != have:
            raise ShardingError(
                f"dimension {dim} of {self} is split over {' x '.join(have)}, and has to be over "
                f"{' x '.join(axes) or 'nothing'}; constrain(x, ...) moves it."
            )
        local = collectives.own_slice(self.mesh, self.local, axes[len(have) :], dim)
        return self.like(local, self.dims_with(dim, axes), self.partial)

    def gathered(self, dim: int, keep: int) -> "Sharded":
        """With `dim` split over only the first `keep` of its mesh axes."""
        axes = self.dims[dim]
        local = collectives.all_gather(self.mesh, self.local, axes[keep:], dim)
        return self.like(local, self.dims_with(dim, axes[:keep]), self.partial)

    def scattered(self, dim: int, axes: Axes) -> "Sharded":
        """With the pending sum over `axes` taken, of which each rank keeps a part along `dim`."""
        with attributed(self.source):
            local = collectives.reduce_scatter(self.mesh, self.local, axes, dim)
        rest = [axis for axis in self.partial if axis not in axes]
        return self.like(local, self.dims_with(dim, (*self.dims[dim], *axes)), rest)

    def exchanged(self, dim: int, to: int, axes: Axes) -> "Sharded":
        """With the last mesh axes of `dim` splitting dimension `to` instead."""
        local = collectives.all_to_all(self.mesh, self.local, axes, to, dim)
        dims = list(self.dims)
        dims[dim], dims[to] = dims[dim][: -len(axes)], (*dims[to], *axes)
        return self.like(local, dims, self.partial)

    def placed(self, wanted: Sequence[Axes]) -> "Sharded":
        """Moved to the mesh axes of `wanted`, by as little as that takes.

        A pending sum that ends up split is a reduce-scatter; one that neither is split nor has to be gathered stays
        pending. Mesh axes that go from one dimension to another are an all-to-all.
        """
        x = self if self._reduced is None else self._reduced
        for dim, axes in enumerate(wanted):
            lost = x.dims[dim][_common(x.dims[dim], axes) :]
            to = [d for d, have in enumerate(x.dims) if wanted[d] == (*have, *lost)]
            if lost and to:
                x = x.exchanged(dim, to[0], lost)
        for dim, axes in enumerate(wanted):
            new = axes[len(x.dims[dim]) :]
            if new and axes == (*x.dims[dim], *new) and set(new) <= set(x.partial):
                x = x.scattered(dim, new)
        for dim, axes in enumerate(wanted):
            keep = _common(x.dims[dim], axes)
            if keep < len(x.dims[dim]):
                x = x.reduced().gathered(dim, keep)
        if any(set(axes) & set(x.partial) for axes in wanted):
            x = x.reduced()
        for dim, axes in enumerate(wanted):  # after all that had to be gathered
            x = x.sliced(dim, axes)
        return x

    @classmethod
    def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call of a torch function or operator, by its rule."""
        kwargs = kwargs or {}
        found, linear = rule_of(f)
        try:
            args, kwargs = _global_values(args, kwargs)
            if found is None:
                raise ShardingError("it has no sharding rule; write it with functions that have one, or in shard_map.")
            _check_form(found, (f, *args), kwargs)
            if not linear:
                args, kwargs = pytree.tree_map_only(Sharded, Sharded.reduced, (args, kwargs))
            return found(f, *args, **kwargs)
        except CallError:
            raise
        except ShardingError as error:
            raise CallError(f, args, error) from None


def _check_form(found: "Rule", args: Any, kwargs: Any) -> None:
    """Refuse arguments that a rule does not know."""
    try:
        inspect.signature(found).bind(*args, **kwargs)
    except TypeError as error:
        raise ShardingError(f"its rule does not know this form: {error}.") from None


def _common(have: Axes, want: Axes) -> int:
    """How many mesh axes at the start are the same."""
    return next((i for i, (a, b) in enumerate(zip(have, want, strict=False)) if a != b), min(len(have), len(want)))


def _global_values(args: Any, kwargs: Any) -> Any:
    """Arguments with plain tensors as values that are the same on every rank."""
    first = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Sharded))
    for x in pytree.tree_leaves((args, kwargs)):
        if isinstance(x, Value) and not isinstance(x, Sharded):
            raise ShardingError(f"{x} is one device's part; a global value has to be an argument of the shard_map.")
    return pytree.tree_map_only(Tensor, lambda x: replicated(first.rules, x), (args, kwargs))


def replicated(rules: Rules, x: Tensor) -> Sharded:
    """A tensor that every rank has whole."""
    return Sharded(rules, x, [()] * x.ndim)


# ---- rules -----------------------------------------------------------------------------------------------------------

Rule = Callable[..., Any]
OPERATOR = "operator with a signature"
RULES: dict[str, tuple[Rule, bool]] = {}


def rule(*names: str, linear: bool = False) -> Callable[[Rule], Rule]:
    """Decorator: the rule of some functions, `f(function, *args, **kwargs)` on global values.

    Args:
        linear: the rule keeps pending sums, or takes them itself; others never see one.
    """

    def register(f: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = f, linear
        return f

    return register


def rule_of(f: Any) -> tuple[Rule | None, bool]:
    """The rule of a torch function, of something a layer says about placement, or of an operator."""
    return RULES.get(OPERATOR if hasattr(f, "sharding") else name_of(f), (None, False))
