"""Checkpoints: safetensors files with the released names, read through a memory map and strict both ways.

Opening a checkpoint reads headers alone (`headers.py`); a tensor's bytes are read by whoever touches them. Quantised
weights (`formats.py`) become plain tensors as they are read, one at a time.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import math
import mmap
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import formats, tree
from .audit import DESCRIPTION, Audit, audit_names
from .config import ModelConfig, check_config
from .errors import CheckpointError, ConfigError
from .files import new_folder, read_into
from .headers import CODES, INDEX, MAX_INDEX, SINGLE, Stored, at_home, counted, read_headers
from .models import Block, Decoder, model_specs
from .naming import Names
from .read_config import presets, read_json
from .spec import ParamSpec
from .streamed import StreamedExperts

# A mapping is private and writable: torch warns of read-only memory, and no write may reach the file. Linux refuses
# one that is larger than the machine's memory (a shard of Kimi K3 has 16 GB) unless MAP_NORESERVE (0x4000) says that
# hardly any of it will be written.
_COPY_ON_WRITE: dict[str, int] = {"access": mmap.ACCESS_COPY}
if sys.platform == "linux":
    _COPY_ON_WRITE = {"flags": mmap.MAP_PRIVATE | 0x4000, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder by name. Nothing but headers has been read.

    Attributes:
        folder: where it lies.
        tensors: every tensor of every file.
        mapped: whether tensors are views of mapped files; else every one is read into memory of its own, which is
            given back with it: pages of a mapping count as the process's for as long as the machine has room.
    """

    folder: Path
    tensors: Mapping[str, Stored]
    mapped: bool = True
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def open(folder: str | Path, *, mapped: bool = True) -> "Checkpoint":
        """Read the index and every header.

        Raises:
            CheckpointError: no checkpoint there; an index that leads out of the folder or does not agree with its
                files; a file that is cut short or whose header cannot be meant.
        """
        folder = Path(folder).resolve()
        return Checkpoint(folder, read_headers(folder), mapped)

    @functools.cached_property
    def names(self) -> Names:
        """For finding the model's tensors, however they are spelled."""
        return Names(self.tensors)

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
        if not self.mapped:
            return self.elements(name, 0, count).view(at.shape)
        if at.begin % at.dtype.itemsize:  # other writers do not align; kernels want it
            raw = torch.frombuffer(self._map(at.file), dtype=torch.uint8, count=at.end - at.begin, offset=at.begin)
            return raw.clone().view(at.dtype).view(at.shape)
        return torch.frombuffer(self._map(at.file), dtype=at.dtype, count=count, offset=at.begin).view(at.shape)

    def elements(self, name: str, first: int, last: int) -> Tensor:
        """Elements `first` to `last` of a tensor that is there, row-major, in memory of their own.

        Raises:
            CheckpointError: the file has become shorter since its header was read.
        """
        at = self.tensors[name]
        raw = torch.empty((last - first) * at.dtype.itemsize, dtype=torch.uint8)
        missing = read_into(at.file, at.begin + first * at.dtype.itemsize, raw.numpy().data)
        if missing:
            raise CheckpointError(f"{at.file}: {name}: {missing:,} bytes are missing: the file was cut short.")
        return raw.view(at.dtype)

    def ahead(self, name: str) -> None:
        """Start fetching a tensor from the disk: it will be read soon."""
        self._advise(name, "MADV_WILLNEED")

    def release(self, name: str) -> None:
        """Give back the memory of a tensor that was read; the machine may keep it cached, and it can be read again."""
        self._advise(name, "MADV_DONTNEED")

    def _advise(self, name: str, advice: str) -> None:
        """Of whole pages that are this tensor's alone: others may have been written to."""
        if not self.mapped or not hasattr(mmap, advice):  # Windows has none
            return
        at = self.tensors[name]
        first = -(-at.begin // mmap.PAGESIZE) * mmap.PAGESIZE
        size = at.end // mmap.PAGESIZE * mmap.PAGESIZE - first
        if size > 0:
            self._map(at.file).madvise(getattr(mmap, advice), first, size)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as f:
                self._maps[file] = mmap.mmap(f.fileno(), 0, **_COPY_ON_WRITE)
        return self._maps[file]


# Against a model.


def audit(specs: Any, checkpoint: Checkpoint, dtype: torch.dtype, config: ModelConfig | None = None) -> Audit:
    """Compare headers with a tree of specs: both must have the same tensors, of the same shapes and dtypes.

    Args:
        dtype: the model's, of every parameter that does not fix its own.
        config: tells draft layers, which are not read; what it says of quantised weights is held against the file.
    """
    described = read_description(checkpoint.folder)
    return audit_names(specs, checkpoint.tensors, checkpoint.names, dtype, checkpoint.folder, config, described)


def read_description(folder: Path) -> dict[str, Any] | None:
    """What msModelSlim says of a folder's tensors; None where it did not write them."""
    file = folder / DESCRIPTION
    return read_json(at_home(file), MAX_INDEX, CheckpointError) if file.is_file() else None


def param_dtype(spec: ParamSpec, dtype: torch.dtype) -> torch.dtype:
    """Dtype of a parameter in a model of `dtype`: its own where it fixes one; but float64 is float64 throughout."""
    return dtype if spec.dtype is None or dtype == torch.float64 else spec.dtype


def load_params(
    source: str | Path | Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype | None = None,
    layers: Iterable[int] | None = None,
    stream_experts: bool = False,
) -> Decoder[Tensor]:
    """The parameters of a model, as a `Decoder` of tensors.

    A parameter of one stored tensor is a view of the mapped file where dtypes agree: it takes no memory until it is
    used, and writing to it does not change the file. One of several tensors (experts) is a new tensor, and so is one
    that is stored quantised; see `formats.unpack` for how exact that is.

    Args:
        source: a checkpoint, or its folder.
        dtype: the config's by default; float64 converts all, others leave parameters of a fixed dtype alone.
        layers: load only these, counted from 0; the other layers have no parts (their
            fields are None), embedding, last norm and head are None.
        stream_experts: routed experts stay in the files: each is read, and dequantised, when tokens go through it, and
            let go, so that memory holds everything else and one expert. They are no tensors and have no gradients.

    Raises:
        CheckpointError: the checkpoint is not this model's; every difference is counted (see `audit`). A tensor holds
            what it may not: a scale that is NaN, padding that is not zero.
        ConfigError: a layer the model does not have, or a `dtype` that is not a float.
    """
    check_config(config, "load_params")
    dtype = dtype or config.dtype
    if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"load_params: dtype {dtype}; expected float64, float32, bfloat16 or float16.")
    if str(source) in presets() and not Path(str(source)).exists():
        raise CheckpointError(
            f"load_params: {source} is a preset, a config without weights; expected a checkpoint's folder. "
            "kg.init_params makes random parameters, kg.make_fixture a small checkpoint."
        )
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint.open(source)
    specs = model_specs(config)
    found = audit(specs, checkpoint, config.dtype, config)
    found.check()
    for line in found.disagreements:
        log.info("%s: %s", checkpoint.folder, line)
    if layers is not None:
        specs = _only(specs, set(layers))
    return load_tree(specs, checkpoint, dtype, stream_experts=stream_experts)


