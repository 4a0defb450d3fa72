"""Which rank holds which experts, by how busy they are: a table and the moves that lead to it.

A rank has a fixed number of slots, a slot holds one expert, a busy expert may have several. An expert is always
somewhere and never twice on one rank. Its tokens are shared out evenly over its copies. The table is an input of the
graphs, and so are the weights: a new table is a plan of weight moves and a swap of the table, with no new graph. Rank r
of a table is the r-th of every group along the mesh axes that split experts, its slots what such a rank holds of them.

    plan = balance(loads, slots=1024, ranks=128, previous=plan.table)
    plan.table, plan.moves, plan.skew
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TypeVar

from kimi_graph.errors import ShardingError

X = TypeVar("X")
ENOUGH = 0.02  # a plan with more moves has to make the busiest rank less busy by this much


@dataclass(frozen=True)
class Table:
    """Experts in slots.

    Attributes:
        slots: the expert of each slot; the slots of a rank lie together.
        ranks: how many there are.

    Raises:
        ShardingError: slots that do not divide, an expert that is nowhere or twice on a rank.
    """

    slots: tuple[int, ...]
    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 1 or len(self.slots) % self.ranks:
            raise ShardingError(f"{len(self.slots)} slots do not divide over {self.ranks} ranks.")
        if missing := set(range(self.experts)) - set(self.slots):
            raise ShardingError(f"expert {min(missing)} has no slot.")
        for rank, held in enumerate(self.by_rank):
            if len(set(held)) < len(held):
                twice = next(e for e in held if held.count(e) > 1)
                raise ShardingError(f"expert {twice} is twice on rank {rank}.")

    @property
    def experts(self) -> int:
        """How many there are."""
        return max(self.slots) + 1

    @property
    def by_rank(self) -> list[tuple[int, ...]]:
        """The experts of each rank, by slot."""
        room = len(self.slots) // self.ranks
        return [self.slots[i : i + room] for i in range(0, len(self.slots), room)]

    @property
    def copies(self) -> list[tuple[int, ...]]:
        """The slots of each expert, the table from logical to physical."""
        found: list[list[int]] = [[] for _ in range(self.experts)]
        for slot, expert in enumerate(self.slots):
            found[expert].append(slot)
        return [tuple(slots) for slots in found]

    @property
    def packed(self) -> list[int]:
        """The table as a graph takes it, where the slots of each expert begin in it and the last ones end, the slots.

        Of three experts in four slots `(0, 1, 2, 0)`: `[4, 6, 7, 8, 0, 3, 1, 2]`.
        """
        copies = self.copies
        starts = accumulate((len(slots) for slots in copies), initial=self.experts + 1)
        return [*starts, *(slot for slots in copies for slot in slots)]

    @staticmethod
    def unpack(values: Sequence[int], experts: int, ranks: int) -> "Table":
        """The table of a graph's input.

        Raises:
            ShardingError: it is no such table: an expert that is nowhere or twice on a rank, a slot that two have.
        """
        room = len(values) - experts - 1
        starts, listed = list(values[: experts + 1]), list(values[experts + 1 :])
        if room < experts or starts[0] != experts + 1 or starts[-1] != len(values) or sorted(starts) != starts:
            raise ShardingError(f"a table of {experts} experts: its slots do not begin where it says.")
        if sorted(listed) != list(range(room)):
            wrong = next(s for s in range(room) if listed.count(s) != 1)
            raise ShardingError(f"a table of {experts} experts: slot {wrong} is there {listed.count(wrong)} times.")
        slots = [-1] * room
        for expert, (start, end) in enumerate(pairwise(starts)):
            if start == end:
                raise ShardingError(f"expert {expert} has no slot.")
            for slot in values[start:end]:
                slots[slot] = expert
        return Table(tuple(slots), ranks)

    def loads(self, loads: Sequence[float]) -> list[float]:
        """What each rank gets."""
        share = [load / len(slots) for load, slots in zip(loads, self.copies, strict=True)]
        return [sum(share[e] for e in held) for held in self.by_rank]

    def skew(self, loads: Sequence[float]) -> float:
        """What the busiest rank gets, in means of all ranks; 1 is perfect."""
        got = self.loads(loads)
        return max(got) / (sum(got) / len(got)) if any(got) else 1.0


@dataclass(frozen=True)
class Move:
    """Weights of an expert, from a slot of the old table to a slot of the new one."""

    expert: int
    source: int
    target: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A table, and how to get there.

    Attributes:
        table: the new one.
        previous: the old one.
        moves: all of them read what the old table has, so that they can be made in any order into other memory; a slot
            that is not a target keeps its expert.
        skew: before and after.
    """

    table: Table
    previous: Table
    moves: tuple[Move, ...]
    skew: tuple[float, float]
    loads: tuple[float, ...] = field(repr=False)

    def __str__(self) -> str:
        before, after = self.skew
        between = sum(not self.same_rank(m) for m in self.moves)
        return (
            f"{self.table.experts} experts in {len(self.table.slots)} slots of {self.table.ranks} ranks: busiest rank "
            f"{before:.3f} -> {after:.3f} of the mean, {len(self.moves)} moves, {between} of them between ranks"
        )

    def moved(self, held: Sequence[X]) -> list[X]:
        """What slots hold after the moves, by what they held before."""
        after = list(held)
        for move in self.moves:
            after[move.target] = held[move.source]
        return after

    def same_rank(self, move: Move) -> bool:
        """Whether a move stays on its rank."""
        room = len(self.table.slots) // self.table.ranks
        return move.source // room == move.target // room


