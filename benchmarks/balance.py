"""How evenly cores share out tasks of unequal length, counted by the kernels' CPU twin.

Three ways: in turn (task i is core i modulo cores'), planned (longest first to the core that has least, by every core
for itself), taken (longest first from a counter that cores share; 950 alone, and not by groups of cores). On uniform,
lognormal and one-long-many-short lengths, two drawings of each:

* recurrence: KDA token by token on vector cores (unequal.cpp), 12 parts of states of each of 32 sequences.
* KdaChunk: 4 heads of each of 32 sequences, on groups of a Cube core and two vector cores.
* SparseAttend: a query of each of 96 sequences that are four times as long, of which it attends to 512 tokens at most.

The busiest core is printed over the mean of its kind: bytes (of a group), vector work in units of 256 bytes, products
of the Cube. `gained` is what the busiest core has less to do than in turn (products where there are any); `at most`
what it could be, as one task is never split: one core has the longest task, and one at least the mean, which whole
tasks need not reach (few queries are split into parts, which may do better than the longest query). Planned, the
busiest core may have 1.25 times that.

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

KEY = 128  # channels of a head
DRAWN = 2
WAYS = IN_TURN, PLANNED, TAKEN = "in turn", "planned", "taken"
MOST = 1.25

Draw = Callable[[int, torch.Generator], Tensor]


def uniform(rows: int, g: torch.Generator) -> Tensor:
    """1 to 128 tokens."""
    return torch.randint(1, 129, (rows,), generator=g)


def lognormal(rows: int, g: torch.Generator) -> Tensor:
    """A median of 40 tokens, sigma 1, at most 800."""
    return (torch.randn(rows, generator=g).exp() * 40).clamp(1, 800).long()


def one_long(rows: int, g: torch.Generator) -> Tensor:
    """One of 800 tokens, the others have 32."""
    lengths = torch.full((rows,), 32)
    lengths[torch.randint(rows, (1,), generator=g)] = 800
    return lengths


LENGTHS: dict[str, Draw] = {"uniform": uniform, "lognormal": lognormal, "one long": one_long}


@dataclass(frozen=True)
class Shares:
    """What each core did: bytes of memory, vector work, products of the Cube; empty where there is no such core."""

    bytes: tuple[int, ...]
    vector: tuple[int, ...]
    cube: tuple[int, ...] = ()

    @property
    def work(self) -> tuple[int, ...]:
        return self.cube or self.vector


@dataclass(frozen=True)
class Subject:
    """What is run: of how many sequences, how many tasks of each, in which ways, and how."""

    name: str
    rows: int
    each: int
    ways: tuple[str, ...]
    run: Callable[[int, str, Tensor, int, Path], Shares]


def main() -> None:
    """Print a line for each subject, chip, kind of lengths and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, choices=list(ARCHES), help="default: both")
    args = parser.parse_args()
    head = f"{'kernel':14}{'arch':>5}  {'lengths':11}{'way':9}{'bytes':>7}{'vector':>8}{'Cube':>7}"
    print(f"{head}{'gained':>9}{'at most':>9}")
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
    drawn = [draw(subject.rows, torch.Generator().manual_seed(seed)) for seed in range(DRAWN)]
    turn = [subject.run(arch, IN_TURN, counts, subject.each, cache) for counts in drawn]
    longest = [sum(subject.run(arch, IN_TURN, counts.max().view(1), 1, cache).work) for counts in drawn]
    least = mean(max(mean(t.work), alone) / max(t.work) for alone, t in zip(longest, turn, strict=True))
    kept = True
    for way in subject.ways:
        if way == TAKEN and arch != 3510:
            continue
        found = turn if way == IN_TURN else [subject.run(arch, way, counts, subject.each, cache) for counts in drawn]
        left = mean(max(s.work) / max(t.work) for s, t in zip(found, turn, strict=True))
        over = "".join(_cells(found))
        print(f"{subject.name:14}{arch:>5}  {name:11}{way:9}{over}{1 - left:9.1%}{1 - least:9.1%}")
        kept &= way != PLANNED or left <= MOST * least
    return kept


def _cells(found: Sequence[Shares]) -> Iterator[str]:
    """The busiest core over the mean."""
    for what, width in (("bytes", 7), ("vector", 8), ("cube", 7)):
        some = [getattr(s, what) for s in found]
        yield f"{mean(max(of) / mean(of) for of in some):{width}.2f}" if all(some) else f"{'':{width}}"


