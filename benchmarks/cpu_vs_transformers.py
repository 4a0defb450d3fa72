"""A small Kimi Linear on the CPU against transformers' own, with the same weights: speed, memory, and physics.

    python benchmarks/cpu_vs_transformers.py

Checks first that both compute the same, then prints one table and exits with an error if a promise is missed: prefill
at least 3 times as fast, with at most 1/5 (float32) or 1/4 (bfloat16) of the extra memory, decode at least 1.5 times as
fast. Both sides give full logits and a state that decoding goes on from. Times are the best of alternating rounds;
memory is each side's peak resident size over its start, in a process of its own.

Needs transformers (the `test` extra).
"""

import argparse
import ctypes
import json
import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import kimi_graph as kg
from kimi_graph import tree
from kimi_graph.config import ModelConfig
from kimi_graph.models import Decoder, model_specs

THREADS, TOKENS, STEPS = 2, 2048, 24
PREFILL_RATIO, DECODE_RATIO, MEMORY_RATIO = 3.0, 1.5, {"float32": 5.0, "bfloat16": 4.0}
CONFIG = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "vocab_size": 4096,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "mla_use_nope": True,
    "linear_attn_config": {
        "num_heads": 8,
        "head_dim": 64,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [4, 8],
        "kda_layers": [1, 2, 3, 5, 6, 7],
    },
    "num_experts": 32,
    "num_experts_per_token": 4,
    "num_shared_experts": 1,
    "moe_intermediate_size": 256,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
    "num_expert_group": 1,
    "topk_group": 1,
    "use_grouped_topk": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "model_max_length": 8192,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}


def our_config() -> ModelConfig:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(CONFIG))
        return kg.load_config(str(path))


def released_names(config: ModelConfig, params: Decoder[Tensor]) -> dict[str, Tensor]:
    """Our parameters under the released checkpoint's names."""
    found = {}
    for spec, value in zip(tree.leaves(model_specs(config)), tree.leaves(params), strict=True):
        for name, part in zip(spec.source, value.reshape(len(spec.source), *spec.stored), strict=True):
            found[name] = part
    return found


