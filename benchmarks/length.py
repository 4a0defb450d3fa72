# pyright: reportMissingImports=false
"""Time to the first token against the prompt's length, on the engine: does a long prompt cost as its arithmetic says?

One prompt at a time, each new to the engine, of a fixture of Kimi K3.1 Pro whose attention keeps 64 keys a query.
Reading a prompt is linear in its length but for the indexer, which scores every token for every query. So the time of
n tokens is fitted as `a + b n`, as `n ^ exponent`, and as `a + b n + c n^2`, whose last part is the indexer's; the
fixture has the released indexer (32 heads of 128) in layers of a fraction of the released width: its part is far
larger here.

The bar is the arithmetic's own exponent over the same lengths, plus 0.15 for the machine. An engine that copies a
cache for each part of a prompt, or attends to all tokens, is above it where the indexer is the lesser part. Exit code
1 above the bar. Lengths double until the next would not be done in time.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import kimi_graph as kg
from kimi_graph import tree
from kimi_graph.config import MlaConfig, ModelConfig
from kimi_graph.fixture import make_fixture
from kimi_graph.models.decoder import model_specs

LONGEST = 65_536
SLACK = 0.15  # of the exponent: a shared machine
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # all cores; by itself vLLM leaves one to its server
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def solve(columns: Sequence[Sequence[float]], y: Sequence[float]) -> tuple[list[float], float]:
    """Least squares: coefficients of the columns, and R^2."""
    a, b = torch.tensor(columns, dtype=torch.float64).T, torch.tensor(y, dtype=torch.float64)
    scale = a.abs().amax(0)  # n and n^2 differ by thousands
    found = torch.linalg.lstsq(a / scale, b[:, None]).solution[:, 0]
    rest = b - (a / scale) @ found
    return (found / scale).tolist(), float(1 - rest.square().sum() / (b - b.mean()).square().sum())


def work(c: ModelConfig, n: int) -> tuple[float, float]:
    """Multiply-adds of reading n tokens: those that are linear in n, of weights alone, and the indexer's."""
    mixers = [layer.mixer for layer in c.layers if isinstance(layer.mixer, MlaConfig)]
    pairs = sum(m.indexer.heads * m.indexer.key for m in mixers if m.indexer is not None and not m.indexer.shared)
    return float(n * active(c)), n * (n + 1) / 2 * pairs


def active(c: ModelConfig) -> float:
    """Weights of the layers that a token meets, of routed experts those that it is sent to."""
    total = 0.0
    for layer, block in zip(c.layers, model_specs(c).layers, strict=True):
        for spec in tree.leaves(block):
            routed = "experts" in spec.axes
            total += spec.numel * (layer.ffn.top_k / layer.ffn.experts if routed else 1)  # type: ignore[union-attr]
    return total


def exponent(lengths: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    """Slope of log time over log length, and R^2."""
    found, fit = solve([[1.0] * len(lengths), [math.log(n) for n in lengths]], [math.log(t) for t in times])
    return found[1], fit


def measured(folder: Path, seconds: float) -> list[tuple[int, float]]:
    """Seconds of the first token of prompts of doubling lengths."""
    os.environ.update({name: os.environ.get(name, value) for name, value in SETTINGS.items()})
    import vllm
    from vllm.inputs import TokensPrompt

    llm = vllm.LLM(str(folder), dtype="float32", enforce_eager=True, max_model_len=LONGEST + 1)
    one = vllm.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    generator = torch.Generator().manual_seed(0)

    def first_token(n: int) -> float:
        prompt = TokensPrompt(prompt_token_ids=torch.randint(0, 256, (n,), generator=generator).tolist())
        begun = time.monotonic()
        llm.generate([prompt], one, use_tqdm=False)
        return time.monotonic() - begun

    first_token(256)  # the first ever is slower
    rows, begun, n, spent = [], time.monotonic(), 512, 0.0
    while n <= LONGEST and (time.monotonic() - begun) + 2.8 * spent < seconds:
        some = [first_token(n) for _ in range(3 if n <= 2048 else 1)]
        spent = statistics.median(some)
        rows.append((n, spent))
        print(f"{n:8,} tokens: {spent:8.2f} s, {1e3 * spent / n:.3f} ms a token", flush=True)
        n *= 2
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[1])
    parser.add_argument("--seconds", type=float, default=240.0, help="to measure in")
    parser.add_argument("-o", "--out", type=Path, default=Path("build/length"))
    given = parser.parse_args()
    folder = given.out / "model"
    if not folder.exists():
        given.out.mkdir(parents=True, exist_ok=True)
        make_fixture(kg.load_config("kimi-k3.1-pro"), folder)
    rows = measured(folder, given.seconds)
    if len(rows) < 4:
        sys.exit(f"only {len(rows)} lengths were done in {given.seconds:.0f} s; expected 4: give it more --seconds")
    sys.exit(judge(kg.load_config(folder), rows))


def judge(c: ModelConfig, rows: Sequence[tuple[int, float]]) -> int:
    """Print what the figures come to; 1 where the exponent is above the bar."""
    lengths, times = zip(*rows, strict=True)
    ones, n = [1.0] * len(rows), [float(x) for x in lengths]
    (_, each), straight = solve([ones, n], times)
    (_, linear, square), bent = solve([ones, n, [x * x for x in n]], times)
    found, fit = exponent(lengths, times)
    own, _ = exponent(lengths, [sum(work(c, x)) for x in lengths])
    part = square * n[-1] ** 2 / times[-1]
    last = work(c, lengths[-1])
    print(f"linear: {1e3 * each:.3f} ms a token, R^2 {straight:.4f}")
    print(f"with a square: {1e3 * linear:.3f} ms a token and {1e9 * square:.2f} ns a pair, R^2 {bent:.4f}")
    print(
        f"the indexer: {part:.0%} of the time of {lengths[-1]:,} tokens by the fit, "
        f"{last[1] / sum(last):.0%} of the multiply-adds by count"
    )
    released = kg.load_config("kimi-k3.1-pro")
    linear_work, pair_work = work(released, 1_000_000)
    print(f"of the released model it is {pair_work / (linear_work + pair_work):.0%} of those of 1,000,000 tokens")
    broken = found > own + SLACK
    words = "BROKEN" if broken else "kept"
    print(f"{words}: exponent {found:.2f}, R^2 {fit:.4f}; by count {own:.2f}, bar {own + SLACK:.2f}")
    return int(broken)


if __name__ == "__main__":
    main()
