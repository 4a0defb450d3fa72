"""On one GPU: KDA by the kernels of the extra `gpu` beside plain torch and transformers; KDA and DSA to 1M tokens.

    pip install 'kimi-graph[gpu]' && python benchmarks/gpu.py

Three parts, each checked before it is timed (`--only check`, `kda`, `group`):

check   results of `kernels="gpu"` against the same layers in float32 by plain torch.
kda     one K3-sized prefill (96 heads of 128, 8,192 tokens, bfloat16, decay bounded at -5, unit lengths in the kernel,
        final state): the library's call against the same call of fla's chunk_kda, at least 0.95 times its speed. Then a
        whole layer, as Kimi Linear has it: with the extra, by plain torch, and transformers' with fla.
group   three KDA layers and one DSA layer of K3.1-Pro, chunked prefill of 32k to 1M tokens. Time is fitted as
        a T + b T^2: b at most 1.5 times that of the indexer's product of queries and keys alone; with the selection
        given, time grows with an exponent of at most 1.05.

Times are medians of runs timed by events. Exits with an error if a promise is missed. `--small` runs everything tiny by
plain torch on a CPU: it tries the script, and measures nothing.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import kimi_graph as kg
from kimi_graph import layers, ops, tree
from kimi_graph.config import IndexerConfig, KdaConfig, MlaConfig
from kimi_graph.layers.kernels import fla_kda

CORE, SLOPE, EXPONENT = 0.95, 1.5, 1.05  # what is promised
OFTEN = 1 << 17  # tokens up to which a length is timed three times
LENGTHS = [1 << n for n in range(15, 21)]


@dataclasses.dataclass(frozen=True)
class Size:
    """How large everything is; `kernels` and `device` of the library's runs."""

    embed: int
    heads: int
    tokens: int
    chunk: int
    lengths: list[int]
    device: str
    kernels: Any


FULL = Size(7168, 96, 8192, 16384, LENGTHS, "cuda", "gpu")
SMALL = Size(128, 2, 96, 64, [128, 192, 256], "cpu", "torch")


def weights(specs: Any, size: Size, dtype: torch.dtype) -> Any:
    """Random parameters made on the device, of the scale of `init_params`."""
    generator = torch.Generator(size.device).manual_seed(0)

    def make(spec: Any) -> Tensor:
        x = torch.randn(spec.shape, generator=generator, device=size.device)
        if len(spec.shape) > 1:
            x /= math.sqrt(math.prod(spec.stored[1:]))
        if "norm" in spec.source[0]:
            x = 1 + 0.1 * x
        return x.to(spec.dtype or dtype)

    return tree.map(make, specs)


def seconds(run: Callable[[], Any], size: Size, rounds: int = 20) -> float:
    """Median seconds of a run after three of them."""
    for _ in range(3):
        run()
    times = []
    for _ in range(rounds if size.device == "cuda" else 1):
        times.append(once(run, size))
    return statistics.median(times)


def once(run: Callable[[], Any], size: Size) -> float:
    if size.device == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# ---- check -----------------------------------------------------------------------------------------------------------


def kda_config(size: Size, bound: float | None) -> KdaConfig:
    return KdaConfig(
        heads=size.heads, key=128, value=128, conv_width=4, gate_rank=128, gate_lower_bound=bound,
        full_rank_gate=bound is not None, stored_rates=(size.heads,),
    )  # fmt: skip


def check(size: Size) -> list[str]:
    """Layers of 4 heads with both kinds of kernels: two prefills, of rows that differ in length, and a step."""
    small = dataclasses.replace(size, embed=512, heads=4)
    missed = []
    for bound in (None, -5.0):
        c = kda_config(small, bound)
        specs = layers.kda_specs(c, small.embed)
        p = weights(specs, small, torch.bfloat16)
        wide = tree.map(lambda x: x.float(), p)
        x = torch.randn(2, 200, small.embed, device=size.device).bfloat16()
        state = layers.zero_state(layers.kda_state_specs(c, 3, torch.bfloat16), x)
        exact = tree.map(lambda s: s.float(), state)
        before = torch.zeros(2, dtype=torch.int64)
        table = torch.ones(2, 1, dtype=torch.int32, device=size.device)
        slots = torch.tensor([1, 2], dtype=torch.int32, device=size.device)
        for counts, step in (([200, 77], False), ([100, 200], False), ([1, 1], True)):
            now = torch.tensor(counts)
            width = 1 if step else 200
            batch = layers.step_batch(table, slots, before, now, width, 1024)
            y, exact = layers.kda(wide, c, x[:, :width].float(), exact, batch, step=step)
            z, state = layers.kda(p, c, x[:, :width], state, batch, step=step, kernels=size.kernels)
            real = torch.arange(width)[None] < now[:, None]
            found = error(z[real], y[real]), error(state.memory[1:], exact.memory[1:])
            print(f"kda, bound {bound}, {counts} tokens: {found[0]:.1e}, memory {found[1]:.1e}")
            if max(found) > 2e-2:  # products of bfloat16 numbers
                missed.append(f"kda, bound {bound}")
            before = before + now
    if size.device == "cuda":
        from kimi_graph.ops import gpu

        q, w = torch.randn(300, 32, 128, device="cuda").bfloat16(), torch.randn(300, 32, device="cuda")
        keys = torch.randn(5000, 128, device="cuda").bfloat16()
        scores = torch.relu(torch.einsum("nik,sk->nis", q.double(), keys.double()))
        scores = (scores * w.double()[..., None]).sum(1)
        found = gpu.index_scores(q, w, keys)
        visible = torch.arange(5000, device="cuda") <= 4700 + torch.arange(300, device="cuda")[:, None]
        print(f"index scores: {error(found[visible], scores[visible]):.1e}")
        if error(found[visible], scores[visible]) > 1e-5 or bool(found[~visible].isfinite().any()):
            missed.append("index scores")
    return missed


