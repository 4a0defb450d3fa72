"""Fused chains against the same in pieces: bytes and instructions of the kernels on the CPU twin, and what that is of a
decode step's layers.

One rank of Kimi K3.1-Pro on 8 (12 heads), 33 sequences, the step's tensors in bfloat16. Both sides of a chain run on
the twin where kernels of ours do the pieces: a sum and a norm alone are ResidualNormGate with that part alone.
Pieces that CANN's basic operators do (marked +) are counted as reading each operand and writing each result once; their
instructions are not known. Bytes of workspaces count. `busiest` is the core that moves most, `work` vector
instructions in units of 256 bytes on all cores.

The share is of the bytes that all nodes of a layer of a compiled decode step move, and of those that are not weights.
Times are not known without a device; launches that fused chains save are counted too.

    python benchmarks/fused_chains.py [--arch 2201|3510]
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_graph.compile.cost import inspect_cost
from kimi_graph.compile.driver import compile_model
from kimi_graph.compile.targets import target
from kimi_graph.errors import KimiGraphError
from kimi_graph.ops.twin import ARCHES, Kernel
from kimi_graph.parallel import Mesh
from kimi_graph.read_config import load_config

BF16, F32 = torch.bfloat16, torch.float32
ROWS, HEADS, KEY, EMBED, SOURCES, FFN = 33, 12, 128, 7168, 9, 6144 // 8
PUBLIC = (0.15, 0.20)  # of a layer: the rule of thumb


@dataclass(frozen=True)
class Side:
    """Bytes moved, those of the busiest core, vector work, launches; `counted`: some of it was not run."""

    bytes: int = 0
    busiest: int = 0
    work: int = 0
    launches: int = 0
    counted: bool = False

    def __add__(self, other: "Side") -> "Side":
        return Side(
            self.bytes + other.bytes,
            self.busiest + other.busiest,
            self.work + other.work,
            self.launches + other.launches,
            self.counted or other.counted,
        )


@dataclass(frozen=True)
class Chain:
    """A chain, both ways, and how often a layer of a kind (`kda`, `mla`) has it."""

    name: str
    fused: Side
    pieces: Side
    kda: int
    mla: int


class Twin:
    """Kernels of one chip."""

    def __init__(self, arch: int, cache: Path) -> None:
        self.arch, self.cache = arch, cache

    def run(self, name: str, inputs: dict[str, Any], **attrs: Any) -> Side:
        c = Kernel(name, self.cache).run(inputs, attrs, arch=self.arch).counters
        each = [r + w + s for r, w, s in zip(c.read, c.written, c.workspace, strict=True)]
        return Side(sum(each), max(each), sum(c.repeats), 1)


def nodes(*each: int) -> Side:
    """Basic operators by the bytes that each reads and writes."""
    return Side(sum(each), 0, 0, len(each), counted=True)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape).to(BF16)


def chains(twin: Twin) -> Iterator[Chain]:
    """Every chain that graphs have, and SiTU's with INT8 rows, which none has yet."""
    yield step_of_kda(twin)
    yield mix_and_norm(twin)
    yield residual_and_norm(twin)
    x, gate = rand(ROWS, HEADS, KEY), rand(ROWS, HEADS, KEY)
    fused = twin.run("residual_norm_gate", {"x": x, "gate": gate})
    yield Chain("gate of attention", fused, nodes(2 * x.nbytes, 3 * x.nbytes), 0, 1)
    x, gate, weight = rand(ROWS, HEADS, KEY), rand(ROWS, HEADS, KEY), torch.randn(KEY)
    fused = twin.run("gated_rms_norm", {"x": x, "gate": gate, "weight": weight}, eps=1e-5)
    one = x.nbytes  # casts, norm, sigmoid and product in float32, cast
    yield Chain("gated norm of KDA", fused, nodes(3 * one, 4 * one, 3 * one, 4 * one, 6 * one, 3 * one), 1, 0)
    yield situ_and_rows(twin)


def step_of_kda(twin: Twin) -> Chain:
    """L2 norms, gate and beta's sigmoid in the kernel, or before it in float32."""
    q, k, v, decay = (rand(ROWS, 1, HEADS, KEY) for _ in range(4))
    beta, memory = rand(ROWS, 1, HEADS), torch.randn(ROWS + 1, HEADS, KEY, KEY)
    where = {"memory": memory, "slots": torch.arange(1, ROWS + 1, dtype=torch.int32)}
    gate = {"bias": torch.randn(HEADS, KEY), "log_rate": torch.randn(HEADS)}
    raw = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta, **where, **gate}
    fused = twin.run("kda_step", raw, scale=KEY**-0.5, norm_eps=1e-6, beta_logits=True, lower_bound=-5.0)
    made = {"q": q, "k": k, "v": v, "decay": -torch.rand(decay.shape), "beta": torch.rand(beta.shape), **where}
    one, few = q.nbytes, 2 * beta.nbytes
    norm = (3 * one, 4 * one, 2 * one + few, 2 * few, 2 * few, 4 * one + few, 3 * one)  # of q, and of k
    pieces = nodes(*norm, *norm, 3 * one, 4 * one, 4 * one, 4 * one, 4 * one, beta.nbytes + few, 2 * few)
    return Chain("KDA's step", fused, pieces + twin.run("kda_step", made, scale=KEY**-0.5), 1, 0)


