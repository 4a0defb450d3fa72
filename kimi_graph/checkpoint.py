"""Checkpoints: safetensors files with the released names, read through a memory map and strict both ways.

A file is 8 bytes (length of the header, little-endian), the header (JSON: name -> dtype, shape, data_offsets counted
from the header's end) and the data. Opening a checkpoint reads headers alone; a tensor's bytes are read by whoever
touches them.
Source: https://github.com/huggingface/safetensors, section "Format".
"""

import dataclasses
import json
import logging
import math
import mmap
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import tree
from .config import ModelConfig
from .errors import CheckpointError, ConfigError
from .files import new_folder
from .models import Block, Decoder, model_specs
from .read_config import parse_json, read_json
from .spec import ParamSpec

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
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
# A mapping is private and writable: torch warns of read-only memory, and no write may reach the file. Linux refuses
# one that is larger than the machine's memory (a shard of Kimi K3 has 16 GB) unless MAP_NORESERVE (0x4000) says that
# hardly any of it will be written.
_COPY_ON_WRITE: dict[str, int] = {"access": mmap.ACCESS_COPY}
if sys.platform == "linux":
    _COPY_ON_WRITE = {"flags": mmap.MAP_PRIVATE | 0x4000, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies: bytes `begin` to `end` of `file`."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder by name. Nothing but headers has been read.

    Attributes:
        folder: where it lies.
        tensors: every tensor of every file.
    """

    folder: Path
    tensors: Mapping[str, Stored]
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def open(folder: str | Path) -> "Checkpoint":
        """Read the index and every header.

        Raises:
            CheckpointError: no checkpoint there; an index that leads out of the folder or does not agree with its
                files; a file that is cut short or whose header cannot be meant.
        """
        folder = Path(folder)
        if not folder.is_dir():
            found = "is a file" if folder.exists() else "does not exist"
            raise CheckpointError(f"{folder}: {found}; expected a checkpoint's folder.")
        folder = folder.resolve()
        index, single = folder / INDEX, folder / SINGLE
        if index.exists() and single.exists():
            raise CheckpointError(f"{folder}: found both {INDEX} and {SINGLE}; delete the one that is not meant.")
        if single.exists():
            return Checkpoint(folder, read_header(_inside(folder, SINGLE)))
        if not index.exists():
            some = sorted(p.name for p in folder.glob("*.safetensors"))
            hint = f"; there are {len(some)} files such as {some[0]}, but no index" if some else ""
            raise CheckpointError(f"{folder}: found neither {INDEX} nor {SINGLE}{hint}.")
        return Checkpoint(folder, _read_indexed(folder))

    def read(self, name: str) -> Tensor:
        """The tensor as it is stored: a view of the mapped file. Writing to it changes this process's copy only.

        Raises:
            CheckpointError: there is no tensor of this name.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder}: there is no tensor {name!r}.")
        at = self.tensors[name]
        count = math.prod(at.shape)
        if not count:
            return torch.empty(at.shape, dtype=at.dtype)
        if at.begin % at.dtype.itemsize:  # other writers do not align; kernels want it
            raw = torch.frombuffer(self._map(at.file), dtype=torch.uint8, count=at.end - at.begin, offset=at.begin)
            return raw.clone().view(at.dtype).view(at.shape)
        return torch.frombuffer(self._map(at.file), dtype=at.dtype, count=count, offset=at.begin).view(at.shape)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as f:
                self._maps[file] = mmap.mmap(f.fileno(), 0, **_COPY_ON_WRITE)
        return self._maps[file]


def _inside(folder: Path, name: str) -> Path:
    """The path of a file that is named by an index: a plain name, and really in the folder."""
    if name != Path(name).name or name in ("", "..") or "\\" in name or "\0" in name:
        raise CheckpointError(f"{folder / INDEX}: file name {name!r}; expected a plain name of a file in this folder.")
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file, but the index names it.")
    home = path.resolve().parent
    # The Hugging Face cache keeps models/snapshots/<revision>/<name> as links to models/blobs/<hash>.
    cached = folder.parent.name == "snapshots" and home == folder.parent.parent / "blobs"
    if home != folder and not cached:
        raise CheckpointError(f"{path}: a link to {home}, outside the checkpoint; put the file itself into the folder.")
    return path