# ---- one prefill of KDA ----------------------------------------------------------------------------------------------


def kda(size: Size) -> list[str]:
    heads, tokens, device = size.heads, size.tokens, size.device
    q, k, v, raw = torch.randn(4, 1, tokens, heads, 128, device=device).bfloat16().unbind()
    beta = torch.rand(1, tokens, heads, device=device)
    bias, rate = torch.randn(heads, 128, device=device), torch.rand(heads, device=device)
    memory = torch.zeros(2, heads, 128, 128, device=device)
    batch = layers.row_batch(1, tokens, device=device)
    missed = []
    if device == "cuda":
        from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

        def ours() -> Any:
            return fla_kda(q, k, v, raw, bias, rate, beta, memory, batch, scale=128**-0.5, lower_bound=-5.0, step=False)

        def direct() -> Any:
            return chunk_kda(
                q, k, v, raw, beta, A_log=rate, dt_bias=bias.flatten(), scale=128**-0.5, output_final_state=True,
                use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, safe_gate=True, lower_bound=-5.0,
            )  # fmt: skip

        (o, after), (o2, after2) = ours(), direct()
        print(f"recurrence: same results to {error(o, o2):.1e}, memory {error(after[1].mT, after2[0]):.1e}")
        with torch.no_grad():
            pairs = [(seconds(direct, size), seconds(ours, size)) for _ in range(3)]
        theirs, mine = min(a for a, _ in pairs), min(b for _, b in pairs)
        print(
            f"recurrence, {heads} heads, {tokens:,} tokens: fla {1e3 * theirs:.3f} ms, kimi-graph {1e3 * mine:.3f} ms"
        )
        print(f"  {theirs / mine:.3f} times fla's speed (at least {CORE}); rounds (ms): "
              + ", ".join(f"{1e3 * a:.3f}/{1e3 * b:.3f}" for a, b in pairs))  # fmt: skip
        if theirs / mine < CORE:
            missed.append("KDA prefill")
    return missed + whole_layer(size)


def whole_layer(size: Size) -> list[str]:
    """A layer as Kimi Linear has it (low-rank gates, unbounded decay): three ways of running it."""
    c = kda_config(size, None)
    p = weights(layers.kda_specs(c, size.embed), size, torch.bfloat16)
    x = torch.randn(1, size.tokens, size.embed, device=size.device).bfloat16()
    with torch.no_grad():
        runs = {
            "kimi-graph, extra gpu": lambda: layers.kda(p, c, x, kernels=size.kernels)[0],
            "kimi-graph, plain torch": lambda: layers.kda(p, c, x)[0],
        }
        theirs = transformers_layer(p, c, size)
        if theirs is not None:
            runs["transformers with fla"] = lambda: theirs(x)
        outs = {name: run() for name, run in runs.items()}
        times = {name: seconds(run, size, 5) for name, run in runs.items()}
    first = next(iter(runs))
    print(f"a layer, {size.embed} wide, {size.heads} heads, {size.tokens:,} tokens:")
    for name, took in times.items():
        differ = error(outs[name], outs["kimi-graph, plain torch"])
        print(f"  {name:24} {1e3 * took:9.3f} ms  {took / times[first]:6.2f} x  differs {differ:.1e}")
    return []


