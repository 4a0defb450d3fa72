"""The journal of a run of `kimi-graph weights`: which parts are done, a line for some of them at a time.

A line is written when the bytes it tells of are on the disk, so that a run which finds it need not look at them again,
whatever ended the run before: Ctrl-C, `kill -9`, or a power failure.
"""

import contextlib
import json
import os
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_graph.errors import BundleError
from kimi_graph.files import from_json

try:
    import fcntl
except ImportError:  # Windows: two runs at once are not noticed there
    fcntl = None

Done = dict[tuple[str, str], str]  # hash of a part, by stem of its file and weight


@dataclass
class Journal:
    """What runs have done; one run at a time holds it."""

    path: Path
    descriptor: int

    @staticmethod
    @contextlib.contextmanager
    def held(path: Path) -> "Iterator[Journal]":
        """Hold the journal, which is made where there is none.

        Raises:
            BundleError: another run does.
        """
        descriptor = -1
        while descriptor < 0:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0), 0o644)
            try:
                if fcntl is not None:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                raise BundleError(f"{path.parent}: another run of kimi-graph weights is writing here.") from None
            if not path.exists() or path.stat().st_ino != os.fstat(descriptor).st_ino:  # removed by a run that ended
                os.close(descriptor)
                descriptor = -1
        try:
            yield Journal(path, descriptor)
        finally:
            os.close(descriptor)

    def start(self, about: Mapping[str, Any]) -> Done:
        """What earlier runs of the same have done; of others nothing, and it is forgotten.

        A last line that was cut off does not count.

        Args:
            about: what is the same; for JSON.
        """
        lines = self.path.read_bytes().split(b"\n")[:-1]
        try:
            first, *rest = map(from_json, lines)
            if first != json.loads(json.dumps(about)):
                raise ValueError("it is of other weights")
            done = {(stem, name): sha for line in rest for stem, name, sha in line}
        except (ValueError, TypeError):
            self.restart(about, {})
            return {}
        os.ftruncate(self.descriptor, sum(len(line) + 1 for line in lines))
        return done

    def restart(self, about: Mapping[str, Any], done: Done) -> None:
        """Forget what is not in `done`."""
        os.ftruncate(self.descriptor, 0)
        self._write(about)
        self.add(done)

    def add(self, done: Done) -> None:
        """Parts that are done, and on the disk."""
        self._write([[stem, name, sha] for (stem, name), sha in done.items()])

    def _write(self, value: Any) -> None:
        os.write(self.descriptor, json.dumps(value).encode() + b"\n")
        os.fsync(self.descriptor)

    def end(self, about: Mapping[str, Any], left: Done) -> None:
        """A run has come to its end; what is `left` is of files that are not finished."""
        if left:
            self.restart(about, left)
        else:
            self.path.unlink()


@dataclass
class Flusher:
    """A thread that brings what was written to the disk, while more is made, and then into the journal."""

    journal: Journal
    todo: "queue.SimpleQueue[tuple[frozenset[Path], Done] | None]" = field(default_factory=queue.SimpleQueue)
    failed: list[OSError] = field(default_factory=list)

    def __enter__(self) -> "Flusher":
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.todo.put(None)
        self._thread.join()
        if kind is None:
            self.check()

    def add(self, paths: Iterable[Path], done: Done) -> None:
        """Files that hold some more parts.

        Raises:
            OSError: the disk did not take what came before.
        """
        self.check()
        self.todo.put((frozenset(paths), done))

    def check(self) -> None:
        """Raises OSError where the disk did not take something."""
        if self.failed:
            raise self.failed[0]

    def _run(self) -> None:
        going = True
        while going:
            items = [self.todo.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    items.append(self.todo.get_nowait())
            going = None not in items
            found = [item for item in items if item is not None]
            try:
                if found and not self.failed:
                    for path in frozenset().union(*(paths for paths, _ in found)):
                        flush(path)
                    self.journal.add({key: sha for _, done in found for key, sha in done.items()})
            except OSError as error:
                self.failed.append(error)


def flush(path: Path) -> None:
    """Bring a file's bytes to the disk; its pages are free for what is written next.

    Nobody reads them soon, and a system that has to find pages for terabytes takes longer for each than to copy it.
    """
    with path.open("rb+") as f:
        getattr(os, "fdatasync", os.fsync)(f.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
