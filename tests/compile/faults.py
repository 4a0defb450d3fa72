"""Devices of which something is broken: what bring-up has to find, made on a CPU.

A fault is of one rank: at one node of a phase's graphs, at every node of a type, in a weight's binding, or in the order
of a group's ranks. `draw` takes one at random that shows: a fault that changes no tensor is none.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kimi_graph.compile.cut import computing, parsed
from kimi_graph.compile.device import CpuDevice, Groups, Job
from kimi_graph.compile.executor import Executor, Node, Ran
from kimi_graph.compile.executor.node import Op
from kimi_graph.compile.ge_proto import ModelDef
from kimi_graph.compile.localise import Finding, differs
from kimi_graph.compile.sides import Recorded

KINDS = ("wrong dtype", "swapped shard", "wrong scale", "wrong group order", "stale state", "dropped node")
ORDERED = ("HcomAllGather", "HcomReduceScatter")  # what they give depends on the order of ranks
FACTORS = (0.5, 2.0, 1.1, 0.9, 0.0883883, -1.0)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is broken.

    Attributes:
        rank: whose device. graph: name of the graph, node: of the node; everywhere: all nodes of the type instead.
        factor: of a scale. name: of a weight or group. other: rank whose shard it is. order: of a group's ranks.
    """

    kind: str
    rank: int
    graph: str = ""
    node: str = ""
    type: str = ""
    everywhere: bool = False
    factor: float = 1.0
    name: str = ""
    other: int = -1
    order: tuple[int, ...] = ()

    def hits(self, node: Node, graph: str) -> bool:
        if self.everywhere:
            return node.type == self.type
        return node.name == self.node and graph.startswith(self.graph)

    def alter(self, x: Tensor, given: Mapping[str, Any]) -> Tensor:
        """What the broken device gives in place of `x`."""
        if self.kind == "wrong scale":
            return (x.double() * self.factor).to(x.dtype) if x.is_floating_point() else x
        if self.kind == "wrong dtype":
            return _misread(x)
        first = next((t for t in given.values() if isinstance(t, Tensor)), None)
        passes = first is not None and first.numel() == x.numel() and first.dtype == x.dtype
        return first.reshape(x.shape).clone() if passes and first is not None else torch.zeros_like(x)

    def found_by(self, finding: Finding) -> bool:
        """Whether a finding names the right operator and rank."""
        if self.kind == "wrong group order":
            same = finding.type in ORDERED if self.graph else finding.node == self.name
            return set(finding.ranks) <= set(self.order) and same
        if self.kind == "swapped shard":
            return set(finding.ranks) <= {self.rank, self.other} and finding.weight == self.name
        same = finding.type == self.type if self.everywhere else finding.node == self.node
        return finding.ranks == (self.rank,) and same


def _misread(x: Tensor) -> Tensor:
    """Bytes of half floats read as the other kind; others in a narrower dtype."""
    if x.dtype in (torch.bfloat16, torch.float16):
        other = torch.float16 if x.dtype == torch.bfloat16 else torch.bfloat16
        return x.contiguous().view(other).to(x.dtype)
    if x.dtype == torch.float32:
        return x.to(torch.bfloat16).to(x.dtype)
    return x.to(torch.int8).to(x.dtype) if x.dtype in (torch.int32, torch.int64) else x


class _Broken(Executor):
    """A graph on the broken device."""

    def __init__(self, model: ModelDef, fault: Fault) -> None:
        super().__init__(model)
        self.fault, self.name = fault, model.graph[0].name

    def _compute(self, op: Op, given: dict[str, Any]) -> tuple[Tensor, ...]:
        if not self.fault.hits(op.node, self.name):
            return super()._compute(op, given)
        semantics = op.node.semantics
        assert semantics is not None
        before = {name: given[name].clone() for name in semantics.in_place}
        outputs = super()._compute(op, given)
        if self.fault.kind == "stale state":
            for name, x in before.items():
                given[name].copy_(x)
            return outputs
        names = semantics.outputs if len(semantics.outputs) == len(outputs) else ("",) * len(outputs)
        return tuple(
            x if name in semantics.in_place else self.fault.alter(x, given)
            for name, x in zip(names, outputs, strict=True)
        )


