"""A node of a GE graph, and what a semantics function may ask about it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from kimi_graph.compile.ge_proto import Dtype, OpDef, TensorDescriptor, attr_value, dtype_of, is_known, shape_of
from kimi_graph.errors import KimiGraphError

from .on_twin import running
from .registry import Semantics, argument_name

Edge = tuple[str, int]

# What torchair and GE write beside the prototype's attributes starts with an underscore. Nothing else may.
BOOKKEEPING = "_"


@dataclass(frozen=True)
class Node:
    """A node with its edges resolved.

    Attributes:
        semantics: None for Data, RefData and NetOutput.
        arguments: input name -> edge, None (optional, not given) or list of edges (dynamic), in prototype order.
        controls: names of nodes that must have run before.
        position: place in the file.
    """

    name: str
    type: str
    semantics: Semantics | None
    arguments: Mapping[str, Edge | list[Edge] | None]
    controls: tuple[str, ...]
    attrs: Mapping[str, Any]
    descs: tuple[TensorDescriptor, ...]
    position: int

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Data edges in order."""
        found: list[Edge] = []
        for given in self.arguments.values():
            found += given if isinstance(given, list) else [given] if given else []
        return tuple(found)


def attrs_of(op: OpDef) -> dict[str, Any]:
    """Attributes as Python values, bookkeeping left out. Raises ValueError where one cannot be read."""
    return {name: attr_value(attr) for name, attr in op.attr.items() if not name.startswith(BOOKKEEPING)}


@dataclass
class Selections:
    """Data-dependent choices (experts, top-k) by node name: recorded in one run, replayed in another.

    Two runs that differ only in rounding may choose differently, and then nothing after that is comparable.

    Attributes:
        own: what a replaying run would have chosen itself.
    """

    chosen: dict[str, Tensor] = field(default_factory=dict)
    replaying: bool = False
    own: dict[str, Tensor] = field(default_factory=dict)

    def replay(self) -> "Selections":
        """The same choices, to be used instead of computed ones."""
        return Selections(self.chosen, replaying=True)


class Op:
    """What a semantics function knows beside its inputs: its node's attributes, and whether floats are exact."""

    def __init__(
        self, node: Node, *, exact: bool, error: type[KimiGraphError], selections: Selections | None = None
    ) -> None:
        self.node, self.exact, self._error = node, exact, error
        self._selections = selections
        self._read: set[str] = set()

    # ---- attributes --------------------------------------------------------------------------------------------------

    def attr(self, name: str, default: Any) -> Any:
        """An attribute, or the prototype's default where the file has none."""
        self._read.add(name)
        found = self.node.attrs.get(name)
        if found is None:
            return default
        if default is not None and type(found) is not type(default):
            self.fail(f"attribute {name!r} is {found!r}, the prototype wants a {type(default).__name__}")
        return found

    def need(self, name: str, kind: type) -> Any:
        """A required attribute."""
        self._read.add(name)
        found = self.node.attrs.get(name)
        if type(found) is not kind:
            self.fail(f"attribute {name!r} is {found!r}, the prototype requires a {kind.__name__}")
        return found

    def expect(self, **supported: Any) -> None:
        """Attributes with one supported value, or a tuple of them with the prototype's default first."""
        for name, values in supported.items():
            self._read.add(name)
            allowed = values if isinstance(values, tuple) else (values,)
            found = self.node.attrs.get(name, allowed[0])
            if not any(type(found) is type(v) and found == v for v in allowed):
                self.fail(f"attribute {name!r} is {found!r}, supported is {' or '.join(map(repr, allowed))}")

    def must(self, **values: Any) -> None:
        """Attributes that must be there with this value."""
        for name, value in values.items():
            found = self.need(name, type(value))
            if found != value:
                self.fail(f"attribute {name!r} is {found!r}, supported is {value!r}")

    def all_attrs(self) -> Mapping[str, Any]:
        """Every attribute, for who reads them all."""
        self._read |= set(self.node.attrs)
        return self.node.attrs

    def check_all_read(self) -> None:
        """A changed or added attribute must not pass unnoticed."""
        left = sorted(set(self.node.attrs) - self._read)
        if left:
            shown = ", ".join(f"{name}={self.node.attrs[name]!r}" for name in left)
            self.fail(f"attributes the executor does not interpret: {shown}")

    def dtype(self, name: str, default: int | None = None) -> torch.dtype:
        """torch's dtype of an attribute that names one; every float is float64 where floats are exact."""
        self._read.add(name)
        found = self.node.attrs.get(name, default)
        try:
            dtype = (found if isinstance(found, Dtype) else Dtype.of_ge(found)).torch_dtype
        except ValueError as error:
            self.fail(f"attribute {name!r}: {error}")
        return torch.float64 if self.exact and dtype.is_floating_point else dtype

    def dtype_of(self, value: Tensor) -> torch.dtype:
        """The dtype a constant has in this run."""
        return torch.float64 if self.exact and value.is_floating_point() else value.dtype

    # ---- inputs ------------------------------------------------------------------------------------------------------

    def ints(self, values: Tensor) -> list[int]:
        """The numbers of an input that decides shapes."""
        if values.is_meta:
            self.fail("an input that decides shapes is not made of constants")
        if values.is_floating_point():
            self.fail(f"an input that decides shapes has dtype {values.dtype}")
        return [int(v) for v in values.reshape(-1).tolist()]

    def dim(self, axis: int, rank: int) -> int:
        """An axis counted from the front; one that is not among `rank` dimensions is refused."""
        self.require(-rank <= axis < rank, f"axis {axis} of {rank} dimensions")
        return axis % rank

    def number(self, value: Tensor) -> int:
        """A single number that decides shapes."""
        found = self.ints(value)
        if len(found) != 1:
            self.fail(f"an input that stands for one number has {len(found)}")
        return found[0]

    def same_dtype(self, *tensors: Tensor) -> None:
        """GE's kernels do not promote."""
        if len({t.dtype for t in tensors}) > 1:
            self.fail(f"inputs of one dtype expected, found {', '.join(str(t.dtype) for t in tensors)}")

    def of_dtype(self, *dtypes: torch.dtype, **tensors: Tensor | None) -> None:
        """Inputs must have one of the dtypes; where floats are exact, float64 stands for any float."""
        for name, tensor in tensors.items():
            exact = self.exact and tensor is not None and tensor.dtype == torch.float64
            floats = any(map(holds_floats, dtypes))
            if tensor is not None and tensor.dtype not in dtypes and not (exact and floats):
                self.fail(f"input {name!r} is {tensor.dtype}, supported is {' or '.join(map(str, dtypes))}")

    def absent(self, **tensors: Tensor | None) -> None:
        """Inputs this executor has no semantics for."""
        for name, tensor in tensors.items():
            if tensor is not None:
                self.fail(f"input {name!r} is given; supported is none")

    def require(self, condition: bool, what: str) -> None:
        """Fail with `what` (found and expected) unless the condition holds."""
        if not condition:
            self.fail(what)

    def select(self, computed: Tensor) -> Tensor:
        """A choice: recorded, or replaced by the one of the recorded run."""
        if self._selections is None:
            return computed
        if not self._selections.replaying:
            self._selections.chosen[self.node.name] = computed.clone()
            return computed
        recorded = self._selections.chosen.get(self.node.name)
        if recorded is None or recorded.shape != computed.shape:
            self.fail("no choice of this shape was recorded for this node")
        self._selections.own[self.node.name] = computed
        return recorded.to(computed.dtype)

    def fail(self, what: str) -> NoReturn:
        """Raise with the node's name and type."""
        raise self._error(f"{self.node.name} ({self.node.type}): {what}.")


