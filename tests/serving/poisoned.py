"""Caches of the engine in this process that hold NaN wherever nothing was written, fresh pages and used ones alike."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor


class Poison:
    """Until the test ends, what the engine allocates is NaN in every byte, and so is each block that it hands out
    again. The engine's own zeros in fresh pages are left out: 0.27.1 and vllm-ascend need not have them.

    Attributes:
        used: how many blocks were handed out that somebody had written before.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        self.used = 0
        self.views: list[Tensor] = []  # [blocks, ..], of every layer
        allocate, hand_out = GPUModelRunner.initialize_kv_cache_tensors, BlockPool.get_new_blocks

        def allocated(runner: Any, config: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            caches = allocate(runner, config, *args, **kwargs)
            parts = [part for cache in caches.values() for part in ([cache] if torch.is_tensor(cache) else cache)]
            self.views = [part.unflatten(0, (config.num_blocks, -1)) for part in parts]
            for view in self.views:
                view.fill_(nothing(view))
            return caches

        def handed_out(pool: Any, count: int) -> Any:
            blocks = hand_out(pool, count)
            self.fill(block.block_id for block in blocks)
            return blocks

        monkeypatch.setattr(GPUModelRunner, "initialize_kv_cache_tensors", allocated)
        monkeypatch.setattr(BlockPool, "get_new_blocks", handed_out)
        monkeypatch.setattr(CPUModelRunner, "_zero_block_ids", lambda runner, blocks: None)

    def fill(self, blocks: Iterable[int]) -> None:
        """Blocks that nobody has any more."""
        for block in blocks:
            self.used += any(not is_nothing(view[block]) for view in self.views)
            for view in self.views:
                view[block] = nothing(view)


def nothing(view: Tensor) -> float:
    """NaN, which all bytes that are -1 are in every dtype of a cache."""
    return torch.nan if view.is_floating_point() else -1


def is_nothing(block: Tensor) -> bool:
    return bool((block.isnan() if block.is_floating_point() else block == -1).all())
