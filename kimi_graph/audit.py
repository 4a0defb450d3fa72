"""Compare a checkpoint with a model, from headers alone or from names alone: what is missing, unexpected or different,
and how each weight is stored. What a file holds counts; where its config says otherwise, that is said, not guessed.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import tree
from .config import ModelConfig, QuantConfig, is_draft
from .errors import CheckpointError
from .formats import FORMATS, Shape, layout
from .headers import CODES, Stored, counted, without_gc
from .naming import Names, Place
from .spec import ParamSpec

# Released in float32 or in the model's dtype: both are read. By the end of the name, for what has no fixed dtype.
EITHER = ("conv1d.weight", "o_norm.weight")


@dataclass(frozen=True)
class Tally:
    """How a checkpoint stores one parameter.

    Attributes:
        schemes: number of the model's tensors by format or dtype ("mxfp4", "BF16"; "?" where only the name is known).
        tensors: number of the checkpoint's.
        bytes: of those; computed from the model where only names are known.
    """

    schemes: Mapping[str, int]
    tensors: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Audit:
    """How the tensors of a checkpoint differ from those of a model; each list has a line per tensor.

    Attributes:
        draft: tensors of draft layers, which are not read.
        tallies: by parameter.
        disagreements: where the file is not what its config says; it is read as it is.
    """

    folder: Path
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shapes: tuple[str, ...]
    dtypes: tuple[str, ...]
    draft: int = 0
    tallies: Mapping[str, Tally] = field(default_factory=dict, repr=False)
    disagreements: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether names, shapes and dtypes are the model's."""
        return not (self.missing or self.unexpected or self.shapes or self.dtypes)

    def __str__(self) -> str:
        kinds = (
            ("missing, the model needs them", self.missing),
            ("unexpected, the model has no such parameter", self.unexpected),
            ("of a wrong shape", self.shapes),
            ("of a wrong dtype", self.dtypes),
        )
        lines = [f"{self.folder}: {counted(f'tensors {kind}', found)}" for kind, found in kinds if found]
        return "\n".join(lines) or f"{self.folder}: every tensor is as the model needs it."

    def stored_formats(self) -> dict[str, str]:
        """Format of the parameters that are stored quantised, by path.

        Raises:
            CheckpointError: tensors of one parameter are stored in several ways.
        """
        packed = {path: tally.schemes for path, tally in self.tallies.items() if tally.schemes.keys() & FORMATS.keys()}
        for path, schemes in packed.items():
            if len(schemes) > 1:
                raise CheckpointError(f"{path}: its tensors are stored in several ways: {', '.join(schemes)}.")
        return {path: next(iter(schemes)) for path, schemes in packed.items()}

    def check(self) -> None:
        """Refuse a checkpoint that differs.

        Raises:
            CheckpointError: names, shapes or dtypes are not the model's; the message counts all differences.
        """
        if not self.ok:
            raise CheckpointError(str(self))


def audit_names(
    specs: Any,
    tensors: Mapping[str, Stored | None],
    names: Names,
    dtype: torch.dtype,
    folder: Path,
    config: ModelConfig | None = None,
    described: Mapping[str, Any] | None = None,
) -> Audit:
    """Compare names and headers with a tree of specs: both must have the same tensors, of the same shapes and dtypes.

    Args:
        tensors: by name; None where no header says more.
        dtype: the model's, of parameters that do not fix their own.
        config: tells draft layers; and what it says of quantised weights is held against the file, or rather what
            `described` says, the content of msModelSlim's `quant_model_description.json`, where there is one.
    """
    found = _Findings(tensors, dtype, config, described)
    with without_gc():
        tallies = {path: found.parameter(spec, names) for path, spec in tree.items(specs)}
        rest = sorted(tensors.keys() - found.used)
    unexpected = rest if config is None else [name for name in rest if not is_draft(config, name)]
    return Audit(
        folder=folder,
        missing=tuple(found.missing),
        unexpected=tuple(unexpected),
        shapes=tuple(found.shapes),
        dtypes=tuple(found.dtypes),
        draft=len(rest) - len(unexpected),
        tallies=tallies,
        disagreements=tuple(_in_words(found.otherwise, "config" if described is None else DESCRIPTION)),
    )