def evaluate(op: Op, arguments: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Outputs of the node, in order, checked against their number and in-place use."""
    semantics = op.node.semantics
    assert semantics is not None
    by_parameter, kernels = _parameters(op, arguments), running()
    try:
        if kernels is not None and kernels.serve(op, arguments):
            made = kernels.run(op, arguments)
        else:
            made = semantics.run(op, **by_parameter)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        shapes = ", ".join(f"{name} {_shape(given)}" for name, given in arguments.items() if given is not None)
        op.fail(f"{str(error).splitlines()[0]} [{shapes}]")
    outputs = tuple(made) if isinstance(made, (tuple, list)) else (made,)
    op.check_all_read()
    op.require(
        len(outputs) == len(op.node.descs), f"has {len(op.node.descs)} outputs, its operator type gives {len(outputs)}"
    )
    for name in semantics.in_place:
        assert outputs[semantics.outputs.index(name)] is arguments[name], f"{op.node.type}: {name} is not in place"
    return outputs


def _parameters(op: Op, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by Python parameter; inputs the function has no parameter for must be absent."""
    semantics = op.node.semantics
    assert semantics is not None
    code = semantics.run.__code__
    taken = set(code.co_varnames[: code.co_argcount])
    chosen = {}
    for name, given in arguments.items():
        parameter = argument_name(name)
        if parameter in taken:
            chosen[parameter] = given
        elif given is not None and not _is_empty(given):
            op.fail(f"input {name!r} is given; supported is none")
    return chosen


def _is_empty(given: Any) -> bool:
    """torchair feeds a dynamic input that is not used with one tensor without elements."""
    return isinstance(given, list) and all(t.numel() == 0 for t in given)


def _shape(given: Tensor | list[Tensor]) -> str:
    return str([list(t.shape) for t in given]) if isinstance(given, list) else str(list(given.shape))


def holds_floats(dtype: torch.dtype) -> bool:
    """Whether a tensor of this dtype holds numbers that were rounded to it, so that an exact run has it in float64.

    int8 does: GE has it for quantised numbers and bytes of floats; what is counted or indexed has 32 bits or more.
    """
    return dtype.is_floating_point or dtype == torch.int8


def disagreement(desc: TensorDescriptor, value: Tensor, *, exact: bool) -> str | None:
    """How a tensor differs from its description, or None: shape, and dtype (only its class where floats are exact)."""
    if not is_known(desc):
        return None
    shape, dtype = shape_of(desc), dtype_of(desc)
    alike = dtype == value.dtype or (exact and holds_floats(dtype) and value.dtype == torch.float64)
    if shape == tuple(value.shape) and alike:
        return None
    return f"is {_text(value.shape, value.dtype)}, described as {_text(shape, dtype)}"


def _text(shape: Iterable[int], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


Arguments = Callable[[Edge], Tensor]


def gather_arguments(node: Node, value: Arguments) -> dict[str, Any]:
    """Input tensors by name."""
    found: dict[str, Any] = {}
    for name, given in node.arguments.items():
        if isinstance(given, list):
            found[name] = [value(edge) for edge in given]
        else:
            found[name] = None if given is None else value(given)
    return found
