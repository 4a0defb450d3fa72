"""Whose kernels a layer runs: plain torch everywhere, or on a GPU those of the extra `gpu`. The caller says which.

Letters: B sequences, T tokens, H heads, K key, V value, S slots.
"""

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kimi_graph.errors import ConfigError
from kimi_graph.ops import at_least_f32
from kimi_graph.ops.state import put_rows, state_rows

from .batch import Batch

Kernels = Literal["torch", "gpu"]
EXTRA = "pip install 'kimi-graph[gpu]'"
SAFE = -5.0  # bounds of the decay from here up have kernels on matrix units
NOTHING = -1e4  # a raw decay that keeps all of the memory, under either gate


@dataclass(frozen=True)
class Provider:
    """Who computes a part of a layer with `kernels="gpu"`.

    Attributes:
        part: of which layer.
        kernel: its name.
        package: who brings it, with its version.
        missing: why it cannot run here; empty where it can.
    """

    part: str
    kernel: str
    package: str
    missing: str

    def __str__(self) -> str:
        return f"{self.part:20} {self.kernel:40} {self.package:20} {self.missing or 'ready'}"


def gpu_kernels() -> tuple[Provider, ...]:
    """Who computes what with `kernels="gpu"`, and what is missing for it here; each prints as a line."""
    gpu = "" if torch.cuda.is_available() else "no GPU"
    fla, fla_missing = _found("fla", "fla-core")
    triton, triton_missing = _found("triton", "triton")
    return (
        Provider("kda, many tokens", "fla.ops.kda.chunk_kda", fla, fla_missing or gpu),
        Provider("kda, step=True", "fla.ops.kda.fused_recurrent_kda", fla, fla_missing or gpu),
        Provider("mla, its indexer", "kimi_graph.ops.gpu.index_scores", triton, triton_missing or gpu),
    )


def _found(module: str, name: str) -> tuple[str, str]:
    """A package with its version, and what is wrong with it."""
    if importlib.util.find_spec(module) is None:
        return name, f"not installed: {EXTRA}"
    return f"{name} {importlib.metadata.version(name)}", ""


def on_gpu(layer: str, kernels: Kernels, x: Tensor) -> bool:
    """Whether a layer whose input is `x`, `[B, T, D]`, is to run the GPU's kernels.

    Raises:
        ConfigError: they were asked for and cannot run, or `kernels` is neither choice.
    """
    if kernels == "torch":
        return False
    if kernels != "gpu":
        raise ConfigError(f"{layer}: kernels={kernels!r}; expected 'torch' or 'gpu'.")
    if x.device.type != "cuda":
        raise ConfigError(f"{layer}: kernels='gpu' for tensors on {x.device}; use kernels='torch', or a GPU.")
    if missing := {p.missing for p in gpu_kernels() if p.part.startswith(layer) and p.missing}:
        raise ConfigError(f"{layer}: kernels='gpu': {'; '.join(sorted(missing))}.")
    return True


def fla_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw: Tensor,
    bias: Tensor,
    log_rate: Tensor,
    beta: Tensor,
    memory: Tensor,
    batch: Batch[Tensor],
    *,
    scale: float,
    lower_bound: float | None,
    step: bool,
) -> tuple[Tensor, Tensor]:
    """Unit lengths, decay gate and recurrence in the kernels of fla-core; as `ops.l2_norm`, `kda_gate` and `kda_chunk`.

    Args:
        q, k: `[B, T, H, K]`, of any length along K.
        v: `[B, T, H, V]`.
        raw: `[B, T, H, K]`, before the gate.
        bias: `[H, K]`.
        log_rate: `[H]`.
        beta: `[B, T, H]` in (0, 1).
        memory: `[S, H, V, K]` float32, which the kernels take as it is (V first).
        lower_bound: of the decay, at least -5; None: unbounded.

    Returns:
        `[B, T, H, V]`, zeros past the rows' counts, and the memory with the rows' slots updated.

    Raises:
        ConfigError: a lower bound that the kernels do not take.
    """
    from fla.ops.kda import chunk_kda, fused_recurrent_kda  # pyright: ignore[reportMissingImports]

    if lower_bound is not None and not SAFE <= lower_bound < 0:
        raise ConfigError(f"kda: kernels='gpu' takes a lower bound of the decay from {SAFE:g} to 0, not {lower_bound}.")
    counts, lengths = batch.counts.tolist(), batch.lengths.tolist()
    padding = None
    if min(counts) < q.shape[1]:
        at = torch.arange(q.shape[1], device=q.device)
        padding = at >= batch.counts.to(q.device)[:, None]
        raw, beta = raw.masked_fill(padding[..., None, None], NOTHING), beta.masked_fill(padding[..., None], 0)
    before = None  # of sequences that all start here
    if lengths != counts:
        before = state_rows(memory, batch.slots, batch.lengths, batch.counts)
    how = {"scale": scale, "initial_state": before, "output_final_state": True, "state_v_first": True}
    how |= {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "lower_bound": lower_bound}
    if not step:
        how["safe_gate"] = lower_bound is not None
    run = fused_recurrent_kda if step else chunk_kda
    o, after = run(q, k, v, raw, beta, A_log=at_least_f32(log_rate), dt_bias=at_least_f32(bias).flatten(), **how)
    if padding is not None:
        o = o.masked_fill(padding[..., None, None], 0)
    return o, put_rows(memory, batch.slots, after)
