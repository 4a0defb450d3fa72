"""Experts moved while a model runs: loads counted, a plan made, weights moved and checked, a table swapped.

All of it happens between two steps. Weights and table are written where they lie, so that a graph, which takes both as
inputs, stays as it is. Nothing is overwritten before everything has arrived with the bytes that it left with, on every
rank; until then what arrives lies beside: as many experts as move into a rank, of one layer at a time.

    shelf = Shelf(plain_table(experts, slots, ranks), {rank: (gate_up, down)})
    shelf.saw(chosen)  # tap layers.*.moe.experts, every step
    plan = shelf.rebalance()  # between two steps

Ranks count the same choices where each of them has all rows, and so make the same plan without asking each other.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_graph.errors import ShardingError

from .balance import Move, Plan, Table, balance

Expert = list[Tensor]  # the weights of one expert, a tensor each


def digest(expert: Sequence[Tensor]) -> bytes:
    """A hash of all bytes, 32 of them."""
    made = hashlib.blake2b(digest_size=32)
    for x in expert:
        made.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return made.digest()


class Wire(Protocol):
    """What brings experts from one rank's process to another's. All processes make the same calls in the same order."""

    def send(self, expert: Sequence[Tensor], mark: bytes, rank: int) -> None:
        """Give an expert and its hash to a rank."""
        ...

    def receive(self, like: Sequence[Tensor], rank: int) -> tuple[Expert, bytes]:
        """An expert and its hash from a rank, with the shapes of another."""
        ...

    def agree(self, well: bool) -> bool:
        """Whether it went well on all ranks."""
        ...


class GroupWire:
    """A wire between the processes of a group of torch.distributed; ranks are those of the group."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device

    def send(self, expert: Sequence[Tensor], mark: bytes, rank: int) -> None:
        """Give an expert and its hash to a rank."""
        to = dist.get_global_rank(self.group, rank)
        for x in (*expert, torch.tensor(list(mark), dtype=torch.uint8, device=self.device)):
            dist.send(x.contiguous(), to, group=self.group)

    def receive(self, like: Sequence[Tensor], rank: int) -> tuple[Expert, bytes]:
        """An expert and its hash from a rank, with the shapes of another."""
        source = dist.get_global_rank(self.group, rank)
        made, mark = [torch.empty_like(x) for x in like], torch.empty(32, dtype=torch.uint8, device=self.device)
        for x in (*made, mark):
            dist.recv(x, source, group=self.group)
        return made, bytes(mark.tolist())

    def agree(self, well: bool) -> bool:
        """Whether it went well on all ranks."""
        word = torch.tensor([int(well)], device=self.device)
        dist.all_reduce(word, dist.ReduceOp.MIN, group=self.group)
        return bool(word.item())


class Shelf:
    """The experts of one layer, on the ranks that this process has.

    Attributes:
        placed: the table in use.
        table: it as the layer takes it, int32 `[experts + 1 + slots]`; written in place.
        weights: of each of those ranks, tensors `[slots of a rank, ...]`; written in place.
        loads: `[experts]` int64, tokens that chose each of them.

    Raises:
        ShardingError: tensors that do not have a rank's slots.
    """

    def __init__(self, placed: Table, weights: Mapping[int, Sequence[Tensor]], wire: Wire | None = None) -> None:
        """Start with weights that lie as a table says.

        Args:
            placed: the table.
            weights: by rank of it, each tensor with a rank's slots as its first dimension.
            wire: to the ranks that are not in `weights`; None: all of them are.
        """
        self.placed, self.wire = placed, wire
        self.weights = {rank: list(tensors) for rank, tensors in weights.items()}
        self.room = len(placed.slots) // placed.ranks
        for rank, tensors in self.weights.items():
            if wrong := [len(x) for x in tensors if len(x) != self.room]:
                raise ShardingError(f"rank {rank}: weights of {wrong[0]} slots, the table has {self.room} of a rank.")
        device = next(iter(self.weights.values()))[0].device
        self.table = torch.tensor(placed.packed, dtype=torch.int32, device=device)
        self.loads = torch.zeros(placed.experts, dtype=torch.int64, device=device)

    def saw(self, chosen: Tensor) -> None:
        """Count the experts that some rows chose, any shape of ids."""
        self.loads += torch.bincount(chosen.flatten(), minlength=len(self.loads))

    @property
    def skew(self) -> float:
        """What the busiest rank got of what was counted, in means of all ranks."""
        return self.placed.skew(self.loads.tolist())

    def rebalance(self, good: float = 1.05) -> Plan:
        """Plan by what was counted, move, swap the table; what was counted so far then weighs half.

        Args:
            good: skew that needs no move, see `balance`.

        Raises:
            ShardingError: an expert did not arrive as it left. Weights and table are as they were, on all ranks.
        """
        plan = balance(self.loads.tolist(), len(self.placed.slots), self.placed.ranks, self.placed, good=good)
        self.put(plan)
        self.loads //= 2
        return plan

    def put(self, plan: Plan) -> None:
        """Carry a plan out.

        Args:
            plan: from the table in use; the same on every rank.

        Raises:
            ShardingError: see `rebalance`; a plan from another table.
        """
        if plan.previous != self.placed:
            raise ShardingError("a plan that starts from another table than the one in use.")
        arrived, lost = self._fetched(plan.moves)
        well = not lost if self.wire is None else self.wire.agree(not lost)
        if not well:
            what = f"expert {lost[0].expert} on its way to slot {lost[0].target}" if lost else "one of another rank"
            raise ShardingError(f"{what}: not the bytes that it left with; weights and table are as they were.")
        for move, expert in arrived:
            for held, new in zip(self._at(move.target), expert, strict=True):
                held.copy_(new)
        self.table.copy_(torch.tensor(plan.table.packed, dtype=torch.int32))
        self.placed = plan.table

    def _at(self, slot: int) -> Expert:
        """Views of a slot's weights, of a rank that is here."""
        return [x[slot % self.room] for x in self.weights[slot // self.room]]

    def _fetched(self, moves: Sequence[Move]) -> tuple[list[tuple[Move, Expert]], list[Move]]:
        """What comes to ranks that are here, beside what they hold; and moves that did not bring the same bytes."""
        arrived: list[tuple[Move, Expert]] = []
        lost: list[Move] = []
        like = [x[0] for x in next(iter(self.weights.values()))]
        for move in moves:
            source, target = move.source // self.room, move.target // self.room
            if source in self.weights and target in self.weights:
                expert = self._at(move.source)
                made, mark = [x.clone() for x in expert], digest(expert)
            elif source in self.weights:
                assert self.wire is not None, "ranks elsewhere and no wire to them"
                expert = self._at(move.source)
                self.wire.send(expert, digest(expert), target)
                continue
            elif target in self.weights:
                assert self.wire is not None, "ranks elsewhere and no wire to them"
                made, mark = self.wire.receive(like, source)
            else:
                continue
            arrived.append((move, made))
            if digest(made) != mark:
                lost.append(move)
        return arrived, lost
