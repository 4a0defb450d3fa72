# pyright: reportMissingImports=false
"""Pages to and from the node's shared memory, by plain copies: the engine's own copies are for GPUs alone.

On a device with copies of its own the engine's, or its plugin's, are used.
"""

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_world_group
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kimi_graph.serving import compat
from kimi_graph.serving.warden import SHARED

compat.name_tier("Files", f"{__package__}.files")


class HostCopies(OffloadingWorker):
    """Copies in a thread of their own, in the order of jobs, while the engine computes."""

    def __init__(self, caches: CanonicalKVCaches, region: Any) -> None:
        self.caches, self.region = caches, region
        self.pages = [t.tensor for t in caches.tensors]
        self.kept = [compat.part_of(region, t.page_size_bytes) for t in caches.tensors]
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="host_copies")
        self.jobs: dict[int, Future[TransferResult]] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self.jobs[job_id] = self.thread.submit(self._copy, job_id, src_spec, dst_spec, store=True)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self.jobs[job_id] = self.thread.submit(self._copy, job_id, dst_spec, src_spec, store=False)
        return True

    def get_finished(self) -> list[TransferResult]:
        done = [job for job, future in self.jobs.items() if future.done()]
        return [self.jobs.pop(job).result() for job in done]

    def wait(self, job_ids: set[int]) -> None:
        for job in job_ids & self.jobs.keys():
            self.jobs[job].result()

    def shutdown(self) -> None:
        self.thread.shutdown()
        self.pages = self.kept = []
        self.region.cleanup()

    def _copy(self, job: int, pages: Any, chunks: Any, *, store: bool) -> TransferResult:
        begun, size = time.monotonic(), 0
        for page, chunk in self._pairs(pages, chunks):
            (chunk if store else page).copy_(page if store else chunk)
            size += page.numel()
        return TransferResult(job, True, size, time.monotonic() - begun)

    def _pairs(self, pages: Any, chunks: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes of a page in the engine's cache and where shared memory keeps them, layer by layer."""
        groups = pages.block_ids.tolist(), chunks.block_ids.tolist()
        start = 0
        for refs, size in zip(self.caches.group_data_refs, pages.group_sizes, strict=True):
            own = [ids[start : start + size] for ids in groups]
            start += size
            for ref in refs:
                page, kept = self.pages[ref.tensor_idx], self.kept[ref.tensor_idx]
                for at, to in zip(*own, strict=True):
                    yield page[at, : ref.page_size_bytes], kept[to, : ref.page_size_bytes]


def check_places(caches: CanonicalKVCaches) -> None:
    """What `precision.layout_of` takes for granted of a chunk, told by the engine's own tensors."""
    assert len({t.page_size_bytes for t in caches.tensors}) == 1, "pages of several sizes"
    for refs in caches.group_data_refs:
        assert [ref.tensor_idx for ref in refs] == list(range(len(refs))), "layers lie in another order"


def agreed(config: Any) -> Path:
    """Where the ranks of an engine leave the bytes of a page on that which has the most layers, for its scheduler."""
    return SHARED / f"kimi_graph_{config.engine_id}.bytes"


def agree(config: Any) -> int:
    """Bytes that all ranks have room for in a chunk of shared memory; every rank asks.

    Stages may differ in the layers of a group. vLLM takes for granted that they do not: each rank would lay out the
    same memory in its own way, and write over another's pages.
    """
    group, own = get_world_group(), config.worker_kv_bytes_per_block
    sizes = [own] * group.world_size
    torch.distributed.all_gather_object(sizes, own, group=group.cpu_group)
    if group.rank_in_group == 0:
        agreed(config).write_text(str(max(sizes)))
    return max(sizes)


class HostTiers(TieringOffloadingSpec):
    """The engine's tiers, with copies that a CPU can make, and stages that have not the same number of layers."""

    def _fit(self, size: int) -> None:
        """Sizes of the memory anew, for pages of so many bytes of a rank."""
        if size != self.config.worker_kv_bytes_per_block:
            super().__init__(dataclasses.replace(self.config, worker_kv_bytes_per_block=size))

    def get_manager(self) -> OffloadingManager:
        """In the scheduler, which is made when the ranks have their caches."""
        if self._manager is None and self.config.parallel.pp_size > 1:
            note = agreed(self.config)
            self._fit(int(note.read_text()))
            note.unlink()
        return super().get_manager()

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        check_places(kv_caches)
        if self._worker is None and self.config.parallel.pp_size > 1:
            self._fit(agree(self.config))
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self._worker is None:
            assert self.blocks_per_chunk == 1, "a page is kept by itself"
            self._worker = HostCopies(kv_caches, compat.region_of(self))
        return self._worker