class _Findings:
    """Everything noted while the parameters are gone through."""

    def __init__(
        self,
        tensors: Mapping[str, Stored | None],
        dtype: torch.dtype,
        config: ModelConfig | None,
        described: Mapping[str, Any] | None,
    ) -> None:
        self.tensors, self.dtype, self.config, self.described = tensors, dtype, config, described
        self.used: set[str] = set()
        self.wanted: set[str] = set()
        self.missing: list[str] = []
        self.shapes: list[str] = []
        self.dtypes: list[str] = []
        self.right: dict[Any, int] = {}  # bytes of a tensor of a kind that was found right: experts are all alike
        self.otherwise: Counter[tuple[str, str | None, str]] = Counter()  # kind of module, said, found

    def parameter(self, spec: ParamSpec, names: Names) -> Tally:
        schemes: dict[str, int] = {}
        tensors = size = 0
        said = None if self.config is None else said_format(self.config, spec.source[0], spec.stored)
        if (tally := self._stack(spec, said, names)) is not None:
            return tally
        lookup, find, right = self.tensors.get, names.find, self.right
        used: list[str] = []
        for name in spec.source:
            place = find(name)
            if place is None:
                self.missing.append(name)
                continue
            form, held, extras = place
            stored = [lookup(n) for n in held]
            used += held
            used += extras
            others = [lookup(n) for n in extras] if extras else ()
            kind = (form, spec.stored, spec.dtype, *[s and s[1:3] for s in (*stored, *others)])
            if kind not in right:
                self._compare(kind, spec, name, place, stored)
            scheme = form or ("?" if stored[0] is None else CODES[stored[0].dtype])
            schemes[scheme] = schemes.get(scheme, 0) + 1
            if self.described is not None:
                said = _described_format(self.described, place)
            if said != form and self.config is not None:
                self.otherwise[re.sub(r"\.\d+\.", ".*.", name.removesuffix(".weight")), said, scheme] += 1
            tensors += len(held) + len(extras)
            size += right[kind] if kind in right else self._bytes(spec, place, stored)
        self._use(spec, used)
        return Tally(schemes, tensors, size)

    def _use(self, spec: ParamSpec, used: Collection[str]) -> None:
        twice = self.wanted.intersection(spec.source)
        assert not twice, f"two parameters read {min(twice)}"
        self.wanted.update(spec.source)
        self.used.update(used)

    def _stack(self, spec: ParamSpec, said: str | None, names: Names) -> Tally | None:
        """The same for a stack of quantised matrices, all at once, if they are as alike as experts are; else None.

        Names and headers of Kimi K3 are 99.5 % experts; one by one they would take most of the time.
        """
        place = names.find(spec.source[0])
        stem = spec.source[0].removesuffix("weight")
        if len(spec.source) == 1 or place is None or place.format is None or place.extras or self.described is not None:
            return None
        if (said != place.format and self.config is not None) or not all(n.startswith(stem) for n in place.names):
            return None
        used: list[str] = []
        kinds = []
        for part in place.names:
            column = [name[:-6] + part[len(stem) :] for name in spec.source]
            kind = {s and s[1:3] for s in map(self.tensors.get, column)}
            if len(kind) != 1 or not self.tensors.keys() >= set(column):
                return None
            used += column
            kinds += kind
        size = self.right.get((place.format, spec.stored, spec.dtype, *kinds))
        if size is None:  # the first of its kind is looked at one by one
            return None
        self._use(spec, used)
        return Tally({place.format: len(spec.source)}, len(used), size * len(spec.source))

    def _compare(self, kind: Any, spec: ParamSpec, name: str, place: Place, stored: list[Stored | None]) -> None:
        absent = [n for n in place.names if n not in self.tensors]
        self.missing += absent
        if place.format is None:
            legal = [(_stored_dtypes(spec, name, self.dtype), (spec.stored,))]
        elif len(spec.stored) == 2:
            legal = [(p.dtypes, p.shapes(spec.stored[0], spec.stored[1])) for p in FORMATS[place.format].parts]
        else:
            self.shapes.append(f"{name}: found {place.format}, a format of matrices, expected {list(spec.stored)}")
            return
        before = len(self.shapes) + len(self.dtypes)
        for n, s, (dtypes, shapes) in zip(place.names, stored, legal, strict=True):
            if s is not None and not any(_same_shape(s.shape, shape) for shape in shapes):
                self.shapes.append(f"{n}: found {list(s.shape)}, expected {_either(list(map(list, shapes)))}")
            if s is not None and s.dtype not in dtypes:
                self.dtypes.append(f"{n}: found {CODES[s.dtype]}, expected {_either([CODES[d] for d in dtypes])}")
        fixed = place.format is not None or not name.endswith(EITHER)  # else legal dtypes depend on the name
        if fixed and not absent and len(self.shapes) + len(self.dtypes) == before:
            self.right[kind] = self._bytes(spec, place, stored)

    def _bytes(self, spec: ParamSpec, place: Place, stored: list[Stored | None]) -> int:
        if stored[0] is not None:
            held = (*stored, *(self.tensors[n] for n in place.extras))
            return sum([s.end - s.begin for s in held if s is not None])
        if place.format is None:
            return math.prod(spec.stored) * (spec.dtype or self.dtype).itemsize
        parts = layout(place.format, spec.stored).values()
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in parts)


