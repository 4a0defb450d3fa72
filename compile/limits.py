"""Limits of operators beyond dtypes: sizes, attributes that go together, shapes that must fit.

One function per operator type gives `(found, expected, hint)` for each fault. What CANN's own tiling checks at compile
time on the device host is checked here first, with its numbers. Sources: the aclnn documents of ops-transformer (July
2026) and ops-nn (August 2026), "documents" below; fact sheet of Ascend, A.1.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from kimi_graph.parallel.experts import NOTES, capacity, no_pair

from .ge_proto import Dtype, attr_value, tensor_value
from .prototypes import DTYPES, SHORT, Prototype
from .targets import Target
from .view import Node, View

Fault = tuple[str, str, str]
Shape = tuple[int, ...]


class Met(NamedTuple):
    """A limit that holds, with its numbers: what `kimi-graph ops` shows, and checks pass over."""

    found: str
    expected: str


POWERS_OF_TWO = (1, 2, 4, 8, 16, 32, 64, 128)
BF16, F16, F32 = (DTYPES[name].proto for name in ("BF16", "F16", "F32"))


@dataclass(frozen=True, slots=True)
class Use:
    """A node with its prototype: the questions limits ask."""

    graph: View
    node: Node
    prototype: Prototype
    target: Target

    def shape(self, name: str) -> Shape | None:
        """Shape of an input, None where it is not given or unknown."""
        desc = self.node.input(name)
        return None if desc is None else desc.shape

    def made(self, name: str) -> Shape | None:
        """Shape of an output."""
        desc = self.node.output(name)
        return None if desc is None else desc.shape

    def dtype(self, name: str) -> int | None:
        desc = self.node.input(name)
        return None if desc is None else desc.dtype

    def given(self, name: str) -> bool:
        return self.node.input(name) is not None

    def count(self, name: str) -> int:
        """How many tensors a list input or output holds."""
        descs = [d.name for d in (*self.node.ins, *self.node.outs)]
        return sum(n.startswith(name) and n[len(name) :].isdigit() for n in descs)

    def attr(self, name: str) -> Any:
        """An attribute's value, or its default."""
        if name in self.node.op.attr:
            return attr_value(self.node.op.attr[name])
        return self.prototype.attributes[name].default

    def values(self, name: str) -> list[int] | None:
        """The integers of an input that is a constant."""
        edge = self.node.edge(name)
        producer = None if edge is None else self.graph.by_name[edge.node]
        if producer is None or producer.type != "Const" or "value" not in producer.op.attr:
            return None
        try:
            return tensor_value(producer.op.attr["value"].t).reshape(-1).tolist()
        except ValueError:  # reported by the check of constants
            return None


Limit = Callable[[Use], Iterator[Fault | Met]]
LIMITS: dict[str, Limit] = {}


def faults_of(use: Use) -> Iterator[Fault]:
    """What a node breaks of its operator's limits."""
    if use.node.type in LIMITS:
        yield from (found for found in LIMITS[use.node.type](use) if not isinstance(found, Met))


def limit(*types: str) -> Callable[[Limit], Limit]:
    """Decorator: the limits of these operator types."""

    def register(f: Limit) -> Limit:
        LIMITS.update(dict.fromkeys(types, f))
        return f

    return register


def expect(what: str, found: Any, expected: Any, hint: str = "") -> Iterator[Fault]:
    """A fault unless they are equal; None is unknown and fits."""
    if found is not None and expected is not None and found != expected:
        yield f"{what} is {_text(found)}", _text(expected), hint


def within(what: str, found: Any, holds: bool, expected: str, hint: str = "") -> Iterator[Fault | Met]:
    """A fault where a number does not hold; where it does, that it does."""
    words = f"{what} is {_text(found)}"
    yield Met(words, expected) if holds else (words, expected, hint)


def at_most(what: str, found: int, most: int, hint: str = "") -> Iterator[Fault | Met]:
    yield from within(what, f"{found:,}", found <= most, f"at most {most:,}", hint)


def one_of(what: str, found: Any, legal: Sequence[Any], hint: str = "") -> Iterator[Fault | Met]:
    expected = ", ".join(map(str, legal))
    yield from within(what, found, found in legal, expected if len(legal) == 1 else f"one of {expected}", hint)


def exactly(what: str, found: Any, expected: Any, hint: str = "") -> Iterator[Fault | Met]:
    """`expect` of a number that a reader wants to see."""
    yield from within(what, found, found == expected, _text(expected), hint)


def _release(use: Use) -> tuple[int, ...]:
    return tuple(map(int, use.target.cann.split(".")))


