"""FX passes: einsum to matrix products, weight arithmetic out of the graph into recipes, equal calls made once."""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kimi_graph.errors import CompileError
from kimi_graph.ops.einsum import EINSUM, batch_matmul, matmul

from .capture import Captured
from .recipe import Step

aten = torch.ops.aten


# ---- einsum ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """Letters of a two-operand product by their part in it, each in operand order."""

    batch: str
    left: str
    right: str
    summed: str
    transpose: bool


def _plan(equation: str) -> _Plan:
    found = re.fullmatch(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]*)", equation.replace(" ", ""))
    if found is None:
        raise CompileError(f"einsum {equation!r}: only products of two operands with a written result are lowered.")
    a, b, out = found.groups()
    batch = "".join(x for x in b if x in a and x in out)  # in the order of the weight, which is never moved
    summed = "".join(x for x in b if x in a and x not in out)
    left = "".join(x for x in a if x not in b)
    right = "".join(x for x in b if x not in a)
    once = all(len(set(letters)) == len(letters) for letters in (a, b, out))
    if not once or set(left + right + batch) != set(out) or set(a) != set(left + batch + summed):
        raise CompileError(
            f"einsum {equation!r}: only products of two operands without traces or broadcasts are lowered."
        )
    stem = b[len(batch) :] if b.startswith(batch) else b
    transpose = stem == right + summed
    if (not transpose and stem != summed + right) or not b.startswith(batch):
        raise CompileError(
            f"einsum {equation!r}: the second operand must read batch, kept, summed (or batch, summed, kept) letters, "
            f"as a checkpoint stores it; found {b!r}."
        )
    return _Plan(batch, left, right, summed, transpose)


class _Editor:
    """Inserts calls before a node, keeping shapes and the source line."""

    def __init__(self, graph: fx.Graph, at: fx.Node) -> None:
        self.graph, self.at = graph, at

    def call(self, target: Any, *args: Any) -> fx.Node:
        with self.graph.inserting_before(self.at):
            node = self.graph.call_function(target, args)
        values = fx.map_arg(args, lambda n: n.meta["val"])
        node.meta = {"val": target(*values).contiguous(), "source": self.at.meta["source"]}  # GE knows no strides
        return node

    def view(self, x: fx.Node, shape: list[int]) -> fx.Node:
        return x if list(x.meta["val"].shape) == shape else self.call(aten.view.default, x, shape)

    def arrange(self, x: fx.Node, have: str, want: str) -> fx.Node:
        """`x` with letters `have` permuted to `want`; a view where only dimensions of size one move."""
        order = [have.index(c) for c in want]
        shape = x.meta["val"].shape
        moved = [d for d in order if shape[d] != 1]
        if moved == sorted(moved):
            return self.view(x, [shape[d] for d in order])
        return self.call(aten.permute.default, x, order)


def lower_einsum(captured: Captured) -> Captured:
    """`kimi::einsum` becomes view, `kimi::matmul` or `kimi::batch_matmul`, view; permutes only for batch letters."""
    graph = captured.module.graph
    for node in [n for n in graph.nodes if n.target is EINSUM]:
        equation, operands = node.args
        try:
            plan, size = _plan(equation), {}
        except CompileError as error:
            raise CompileError(f"{node.meta['source'] or 'a call'}: {error}") from None
        x, y = operands
        ins, out = equation.replace(" ", "").split("->")
        for letters, operand in zip(ins.split(","), (x, y), strict=True):
            size |= dict(zip(letters, operand.meta["val"].shape, strict=True))
        span = lambda letters: int(torch.Size([size[c] for c in letters]).numel())  # noqa: B023, E731
        edit = _Editor(graph, node)
        x = edit.arrange(x, ins.split(",")[0], plan.batch + plan.left + plan.summed)
        m, n, k = span(plan.left), span(plan.right), span(plan.summed)
        groups = [span(plan.batch)] if plan.batch else []
        product = batch_matmul.op if plan.batch else matmul.op
        x = edit.view(x, [*groups, m, k])
        y = edit.view(y, [*groups, *((n, k) if plan.transpose else (k, n))])
        z = edit.call(product, x, y, plan.transpose)
        have = plan.batch + plan.left + plan.right
        z = edit.arrange(edit.view(z, [size[c] for c in have]), have, out)
        node.replace_all_uses_with(z)
        graph.erase_node(node)
    return captured


# ---- weights ---------------------------------------------------------------------------------------------------------

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float64: "float64"}


