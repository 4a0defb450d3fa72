"""`kimi-graph weights --verify`: reads weights that were made ahead, and says which are not what the index says.

It reads every byte, and so it also sees numbers that no weight may have: NaN and infinity, which come from a checkpoint
and are not damage.
"""

import hashlib
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kimi_graph.errors import BundleError
from kimi_graph.files import read_into
from kimi_graph.finite import count_not_finite
from kimi_graph.progress import Notify, silent

from .ge_proto import Dtype
from .written import changed

READ = 1 << 24  # bytes that are read at once
DTYPES = {dtype.text: dtype.shared for dtype in Dtype}


@dataclass
class Reading:
    """What was found.

    Attributes:
        bytes: that were read.
        damaged: files of which a weight is not what the index says, each with the first such weight in words.
        not_finite: by file and weight: how many numbers are NaN or infinite.
    """

    bytes: int = 0
    damaged: dict[str, str] = field(default_factory=dict)
    not_finite: dict[tuple[str, str], int] = field(default_factory=dict)

    def check(self) -> None:
        """Whether all is as the index says.

        Raises:
            BundleError: something is not: the first weight, and how to make its file anew.
        """
        if self.damaged:
            first = self.damaged[min(self.damaged)]
            more = f" {len(self.damaged) - 1:,} more files are damaged." if len(self.damaged) > 1 else ""
            raise BundleError(first + more)


def read_again(
    folder: Path, files: Mapping[str, Mapping[str, Any]], jobs: int = 2, progress: Notify = silent
) -> Reading:
    """Read weights of some files.

    Args:
        files: entries of the index, by name.
        jobs: weights that are read at a time.
    """
    found, stop = Reading(), threading.Event()
    parts = [(file, name, w) for file, entry in files.items() for name, w in entry["weights"].items()]
    total = sum(w["bytes"] for _, _, w in parts)
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        futures = {pool.submit(_read, folder / file, w, stop): (file, name, w) for file, name, w in parts}
        try:
            for future in as_completed(futures):
                file, name, w = futures[future]
                sha256, bad = future.result()
                if sha256 != w["sha256"]:
                    found.damaged.setdefault(file, changed(folder / file, name, sha256, w["sha256"]))
                elif bad:
                    found.not_finite[file, name] = bad
                found.bytes += w["bytes"]
                progress("read again", found.bytes, total)
        finally:  # after Ctrl-C too
            stop.set()
            pool.shutdown(cancel_futures=True)
    return found


def _read(path: Path, w: Mapping[str, Any], stop: threading.Event) -> tuple[str, int]:
    """SHA-256 of a weight, and how many of its numbers are NaN or infinite."""
    digest, bad, size = hashlib.sha256(), 0, w["bytes"]
    buffer = torch.empty(min(size, READ), dtype=torch.uint8)
    for at in range(0, size, READ):
        part = buffer[: min(READ, size - at)]
        if stop.is_set() or read_into(path, w["offset"] + at, part.numpy().data):
            return "nothing", 0
        digest.update(part.numpy().data)
        bad += count_not_finite(part, DTYPES.get(w["dtype"]))
    return digest.hexdigest(), bad