def _only(specs: Decoder[ParamSpec], wanted: set[int]) -> Decoder[ParamSpec]:
    count = len(specs.layers)
    if beyond := sorted(i for i in wanted if not 0 <= i < count):
        raise ConfigError(f"load_params: layers={beyond}: the model has the layers 0 to {count - 1}.")
    nothing = dict.fromkeys(f.name for f in dataclasses.fields(Block))
    kept = tuple(layer if i in wanted else Block(**nothing) for i, layer in enumerate(specs.layers))
    return tree.replace(specs, embed=None, layers=kept, out_res=None, norm=None, head=None, vision=None)


def load_tree(specs: Any, checkpoint: Checkpoint, dtype: torch.dtype, *, stream_experts: bool = False) -> Any:
    """Tensors for any tree of specs, which must have passed `audit`; see `load_params`."""

    def load(spec: ParamSpec) -> Any:
        to = param_dtype(spec, dtype)
        if stream_experts and spec.axes[0] == "experts":
            return streamed(spec, checkpoint, to)
        if len(spec.source) == 1:
            return plain_tensor(spec, spec.source[0], checkpoint, to).view(spec.shape)
        whole = torch.empty((len(spec.source), *spec.stored), dtype=to)
        for part, name in zip(whole, spec.source, strict=True):
            part.copy_(plain_tensor(spec, name, checkpoint, to))
        return whole.view(spec.shape)

    return tree.map(load, specs)