def their_model(named: dict[str, Tensor], dtype: torch.dtype) -> torch.nn.Module:
    """transformers' model holding the same weights."""
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    keep = {k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type", "dtype")}
    model: Any = KimiLinearForCausalLM(KimiLinearConfig(**keep))
    model = model.to(dtype).eval()
    theirs = dict(named)
    for i in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{i}.self_attn."
        if f"{at}A_log" in theirs:
            for name in ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log"):
                theirs[f"{at}forget_gate.{name}"] = theirs.pop(at + name)
            theirs[f"{at}conv1d.weight"] = torch.cat([theirs.pop(f"{at}{x}_conv1d.weight") for x in "qkv"])
        at = f"model.layers.{i}.block_sparse_moe."
        for name in [n for n in theirs if n.startswith(at) and ".experts." not in n]:
            theirs[name.replace("block_sparse_moe", "mlp")] = theirs.pop(name)
        if f"{at}experts.0.w1.weight" in theirs:
            w1, w3, w2 = (
                torch.stack([theirs.pop(f"{at}experts.{e}.{w}.weight") for e in range(CONFIG["num_experts"])])
                for w in ("w1", "w3", "w2")
            )
            theirs[f"model.layers.{i}.mlp.experts.gate_up_proj"] = torch.cat([w1, w3], 1)
            theirs[f"model.layers.{i}.mlp.experts.down_proj"] = w2
    model.load_state_dict(theirs)
    for module in model.modules():  # what transformers keeps in float32 when it loads bfloat16
        for name in ("dt_bias", "e_score_correction_bias"):
            if hasattr(module, name):
                getattr(module, name).data = getattr(module, name).data.float()
    return model


class Ours:
    def __init__(self, dtype: torch.dtype) -> None:
        self.config = our_config()
        self.params = kg.init_params(self.config, seed=0, dtype=dtype)

    def prefill(self, tokens: Tensor) -> Tensor:
        state = kg.init_state(self.config, batch=1, max_len=TOKENS + 8 * STEPS)
        logits, self.state = kg.prefill(self.config, self.params, tokens, state, donate=True)
        return logits

    def decode(self, token: Tensor) -> Tensor:
        logits, self.state = kg.decode(self.config, self.params, token, self.state, donate=True)
        return logits


class Theirs:
    def __init__(self, ours: Ours, dtype: torch.dtype) -> None:
        self.model = their_model(released_names(ours.config, ours.params), dtype)

    def prefill(self, tokens: Tensor) -> Tensor:
        out = self.model(tokens, use_cache=True)
        self.cache = out.cache
        return out.logits

    def decode(self, token: Tensor) -> Tensor:
        return self.model(token[:, None], cache=self.cache, use_cache=True).logits[:, 0]


def prompt() -> Tensor:
    return torch.randint(0, CONFIG["vocab_size"], (1, TOKENS), generator=torch.Generator().manual_seed(1))


def best(rounds: int, *sides: Callable[[], object]) -> list[float]:
    """Seconds of each side, the best of alternating rounds."""
    found = [math.inf] * len(sides)
    for _ in range(rounds):
        for i, side in enumerate(sides):
            start = time.perf_counter()
            side()
            found[i] = min(found[i], time.perf_counter() - start)
    return found


def status_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def extra_mib(side: str, dtype: torch.dtype) -> float:
    """Peak resident size of a prefill over the size before it, in this process."""
    ours = Ours(dtype)
    run = ours if side == "ours" else Theirs(ours, dtype)
    del ours
    run.prefill(prompt()[:, :8])  # libraries load, threads start
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status_kib("VmRSS")
    logits = run.prefill(prompt())
    assert logits.shape == (1, TOKENS, CONFIG["vocab_size"])
    return (status_kib("VmHWM") - before) / 1024


def extra_mib_apart(side: str, dtype: str) -> float:
    command = [sys.executable, __file__, "--memory", side, "--dtype", dtype]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def work(config: ModelConfig) -> tuple[float, float, float]:
    """Active weights of a token; floating-point operations of the prefill; float32 bytes of a decode step after it."""
    experts, top_k = CONFIG["num_experts"], CONFIG["num_experts_per_token"]
    weights = 0.0
    for spec in tree.leaves(model_specs(config)):
        if spec.source[0] != "model.embed_tokens.weight" and len(spec.shape) > 1:
            weights += spec.numel * (top_k / experts if ".experts." in spec.source[0] else 1)
    heads, key, kda = CONFIG["num_attention_heads"], 64, CONFIG["linear_attn_config"]
    memory = kda["num_heads"] * kda["head_dim"] ** 2 * len(kda["kda_layers"])
    latent = CONFIG["kv_lora_rank"] + CONFIG["qk_rope_head_dim"]
    pairs = TOKENS * (TOKENS + 1) / 2 * len(kda["full_attn_layers"])
    attention = 2 * pairs * heads * (key + CONFIG["qk_rope_head_dim"] + CONFIG["v_head_dim"])
    operations = 2 * weights * TOKENS + attention + 6 * memory * TOKENS
    read = 4 * (weights + 2 * memory + TOKENS * latent * len(kda["full_attn_layers"]))
    return weights, operations, read


def check(ours: Ours, theirs: Theirs) -> float:
    """Largest difference of logits, prefill and two decode steps, as a share of the largest logit."""
    worst = 0.0
    token = torch.tensor([7])
    for name, args in (("prefill", prompt()), ("decode", token), ("decode", token)):
        want, got = getattr(theirs, name)(args), getattr(ours, name)(args)
        worst = max(worst, ((got - want).abs().max() / want.abs().max()).item())
    return worst


def compare(rounds: int) -> int:
    ours = Ours(torch.float32)
    theirs = Theirs(ours, torch.float32)
    difference = check(ours, theirs)
    tokens, token = prompt(), torch.tensor([7])
    prefill = best(rounds, lambda: ours.prefill(tokens), lambda: theirs.prefill(tokens))
    decode = best(STEPS, lambda: ours.decode(token), lambda: theirs.decode(token))
    a, b = torch.randn(2, 2048, 1024).unbind()
    (mm,) = best(10, lambda: torch.mm(a, b.t()))
    mm_rate = 2 * 2048 * 2048 * 1024 / mm
    source, target = torch.randn(2, 64 << 20).unbind()
    (copy,) = best(10, lambda: target.copy_(source))
    copy_rate = 2 * 4 * source.numel() / copy  # every byte is read and written
    weights, operations, read = work(ours.config)
    print(
        f"Kimi Linear, 8 layers, {weights / 1e6:.1f} M active weights; B = 1, T = {TOKENS}, {THREADS} threads, float32"
    )
    print(f"largest difference of logits: {difference:.1e} of their scale (at most 1e-4)")
    memory = {d: [extra_mib_apart(s, d) for s in ("ours", "theirs")] for d in MEMORY_RATIO}
    rows = [
        ("prefill, tokens/s", *(TOKENS / s for s in prefill), prefill[1] / prefill[0], PREFILL_RATIO),
        ("decode, tokens/s", *(1 / s for s in decode), decode[1] / decode[0], DECODE_RATIO),
    ]
    rows += [(f"extra memory {d}, MiB", *memory[d], memory[d][1] / memory[d][0], r) for d, r in MEMORY_RATIO.items()]
    print(f"{'':28}{'kimi-graph':>12}{'transformers':>14}{'ratio':>8}{'promise':>9}")
    for name, mine, other, ratio, promise in rows:
        print(f"{name:28}{mine:12.1f}{other:14.1f}{ratio:8.2f}{promise:9.1f}{'' if ratio >= promise else '  missed'}")
    print(
        f"prefill: {operations / prefill[0] / 1e9:.0f} GFLOP/s, {operations / prefill[0] / mm_rate:.0%} of torch.mm's "
        f"{mm_rate / 1e9:.0f} (aim 40%; transformers {operations / prefill[1] / mm_rate:.0%})"
    )
    print(
        f"decode: {read / decode[0] / 1e9:.1f} GB/s, {read / decode[0] / copy_rate:.0%} of a copy's "
        f"{copy_rate / 1e9:.1f} (aim 60%; transformers {read / decode[1] / copy_rate:.0%})"
    )
    missed = [name for name, _, _, ratio, promise in rows if ratio < promise]
    if difference > 1e-4:
        missed.append("equal logits")
    print("missed: " + ", ".join(missed) if missed else "all promises held")
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Kimi Linear on the CPU against transformers, same weights.")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the prefill (default 5)")
    parser.add_argument("--memory", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    parser.add_argument("--dtype", choices=tuple(MEMORY_RATIO), default="float32", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    with torch.no_grad():
        if args.memory:
            print(extra_mib(args.memory, getattr(torch, args.dtype)))
            return 0
        return compare(args.rounds)


if __name__ == "__main__":
    sys.exit(main())