# ---- what is run -----------------------------------------------------------------------------------------------------


def recurrence(arch: int, way: str, counts: Tensor, each: int, cache: Path) -> Shares:
    """KDA's recurrence for 16 rows of a state."""
    part, rows = 16, len(counts)
    text = (Path(__file__).parent / "unequal.cpp").read_text()
    text += '\n#define TWIN_KERNEL unequal\n#include "twin/launch.h"\n'
    sizes = {"ROWS": rows, "EACH": each, "KEY": KEY, "PART": part, "WAY": WAYS.index(way), "__NPU_ARCH__": arch}
    common = FOLDER / "common" / "op_kernel"
    defines = {name: str(size) for name, size in sizes.items()}
    built = library(text, defines, [common, TWIN / "include"], [common], cache)
    tensors = {
        "counts": counts.int(),
        "place": torch.zeros(16, dtype=torch.int32),
        "tokens": torch.rand(int(counts.max()), 3 * KEY + part + 8) / KEY,
        "states": torch.rand(rows * each, part, KEY),
    }
    listed = [(name, t.data_ptr(), t.nbytes, True, 0, name == "place") for name, t in tensors.items()]
    cores, _ = run_library(built, listed, [t.data_ptr() for t in tensors.values()], ARCHES[arch].cores)
    return Shares(tuple(c.gm_read + c.gm_written for c in cores), tuple(c.repeats for c in cores))


def kda_chunk(arch: int, way: str, counts: Tensor, heads: int, cache: Path) -> Shares:
    """A chunk of new sequences."""
    rows, tokens = len(counts), int(counts.max())
    q, k, v = (torch.rand(rows, tokens, heads, KEY).bfloat16() / 8 for _ in range(3))
    inputs = {
        "q": q,
        "k": k,
        "v": v,
        "decay": -torch.rand(rows, tokens, heads, KEY),
        "beta": torch.rand(rows, tokens, heads),
        "memory": torch.rand(rows + 1, heads, KEY, KEY),
        "slots": torch.arange(1, rows + 1, dtype=torch.int32),
        "lengths": counts,
        "counts": counts,
    }
    return of_groups("kda_chunk", arch, way, inputs, cache)


def sparse_attend(arch: int, way: str, counts: Tensor, each: int, cache: Path) -> Shares:
    """A decode step; the first 512 positions are selected, those that a query does not see are passed over."""
    rows, heads, page, lengths = len(counts), 3, 128, 4 * counts
    pages = -(-int(lengths.max()) // page)
    pool = rows * pages + 1
    inputs = {
        "q": torch.rand(rows, each, heads, 512).bfloat16(),
        "q_rope": torch.rand(rows, each, heads, 64).bfloat16(),
        "latent": torch.rand(pool, page, 1, 512).bfloat16(),
        "rope": torch.rand(pool, page, 1, 64).bfloat16(),
        "selected": torch.arange(512, dtype=torch.int32).expand(rows, each, 512).contiguous(),
        "block_table": torch.arange(1, pool, dtype=torch.int32).view(rows, pages),
        "lengths": lengths,
        "counts": torch.full((rows,), each),
    }
    return of_groups("sparse_attend", arch, way, inputs, cache)


def of_groups(name: str, arch: int, way: str, inputs: dict[str, Tensor], cache: Path) -> Shares:
    """Run an operator that has groups of a Cube core and two vector cores."""
    c = Kernel(name, cache, {"BALANCE": str(WAYS.index(way))}).run(inputs, {"scale": 0.1}, arch=arch).counters
    moved = tuple(sum(x) for x in zip(c.read, c.written, c.workspace, strict=True))
    groups = [i for i, cube in enumerate(c.cube) if cube]  # a group's Cube core, then its vector cores
    size = len(moved) // len(groups)
    return Shares(
        tuple(sum(moved[i : i + size]) for i in groups),
        tuple(n for n, cube in zip(c.repeats, c.cube, strict=True) if not cube),
        tuple(c.products[i] for i in groups),
    )


SUBJECTS = (
    Subject("recurrence", 32, 12, WAYS, recurrence),
    Subject("KdaChunk", 32, 4, (IN_TURN, PLANNED), kda_chunk),
    Subject("SparseAttend", 96, 1, (IN_TURN, PLANNED), sparse_attend),
)

if __name__ == "__main__":
    main()