def plain_table(experts: int, slots: int, ranks: int) -> Table:
    """Experts in order; where slots are left, second copies from the first expert on.

    Raises:
        ShardingError: see `balance`.
    """
    _check(experts, slots, ranks)
    return Table(tuple(slot % experts for slot in range(slots)), ranks)


def balance(
    loads: Sequence[float], slots: int, ranks: int, previous: Table | None = None, *, good: float = 1.05
) -> Plan:
    """A table under which ranks are about equally busy, with as few moves as that takes.

    It is tried in this order, and the first that is good enough is taken, else the best: the previous table as it is;
    experts of the busiest ranks exchanged with others; the same copies arranged anew; spare slots given to other
    experts.

    Args:
        loads: tokens of each expert, of one layer.
        slots: of all ranks together.
        previous: the table in use; by default `plain_table`.
        good: skew that needs no more moves.

    Raises:
        ShardingError: slots that do not divide over ranks, fewer slots than experts, more slots on a rank than there
            are experts, loads that are no numbers from 0 on, a previous table of other experts, slots or ranks.
    """
    experts = len(loads)
    _check(experts, slots, ranks)
    if bad := [load for load in loads if not 0 <= load < math.inf]:
        raise ShardingError(f"loads: found {bad[0]}, expected numbers from 0 on.")
    old = previous or plain_table(experts, slots, ranks)
    if (old.experts, len(old.slots), old.ranks) != (experts, slots, ranks):
        raise ShardingError(
            f"previous table: {old.experts} experts in {len(old.slots)} slots of {old.ranks} ranks, "
            f"expected {experts} in {slots} of {ranks}."
        )
    best: Ranks = old.by_rank
    for candidate in _candidates(loads, old):
        if _busiest(loads, best) * ranks <= good * sum(loads):
            break
        if _busiest(loads, candidate) < (1 - ENOUGH) * _busiest(loads, best):
            best = candidate
    table = _in_slots(best, old)
    return Plan(
        table=table,
        previous=old,
        moves=_moves(old, table),
        skew=(old.skew(loads), table.skew(loads)),
        loads=tuple(loads),
    )


def _check(experts: int, slots: int, ranks: int) -> None:
    if experts < 1 or ranks < 1 or slots % ranks:
        near = max(1, round(slots / max(1, ranks))) * max(1, ranks)
        raise ShardingError(f"slots: found {slots} for {experts} experts on {ranks} ranks; the nearest is {near}.")
    if slots < experts:
        raise ShardingError(f"slots: found {slots} for {experts} experts; at least {-(-experts // ranks) * ranks}.")
    if slots > experts * ranks:
        raise ShardingError(
            f"slots: found {slots}; {experts} experts, each once on {ranks} ranks, fill {experts * ranks}."
        )


Ranks = Sequence[Sequence[int]]  # the experts of each rank


def _share(loads: Sequence[float], ranks: Ranks) -> list[float]:
    counts = [0] * len(loads)
    for held in ranks:
        for e in held:
            counts[e] += 1
    return [load / count for load, count in zip(loads, counts, strict=True)]


def _busiest(loads: Sequence[float], ranks: Ranks) -> float:
    share = _share(loads, ranks)
    return max(sum(share[e] for e in held) for held in ranks)


