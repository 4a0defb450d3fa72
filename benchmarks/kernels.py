"""Bytes that the Ascend C kernels move, counted by their CPU twin, against the least that each shape needs.

Every input and output once is the minimum; a state counts for the rows in use, read and written. `moved` is what cores
read and write, the workspace that goes between them included; `tensors` leaves the workspace out, as if the L2 cache
kept it; `touched` counts each byte of a tensor once, as if the cache kept what a second core reads, too. A kernel may
move 1.05 times the minimum, SparseAttend 1.3 times. Where every core reads a weight that is large beside its few rows,
`touched` has to (GatedRmsNorm, ResidualNormGate). Of SparseAttend with fewer queries than cores, or with so many heads
that scores are as large as the rows, it is `tensors`. Of KdaChunk
it is, too: its Cube takes float32 factors that are no inputs, and on A3
what a vector core makes or a product leaves reaches the Cube through memory alone. A group of cores uses the same
1.3 MB again and again: 31 MB of all groups beside 192 MB of L2 on A3, 47 MB beside 128 MB on 950. On vector cores alone
nothing goes there, and they have four to twelve times the work.
The busiest share of all bytes (of a group of cores), of all vector work and of all products is printed beside an even
share.

    python benchmarks/kernels.py [--arch 2201|3510]
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_graph.errors import KernelError
from kimi_graph.ops.twin import ARCHES, Kernel, Run

MOST = 1.05
BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Case:
    """A shape of a kernel: inputs, attributes, the least bytes, which count of them has to be few, and how few."""

    kernel: str
    shape: str
    inputs: dict[str, Any]
    least: int
    attrs: dict[str, Any] = field(default_factory=dict)
    judged: str = "moved"
    most: float = MOST


def main() -> None:
    """Run all shapes, print a line each; exit code 1 if a kernel moves too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, choices=list(ARCHES), help="default: both")
    args = parser.parse_args()
    head = f"{'kernel':19}{'shape':30}{'arch':>5}{'cores':>6}{'minimum':>13}{'moved':>7}{'tensors':>9}{'touched':>9}"
    print(head + f"{'busiest: bytes, vector, Cube':>32}")
    missed, kept = 0, {"moved": 0, "tensors": 0, "touched": 0}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases():
            kernel = Kernel(case.kernel, Path(folder))
            for arch in [args.arch] if args.arch else ARCHES:
                run = kernel.run(case.inputs, case.attrs, arch=arch)
                missed += not report(case, arch, run)
                kept[case.judged] += 1
    told = "shapes by bytes of " + ", ".join(f"{name} {count}" for name, count in kept.items())
    print(f"{missed} of {told} are over what they may" if missed else f"{told}: all within what they may")
    sys.exit(bool(missed))


def report(case: Case, arch: int, run: Run) -> bool:
    """Print a line; whether the promise is kept."""
    c = run.counters
    count = {"moved": c.bytes + sum(c.workspace), "tensors": c.bytes, "touched": c.touched}
    ratio = {name: number / case.least for name, number in count.items()}
    each = [r + w for r, w in zip(c.read, c.written, strict=True)]
    size = len(each) // run.cores  # cores of a group
    groups = [sum(each[i : i + size]) for i in range(0, len(each), size)]
    vectors = [r for r, cube in zip(c.repeats, c.cube, strict=True) if not cube]
    cubes = [p for p, cube in zip(c.products, c.cube, strict=True) if cube]
    line = f"{case.kernel:19}{case.shape:30}{arch:5}{run.cores:6}{case.least:13,}{ratio['moved']:7.3f}"
    line += f"{ratio['tensors']:9.3f}{ratio['touched']:9.3f}"
    line += "".join(f"{max(x) * len(x) / sum(x):9.2f} x" if any(x) else f"{'-':>11}" for x in (groups, vectors, cubes))
    print(line, flush=True)
    return ratio[case.judged] <= case.most


def size(*tensors: Tensor) -> int:
    """Bytes of tensors."""
    return sum(t.nbytes for t in tensors)


