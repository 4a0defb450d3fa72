"""A graph of one rank in a process of its own: at every collective it meets the processes of its group, over gloo.

What lockstep shows in one process (`lockstep`), this shows with ranks that know nothing of each other: that they come
to the same collectives in the same order, with the same sizes. Each gathers what its group gives and takes its own
result of that, so the numbers are those of lockstep to the bit.
"""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .lockstep import Groups, Meeting, Steps

Connected = dict[str, tuple[list[int], Any]]


def connect(names: Iterable[str], groups: Groups, timeout: timedelta = timedelta(minutes=5)) -> Connected:
    """The process groups that this rank is in, by name. Every process has to call it with the same names.

    Args:
        names: of the groups of all graphs. groups: rank lists of a name.
        timeout: how long a rank waits for the others before it is an error.
    """
    mine: Connected = {}
    for name in sorted(set(names)):
        for ranks in groups(name):
            made = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
            if dist.get_rank() in ranks:
                mine[name] = list(ranks), made
    return mine


def run_alone(steps: Steps, connected: Connected) -> Any:
    """What the run of this process's rank gives, see `Executor.steps`."""
    made: Any = None
    while True:
        try:
            meeting = steps.send(made)
        except StopIteration as done:
            return done.value
        made = _meet(meeting, *connected[meeting.group])


def _meet(meeting: Meeting, ranks: list[int], group: Any) -> tuple[Tensor, ...]:
    terms: list[Any] = [None] * len(ranks)
    dist.all_gather_object(terms, str(meeting.terms), group=group)
    other = next((i for i, found in enumerate(terms) if found != terms[0]), 0)
    meeting.op.require(other == 0, f"ranks {ranks[0]} and {ranks[other]} differ: {terms[0]} and {terms[other]}")
    parts: list[dict[str, Tensor]] = [{} for _ in ranks]
    for name, x in meeting.given.items():
        given = x.contiguous()
        found = [torch.empty_like(given) for _ in ranks]
        dist.all_gather([part.view(torch.uint8) for part in found], given.view(torch.uint8), group=group)
        for part, tensor in zip(parts, found, strict=True):
            part[name] = tensor
    place = ranks.index(dist.get_rank())
    meeting.check_place(place)
    return meeting.results(parts)[place]
