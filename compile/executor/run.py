"""Runs a GE graph on the CPU, from the bytes of its file: exactly, or in the dtypes it describes."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kimi_graph.compile.ge_proto import ModelDef, dtype_of, shape_of
from kimi_graph.errors import BundleError

from .graph import Graph, check_descriptions, parse
from .lockstep import Meeting
from .node import Edge, Node, Op, Selections, disagreement, evaluate, gather_arguments

MODES = ("exact", "native")
Observer = Callable[[Node, tuple[Tensor, ...]], None]


@dataclass(frozen=True)
class Ran:
    """`outputs` in NetOutput's order; `states` by RefData name, as they are after the step."""

    outputs: tuple[Tensor, ...]
    states: dict[str, Tensor]


class Executor:
    """A GE graph that runs on the CPU.

    Modes:
        exact: every floating tensor is float64 whatever its description says, casts between floats do nothing. So is a
            tensor of int8 that holds floats (`holds_floats`): quantisation divides and does not round.
        native: dtypes as described. Products, sums and element functions of half floats are computed in float32 and
            rounded once at the operator's output, as the hardware does; each output is checked against its description.

    Integers are exact in both. RefData is written only by operators whose output is that input's memory.

    Attributes:
        nodes: by name. inputs, states: names of Data and RefData nodes in the order of their index.
        types: operator types that run, for `provenance_counts`.
    """

    def __init__(self, model: ModelDef) -> None:
        """Raises BundleError: see `parse`; a graph without NetOutput; descriptions that contradict each other."""
        self._graph: Graph = parse(model, BundleError)
        check_descriptions(model, BundleError)
        if self._graph.outputs is None:
            raise BundleError("the graph has no NetOutput")
        self.nodes, self.inputs, self.states = self._graph.nodes, self._graph.inputs, self._graph.states
        self._order = tuple(n for n in self._graph.order if n.name in self._graph.needed and n.type != "NetOutput")
        self._last_use = self._find_last_uses()
        self.types = frozenset(n.type for n in self._order if n.semantics)

    def _find_last_uses(self) -> dict[str, list[Edge]]:
        """Node -> edges nobody reads after it."""
        last: dict[Edge, str] = {}
        for node in self._order:
            last |= {(node.name, i): node.name for i in range(len(node.descs))}
            last |= dict.fromkeys(node.edges, node.name)
        assert self._graph.outputs is not None
        free: dict[str, list[Edge]] = {}
        for edge, node_name in last.items():
            if edge not in self._graph.outputs:
                free.setdefault(node_name, []).append(edge)
        return free

    def run(
        self,
        inputs: Mapping[str, Tensor],
        states: Mapping[str, Tensor],
        mode: str,
        *,
        selections: Selections | None = None,
        observe: Observer | None = None,
        in_place: bool = False,
    ) -> Ran:
        """One step of a graph of one rank.

        Args:
            inputs, states: tensors by name of the Data and RefData nodes.
            selections: records or replays choices of experts and top-k.
            observe: called after every node with its outputs.
            in_place: write the states that are given, as a device does; else they are left as they are. They may be
                views with any strides. Native mode alone: in exact mode states are of another dtype.

        Raises:
            BundleError: missing or unknown names, tensors that are not as described, an operator used in a way that has
                no semantics, a collective.
        """
        try:
            meeting = next(self.steps(inputs, states, mode, selections=selections, observe=observe, in_place=in_place))
        except StopIteration as done:
            return done.value
        raise BundleError(f"{meeting}: one rank alone cannot run a collective; run all ranks in lockstep.")

    def steps(
        self,
        inputs: Mapping[str, Tensor],
        states: Mapping[str, Tensor],
        mode: str,
        *,
        selections: Selections | None = None,
        observe: Observer | None = None,
        in_place: bool = False,
    ) -> Generator[Meeting, tuple[Tensor, ...], Ran]:
        """`run` of one rank among others: stops at every collective, and goes on with what that gives this rank."""
        if mode not in MODES:
            raise BundleError(f"mode {mode!r} is not one of {', '.join(MODES)}.")
        exact = mode == "exact"
        assert not (in_place and exact), "in exact mode states are of another dtype than those given"
        self._check_names("input", inputs, self.inputs)
        self._check_names("state", states, self.states)
        values: dict[Edge, Tensor] = {}
        kept: dict[str, Tensor] = {}
        for node in self._order:
            if node.type == "Data":
                outputs = (_given(node, inputs[node.name], exact=exact),)
            elif node.type == "RefData":
                state = _given(node, states[node.name], exact=exact)
                kept[node.name] = state if in_place else state.clone()
                outputs = (kept[node.name],)
            else:
                op = Op(node, exact=exact, error=BundleError, selections=selections)
                given = gather_arguments(node, values.__getitem__)
                assert node.semantics is not None
                if node.semantics.together is None:
                    outputs = self._compute(op, given)
                else:
                    outputs = yield Meeting(op, {name: x for name, x in given.items() if x is not None})
                    _check_outputs(op, outputs)
            if observe:
                observe(node, outputs)
            values |= {(node.name, i): value for i, value in enumerate(outputs)}
            for edge in self._last_use.get(node.name, ()):
                values.pop(edge, None)
        assert self._graph.outputs is not None
        return Ran(
            outputs=tuple(values[edge] for edge in self._graph.outputs),
            states={n: kept[n] if n in kept else self._unread(n, states[n], exact=exact) for n in self.states},
        )

    def meetings(self) -> Generator[Meeting, tuple[Tensor, ...], None]:
        """`steps` without numbers: the collectives alone, in the order they run, on meta tensors."""
        for node in self._order:
            if node.semantics is not None and node.semantics.together is not None:
                given = gather_arguments(node, self._described)
                op = Op(node, exact=False, error=BundleError)
                yield Meeting(op, {name: x for name, x in given.items() if x is not None})

    def _described(self, edge: Edge) -> Tensor:
        """A tensor without contents, as an edge is described."""
        desc = self.nodes[edge[0]].descs[edge[1]]
        return torch.empty(shape_of(desc), dtype=dtype_of(desc), device="meta")

    def _compute(self, op: Op, given: dict[str, Any]) -> tuple[Tensor, ...]:
        outputs = evaluate(op, given)
        _check_outputs(op, outputs)
        return self._own_memory(op.node, given, outputs)

    def _own_memory(self, node: Node, given: dict[str, Any], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """torch slices and transposes without copying, GE copies: a later in-place write must not reach the copy."""
        assert node.semantics is not None
        touched = (*node.edges, *((node.name, i) for i in range(len(outputs))))
        if node.semantics.view or not any(edge in self._graph.memory.written for edge in touched):
            return outputs
        shared = {
            t.untyped_storage().data_ptr()
            for g in given.values()
            if g is not None
            for t in (g if isinstance(g, list) else [g])
        }
        return tuple(
            value.clone()
            if name not in node.semantics.in_place and value.untyped_storage().data_ptr() in shared
            else value
            for name, value in zip(_output_names(node, len(outputs)), outputs, strict=True)
        )

    def _check_names(self, what: str, given: Mapping[str, Tensor], wanted: tuple[str, ...]) -> None:
        missing, unknown = sorted(set(wanted) - set(given)), sorted(set(given) - set(wanted))
        if missing or unknown:
            raise BundleError(
                f"{what}s of the graph: missing {', '.join(missing) or 'none'}; unknown {', '.join(unknown) or 'none'}."
            )

    def _unread(self, name: str, state: Tensor, *, exact: bool) -> Tensor:
        return _given(self._graph.nodes[name], state, exact=exact).clone()


def _check_outputs(op: Op, outputs: tuple[Tensor, ...]) -> None:
    for index, (desc, value) in enumerate(zip(op.node.descs, outputs, strict=True)):
        problem = disagreement(desc, value, exact=op.exact)
        op.require(problem is None, f"output {desc.name or index} {problem}")


def _output_names(node: Node, count: int) -> tuple[str, ...]:
    assert node.semantics is not None
    names = node.semantics.outputs
    return names if len(names) == count else ("",) * count


def _given(node: Node, value: Tensor, *, exact: bool) -> Tensor:
    """An input of the graph, float64 where floats are exact."""
    if exact and value.is_floating_point():
        value = value.to(torch.float64)
    problem = disagreement(node.descs[0], value, exact=exact)
    if problem:
        raise BundleError(f"{node.name} ({node.type}): the tensor given {problem}.")
    return value
