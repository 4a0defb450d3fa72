# pyright: reportMissingImports=false
"""What differs between the releases of vLLM that the adapter runs on. Everything else of them is imported plainly.

0.32: run on its CPU build. 0.27.1: what vllm-ascend is made for.
"""

import functools
import os
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.forward_context import get_forward_context


def step_metadata() -> dict[str, Any] | None:
    """What the engine says of a step, by the name of a cache; None in a run that only measures memory."""
    found = get_forward_context().attn_metadata
    return found[0] if isinstance(found, list) else found


def pages_of(cache: Tensor) -> Tensor:
    """A paged cache as `[pages, page, width]`: 0.32 gives it with a dimension of its one head, 0.27 as it was asked."""
    if cache.ndim == 4:
        (head,) = (d for d in (1, 2) if cache.shape[d] == 1)
        return cache.squeeze(head)
    assert cache.ndim == 3, cache.shape
    return cache


class PicturesAlone:
    """A multimodal processor's step of 0.27: pictures without a text go to the parts of a processor that transformers
    names, of which ours has none. The processor itself takes them, as it is asked to in 0.32.
    """

    info: Any
    _get_hf_mm_data: Any

    def _apply_hf_processor_mm_only(self, mm_items: Any, hf_processor_mm_kwargs: Any, tokenization_kwargs: Any) -> Any:
        given = {kind for kind, count in mm_items.get_all_counts().items() if count}
        data, passed = self._get_hf_mm_data(mm_items.select(given))
        made = self.info.ctx.call_hf_processor(self.info.get_hf_processor(), data, dict(hf_processor_mm_kwargs))
        made.update(passed)
        return made


def model_types(registered: type, names: tuple[str, ...]) -> None:
    """Make a config class that of some `model_type`s, before those that the engine or transformers have for them."""
    from transformers import AutoConfig
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    for name in names:
        registered.model_type = name  # transformers compares the two
        AutoConfig.register(name, registered, exist_ok=True)
        _CONFIG_REGISTRY[name] = registered


def when_configured(hook: type, architectures: tuple[str, ...]) -> None:
    """Have a class of hooks called when the engine makes the config of a model of some architectures."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    MODELS_CONFIG_MAP.update(dict.fromkeys(architectures, hook))


# ---- tiers: 0.27 calls a block what is a chunk in 0.32 ----


def tier_groups(config: Any) -> dict[int, Any]:
    """Groups of layers of an offloading config, by the number in a page's key. In 0.27 that is their place."""
    return {getattr(group, "group_id", place): group for place, group in enumerate(config.groups)}


def chunks_of(job: Any) -> list[int]:
    """Chunks of shared memory that a tier's job moves."""
    return (job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids).tolist()


def region_of(spec: Any) -> Any:
    """The shared memory of a tiering spec, opened by one of its ranks."""
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    if hasattr(spec, "num_chunks"):
        sizes = {"num_chunks": spec.num_chunks, "kv_bytes_per_chunk": spec.kv_bytes_per_chunk}
    else:
        sizes = {"num_blocks": spec.num_blocks, "kv_bytes_per_block": spec.kv_bytes_per_chunk}
    rank = 0 if spec.replicated_layout else spec.config.parallel.rank
    own = {"engine_id": spec.config.engine_id, "rank": rank, "cpu_page_size": spec.cpu_page_size_per_worker}
    return SharedOffloadRegion(**own, **sizes)


def part_of(region: Any, size: int) -> Tensor:
    """Room for the pages of the rank's next tensor, `[chunks, size]`."""
    return (region.create_next_worker_view if hasattr(region, "create_next_worker_view") else region.create_next_view)(
        size
    )


@functools.cache
def file_tier() -> Any:
    """The engine's file tier."""
    from vllm.v1.kv_offload.tiering.fs.manager import AsyncLookupManager, FileSystemTierManager

    return (
        FileSystemTierManager if hasattr(AsyncLookupManager, "mark_miss") else _file_tier_of_27(FileSystemTierManager)
    )


def _file_tier_of_27(base: Any) -> Any:
    """0.27's, with what 0.32's has more: a seed of hashes that is the same in each process, an end to asking for pages
    that were found and could not be read (vLLM issue 49176: there it is without end), and a count of what was read.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.kv_offload.base import OffloadingCounterMetadata

    counter = "vllm:kv_offload_tiering_read_bytes"

    class FileTier(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            os.environ.setdefault("PYTHONHASHSEED", "0")  # read when the scheduler is there
            self._load_job_keys: dict[int, list[Any]] = {}
            self._job_block_counts: dict[int, int] = {}
            self._load_progress: dict[int, int] = {}
            self._read = 0

        @classmethod
        def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
            words = "Total bytes read from secondary tiers into the primary tier, labeled by tier."
            return {counter: OffloadingCounterMetadata(words, ("tier",))}

        def get_stats(self) -> Any:
            stats, read, self._read = OffloadingConnectorStats(), self._read, 0
            if read:
                stats.increase_counter(counter, read, (self.tier_type,))
            return stats

        def submit_load(self, job_metadata: Any) -> None:
            self._load_job_keys[job_metadata.job_id] = list(job_metadata.keys)
            super().submit_load(job_metadata)

        def get_finished_jobs(self) -> Iterable[Any]:
            done = list(super().get_finished_jobs())
            for job in done:
                self._job_block_counts.pop(job.job_id, None)
                self._load_progress.pop(job.job_id, None)
                keys = self._load_job_keys.pop(job.job_id, [])
                if job.success:
                    self._read += len(keys) * self._block_size
                    continue
                for key in keys:
                    if key in self._lookup_manager._lookup_state:
                        self._lookup_manager._lookup_state[key].result = False
            return done

    return FileTier
