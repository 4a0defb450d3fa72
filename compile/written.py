"""The folder `weights/` of a bundle: weights that were made ahead, each with its place and hash in `index.json`.

```
index.json                        what is where, for which ranks; the one place that says what is there
rank_0003-5f0c....bin             what rank 3 alone holds; the name ends with the hash of what is in it
shared_data_0003-91d2....bin      what the ranks along `data`, the first of them 3, have in common
local.json                        for this machine: which files they were made of; may be deleted
*.part, journal.jsonl             of a run that has not come to its end: `kimi-graph weights` goes on there
```
Files never change once they have their name, and the index is replaced in one step: whatever happens, it names whole
files.
"""

import functools
import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_graph.errors import BundleError
from kimi_graph.files import read_into

from .bundle import MANIFEST, WRITTEN, Bundle, read_json
from .schema import check

INDEX_FORMAT = 1
INDEX, SOURCE, JOURNAL = "index.json", "local.json", "journal.jsonl"


@dataclass(frozen=True)
class Entry:
    """Where a weight lies. `shape`, `dtype`, `layout`: as the graph's input has them."""

    file: str
    offset: int
    bytes: int
    dtype: str
    shape: tuple[int, ...]
    layout: str
    sha256: str


@dataclass(frozen=True)
class Written:
    """Weights that were made ahead.

    Attributes:
        folder: they are in. ranks: that have all of theirs here. slots: expert in each slot, by parameter.
        files: as the index has them.
    """

    folder: Path
    ranks: tuple[int, ...]
    slots: Mapping[str, tuple[int, ...]]
    files: Mapping[str, Mapping[str, Any]]

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(entry["bytes"] for entry in self.files.values())

    @property
    def said(self) -> str:
        """What is there, and that nobody has read it."""
        again = f"kimi-graph weights {shlex.quote(str(self.folder.parent))} --verify does"
        ranks = f"{len(self.ranks):,} rank{'' if len(self.ranks) == 1 else 's'}"
        return f"{self.bytes:,} bytes made ahead for {ranks}, in {len(self.files):,} files; not read: {again}"

    def of(self, rank: int) -> dict[str, Entry]:
        """The weights of a rank, by name.

        Raises:
            BundleError: they are not all here.
        """
        if rank in self._found:
            return self._found[rank]
        if rank not in self.ranks:
            have = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
            raise BundleError(f"{self.folder}: weights of rank {rank} were not written; there are those of {have}.")
        self._found[rank] = {
            name: Entry(file, w["offset"], w["bytes"], w["dtype"], tuple(w["shape"]), w["layout"], w["sha256"])
            for file, entry in self.files.items()
            if rank in entry["ranks"]
            for name, w in entry["weights"].items()
        }
        return self._found[rank]

    @functools.cached_property
    def _found(self) -> dict[int, dict[str, Entry]]:
        return {}

    def read(self, rank: int, name: str) -> Tensor:
        """The bytes of a weight, checked against their hash.

        Raises:
            BundleError: there is none of this name, or it was changed.
        """
        entry = self.of(rank).get(name)
        if entry is None:
            raise BundleError(f"{self.folder}: rank {rank} has no weight {name!r}.")
        path = self.folder / entry.file
        raw = torch.empty(entry.bytes, dtype=torch.uint8)
        missing = read_into(path, entry.offset, raw.numpy().data)
        found = hashlib.sha256(raw.numpy().data).hexdigest()
        if missing or found != entry.sha256:
            raise BundleError(changed(path, name, "nothing" if missing else found, entry.sha256))
        return raw


def changed(path: Path, name: str, found: str, expected: str) -> str:
    """What is said of a weight whose bytes are others than the index says."""
    again = f"kimi-graph weights {shlex.quote(str(path.parent.parent))} --repair"
    return (
        f"{path}: weight {name}: SHA-256 is {found[:16]}..., the index says {expected[:16]}...; it was changed or "
        f"damaged. {again} makes this file anew, and no other that is whole."
    )


def written_folder(bundle: Bundle) -> Path:
    """Where a bundle's weights are, or would be.

    Raises:
        BundleError: it is a link, or a file: what is written must lie in the bundle.
    """
    folder = bundle.folder / WRITTEN
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        what = "a link" if folder.is_symlink() else "a file"
        raise BundleError(f"{folder}: is {what}; expected a folder inside the bundle.")
    return folder


def open_written(bundle: Bundle, *, partly: bool = False) -> Written | None:
    """The weights of a bundle that were made ahead; None where none were. Their content is not read.

    Args:
        partly: leave out files that are missing or have another size.

    Raises:
        BundleError: an index that is not as it is written, that is of another bundle, or that leads out of the folder;
            a file that is missing or has another size.
    """
    folder = written_folder(bundle)
    if not (folder / INDEX).is_file():
        return None
    index = read_index(folder)
    for key, value in described(bundle).items():
        if index["bundle"][key] != value:
            found, expected = (str(x)[:32] for x in (index["bundle"][key], value))
            raise BundleError(
                f"{folder / INDEX}: weights were made for bundle.{key} {found}, {bundle.folder / MANIFEST} has "
                f"{expected}; run kimi-graph weights again."
            )
    files = {}
    for name, entry in index["files"].items():
        try:
            check_file(folder / name, entry["bytes"])
            files[name] = entry
        except BundleError:
            if not partly:
                raise
    slots = {path: tuple(experts) for path, experts in index["slots"].items()}
    return Written(folder, tuple(index["ranks"]), slots, files)


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a folder of weights, as it is written.

    Raises:
        BundleError: it is otherwise; the key is named.
    """
    index = read_json(folder / INDEX)
    check(index, "weights-index", folder / INDEX)
    for file, entry in index["files"].items():
        for name, w in entry["weights"].items():
            if w["offset"] + w["bytes"] > entry["bytes"]:
                raise BundleError(f"{folder / INDEX}: files.{file}.weights.{name} ends after the file.")
    return index


def check_file(path: Path, size: int) -> None:
    """Raises BundleError where `path` is no file of `size` bytes that lies in its folder itself."""
    if path.is_symlink():
        raise BundleError(f"{path}: is a link to {path.readlink()}; a bundle's weights lie in the bundle.")
    found = path.stat().st_size if path.is_file() else None
    if found != size:
        what = "is missing" if found is None else f"has {found:,} bytes"
        again = f"kimi-graph weights {shlex.quote(str(path.parent.parent))} makes it anew, and no other"
        raise BundleError(f"{path}: {what}, the index says {size:,} bytes; {again}.")


def described(bundle: Bundle) -> dict[str, Any]:
    """What weights are for: what makes others of them, by its key in the index."""
    manifest = bundle.manifest
    return {
        "model": manifest["model"]["fingerprint"],
        "target": manifest["target"]["name"],
        "mesh": None if manifest["mesh"] is None else manifest["mesh"]["text"],
        "plan": manifest["weights"]["sha256"],
    }