def _candidates(loads: Sequence[float], old: Table) -> Iterator[Ranks]:
    """Ever better arrangements, with ever more moves."""
    counts, held = [len(s) for s in old.copies], [list(experts) for experts in old.by_rank]
    _exchange(held, old.loads(loads), _share(loads, held))
    yield held
    yield _arrange(loads, counts, old.ranks)
    yield _arrange(loads, _copies(loads, len(old.slots), old.ranks), old.ranks)


def _copies(loads: Sequence[float], slots: int, ranks: int) -> list[int]:
    """How many copies each expert gets: every spare slot goes to the one whose copies are the busiest."""
    counts = [1] * len(loads)
    heap = [(-load, e) for e, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(slots - len(loads)):
        _, e = heapq.heappop(heap)
        counts[e] += 1
        if counts[e] < ranks:
            heapq.heappush(heap, (-loads[e] / counts[e], e))
    return counts


def _arrange(loads: Sequence[float], counts: Sequence[int], ranks: int) -> list[list[int]]:
    """Copies on ranks: the busiest first, each onto the rank that has least to do, then exchanged while that helps."""
    share = [load / count for load, count in zip(loads, counts, strict=True)]
    room = sum(counts) // ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    busy = [0.0] * ranks
    for e in sorted(range(len(loads)), key=lambda e: (-share[e], e)):
        for _ in range(counts[e]):
            free = [r for r in range(ranks) if len(held[r]) < room and e not in held[r]]
            if free:
                rank = min(free, key=lambda r: (busy[r], r))
            else:
                rank = _make_room(held, busy, share, room, e)
            held[rank].append(e)
            busy[rank] += share[e]
    _exchange(held, busy, share)
    return held


def _make_room(held: list[list[int]], busy: list[float], share: Sequence[float], room: int, e: int) -> int:
    """A rank without `e` that gives one of its experts to a rank that has `e` and room.

    There is one: the rank with room holds fewer experts than the full one, so the full one has some that it has not.
    """
    open_rank = next(r for r in range(len(held)) if len(held[r]) < room)
    rank = min((r for r in range(len(held)) if e not in held[r]), key=lambda r: (busy[r], r))
    moved = min((f for f in held[rank] if f not in held[open_rank]), key=lambda f: (share[f], f))
    held[rank].remove(moved)
    held[open_rank].append(moved)
    busy[rank] -= share[moved]
    busy[open_rank] += share[moved]
    return rank


def _exchange(held: list[list[int]], busy: list[float], share: Sequence[float]) -> None:
    """Swap an expert of the busiest rank with one of another, as long as the busier of the two gets less to do."""
    for _ in range(8 * len(held)):
        top = max(range(len(held)), key=lambda r: busy[r])
        best, gain = None, 1e-9 * busy[top]
        for other in sorted(range(len(held)), key=lambda r: busy[r])[:16]:
            gap = busy[top] - busy[other]
            for e in set(held[top]) - set(held[other]):
                for f in set(held[other]) - set(held[top]):
                    less = min(share[e] - share[f], gap - (share[e] - share[f]))  # what the busier of the two loses
                    if less > gain:
                        best, gain = (other, e, f), less
        if best is None:
            return
        other, e, f = best
        held[top][held[top].index(e)] = f
        held[other][held[other].index(f)] = e
        busy[top] -= share[e] - share[f]
        busy[other] += share[e] - share[f]


def _in_slots(ranks: Ranks, old: Table) -> Table:
    """The same groups of experts, on the ranks and in the slots where most of them are already."""
    overlaps = sorted(
        (-len(set(new) & set(held)), i, rank) for i, new in enumerate(ranks) for rank, held in enumerate(old.by_rank)
    )
    group_of: dict[int, int] = {}
    taken: set[int] = set()
    for _, i, rank in overlaps:
        if i not in taken and rank not in group_of:
            group_of[rank] = i
            taken.add(i)
    slots: list[int] = []
    for rank, held in enumerate(old.by_rank):
        group = ranks[group_of[rank]]
        new = iter([e for e in group if e not in held])
        slots += [e if e in group else next(new) for e in held]
    return Table(tuple(slots), old.ranks)


def _moves(old: Table, new: Table) -> tuple[Move, ...]:
    """What has to be copied; from the nearest slot that has the expert, so that ranks serve their neighbours."""
    copies = old.copies
    return tuple(
        Move(expert, min(copies[expert], key=lambda s, t=target: abs(s - t)), target)
        for target, (was, expert) in enumerate(zip(old.slots, new.slots, strict=True))
        if was != expert
    )