def cases() -> Iterator[Case]:
    """Shapes of Kimi K3 on 8 and on 32 dies (12 and 3 heads), decode and prefill."""
    for batch, heads in ((1, 3), (1, 12), (33, 3), (33, 12)):
        yield kda_step(batch, heads)
    for batch, tokens, heads in ((8, 32, 12), (1, 128, 12), (1, 700, 3), (33, 1, 12)):
        yield kda_chunk(batch, tokens, heads)
    for batch, tokens, heads in ((1, 1, 12), (33, 1, 3), (33, 1, 12), (1, 512, 3), (2, 700, 12)):
        yield short_conv(batch, tokens, heads)
    for rows, heads in ((1, 3), (1, 12), (1, 96)):
        yield sparse_attend(rows, 1, heads, 4096, 2048)
    for heads in (1, 3, 12):
        yield sparse_attend(2, 36, heads, 600, 512)
    for sources, tokens in ((9, 512), (5, 512), (2, 512), (9, 33), (9, 1)):
        yield attn_res_mix(sources, tokens)
    for sources, tokens in ((9, 512), (9, 33), (9, 1)):
        yield attn_res_mix(sources, tokens, chained=True)
    for rows in (1, 33, 512):
        yield residual_norm_gate(rows)
    for rows in (1, 33, 512):
        gate, up = torch.randn(rows, 3072).to(BF16), torch.randn(rows, 3072).to(BF16)
        attrs = {"beta": 4.0, "linear_beta": 25.0}
        yield Case("situ_mul", f"{rows} x 3072", {"gate": gate, "up": up}, size(gate, up, up), attrs)
        least = size(gate, up) + up.numel() + 4 * rows
        yield Case("situ_mul_quant", f"{rows} x 3072", {"gate": gate, "up": up}, least, attrs)
    for rows in (12, 396, 6144):
        x, gate, weight = torch.randn(rows, 128).to(BF16), torch.randn(rows, 128).to(BF16), torch.randn(128)
        inputs = {"x": x, "gate": gate, "weight": weight}
        yield Case("gated_rms_norm", f"{rows} x 128", inputs, size(x, x, gate, weight), {"eps": 1e-5}, "touched")


def kda_step(batch: int, heads: int, key: int = 128) -> Case:
    """One token of every sequence; q, k, the gate and beta as the projections give them."""
    q, k, v, decay = (torch.randn(batch, 1, heads, key).to(BF16) for _ in range(4))
    beta, memory = torch.randn(batch, 1, heads).to(BF16), torch.randn(batch + 1, heads, key, key)
    slots, bias, log_rate = torch.arange(1, batch + 1, dtype=torch.int32), torch.randn(heads, key), torch.randn(heads)
    inputs = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta, "memory": memory, "slots": slots}
    least = size(q, k, v, v, decay, beta, slots, bias, log_rate, memory[1:], memory[1:])
    attrs = {"scale": key**-0.5, "norm_eps": 1e-6, "beta_logits": True, "lower_bound": -5.0}
    inputs |= {"bias": bias, "log_rate": log_rate}
    return Case("kda_step", f"{batch} rows, {heads} heads", inputs, least, attrs)


def kda_chunk(batch: int, tokens: int, heads: int, key: int = 128) -> Case:
    """Rows that go on."""
    q, k, v = (torch.randn(batch, tokens, heads, key).to(BF16) / key**0.5 for _ in range(3))
    decay, beta = -torch.rand(batch, tokens, heads, key), torch.rand(batch, tokens, heads)
    memory, slots = torch.randn(batch + 1, heads, key, key), torch.arange(1, batch + 1, dtype=torch.int32)
    counts = torch.full((batch,), tokens)
    inputs = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta, "memory": memory, "slots": slots}
    inputs |= {"lengths": counts + 9, "counts": counts}
    least = size(q, k, v, v, decay, beta, slots, counts, counts, memory[1:], memory[1:])
    shape = f"{batch} x {tokens} tokens, {heads} heads"
    return Case("kda_chunk", shape, inputs, least, {"scale": key**-0.5}, "tensors")


