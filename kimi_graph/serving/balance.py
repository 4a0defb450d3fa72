"""Busy experts of a rank of the engine: choices counted in every step, copies placed anew between two of them.

Every rank sees the choices of all rows, so all count the same and plan the same; only weights go between them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kimi_graph.config import ModelConfig, MoeConfig, with_copies
from kimi_graph.errors import ConfigError
from kimi_graph.models.decoder import Use, table_name
from kimi_graph.parallel.balance import Plan, plain_table
from kimi_graph.parallel.legality import check_redundant
from kimi_graph.parallel.live import GroupWire, Shelf
from kimi_graph.taps import collect

from .ranks import Place, in_whole

KEY = "kimi_graph_experts"  # in the engine's --additional-config


def with_asked(config: ModelConfig, asked: Any, ways: int) -> tuple[ModelConfig, int]:
    """The model with the copies of experts that are asked for, and the steps from one rebalance to the next; 0: never.

    Args:
        config: the model.
        asked: the engine's `--additional-config`: an object `kimi_graph_experts` of `redundant_experts` and
            `rebalance_steps`, numbers.
        ways: tensor ranks.

    Raises:
        ConfigError: another key, or no such number.
        ShardingError: copies that do not divide, see `check_redundant`.
    """
    given = asked.get(KEY, {}) if isinstance(asked, dict) else {}
    names = ("redundant_experts", "rebalance_steps")
    if not isinstance(given, dict) or not set(given) <= set(names):
        raise ConfigError(f"--additional-config: {KEY}: found {given!r}, expected an object of {' and '.join(names)}.")
    for name, value in given.items():
        if type(value) is not int or value < 0:
            raise ConfigError(f"--additional-config: {KEY}.{name}: found {value!r}, expected a number from 0 on.")
    copies, every = (given.get(name, 0) for name in names)
    experts = [layer.ffn.experts for layer in config.layers if isinstance(layer.ffn, MoeConfig)]
    if (copies or every) and (ways == 1 or not experts):
        raise ConfigError(
            f"--additional-config: {KEY}: experts lie on one rank; leave it out, or set --tensor-parallel-size."
        )
    if copies:
        check_redundant(experts[0], copies, ways)
    elif every:
        raise ConfigError(
            f"--additional-config: {KEY}.redundant_experts: found 0, nearest {ways}: without copies nothing moves."
        )
    return with_copies(config, copies), every


class Balance:
    """The experts of a rank's layers that have copies of some.

    Attributes:
        shelves: by layer.
        every: steps from one rebalance to the next; 0: never.
        steps: that were counted.
    """

    def __init__(self, place: Place, params: Any, every: int) -> None:
        """Start with the copies as they were loaded.

        Args:
            place: of the rank; its config has copies.
            params: its parameters.
            every: see above.
        """
        self.member, self.every, self.steps = place.member, every, 0
        self.shelves: dict[int, Shelf] = {}
        member, ways = place.member, place.mesh.stage.world
        for i in place.layers:
            moe, held = place.config.layers[i].ffn, params.layers[i].moe
            if isinstance(moe, MoeConfig) and moe.redundant:
                weights = [getattr(x, "local", x) for x in (held.gate_up, held.down)]
                wire = None if member is None else GroupWire(member.group, member.device)
                rank = 0 if member is None else member.rank
                self.shelves[i] = Shelf(plain_table(moe.experts, moe.slots, ways), {rank: weights}, wire)

    def tables(self, uses: Sequence[Use]) -> dict[str, Tensor]:
        """Inputs of some parts that say where experts are."""
        read = {name for use in uses for name in use.reads}
        return {name: s.table for i, s in self.shelves.items() if (name := table_name(i)) in read}

    @contextlib.contextmanager
    def counting(self, real: Tensor) -> Iterator[None]:
        """Inside, what the layers choose is counted.

        Args:
            real: `[B, T]` bool, rows that are tokens.
        """
        patterns = [f"layers.{i}.moe.experts" for i in self.shelves]
        with collect(patterns) as found:
            yield
        with contextlib.nullcontext() if self.member is None else self.member.at_work():
            for i, shelf in self.shelves.items():
                shelf.saw(in_whole(found[f"layers.{i}.moe.experts"])[real.flatten()])

    def between_steps(self) -> dict[int, Plan]:
        """Called before every step: plans that were carried out, by layer; mostly none."""
        self.steps += 1
        if not self.every or self.steps % self.every:
            return {}
        with torch.inference_mode():  # weights and tables may have been made in it
            return {i: shelf.rebalance() for i, shelf in self.shelves.items()}
