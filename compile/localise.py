"""Which operator of which rank is wrong: every node of a run held against the CPU, by what the device itself gave it.

A run gives the result of every node (`cut.probed`). Each node is computed again on the CPU from the device's own values
of its inputs, so that nothing adds up: what differs is this node's doing. Where a node differs, what it would take for
it to be right is tried: another scale, an input that was passed through, the weight of another rank, another order of
the ranks in its group, a state that nobody wrote.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kimi_graph.errors import BundleError, KimiGraphError, VerifyError

from .cut import computing, cut, parsed, probed, probes
from .device import Device, Groups, Job, Ran
from .executor import Node
from .executor.graph import Graph
from .executor.lockstep import Meeting
from .executor.node import Edge, Op, evaluate, gather_arguments

# A result is rounded once or twice: two units of its dtype, of its 2-norm. Products of float32 may be made in a
# narrower one, 2^-10 each.
ALLOWED = {torch.float32: 1e-3, torch.float64: 1e-3}
CHOOSERS = frozenset({"TopKV2", "MoeGatingTopK", "LightningIndexer", "QuantLightningIndexer", "Sort"})
SAME_CHOICES = 0.9  # of what such operators choose: near ties go one way or the other


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A tensor that differs.

    Attributes:
        node, type: whose result it is; of a group its name. ranks: on which it differs.
        error: of its 2-norm, or the share of integers that differ. why: what would explain it; "" if nothing does.
        weight: a weight that is another rank's.
    """

    node: str
    type: str
    ranks: tuple[int, ...]
    error: float
    why: str = ""
    weight: str = ""

    def __str__(self) -> str:
        where = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        why = f": {self.why}" if self.why else ""
        return f"{self.node} ({self.type}) on {where} is off by {self.error:.2g}{why}"

    def to_json(self) -> dict[str, Any]:
        error = self.error if math.isfinite(self.error) else str(self.error)
        return {
            "node": self.node, "type": self.type, "ranks": list(self.ranks), "error": error, "why": self.why,
            "weight": self.weight,
        }  # fmt: skip


# ---- tensors ---------------------------------------------------------------------------------------------------------


def difference(found: Tensor, expected: Tensor) -> float:
    """Of the 2-norm, or of integers the share that differs; infinite where they cannot be compared.

    Where NaN is expected nobody says what is there: rows of a buffer that no token fills.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf
    if not expected.numel():
        return 0.0
    if not expected.is_floating_point():
        return float((found != expected).double().mean())
    if torch.equal(found, expected):  # as nearly all are; the rest is five passes in float64
        return 0.0
    a, b = found.double(), expected.double()
    same, unknown = a == b, b.isnan()  # the same: infinities of masks too
    error = float((a - b).masked_fill_(same | unknown, 0).norm())
    scale = float(b.masked_fill_(same & ~b.isfinite() | unknown, 0).norm())
    return error / scale if scale else (math.inf if error else 0.0)


def allowed(expected: Tensor, type_: str) -> float:
    """How large a difference may be that rounding makes."""
    if not expected.is_floating_point():
        return 1 - SAME_CHOICES if type_ in CHOOSERS else 0.0
    return ALLOWED.get(expected.dtype, 2 * torch.finfo(expected.dtype).eps)


def differs(found: Tensor, expected: Tensor, type_: str) -> bool:
    return not difference(found, expected) <= allowed(expected, type_)


# ---- a run -----------------------------------------------------------------------------------------------------------


@dataclass
class Values:
    """What a rank's nodes gave, by edge; `states`: memory of the states, by name, as the device left it last."""

    by_edge: dict[Edge, Tensor]
    after: Mapping[str, Tensor]
    before: dict[str, Tensor] = field(default_factory=dict)


