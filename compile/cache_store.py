"""A store of results by what they were made of. Entries appear whole or not at all, and damage is noticed.

An entry is one file, `<kind>/<key>`: a line of JSON (`fields`: all that the result depends on; size and SHA-256 of what
follows), then named byte strings, compressed. The key is the hash of the fields, so that nothing is ever out of date,
and a store may be moved or deleted at any time. Two builders that make the same entry write the same bytes, each beside
the place and renamed.
"""

import contextlib
import hashlib
import json
import os
import secrets
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LIMIT = 2**30  # bytes of a store; what was used longest ago goes first
LOOKED_AT = 100  # newest entries, to say why one was not found
ABANDONED = 3600  # seconds after which a file that nobody finished is another process's that was killed
SHOWN = 3  # differences of a reason

Fields = Mapping[str, Any]  # JSON; the names are words for people
Files = Mapping[str, bytes]


@dataclass
class Store:
    """Entries in a folder.

    Attributes:
        folder: made when something is kept. limit: bytes of all entries together.
        notes: what went wrong with the store, in words; a result never depends on it.
    """

    folder: Path
    limit: int = LIMIT
    notes: list[str] = field(default_factory=list)

    def get(self, kind: str, fields: Fields) -> dict[str, bytes] | None:
        """What was kept for these fields; None: nothing, or it is damaged (then it is gone, and `notes` says so)."""
        path = self._path(kind, fields)
        try:
            with path.open("rb") as file:
                found = _read(file.readline(), file.read(), fields)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.notes.append(f"{path}: {error.strerror or error}; not read")
            return None
        if found is None:
            self.notes.append(f"{path}: damaged; made again")
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used now
        return found

    def put(self, kind: str, fields: Fields, files: Files) -> None:
        """Keep byte strings by name. Where that cannot be (a full disk, say) it is a note, not an error."""
        path = self._path(kind, fields)
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                part.write_bytes(_written(fields, files))
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
            self._prune()
        except OSError as error:
            self.notes.append(f"{path.parent}: {error.strerror or error}; nothing was kept")

    def why_not(self, kind: str, fields: Fields) -> str:
        """Why nothing is kept for these fields: how they differ from those of the entry most like them."""
        others = [other for other in self._newest(kind) if other.keys() == fields.keys()]
        if not others:
            return "nothing is kept yet"
        nearest = max(others, key=lambda other: sum(other[name] == value for name, value in fields.items()))
        changed = [_change(name, nearest[name], value) for name, value in fields.items() if nearest[name] != value]
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        return "; ".join(changed[:SHOWN]) + more if changed else "what was kept is damaged"

    def _newest(self, kind: str) -> Iterator[dict[str, Any]]:
        """Fields of the entries of a kind, those used last first."""
        for _, path in self._entries(kind)[:LOOKED_AT]:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError), path.open("rb") as file:
                yield dict(json.loads(file.readline())["fields"])

    def _path(self, kind: str, fields: Fields) -> Path:
        return self.folder / kind / hashlib.sha256(_json(fields)).hexdigest()

    def _entries(self, kind: str = "*") -> list[tuple[os.stat_result, Path]]:
        found = []
        for path in self.folder.glob(f"{kind}/*"):
            with contextlib.suppress(OSError):  # another process took it away
                found.append((path.stat(), path))
        return sorted(found, key=lambda entry: entry[0].st_mtime, reverse=True)

    def _prune(self) -> None:
        """Take away what was used longest ago, down to the limit, and what killed processes left."""
        total, now = 0, time.time()
        for stat, path in self._entries():
            total += stat.st_size
            unfinished = path.name.startswith(".")
            if now - stat.st_mtime > ABANDONED if unfinished else total > self.limit:
                path.unlink(missing_ok=True)


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _written(fields: Fields, files: Files) -> bytes:
    """The bytes of an entry."""
    body = zlib.compress(b"".join(files.values()), 1)
    sizes = [[name, len(data)] for name, data in files.items()]
    return _json({"fields": fields, "files": sizes, "sha256": _digest(sizes, body)}) + b"\n" + body


def _digest(sizes: Any, body: bytes) -> str:
    return hashlib.sha256(_json(sizes) + body).hexdigest()


def _read(head: bytes, body: bytes, fields: Fields) -> dict[str, bytes] | None:
    """What an entry's bytes hold; None where they are not what was written for these fields."""
    try:
        said = json.loads(head)
        sizes: Sequence[tuple[str, int]] = said["files"]
        if said["fields"] != fields or said["sha256"] != _digest(sizes, body):
            return None
        total = sum(size for _, size in sizes)
        data = zlib.decompressobj().decompress(body, total) if total else b""
    except (ValueError, KeyError, TypeError, RecursionError, zlib.error):  # whatever damage makes of JSON
        return None
    if len(data) != total:
        return None
    files, at = {}, 0
    for name, size in sizes:
        files[name], at = data[at : at + size], at + size
    return files


def _change(name: str, before: Any, now: Any) -> str:
    """`--chunk is 256, was 512`; of hashes only that they differ."""
    if any(isinstance(value, str) and len(value) == 64 for value in (before, now)):
        return f"{name} changed"
    return f"{name} is {_text(now)}, was {_text(before)}"


def _text(value: Any) -> str:
    said = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
    return "none" if said in (None, "") else str(said)
