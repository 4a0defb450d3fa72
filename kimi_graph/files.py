"""Folders and files that are whole or not there: written under a temporary name beside their place, then renamed.

Where something is replaced, the two are exchanged in one step (Linux), so that a process killed at any moment leaves
the old folder or the new one. Elsewhere the old one is moved away first; killed between the two, it lies beside its
place, and the next one to write there puts it back.
"""

import contextlib
import ctypes
import errno
import fnmatch
import glob
import hashlib
import json
import os
import secrets
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import KimiGraphError

if sys.platform != "win32":
    import fcntl

TRIES = 100  # renames that others may be faster at
FETCHED = 8 << 20  # bytes that are asked for at once


def check_writable(path: Path) -> None:
    """Whether a new file or folder can be made at `path`, asked before there is work that would be lost.

    Raises:
        KimiGraphError: a file is where a folder would have to be, or somebody else's folder, or the name is too long.
    """
    work = path.absolute().parent / f".{path.absolute().name}.{'0' * 8}.part"  # the longest name it has for a while
    for at in (work, *work.parents):
        try:
            found = at.stat()
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                continue
            raise KimiGraphError(f"{path}: {error.strerror}; choose another place.") from None
        if not stat.S_ISDIR(found.st_mode):
            raise KimiGraphError(f"{path}: {at} is a file, not a folder; choose another place.")
        if not os.access(at, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            why = errno.EROFS if hasattr(os, "statvfs") and os.statvfs(at).f_flag & os.ST_RDONLY else errno.EACCES
            raise KimiGraphError(f"{path}: {at} cannot be written to ({os.strerror(why)}); choose another place.")
        return


@dataclass(frozen=True)
class Standing:
    """What was in a folder when work on a new one began, known by one of its files: somebody else may be faster."""

    folder: Path
    mark: str
    sha256: str | None

    @staticmethod
    def of(folder: Path, mark: str) -> "Standing":
        """Args:
        mark: name of the file that is in every such folder, and another one where anything in it is another.
        """
        return Standing(folder, mark, _hash(folder / mark))

    def check(self, made: Path) -> None:
        """Whether nobody has put another one there meanwhile than the one in `made`.

        Raises:
            KimiGraphError: somebody has.
        """
        now = _hash(self.folder / self.mark)
        if now not in (None, self.sha256, _hash(made / self.mark)):
            raise KimiGraphError(
                f"{self.folder}: another process has written something else there while this one worked, and it is "
                "kept; run this one again to replace it, or choose another folder."
            )


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def _hash(path: Path) -> str | None:
    return file_hash(path) if path.is_file() else None


@contextlib.contextmanager
def new_folder(
    folder: str | Path, may_replace: Callable[[], object] = lambda: None, standing: Standing | None = None
) -> Iterator[Path]:
    """Yield an empty folder to write to; at the end it becomes `folder`, after an error it is gone.

    What is at `folder` is replaced. What killed processes left of such writing is taken away first.

    Args:
        may_replace: raises where `folder` must not be replaced. Asked again at the end: somebody else may have been
            faster.
        standing: what may be replaced, of things that anybody may replace.

    Raises:
        KimiGraphError: it is not `standing` any more.
        OSError: it cannot be written; the name is that of the file in `folder`.
    """
    folder = Path(folder).absolute()
    may_replace()
    with _named(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _turn(folder.parent):
            _sweep(folder)
        work, lock = _held_folder(folder)
        try:
            yield work
            with _turn(folder.parent):
                left = _put(work, folder, lambda: (may_replace(), standing and standing.check(work)))
            _delete(left)
        finally:
            _delete(work)
            if lock is not None:
                os.close(lock)


@contextlib.contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Errors of the system inside name what is or was to be in `folder`, or all of it where they name nothing."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        name = error.filename if isinstance(error.filename, (str, bytes)) else folder
        raise OSError(error.errno, error.strerror, str(_place_of(Path(os.fsdecode(name)), folder))) from error


def _place_of(path: Path, folder: Path) -> Path:
    """Where a file that is written beside `folder` was to be; any other path as it is."""
    depth = len(folder.parts) - 1
    beside = path.parts[:depth] == folder.parts[:depth] and len(path.parts) > depth
    hidden = beside and any(fnmatch.fnmatchcase(path.parts[depth], pattern) for pattern in _patterns(folder))
    return folder.joinpath(*path.parts[depth + 1 :]) if hidden else path


def _patterns(folder: Path) -> tuple[str, str]:
    """Of the names that what is written beside `folder`, and what was there, have for a while."""
    name = f".{glob.escape(folder.name)}.????????"
    return f"{name}.part", f"{name}.old"


def _put(work: Path, folder: Path, may_replace: Callable[[], object]) -> Path:
    """Make `work` be `folder`; returns where what was there is now, if anything was."""
    for tried in range(TRIES):
        there = os.path.lexists(folder)
        may_replace()
        try:
            if not there:
                work.rename(folder)  # fails where another process has put something there
                return work
            return work if _exchange(work, folder) else _replace(work, folder)
        except OSError as error:
            faster = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR)
            if not faster or tried + 1 == TRIES:
                raise
    raise AssertionError("unreachable")


def _replace(work: Path, folder: Path) -> Path:
    """Where two folders cannot be exchanged in one step."""
    old = work.with_suffix(".old")
    folder.rename(old)
    try:
        work.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    return old


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where the system has no way to."""
    if sys.platform != "linux":
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    at, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2(at, os.fsencode(one), at, os.fsencode(other), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _delete(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


# ---- what killed processes left --------------------------------------------------------------------------------------


def _held_folder(folder: Path) -> tuple[Path, int | None]:
    """A new folder beside `folder`, locked for as long as this process lives."""
    while True:
        work = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.part"
        work.mkdir()
        lock = _lock(work, wait=True)
        if work.exists():
            return work, lock
        if lock is not None:  # another process took it for one that a killed process had left
            os.close(lock)


@contextlib.contextmanager
def _turn(parent: Path) -> Iterator[None]:
    """One writer at a time renames in a folder: two renames would meet another's in between.

    A folder that is itself being written has one writer, who holds it.
    """
    lock = None if fnmatch.fnmatchcase(parent.name, ".*.????????.part") else _lock(parent, wait=True)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _lock(path: Path, *, wait: bool = False) -> int | None:
    """A lock that goes with the process; None where another process has it, or there are none."""
    if sys.platform == "win32":
        return None
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(handle)
        return None
    return handle


def _sweep(folder: Path) -> None:
    """Take away what killed processes left beside `folder`, and put back what they had moved away."""
    left = [path for pattern in _patterns(folder) for path in folder.parent.glob(pattern)]
    for path in left:
        if (lock := _lock(path)) is not None:
            try:
                if path.suffix == ".old" and not os.path.lexists(folder):
                    path.rename(folder)
                else:
                    _delete(path)
            finally:
                os.close(lock)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file that is the old one or the new one at any moment, and after a power failure.

    For folders of our own: `PATH.part` is ours there, and what a killed process left of it is replaced.
    """
    work = path.with_name(f"{path.name}.part")
    work.unlink(missing_ok=True)  # also where it is a link
    _write(work, data)
    work.replace(path)


def write_file(path: Path, data: bytes) -> None:
    """The same in a folder that is not ours alone: no other file there is touched, and after an error none is left.

    Raises:
        OSError: it cannot be written; the name is that of `path`.
    """
    work = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    with _named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write(work, data)
            work.replace(path)
        finally:
            work.unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    """A new file whose bytes are on the disk."""
    with path.open("xb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def from_json(text: str | bytes, **hooks: Any) -> Any:
    """The value of a JSON text that anybody may have written; `hooks`: of `json.loads`.

    Raises:
        ValueError: it is none, or none that Python can hold; a `JSONDecodeError` knows where.
    """
    try:
        return json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("its brackets are nested thousands deep") from None
    except ValueError as error:
        if type(error) is ValueError and "int_max_str_digits" in str(error):
            raise ValueError("a number in it has thousands of digits") from None
        raise


def read_into(path: Path, at: int, buffer: memoryview) -> int:
    """Fill a buffer with the bytes of a file from byte `at` on; returns how many are missing."""
    with path.open("rb", buffering=0) as f:
        f.seek(at)
        while buffer and (got := f.readinto(buffer)):
            buffer = buffer[got:]
    return len(buffer)


def fetch_ahead(paths: Iterable[Path], most: int) -> None:
    """Bring up to `most` first bytes of files from the disk into the system's memory, while the caller does other work.

    It is advice: files that are not there, or that the system does not fetch, are left.
    """
    if not hasattr(os, "posix_fadvise"):  # macOS, Windows
        return

    def fetch(left: int) -> None:
        for path in paths:
            with contextlib.suppress(OSError), path.open("rb") as f:
                size = min(path.stat().st_size, left)
                for at in range(0, size, FETCHED):
                    os.posix_fadvise(f.fileno(), at, min(FETCHED, size - at), os.POSIX_FADV_WILLNEED)
                left -= size
            if not left:
                return

    threading.Thread(target=fetch, args=(most,), daemon=True).start()


def memory_bytes() -> int:
    """Of this machine; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0
