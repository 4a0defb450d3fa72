"""Experts of a running model, shared out over ranks by what its tokens choose: the busiest rank over the mean.

A small Kimi Linear with 64 experts, 8 of a token, in 80 slots of 8 ranks (one process has them all) decodes for 64
sequences. Which tokens come follows Zipf's law, so that some experts get many times the others' rows. Choices are
counted for some steps; then copies are placed anew, weights move and are checked, the table is swapped, and decoding
goes on with the same sequences. What is compared are steps that nobody had counted: their rows on the ranks of the
table before, and of the one after. Then other tokens become the frequent ones, and it is done again.

Promised: of such steps the busiest rank gets at most 1.25 times the mean, and no step's logits change with the table.

    python benchmarks/balance_live.py [--steps N]
"""

import argparse
import dataclasses
import sys
import time
from typing import Any

import torch
from torch import Tensor

import kimi_graph as kg
from kimi_graph import tree
from kimi_graph.config import ModelConfig, MoeConfig, with_copies
from kimi_graph.fixture import small_config
from kimi_graph.layers import step_batch
from kimi_graph.models import decoder
from kimi_graph.parallel.balance import plain_table
from kimi_graph.parallel.live import Shelf
from kimi_graph.read_config import parse_config
from kimi_graph.taps import collect

RANKS, EXPERTS, TOP_K, COPIES, ROWS, PROMISED = 8, 64, 8, 16, 64, 1.25
EXPONENT = 1.2  # of Zipf's law
CLOSE = 1e-4  # of the largest logit, float32: sums in another order


class Running:
    """A model that decodes, its experts on shelves of ranks; and the same one without copies beside it."""

    def __init__(self, steps: int) -> None:
        self.plain = model()
        self.config = with_copies(self.plain, COPIES)
        self.params = kg.init_params(self.plain, seed=0)
        self.state = kg.init_state(self.plain, ROWS, 4 * steps + 8, torch.float32)
        self.states: Any = self.state.layers
        self.length, self.shelves = 0, {}
        layers = list(self.params.layers)
        for i, layer in enumerate(self.config.layers):
            if isinstance(layer.ffn, MoeConfig):
                table, moe = plain_table(EXPERTS, EXPERTS + COPIES, RANKS), layers[i].moe
                whole = [x[list(table.slots)].clone() for x in (moe.gate_up, moe.down)]
                made = tree.replace(moe, gate_up=whole[0], down=whole[1])
                layers[i] = tree.replace(layers[i], moe=made)
                self.shelves[i] = Shelf(table, {r: [x.chunk(RANKS)[r] for x in whole] for r in range(RANKS)})
        self.copied = tree.replace(self.params, layers=tuple(layers))

    def step(self, tokens: Tensor) -> dict[int, Tensor]:
        """What the layers chose for a token of every sequence."""
        before = torch.full((ROWS,), self.length)
        batch = step_batch(
            self.state.block_table, self.state.slots, before, torch.ones_like(before), 1, self.state.page,
            rope=self.plain.rotation,
        )  # fmt: skip
        tables = {decoder.table_name(i): s.table for i, s in self.shelves.items()}
        names = {i: f"layers.{i}.moe.experts" for i in self.shelves}
        how: dict[str, Any] = {"step": self.length > 0, "last_only": True}
        with collect(names.values()) as found:
            got, after = decoder.forward(
                self.copied, self.config, tokens[:, None], self.states, batch, tables=tables, **how
            )
        want, _ = decoder.forward(self.params, self.plain, tokens[:, None], self.states, batch, **how)
        assert (got - want).abs().max() <= CLOSE * want.abs().max(), "a table changed the logits"
        self.states, self.length = after, self.length + 1
        return {i: found[name] for i, name in names.items()}


def model() -> ModelConfig:
    """Three layers of a Kimi Linear, two of them with experts."""
    source = small_config(kg.load_config("kimi-linear-48b"), 3)
    config = parse_config(source, origin="benchmark", name="small")

    def layer(x: Any) -> Any:
        more = isinstance(x.ffn, MoeConfig)
        return dataclasses.replace(x, ffn=dataclasses.replace(x.ffn, experts=EXPERTS, top_k=TOP_K)) if more else x

    return dataclasses.replace(config, layers=tuple(map(layer, config.layers)))


def workload(vocab: int, seed: int) -> Any:
    """Draws tokens of all sequences by Zipf's law; which are frequent depends on the seed."""
    generator = torch.Generator().manual_seed(seed)
    chance = 1 / torch.arange(1, vocab + 1) ** EXPONENT
    order = torch.randperm(vocab, generator=generator)
    return lambda: order[torch.multinomial(chance, ROWS, replacement=True, generator=generator)]


@torch.no_grad()
def main() -> None:
    """Print a line for each layer and workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=48, help="that are counted, and that are compared; default 48")
    steps = parser.parse_args().steps
    running, worst = Running(steps), 0.0
    print(f"{'frequent tokens':17}{'layer':>6}{'before':>9}{'after':>8}{'moves':>7}{'MB':>6}{'ms':>6}")
    for seed, name in ((1, "as at the start"), (2, "other ones")):
        draw = workload(running.plain.vocab, seed)
        for _ in range(steps):
            for i, chosen in running.step(draw()).items():
                running.shelves[i].saw(chosen)
        tables, told = {i: s.placed for i, s in running.shelves.items()}, {}
        for i, shelf in running.shelves.items():
            start = time.perf_counter()
            moves = len(shelf.rebalance().moves)
            size = moves * sum(x[0].nbytes for x in shelf.weights[0]) / 1e6
            told[i] = f"{moves:7}{size:6.1f}{(time.perf_counter() - start) * 1e3:6.0f}"
        later = {i: torch.zeros(EXPERTS, dtype=torch.int64) for i in running.shelves}
        for _ in range(steps):
            for i, chosen in running.step(draw()).items():
                later[i] += torch.bincount(chosen.flatten(), minlength=EXPERTS)
        for i, shelf in running.shelves.items():
            loads = later[i].tolist()
            before, after = tables[i].skew(loads), shelf.placed.skew(loads)
            worst = max(worst, after)
            print(f"{name:17}{i:>6}{before:9.2f}{after:8.2f}{told[i]}")
    print(f"the busiest rank gets {worst:.2f} times the mean at most; promised {PROMISED}")
    sys.exit(worst > PROMISED)


if __name__ == "__main__":
    main()