def _slice(
    x: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Step | None:
    size = x.shape[dim]
    if step != 1:
        raise CompileError(f"a weight is sliced with step {step}; recipes slice without gaps.")
    start, end, _ = slice(start, end).indices(size)
    return None if (start, end) == (0, size) else Step("slice", (dim % x.ndim, start, end))


def _view(x: torch.Tensor, shape: list[int]) -> Step:
    return Step("view", tuple(x.new_empty(x.shape).view(shape).shape))


def _cast(x: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Step | None:
    return None if dtype in (None, x.dtype) else Step("cast", (_DTYPE_NAMES[dtype],))


def _unsqueeze(x: torch.Tensor, dim: int) -> Step:
    return Step("view", tuple(x.unsqueeze(dim).shape))


def _permute(x: torch.Tensor, dims: list[int]) -> Step:
    return Step("permute", tuple(d % x.ndim for d in dims))


FOLDS: dict[Any, Callable[..., Step | None]] = {
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.slice.Tensor: _slice,
    aten._to_copy.default: _cast,
    aten.unsqueeze.default: _unsqueeze,
    aten.permute.default: _permute,
    aten.t.default: lambda x: Step("permute", (1, 0)),
    aten.exp.default: lambda x: Step("exp"),
    aten.neg.default: lambda x: Step("neg"),
}


@dataclass(frozen=True)
class Folded:
    """A captured piece whose weights are final: `weights[name]` says of which parameter and by which steps."""

    captured: Captured
    weights: dict[str, tuple[str, tuple[Step, ...]]]


def fold_weights(captured: Captured, is_weight: Callable[[str], bool]) -> Folded:
    """Move every node whose inputs are all weights out of the graph, into the recipe of a new weight input.

    So no graph holds a run-time slice, cast or transpose of a weight. Inputs nobody reads any more are dropped.

    Raises:
        CompileError: arithmetic on weights alone that no recipe step covers.
    """
    graph = captured.module.graph
    recipe: dict[fx.Node, tuple[str, tuple[Step, ...]]] = {}
    name_of: dict[fx.Node, str] = {}
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for node, name in zip(placeholders, captured.inputs, strict=True):
        name_of[node] = name
        if is_weight(name):
            recipe[node] = (name, ())
    for node in graph.nodes:
        if node.op != "call_function" or not node.all_input_nodes or not set(node.all_input_nodes) <= set(recipe):
            continue
        if node.target not in FOLDS or len(node.all_input_nodes) != 1:
            raise CompileError(
                f"{node.meta['source']}: {node.target} works on weights alone ({_names(node, recipe)}); "
                "no recipe step does that, so it would run on the device at every step."
            )
        source = node.all_input_nodes[0]
        parameter, steps = recipe[source]
        step = FOLDS[node.target](source.meta["val"], *node.args[1:], **node.kwargs)
        recipe[node] = (parameter, steps if step is None else (*steps, step))
    return _with_inputs(captured, recipe, name_of)


def _names(node: fx.Node, recipe: dict[fx.Node, tuple[str, tuple[Step, ...]]]) -> str:
    return ", ".join(recipe[n][0] for n in node.all_input_nodes)


def bytes_only(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps without views that no later step looks at: a graph says itself in which shape it reads a weight."""
    kept: list[Step] = []
    looked_at = False
    for step in reversed(steps):
        if step.kind == "view":
            if looked_at:
                kept.append(step)
            looked_at = False
        else:
            kept.append(step)
            looked_at |= step.kind in ("slice", "permute", "tile")
    return tuple(reversed(kept))


def weight_name(parameter: str, steps: tuple[Step, ...]) -> str:
    """The graph weight's name: the parameter's, then what was done to its bytes (views do nothing to them)."""
    return ".".join([parameter, *(s.short() for s in steps if s.kind != "view")])


def _with_inputs(
    captured: Captured, recipe: dict[fx.Node, tuple[str, tuple[Step, ...]]], name_of: dict[fx.Node, str]
) -> Folded:
    """Rebuild the graph's inputs: folded nodes that are still read become placeholders, unread inputs go."""
    graph = captured.module.graph
    weights: dict[str, tuple[str, tuple[Step, ...]]] = {}
    kept: list[tuple[str, fx.Node]] = []
    first = next(n for n in graph.nodes if n.op != "placeholder")
    made: dict[tuple[str, tuple[Step, ...]], fx.Node] = {}
    for node, (parameter, steps) in recipe.items():
        if not any(user not in recipe for user in node.users):
            continue
        if (parameter, steps) not in made:
            with graph.inserting_before(first):
                new = graph.placeholder(f"weight_{len(made)}")
            like = node.meta["val"]
            new.meta = {"val": torch.empty(like.shape, dtype=like.dtype, device="meta"), "source": ""}
            made[parameter, steps] = new
            name = weight_name(parameter, steps)
            if name in weights:  # the same bytes in two shapes: a second input would be a second copy
                name = f"{name}.as_{'x'.join(map(str, new.meta['val'].shape))}"
            weights[name] = (parameter, steps)
            kept.append((name, new))
        node.replace_all_uses_with(made[parameter, steps], delete_user_cb=lambda user: user not in recipe)
    for node in reversed(list(recipe)):
        graph.erase_node(node)
    inputs = [(name_of[n], n) for n in graph.nodes if n.op == "placeholder" and n in name_of]
    for _, node in [x for x in inputs if not x[1].users]:
        graph.erase_node(node)
    order = {n: i for i, n in enumerate(graph.nodes)}
    final = sorted([x for x in inputs if x[1].users] + kept, key=lambda x: order[x[1]])
    captured.module.recompile()
    folded = dataclasses.replace(captured, inputs=tuple(name for name, _ in final))
    return Folded(folded, weights)


# ---- equal calls -----------------------------------------------------------------------------------------------------


def simplify(captured: Captured) -> Captured:
    """Views of views become one view, views that change nothing go, and equal calls are made once.

    Every node is a pure function (states go in and come out), so equal calls have equal results.
    """
    graph = captured.module.graph
    seen: dict[Any, fx.Node] = {}
    for node in [n for n in graph.nodes if n.op == "call_function"]:
        if node.target is aten.view.default:
            _shorten_view(node)
        same = seen.setdefault((node.target, _frozen(node.args), _frozen(node.kwargs)), node)
        if node.target is aten.view.default and node.args[0].meta["val"].shape == node.meta["val"].shape:
            same = node.args[0]
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return captured


def _shorten_view(node: fx.Node) -> None:
    while isinstance(node.args[0], fx.Node) and node.args[0].target is aten.view.default:
        node.args = (node.args[0].args[0], node.args[1])


def _frozen(value: Any) -> Any:
    """Arguments as something hashable; nodes hash by identity."""
    if isinstance(value, dict):
        return tuple((k, _frozen(value[k])) for k in sorted(value))
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    exact = repr(value) if isinstance(value, float) else value  # 0.0 and -0.0 differ
    return (type(value).__name__, exact)  # 1, 1.0 and True differ