def load_part(spec: ParamSpec, own: Sequence[range], checkpoint: Checkpoint, dtype: torch.dtype) -> Tensor:
    """Some indices of each dim of a parameter, in memory of their own: what a rank has of it (`Placement.own`).

    Nothing else is read, except that a stored matrix which is quantised is dequantised whole, and let go.

    Args:
        dtype: as in `load_params`.
    """
    to, count = param_dtype(spec, dtype), len(spec.source)
    lead = 0 if count == 1 else len(spec.shape) - len(spec.stored)  # dims that count stored tensors
    numbers = _narrowed(torch.arange(count).view(spec.shape[:lead]), own[:lead])
    made = torch.empty([len(indices) for indices in own], dtype=to)
    for part, number in zip(made.view(numbers.numel(), *made.shape[lead:]), numbers.flatten().tolist(), strict=True):
        whole = as_stored(spec, spec.source[number], checkpoint, to)
        part.copy_(_narrowed(whole.view(spec.shape[lead:]), own[lead:]))
    return made


def _narrowed(x: Tensor, own: Sequence[range]) -> Tensor:
    for dim, indices in enumerate(own):
        x = x.narrow(dim, indices.start, len(indices))
    return x


def streamed(spec: ParamSpec, checkpoint: Checkpoint, dtype: torch.dtype) -> StreamedExperts:
    """A stack of experts that stays in the checkpoint's files."""

    def stored(name: str) -> tuple[str, ...]:
        place = checkpoint.names.find(name)
        assert place is not None, f"the audit let pass that {name} is missing"
        return tuple(place.names)

    def on_all(do: Callable[[str], None]) -> Callable[[str], None]:
        def done(name: str) -> None:
            for part in stored(name):
                do(part)

        return done

    return StreamedExperts(
        spec,
        read=lambda name: plain_tensor(spec, name, checkpoint, dtype),
        ahead=on_all(checkpoint.ahead),
        release=on_all(checkpoint.release),
    )


def load_packed(spec: ParamSpec, checkpoint: Checkpoint, to: str) -> dict[str, Tensor]:
    """The parts of a parameter in a format of `formats.py`, one stored tensor in memory at a time.

    What the checkpoint stores in that format is taken as it is. Parts of a stack of matrices (experts) have its leading
    dimensions, parts of another parameter those of the stored tensor.

    Raises:
        CheckpointError: not a matrix, or its values or parts cannot be stored so.
    """
    if spec.padding or len(spec.stored) != 2:
        raise CheckpointError(f"{spec.source[0]}: {list(spec.stored)} is not a matrix to be stored as {to}.")
    lead = spec.shape[:-2] if spec.shape[-2:] == spec.stored else ()
    wholes = {
        part: torch.empty((len(spec.source), *shape), dtype=dtype)
        for part, (dtype, shape) in formats.layout(to, spec.stored).items()
    }
    for i, name in enumerate(spec.source):
        place, parts = _parts(name, checkpoint)
        with _naming(name):
            made = formats.pack(to, parts[""]) if place is None else formats.convert(place, parts, to)
        for part, whole in wholes.items():
            whole[i] = made[part]
    return {part: x.view(*lead, *x.shape[1:]) for part, x in wholes.items()}


def _parts(name: str, checkpoint: Checkpoint) -> tuple[str | None, dict[str, Tensor]]:
    """Format and parts of one of the model's tensors as the checkpoint stores it; the part "" is a plain tensor."""
    place = checkpoint.names.find(name)
    if place is None:
        raise CheckpointError(f"{checkpoint.folder}: there is no tensor {name!r}.")
    if place.format is None:
        return None, {"": checkpoint.read(place.names[0])}
    parts = (part.name for part in formats.FORMATS[place.format].parts)
    return place.format, {part: checkpoint.read(n) for part, n in zip(parts, place.names, strict=True)}


