# pyright: reportMissingImports=false
"""The engine's file tier, with a bound on what it fills, fewer bits if asked, and nothing lost when the server ends."""

import functools
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, get_offload_group_idx
from vllm.v1.kv_offload.tiering.fs.io import batch_load_block, batch_store_block

from kimi_graph.config import MlaConfig
from kimi_graph.read_config import load_config
from kimi_graph.serving import compat
from kimi_graph.serving.hf_config import cached_row

from .precision import Layout, bytes_of, layout_of


class Files(compat.file_tier()):
    """Pages as files, found again by a server that is started later.

    Attributes:
        most: bytes that they may fill, None without a bound.
        sizes: of the files that are there, least recently used first.
        layouts: of the groups of layers that are kept in fewer bits.
    """

    def __init__(self, *args: Any, most: int | None = None, low: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.most = most
        self.layouts = {} if low is None else layouts_of(self._offloading_spec, low)
        self.chunks = bytes_of(self._primary_kv_view)
        folder = Path(f"{self.file_mapper.base_path}_r{self.file_mapper.rank}")
        found = [(path.stat(), path) for path in folder.rglob("*.bin")] if most is not None else []
        found.sort(key=lambda f: f[0].st_mtime)
        self.sizes = OrderedDict((str(path), stat.st_size) for stat, path in found)
        self.total = sum(self.sizes.values())
        self.jobs: dict[int, list[str]] = {}

    def submit_store(self, job_metadata: Any) -> None:
        """Write the pages of a job in a thread of its own."""
        self._note(job_metadata)
        if not self.layouts:
            return super().submit_store(job_metadata)
        self._job_block_counts[job_metadata.job_id] = len(job_metadata.keys)
        task = functools.partial(self._store, list(job_metadata.keys), compat.chunks_of(job_metadata))
        self._pool.enqueue_store(job_metadata.job_id, 1, [task])

    def submit_load(self, job_metadata: Any) -> None:
        """Read the pages of a job in a thread of its own."""
        self._note(job_metadata)
        if not self.layouts:
            return super().submit_load(job_metadata)
        keys = list(job_metadata.keys)
        self._load_job_keys[job_metadata.job_id] = keys
        self._job_block_counts[job_metadata.job_id] = len(keys)
        task = functools.partial(self._load, job_metadata.job_id, keys, compat.chunks_of(job_metadata))
        self._pool.enqueue_load(job_metadata.job_id, 1, [task])

    def get_finished_jobs(self) -> Iterable[Any]:
        """The jobs that have ended since it was asked before."""
        done = list(super().get_finished_jobs())
        for job in done:
            self._used(self.jobs.pop(job.job_id, []))
        return done

    def shutdown(self) -> None:
        """Write what is still to be written, and end."""
        self.drain_jobs()
        super().shutdown()

    def _store(self, keys: Sequence[OffloadKey], chunks: Sequence[int]) -> None:
        for key, chunk in zip(keys, chunks, strict=True):
            layout, path = self.layouts.get(get_offload_group_idx(key)), self.file_mapper.get_file_name(key)
            if layout is None:
                batch_store_block([path], self._primary_kv_view, [chunk * self._block_size], self._block_size, False)
            else:
                coded = layout.coded(self.chunks[chunk])
                batch_store_block([path], _view(coded), [0], layout.size, False)

    def _load(self, job: int, keys: Sequence[OffloadKey], chunks: Sequence[int]) -> None:
        for done, (key, chunk) in enumerate(zip(keys, chunks, strict=True)):
            layout, path = self.layouts.get(get_offload_group_idx(key)), self.file_mapper.get_file_name(key)
            try:
                if layout is None:
                    batch_load_block([path], self._primary_kv_view, [chunk * self._block_size], self._block_size, False)
                else:
                    coded = torch.empty(layout.size, dtype=torch.uint8)
                    batch_load_block([path], _view(coded), [0], layout.size, False)
                    layout.decode(coded, self.chunks[chunk])
            except OSError:
                self._load_progress[job] = done  # the ones before it are kept
                raise

    def _note(self, job: Any) -> None:
        if self.most is not None:
            self.jobs[job.job_id] = [self.file_mapper.get_file_name(key) for key in job.keys]

    def _used(self, paths: list[str]) -> None:
        """These were written or read; the least recently used go until the rest is within the bound."""
        for path in paths:
            size = _touched(path)
            self.total += size - self.sizes.pop(path, 0)
            if size:
                self.sizes[path] = size
        while self.most is not None and self.total > self.most and self.sizes:
            path, size = self.sizes.popitem(last=False)
            self.total -= size
            Path(path).unlink(missing_ok=True)  # what is being read is read to its end


def _touched(path: str) -> int:
    """Bytes of a file, which was used now; 0 where it is gone."""
    try:
        os.utime(path)
        return Path(path).stat().st_size
    except FileNotFoundError:
        return 0


def _view(x: Tensor) -> memoryview:
    return x.numpy().data


def layouts_of(spec: OffloadingSpec, code: str) -> dict[int, Layout]:
    """Where rows lie in the chunks of each group of attention layers alone; others are kept as they are."""
    config, model = spec.config, load_config(Path(spec.config.model.name))
    return layout_of(
        {i: (group.layer_names, group.tokens_per_block) for i, group in compat.tier_groups(config).items()},
        [i for i, layer in enumerate(model.layers) if isinstance(layer.mixer, MlaConfig)],
        cached_row(model),
        bytes_of_rank=config.worker_kv_bytes_per_block,
        ranks=1 if spec.replicated_layout else config.parallel.world_size,
        dtype=getattr(torch, config.model.dtype),
        code=code,
    )
