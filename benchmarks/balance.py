"""How evenly cores share out tasks of unequal length, counted by the kernels' CPU twin.

Three ways: in turn (task i is core i modulo cores'), planned (longest first to the core that has least, by every core
for itself), taken (longest first from a counter that cores share; 950 alone, and not by groups of cores). On sequences
of uniform, lognormal and one-long-many-short lengths, for two drawings of them:

* recurrence: KDA token by token on vector cores (unequal.cpp), 12 parts of states of each of 32 sequences.
* KdaChunk: as it is, 4 heads of each of 32 sequences on groups of a Cube core and two vector cores.

The busiest core is printed over the mean of its kind: bytes, vector work in units of 256 bytes, products of the Cube.
`gained` is what the busiest core has less to do than in turn (products where there are any); `at most` what it could
be, as one task is never split: one core has the longest task, and one at least the mean. Planned, the busiest core may
have 1.1 times the least.

    python benchmarks/balance.py [--arch 2201|3510]
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from kimi_graph.ops.twin import ARCHES, FOLDER, Kernel
from kimi_graph.ops.twin.build import TWIN, library, run_library

ROWS, KEY = 32, 128  # sequences, channels
DRAWN = 2
WAYS = IN_TURN, PLANNED, TAKEN = "in turn", "planned", "taken"
MOST = 1.1

Draw = Callable[[torch.Generator], Tensor]


def uniform(g: torch.Generator) -> Tensor:
    """1 to 128 tokens."""
    return torch.randint(1, 129, (ROWS,), generator=g)


def lognormal(g: torch.Generator) -> Tensor:
    """A median of 40 tokens, sigma 1, at most 800."""
    return (torch.randn(ROWS, generator=g).exp() * 40).clamp(1, 800).long()


def one_long(g: torch.Generator) -> Tensor:
    """One of 800 tokens, the others have 32."""
    lengths = torch.full((ROWS,), 32)
    lengths[torch.randint(ROWS, (1,), generator=g)] = 800
    return lengths


LENGTHS: dict[str, Draw] = {"uniform": uniform, "lognormal": lognormal, "one long": one_long}


@dataclass(frozen=True)
class Shares:
    """What each core did: bytes of memory by all, vector work, products of the Cube; empty where there is no such core."""

    bytes: tuple[int, ...]
    vector: tuple[int, ...]
    cube: tuple[int, ...] = ()

    @property
    def work(self) -> tuple[int, ...]:
        return self.cube or self.vector


@dataclass(frozen=True)
class Subject:
    """What is run: with how many tasks of each sequence, in which ways, and how."""

    name: str
    each: int
    ways: tuple[str, ...]
    run: Callable[[int, str, Tensor, Path], Shares]


def main() -> None:
    """Print a line for each subject, chip, kind of lengths and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, choices=list(ARCHES), help="default: both")
    args = parser.parse_args()
    print(
        f"{'kernel':12}{'arch':>5}  {'lengths':11}{'way':9}{'bytes':>7}{'vector':>8}{'Cube':>7}{'gained':>9}{'at most':>9}"
    )
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        for subject in SUBJECTS:
            for arch in [args.arch] if args.arch else ARCHES:
                for name, draw in LENGTHS.items():
                    missed |= not _report(subject, arch, name, draw, Path(folder))
    print(f"planned, a busiest core has {'more than' if missed else 'at most'} {MOST} times the least")
    sys.exit(missed)


def _report(subject: Subject, arch: int, name: str, draw: Draw, cache: Path) -> bool:
    """Print a line for each way; whether the plan is good enough."""
    drawn = [draw(torch.Generator().manual_seed(seed)) for seed in range(DRAWN)]
    turn = [subject.run(arch, IN_TURN, counts, cache) for counts in drawn]
    least = mean(_least(subject, counts, t) / max(t.work) for counts, t in zip(drawn, turn, strict=True))
    kept = True
    for way in subject.ways:
        if way == TAKEN and arch != 3510:
            continue
        found = turn if way == IN_TURN else [subject.run(arch, way, counts, cache) for counts in drawn]
        left = mean(max(s.work) / max(t.work) for s, t in zip(found, turn, strict=True))
        over = "".join(_cells(found))
        print(f"{subject.name:12}{arch:>5}  {name:11}{way:9}{over}{1 - left:9.1%}{1 - least:9.1%}")
        kept &= way != PLANNED or left <= MOST * least
    return kept