def plain_tensor(spec: ParamSpec, name: str, checkpoint: Checkpoint, dtype: torch.dtype) -> Tensor:
    """One of the model's tensors, dequantised, its elements those of the parameter `spec` in order.

    Raises:
        CheckpointError: it holds what it may not, or is not there.
    """
    return as_stored(spec, name, checkpoint, dtype).to(dtype)


def as_stored(spec: ParamSpec, name: str, checkpoint: Checkpoint, dtype: torch.dtype) -> Tensor:
    """`plain_tensor` in the dtype of the file; in `dtype` where it is stored quantised.

    Raises:
        CheckpointError: it holds what it may not, or is not there.
    """
    form, parts = _parts(name, checkpoint)
    with _naming(name):
        if form is not None:
            return formats.unpack(form, parts, dtype)
        whole = parts[""]
        if spec.padding:
            return _without_padding(spec, whole.reshape(-1)).view(spec.shape)
        return whole.view(spec.stored)


def _without_padding(spec: ParamSpec, flat: Tensor) -> Tensor:
    kept = flat[: spec.numel]
    for i in flat[spec.numel :].nonzero().view(-1).tolist():
        raise CheckpointError(
            f"{len(flat)} elements for a parameter of {spec.numel}: those after it must be zero, but element "
            f"{spec.numel + i} is {float(flat[spec.numel + i])}."
        )
    return kept


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError as e:
        raise CheckpointError(f"{name}: {e}") from None


# Writing.


def released_formats(config: ModelConfig, specs: Any) -> dict[str, str]:
    """Format of every parameter that the released checkpoint stores quantised, by its path.

    What the config says does not decide it (it says more than is so): mxfp4 and int4 are formats of routed experts, fp8
    of all matrices but embedding, head, router and the indexer's weights.
    Source: fact sheet of models, sections 2.2, 5.2 and 6.1.
    """
    if config.quant is None:
        return {}
    form = config.quant.format
    return {path: form for path, spec in tree.items(specs) if _quantised(form, spec)}


def _quantised(form: str, spec: ParamSpec) -> bool:
    name = spec.source[0]
    if form != "fp8":
        return ".experts." in name
    plain = ("embed_tokens.weight", "lm_head.weight", ".gate.weight", "weights_proj.weight")
    return len(spec.stored) == 2 and name.endswith(".weight") and not name.endswith(plain)


def save_checkpoint(
    folder: str | Path,
    specs: Any,
    params: Any,
    config: ModelConfig,
    max_shard_bytes: int = 5_000_000_000,
    packed: Mapping[str, str] | None = None,
) -> list[str]:
    """Write parameters under the released names and dtypes, with the config.json; `folder` must not exist.

    Args:
        specs: as `model_specs` gives them.
        params: tensors in a tree of the same shape, of any float dtype.
        max_shard_bytes: of tensors in a file; one tensor larger than that has a file of its own.
        packed: formats of the parameters to quantise, by path (see `released_formats`); none by default.

    Returns:
        names of the files written.

    Raises:
        CheckpointError: the folder exists; a tensor is missing, has a wrong shape, or has no data.
    """
    folder = Path(folder)

    def may_replace() -> None:
        if folder.exists():
            raise CheckpointError(f"{folder}: exists already; choose a new folder, or delete it.")

    with new_folder(folder, may_replace) as work:
        files = write_shards(work, specs, params, config.dtype, max_shard_bytes, packed)
        (work / "config.json").write_text(json.dumps(config.source, indent=2, sort_keys=True) + "\n")
    return ["config.json", *files]


