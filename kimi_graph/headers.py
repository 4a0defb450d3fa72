"""What tensors a checkpoint has, from the headers of its safetensors files and their index.

A file is 8 bytes (length of the header, little-endian), the header (JSON: name -> dtype, shape, data_offsets counted
from the header's end) and the data. Nothing here reads data.
Source: https://github.com/huggingface/safetensors, section "Format".
"""

import contextlib
import gc
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .errors import CheckpointError
from .read_config import parse_json, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
QUANTISED = "quant_model_weight*.safetensors"  # msModelSlim's exports name their files so, and the index as well
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
MAX_INDEX = 1 << 30  # bytes; the index of Kimi K3 with 497,220 tensors has about 60 MB
SHOWN = 8  # names a message lists
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class Stored(NamedTuple):
    """Where a tensor lies: bytes `begin` to `end` of `file`."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def read_headers(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint's folder, by the index and every header, which must agree.

    Raises:
        CheckpointError: no checkpoint there; an index that leads out of the folder or does not agree with its files; a
            file that is cut short or whose header cannot be meant.
    """
    index, single = find_files(folder)
    if single is not None:
        return read_header(inside(folder, single.name))
    assert index is not None
    with without_gc():
        paths = {inside(folder, file): names for file, names in sorted(read_index(index).items())}
        tensors: dict[str, Stored] = {}
        for path, names in paths.items():
            tensors |= read_listed(path, names)
    return tensors


def read_listed(path: Path, names: set[str]) -> dict[str, Stored]:
    """The tensors of one file, which must be those that the index puts there.

    Raises:
        CheckpointError: tensors are missing or too many, or the header is damaged.
    """
    found = read_header(path)
    if found.keys() != names:
        if absent := names - found.keys():
            raise CheckpointError(f"{path}: {counted('tensors that the index puts here are not', absent)}")
        extra = found.keys() - names
        raise CheckpointError(f"{path}: {counted('tensors are here that the index does not put here', extra)}")
    return found


def find_files(folder: Path) -> tuple[Path | None, Path | None]:
    """The index of a folder, or the only file of weights; the other is None.

    Raises:
        CheckpointError: there is neither, or more than one, or no such folder.
    """
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder}: {found}; expected a checkpoint's folder.")
    indexes = [p for p in (folder / INDEX, *sorted(folder.glob(f"{QUANTISED}.index.json"))) if p.exists()]
    sharded = [p for p in folder.glob(QUANTISED) if "-of-" not in p.name]
    singles = [p for p in (folder / SINGLE, *sorted(sharded)) if p.exists()]
    if len(indexes) + len(singles) > 1:
        both = f"both {indexes[0].name} and {singles[0].name}" if indexes and singles else f"{indexes or singles}"
        raise CheckpointError(f"{folder}: found {both}; delete the one that is not meant.")
    if not indexes and not singles:
        some = sorted(p.name for p in folder.glob("*.safetensors"))
        hint = f"; there are {len(some)} files such as {some[0]}, but no index" if some else ""
        raise CheckpointError(f"{folder}: found neither {INDEX} nor {SINGLE}{hint}; expected a checkpoint's folder.")
    return (at_home(indexes[0]) if indexes else None), (singles[0] if singles else None)


def inside(folder: Path, name: str) -> Path:
    """The path of a file that is named by an index: a plain name, and really in the folder.

    Raises:
        CheckpointError: there is no such file, or the name leads out of the folder.
    """
    if name != Path(name).name or name in ("", "..") or "\\" in name or "\0" in name:
        raise CheckpointError(f"{folder / INDEX}: file name {name!r}; expected a plain name of a file in this folder.")
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file, but the index names it.")
    return at_home(path)


def at_home(path: Path) -> Path:
    """The path of a file of a checkpoint that really is in its folder.

    Raises:
        CheckpointError: it is a link that leads out of the folder.
    """
    folder, home = path.parent.resolve(), path.resolve().parent
    # The Hugging Face cache keeps models/snapshots/<revision>/<name> as links to models/blobs/<hash>.
    cached = folder.parent.name == "snapshots" and home == folder.parent.parent / "blobs"
    if home != folder and not cached:
        raise CheckpointError(f"{path}: a link to {home}, outside the checkpoint; put the file itself into the folder.")
    return path