def _same_shape(found: Shape, expected: Shape) -> bool:
    """Equal but for dimensions of size one, which writers add and drop."""
    return found == expected or [x for x in found if x != 1] == [x for x in expected if x != 1]


def _either(legal: list[Any]) -> str:
    return " or ".join(map(str, dict.fromkeys(map(str, legal))))


def _stored_dtypes(spec: ParamSpec, name: str, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """What a tensor may be stored in, the released dtype first."""
    if spec.dtype is not None:
        return (spec.dtype, dtype)
    return (dtype, torch.float32) if name.endswith(EITHER) else (dtype,)


# ---- what is said of quantised weights -------------------------------------------------------------------------------

DESCRIPTION = "quant_model_description.json"
# Types of that file by the format they are stored in here; what else the type says is about activations.
TYPES = {
    "FLOAT": None,
    "W8A8": "w8-static",
    "W8A8_DYNAMIC": "w8",
    "W8A8_MIX": "w8",
    "W8A16": "w8",
    "W4A4_DYNAMIC": "w8",
    "W4A8_DYNAMIC": "w4",
    "W4A8_MXFP": "w4-mx",
    "W4A4_MXFP4": "w4-mx",
}


def said_format(config: ModelConfig, name: str, stored: Shape) -> str | None:
    """The format that a config gives a tensor: that of all linear layers it does not except; None: not quantised."""
    quant, text = config.quant, config.names.prefix
    if quant is None or len(stored) != 2 or not name.endswith(".weight") or name.endswith("embed_tokens.weight"):
        return None
    if not name.startswith(text) or name.startswith(("vision_tower.", "mm_projector.")):
        return None  # the description stands in the text model's part of the file
    return None if _excepted(quant, name.removeprefix(text).removesuffix(".weight")) else quant.format


def _excepted(quant: QuantConfig, module: str) -> bool:
    """Whether a config's list of exceptions has this module: names, or `re:` and a pattern for its beginning."""
    return any(re.match(p[3:], module) if p.startswith("re:") else p == module for p in quant.ignore)


def _described_format(described: Mapping[str, Any], place: Place) -> str | None:
    said = str(described.get(place.names[0], "nothing"))
    return TYPES.get(said, said)


def _in_words(otherwise: Mapping[tuple[str, str | None, str], int], who: str) -> Iterator[str]:
    """A line for each kind of weight that is stored otherwise than is said; layers are counted together."""
    for (module, said, scheme), count in otherwise.items():
        has = "a plain tensor" if scheme == "?" else scheme
        yield f"{module}: {who} says {said or 'not quantised'}, file has {has}: {has} used ({count} tensors)"