def transformers_layer(p: Any, c: KdaConfig, size: Size) -> Any:
    """transformers' layer with the same weights, on fla's kernels where they are; None without transformers."""
    warnings.filterwarnings("ignore")
    try:
        from transformers import KimiLinearConfig
        from transformers.models.kimi_linear import modeling_kimi_linear as theirs
    except ImportError as e:
        print(f"  transformers: {e}")
        return None
    config = KimiLinearConfig(
        hidden_size=size.embed, num_hidden_layers=2, rms_norm_eps=1e-5, hidden_act="silu",
        linear_attn_config={
            "num_heads": c.heads, "head_dim": 128, "short_conv_kernel_size": 4, "kda_layers": [1],
            "full_attn_layers": [2],
        },
    )  # fmt: skip
    layer: Any = theirs.KimiLinearDeltaAttention(config, 0).to(size.device, torch.bfloat16).eval()
    own = {
        "q_proj.weight": p.query, "k_proj.weight": p.key, "v_proj.weight": p.value, "b_proj.weight": p.beta,
        "g_a_proj.weight": p.gate_down, "g_b_proj.weight": p.gate_up, "o_norm.weight": p.norm, "o_proj.weight": p.out,
        "forget_gate.f_a_proj.weight": p.decay_down, "forget_gate.f_b_proj.weight": p.decay_up,
        "forget_gate.dt_bias": p.decay_bias, "forget_gate.A_log": p.log_rate,
        "conv1d.weight": torch.cat([x.flatten(0, 1) for x in (p.query_conv, p.key_conv, p.value_conv)])[:, None],
    }  # fmt: skip
    given = layer.state_dict()
    assert given.keys() == own.keys(), sorted(given.keys() ^ own.keys())
    layer.load_state_dict({name: own[name].reshape(given[name].shape) for name in given})
    layer.forget_gate.dt_bias.data = p.decay_bias.reshape(given["forget_gate.dt_bias"].shape).float()
    return layer


# ---- a group of layers against length --------------------------------------------------------------------------------


class Group:
    """Three KDA layers and one DSA layer, a residual stream through them, chunk by chunk."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.kda = kda_config(size, -5.0)
        self.mla = MlaConfig(
            heads=size.heads, latent=512, key_nope=128, key_rope=64, value=128, scale=192**-0.5, query_latent=1536,
            output_gate=True,
            indexer=IndexerConfig(
                heads=32, key=128, top_k=2048 if size.device == "cuda" else 32, eps=1e-5, rope=0, interleaved=False
            ),
        )  # fmt: skip
        bf16 = torch.bfloat16
        self.kdas = [weights(layers.kda_specs(self.kda, size.embed), size, bf16) for _ in range(3)]
        self.dsa = weights(layers.mla_specs(self.mla, size.embed), size, bf16)
        self.norm = torch.ones(size.embed, device=size.device, dtype=bf16)
        self.x = torch.randn(1, size.chunk, size.embed, device=size.device).to(bf16)
        assert self.mla.indexer is not None
        self.blind = dataclasses.replace(self.mla, indexer=dataclasses.replace(self.mla.indexer, shared=True))

    def prefill(self, tokens: int, *, indexer: bool) -> None:
        """Without its indexer the DSA layer is given as many random tokens of those before each query."""
        size, c = self.size, self.mla if indexer else self.blind
        pages = -(-tokens // 128)
        specs = layers.kda_state_specs(self.kda, 2, torch.bfloat16)
        memories = [layers.zero_state(specs, self.x) for _ in range(3)]
        cache = layers.zero_state(layers.mla_state_specs(c, pages + 1, 128, torch.bfloat16), self.x)
        table = torch.arange(1, pages + 1, dtype=torch.int32, device=size.device)[None]
        slots = torch.ones(1, dtype=torch.int32, device=size.device)
        dsa = self.dsa if indexer else tree.replace(self.dsa, indexer=None)
        with torch.no_grad(), ops.donating():
            for start in range(0, tokens, size.chunk):
                count = min(size.chunk, tokens - start)
                batch = layers.step_batch(table, slots, torch.tensor([start]), torch.tensor([count]), count, 128)
                x = self.x[:, :count]
                for i, p in enumerate(self.kdas):
                    h = ops.rms_norm(x, self.norm, 1e-5)
                    y, memories[i] = layers.kda(p, self.kda, h, memories[i], batch, kernels=size.kernels)
                    x = x + y
                selected = None if indexer else self.random(start, count)
                h = ops.rms_norm(x, self.norm, 1e-5)
                y, cache, _ = layers.mla(dsa, c, h, cache, batch, selected=selected, kernels=size.kernels)
                x = x + y

    def random(self, start: int, count: int) -> Tensor:
        assert self.mla.indexer is not None
        last = torch.arange(start + 1, start + count + 1, device=self.size.device)[:, None]
        return (torch.rand(1, count, self.mla.indexer.top_k, device=self.size.device) * last).int()

    def products(self, tokens: int) -> None:
        """The product of index queries and keys alone, of the keys up to each block of queries."""
        assert self.mla.indexer is not None
        device, heads = self.size.device, self.mla.indexer.heads
        keys = torch.randn(tokens, 128, device=device, dtype=torch.bfloat16)
        rows = max(1, min(self.size.chunk, (1 << 31) // (heads * tokens)))  # 4 GB of results
        q = torch.randn(rows * heads, 128, device=device, dtype=torch.bfloat16)
        out = torch.empty(rows * heads * tokens, device=device, dtype=torch.bfloat16)
        for start in range(0, tokens, rows):
            seen = min(start + rows, tokens)
            torch.mm(q, keys[:seen].t(), out=out[: len(q) * seen].view(len(q), seen))

    def choice(self, tokens: int) -> None:
        """The indexer's choice alone, as the layer makes it."""
        if self.size.device == "cpu":
            return
        from kimi_graph.ops import gpu

        assert self.mla.indexer is not None
        c, size, device = self.mla.indexer, self.size, self.size.device
        pool = torch.randn(tokens // 128 + 1, 128, c.key, device=device, dtype=torch.bfloat16)
        table = torch.arange(1, tokens // 128 + 1, dtype=torch.int32, device=device)[None]
        q = torch.randn(1, size.chunk, c.heads, c.key, device=device, dtype=torch.bfloat16)
        w = torch.randn(1, size.chunk, c.heads, device=device)
        for start in range(0, tokens, size.chunk):
            counts = torch.tensor([min(size.chunk, tokens - start)])
            gpu.select_keys(q, w, pool, table, counts + start, counts, c.top_k)


def fitted(times: dict[int, float]) -> tuple[float, float]:
    """a and b of `a T + b T^2`, by least squares of relative errors."""
    rows = torch.tensor([[t / s, t * t / s] for t, s in times.items()], dtype=torch.float64)
    a, b = torch.linalg.lstsq(rows, torch.ones(len(rows), 1, dtype=torch.float64)).solution.flatten().tolist()
    return a, b


def exponent(times: dict[int, float]) -> float:
    """Of a power of T, by least squares of logarithms."""
    x, y = (torch.tensor([float(v) for v in values]).double().log() for values in (list(times), list(times.values())))
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x * x).sum())