def mix_and_norm(twin: Twin) -> Chain:
    values, addend = [rand(ROWS, 1, EMBED) for _ in range(SOURCES)], rand(ROWS, 1, EMBED)
    norm, query, gain = rand(EMBED), rand(EMBED), rand(EMBED)
    mix = {"sources": values, "norm": norm, "query": query}
    fused = twin.run("attn_res_mix", mix | {"addend": addend, "gain": gain}, eps=1e-5, norm_eps=1e-5)
    pieces = twin.run("residual_norm_gate", {"x": values[-1], "residual": addend})
    pieces += twin.run("attn_res_mix", mix, eps=1e-5)
    pieces += twin.run("residual_norm_gate", {"x": addend, "weight": gain}, eps=1e-5)
    return Chain("sum, mix of 9, norm", fused, pieces, 2, 2)


def residual_and_norm(twin: Twin) -> Chain:
    """Of models without attention residuals, at the same width: no part of a layer of K3."""
    x, residual, weight = rand(ROWS, 1, EMBED), rand(ROWS, 1, EMBED), rand(EMBED)
    fused = twin.run("residual_norm_gate", {"x": x, "residual": residual, "weight": weight}, eps=1e-5)
    pieces = twin.run("residual_norm_gate", {"x": x, "residual": residual})
    pieces += twin.run("residual_norm_gate", {"x": x, "weight": weight}, eps=1e-5)
    return Chain("residual sum, norm", fused, pieces, 0, 0)


def situ_and_rows(twin: Twin) -> Chain:
    gate, up, betas = rand(ROWS, FFN), rand(ROWS, FFN), {"beta": 4.0, "linear_beta": 25.0}
    fused = twin.run("situ_mul_quant", {"gate": gate, "up": up}, **betas)
    pieces = twin.run("situ_mul", {"gate": gate, "up": up}, **betas)
    return Chain("SiTU, INT8 rows", fused, pieces + nodes(gate.nbytes * 3 // 2 + 4 * ROWS), 0, 0)


def layer_bytes(folder: Path) -> dict[str, tuple[int, int]]:
    """Bytes that all nodes of the largest layer with KDA and with attention move, fused as they are; of weights."""
    compile_model(
        load_config("kimi-k3.1-pro"), target=target("a3", providers=("own", "builtin", "composed")), out=folder,
        phases=("decode",), batch=ROWS, mesh=Mesh.parse("tp=8"), must_fit=False,
    )  # fmt: skip
    layers: dict[str, tuple[int, int]] = {}
    kinds: dict[str, str] = {}
    for node in inspect_cost(folder, "decode").graphs[0].nodes:
        if found := re.match(r"layers\.(\d+)\.(\w+?)\d*/", node.name):
            all_, weights = layers.get(found[1], (0, 0))
            weights += sum(t.read for t in node.touches if t.category == "weights")
            layers[found[1]] = all_ + node.read + node.written, weights
            kinds |= {found[1]: found[2]} if found[2] in ("kda", "mla") else {}
    return {kind: max(n for i, n in layers.items() if kinds[i] == kind) for kind in ("kda", "mla")}


def main() -> None:
    """Print both sides of every chain; exit code 1 if a fused one moves more than its pieces."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, choices=list(ARCHES), default=2201)
    arch = parser.parse_args().arch
    print(f"{'chain':22}{'bytes':>11}{'in pieces':>12}{'ratio':>7}{'busiest':>9}{'work':>7}{'launches':>10}")
    with tempfile.TemporaryDirectory() as folder:
        made = list(chains(Twin(arch, Path(folder))))
        for c in made:
            ratios = [getattr(c.fused, n) / max(1, getattr(c.pieces, n)) for n in ("busiest", "work")]
            shown = [f"{r:.2f}" if not c.pieces.counted else "+" for r in ratios]
            line = f"{c.name:22}{c.fused.bytes:11,}{c.pieces.bytes:12,}{c.fused.bytes / c.pieces.bytes:7.3f}"
            print(f"{line}{shown[0]:>9}{shown[1]:>7}{c.fused.launches:6} of {c.pieces.launches}")
        for kind, (size, weights) in layer_bytes(Path(folder) / "bundle").items():
            saved = sum(getattr(c, kind) * (c.pieces.bytes - c.fused.bytes) for c in made)
            fewer = sum(getattr(c, kind) * (c.pieces.launches - c.fused.launches) for c in made)
            share = f"{saved / (size + saved):.2%} of its bytes and {saved / (size - weights + saved):.1%} of those "
            share += f"that are not weights, {fewer} launches fewer"
            rule = "the public rule of thumb is {:.0%} to {:.0%} of a layer".format(*PUBLIC)
            print(f"a layer with {kind}: {size:,} bytes; its chains save {saved:,}, {share} ({rule})")
    sys.exit(any(c.fused.bytes > c.pieces.bytes for c in made))


if __name__ == "__main__":
    try:
        main()
    except KimiGraphError as error:
        sys.exit(str(error))