def short_conv(batch: int, tokens: int, heads: int, key: int = 128) -> Case:
    """Rows that go on; the taps are float32, as released."""
    x, weight = torch.randn(batch, tokens, heads, key).to(BF16), torch.randn(heads, key, 4)
    window, slots = torch.randn(batch + 1, heads, key, 3).to(BF16), torch.arange(1, batch + 1, dtype=torch.int32)
    counts = torch.full((batch,), tokens)
    inputs = {"x": x, "weight": weight, "window": window, "slots": slots, "lengths": counts + 9, "counts": counts}
    least = size(x, x, weight, window[1:], window[1:], slots, counts, counts)
    return Case("short_conv", f"{batch} x {tokens} tokens, {heads} heads", inputs, least)


def sparse_attend(rows: int, tokens: int, heads: int, seen: int, selected: int, page: int = 128) -> Case:
    """Queries that keep `selected` of the `seen` tokens before them: a row of 512 + 64 channels for each."""
    pages = -(-(seen + tokens) // page)
    pool = rows * pages + 1
    latent, rope = torch.randn(pool, page, 1, 512).to(BF16), torch.randn(pool, page, 1, 64).to(BF16)
    q, q_rope = torch.randn(rows, tokens, heads, 512).to(BF16), torch.randn(rows, tokens, heads, 64).to(BF16)
    kept = torch.rand(rows, tokens, seen).argsort(2)[:, :, :selected].int()
    table = torch.randperm(pool - 1)[: rows * pages].view(rows, pages).int() + 1
    counts = torch.full((rows,), tokens)
    inputs = {"q": q, "q_rope": q_rope, "latent": latent, "rope": rope, "selected": kept, "block_table": table}
    inputs |= {"lengths": counts + seen, "counts": counts}
    least = rows * tokens * selected * (512 + 64) * 2 + size(q, q_rope, q, kept, table, counts, counts)
    least += rows * tokens * heads * 4
    shape = f"{rows} x {tokens}, {heads} heads, {selected} of {seen}"
    judged = (
        "tensors" if heads > 12 or rows * tokens < 24 else "moved"
    )  # few queries are split: more sums go out and in
    return Case("sparse_attend", shape, inputs, least, {"scale": 192**-0.5}, judged, 1.3)


def attn_res_mix(sources: int, tokens: int, *, chained: bool = False, width: int = 7168) -> Case:
    """The mix of a site over stored blocks and the running sum; chained: that sum is made here, and a norm after it."""
    values, addend = (
        [torch.randn(1, tokens, width).to(BF16) for _ in range(sources)],
        torch.randn(1, tokens, width).to(BF16),
    )
    norm, query, gain = (torch.randn(width).to(BF16) for _ in range(3))
    inputs = {"sources": values, "norm": norm, "query": query}
    attrs, least, shape = {"eps": 1e-5}, size(*values, values[0], norm, query), f"{sources} sources, {tokens} tokens"
    if chained:
        inputs |= {"addend": addend, "gain": gain}
        attrs["norm_eps"] = 1e-5
        least, shape = least + size(addend, addend, gain), f"{shape}, chained"
    return Case("attn_res_mix", shape, inputs, least, attrs)


def residual_norm_gate(rows: int, width: int = 7168) -> Case:
    """A residual's sum and its norm."""
    x, residual, weight = torch.randn(rows, width).to(BF16), torch.randn(rows, width).to(BF16), torch.randn(width)
    inputs = {"x": x, "residual": residual, "weight": weight.to(BF16)}
    least = size(x, x, residual, residual, inputs["weight"])
    return Case("residual_norm_gate", f"{rows} x {width}", inputs, least, {"eps": 1e-5}, "touched")


if __name__ == "__main__":
    try:
        main()
    except KernelError as error:
        sys.exit(str(error))