def group(size: Size) -> list[str]:
    made = Group(size)
    runs: dict[str, Callable[[int], Any]] = {
        "all": lambda t: made.prefill(t, indexer=True),
        "selection given": lambda t: made.prefill(t, indexer=False),
        "indexer's choice": made.choice,
        "indexer's product": made.products,
    }
    for run in runs.values():
        run(size.lengths[0])
    times: dict[str, dict[int, float]] = {name: {} for name in runs}
    for tokens in size.lengths:
        for name, run in runs.items():
            rounds = [
                once(lambda run=run, tokens=tokens: run(tokens), size) for _ in range(3 if tokens <= OFTEN else 1)
            ]
            times[name][tokens] = statistics.median(rounds)
        print(f"{tokens:>9,} tokens: " + ", ".join(f"{n} {times[n][tokens]:.4f} s" for n in runs), flush=True)
    fits = {name: fitted(t) for name, t in times.items()}
    for name, (a, b) in fits.items():
        print(f"  {name:18} {1e6 * a:8.3f} us T + {1e12 * b:8.3f} ps T^2, exponent {exponent(times[name]):.3f}")
    ratio, grows = fits["all"][1] / fits["indexer's product"][1], exponent(times["selection given"])
    print(f"b is {ratio:.2f} times that of the product alone (at most {SLOPE})")
    print(f"with the selection given, time grows as T^{grows:.3f} (at most {EXPONENT})")
    print(json.dumps(times))
    return ["slope of the group"] * (ratio > SLOPE) + ["exponent without indexer"] * (grows > EXPONENT)


def main() -> int:
    parts = {"check": check, "kda": kda, "group": group}
    parser = argparse.ArgumentParser(description="KDA and DSA on a GPU: speed and growth with length.")
    parser.add_argument("--only", choices=tuple(parts), action="append", help="a part (default: all)")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="of the group (default 1,048,576)")
    parser.add_argument("--small", action="store_true", help="tiny, by plain torch on a CPU: tries the script")
    args = parser.parse_args()
    size = SMALL if args.small else dataclasses.replace(FULL, lengths=[n for n in LENGTHS if n <= args.longest])
    torch.manual_seed(0)
    print(*kg.gpu_kernels(), sep="\n")
    if size.device == "cuda":
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    missed = [m for name in args.only or parts for m in parts[name](size)]
    if args.small:
        print("tried; nothing was measured")
        return 0
    print("missed: " + ", ".join(missed) if missed else "all promises held")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