def _text(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _ranks(use: Use, **ranks: int) -> list[Fault]:
    """Faults of inputs whose number of dims is another; absent ones pass."""
    shapes = {name: use.shape(name) for name in ranks}
    return [
        (f"{name} is {_text(shape)}", f"{ranks[name]} dims", "")
        for name, shape in shapes.items()
        if shape is not None and len(shape) != ranks[name]
    ]


# ---- basic operators -------------------------------------------------------------------------------------------------


@limit("Add", "Sub", "Mul", "RealDiv", "FloorDiv", "Maximum", "Minimum", "Mod", "FloorMod", "Pow",
       "Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual", "LogicalAnd", "LogicalOr", "Select",
       "SelectV2")  # fmt: skip
def _(use: Use) -> Iterator[Fault | Met]:
    shapes = [d.shape for d in use.node.ins if d.shape is not None]
    together = _broadcast(*shapes)
    if together is None:
        yield f"operands {' and '.join(map(_text, shapes))}", "shapes that broadcast", ""
        return
    yield from expect("output", use.node.outs[0].shape if use.node.outs else None, together)


@functools.lru_cache(maxsize=1024)
def _broadcast(*shapes: Shape) -> Shape | None:
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except (RuntimeError, ValueError):  # ValueError: of a negative size
        return None


@limit("Neg", "Exp", "Log", "Sigmoid", "Tanh", "Rsqrt", "Sqrt", "Reciprocal", "Square", "Swish", "Abs", "SoftplusV2",
       "GeluV2", "Identity", "TensorMove", "Cumsum", "SoftmaxV2", "LogicalNot")  # fmt: skip
def _(use: Use) -> Iterator[Fault | Met]:
    yield from expect("output", use.made("y"), use.shape("x"))


_PROTO_OF_GE = {d.ge: d.proto for d in Dtype}


@limit("Cast")
def _(use: Use) -> Iterator[Fault | Met]:
    yield from expect("output", use.made("y"), use.shape("x"))
    made, number = use.node.output("y"), use.attr("dst_type")
    named = _PROTO_OF_GE.get(number)
    if made is not None and made.dtype and named != made.dtype:
        found = (
            f"dst_type {number} is {SHORT.get(named or 0, 'no dtype')}, its output {SHORT.get(made.dtype, made.dtype)}"
        )
        yield found, "the same", "dst_type counts as GE's C++ enum does, descriptions as the protobuf enum."


@limit("Reshape", "Squeeze", "Unsqueeze", "ExpandDims")
def _(use: Use) -> Iterator[Fault | Met]:
    x, y = use.shape("x"), use.made("y")
    if x is not None and y is not None and prod(x) != prod(y):
        yield f"{_text(x)} to {_text(y)}", "as many elements", ""
    if use.node.type == "Reshape":
        yield from expect(
            "axis and num_axes", (use.attr("axis"), use.attr("num_axes")), (0, -1), "Shape the whole tensor."
        )
    wanted = use.values("shape")
    if wanted is not None and y is not None and min(wanted, default=1) > 0:
        yield from expect("output", y, tuple(wanted))


@limit("StridedSliceV2")
def _(use: Use) -> Iterator[Fault | Met]:
    """Bounds inside the tensor: the operator cuts others to the size, which would hide a wrong one."""
    x, begin, end, axes, strides = use.shape("x"), *map(use.values, ("begin", "end", "axes", "strides"))
    if x is None or begin is None or end is None or axes is None or strides is None:
        return
    if len({len(begin), len(end), len(axes), len(strides)}) > 1 or any(not 0 <= a < len(x) for a in axes):
        yield f"begin {begin}, end {end}, axes {axes}, strides {strides} of {len(x)} dims", "as many of each", ""
        return
    made = list(x)
    for a, first, last, step in zip(axes, begin, end, strides, strict=True):
        if not 0 <= first < last <= x[a] or step < 1:
            yield f"{first} to {last} in steps of {step} of dim {a} of {_text(x)}", f"within 0 to {x[a]}", ""
            return
        made[a] = -(-(last - first) // step)
    yield from expect("output", use.made("y"), tuple(made))


@limit("ReduceSum", "ReduceMax", "ReduceMean")
def _(use: Use) -> Iterator[Fault | Met]:
    x, axes = use.shape("x"), use.values("axes")
    if x is None or not axes:
        return
    if any(not -len(x) <= a < len(x) for a in axes):
        yield f"axes {axes} of {len(x)} dims", "dims of x", ""
        return
    gone, keep = {a % len(x) for a in axes}, use.attr("keep_dims")
    dims = [1 if d in gone else n for d, n in enumerate(x) if keep or d not in gone]
    yield from expect("output", use.made("y"), tuple(dims), "See keep_dims.")


@limit("Transpose")
def _(use: Use) -> Iterator[Fault | Met]:
    x, perm = use.shape("x"), use.values("perm")
    if x is None or perm is None:
        return
    if sorted(perm) != list(range(len(x))):
        yield f"perm {perm} of {len(x)} dims", "each dim once", ""
    else:
        yield from expect("output", use.made("y"), tuple(x[d] for d in perm))


@limit("MatMul", "BatchMatMul")
def _(use: Use) -> Iterator[Fault | Met]:
    x1, x2, y = use.shape("x1"), use.shape("x2"), use.made("y")
    if x1 is None or x2 is None:
        return
    flags = ("transpose_x1", "transpose_x2") if use.node.type == "MatMul" else ("adj_x1", "adj_x2")
    least = 2 if use.node.type == "MatMul" else 3
    if len(x1) < least or len(x2) < least or (least == 2 and (len(x1), len(x2)) != (2, 2)):
        yield f"operands {_text(x1)} and {_text(x2)}", "matrices" if least == 2 else "stacks of matrices", ""
        return
    (m, k1), (k2, n) = (_turned(x, use.attr(flag)) for x, flag in zip((x1, x2), flags, strict=True))
    stacked = _broadcast(x1[:-2], x2[:-2])
    if stacked is None:
        yield f"stacks {_text(x1)} and {_text(x2)}", "leading dims that broadcast", ""
    elif k1 != k2:
        yield f"{_text(x1)} times {_text(x2)} sums over {k1} and {k2}", "equal sizes", f"See {flags[0]}, {flags[1]}."
    else:
        yield from expect("output", y, (*stacked, m, n))


def _turned(x: Shape, transposed: bool) -> Shape:
    return (x[-1], x[-2]) if transposed else (x[-2], x[-1])


@limit("ConcatD", "ConcatV2", "Concat", "Pack")
def _(use: Use) -> Iterator[Fault | Met]:
    yield from expect("N", use.attr("N"), use.count("x"), "It counts the inputs.")


@limit("Split", "SplitD", "SplitV", "SplitVD")
def _(use: Use) -> Iterator[Fault | Met]:
    yield from expect("num_split", use.attr("num_split"), len(use.node.outs), "It counts the outputs.")


@limit("GatherV2")
def _(use: Use) -> Iterator[Fault | Met]:
    x, indices, axis = use.shape("x"), use.shape("indices"), use.values("axis")
    if x is not None and indices is not None and axis is not None and use.attr("batch_dims") == 0:
        if not -len(x) <= axis[0] < len(x):
            yield f"axis {axis[0]} of {len(x)} dims", "a dim of x", ""
            return
        at = axis[0] % len(x)
        yield from expect("output", use.made("y"), (*x[:at], *indices, *x[at + 1 :]))


@limit("PadV3")
def _(use: Use) -> Iterator[Fault | Met]:
    x, sides = use.shape("x"), use.values("paddings")
    if x is None or sides is None:
        return
    if len(sides) != 2 * len(x) or min(sides, default=0) < 0:
        yield f"paddings {sides} of {len(x)} dims", f"{2 * len(x)} numbers that are not negative", ""
    elif use.attr("mode") == "constant" and use.attr("paddings_contiguous"):
        made = tuple(n + before + after for n, before, after in zip(x, sides[::2], sides[1::2], strict=True))
        yield from expect("output", use.made("y"), made)


@limit("Slice")
def _(use: Use) -> Iterator[Fault | Met]:
    x, starts, sizes = use.shape("x"), use.values("offsets"), use.values("size")
    if x is None or starts is None or sizes is None:
        return
    if len(starts) != len(x) or len(sizes) != len(x):
        yield f"offsets {starts} and size {sizes} of {len(x)} dims", "a number for each dim", ""
    elif any(a < 0 or n < -1 or a + max(n, 0) > most for a, n, most in zip(starts, sizes, x, strict=True)):
        yield f"{sizes} elements from {starts} of {_text(x)}", "elements that are there", ""


@limit("ScatterNdUpdate")
def _(use: Use) -> Iterator[Fault | Met]:
    var, indices, updates = use.shape("var"), use.shape("indices"), use.shape("updates")
    if var is None or indices is None:
        return
    if len(indices) < 2 or not 1 <= indices[-1] <= len(var):
        yield f"indices {_text(indices)} for var {_text(var)}", f"[.., 1 to {len(var)}], of 2 dims or more", ""
        return
    yield from expect("updates", updates, (*indices[:-1], *var[indices[-1] :]))


# ---- norms and gates -------------------------------------------------------------------------------------------------


@limit("RmsNorm")
def _(use: Use) -> Iterator[Fault | Met]:
    x, gamma = use.shape("x"), use.shape("gamma")
    if x is not None and gamma is not None and x[len(x) - len(gamma) :] != gamma:
        yield f"gamma is {_text(gamma)} for x {_text(x)}", "the last dims of x", ""
    if use.dtype("gamma") not in (use.dtype("x"), F32):
        yield "gamma has another dtype than x", "the dtype of x, or F32 (documents of RmsNorm)", ""
    yield from expect("output", use.made("y"), x)
    if x is not None and gamma is not None:
        yield from expect("rstd", use.made("rstd"), (*x[: len(x) - len(gamma)], *[1] * len(gamma)))


@limit("AddRmsNorm")
def _(use: Use) -> Iterator[Fault | Met]:
    x, gamma = use.shape("x1"), use.shape("gamma")
    yield from expect("x2", use.shape("x2"), x)
    if x is not None and gamma is not None:
        if x[len(x) - len(gamma) :] != gamma:
            yield f"gamma is {_text(gamma)} for x1 {_text(x)}", "the last dims of x1", ""
        yield from expect("rstd", use.made("rstd"), (*x[: len(x) - len(gamma)], *[1] * len(gamma)))
    for name in ("y", "x"):
        yield from expect(name, use.made(name), x)


@limit("LayerNormV4")
def _(use: Use) -> Iterator[Fault | Met]:
    x, dims = use.shape("x"), use.values("normalized_shape")
    if x is None or not dims:
        return
    if list(x[len(x) - len(dims) :]) != dims:
        yield f"normalized_shape {dims} of x {_text(x)}", "the last dims of x", ""
        return
    for name in ("gamma", "beta"):
        yield from expect(name, use.shape(name), tuple(dims))
    if use.dtype("gamma") not in (None, use.dtype("x"), F32):
        yield "gamma has another dtype than x", "the dtype of x, or F32 (documents of LayerNormV4)", ""
    statistics = (*x[: len(x) - len(dims)], *[1] * len(dims))
    for name, made in (("y", x), ("mean", statistics), ("rstd", statistics)):
        yield from expect(name, use.made(name), made)


@limit("SwiGlu", "SituGlu")
def _(use: Use) -> Iterator[Fault | Met]:
    x, y = use.shape("x"), use.made("y")
    if x is None or not x:
        return
    if not -len(x) <= use.attr("dim") < len(x):
        yield f"dim {use.attr('dim')} of {len(x)} dims", "a dim of x", ""
        return
    dim = use.attr("dim") % len(x)
    if x[dim] % 2:
        yield f"dim {dim} of {_text(x)} is odd", "two halves", ""
    yield from expect("output", y, (*x[:dim], x[dim] // 2, *x[dim + 1 :]))


# ---- mixture of experts ----------------------------------------------------------------------------------------------


@limit("MoeGatingTopK")
def _(use: Use) -> Iterator[Fault | Met]:
    if faults := _ranks(use, x=2, bias=1):
        yield from faults
        return
    x = use.shape("x")
    if x is None:
        return
    rows, experts = x
    k, groups, kept = use.attr("k"), use.attr("group_count"), use.attr("k_group")
    yield from at_most("the number of experts", experts, 2048)
    yield from expect("bias", use.shape("bias"), (experts,))
    yield from one_of("norm_type", use.attr("norm_type"), (0, 1, 2) if use.target.soc == "950" else (0, 1))
    yield from one_of("group_select_mode", use.attr("group_select_mode"), (0, 1))
    if groups < 1 or experts % groups:
        yield f"group_count is {groups} for {experts} experts", "a divisor", ""
        return
    size = experts // groups
    yield from at_most(
        "group_count times the experts of a group, rounded up to 32,", groups * -(-size // 32) * 32, 2048
    )
    if size <= use.attr("group_select_mode"):
        yield f"{size} experts in a group", f"more than group_select_mode ({use.attr('group_select_mode')})", ""
    yield from within("k_group", kept, 1 <= kept <= groups, f"1 to group_count ({groups})")
    yield from within("k", k, 1 <= k <= size * kept, f"1 to {size * kept}, the experts of {kept} groups")
    yield from expect("y", use.made("y"), (rows, k))
    yield from expect("expert_idx", use.made("expert_idx"), (rows, k))


@limit("MoeInitRoutingV3")
def _(use: Use) -> Iterator[Fault | Met]:
    if faults := _ranks(use, x=2, expert_idx=2):
        yield from faults
        return
    x, chosen, experts = use.shape("x"), use.shape("expert_idx"), use.attr("expert_num")
    counting = use.attr("expert_tokens_num_type")
    yield from one_of("expert_tokens_num_type", counting, (0, 1, 2))
    yield from one_of("row_idx_type", use.attr("row_idx_type"), (0, 1))
    yield from one_of("drop_pad_mode", use.attr("drop_pad_mode"), (0, 1))
    if use.target.soc != "950":
        yield from one_of("quant_mode", use.attr("quant_mode"), (-1, 0, 1))
    if not use.attr("expert_tokens_num_flag"):
        yield "expert_tokens_num_flag is false", "true, the only documented value", ""
    if experts < 1:
        yield f"expert_num is {experts}", "at least 1", ""
    yield from at_most("expert_num", experts, 5120 if counting == 2 else 10240)
    first, end = use.attr("active_expert_range") or (0, experts)
    if not 0 <= first < end <= experts:
        yield f"active_expert_range is {[first, end]}", f"within [0, {experts}]", ""
    if x is None or chosen is None:
        return
    yield from expect("the number of rows of expert_idx", chosen[0], x[0])
    if use.attr("drop_pad_mode") == 0:
        copies = prod(chosen)
        if use.attr("active_num") not in (-1, 0):
            copies = min(copies, use.attr("active_num"))
        yield from expect("expanded_x", use.made("expanded_x"), (copies, x[1]))
        yield from expect("expanded_row_idx", use.made("expanded_row_idx"), (prod(chosen),))
    if counting in (0, 1):
        count = "expert_tokens_count_or_cumsum"
        yield from expect(count, use.made(count), (end - first,))
    if use.attr("quant_mode") == -1:
        made = use.node.output("expanded_x")
        if made is not None and made.dtype != use.dtype("x"):
            yield "expanded_x has another dtype than x", "the same without quantisation", ""


@limit("MoeDistributeDispatchV2", "MoeDistributeCombineV2")
def _(use: Use) -> Iterator[Fault | Met]:
    sends = use.node.type == "MoeDistributeDispatchV2"
    rows, chosen = use.shape("x" if sends else "expand_x"), use.shape("expert_ids")
    ways, total, own = use.attr("ep_world_size"), use.attr("moe_expert_num"), use.attr("ep_rank_id")
    if rows is None or chosen is None or len(rows) != 2 or len(chosen) != 2:
        yield f"rows are {_text(rows)} and expert_ids {_text(chosen)}", "2 dims each", ""
        return
    if ways < 1 or total < 1 or total % ways:
        yield f"moe_expert_num is {total} for {ways} ranks", "a multiple", ""
        return
    if why := no_pair(use.target, chosen[0], rows[1], chosen[1], ways, total // ways):
        yield why, "sizes that its documents list", "Leave out --exchange."
    if not 0 <= own < ways:
        yield f"ep_rank_id is {own}", f"0 to {ways - 1}", ""
    if not 1 <= len(use.attr("group_ep")) < 128:
        yield f"group_ep has {len(use.attr('group_ep'))} characters", "1 to 127", ""
    most = capacity(chosen[0], chosen[1], ways, total // ways)
    if sends:
        yield from expect("the number of rows of x", rows[0], chosen[0])
        yield from expect("expand_x", use.made("expand_x"), (most, rows[1]))
        yield from expect("expert_token_nums", use.made("expert_token_nums"), (total // ways,))
        return
    yield from expect("the number of rows of expand_x", rows[0], most)
    yield from expect("expert_scales", use.shape("expert_scales"), chosen)
    yield from expect("assist_info_for_combine", use.shape("assist_info_for_combine"), (most * NOTES,))
    yield from expect("ep_send_counts", use.shape("ep_send_counts"), (total,))
    yield from expect("x", use.made("x"), (chosen[0], rows[1]))


@limit("GroupedMatmul")
def _(use: Use) -> Iterator[Fault | Met]:
    xs, weights = use.count("x"), use.count("weight")
    if not xs or not weights:
        yield f"{xs} tensors in x and {weights} in weight", "at least one of each", ""
        return
    yield from at_most("the number of weight tensors", weights, 128, "Stack the experts into one tensor.")
    yield from one_of("group_type", use.attr("group_type"), (-1, 0, 2))
    yield from one_of("group_list_type", use.attr("group_list_type"), (0, 1, 2))
    yield from one_of("split_item", use.attr("split_item"), (0, 1, 2, 3))
    if use.attr("split_item") in (2, 3):
        yield from expect("the number of outputs with split_item 2 or 3", use.count("y"), 1)
    if use.attr("group_type") == 0:
        yield from _rows_in_groups(use)
    yield from _packed_groups(use)
    if use.target.soc != "950":
        lasts = {
            n.name: n.shape[-1] for n in use.node.ins if n.shape and n.name.rstrip("0123456789") in ("x", "weight")
        }
        for name, last in lasts.items():
            yield from at_most(f"the last dim of {name}", last, 65535)


def _rows_in_groups(use: Use) -> Iterator[Fault | Met]:
    """group_type 0: rows of x, cut into groups, each times a weight of its own."""
    if not use.given("group_list"):
        yield "group_type 0 without group_list", "the size of each group", ""
        return
    if use.attr("transpose_x"):
        yield "transpose_x with group_type 0", "rows that are not transposed", ""
    sizes, x, weight = use.shape("group_list"), use.shape("x0"), use.shape("weight0")
    groups = sizes[0] if sizes else 0
    pairs = use.attr("group_list_type") == 2
    yield from expect("the number of dims of group_list", len(sizes or ()), 2 if pairs else 1, "See group_list_type.")
    yield from at_most("the number of groups", groups, 1024 if use.count("weight") == 1 else 128)
    if use.count("weight") != 1 or x is None or weight is None:
        return
    if len(x) != 2 or len(weight) != 3:
        yield f"x {_text(x)} and weight {_text(weight)}", "2 and 3 dims", ""
        return
    if groups:
        yield from expect("the number of groups in group_list", groups, weight[0], "weight is stacked by group.")
    n, k = (weight[1], weight[2]) if use.attr("transpose_weight") else (weight[2], weight[1])
    if x[1] != k:
        yield f"x sums over {x[1]}, weight over {k}", "equal sizes", "See transpose_weight."
    yield from expect("y", use.made("y0"), (x[0], n))


# Scenarios of GroupedMatmul with quantised weights that we use, by dtypes of x and weight: which scales it takes.
_SCENARIOS = {
    ("BF16", "INT4"): ("antiquant_scale",),
    ("FLOAT16", "INT4"): ("antiquant_scale",),
    ("FLOAT8_E4M3FN", "FLOAT4_E2M1"): ("antiquant_scale", "per_token_scale"),
    ("FLOAT8_E4M3FN", "FLOAT8_E4M3FN"): ("scale", "per_token_scale"),
}


def _packed_groups(use: Use) -> Iterator[Fault | Met]:
    """Scales of quantised weights: there, and as many as the scenario has."""
    x, weight = (Dtype.of_proto(use.dtype(name) or 0).name for name in ("x0", "weight0"))
    given = tuple(name for name in ("scale", "antiquant_scale") if use.count(name))
    given += ("per_token_scale",) if use.given("per_token_scale") else ()
    wanted = _SCENARIOS.get((x, weight), ())
    if given != wanted:
        yield f"{x} times {weight} with {', '.join(given) or 'no scale'}", ", ".join(wanted) or "no scale", ""
        return
    rows, stack = use.shape("x0"), use.shape("weight0")
    if not wanted or rows is None or stack is None or len(stack) != 3:
        return
    if not use.attr("transpose_weight"):
        yield f"{weight} weights that are not transposed", "transpose_weight", ""
        return
    groups, n, k = stack
    if weight == "INT4":
        scale = use.shape("antiquant_scale0")
        if scale is None or len(scale) != 3 or scale[1] == 0 or k % scale[1] or k // scale[1] % 2:
            yield f"antiquant_scale {_text(scale)}", "[groups, a divisor of k, n] with an even number of k to each", ""
            return
        yield from expect("antiquant_scale", scale, (groups, scale[1], n))
        if use.target.soc == "950":
            yield from one_of("the number of weights to a scale", k // scale[1], (32, 64, 128, 256))
    elif weight == "FLOAT4_E2M1":
        for what, size in (("n", n), ("k", k)):
            if size % 64:
                yield f"{what} is {size}", "a multiple of 64", ""
        yield from expect("antiquant_scale", use.shape("antiquant_scale0"), (groups, n, k // 64, 2))
        yield from expect("per_token_scale", use.shape("per_token_scale"), (rows[0], k // 64, 2))
    else:
        blocks = -(-k // 128)
        yield from expect("scale", use.shape("scale0"), (groups, -(-n // 128), blocks))
        yield from expect("per_token_scale", use.shape("per_token_scale"), (rows[0], blocks))


@limit("DynamicMxQuant")
def _(use: Use) -> Iterator[Fault | Met]:
    yield from one_of("blocksize", use.attr("blocksize"), (32,))
    yield from one_of("scale_alg", use.attr("scale_alg"), (0, 1))
    x = use.shape("x")
    if x is not None and use.attr("axis") in (-1, len(x) - 1):
        yield from expect("y", use.made("y"), x)
        yield from expect("mxscale", use.made("mxscale"), (*x[:-1], -(-x[-1] // 64), 2))


@limit("SituMxQuant")
def _(use: Use) -> Iterator[Fault | Met]:
    yield from one_of("dst_type", use.attr("dst_type"), (35, 36, 40, 41))
    yield from exactly("axis", use.attr("axis"), -1)
    x = use.shape("x")
    if not x:
        return
    if x[-1] % 2:
        yield f"the last dim of x {_text(x)} is odd", "two halves", ""
    half = x[-1] // 2
    yield from expect("y", use.made("y"), (*x[:-1], half))
    yield from expect("y_scale", use.made("y_scale"), (*x[:-1], -(-half // 64), 2))


@limit("DynamicBlockQuant")
def _(use: Use) -> Iterator[Fault | Met]:
    x, new = use.shape("x"), use.target.soc == "950"
    yield from one_of("row_block_size", use.attr("row_block_size"), (1, 128, 256, 512) if new else (1, 128))
    yield from one_of("dst_type", use.attr("dst_type"), (2, 34, 35, 36) if new else (2,))
    yield from one_of("col_block_size", use.attr("col_block_size"), (64, 128, 192, 256) if new else (1,))
    if x is None:
        return
    yield from one_of("the number of dims of x", len(x), (2, 3) if new else (2,))
    rows, columns = (-(-size // use.attr(f"{what}_block_size")) for what, size in (("row", x[-2]), ("col", x[-1])))
    yield from expect("scale", use.made("scale"), (*x[:-2], rows, columns))


@limit("MoeFinalizeRoutingV2")
def _(use: Use) -> Iterator[Fault | Met]:
    mode = use.attr("drop_pad_mode")
    yield from one_of("drop_pad_mode", mode, (0, 1, 2, 3))
    if use.given("x2") and not use.given("x1"):
        yield "x2 without x1", "x1 first", ""
    if use.given("bias") and not use.given("expert_idx"):
        yield "bias without expert_idx", "expert_idx, which says whose bias", ""
    edge = use.node.edge("expanded_row_idx")
    maker = use.graph.by_name[edge.node].type if edge is not None else ""
    if maker in ("MoeInitRoutingV2", "MoeInitRoutingV3") and mode in (0, 1):
        hint = "Modes 0 and 1 read copy k of row n at n + k * rows, as the first MoeInitRouting puts it."
        yield f"drop_pad_mode {mode} after {maker}, whose indexes lie row by row (n * K + k)", "2 or 3", hint
    rows, scales, index = use.shape("expanded_x"), use.shape("scales"), use.shape("expanded_row_idx")
    if rows is not None:
        yield from expect(
            "the number of dims of expanded_x", len(rows), 2 if mode in (0, 2) else 3, "See drop_pad_mode."
        )
    if scales is not None and rows is not None and mode in (0, 2):
        yield from expect("expanded_x", rows[:1], (prod(scales),), "One row per copy, as many as scales.")
        yield from expect("expanded_row_idx", index, (prod(scales),))
        yield from expect("y", use.made("y"), (scales[0], rows[-1]))


# ---- attention -------------------------------------------------------------------------------------------------------


@limit("ScatterPaKvCache")
def _(use: Use) -> Iterator[Fault | Met]:
    mode, scatter = use.attr("cache_mode"), use.attr("scatter_mode")
    yield from one_of("cache_mode", mode, ("Norm", "PA_NZ"))
    if scatter == "NHSD" and use.target.soc == "950":
        yield "scatter_mode NHSD on the 950 family", "None", ""
    if use.target.soc != "950":
        yield from one_of("key's dtype", SHORT.get(use.dtype("key") or 0), ("BF16", "F16", "I8"))
    if mode != "Norm" or scatter != "None":
        return
    if faults := _ranks(use, key=3, value=3, key_cache=4, value_cache=4, slot_mapping=1):
        yield from faults
        return
    key, value, slots = use.shape("key"), use.shape("value"), use.shape("slot_mapping")
    keys, values = use.shape("key_cache"), use.shape("value_cache")
    if key is None or value is None or keys is None or values is None:
        return
    yield from expect("rows and heads of value", value[:2], key[:2])
    yield from expect("slot_mapping", slots, key[:1], "One cache row for each new row.")
    yield from expect("heads and width of key_cache", keys[2:], key[1:])
    yield from expect("heads and width of value_cache", values[2:], value[1:])
    yield from expect("pages of value_cache", values[:2], keys[:2])
    yield from at_most("the number of new rows", key[0], keys[0] * keys[1], "The cache has no more rows.")


@dataclass(frozen=True)
class _Heads:
    """Dims of a query: rows of the batch, tokens, heads, width."""

    batch: int
    tokens: int
    heads: int
    width: int


def _query(use: Use, layout: str, shape: Shape) -> _Heads | None:
    heads = use.attr("num_heads")
    if layout == "BSND" and len(shape) == 4:
        return _Heads(shape[0], shape[1], shape[2], shape[3])
    if layout == "BNSD" and len(shape) == 4:
        return _Heads(shape[0], shape[2], shape[1], shape[3])
    if layout == "BSH" and len(shape) == 3 and heads > 0 and shape[2] % heads == 0:
        return _Heads(shape[0], shape[1], heads, shape[2] // heads)
    if layout in ("TND", "NTD") and len(shape) == 3:
        tokens, n = (shape[0], shape[1]) if layout == "TND" else (shape[1], shape[0])
        return _Heads(1, tokens, n, shape[2])
    return None


@limit("FusedInferAttentionScore")
def _(use: Use) -> Iterator[Fault | Met]:
    query, layout = use.shape("query"), use.attr("input_layout").split("_")[0]
    yield from one_of("input_layout", layout, ("BSH", "BSND", "BNSD", "TND", "NTD"))
    if query is None:
        return
    q = _query(use, layout, query)
    if q is None:
        yield (
            f"query is {_text(query)} in layout {layout} with {use.attr('num_heads')} heads",
            "a shape of that layout",
            "",
        )
        return
    heads, kv_heads = use.attr("num_heads"), use.attr("num_key_value_heads") or use.attr("num_heads")
    yield from expect("the number of heads in query", q.heads, heads, "See num_heads.")
    if heads % kv_heads:
        yield f"{heads} heads and {kv_heads} key heads", "a multiple", ""
    yield from at_most("the width of query", q.width, 512)
    yield from at_most("the number of heads", heads, 256)
    if use.dtype("query") in (BF16, F16):
        nearest = -(-q.width // 16) * 16
        hint = f"Pad it with zeros to {nearest}."
        yield from within("the width of query", q.width, q.width == nearest, "a multiple of 16", hint)
    yield from expect("attention_out", use.made("attention_out"), _attention_out(use, query))
    if use.dtype("key0") in (BF16, F16) and use.dtype("key0") != use.dtype("query"):
        yield "query and key differ in dtype", "one dtype", ""
    yield from _rope(use, q)
    yield from _mask(use)
    yield from _pages(use, q)
    if use.given("query_rope") and q.width == 512:
        yield from _absorbed(use, q, heads, kv_heads)


def _attention_out(use: Use, query: Shape) -> Shape | None:
    """query's shape with the width of value, where that is easily said."""
    value, layout = use.shape("value0"), use.attr("input_layout")
    if use.given("block_table") and "_" not in layout:
        return query  # the width of value is that of query wherever paged caches are taken
    if value is None or len(value) != len(query) or layout not in ("BSND", "BNSD", "TND", "NTD"):
        return None
    return (*query[:-1], value[-1])


def _rope(use: Use, q: _Heads) -> Iterator[Fault | Met]:
    query, key = use.shape("query"), use.shape("key0")
    for name, like in (("query_rope", query), ("key_rope", key)):
        other = "key_rope" if name == "query_rope" else "query_rope"
        if use.given(name) and not use.given(other):
            yield f"{name} without {other}", "both or neither", ""
        shape = use.shape(name)
        if shape is not None and like is not None and use.attr("input_layout")[:3] != "BSH":
            yield from expect(name, shape, (*like[:-1], 64), "It has 64 channels and is else shaped as its main part.")
    if use.given("query_rope"):
        yield from one_of("the width of query with query_rope", q.width, (128, 512), "Expanded 128, absorbed 512.")


def _mask(use: Use) -> Iterator[Fault | Met]:
    """Modes 2 to 4 read one compressed mask of 2,048 by 2,048."""
    mode, mask = use.attr("sparse_mode"), use.shape("atten_mask")
    yield from one_of("sparse_mode", mode, (0, 1, 2, 3, 4, 9))
    if mode in (2, 3, 4):
        if not use.given("atten_mask"):
            yield f"sparse_mode {mode} without atten_mask", "a [2048, 2048] mask, true above the diagonal", ""
        elif mask is not None and (mask[-2:] != (2048, 2048) or prod(mask) != 2048 * 2048):
            yield f"atten_mask is {_text(mask)} in sparse_mode {mode}", "[2048, 2048]", ""


def _pages(use: Use, q: _Heads) -> Iterator[Fault | Met]:
    """A paged cache: block_table, block_size and lengths go together."""
    size, table, key = use.attr("block_size"), use.shape("block_table"), use.shape("key0")
    if not use.given("block_table"):
        return
    nearest = min(1024, max(16, round(size / 16) * 16))
    hint = f"The nearest is {nearest}."
    yield from within("block_size", size, size == nearest, "a multiple of 16, at most 1,024", hint)
    if not use.given("actual_seq_lengths_kv"):
        yield "block_table without actual_seq_lengths_kv", "the length of each sequence", ""
    if table is not None and use.attr("input_layout")[0] == "B":
        yield from expect("rows of block_table", table[0], q.batch)
    if key is not None and len(key) in (3, 4):
        found = key[1] if len(key) == 3 else key[2]
        hint = "A pool is [pages, page, heads * width] or [pages, heads, page, width]."
        yield from expect("the page size in key", found, size, hint)


def _absorbed(use: Use, q: _Heads, heads: int, kv_heads: int) -> Iterator[Fault | Met]:
    """MLA over the latent cache: query of 512 channels, one key head."""
    if _release(use) < (9, 2):
        yield from one_of(
            "the number of heads over the latent cache", heads, POWERS_OF_TWO, "CANN 9.2 takes any up to 128."
        )
    yield from at_most("the number of heads over the latent cache", heads, 128)
    yield from expect("num_key_value_heads over the latent cache", kv_heads, 1)
    if not use.given("block_table"):
        yield "query of 512 channels without block_table", "a paged cache", ""
    yield from one_of("sparse_mode over the latent cache", use.attr("sparse_mode"), (0, 3, 4, 9))
    if use.given("actual_seq_lengths") and not (use.attr("input_layout")[:3] == "TND" and q.tokens > q.batch):
        yield "actual_seq_lengths with a query of 512 channels", "none outside layout TND", ""


# ---- rotation --------------------------------------------------------------------------------------------------------


@limit("RotaryPositionEmbedding")
def _(use: Use) -> Iterator[Fault | Met]:
    x, cos, mode = use.shape("x"), use.shape("cos"), use.attr("mode")
    yield from one_of("mode", mode, (0, 1, 2, 3) if use.target.soc == "950" else (0, 1))
    yield from expect("sin", use.shape("sin"), cos, "As cos.")
    if use.given("rotate") and not (use.target.soc != "950" and _release(use) >= (9, 1)):
        yield "rotate is given", "none", "A2 and A3 take it from CANN 9.1 on."
    if x is None or cos is None:
        return
    yield from expect("y", use.made("y"), x)
    if len(x) not in (3, 4) or len(cos) != len(x) or any(b not in (1, a) for a, b in zip(x, cos, strict=True)):
        yield f"x {_text(x)} with cos {_text(cos)}", "3 or 4 dims each, where cos has those of x or 1", ""
        return
    if len(x) == 3 and _release(use) < (9, 1):
        yield f"x of 3 dims in CANN {use.target.cann}", "4 dims", "3 dims are taken from CANN 9.1 on."
    yield from exactly("the width of cos", cos[-1], x[-1], "Each angle once for every channel.")
    if x[-1] % (4 if mode == 2 else 2):
        yield f"the width of x is {x[-1]}", "an even number" if mode != 2 else "a multiple of 4", ""
    if use.target.soc == "950":
        yield from at_most("the width of x", x[-1], 1024)
        return
    yield from at_most("the width of x", x[-1], 894, "A2 and A3 take less than 896.")
    if mode == 1:  # read as sequences: one angle for each place, the same for all rows and heads
        rows, heads = (1, x[1]) if len(x) == 3 else (x[0], x[2])
        expected = (x[0], 1, x[2]) if len(x) == 3 else (1, x[1], 1, x[3])
        hint = "Interleaved pairs want one sequence's angles; make the rows one sequence."
        yield from expect("cos", cos, expected, hint)
        yield from at_most("rows times heads", rows * heads, 999)
    else:
        yield from at_most("the number of rows", x[0] if len(x) == 4 else 1, 999)
        yield from at_most("the number of heads", x[-2], 999)


# ---- sparse attention ------------------------------------------------------------------------------------------------

NO_WINDOW = 2**63 - 1


def _paged_rows(use: Use, key: str, lengths: str) -> Iterator[Fault | Met]:
    """What a cache of `[pages, page, 1, width]` needs, for a query of [B, T, heads, width]."""
    query, pool, table = use.shape("query"), use.shape(key), use.shape("block_table")
    for name in ("block_table", lengths):
        if not use.given(name):
            yield f"a paged cache without {name}", "both it and the lengths", ""
    if pool is not None:
        yield from expect(f"heads of {key}", pool[2], 1)
        legal = pool[1] % 16 == 0 and 16 <= pool[1] <= 1024
        yield from within("the page size", pool[1], legal, "a multiple of 16, at most 1,024")
    if query is None:
        return
    for name in ("actual_seq_lengths_query", lengths):
        yield from expect(name, use.shape(name), query[:1])
    yield from expect("rows of block_table", None if table is None else table[0], query[0])


def _no_window(use: Use) -> Iterator[Fault | Met]:
    yield from one_of("sparse_mode", use.attr("sparse_mode"), (0, 3))
    for name in ("pre_tokens", "next_tokens"):
        yield from expect(name, use.attr(name), NO_WINDOW)


def _index_heads(use: Use, heads: int) -> Iterator[Fault | Met]:
    if use.target.soc == "950":
        yield from one_of("the number of index heads", heads, (8, 16, 24, 32, 64), "Pad with heads of weight zero.")
    elif _release(use) < (9, 1):
        yield from expect("the number of index heads", heads, 64, "Pad with heads of weight zero.")
    else:
        yield from at_most("the number of index heads", heads, 64)


@limit("LightningIndexer")
def _(use: Use) -> Iterator[Fault | Met]:
    yield from one_of("layout_query", use.attr("layout_query"), ("BSND", "TND"))
    yield from one_of("layout_key", use.attr("layout_key"), ("PA_BSND", "BSND", "TND"))
    yield from _no_window(use)
    count, old = use.attr("sparse_count"), _release(use) < (9, 1)
    legal = 1 <= count <= 2048 or (not old and count % 1024 == 0 and count <= 8192)
    expected = "1 to 2,048" + ("" if old else ", or a multiple of 1,024 up to 8,192")
    yield from within("sparse_count", count, legal, expected)
    if use.dtype("weights") == F32 and (use.target.soc == "950" or old):
        yield "weights are F32", "the dtype of query", "A2 and A3 take F32 from CANN 9.1 on, 950 does not."
    elif use.dtype("weights") not in (use.dtype("query"), F32):
        yield "weights have another dtype than query", "the dtype of query", ""
    if (use.attr("layout_query"), use.attr("layout_key")) != ("BSND", "PA_BSND"):
        return
    if faults := _ranks(use, query=4, key=4, weights=3, block_table=2):
        yield from faults
        return
    if use.attr("return_values"):
        yield "return_values with a paged cache", "false", ""
    query, key = use.shape("query"), use.shape("key")
    yield from _paged_rows(use, "key", "actual_seq_lengths_key")
    if query is None or key is None:
        return
    rows, tokens, heads, width = query
    yield from exactly("the width of query and key", (width, key[3]), (128, 128))
    yield from expect("weights", use.shape("weights"), query[:3])
    yield from _index_heads(use, heads)
    yield from expect("sparse_indices", use.made("sparse_indices"), (rows, tokens, 1, count))
    yield from expect("sparse_values", use.made("sparse_values"), (0,), "There are none without return_values.")


@limit("SparseFlashAttention")
def _(use: Use) -> Iterator[Fault | Met]:
    yield from one_of("layout_query", use.attr("layout_query"), ("BSND", "TND"))
    yield from one_of("layout_kv", use.attr("layout_kv"), ("PA_BSND", "BSND", "TND"))
    yield from _no_window(use)
    yield from expect("attention_mode", use.attr("attention_mode"), 2, "Absorbed is the one mode there is.")
    size = use.attr("sparse_block_size")
    yield from one_of("sparse_block_size", size, (1,) if use.target.soc == "950" else POWERS_OF_TWO)
    if use.given("sinks") and (use.target.soc != "950" or _release(use) < (9, 2)):
        yield "sinks are given", "none", "950 takes them from CANN 9.2 on."
    for name in ("query_rope", "key_rope"):
        if not use.given(name):
            yield f"no {name}", "one, also of a model without rotation", "Its channels go there as they are."
    if (use.attr("layout_query"), use.attr("layout_kv")) != ("BSND", "PA_BSND"):
        return
    if faults := _ranks(use, query=4, key=4, value=4, query_rope=4, key_rope=4, sparse_indices=4, block_table=2):
        yield from faults
        return
    query, key = use.shape("query"), use.shape("key")
    yield from _paged_rows(use, "key", "actual_seq_lengths_kv")
    if query is None or key is None:
        return
    heads = query[2]
    yield from exactly("the width of query and key", (query[3], key[3]), (512, 512))
    yield from expect("value", use.shape("value"), key)
    yield from expect("query_rope", use.shape("query_rope"), (*query[:3], 64))
    yield from expect("key_rope", use.shape("key_rope"), (*key[:3], 64))
    indices = use.shape("sparse_indices")
    yield from expect("sparse_indices", None if indices is None else indices[:3], (*query[:2], 1))
    if use.target.soc == "950":
        yield from at_most("the number of heads", heads, 128)
    else:
        yield from one_of("the number of heads", heads, POWERS_OF_TWO, "Pad with heads of zeros.")
    yield from expect("attention_out", use.made("attention_out"), query)
    for name in ("softmax_max", "softmax_sum"):
        yield from expect(name, use.made(name), (0,), "There is none without return_softmax_lse.")


# ---- caches in 8 bits ------------------------------------------------------------------------------------------------

I8, E4M3 = (DTYPES[name].proto for name in ("I8", "E4M3"))
TILE = 128  # latents of a scale
INDEXED = ((I8, F16, F16), (E4M3, BF16, F32), (E4M3, F16, F16))  # dtypes of query and key, weights, scales
CACHE_ROW = 512 + 2 * 64 + 4 * 512 // TILE  # bytes: latents, rope channels of 16 bits, float32 scales


@limit("DynamicQuant")
def _(use: Use) -> Iterator[Fault | Met]:
    x, made, number = use.shape("x"), use.node.output("y"), use.attr("dst_type")
    if x is not None and len(x) < 2:
        yield f"x is {_text(x)}", "2 dims or more", ""
        return
    named = _PROTO_OF_GE.get(number)
    if made is not None and made.dtype and named != made.dtype:
        found = f"dst_type {number} is {SHORT.get(named or 0, 'no dtype')}, y {SHORT.get(made.dtype, made.dtype)}"
        yield found, "the same", "dst_type counts as GE's C++ enum does, descriptions as the protobuf enum."
    yield from expect("y", use.made("y"), x)
    yield from expect("scale", use.made("scale"), None if x is None else x[:-1])
    if use.given("group_index") and not use.given("smooth_scales"):
        yield "group_index without smooth_scales", "both, or neither", ""


@limit("Bitcast")
def _(use: Use) -> Iterator[Fault | Met]:
    """The same bytes: where the new dtype is narrower a dimension more, of as many as make one of the old."""
    x, y, made = use.node.input("x"), use.node.output("y"), use.attr("type")
    if x is None or y is None or x.shape is None or y.shape is None or not x.dtype or not y.dtype:
        return
    if made.proto != y.dtype:
        yield f"type {made.name}, y {SHORT.get(y.dtype, y.dtype)}", "the same", ""
        return
    widths = [Dtype.of_proto(d.dtype).shared for d in (x, y)]
    if widths[0] is None or widths[1] is None:
        return
    size, rest = divmod(widths[0].itemsize, widths[1].itemsize)
    if rest or not size:
        yield f"from {SHORT[x.dtype]} to {SHORT[y.dtype]}", "a dtype that is not wider", ""
        return
    wider = (*x.shape[:-1], x.shape[-1] * size) if use.attr("keep_dim") and x.shape else (*x.shape, size)
    yield from expect("output", y.shape, x.shape if size == 1 else wider)


@limit("QuantLightningIndexer")
def _(use: Use) -> Iterator[Fault | Met]:
    yield from one_of("layout_query", use.attr("layout_query"), ("BSND", "TND"))
    yield from one_of("layout_key", use.attr("layout_key"), ("PA_BSND", "BSND", "TND"))
    yield from _no_window(use)
    for name in ("query_quant_mode", "key_quant_mode"):
        yield from expect(name, use.attr(name), 0, "By token and head is the one mode there is.")
    count = use.attr("sparse_count")
    yield from within("sparse_count", count, 1 <= count <= 2048, "1 to 2,048")
    dtypes = (use.dtype("query"), use.dtype("weights"), use.dtype("query_dequant_scale"))
    if None not in dtypes and dtypes not in INDEXED:
        found, *legal = (" ".join(SHORT.get(d or 0, "-") for d in some) for some in (dtypes, *INDEXED))
        yield f"query, weights and scales are {found}", " or ".join(legal), ""
    if (use.attr("layout_query"), use.attr("layout_key")) != ("BSND", "PA_BSND"):
        return
    ranks = {"query": 4, "key": 4, "weights": 3, "query_dequant_scale": 3, "key_dequant_scale": 3, "block_table": 2}
    if faults := _ranks(use, **ranks):
        yield from faults
        return
    query, key = use.shape("query"), use.shape("key")
    yield from _paged_rows(use, "key", "actual_seq_lengths_key")
    if query is None or key is None:
        return
    rows, tokens, heads, width = query
    yield from exactly("the width of query and key", (width, key[3]), (128, 128))
    for name in ("weights", "query_dequant_scale"):
        yield from expect(name, use.shape(name), query[:3])
    yield from expect("key_dequant_scale", use.shape("key_dequant_scale"), key[:3])
    yield from _index_heads(use, heads)
    yield from expect("sparse_indices", use.made("sparse_indices"), (rows, tokens, 1, count))


@limit("KvQuantSparseFlashAttention")
def _(use: Use) -> Iterator[Fault | Met]:
    yield from one_of("layout_query", use.attr("layout_query"), ("BSND", "TND"))
    yield from one_of("layout_kv", use.attr("layout_kv"), ("PA_BSND", "BSND", "TND"))
    yield from _no_window(use)
    one = {"key_quant_mode": 2, "value_quant_mode": 2, "attention_mode": 2, "quant_scale_repo_mode": 1}
    for name, value in (one | {"tile_size": TILE, "rope_head_dim": 64}).items():
        yield from expect(name, use.attr(name), value, "It is the one value there is.")
    size = use.attr("sparse_block_size")
    yield from one_of("sparse_block_size", size, (1,) if use.target.soc == "950" else (1, 2, 4, 8, 16))
    for name in ("key_dequant_scale", "value_dequant_scale"):
        if use.given(name):
            yield f"{name} is given", "none", "Scales are in the rows of key."
    if (use.attr("layout_query"), use.attr("layout_kv")) != ("BSND", "PA_BSND"):
        return
    if faults := _ranks(use, query=4, key=4, value=4, sparse_indices=4, block_table=2):
        yield from faults
        return
    query, key = use.shape("query"), use.shape("key")
    yield from _paged_rows(use, "key", "actual_seq_lengths_kv")
    if query is None or key is None:
        return
    yield from exactly("the width of query and key", (query[3], key[3]), (576, CACHE_ROW))
    yield from expect("value", use.shape("value"), key)
    indices = use.shape("sparse_indices")
    yield from expect("sparse_indices", None if indices is None else indices[:3], (*query[:2], 1))
    heads = (*POWERS_OF_TWO, 48) if use.target.soc == "950" else POWERS_OF_TWO
    yield from one_of("the number of heads", query[2], heads, "Pad with heads of zeros.")
    yield from expect("attention_out", use.made("attention_out"), (*query[:3], 512))


# ---- linear attention ------------------------------------------------------------------------------------------------


@limit("RecurrentGatedDeltaRule")
def _(use: Use) -> Iterator[Fault | Met]:
    ranks = {"query": 3, "key": 3, "value": 3, "beta": 2, "state": 4, "actual_seq_lengths": 1, "ssm_state_indices": 1}
    if faults := _ranks(use, **ranks, g=2, gk=3, num_accepted_tokens=1):
        yield from faults
        return
    query, value, state = use.shape("query"), use.shape("value"), use.shape("state")
    if query is None or value is None or state is None:
        return
    (tokens, nk, dk), (_, nv, dv) = query, value
    if use.dtype("state") == F32:
        old = _release(use) < (9, 2)
        held = f"F32 in CANN {use.target.cann}"
        hint = "A float32 state is taken from CANN 9.2 on."
        yield from within("state", held, not old, "BF16" if old else "BF16 or F32", hint)
    yield from expect("key", use.shape("key"), query)
    yield from expect("tokens of value", value[0], tokens)
    yield from expect("beta", use.shape("beta"), (tokens, nv))
    yield from expect("state", state[1:], (nv, dv, dk), "It is [slots, value heads, value, key].")
    yield from expect("g", use.shape("g"), (tokens, nv))
    yield from expect("gk", use.shape("gk"), (tokens, nv, dk))
    yield from expect("ssm_state_indices", use.shape("ssm_state_indices"), (tokens,))
    yield from expect("out", use.made("out"), value)
    yield from at_most("the key width", dk, 512)
    yield from at_most("the value width", dv, 512)
    yield from at_most("the number of value heads", nv, 256)
    if nk > nv or nv % nk:
        yield f"{nk} key heads and {nv} value heads", "a divisor of the value heads", ""
    yield from at_most("the number of tokens", tokens, state[0], "The operator wants at least as many slots as tokens.")
    yield from _short_sequences(use, tokens)


@limit("RecurrentKda")
def _(use: Use) -> Iterator[Fault | Met]:
    """Sources: the operator's API document and its tiling in vllm-ascend (August 2026)."""
    yield from one_of("layout", use.attr("layout"), ("BSND", "TND"))
    packed = use.attr("layout") == "TND"
    ranks = {"query": 4, "key": 4, "value": 4, "gate": 4, "beta": 3}
    ranks = {name: n - packed for name, n in ranks.items()} | {"initial_state": 4, "cu_seqlens": 1}
    if faults := _ranks(use, **ranks):
        yield from faults
        return
    query, value, state = use.shape("query"), use.shape("value"), use.shape("initial_state")
    if query is None or value is None or state is None:
        return
    (*tokens, nk, dk), (*_, nv, dv) = query, value
    yield from expect("key", use.shape("key"), query)
    yield from expect("tokens of value", value[:-2], tuple(tokens))
    yield from expect("gate", use.shape("gate"), (*tokens, nv, dk))
    yield from expect("beta", use.shape("beta"), (*tokens, nv))
    yield from exactly("the key width", dk, 128)
    yield from one_of("the value width", dv, (128, 256))
    yield from at_most("the number of value heads", nv, 256)
    yield from within("the number of value heads", nv, nv % nk == 0, f"a multiple of the {nk} key heads")
    if not use.attr("state_v_first"):
        yield "state_v_first is false", "true: a state is [slots, value heads, value, key]", ""
    yield from expect("initial_state", state[1:], (nv, dv, dk), "It is [slots, value heads, value, key].")
    starts, slots = use.shape("cu_seqlens"), use.shape("ssm_state_indices")
    rows = starts[0] - 1 if starts else (1 if packed else tokens[0])
    count = prod(tokens)
    yield from within("the number of tokens", count, count <= 8 * rows, f"at most 8 of each of {rows} sequences")
    if slots is None:
        yield from expect("slots of initial_state without ssm_state_indices", state[0], rows)
    elif not (len(slots) == 1 and slots[0] >= count) and not (len(slots) == 2 and slots[0] == rows):
        yield f"ssm_state_indices is {_text(slots)}", f"[{count}] or [{rows}, steps]", ""
    yield from expect("A_log", use.shape("A_log"), (nv,))
    if use.shape("dt_bias") not in (None, (nv * dk,), (nv, dk)):
        yield f"dt_bias is {_text(use.shape('dt_bias'))}", f"[{nv}, {dk}] or [{nv * dk}]", ""
    if use.attr("use_gate_in_kernel") and not use.given("A_log"):
        yield "use_gate_in_kernel without A_log", "the rates' logarithms", ""
    if use.attr("safe_gate"):
        bound = use.attr("lower_bound")
        yield from within("lower_bound", bound, -5.0 <= bound < 0.0, "from -5 to below 0")
    if not use.attr("use_gate_in_kernel") and (use.given("A_log") or use.given("dt_bias") or use.attr("safe_gate")):
        yield "A_log, dt_bias or safe_gate without use_gate_in_kernel", "none", ""
    yield from expect("attn_out", use.made("attn_out"), value)
    yield from expect("final_state", use.made("final_state"), state)


def _short_sequences(use: Use, tokens: int) -> Iterator[Fault | Met]:
    lengths, rows = use.values("actual_seq_lengths"), use.shape("actual_seq_lengths")
    if lengths is not None and (min(lengths, default=1) < 1 or max(lengths, default=1) > 8 or sum(lengths) != tokens):
        yield f"actual_seq_lengths are {lengths[:8]} for {tokens} tokens", f"1 to 8 each, {tokens} in all", ""
    elif rows is not None and not rows[0] <= tokens <= 8 * rows[0]:
        yield f"{tokens} tokens of {rows[0]} sequences", "1 to 8 tokens of each", ""


@limit("CausalConv1d")
def _(use: Use) -> Iterator[Fault | Met]:
    weight, states, x = use.shape("weight"), use.shape("conv_states"), use.shape("x")
    if weight is None or states is None or x is None:
        return
    if len(weight) != 2 or len(states) != 3 or len(x) not in (2, 3):
        yield f"x {_text(x)}, weight {_text(weight)}, conv_states {_text(states)}", "2 or 3, 2 and 3 dims", ""
        return
    taps, channels = weight
    yield from one_of("the number of taps", taps, (2, 3, 4))
    yield from expect("channels of x and conv_states", (x[-1], states[-1]), (channels, channels))
    if states[1] < taps - 1:
        yield f"conv_states keeps {states[1]} tokens", f"at least {taps - 1}", ""
    legal = channels % 16 == 0 and 64 <= channels <= 16384
    yield from within("the number of channels", channels, legal, "a multiple of 16 from 64 to 16,384")


@limit("SituMul")
def _(use: Use) -> Iterator[Fault | Met]:
    yield from expect("up", use.shape("up"), use.shape("gate"))
    yield from expect("y", use.made("y"), use.shape("gate"))


@limit("SituMulQuant")
def _(use: Use) -> Iterator[Fault | Met]:
    gate = use.shape("gate")
    yield from expect("up", use.shape("up"), gate)
    yield from expect("y", use.made("y"), gate)
    if gate:
        yield from expect("scale", use.made("scale"), gate[:-1])
        element = Dtype.of_proto(use.dtype("gate") or F32).bits // 8
        yield from _sixteens("the width", gate[-1], (UNIFIED_BUFFER[use.target.soc] - 832) // (4 * element + 18))


@limit("GatedRmsNorm")
def _(use: Use) -> Iterator[Fault | Met]:
    x, weight = use.shape("x"), use.shape("weight")
    yield from expect("gate", use.shape("gate"), x)
    yield from expect("weight", weight, None if x is None else x[-1:])
    yield from expect("y", use.made("y"), x)
    if x is not None:
        yield from _sixteens("the width", x[-1], 512)


@limit("ResidualNormGate")
def _(use: Use) -> Iterator[Fault | Met]:
    x, given = use.shape("x"), {name: use.shape(name) for name in ("residual", "weight", "gate")}
    for name in ("residual", "gate"):
        yield from expect(name, given[name], given[name] and x)
    yield from expect("y", use.made("y"), x)
    yield from expect("sum", use.made("sum"), (0,) if given["residual"] is None else x)
    if not any(given.values()):
        yield "nothing to do", "a residual, a weight or a gate", ""
    if x is not None and given["weight"] is not None:
        yield from expect("weight", given["weight"], x[-1:])
        element = Dtype.of_proto(use.dtype("x") or F32).bits // 8
        yield from _sixteens("the width", x[-1], (UNIFIED_BUFFER[use.target.soc] - 512) // (4 * element + 12))


@limit("ShortConv")
def _(use: Use) -> Iterator[Fault | Met]:
    x, weight, window = use.shape("x"), use.shape("weight"), use.shape("window")
    if x is None or weight is None or window is None:
        return
    if len(x) < 3 or len(weight) != len(x) - 1 or len(window) != len(weight) + 1:
        yield f"x {_text(x)}, weight {_text(weight)}, window {_text(window)}", "[B, T, ..], [.., W], [S, .., W - 1]", ""
        return
    yield from expect("channels of weight", weight[:-1], x[2:])
    yield from expect("window", window[1:], (*x[2:], weight[-1] - 1))
    yield from exactly("the number of taps", weight[-1], 4)
    channels = prod(x[2:])
    yield from within("the number of channels", channels, channels % 16 == 0, "a multiple of 16")
    yield from _rows(use, x[0])
    yield from expect("y", use.made("y"), x)


@limit("KdaStep")
def _(use: Use) -> Iterator[Fault | Met]:
    if faults := _ranks(use, q=4, k=4, v=4, decay=4, beta=3, memory=4):
        yield from faults
        return
    q, v, memory = use.shape("q"), use.shape("v"), use.shape("memory")
    if q is None or v is None or memory is None:
        return
    yield from exactly("the number of tokens of a row", q[1], 1)
    yield from expect("k", use.shape("k"), q)
    yield from expect("v", v[:3], q[:3])
    yield from expect("decay", use.shape("decay"), q)
    yield from expect("beta", use.shape("beta"), q[:3])
    yield from expect("memory", memory[1:], (q[2], v[3], q[3]), "It is [slots, heads, value, key].")
    yield from expect("slots", use.shape("slots"), q[:1])
    for name, width in (("key", q[3]), ("value", v[3])):
        yield from _sixteens(f"the {name} width", width, 256)
    yield from expect("bias", use.shape("bias"), (q[2], q[3]))
    yield from expect("log_rate", use.shape("log_rate"), (q[2],))
    if use.given("bias") != use.given("log_rate"):
        yield "one of bias and log_rate", "both or neither", ""
    yield from expect("o", use.made("o"), v)


@limit("KdaChunk")
def _(use: Use) -> Iterator[Fault | Met]:
    if faults := _ranks(use, q=4, k=4, v=4, decay=4, beta=3, memory=4):
        yield from faults
        return
    q, v, memory = use.shape("q"), use.shape("v"), use.shape("memory")
    if q is None or v is None or memory is None:
        return
    yield from expect("k", use.shape("k"), q)
    yield from expect("v", v[:3], q[:3])
    yield from expect("decay", use.shape("decay"), q)
    yield from expect("beta", use.shape("beta"), q[:3])
    yield from expect("memory", memory[1:], (q[2], v[3], q[3]), "It is [slots, heads, value, key].")
    yield from _rows(use, q[0])
    yield from expect("o", use.made("o"), v)
    for name, width in (("key", q[3]), ("value", v[3])):
        yield from _sixteens(f"the {name} width", width, 256)


@limit("SparseAttend")
def _(use: Use) -> Iterator[Fault | Met]:
    """The scores and sums of a query are in parts of its heads, its rows in L1: see the tiling."""
    if faults := _ranks(use, q=4, q_rope=4, latent=4, rope=4, selected=3, block_table=2):
        yield from faults
        return
    q, q_rope, latent, selected = use.shape("q"), use.shape("q_rope"), use.shape("latent"), use.shape("selected")
    if q is None or q_rope is None or latent is None or selected is None:
        return
    yield from expect("q_rope", q_rope[:3], q[:3])
    yield from expect("latent", latent[2:], (1, q[3]), "It is [pages, page, 1, latent].")
    yield from expect("rope", use.shape("rope"), (*latent[:3], q_rope[3]))
    yield from expect("selected", selected[:2], q[:2])
    table = use.shape("block_table")
    yield from expect("block_table", None if table is None else table[:1], q[:1])
    for name in ("lengths", "counts"):
        yield from expect(name, use.shape(name), q[:1])
    yield from at_most("the number of heads", q[2], 128)
    yield from _sixteens("the width of latents", q[3], 512)
    yield from _sixteens("the width of the rope part", q_rope[3], 64)
    yield from expect("o", use.made("o"), q)
    yield from expect("lse", use.made("lse"), q[:3])


@limit("AttnResMix")
def _(use: Use) -> Iterator[Fault | Met]:
    sources = [d.shape for d in use.node.ins if d.name.startswith("sources")]
    if not sources:
        yield "no sources", "at least one", ""
        return
    for name, shape in zip((f"sources{i}" for i in range(len(sources))), sources, strict=True):
        yield from expect(name, shape, sources[0], "All sources have one shape.")
    last = None if sources[0] is None else sources[0][-1:]
    for name in ("norm", "query"):
        yield from expect(name, use.shape(name), last)
    addend, gain = use.shape("addend"), use.shape("gain")
    yield from expect("addend", addend, addend and sources[0])
    yield from expect("gain", gain, gain and last)
    yield from expect("y", use.made("y"), sources[0])
    yield from expect("total", use.made("total"), (0,) if addend is None else sources[0])
    if last is not None:
        floats = 4 if gain is None else 5  # of the kernel, for each channel
        element = Dtype.of_proto(use.dtype("sources0") or F32).bits // 8
        most = (UNIFIED_BUFFER[use.target.soc] - 512) // (3 * element + 4 * floats)
        yield from _sixteens("the width", last[0], most)


UNIFIED_BUFFER = {"a2": 192 * 1024, "a3": 192 * 1024, "950": 248 * 1024}  # bytes a core can use; fact sheet, C.1


def _sixteens(what: str, found: int, most: int) -> Iterator[Fault | Met]:
    """What kernels of ours take of a width."""
    legal = found % 16 == 0 and 16 <= found <= most
    yield from within(what, f"{found:,}", legal, f"a multiple of 16 from 16 to {most // 16 * 16:,}")


def _rows(use: Use, batch: int) -> Iterator[Fault | Met]:
    for name in ("slots", "lengths", "counts"):
        yield from expect(name, use.shape(name), (batch,))
