"""Proof from a graph's file that every sum over ranks is taken once, and before the first use that is not linear.

Along a mesh axis a value is the same on all ranks, or each rank has its own. That is a summand, where a product went
over a dimension that the axis splits (`SUM`); rows of its own experts (`ROWS`), a summand once they are brought back;
words of its part of the vocabulary (`WORDS`), a summand once others' are zeros; or anything else (`PART`). The
manifest says what inputs, weights and states are; nodes are followed in order. So

* a sum over an axis along which nothing differs would count everything once a rank: it was taken before;
* a norm, a gate, attention of a summand would be of a part of the value;
* a summand with something added that every rank has would have it added once a rank;
* what leaves the graph, or is kept in a state, has to be the same along every axis that does not split it.

What was made a summand in another way (parts of attention that are merged) is a `PART`, of which only the first and the
last are proved. Source: `parallel/body.py` asks the same of layer code.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kimi_graph.errors import BundleError
from kimi_graph.parallel.collectives import group_axes
from kimi_graph.parallel.mesh import Axes

from .executor.registry import SEMANTICS
from .ge_proto import ModelDef, OpDef, data_edges, get_attr, split_edge
from .lower import OWN_INDEX
from .order import COLLECTIVE
from .places import group_of

PART, ROWS, WORDS, SUM = "a part", "rows of experts", "words", "a summand"
Along = dict[str, str]  # mesh axes along which ranks differ, and how

ADDED = frozenset({"Add", "AddV2", "ConcatD", "ConcatV2", "Pack", "Sub"})  # of one kind all, or none
SCALED = frozenset({  # linear in the first operand
    "BatchMatMul", "BroadcastTo", "Cast", "ExpandDims", "GatherV2", "Identity", "MatMul", "Muls", "Neg", "PadV3",
    "RealDiv", "ReduceSum", "Reshape", "Slice", "Split", "SplitV", "Squeeze", "StridedSlice", "StridedSliceV2",
    "TensorMove", "Transpose", "Unsqueeze",
})  # fmt: skip
PRODUCTS = {"MatMul": "transpose_x2", "BatchMatMul": "adj_x2", "GroupedMatmul": "transpose_weight"}


def check_sums(
    model: ModelDef, dims: Mapping[str, Sequence[Axes]], results: Sequence[tuple[str, Sequence[Axes]]]
) -> int:
    """Follow every value of a graph.

    Args:
        dims: mesh axes that split each dimension of an input, weight or state, by its name in the graph.
        results: the graph's outputs, in order: name and mesh axes of each dimension.

    Returns:
        how many collectives were followed.

    Raises:
        BundleError: the first node that does not do, with its operands.
    """
    ops, known, count = model.graph[0].op, {}, 0
    where = {op.name: op for op in ops}
    for op in ops:
        if op.type in ("Data", "RefData"):
            known[op.name] = _given(op.name, dims)
            continue
        reads = [split_edge(edge)[0] for edge in data_edges(op) if edge]
        if op.type == "NetOutput":
            for name, (result, axes) in zip(reads, results, strict=False):
                _check_left(f"{result} ({name})", known[name], axes)
            continue
        along = [known[name] for name in reads]
        try:
            known[op.name] = made = _rule(op)(op, along, dims)
        except BundleError as error:
            raise BundleError(f"{op.name} ({op.type}): {error}") from None
        count += op.type.startswith(COLLECTIVE)
        for state in _written(op, where):
            _check_left(f"{state}, written by {op.name},", made, dims[state])
    return count


def weight_dims(entry: Mapping[str, Any], made: Sequence[int], sizes: Mapping[str, int]) -> tuple[Axes, ...]:
    """Mesh axes of each dimension of a weight as a graph reads it.

    Args:
        entry: of the weight plan. made: shape in the graph. sizes: of the mesh axes.
    """
    over = [tuple(axes) for axes in entry["over"]]
    shape = [-(-n // math.prod(sizes[a] for a in axes)) for n, axes in zip(entry["shape"], over, strict=True)]
    for kind, *args in entry["steps"]:
        if kind in ("pack", "tile"):  # of experts, which are stacked
            return (over[0], *[()] * (len(made) - 1))
        if kind == "slice":
            shape[args[0]] = args[2] - args[1]
        elif kind == "permute":
            shape, over = ([of[d] for d in args] for of in (shape, over))
        elif kind == "view":
            shape, over = list(args), viewed(shape, over, args)
    return tuple(viewed(shape, over, made))


def viewed(shape: Sequence[int], over: Sequence[Axes], made: Sequence[int]) -> list[Axes]:
    """Mesh axes of each dimension of a view; a dimension of one element goes with such a one, else with the next."""
    found: list[Axes] = [()] * len(made)
    at, left = len(made) - 1, made[-1]
    for size, axes in zip(reversed(shape), reversed(over), strict=True):
        while at and left == 1 and (size > 1 or made[at - 1] == 1):
            at, left = at - 1, made[at - 1]
        found[at], left = (*axes, *found[at]), left // size
    return found


# ---- what a value is -------------------------------------------------------------------------------------------------


def _given(name: str, dims: Mapping[str, Sequence[Axes]]) -> Along:
    axes = name.removeprefix(OWN_INDEX).split(".") if name.startswith(OWN_INDEX) else _all(dims.get(name, ()))
    return dict.fromkeys(axes, PART)


def _all(dims: Iterable[Axes]) -> list[str]:
    return [axis for axes in dims for axis in axes]


def _together(along: Iterable[Along]) -> Along:
    """Of a value that is made of others: a part gives way to what is known better."""
    made: Along = {}
    for one in along:
        made |= {axis: made.get(axis, how) if how == PART else how for axis, how in one.items()}
    return made


def _sums(along: Along) -> set[str]:
    return {axis for axis, how in along.items() if how == SUM}


def _check_left(what: str, along: Along, dims: Sequence[Axes]) -> None:
    split = _all(dims)
    for axis, how in along.items():
        if how == SUM:
            raise BundleError(f"{what} is a summand along {axis}: the sum was not taken.")
        if axis not in split:
            raise BundleError(
                f"{what} is not the same along {axis}, which does not split it: a sum or a gather is missing."
            )


def _written(op: OpDef, ops: Mapping[str, OpDef]) -> Iterable[str]:
    """States that a node writes in place."""
    semantics = SEMANTICS.get(op.type)
    names = () if semantics is None else semantics.in_place
    for desc, edge in zip(op.input_desc, data_edges(op), strict=False):
        if desc.name in names and edge:
            node = ops[split_edge(edge)[0]]
            while node.type in ("Reshape", "Identity"):
                node = ops[split_edge(node.input[0])[0]]
            if node.type == "RefData":
                yield node.name


# ---- what a node makes of it -----------------------------------------------------------------------------------------

Rule = Callable[[OpDef, list[Along], Mapping[str, Sequence[Axes]]], Along]


def _rule(op: OpDef) -> Rule:
    if op.type.startswith("Hcom"):
        return _hcom
    if op.type in PRODUCTS:
        return _product
    if op.type in ADDED:
        return _added
    if op.type in SCALED or op.type == "Mul":
        return _scaled
    return {
        "MoeFinalizeRoutingV2": _brought_back,
        "MoeDistributeDispatchV2": _sent,
        "MoeDistributeCombineV2": _sent,
    }.get(op.type, _any)


def _any(op: OpDef, along: list[Along], dims: Any) -> Along:
    """Not linear: of whole values, or of parts, never of summands."""
    for one in along:
        if found := _sums(one):
            raise BundleError(f"reads a summand along {min(found)}; the sum has to be taken first.")
    return _together(along)


def _added(op: OpDef, along: list[Along], dims: Any) -> Along:
    for axis in sorted(set().union(*map(_sums, along))):
        if any(one.get(axis) != SUM for one in along):
            other = next((one[axis] for one in along if axis in one and one[axis] != SUM), "what every rank has")
            raise BundleError(f"puts a summand along {axis} together with {other}; the sum has to be taken first.")
    return _together(along)


def _scaled(op: OpDef, along: list[Along], dims: Any) -> Along:
    """Linear in one operand, the first; Mul in either."""
    for axis in sorted(set().union(*map(_sums, along))):
        holding = [i for i, one in enumerate(along) if axis in one]
        if len(holding) > 1 or (holding[0] and op.type != "Mul"):
            raise BundleError(f"is not linear in a summand along {axis}; the sum has to be taken first.")
    made = _together(along)
    if op.type == "Mul":
        return {axis: SUM if how == WORDS else how for axis, how in made.items()}
    weight = dims.get(split_edge(op.input[0])[0], ()) if op.type == "GatherV2" and op.input[0].startswith("p.") else ()
    return made | dict.fromkeys(weight[0] if weight else (), WORDS)


def _product(op: OpDef, along: list[Along], dims: Mapping[str, Sequence[Axes]]) -> Along:
    """A product over a dimension that is split is a summand."""
    names = [split_edge(edge)[0] for edge in data_edges(op) if edge]
    made = _scaled(op, along, dims)
    weight = dims.get(names[1]) if len(names) > 1 and names[1].startswith("p.") else None
    if weight is None:
        return made
    summed = weight[-1] if get_attr(op, PRODUCTS[op.type], False) else weight[-2] if len(weight) > 1 else ()
    made |= dict.fromkeys(summed, SUM)
    if op.type == "GroupedMatmul":
        made |= dict.fromkeys(weight[0], ROWS)
    return made


def _brought_back(op: OpDef, along: list[Along], dims: Any) -> Along:
    """Rows of a rank's own experts, weighed and added: a summand of what all experts make."""
    return {axis: SUM if how == ROWS else how for axis, how in _any(op, along, dims).items()}


def _sent(op: OpDef, along: list[Along], dims: Any) -> Along:
    """Rows to their experts and back: each rank has its own."""
    return _any(op, along, dims) | dict.fromkeys(group_axes(group_of(op)), PART)


def _hcom(op: OpDef, along: list[Along], dims: Any) -> Along:
    axes, x = group_axes(group_of(op)), _together(along)
    if "reduction" in op.attr:
        for axis in axes:
            if axis not in x:
                raise BundleError(f"takes the {get_attr(op, 'reduction')} along {axis}, where all ranks have the same.")
        if get_attr(op, "reduction") != "sum":
            _any(op, along, dims)
    elif found := _sums(x) & set(axes):
        raise BundleError(f"moves a summand along {min(found)}; the sum has to be taken first.")
    rest = {axis: how for axis, how in x.items() if axis not in axes}
    own = op.type in ("HcomReduceScatter", "HcomAllToAll", "HcomAllToAllV")
    return rest | (dict.fromkeys(axes, PART) if own else {})