def read_index(index: Path) -> dict[str, set[str]]:
    """Names of tensors by the file that an index puts them into.

    Raises:
        CheckpointError: not JSON, or not an index.
    """
    weight_map = read_json(index, MAX_INDEX, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map: expected an object of tensor names and file names.")
    by_file: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        by_file.setdefault(file, set()).add(tensor)
    return by_file


def read_header(path: Path) -> dict[str, Stored]:
    """Where the tensors of one file lie, checked to be exactly its bytes.

    Raises:
        CheckpointError: naming the file, and the tensor if one is at fault.
    """
    size = path.stat().st_size
    with path.open("rb") as f:
        start = f.read(8)
        if len(start) < 8:
            raise CheckpointError(f"{path}: {size} bytes, cut short: a safetensors file starts with 8 bytes of length.")
        (length,) = struct.unpack("<Q", start)
        if length > min(MAX_HEADER, size - 8):
            raise CheckpointError(
                f"{path}: a header of {length:,} bytes in a file of {size:,} (at most {MAX_HEADER:,}): "
                "cut short, or not a safetensors file."
            )
        text = f.read(length)
    header = parse_json(text, f"{path} (header)", CheckpointError)
    header.pop("__metadata__", None)
    tensors = _entries(path, header, 8 + length)
    _check_gapless(path, tensors, 8 + length, size)
    return tensors


def _check_gapless(path: Path, tensors: Mapping[str, Stored], start: int, size: int) -> None:
    at = start
    for t in tensors.values():
        if t[3] != at:
            break
        at = t[4]
    else:
        if at == size:
            return
    at = start  # out of order, which is allowed, or wrong
    for name, t in sorted(tensors.items(), key=lambda item: item[1][3:]):
        if t.end > size:
            raise CheckpointError(f"{path}: {name}: ends at byte {t.end:,} of {size:,}: the file is cut short.")
        if t.begin != at:
            fault = "overlaps another tensor" if t.begin < at else "leaves a gap before it"
            raise CheckpointError(f"{path}: {name}: starts at byte {t.begin:,}, expected {at:,}: it {fault}.")
        at = t.end
    if at != size:
        raise CheckpointError(f"{path}: {size - at:,} bytes after the last tensor belong to none.")


def _entries(path: Path, header: Mapping[str, Any], base: int) -> dict[str, Stored]:
    """A file has few kinds of tensors (dtype and shape): each is checked in full once, then recognised."""
    kinds: dict[tuple[Any, ...], tuple[torch.dtype, tuple[int, ...], int]] = {}
    tensors: dict[str, Stored] = {}
    for name, entry in header.items():
        try:
            kind = (entry["dtype"], *entry["shape"])
            begin, end = entry["data_offsets"]
            dtype, shape, count = kinds[kind]
            known = len(entry) == 3 and type(begin) is type(end) is int and begin >= 0 and end - begin == count
        except (KeyError, TypeError, ValueError):
            known = False
        if not known:
            dtype, shape, begin, end = _checked(path, name, entry)
            kinds[(entry["dtype"], *shape)] = (dtype, shape, end - begin)
        tensors[name] = Stored(path, dtype, shape, base + begin, base + end)  # type: ignore[possibly-undefined]
    return tensors


def _checked(path: Path, name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{path}: {name}: expected dtype, shape and data_offsets, found {str(entry)[:80]}.")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise CheckpointError(f"{path}: {name}: unknown dtype {str(code)[:40]!r}; known are {', '.join(DTYPES)}.")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{path}: {name}: shape {str(shape)[:40]} or data_offsets {str(offsets)[:40]} are not sizes."
        )
    begin, end = offsets
    expected = math.prod(shape) * DTYPES[code].itemsize
    if end - begin != expected:
        raise CheckpointError(
            f"{path}: {name}: data_offsets hold {end - begin:,} bytes, {code} {shape} has {expected:,}."
        )
    return DTYPES[code], tuple(shape), begin, end


def _sizes(x: Any) -> bool:
    return isinstance(x, list) and all(type(i) is int and 0 <= i < 2**63 for i in x)


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """For making many small objects, none of them in a cycle: looking for cycles would take half the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def counted(what: str, names: Iterable[str]) -> str:
    """`what` with the number of names, and the first of them in lines of their own."""
    names = list(names) if isinstance(names, Sequence) else sorted(names)
    more = [f"... and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return f"{len(names)} {what}:" + "".join(f"\n    {name}" for name in names[:SHOWN] + more)
