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


def tokenizer_mode(mode: str, made_by: type) -> None:
    """Make a class that of a `--tokenizer-mode`, whose chats are written by the template that it has."""
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry

    if mode not in TokenizerRegistry.tokenizers:  # registering twice is a warning
        TokenizerRegistry.register(mode, made_by.__module__, made_by.__name__)
        RENDERER_REGISTRY.register(mode, "vllm.renderers.hf", "HfRenderer")


def size_pages_by(row: int, model_config: Any) -> None:
    """Have the engine make pages as large as memories by rows of so many numbers. 0.32 asks the backend for them
    (`customize_spec`), 0.27 takes keys and values of one head of the model's config."""
    from vllm.v1.attention.backend import AttentionBackend

    if not hasattr(AttentionBackend, "customize_spec"):
        model_config.model_arch_config.head_size = row // 2


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

    names = ("num_blocks", "kv_bytes_per_block") if _old_tiers() else ("num_chunks", "kv_bytes_per_chunk")
    sizes = dict(zip(names, (getattr(spec, names[0]), spec.kv_bytes_per_chunk), strict=True))
    rank = 0 if spec.replicated_layout else spec.config.parallel.rank
    own = {"engine_id": spec.config.engine_id, "rank": rank, "cpu_page_size": spec.cpu_page_size_per_worker}
    return SharedOffloadRegion(**own, **sizes)


def part_of(region: Any, size: int) -> Tensor:
    """Room for the pages of the rank's next tensor, `[chunks, size]`."""
    return region.create_next_view(size) if _old_tiers() else region.create_next_worker_view(size)


def name_tier(kind: str, module: str) -> None:
    """Have a tier found that is not the engine's own: 0.32 imports what the configuration names, 0.27 has a list."""
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    if _old_tiers() and kind not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(kind, module, kind)


@functools.cache
def file_tier() -> Any:
    """The engine's file tier."""
    from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

    return _file_tier_of_27(FileSystemTierManager) if _old_tiers() else FileSystemTierManager


def _old_tiers() -> bool:
    """Whether they are those of 0.27."""
    from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager

    return not hasattr(AsyncLookupManager, "mark_miss")


def _file_tier_of_27(base: Any) -> Any:
    """0.27's, with what 0.32's has more: a seed of hashes that is the same in each process, and an end to asking for
    pages that were found and could not be read (vLLM issue 49176: there it is without end).
    """

    class FileTier(base):
        def __init__(self, *args: Any, module_path: str, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            os.environ.setdefault("PYTHONHASHSEED", "0")  # read after the scheduler's tiers are made
            self._load_job_keys: dict[int, list[Any]] = {}
            self._job_block_counts: dict[int, int] = {}  # these two are of counting, which it does not
            self._load_progress: dict[int, int] = {}

        def submit_load(self, job_metadata: Any) -> None:
            self._load_job_keys[job_metadata.job_id] = list(job_metadata.keys)
            super().submit_load(job_metadata)

        def get_finished_jobs(self) -> Iterable[Any]:
            done = list(super().get_finished_jobs())
            for job in done:
                self._job_block_counts.pop(job.job_id, None)
                self._load_progress.pop(job.job_id, None)
                keys = self._load_job_keys.pop(job.job_id, [])
                for state in map(self._lookup_manager._lookup_state.get, () if job.success else keys):
                    if state is not None:
                        state.result = False
            return done

    return FileTier