def first_difference(device: Device, jobs: Mapping[int, Job], groups: Groups) -> Finding | None:
    """Run graphs on a device and hold every node against the CPU.

    Args:
        jobs: of ranks that meet each other, with one graph but for where a rank stands.

    Returns:
        The first that differs, None where none does.
    """
    graphs = {rank: parsed(job.model) for rank, job in jobs.items()}
    edges = probes(next(iter(graphs.values())))
    asked = {rank: Job(probed(job.model, edges), job.inputs, job.states) for rank, job in jobs.items()}
    ran = device.run(asked, groups)
    values = {rank: _values(graphs[rank], jobs[rank], ran[rank], edges) for rank in jobs}
    order = computing(next(iter(graphs.values())))
    writers = _last_writers(next(iter(graphs.values())))
    for node in order:
        check = _Check(graphs, jobs, groups, values, node.name, writers.get(node.name, {}))
        if (found := check.finding()) is not None:
            return found
    return None


def locate(device: Device, jobs: Mapping[int, Job], groups: Groups) -> Finding | None:
    """`first_difference`; where the device refuses to run the graph, of as much of it as it runs.

    A wrong value may stop a later operator, an index say, before anybody sees what was wrong.

    Raises:
        KimiGraphError: what runs is right; the node that does not run is named.
    """
    try:
        return first_difference(device, jobs, groups)
    except KimiGraphError as error:
        why = error
        order = [node.name for node in computing(parsed(next(iter(jobs.values())).model))]
        runs, fails = 0, len(order)
        while fails - runs > 1:
            middle = (runs + fails) // 2
            kept = set(order[:middle])
            try:
                found = first_difference(device, {r: _prefix(job, kept) for r, job in jobs.items()}, groups)
            except KimiGraphError as other:
                fails, why = middle, other
            else:
                if found is not None:
                    return found
                runs = middle
        raise VerifyError(f"{order[fails - 1]}: {why}") from why


def _prefix(job: Job, names: set[str]) -> Job:
    """A graph's first nodes, with what they read."""
    model = cut(job.model, names, job.model.graph[0].name).model
    graph = parsed(model)
    return Job(model, {n: job.inputs[n] for n in graph.inputs}, {n: job.states[n] for n in graph.states})


def _values(graph: Graph, job: Job, ran: Ran, edges: Sequence[Edge]) -> Values:
    made = ran.outputs[len(ran.outputs) - len(edges) :]
    by_edge = dict(zip(edges, made, strict=True))
    by_edge |= {(name, 0): job.inputs[name] for name in graph.inputs}
    before = {name: job.states[name].clone() for name in graph.states}
    by_edge |= {(name, 0): before[name] for name in graph.states}
    for node in graph.order:
        if node.type in ("Const", "Constant"):
            by_edge[node.name, 0] = _alone(node, {})[0]
    return Values(by_edge, ran.states, {name: job.states[name] for name in graph.states})


def _last_writers(graph: Graph) -> dict[str, dict[int, str]]:
    """Of nodes that write a state last: the state of each output that is its memory."""
    last: dict[Edge, tuple[str, int]] = {}
    for node in computing(graph):
        assert node.semantics is not None
        for i, name in enumerate(node.semantics.outputs):
            if name in node.semantics.in_place and (node.name, i) in graph.memory.written:
                last[graph.memory.written[node.name, i]] = node.name, i
    found: dict[str, dict[int, str]] = {}
    for (state, _), (name, i) in last.items():
        found.setdefault(name, {})[i] = state
    return found


def _alone(node: Node, given: Mapping[str, Any]) -> tuple[Tensor, ...]:
    return evaluate(Op(node, exact=False, error=BundleError), given)


