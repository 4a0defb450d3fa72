# pyright: reportMissingImports=false
"""The engine's file tier, with a bound on what it fills, and nothing lost when the server ends."""

import os
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager


class Files(FileSystemTierManager):
    """Pages as files, found again by a server that is started later.

    Attributes:
        sizes: of the files that are there, least recently used first.
    """

    def __init__(self, *args: Any, most: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.most = most
        folder = Path(f"{self.file_mapper.base_path}_r{self.file_mapper.rank}")
        found = [(path.stat(), path) for path in folder.rglob("*.bin")] if most is not None else []
        found.sort(key=lambda f: f[0].st_mtime)
        self.sizes = OrderedDict((str(path), stat.st_size) for stat, path in found)
        self.total = sum(self.sizes.values())
        self.jobs: dict[int, list[str]] = {}

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._note(job_metadata)
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._note(job_metadata)
        super().submit_load(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        done = list(super().get_finished_jobs())
        for job in done:
            self._used(self.jobs.pop(job.job_id, []))
        return done

    def shutdown(self) -> None:
        self.drain_jobs()
        super().shutdown()

    def _note(self, job: TransferJob) -> None:
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
