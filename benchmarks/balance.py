"""How evenly cores share out tasks of unequal length, counted by the kernels' CPU twin.

Three ways: in turn (task i is core i modulo cores'), planned (longest first to the core that has least, by every core
for itself), taken (longest first from a counter that cores share; 950 alone). Each on 32 sequences of uniform,
lognormal and one-long-many-short lengths, for some drawings of them.

The busiest core is printed over the mean: bytes, and vector work in units of 256 bytes. `gained` is what the busiest core
has less to do than in turn; `at most` what it could be, as one task is never split: one core has the longest task, and
one at least the mean. Planned, the busiest core may have 1.05 times the least.

    python benchmarks/balance.py [--arch 2201|3510]
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from kimi_graph.ops.twin import ARCHES, FOLDER
from kimi_graph.ops.twin.build import TWIN, library, run_library

ROWS, EACH, KEY, PART = 32, 12, 128, 16  # sequences, tasks of one (heads), channels, rows of a state of a task
DRAWN = 3
WAYS = ("in turn", "planned", "taken")
MOST = 1.05


def uniform(g: torch.Generator) -> Tensor:
    """1 to 64 tokens."""
    return torch.randint(1, 65, (ROWS,), generator=g)


def lognormal(g: torch.Generator) -> Tensor:
    """A median of 20 tokens, sigma 1, at most 400."""
    return (torch.randn(ROWS, generator=g).exp() * 20).clamp(1, 400).long()


def one_long(g: torch.Generator) -> Tensor:
    """One of 400 tokens, the others have 16."""
    lengths = torch.full((ROWS,), 16)
    lengths[torch.randint(ROWS, (1,), generator=g)] = 400
    return lengths


LENGTHS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "uniform": uniform,
    "lognormal": lognormal,
    "one long": one_long,
}


@dataclass(frozen=True)
class Shares:
    """What cores did: bytes of memory, and vector work."""

    bytes: tuple[int, ...]
    work: tuple[int, ...]

    @staticmethod
    def over_mean(of: Sequence[int]) -> float:
        return max(of) / mean(of)


def main() -> None:
    """Print a line for each chip, kind of lengths and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, choices=list(ARCHES), help="default: both")
    args = parser.parse_args()
    print(f"{'arch':>5}  {'lengths':11}{'way':9}{'bytes':>7}{'work':>7}{'gained':>9}{'at most':>9}")
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        for arch in [args.arch] if args.arch else ARCHES:
            for name, draw in LENGTHS.items():
                drawn = [draw(torch.Generator().manual_seed(seed)) for seed in range(DRAWN)]
                missed |= not _report(arch, name, drawn, Path(folder))
    print(f"planned, a busiest core has {'more than' if missed else 'at most'} {MOST} times the least")
    sys.exit(missed)


def _report(arch: int, name: str, drawn: Sequence[Tensor], cache: Path) -> bool:
    """Print a line for each way; whether the plan is good enough."""
    kept = True
    turn = [shares(arch, 0, counts, cache) for counts in drawn]
    for way in range(3 if arch == 3510 else 2):
        found = turn if way == 0 else [shares(arch, way, counts, cache) for counts in drawn]
        bytes_, work = (mean(Shares.over_mean(getattr(s, what)) for s in found) for what in ("bytes", "work"))
        gained = mean(1 - max(s.work) / max(t.work) for s, t in zip(found, turn, strict=True))
        least = mean(1 - _least(arch, counts, t) / max(t.work) for counts, t in zip(drawn, turn, strict=True))
        kept &= WAYS[way] != "planned" or (1 - gained) <= MOST * (1 - least)
        print(f"{arch:>5}  {name:11}{WAYS[way]:9}{bytes_:7.2f}{work:7.2f}{gained:9.1%}{least:9.1%}")
    return kept


def _least(arch: int, counts: Tensor, turn: Shares) -> float:
    """Vector work that the busiest core has at the least."""
    even, longest = sum(turn.work) / ARCHES[arch].cores, sum(turn.work) * int(counts.max()) / (int(counts.sum()) * EACH)
    return max(even, longest)


def shares(arch: int, way: int, counts: Tensor, cache: Path) -> Shares:
    """Run all tasks, and see which core did how much."""
    source = Path(__file__).parent / "unequal.cpp"
    text = f'{source.read_text()}\n#define TWIN_KERNEL unequal\n#include "twin/launch.h"\n'
    sizes = {"ROWS": ROWS, "EACH": EACH, "KEY": KEY, "PART": PART, "WAY": way}
    common = FOLDER / "common" / "op_kernel"
    defines = {"__NPU_ARCH__": str(arch), **{name: str(size) for name, size in sizes.items()}}
    built = library(text, defines, [common, TWIN / "include"], [common], cache)
    tensors = {
        "counts": counts.int(),
        "place": torch.zeros(16, dtype=torch.int32),
        "tokens": torch.rand(int(counts.max()), 3 * KEY + PART + 8) / KEY,
        "states": torch.rand(ROWS * EACH, PART, KEY),
    }
    listed = [(name, t.data_ptr(), t.nbytes, True, 0, name == "place") for name, t in tensors.items()]
    cores, _ = run_library(built, listed, [t.data_ptr() for t in tensors.values()], ARCHES[arch].cores)
    return Shares(tuple(c.gm_read + c.gm_written for c in cores), tuple(c.repeats for c in cores))


if __name__ == "__main__":
    main()
