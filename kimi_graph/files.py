"""Folders and files that are whole or not there: written under a temporary name beside their place, then renamed."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """Yield an empty folder to write to; at the end it becomes `folder`, after an error it is gone.

    What was at `folder` before is replaced: whether it may be is for the caller to decide first.
    """
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    stem = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"
    work, old = stem.with_suffix(".part"), stem.with_suffix(".old")
    work.mkdir()
    try:
        yield work
        if os.path.lexists(folder):
            folder.rename(old)
        try:
            work.rename(folder)
        except OSError:
            if os.path.lexists(old):
                old.rename(folder)
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if old.is_symlink():
        old.unlink()
    elif old.exists():
        shutil.rmtree(old)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file that is the old one or the new one at any moment, and after a power failure."""
    work = path.with_name(f"{path.name}.part")
    work.unlink(missing_ok=True)  # also where it is a link
    with work.open("xb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    work.replace(path)


def read_into(path: Path, at: int, buffer: memoryview) -> int:
    """Fill a buffer with the bytes of a file from byte `at` on; returns how many are missing."""
    with path.open("rb", buffering=0) as f:
        f.seek(at)
        while buffer and (got := f.readinto(buffer)):
            buffer = buffer[got:]
    return len(buffer)