def _cells(found: Sequence[Shares]) -> Iterator[str]:
    """The busiest core over the mean."""
    for what, width in (("bytes", 7), ("vector", 8), ("cube", 7)):
        some = [getattr(s, what) for s in found]
        yield f"{mean(max(of) / mean(of) for of in some):{width}.2f}" if all(some) else f"{'':{width}}"


def _least(subject: Subject, counts: Tensor, turn: Shares) -> float:
    """Work that the busiest core has at the least: the mean, or the longest task by its share of all tokens."""
    longest = sum(turn.work) * int(counts.max()) / (int(counts.sum()) * subject.each)
    return max(mean(turn.work), longest)


# ---- what is run -----------------------------------------------------------------------------------------------------


def recurrence(arch: int, way: str, counts: Tensor, cache: Path) -> Shares:
    """KDA's recurrence for 16 rows of a state."""
    part, each = 16, 12
    text = (Path(__file__).parent / "unequal.cpp").read_text()
    text += '\n#define TWIN_KERNEL unequal\n#include "twin/launch.h"\n'
    sizes = {"ROWS": ROWS, "EACH": each, "KEY": KEY, "PART": part, "WAY": WAYS.index(way), "__NPU_ARCH__": arch}
    common = FOLDER / "common" / "op_kernel"
    defines = {name: str(size) for name, size in sizes.items()}
    built = library(text, defines, [common, TWIN / "include"], [common], cache)
    tensors = {
        "counts": counts.int(),
        "place": torch.zeros(16, dtype=torch.int32),
        "tokens": torch.rand(int(counts.max()), 3 * KEY + part + 8) / KEY,
        "states": torch.rand(ROWS * each, part, KEY),
    }
    listed = [(name, t.data_ptr(), t.nbytes, True, 0, name == "place") for name, t in tensors.items()]
    cores, _ = run_library(built, listed, [t.data_ptr() for t in tensors.values()], ARCHES[arch].cores)
    return Shares(tuple(c.gm_read + c.gm_written for c in cores), tuple(c.repeats for c in cores))


def kda_chunk(arch: int, way: str, counts: Tensor, cache: Path) -> Shares:
    """The operator."""
    heads, tokens, g = 4, int(counts.max()), torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(ROWS, tokens, heads, KEY, generator=g).bfloat16() / 8 for _ in range(3))
    inputs = {
        "q": q,
        "k": k,
        "v": v,
        "decay": -torch.rand(ROWS, tokens, heads, KEY, generator=g),
        "beta": torch.rand(ROWS, tokens, heads, generator=g),
        "memory": torch.rand(ROWS + 1, heads, KEY, KEY, generator=g),
        "slots": torch.arange(1, ROWS + 1, dtype=torch.int32),
        "lengths": counts,
        "counts": counts,
    }
    run = Kernel("kda_chunk", cache, {"BALANCE": str(WAYS.index(way))}).run(inputs, {"scale": 1.0}, arch=arch)
    c = run.counters
    moved = tuple(sum(x) for x in zip(c.read, c.written, c.workspace, strict=True))
    groups = [i for i, cube in enumerate(c.cube) if cube]  # a group's Cube core, then its vector cores
    size = len(moved) // len(groups)
    return Shares(
        tuple(sum(moved[i : i + size]) for i in groups),
        tuple(n for n, cube in zip(c.repeats, c.cube, strict=True) if not cube),
        tuple(c.products[i] for i in groups),
    )


SUBJECTS = (
    Subject("recurrence", 12, WAYS, recurrence),
    Subject("KdaChunk", 4, (IN_TURN, PLANNED), kda_chunk),
)

if __name__ == "__main__":
    main()
