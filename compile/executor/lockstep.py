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
    """A rank at a collective: the node with its attributes, the name of its group, and the rank's input."""

    op: Op
    group: str
    given: Tensor

    @property
    def terms(self) -> tuple[Any, ...]:
        """What all ranks of a group have to agree on."""
        return (self.op.node.type, sorted(self.op.node.attrs.items()), tuple(self.given.shape), self.given.dtype)

    def __str__(self) -> str:
        dtype = str(self.given.dtype).removeprefix("torch.")
        return f"{self.op.node.name} ({self.op.node.type} {self.group} {list(self.given.shape)} {dtype})"


Steps = Generator[Meeting, Tensor, Any]
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


def _meet(group: dict[int, Meeting]) -> dict[int, Tensor]:
    first, *others = group.items()
    for rank, meeting in others:
        if meeting.terms != first[1].terms:
            raise BundleError(f"rank {first[0]} is at {first[1]}, rank {rank} of its group at {meeting}.")
    op = first[1].op
    assert op.node.semantics is not None and op.node.semantics.together is not None
    evaluate(op, {"x": first[1].given.to("meta")})  # attributes and shape
    parts = op.node.semantics.together(op, [meeting.given for meeting in group.values()])
    return {rank: part.clone() for rank, part in zip(group, parts, strict=True)}


def _stuck(waiting: Mapping[int, Meeting], results: Mapping[int, Any], groups: Groups) -> str:
    rank, meeting = next(iter(waiting.items()))
    group = next(g for g in groups(meeting.group) if rank in g)
    other = next(r for r in group if r not in waiting or waiting[r].group != meeting.group)
    where = "has finished" if other in results else f"is at {waiting[other]}"
    return f"rank {rank} waits at {meeting} for ever: rank {other} of its group {where}."
