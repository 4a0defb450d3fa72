"""vllm-ascend's caches on the CPU: what its runner does with the specs of layers, in the engine of this process.

Written from its source (see `kimi_graph.serving.ascend`): the rule by which blocks are made as large as a memory, one
buffer for layers of several kinds, keys and values as two tensors, caches bound without asking the layer.
"""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

KERNEL = 128


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, the engine's runner in this process allocates and binds as vllm-ascend's does."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from kimi_graph.serving import ascend

    asked = GPUModelRunner.get_kv_cache_spec
    monkeypatch.setattr(ascend, "here", lambda: True)
    monkeypatch.setattr(CpuPlatform, "_align_hybrid_block_size", classmethod(aligned))
    monkeypatch.setattr(GPUModelRunner, "get_kv_cache_spec", lambda runner: padded(asked(runner)))
    monkeypatch.setattr(GPUModelRunner, "initialize_kv_cache_tensors", bound)


def aligned(platform: Any, vllm_config: Any, backend: Any) -> None:
    """Blocks of so many tokens that their keys are as many bytes as a memory."""
    from vllm.model_executor.models import ModelRegistry

    model, cache = vllm_config.model_config, vllm_config.cache_config
    made, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    shapes, dtypes = (
        ask(vllm_config) for ask in (made.get_mamba_state_shape_from_config, made.get_mamba_state_dtype_from_config)
    )
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    key = model.get_head_size() * model.dtype.itemsize
    tokens = KERNEL * -(-max(sizes) // (KERNEL * key))
    assert key * tokens == max(sizes), "Cannot align ssm_page_size and attn_page_size."
    cache.block_size = max(cache.block_size or 0, tokens)
    cache.mamba_page_size_padded = 2 * key * cache.block_size + min(sizes)
    cache.mamba_block_size = cache.block_size if cache.enable_prefix_caching else model.max_model_len


def padded(specs: dict[str, Any]) -> dict[str, Any]:
    """Pages of attention layers as large as those of the others."""
    from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec

    page = max((s.page_size_bytes for s in specs.values() if isinstance(s, MambaSpec)), default=0)
    for spec in specs.values():
        if isinstance(spec, AttentionSpec) and spec.page_size_bytes < page:
            object.__setattr__(spec, "page_size_padded", page)
    return specs


def bound(runner: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Allocate and bind: the n-th layers of all groups have one buffer."""
    from vllm.v1.kv_cache_interface import MambaSpec

    groups, blocks = kv_cache_config.kv_cache_groups, kv_cache_config.num_blocks
    mixed = any(isinstance(g.kv_cache_spec, MambaSpec) for g in groups)
    caches: dict[str, Any] = {}
    for n in range(max(len(g.layer_names) for g in groups)):
        buffer = torch.zeros(blocks * groups[0].kv_cache_spec.page_size_bytes if mixed else 0, dtype=torch.int8)
        for group in groups:
            for name in group.layer_names[n : n + 1]:
                spec = group.kv_cache_spec
                if isinstance(spec, MambaSpec):
                    caches[name] = states(buffer, spec.shapes, spec.dtypes, blocks)
                else:
                    widths = spec.head_size, spec.head_size_v
                    caches[name] = halves(buffer if mixed else None, widths, spec.dtype, blocks * spec.block_size)
    for name, cache in caches.items():
        runner.compilation_config.static_forward_context[name].kv_cache = cache
        runner.kv_caches.append(cache)
    return caches


def states(buffer: Tensor, shapes: Sequence[Any], dtypes: Sequence[torch.dtype], blocks: int) -> list[Tensor]:
    """One state of all blocks after another, from the start of the buffer."""
    found, at = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        end = at + blocks * math.prod(shape) * dtype.itemsize
        found.append(buffer[at:end].view(dtype).view(blocks, *shape))
        at = end
    return found


def halves(buffer: Tensor | None, widths: Sequence[int], dtype: torch.dtype, tokens: int) -> tuple[Tensor, ...]:
    """Keys and values of so many tokens: the end of a buffer, or tensors of their own."""
    sizes = [tokens * width * dtype.itemsize for width in widths]
    if buffer is None:
        parts = [torch.zeros(size, dtype=torch.int8) for size in sizes]
    else:
        assert len(set(sizes)) == 1, "keys and values of unequal width in a shared buffer"
        parts = list(buffer[buffer.numel() - sum(sizes) :].split(sizes))
    return tuple(p.view(dtype).view(-1, KERNEL, 1, width) for p, width in zip(parts, widths, strict=True))
