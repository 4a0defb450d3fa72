"""Graphs of several ranks on one CPU: each runs until it has to meet others, and goes on when its group is there.

The ranks are generators; nothing runs at the same time and nothing waits for ever. Where a group does not come together
(another collective, another size, or none at all) the difference is an error that names both sides.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kimi_graph.errors import BundleError

from .node import Op, evaluate


@dataclass(frozen=True)
class Meeting:
    """A rank at a collective: the node with its attributes, and the rank's inputs by name."""

    op: Op
    given: Mapping[str, Tensor]

    @property
    def group(self) -> str:
        """The name of its group."""
        assert self.op.node.semantics is not None
        return self.op.need(self.op.node.semantics.group, str)

    @property
    def first(self) -> Tensor:
        return next(iter(self.given.values()))

    @property
    def terms(self) -> tuple[Any, ...]:
        """What all ranks of a group have to agree on."""
        node = self.op.node
        assert node.semantics is not None
        attrs = sorted((name, value) for name, value in node.attrs.items() if name != node.semantics.own)
        return (node.type, attrs, *((tuple(x.shape), x.dtype) for x in self.given.values()))

    def check_place(self, rank: int) -> None:
        """Raises:
        BundleError: the graph is that of a rank at another place of the group.
        """
        own = self.op.node.semantics.own if self.op.node.semantics else ""
        if own:
            found = self.op.need(own, int)
            self.op.require(found == rank, f"{own} is {found} on rank {rank} of its group")

    def results(self, parts: Sequence[Mapping[str, Tensor]]) -> list[tuple[Tensor, ...]]:
        """What each rank gets of the inputs of all."""
        semantics = self.op.node.semantics
        assert semantics is not None and semantics.together is not None
        evaluate(self.op, {name: x.to("meta") for name, x in self.given.items()})  # attributes and shapes
        alone = len(self.given) == 1
        made = semantics.together(self.op, [next(iter(p.values())) if alone else p for p in parts])
        return [tuple(x.clone() for x in own) if isinstance(own, tuple) else (own.clone(),) for own in made]

    def __str__(self) -> str:
        dtype = str(self.first.dtype).removeprefix("torch.")
        return f"{self.op.node.name} ({self.op.node.type} {self.group} {list(self.first.shape)} {dtype})"


Steps = Generator[Meeting, tuple[Tensor, ...], Any]
Groups = Callable[[str], Sequence[Sequence[int]]]


def run_together(ranks: Sequence[Steps], groups: Groups) -> list[Any]:
    """What each rank's run gives.

    Args:
        ranks: the runs, see `Executor.steps`, rank 0 first.
        groups: the rank lists of a group's name; every rank is in one of them.

    Raises:
        BundleError: ranks of a group come to different collectives, or never to one.
    """
    results: dict[int, Any] = {}
    waiting: dict[int, Meeting] = {}
    for rank in range(len(ranks)):
        _go_on(ranks, rank, None, waiting, results)
    while waiting:
        ready = [group for group in _called(waiting, groups) if all(rank in waiting for rank in group)]
        ready = [g for g in ready if len({waiting[rank].group for rank in g}) == 1]
        if not ready:
            raise BundleError(_stuck(waiting, results, groups))
        for group in ready:
            made = _meet({rank: waiting.pop(rank) for rank in group})
            for rank, value in made.items():
                _go_on(ranks, rank, value, waiting, results)
    return [results[rank] for rank in range(len(ranks))]


def _go_on(ranks: Sequence[Steps], rank: int, value: Any, waiting: dict[int, Meeting], results: dict[int, Any]) -> None:
    """One rank up to its next meeting, or to its end."""
    try:
        waiting[rank] = ranks[rank].send(value)
    except StopIteration as done:
        results[rank] = done.value


def _called(waiting: Mapping[int, Meeting], groups: Groups) -> list[tuple[int, ...]]:
    """The groups that somebody waits for, each once."""
    found = {}
    for rank, meeting in waiting.items():
        found.update((tuple(group), None) for group in groups(meeting.group) if rank in group)
    return list(found)


def _meet(group: dict[int, Meeting]) -> dict[int, tuple[Tensor, ...]]:
    first, *others = group.items()
    for rank, meeting in others:
        if meeting.terms != first[1].terms:
            raise BundleError(f"rank {first[0]} is at {first[1]}, rank {rank} of its group at {meeting}.")
    for place, meeting in enumerate(group.values()):
        meeting.check_place(place)
    return dict(zip(group, first[1].results([meeting.given for meeting in group.values()]), strict=True))


def _stuck(waiting: Mapping[int, Meeting], results: Mapping[int, Any], groups: Groups) -> str:
    rank, meeting = next(iter(waiting.items()))
    group = next(g for g in groups(meeting.group) if rank in g)
    other = next(r for r in group if r not in waiting or waiting[r].group != meeting.group)
    where = "has finished" if other in results else f"is at {waiting[other]}"
    return f"rank {rank} waits at {meeting} for ever: rank {other} of its group {where}."
