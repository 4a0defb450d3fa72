"""The lowering room `ge`: what an operator's lowering sees. It makes GE nodes in the graph being converted.

`ge.RmsNorm(x, weight, epsilon=1e-6)` is torchair's helper for the GE operator of that name; `ge.own(...)` makes a node
of a type that has none. Values are torchair's tensors: edges of the graph. A helper's result has no shape until the
whole lowering is done (the results of the lowered call get theirs from the fake) or until shapes are inferred; the
room's own `cast`, `reshape`, `broadcast`, `linear` and `const` give theirs at once.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kimi_graph.errors import CompileError
from kimi_graph.ops.offers import Offer

from .ge_proto import Dtype, describe, describe_tiled, fill_attr, tensor_value
from .prototypes import find
from .recipe import Step
from .targets import PROVIDERS_DEFAULT
from .torchair_host import Host
from .weight_formats import Packed

Value = Any  # torchair's Tensor: an edge of the graph

CAUSAL_MASK = "causal_mask"
OWN_INDEX = "own_index."  # begins the names of inputs that say where a rank stands
CAUSAL_MASK_SIZE = 2048  # of CANN's compressed masks, whatever the lengths


@dataclass(frozen=True)
class Choice:
    """Which operator does what, and why not another.

    Attributes:
        kind: what is computed, in words. operator: GE operator types. reason: in words.
        source: file and line of the layer that asked for it, "" where not known.
        provider: whose operators they are, see `targets.PROVIDERS`.
    """

    kind: str
    operator: str
    reason: str
    source: str = ""
    provider: str = "builtin"

    @property
    def types(self) -> tuple[str, ...]:
        """The operator types one by one."""
        return tuple(self.operator.split(", "))


Recipe = tuple[str, tuple[Step, ...]]  # a parameter, and the steps that make a weight of it


@dataclass
class Weights:
    """The weights of the graph being converted.

    Attributes:
        recipes: by input. form: of the parameters that `packed` knows ("plain", "mxfp4", ..., see `weight_formats`).
        packed: inputs that hold a parameter in that form, by what an operator calls them; empty: it is kept plain.
        made: recipes of inputs that lowerings have added.
    """

    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    form: str = "plain"
    packed: Callable[[str], Mapping[str, Packed]] = lambda parameter: {}
    made: dict[str, Recipe] = field(default_factory=dict)


@dataclass
class Room:
    """Lowering room of one graph.

    Attributes:
        target, cann: what the graph is for; a lowering may choose by them.
        result: meta tensor, or a list of them: what the lowered call gives.
        source: file and line of the call being lowered.
        transposed: by edge, the matrix it is the transpose of. reshaped: by edge, the value it is a Reshape of.
        placed: by edge, where copies of rows went that ranks share out (`parallel.experts`).
        calls: by edge, the traced call whose only result it is: its name, and its arguments.
        extra_inputs: inputs that lowerings have added, by name.
        weights: see `Weights`.
        choices: what lowerings say they chose, in order, each once.
    """

    host: Host
    target: Any
    cann: str
    result: Any = None
    source: str = ""
    transposed: dict[str, Value] = field(default_factory=dict)
    reshaped: dict[str, Value] = field(default_factory=dict)
    placed: dict[str, Value] = field(default_factory=dict)
    calls: dict[str, tuple[str, list[Any]]] = field(default_factory=dict)
    extra_inputs: dict[str, Value] = field(default_factory=dict)
    choices: dict[Choice, None] = field(default_factory=dict)
    weights: Weights = field(default_factory=Weights)
    _made: dict[Any, Value] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """torchair's helper for the GE operator `name`; optional inputs that are not given are None.

        Raises:
            CompileError: no such operator.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        return _helper(self.host, name)

    # ---- choosing ----

    @property
    def soc(self) -> str:
        """The target's chip family: "a2", "a3" or "950"."""
        return self.target.soc

    def has(self, release: str) -> bool:
        """Whether the graph is for this CANN release or a later one."""
        return version(self.cann) >= version(release)

    def chose(self, kind: str, operator: str, reason: str, provider: str = "builtin") -> None:
        """Remember which operator was taken for what, and why; see `Choice`."""
        self.choices.setdefault(Choice(kind, operator, reason, self.source, provider))

    def serve(self, kind: str, offers: Sequence[Offer], *args: Any) -> Any:
        """Lower by the first offer that can, in the order of the target's providers; by default, in the order given.

        Raises:
            CompileError: none can; why each cannot.
        """
        passed: list[str] = []
        for offer in asked(offers, self.target):
            why = not_there(offer, self.target) or offer.refuses(self, *args)
            if not why:
                reason = offer.reason + offer.costs(self, *args)
                self.chose(kind, offer.operator, "; ".join([reason, *passed]), offer.provider)
                return offer.make(self, *args)
            passed.append(f"{offer.operator} of {offer.provider}: {why}")
        left = sorted({o.provider for o in offers} - set(self.target.providers))
        more = f" --providers does not name {', '.join(left)}, who might." if left else ""
        raise CompileError(f"{kind}: nobody serves it ({'; '.join(passed) or 'nobody was asked'}).{more}")

    # ---- what is known of a value ----

    def shape(self, x: Value) -> tuple[int, ...]:
        """Shape of an argument, or of a value the room made."""
        return tuple(self._known(x).shape)

    def dtype(self, x: Value) -> torch.dtype:
        """torch's dtype of an argument, or of a value the room made."""
        return self._known(x).dtype

    def _known(self, x: Value) -> torch.Tensor:
        assert x.meta is not None, f"{x.tensor} ({x.node.type}): shape and dtype of an inner value are not known yet"
        return x.meta

    def mark(self, x: Value, shape: Iterable[int], dtype: torch.dtype) -> Value:
        """Say what shape and dtype a value has. Gives the value back."""
        meta = torch.empty(tuple(shape), dtype=dtype, device="meta")
        x.set_meta(meta)
        describe(x.desc, meta.shape, dtype)
        return x

    # ---- values ----

    def const(self, values: Any, dtype: torch.dtype) -> Value:
        """A constant: a number or (nested) list of numbers."""
        made = self.host.ge.Const(values, dtype=Dtype.of_torch(dtype).ge)
        return self.mark(made, torch.tensor(values).shape, dtype)

    def once(self, key: Any, make: Callable[[], Value]) -> Value:
        """A value made when it is first asked for: values never change, so equal ones are one."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def cast(self, x: Value, dtype: torch.dtype) -> Value:
        """`x` in another dtype; itself where it has that dtype."""
        if self.dtype(x) == dtype:
            return x

        def make() -> Value:
            return self.mark(self.host.ge.Cast(x, dst_type=Dtype.of_torch(dtype).ge), self.shape(x), dtype)

        return self.once(("Cast", x.tensor, dtype), make)

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """`x` in another shape (no -1); itself where it has that shape. A Reshape of a Reshape is one.

        Of a constant it is another constant.
        """
        if x.meta is None:
            return self.host.ge.Reshape(x, self.const(list(shape), torch.int64))
        x = self.reshaped.get(x.tensor, x)
        if self.shape(x) == tuple(shape):
            return x

        def make() -> Value:
            if x.node.type == "Const":  # no node works on constants alone
                return self.const(tensor_value(x.node.attr["value"].t).reshape(tuple(shape)).tolist(), self.dtype(x))
            made = self.host.ge.Reshape(x, self.const(list(shape), torch.int64))
            self.reshaped[made.tensor] = x
            return self.mark(made, shape, self.dtype(x))

        return self.once(("Reshape", x.tensor, tuple(shape)), make)

    def broadcast(self, x: Value, shape: Sequence[int]) -> Value:
        """`x` repeated along dimensions of size one."""
        if self.shape(x) == tuple(shape):
            return x
        return self.mark(self.host.ge.BroadcastTo(x, self.const(list(shape), torch.int64)), shape, self.dtype(x))

    def number(self, dtype: torch.dtype) -> int:
        """GE's number of a dtype, as attributes have it."""
        return Dtype.of_torch(dtype).ge

    def pad(self, x: Value, dim: int, size: int, value: float = 0.0) -> Value:
        """`x` with zeros, or `value`, after it along `dim`, up to `size`; itself where it has that size."""
        shape = list(self.shape(x))
        added, shape[dim] = size - shape[dim], size
        assert added >= 0, (dim, size, self.shape(x))
        if not added:
            return x
        sides = [0] * (2 * len(shape))
        sides[2 * (dim % len(shape)) + 1] = added
        filler = () if value == 0 else (self.const(value, self.dtype(x)),)  # zeros where no value is given
        made = self.PadV3(x, self.const(sides, torch.int64), *filler)
        return self.mark(made, shape, self.dtype(x))

    def first(self, x: Value, dim: int, size: int) -> Value:
        """The first `size` elements along `dim`; `x` itself where it has no more."""
        shape = list(self.shape(x))
        if shape[dim] == size:
            return x
        shape[dim] = size
        made = self.Slice(x, self.const([0] * len(shape), torch.int64), self.const(shape, torch.int64))
        return self.mark(made, shape, self.dtype(x))

    def concat(self, values: Sequence[Value], dim: int) -> Value:
        """Values one after another along a dimension counted from the front."""
        shape = list(self.shape(values[0]))
        shape[dim] = sum(self.shape(v)[dim] for v in values)
        made = self.ConcatV2(list(values), self.const(dim, torch.int64), N=len(values))
        return self.mark(made, shape, self.dtype(values[0]))

    def linear(self, x: Value, weight: Value) -> Value:
        """`[M, K]` times `[N, K]` transposed: `[M, N]`; the weight is read as it is stored."""
        rows, columns = self.shape(x)[0], self.shape(weight)[0]
        made = self.MatMul(x, weight, transpose_x1=False, transpose_x2=True)
        return self.mark(made, (rows, columns), self.dtype(x))

    def declare(self, x: Value, shape: Sequence[int]) -> Value:
        """Give a graph input another shape with as many elements: the memory is the same, no node is made."""
        assert x.node.type == "Data", (
            f"{x.tensor}: only an input of the graph can be declared otherwise, not {x.node.type}"
        )
        assert torch.Size(shape).numel() == torch.Size(self.shape(x)).numel(), (shape, self.shape(x))
        dtype = self.dtype(x)
        describe(x.node.input_desc[0], tuple(shape), dtype)
        return self.mark(self.host.graph.Tensor(x.node), shape, dtype)

    def causal_mask(self) -> Value:
        """Input of the graph: bool `[2048, 2048]`, true where a key is after the query."""
        if CAUSAL_MASK not in self.extra_inputs:
            size = (CAUSAL_MASK_SIZE, CAUSAL_MASK_SIZE)
            self.extra_inputs[CAUSAL_MASK] = self.input(CAUSAL_MASK, size, torch.bool)
        return self.extra_inputs[CAUSAL_MASK]

    def own_index(self, axes: str, times: int, dtype: torch.dtype) -> Value:
        """Where a rank stands along mesh axes, times a number: `[1]`.

        An input of the graph, `own_index.<axes>`: the graph and its file are the same for every rank.
        """
        name = f"{OWN_INDEX}{axes.replace(',', '.')}"
        if name not in self.extra_inputs:
            self.extra_inputs[name] = self.input(name, (1,), torch.int64)
        index = self.cast(self.extra_inputs[name], dtype)
        if times == 1:
            return index
        return self.once(
            (name, times, dtype), lambda: self.mark(self.Mul(index, self.const([times], dtype)), (1,), dtype)
        )

    def input(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Value:
        """A new input of the graph, after those there are."""
        index = self.host.graph.get_default_ge_graph().num_inputs
        number = Dtype.of_torch(dtype).ge
        made = self.host.ge.Data(index=index, dtype=number, shape=list(shape), placement="NPU", node_name=name)
        return self.mark(made, shape, dtype)

    def packed(self, weight: Value) -> dict[str, Value]:
        """Inputs that hold a weight in the form it is kept in, by name; empty where that is the weight itself."""
        name = weight.node.name
        if name not in self.weights.recipes:
            return {}
        parameter, steps = self.weights.recipes[name]
        packed = self.weights.packed(parameter)
        assert not packed or all(s.kind == "view" for s in steps), f"{parameter} is kept packed and read by {steps}"
        return {part: self._packed_input(parameter, p) for part, p in packed.items()}

    def _packed_input(self, parameter: str, p: Packed) -> Value:
        def describe_it(made: Value) -> None:
            node, dtype = made.node, p.dtype
            for desc in (*node.input_desc, *node.output_desc):
                describe_tiled(desc, p.shape, dtype) if p.tiled else describe(desc, p.shape, dtype)
            if p.tiled:
                node.attr["_enable_storage_format_spread"].b = False

        return self._weight_input(parameter, p.steps, p.shape, p.dtype.held, describe_it)

    def _weight_input(
        self,
        parameter: str,
        steps: tuple[Step, ...],
        shape: Sequence[int],
        dtype: torch.dtype,
        finish: Callable[[Value], None] = lambda made: None,
    ) -> Value:
        """An input that holds what a recipe makes of a parameter; one, however often it is asked for."""
        name = ".".join([parameter, *(s.short() for s in steps if s.kind != "view")])
        if name not in self.extra_inputs:
            self.weights.made[name] = (parameter, steps)
            self.extra_inputs[name] = self.input(name, shape, dtype)
            finish(self.extra_inputs[name])
        return self.extra_inputs[name]

    def weight_as(self, weight: Value, dtype: torch.dtype, *, taken: tuple[int, int] | None = None) -> Value:
        """A weight in another dtype, made by its recipe: no node may work on a weight alone. What is none is cast.

        Args:
            taken: a dimension and a place in it: only that, without the dimension.
        """
        shape = list(self.shape(weight))
        steps: tuple[Step, ...] = ()
        if taken is not None:
            dim, at = taken
            del shape[dim]
            steps = (Step("slice", (dim, at, at + 1)), Step("view", tuple(shape)))
        if self.dtype(weight) != dtype:
            steps += (Step("cast", (str(dtype).removeprefix("torch."),)),)

        def by_nodes() -> Value:
            cut = weight if taken is None else self.reshape(self.cut(weight, *taken, 1), shape)
            return self.cast(cut, dtype)

        return self.of_weight(weight, steps, shape, dtype, by_nodes) if steps else weight

    def of_weight(
        self,
        weight: Value,
        steps: tuple[Step, ...],
        shape: Sequence[int],
        dtype: torch.dtype,
        by_nodes: Callable[[], Value],
    ) -> Value:
        """What recipe steps make of a weight; what nodes make of a value that is none."""
        known = self.weights.recipes.get(weight.node.name)
        if known is None:
            return by_nodes()
        return self._weight_input(known[0], (*known[1], *steps), shape, dtype)

    def exp_of(self, weight: Value, shape: Sequence[int], negative: bool = False) -> Value:
        """The exponential of a weight in another shape, or minus that."""
        steps = (Step("exp"), *((Step("neg"),) if negative else ()), Step("view", tuple(shape)))

        def by_nodes() -> Value:
            made = self.Exp(weight)
            made = self.mark(self.Neg(made) if negative else made, self.shape(weight), self.dtype(weight))
            return self.reshape(made, shape)

        return self.of_weight(weight, steps, shape, self.dtype(weight), by_nodes)

    def made_of(self, x: Value, call: str) -> list[Any] | None:
        """The arguments of the call that gave a value, where that is a call of this name (`kimi.l2_norm`)."""
        name, args = self.calls.get(x.tensor, ("", []))
        return args if name == call else None

    def cut(self, x: Value, dim: int, start: int, size: int) -> Value:
        """`size` elements of `x` along `dim`, from `start` on."""
        shape = list(self.shape(x))
        if size == shape[dim]:
            return x
        bounds = (self.const([n], torch.int64) for n in (start, start + size, dim, 1))
        begin, end, axis, stride = bounds
        shape[dim] = size
        made = self.StridedSliceV2(x, begin, end, axes=axis, strides=stride)
        return self.mark(made, shape, self.dtype(x))

    def own(self, op_type: str, inputs: Mapping[str, Any], outputs: Sequence[str], attrs: Mapping[str, Any]) -> Any:
        """A node of a type without a helper.

        Args:
            inputs: by name, in the prototype's order; None: an optional input that is not given; a list: a dynamic one.
            outputs: names in order. An output with the name of an input is that input, written in place.
            attrs: Python values by name, see `fill_attr`.

        Returns:
            The output, or a tuple of them.
        """
        made = self.host.ir.ge_op(op_type, inputs=dict(inputs), outputs=list(outputs))
        node = (made[0] if isinstance(made, tuple) else made).node
        for name, value in attrs.items():
            fill_attr(node.attr[name], value)
        return made


def version(release: str) -> tuple[int, ...]:
    """`"9.1"` as numbers that compare."""
    return tuple(map(int, release.split(".")))


def asked(offers: Sequence[Offer], target: Any) -> list[Offer]:
    """The offers of a target's providers in their order, in the default order as they are listed.

    Before all others stand those that are to serve in place of what it avoids.
    """
    order: tuple[str, ...] = target.providers
    found = [offer for offer in offers if offer.provider in order]
    if order != PROVIDERS_DEFAULT:
        found.sort(key=lambda o: order.index(o.provider))
    avoided = target.avoided
    first = {avoided[t] for o in found for t in o.operator.split(", ") if avoided.get(t)}
    return sorted(found, key=lambda o: o.provider not in first)


def not_there(offer: Offer, target: Any) -> str:
    """Why a target has not an offer's operators; basic ones are everywhere."""
    for type_ in offer.operator.split(", "):
        if type_ in target.avoided:
            return f"{type_} is left out by --avoid"
        found = find(type_)
        if found is not None and target.soc not in found.socs:
            return f"no kernel for {target.soc}"
        if found is not None and not found.is_in(target.soc, target.cann):
            return f"built in since CANN {found.since.split()[0]}, this is for {target.cann}"
    return ""


@functools.lru_cache(maxsize=1024)
def _helper(host: Host, name: str) -> Callable[..., Any]:
    helper = getattr(host.ge, name, None)
    if helper is None or not inspect.isfunction(helper):
        raise CompileError(f"torchair of torch-npu {host.version} has no helper for a GE operator {name!r}; use own().")
    signature = inspect.signature(helper)
    required = [
        p.name for p in signature.parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]

    @functools.wraps(helper)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind_partial(*args, **kwargs).arguments
        except TypeError as error:
            raise CompileError(f"torchair of torch-npu {host.version}: its helper {name} has {error}.") from error
        return helper(**{n: None for n in required if n not in given}, **given)  # the helper refuses None where it must

    return call


# ---- ATen operators that torchair does not lower, or lowers badly ----------------------------------------------------
#
# Values in a graph never change, so copies and views that change nothing are the value itself.

aten = torch.ops.aten
ATEN: dict[Any, Callable[..., Any]] = {}


def _lowers(*overloads: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(f: Callable[..., Any]) -> Callable[..., Any]:
        ATEN.update(dict.fromkeys(overloads, f))
        return f

    return register


@_lowers(aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
def _same(ge: Room, x: Value, **ignored: Any) -> Value:
    return x


@_lowers(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(ge: Room, x: Value, shape: Sequence[int]) -> Value:
    return ge.reshape(x, ge.result.shape)  # `shape` may hold a -1


@_lowers(aten.slice.Tensor)
def _slice(ge: Room, x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Value:
    """torchair's converter writes the largest int32 for an open end; here the end is exact, so it can be checked."""
    shape = ge.shape(x)
    dim = dim % len(shape)
    bounds = slice(start, end, step).indices(shape[dim])
    if bounds == (0, shape[dim], 1):
        return x
    begin, stop, stride, axis = (ge.const([n], torch.int64) for n in (*bounds, dim))
    return ge.StridedSliceV2(x, begin, stop, axes=axis, strides=stride)


@_lowers(aten.permute.default)
def _permute(ge: Room, x: Value, dims: Sequence[int]) -> Value:
    """Moving dimensions of size one moves no element."""
    shape = ge.shape(x)
    order = [d % len(shape) for d in dims]
    long = [d for d in order if shape[d] != 1]
    if long == sorted(long):
        return ge.reshape(x, ge.result.shape)
    return ge.Transpose(x, ge.const(order, torch.int64))


@_lowers(aten.transpose.int)
def _swap(ge: Room, x: Value, first: int, second: int) -> Value:
    order = list(range(len(ge.shape(x))))
    order[first], order[second] = order[second], order[first]
    return _permute(ge, x, order)


@_lowers(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(ge: Room, *ends: int, **ignored: Any) -> Value:
    """A constant: GE would make the same numbers in every step."""
    return ge.const(list(range(*ends)), ge.result.dtype)


@_lowers(aten.eye.default, aten.eye.m)
def _eye(ge: Room, *sizes: int, **ignored: Any) -> Value:
    """A constant, as a range is; torchair's converter is not written."""
    return ge.const(torch.eye(*sizes).tolist(), ge.result.dtype)


@_lowers(aten.constant_pad_nd.default)
def _constant_pad(ge: Room, x: Value, sides: Sequence[int], value: float = 0) -> Value:
    """torchair's converter gives the value as a whole number, whatever the dtype of `x`."""
    before, after = ([0] * (len(ge.shape(x)) - len(sides) // 2) + list(sides[end::2])[::-1] for end in (0, 1))
    filler = () if value == 0 else (ge.const(value, ge.dtype(x)),)  # zeros where no value is given
    both = [n for pair in zip(before, after, strict=True) for n in pair]
    return ge.PadV3(x, ge.const(both, torch.int64), *filler)


@_lowers(aten.softplus.default)
def _softplus(ge: Room, x: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    return ge.SoftplusV2(x, beta=float(beta), threshold=float(threshold))


@_lowers(aten.gelu.default)
def _gelu(ge: Room, x: Value, *, approximate: str = "none") -> Value:
    """torchair's converter makes Gelu of both forms, whose prototype does not say which it is."""
    return ge.GeluV2(x, approximate=approximate)


@_lowers(aten.amax.default)
def _amax(ge: Room, x: Value, dims: Sequence[int] = (), keepdim: bool = False) -> Value:
    return ge.ReduceMax(x, ge.const(list(dims) or list(range(len(ge.shape(x)))), torch.int64), keep_dims=keepdim)


@_lowers(aten.clamp.default)
def _clamp(ge: Room, x: Value, least: float | None = None, most: float | None = None) -> Value:
    """torchair's converter clips at both ends, with the largest number of the dtype where an end is open."""
    dtype = ge.dtype(x)
    x = x if least is None else ge.Maximum(x, ge.const(least, dtype))
    return x if most is None else ge.Minimum(x, ge.const(most, dtype))


@_lowers(aten.mul.Tensor)
def _mul(ge: Room, x: Value, y: Any) -> Value:
    """torchair's converter casts the product to the dtype it has already."""
    dtype = ge.result.dtype
    if isinstance(y, (int, float)):
        if dtype in (torch.bfloat16, torch.float16):
            return ge.Muls(ge.cast(x, dtype), value=float(y))  # a constant of the tensor's dtype would round y
        return ge.Mul(ge.cast(x, dtype), ge.const(y, dtype))
    return ge.Mul(ge.cast(x, dtype), ge.cast(y, dtype))


@_lowers(aten.t.default)
def _transpose(ge: Room, x: Value) -> Value:
    if len(ge.shape(x)) < 2:
        return x
    made = ge.Transpose(x, ge.const([1, 0], torch.int64))
    ge.transposed[made.tensor] = x
    return made


@_lowers(aten.mm.default)
def _matmul(ge: Room, x: Value, y: Value) -> Value:
    """The product reads a transposed operand as it is stored; the Transpose is dead then and goes."""
    stored = ge.transposed.get(y.tensor)
    return ge.MatMul(x, y if stored is None else stored, transpose_x1=False, transpose_x2=stored is not None)