class FaultyDevice(CpuDevice):
    """A CPU in place of devices, one of which is broken."""

    def __init__(self, said: Mapping[str, str], fault: Fault) -> None:
        super().__init__(said)
        self.fault = fault

    def executor(self, rank: int, model: ModelDef) -> Executor:
        node = self.fault.kind not in ("swapped shard", "wrong group order")
        return _Broken(model, self.fault) if node and rank == self.fault.rank else Executor(model)

    def run(self, jobs: Mapping[int, Job], groups: Groups) -> dict[int, Ran]:
        f = self.fault
        if f.kind == "swapped shard" and {f.rank, f.other} <= set(jobs) and f.name in jobs[f.rank].inputs:
            jobs = dict(jobs)
            mine, theirs = (jobs[r].inputs[f.name] for r in (f.rank, f.other))
            jobs[f.rank] = replace(jobs[f.rank], inputs={**jobs[f.rank].inputs, f.name: theirs})
            jobs[f.other] = replace(jobs[f.other], inputs={**jobs[f.other].inputs, f.name: mine})
        if f.kind == "wrong group order" and all(j.model.graph[0].name.startswith(f.graph) for j in jobs.values()):
            lists = [list(f.order) if set(own) == set(f.order) else own for own in groups.get(f.name, ())]
            groups = {**groups, f.name: lists}
        return super().run(jobs, groups)


# ---- at random -------------------------------------------------------------------------------------------------------


def draw(random_: random.Random, runs: Sequence[Recorded], groups: Groups, kind: str) -> Fault:
    """A fault that shows in what ranks did.

    Args:
        runs: with all values. groups: rank lists by name.
    """
    for _ in range(1000):
        made = _DRAWS[kind](random_, random_.choice(runs), runs, groups, kind)
        if made is not None:
            return made
    raise AssertionError(f"no {kind} shows in {len(runs)} runs")


def _of_node(random_: random.Random, run: Recorded, runs: Any, groups: Any, kind: str) -> Fault | None:
    graph = parsed(run.model)
    node = random_.choice(computing(graph))
    assert node.semantics is not None
    edge = node.name, 0
    if node.semantics.together is not None or edge in graph.memory.written or edge not in run.values:
        return None
    given = {n: _value(run, e) for n, e in node.arguments.items() if isinstance(e, tuple)}
    fault = Fault(
        kind=kind, rank=run.rank, graph=run.graph, node=node.name, type=node.type,
        everywhere=random_.random() < 0.4, factor=random_.choice(FACTORS),
    )  # fmt: skip
    value = run.values[edge]
    return fault if differs(fault.alter(value, given), value, node.type) else None


def _value(run: Recorded, edge: tuple[str, int]) -> Tensor:
    return run.job.inputs[edge[0]] if edge[0] in run.job.inputs else run.values[edge]


def _of_state(random_: random.Random, run: Recorded, runs: Any, groups: Any, kind: str) -> Fault | None:
    graph = parsed(run.model)
    writers = [n for n in computing(graph) if n.semantics is not None and n.semantics.in_place]
    if not writers:
        return None
    node = random_.choice(writers)
    assert node.semantics is not None
    outputs = [i for i, name in enumerate(node.semantics.outputs) if name in node.semantics.in_place]
    state = graph.memory.written[node.name, outputs[0]][0]
    if state not in run.job.states or not differs(run.job.states[state], run.ran.states[state], node.type):
        return None
    return Fault(kind=kind, rank=run.rank, graph=run.graph, node=node.name, type=node.type)


def _of_weight(random_: random.Random, run: Recorded, runs: Sequence[Recorded], groups: Any, kind: str) -> Fault | None:
    weights = [name for name in run.job.inputs if name.startswith("p.")]
    others = [r for r in runs if r.graph == run.graph and r.rank != run.rank]
    if not weights or not others:
        return None
    name, other = random_.choice(weights), random_.choice(others)
    if not differs(other.job.inputs[name], run.job.inputs[name], ""):
        return None
    return Fault(kind=kind, rank=run.rank, name=name, other=other.rank)


def _of_group(random_: random.Random, run: Recorded, runs: Any, groups: Groups, kind: str) -> Fault | None:
    known = [(name, own) for name, lists in groups.items() for own in lists if len(own) > 1 and ":" not in name]
    if not known:
        return None
    name, own = random_.choice(known)
    graph = random_.choice(("", run.graph))  # everywhere, or where one graph is run
    ordered = any(n.type in ORDERED and n.attrs.get("group") == name for n in parsed(run.model).nodes.values())
    if graph and (run.rank not in own or not ordered):
        return None
    order = list(own)
    while order == list(own):
        random_.shuffle(order)
    return Fault(kind=kind, rank=own[0], graph=graph, name=name, order=tuple(order))


_DRAWS = {
    "wrong dtype": _of_node, "wrong scale": _of_node, "dropped node": _of_node, "stale state": _of_state,
    "swapped shard": _of_weight, "wrong group order": _of_group,
}  # fmt: skip