@dataclass(frozen=True)
class Piece:
    """One tensor to write: of a parameter that is a stack of `spec.source`, element `index`, or a part of it packed.

    Attributes:
        name, dtype, shape: of the tensor.
        path, spec: of the parameter.
        packed: format and part; None: the tensor as it is.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: str
    spec: ParamSpec
    index: int
    packed: tuple[str, str] | None = None

    @property
    def bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def pieces_of(specs: Any, dtype: torch.dtype, packed: Mapping[str, str] | None = None) -> list[Piece]:
    """Every tensor of a checkpoint of the model `specs`, in order; see `save_checkpoint`."""
    pieces: list[Piece] = []
    for path, spec in tree.items(specs):
        form = (packed or {}).get(path)
        for i, name in enumerate(spec.source):
            if form is None:
                pieces.append(Piece(name, spec.dtype or dtype, spec.stored, path, spec, i))
                continue
            stem = name.removesuffix(".weight")
            assert stem != name, f"{name} is not called weight"
            pieces += [
                Piece(f"{stem}.{part}", d, shape, path, spec, i, (form, part))
                for part, (d, shape) in formats.layout(form, spec.stored).items()
            ]
    return pieces


def write_shards(
    folder: Path,
    specs: Any,
    params: Any,
    dtype: torch.dtype,
    max_shard_bytes: int,
    packed: Mapping[str, str] | None = None,
) -> list[str]:
    """Write `model.safetensors`, or several files and an index, into an existing folder; see `save_checkpoint`.

    Raises:
        CheckpointError: parameters that are missing, too many, or of another shape or dtype.
    """
    places, values = dict(tree.items(specs)), dict(tree.items(params))
    if extra := values.keys() - places.keys():
        raise CheckpointError(counted("parameters have no place in the model", extra))
    for path, spec in places.items():
        _check_param(path, spec, values.get(path))
    pieces = pieces_of(specs, dtype, packed)
    assert len({p.name for p in pieces}) == len(pieces), "two parameters write one tensor"
    shards = split(pieces, max_shard_bytes)
    if len(shards) == 1:
        _write_file(folder / SINGLE, shards[0], values)
        return [SINGLE]
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, values)
    (folder / INDEX).write_text(json.dumps(index_of(names, shards), indent=2, sort_keys=True) + "\n")
    return [*names, INDEX]


def index_of(names: Iterable[str], shards: Iterable[list[Piece]]) -> dict[str, Any]:
    """The content of the index of files `names` that hold `shards`."""
    shards = list(shards)
    return {
        "metadata": {"total_size": sum(p.bytes for shard in shards for p in shard)},
        "weight_map": {p.name: name for name, shard in zip(names, shards, strict=True) for p in shard},
    }


def _check_param(path: str, spec: ParamSpec, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise CheckpointError(f"{path}: found {type(value).__name__}, expected a tensor of shape {list(spec.shape)}.")
    if value.shape != spec.shape:
        raise CheckpointError(f"{path}: shape {list(value.shape)}, expected {list(spec.shape)}.")
    if not value.is_floating_point() or value.is_meta:
        raise CheckpointError(f"{path}: {value.dtype} on {value.device}; expected a float tensor that has data.")
    if not value.is_contiguous():
        log.info("%s: not contiguous, written from a contiguous copy", path)


def split(pieces: Iterable[Piece], limit: int) -> list[list[Piece]]:
    """Pieces by file, in order, of at most `limit` bytes each where a single piece is not larger."""
    shards: list[list[Piece]] = [[]]
    room = limit
    for piece in pieces:
        if piece.bytes > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(piece)
        room -= piece.bytes
    return shards


def header_of(pieces: Iterable[Piece]) -> tuple[bytes, list[Piece]]:
    """The start of a file, up to its data, and the pieces in the order of their data: every tensor is aligned."""
    ordered = sorted(pieces, key=lambda p: -p.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for p in ordered:
        header[p.name] = {"dtype": CODES[p.dtype], "shape": list(p.shape), "data_offsets": [at, at + p.bytes]}
        at += p.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, ordered


def _write_file(path: Path, pieces: list[Piece], params: Mapping[str, Tensor]) -> None:
    start, ordered = header_of(pieces)
    with path.open("wb") as f:
        f.write(start)
        for p in ordered:
            f.write(_raw(params[p.path], p))


def _raw(value: Tensor, piece: Piece) -> memoryview:
    """The bytes of a piece. A part that is packed is packed for itself: memory holds one stored tensor at a time."""
    spec = piece.spec
    flat = value.detach().contiguous().view(len(spec.source), -1)[piece.index].to(device="cpu")
    if spec.padding:
        flat = torch.nn.functional.pad(flat, (0, spec.padding))
    if piece.packed is None:
        part = flat.to(piece.dtype)
    else:
        form, name = piece.packed
        part = formats.pack(form, flat.view(spec.stored))[name].contiguous()
    return part.reshape(-1).view(torch.uint8).numpy().data