def _read_indexed(folder: Path) -> dict[str, Stored]:
    index = folder / INDEX
    weight_map = read_json(index, MAX_INDEX, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map: expected an object of tensor names and file names.")
    named: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        named.setdefault(file, set()).add(tensor)
    paths = {_inside(folder, file): names for file, names in sorted(named.items())}
    tensors: dict[str, Stored] = {}
    for path, names in paths.items():
        found = read_header(path)
        if absent := names - found.keys():
            raise CheckpointError(f"{path}: {_names('tensors that the index puts here are not', absent)}")
        if extra := found.keys() - names:
            raise CheckpointError(f"{path}: {_names('tensors are here that the index does not put here', extra)}")
        tensors |= found
    return tensors


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
        header = parse_json(f.read(length), f"{path} (header)", CheckpointError)
    header.pop("__metadata__", None)
    tensors = {name: _stored(path, name, entry, 8 + length) for name, entry in header.items()}
    at = 8 + length
    for name, t in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if t.end > size:
            raise CheckpointError(f"{path}: {name}: ends at byte {t.end:,} of {size:,}: the file is cut short.")
        if t.begin != at:
            fault = "overlaps another tensor" if t.begin < at else "leaves a gap before it"
            raise CheckpointError(f"{path}: {name}: starts at byte {t.begin:,}, expected {at:,}: it {fault}.")
        at = t.end
    if at != size:
        raise CheckpointError(f"{path}: {size - at:,} bytes after the last tensor belong to none.")
    return tensors


def _stored(path: Path, name: str, entry: Any, base: int) -> Stored:
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
    return Stored(path, DTYPES[code], tuple(shape), base + begin, base + end)


def _sizes(x: Any) -> bool:
    return isinstance(x, list) and all(type(i) is int and 0 <= i < 2**63 for i in x)


# Against a model.


@dataclass(frozen=True, kw_only=True)
class Audit:
    """How the tensors of a checkpoint differ from those of a model; each list has a line per tensor."""

    folder: Path
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shapes: tuple[str, ...]
    dtypes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not (self.missing or self.unexpected or self.shapes or self.dtypes)

    def __str__(self) -> str:
        kinds = (
            ("missing, the model needs them", self.missing),
            ("unexpected, the model has no such parameter", self.unexpected),
            ("of a wrong shape", self.shapes),
            ("of a wrong dtype", self.dtypes),
        )
        lines = [f"{self.folder}: {_names(f'tensors {kind}', found)}" for kind, found in kinds if found]
        return "\n".join(lines) or f"{self.folder}: every tensor is as the model needs it."

    def check(self) -> None:
        """Raises:
        CheckpointError: the checkpoint differs.
        """
        if not self.ok:
            raise CheckpointError(str(self))


def _names(what: str, names: Iterable[str]) -> str:
    names = list(names) if isinstance(names, Sequence) else sorted(names)
    more = [f"... and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return f"{len(names)} {what}:" + "".join(f"\n    {name}" for name in names[:SHOWN] + more)


# Released in float32 or in the model's dtype: both are read. By the end of the name, for what has no fixed dtype.
EITHER = ("conv1d.weight", "o_norm.weight")


def _stored_dtypes(spec: ParamSpec, name: str, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """What a tensor may be stored in, the released dtype first."""
    if spec.dtype is not None:
        return (spec.dtype, dtype)
    return (dtype, torch.float32) if name.endswith(EITHER) else (dtype,)


def audit(specs: Any, checkpoint: Checkpoint, dtype: torch.dtype) -> Audit:
    """Compare headers with a tree of specs: both must name the same tensors, of the same shapes and dtypes.

    Args:
        dtype: the model's, of every parameter that does not fix its own.
    """
    missing, shapes, dtypes, wanted = [], [], [], set()
    for _, spec in tree.items(specs):
        for name in spec.source:
            assert name not in wanted, f"two parameters read {name}"
            wanted.add(name)
            found = checkpoint.tensors.get(name)
            if found is None:
                missing.append(name)
                continue
            if found.shape != spec.stored:
                shapes.append(f"{name}: found {list(found.shape)}, expected {list(spec.stored)}")
            legal = _stored_dtypes(spec, name, dtype)
            if found.dtype not in legal:
                either = " or ".join(dict.fromkeys(CODES[d] for d in legal))
                dtypes.append(f"{name}: found {CODES[found.dtype]}, expected {either}")
    return Audit(
        folder=checkpoint.folder,
        missing=tuple(missing),
        unexpected=tuple(sorted(checkpoint.tensors.keys() - wanted)),
        shapes=tuple(shapes),
        dtypes=tuple(dtypes),
    )


def param_dtype(spec: ParamSpec, dtype: torch.dtype) -> torch.dtype:
    """Dtype of a parameter in a model of `dtype`: its own where it fixes one; but float64 is float64 throughout."""
    return dtype if spec.dtype is None or dtype == torch.float64 else spec.dtype


def load_params(
    source: str | Path | Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype | None = None,
    layers: Iterable[int] | None = None,
) -> Decoder[Tensor]:
    """The parameters of a model, as a `Decoder` of tensors.

    A parameter of one stored tensor is a view of the mapped file where dtypes agree: it takes no memory until it is
    used, and writing to it does not change the file. One of several tensors (experts) is a new tensor.

    Args:
        source: a checkpoint, or its folder.
        dtype: the config's by default; float64 converts all, others leave parameters of a fixed dtype alone.
        layers: load only these, counted from 0; the other layers have no parts (their
            fields are None), embedding, last norm and head are None.

    Raises:
        CheckpointError: the checkpoint is not this model's; every difference is counted (see `audit`).
        ConfigError: a layer the model does not have, or a `dtype` that is not a float.
    """
    dtype = dtype or config.dtype
    if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"load_params: dtype {dtype}; expected float64, float32, bfloat16 or float16.")
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint.open(source)
    specs = model_specs(config)
    audit(specs, checkpoint, config.dtype).check()
    if layers is not None:
        specs = _only(specs, set(layers))
    return load_tree(specs, checkpoint, dtype)


def _only(specs: Decoder[ParamSpec], wanted: set[int]) -> Decoder[ParamSpec]:
    count = len(specs.layers)
    if beyond := sorted(i for i in wanted if not 0 <= i < count):
        raise ConfigError(f"load_params: layers={beyond}: the model has the layers 0 to {count - 1}.")
    nothing = dict.fromkeys(f.name for f in dataclasses.fields(Block))
    kept = tuple(layer if i in wanted else Block(**nothing) for i, layer in enumerate(specs.layers))
    return tree.replace(specs, embed=None, layers=kept, norm=None, head=None)


def load_tree(specs: Any, checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """Tensors for any tree of specs, which must have passed `audit`; see `load_params`."""

    def load(spec: ParamSpec) -> Tensor:
        to = param_dtype(spec, dtype)
        if len(spec.source) == 1:
            return _unpadded(checkpoint, spec).to(to).view(spec.shape)
        whole = torch.empty((len(spec.source), *spec.stored), dtype=to)
        for part, name in zip(whole, spec.source, strict=True):
            part.copy_(checkpoint.read(name))
        return whole.view(spec.shape)

    return tree.map(load, specs)


def _unpadded(checkpoint: Checkpoint, spec: ParamSpec) -> Tensor:
    """The elements of a parameter's single tensor; what stands after them must be zero, else they mean something."""
    whole = checkpoint.read(spec.source[0]).reshape(-1)
    real, rest = whole[: spec.numel], whole[spec.numel :]
    if bool(rest.any()):
        at = int(rest.nonzero()[0]) + spec.numel
        raise CheckpointError(
            f"{spec.source[0]}: has {whole.numel()} elements, of which the model uses {spec.numel}; the others must be "
            f"zero, but element {at} is {float(whole[at]):g}."
        )
    return real


# Writing.


def save_checkpoint(
    folder: str | Path, specs: Any, params: Any, config: ModelConfig, max_shard_bytes: int = 5_000_000_000
) -> list[str]:
    """Write parameters under the released names and dtypes, with the config.json; `folder` must not exist.

    Args:
        specs: as `model_specs` gives them. params: tensors in a tree of the same shape, of any float dtype.
        max_shard_bytes: of tensors in a file; one tensor larger than that has a file of its own.

    Returns:
        names of the files written.

    Raises:
        CheckpointError: the folder exists; a tensor is missing, has a wrong shape, or has no data.
    """
    folder = Path(folder)
    if folder.exists():
        raise CheckpointError(f"{folder}: exists already; choose a new folder, or delete it.")
    with new_folder(folder) as work:
        files = write_shards(work, specs, params, config.dtype, max_shard_bytes)
        (work / "config.json").write_text(json.dumps(config.source, indent=2, sort_keys=True) + "\n")
    return ["config.json", *files]


@dataclass(frozen=True)
class _Piece:
    """One tensor to write: element `part` of a parameter that is a stack of `spec.source`."""

    name: str
    path: str
    spec: ParamSpec
    part: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.spec.stored) * self.dtype.itemsize


def write_shards(folder: Path, specs: Any, params: Any, dtype: torch.dtype, max_shard_bytes: int) -> list[str]:
    """Write `model.safetensors`, or several files and an index, into an existing folder; see `save_checkpoint`."""
    places, values = dict(tree.items(specs)), dict(tree.items(params))
    if extra := values.keys() - places.keys():
        raise CheckpointError(_names("parameters have no place in the model", extra))
    for path, spec in places.items():
        _check_param(path, spec, values.get(path))
    pieces = [
        _Piece(name, path, spec, i, spec.dtype or dtype)
        for path, spec in places.items()
        for i, name in enumerate(spec.source)
    ]
    assert len({p.name for p in pieces}) == len(pieces), "two parameters write one tensor"
    shards = _split(pieces, max_shard_bytes)
    if len(shards) == 1:
        _write_file(folder / SINGLE, shards[0], values)
        return [SINGLE]
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, values)
    index = {
        "metadata": {"total_size": sum(p.bytes for p in pieces)},
        "weight_map": {p.name: name for name, shard in zip(names, shards, strict=True) for p in shard},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return [*names, INDEX]


def _check_param(path: str, spec: ParamSpec, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise CheckpointError(f"{path}: found {type(value).__name__}, expected a tensor of shape {list(spec.shape)}.")
    if value.shape != spec.shape:
        raise CheckpointError(f"{path}: shape {list(value.shape)}, expected {list(spec.shape)}.")
    if not value.is_floating_point() or value.is_meta:
        raise CheckpointError(f"{path}: {value.dtype} on {value.device}; expected a float tensor that has data.")
    if not value.is_contiguous():
        log.info("%s: not contiguous, written from a contiguous copy", path)


def _split(pieces: Iterable[_Piece], limit: int) -> list[list[_Piece]]:
    shards: list[list[_Piece]] = [[]]
    room = limit
    for piece in pieces:
        if piece.bytes > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(piece)
        room -= piece.bytes
    return shards


def _write_file(path: Path, pieces: list[_Piece], params: Mapping[str, Tensor]) -> None:
    pieces = sorted(pieces, key=lambda p: -p.dtype.itemsize)  # wider dtypes first: every tensor is aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for p in pieces:
        header[p.name] = {"dtype": CODES[p.dtype], "shape": list(p.spec.stored), "data_offsets": [at, at + p.bytes]}
        at += p.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for p in pieces:
            f.write(_raw(params[p.path], p))


def _raw(value: Tensor, piece: _Piece) -> memoryview:
    flat = value.detach().contiguous().view(-1)
    if piece.spec.padding:
        flat = F.pad(flat, (0, piece.spec.padding))
    stack = flat.view(len(piece.spec.source), *piece.spec.stored)
    part = stack[piece.part].to(device="cpu", dtype=piece.dtype)
    return part.reshape(-1).view(torch.uint8).numpy().data
