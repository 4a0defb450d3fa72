"""`kimi-graph check`: does a checkpoint hold a model? From its index and headers alone, or from the index alone."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from . import tree
from .audit import Audit, audit_names
from .checkpoint import Checkpoint, read_description
from .compile import weight_formats
from .compile.weight_formats import Choice, Loss
from .config import ModelConfig
from .errors import CheckpointError
from .finite import said, tensors_not_finite
from .headers import (
    MAX_INDEX,
    SHOWN,
    Stored,
    counted,
    find_files,
    inside,
    read_header,
    read_index,
    read_listed,
    without_gc,
)
from .models import model_specs
from .models.counts import PARTS, part_of
from .naming import Names
from .progress import Notify, silent
from .read_config import read_json


@dataclass(frozen=True, kw_only=True)
class Component:
    """What a kind of parameter has: their number of elements, tensors and bytes in the file, and how they are stored
    (number of the model's tensors by format or dtype)."""

    name: str
    parameters: int
    tensors: int
    bytes: int
    schemes: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A checkpoint against a model.

    Attributes:
        files: how many files there are headers of, and how many the index names; headers of none: only names were seen.
        values: whether weights were read.
        not_finite: of those, tensors that have NaN or infinity, with how many numbers of theirs.
        faults: what keeps the files from being read at all.
        notes: what else is worth knowing.
    """

    source: str
    model: str
    files: tuple[int, int]
    components: tuple[Component, ...]
    audit: Audit
    faults: tuple[str, ...]
    notes: tuple[str, ...]
    choices: tuple[Choice, ...] = ()
    loss: Loss | None = None
    names: tuple[str, ...] = field(default=weight_formats.NAMES)
    values: bool = False
    not_finite: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.audit.ok and not self.faults and not self.not_finite

    @property
    def summary(self) -> str:
        total = sum(c.tensors for c in self.components)
        seen = f"headers of {self.files[0]} files" if self.files[0] else "names alone"
        if not self.passed:
            a = self.audit
            kinds = (("missing", a.missing), ("unexpected", a.unexpected), ("of a wrong shape", a.shapes))
            kinds = (*kinds, ("of a wrong dtype", a.dtypes), ("with NaN or infinity", self.not_finite))
            counts = [f"{len(x):,} {what}" for what, x in kinds if x]
            return f"{self.source} does not hold {self.model}: {', '.join(counts) or self.faults[0]}"
        return f"{self.source} holds {self.model}: {total:,} tensors, by {seen}{', all finite' if self.values else ''}"

    def text(self) -> str:
        rows = [*self.components, _total(self.components)]
        lines = [f"{'':<16}{'parameters':>19}{'tensors':>10}{'bytes':>20}  stored as"]
        lines += [f"{c.name:<16}{c.parameters:>19,}{c.tensors:>10,}{c.bytes:>20,}  {_schemes(c)}" for c in rows]
        if self.audit.disagreements:
            lines += ["", "read as the file has it:", *(f"    {line}" for line in self.audit.disagreements)]
        if self.audit.draft:
            lines += ["", f"{self.audit.draft} tensors of draft layers are not read."]
        lines += [f"note: {note}" for note in self.notes]
        if self.choices:
            lines += [
                "",
                "weights (--weights-format; bytes, chip, whether graphs can have it, what becomes of the experts):",
            ]
            lines += [f"    {line}" for line in [*weight_formats.table(self.choices), *self._loss()]]
        said = self.faults[:1] if self.audit.ok else ()  # the summary says it
        lines += [f"fault: {fault}" for fault in self.faults if fault not in said]
        if not self.audit.ok:
            lines += ["", str(self.audit)]
        if self.not_finite:
            lines += ["", counted("tensors have NaN or infinity", self.not_finite)]
        return "\n".join(lines)

    def _loss(self) -> list[str]:
        if (loss := self.loss) is None:
            return []
        changes = f"{loss.mean:.2%} of their root mean square, at most {loss.worst:.2%}"
        return [f"{self.names[0]} changes weights by {changes} (of {loss.matrices} matrices of experts)"]

    def to_json(self) -> Any:
        a = self.audit
        return {
            "source": self.source,
            "model": self.model,
            "passed": self.passed,
            "files": {"read": self.files[0], "named": self.files[1]},
            "components": [{**vars(c), "schemes": dict(c.schemes)} for c in self.components],
            "missing": a.missing,
            "unexpected": a.unexpected,
            "shapes": a.shapes,
            "dtypes": a.dtypes,
            "not_finite": self.not_finite,
            "draft": a.draft,
            "disagreements": a.disagreements,
            "faults": self.faults,
            "notes": self.notes,
            "weights_formats": [vars(c) for c in self.choices],
            "loss": None if self.loss is None else vars(self.loss),
        }


def check_checkpoint(
    source: str | Path,
    config: ModelConfig,
    weights_format: str | None = None,
    values: bool = False,
    progress: Notify = silent,
) -> Report:
    """Audit a checkpoint.

    Args:
        source: its folder; or an index, of which only the names are looked at.
        weights_format: say what this one costs, and measure what it loses where the weights are there; None: list all.

        values: read the weights too, of the files that are there, and look for NaN and infinity.

    Raises:
        KimiGraphError: there is no checkpoint, or it cannot be read.
    """
    source = Path(source)
    folder = folder_of(source)
    with without_gc():
        tensors, files, faults, notes = _listed(source)
        specs = model_specs(config)
        described = read_description(folder)
        found = audit_names(specs, tensors, Names(tensors), config.dtype, source, config, described)
        components = _components(specs, found)
    if not files[0] and found.ok:
        notes += _size_note(source, sum(c.bytes for c in components))
    names = (weights_format,) if weights_format else weight_formats.NAMES
    rows, loss = (), None
    if found.ok:
        stored = found.stored_formats()
        rows = tuple(c for c in weight_formats.choices(config, specs, stored) if c.name in names)
        if weights_format and files[0] and not faults:
            loss = weight_formats.measure_loss(config, Checkpoint.open(folder), weights_format)
    read = {name: t for name, t in tensors.items() if t is not None} if values else {}
    if values and not read:
        notes = [*notes, "no file is here whose values could be read."]
    bad = [f"{n}: {said(count, prod(read[n].shape))}" for n, count in tensors_not_finite(read, progress)]
    return Report(
        source=str(source),
        model=config.name,
        files=files,
        components=components,
        audit=found,
        faults=tuple(faults),
        notes=tuple(notes),
        choices=rows,
        loss=loss,
        names=names,
        values=bool(read),
        not_finite=tuple(bad),
    )


def folder_of(source: Path) -> Path:
    """Where the files lie that go with a checkpoint's folder or index."""
    return source if source.is_dir() else source.parent


def _listed(source: Path) -> tuple[dict[str, Stored | None], tuple[int, int], list[str], list[str]]:
    """Tensors, without what a header would say where it is not there; numbers of files; faults and notes."""
    if not source.is_dir():
        if not source.is_file():
            raise CheckpointError(f"{source}: does not exist; expected a checkpoint's folder, or its index.")
        by_file = read_index(source)
        return dict.fromkeys(n for names in by_file.values() for n in names), (0, len(by_file)), [], []
    folder = source.resolve()
    index, single = find_files(folder)
    if single is not None:
        return dict(read_header(inside(folder, single.name))), (1, 1), [], []
    assert index is not None
    by_file = read_index(index)
    absent = [file for file in sorted(by_file) if not (folder / Path(file).name).exists()]
    tensors: dict[str, Stored | None] = {}
    for file, names in sorted(by_file.items()):
        tensors |= dict.fromkeys(names) if file in absent else read_listed(inside(folder, file), names)
    faults, notes = [], []
    if len(absent) == len(by_file):
        notes = [f"none of the {len(by_file)} files is here: names were looked at, not dtypes and shapes."]
    elif absent:
        more = f", ... and {len(absent) - SHOWN} more" if len(absent) > SHOWN else ""
        are = "is" if len(absent) == 1 else "are"
        faults = [f"{len(absent)} of {len(by_file)} files {are} not here: {', '.join(absent[:SHOWN])}{more}."]
    return tensors, (len(by_file) - len(absent), len(by_file)), faults, notes


def _size_note(source: Path, size: int) -> list[str]:
    """Where only names are known, the index's own sum tells whether the tensors are of the model's size."""
    index = source if source.is_file() else find_files(source)[0]
    assert index is not None
    metadata = read_json(index, MAX_INDEX, CheckpointError).get("metadata")
    said = metadata.get("total_size") if isinstance(metadata, dict) else None
    if said is not None and type(said) is not int:
        return [f"the index does not say a size: its total_size is {str(said)[:40]!r}."]
    if said == size:
        return [f"the index says {size:,} bytes, as the model's tensors have."]
    return [] if said is None else [f"the index says {said:,} bytes, the model's tensors have {size:,}."]


def _components(specs: Any, found: Audit) -> tuple[Component, ...]:
    rows: dict[str, list[Any]] = {}
    for path, spec in tree.items(specs):
        row = rows.setdefault(part_of(path), [0, 0, 0, Counter()])
        tally = found.tallies[path]
        row[0] += spec.numel
        row[1] += tally.tensors
        row[2] += tally.bytes
        row[3].update(tally.schemes)
    return tuple(
        Component(name=name, parameters=row[0], tensors=row[1], bytes=row[2], schemes=row[3])
        for name, row in sorted(rows.items(), key=lambda item: PARTS.index(item[0]))
    )


def _total(components: tuple[Component, ...]) -> Component:
    schemes: Counter[str] = Counter()
    for c in components:
        schemes.update(c.schemes)
    sums = (sum(x) for x in zip(*((c.parameters, c.tensors, c.bytes) for c in components), strict=True))
    parameters, tensors, size = sums
    return Component(name="total", parameters=parameters, tensors=tensors, bytes=size, schemes=schemes)


def _schemes(c: Component) -> str:
    names = {"?": "plain"}
    return ", ".join(f"{names.get(s, s)} {count:,}" for s, count in sorted(c.schemes.items())) or "-"