@dataclass
class _Check:
    """One node on all ranks."""

    graphs: Mapping[int, Graph]
    jobs: Mapping[int, Job]
    groups: Groups
    values: Mapping[int, Values]
    name: str
    writes: Mapping[int, str]

    def finding(self) -> Finding | None:
        expected = self.expected()
        wrong: dict[int, tuple[int, float]] = {}
        for rank, outputs in expected.items():
            node = self.graphs[rank].nodes[self.name]
            for i, value in enumerate(outputs):
                found = self.found(rank, i)
                if found is not None and differs(found, value, node.type):
                    wrong.setdefault(rank, (i, difference(found, value)))
        if wrong:
            return self.explained(wrong, expected)
        for rank, outputs in expected.items():
            self.accept(rank, outputs)
        return None

    def accept(self, rank: int, outputs: tuple[Tensor, ...]) -> None:
        """Later nodes are judged by what the device has, in the memory that it is in."""
        node, by_edge = self.graphs[rank].nodes[self.name], self.values[rank].by_edge
        assert node.semantics is not None
        names = node.semantics.outputs if len(node.semantics.outputs) == len(outputs) else ("",) * len(outputs)
        for i, (name, value) in enumerate(zip(names, outputs, strict=True)):
            if name in node.semantics.in_place:
                edge = node.arguments[name]
                assert isinstance(edge, tuple)
                found = self.found(rank, i)
                by_edge[self.name, i] = by_edge[edge].copy_(value if found is None else found)
            else:
                by_edge.setdefault((self.name, i), value)

    def found(self, rank: int, i: int) -> Tensor | None:
        """What the device gave; None where it was not asked."""
        if i in self.writes:
            return self.values[rank].after[self.writes[i]]
        return self.values[rank].by_edge.get((self.name, i))

    def given(self, rank: int) -> dict[str, Any]:
        """A node's inputs; of memory that it writes a copy."""
        node = self.graphs[rank].nodes[self.name]
        found = gather_arguments(node, self.values[rank].by_edge.__getitem__)
        assert node.semantics is not None
        return {name: x.clone() if name in node.semantics.in_place else x for name, x in found.items()}

    def expected(self) -> dict[int, tuple[Tensor, ...]]:
        first = next(iter(self.graphs.values())).nodes[self.name]
        assert first.semantics is not None
        if first.semantics.together is None:
            return {r: _alone(g.nodes[self.name], self.given(r)) for r, g in self.graphs.items()}
        return dict(itertools.chain.from_iterable(self.meet(ranks).items() for ranks in self.lists()))

    def meeting(self, rank: int) -> Meeting:
        op = Op(self.graphs[rank].nodes[self.name], exact=False, error=BundleError)
        return Meeting(op, {name: x for name, x in self.given(rank).items() if x is not None})

    def lists(self) -> list[list[int]]:
        name = self.meeting(next(iter(self.graphs))).group
        return [list(ranks) for ranks in self.groups[name] if set(ranks) <= set(self.graphs)]

    def meet(self, ranks: Sequence[int]) -> dict[int, tuple[Tensor, ...]]:
        """What ranks of a group get if this is their order."""
        meetings = {rank: self.meeting(rank) for rank in ranks}
        made = meetings[ranks[0]].results([meetings[rank].given for rank in ranks])
        return dict(zip(ranks, made, strict=True))

    # ---- why ---------------------------------------------------------------------------------------------------------

    def explained(self, wrong: Mapping[int, tuple[int, float]], expected: Mapping[int, tuple[Tensor, ...]]) -> Finding:
        node = next(iter(self.graphs.values())).nodes[self.name]
        why, weight = "", ""
        for rank, (i, _) in wrong.items():
            found = self.found(rank, i)
            assert found is not None
            why, weight = next(self.reasons(rank, i, found, expected[rank][i]), ("", ""))
            if why:
                break
        error = max(e for _, e in wrong.values())
        return Finding(node=self.name, type=node.type, ranks=tuple(wrong), error=error, why=why, weight=weight)

    def reasons(self, rank: int, i: int, found: Tensor, expected: Tensor) -> Iterator[tuple[str, str]]:
        """What would explain a result, the surest first; with a weight that is another's."""
        node = self.graphs[rank].nodes[self.name]
        if found.dtype != expected.dtype or found.shape != expected.shape:
            what = [f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in (found, expected)]
            yield f"it is {what[0]}, described as {what[1]}", ""
        if i in self.writes:
            state = self.writes[i]
            if not differs(found, self.values[rank].before[state], node.type):
                yield f"state {state} is as it was before the step: the write did not reach it", ""
        yield from (
            (f"weight {name} is the part of rank {other}", name) for name, other in self.swapped(rank, i, found)
        )
        if node.semantics is not None and node.semantics.together is not None:
            yield from ((f"its group's ranks stand as {list(order)}", "") for order in self.orders(rank, i, found))
        for name, x in self.given(rank).items():
            alike = isinstance(x, Tensor) and x.numel() == found.numel() and x.dtype == found.dtype
            if alike and not differs(found.reshape(-1), x.reshape(-1), node.type):
                yield f"it is its input {name} as it came: the node was dropped", ""
        if not bool(found.bool().any()) and bool(expected.nan_to_num().bool().any()):
            yield "it is all zero: the node was dropped", ""
        yield from ((words, "") for words in _numbers(found, expected, node.type))

    def swapped(self, rank: int, i: int, found: Tensor) -> Iterator[tuple[str, int]]:
        """Weights that, taken from another rank, give what the device gave."""
        node = self.graphs[rank].nodes[self.name]
        weights = {e[0] for e in node.edges if e[0].startswith("p.") and e[0] in self.jobs[rank].inputs}
        if i in self.writes or (node.semantics is not None and node.semantics.together is not None):
            return
        for name, other in itertools.product(sorted(weights), self.jobs):
            theirs = self.jobs[other].inputs.get(name)
            if other == rank or theirs is None or torch.equal(theirs, self.jobs[rank].inputs[name]):
                continue
            swapped = self.values[rank].by_edge | {(name, 0): theirs}
            given = gather_arguments(node, lambda edge, swapped=swapped: swapped[edge].clone())
            if not differs(found, _alone(node, given)[i], node.type):
                yield name, other

    def orders(self, rank: int, i: int, found: Tensor) -> Iterator[tuple[int, ...]]:
        """Orders of the group in which the rank would get what it got; only of groups that are small."""
        ranks = next(own for own in self.lists() if rank in own)
        if len(ranks) > 6:
            return
        for order in itertools.permutations(ranks):
            try:
                made = self.meet(order)
            except KimiGraphError:
                continue
            if any(
                not differs(found, outputs[i], self.graphs[rank].nodes[self.name].type) for outputs in made.values()
            ):
                yield order


def _numbers(found: Tensor, expected: Tensor, type_: str) -> Iterator[str]:
    """Whether a result is a multiple of what it should be, or its bytes read as another dtype."""
    if not expected.is_floating_point() or found.shape != expected.shape:
        return
    a, b = found.double().flatten(), expected.double().flatten()
    if bool(torch.isfinite(a).all() and torch.isfinite(b).all()) and float(b @ b):
        factor = float(a @ b / (b @ b))
        if (
            abs(factor - 1) > 1e-2
            and factor
            and not differs((a / factor).to(expected.dtype), expected.flatten(), type_)
        ):
            yield f"it is {factor:.4g} times what it should be: a scale"
    if found.dtype == expected.dtype and expected.itemsize == 2:
        other = torch.float16 if expected.dtype == torch.bfloat16 else torch.bfloat16
        read = expected.contiguous().view(other).to(expected.dtype)
        if difference(found, read) <= allowed(expected, type_):
            yield f"its bytes were read as {str(other).removeprefix('torch.')}: a dtype"
    for narrow in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        if narrow.itemsize < expected.itemsize and torch.equal(found, expected.to(narrow).to(expected.dtype)):
            yield f"it was rounded to {str(narrow).removeprefix('torch.')}: a dtype"
