"""Makes parts of graph weights from a checkpoint by their recipes, a few megabytes at a time.

A parameter is read once, in blocks, however many ranks hold parts of it. What a block becomes is handed on at once with
its place in the part, to a file (`write_weights`) or a buffer (`Maker.part`); the bytes of a part come in order. How
small blocks may be, the recipe says (`Weight.grain`).
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kimi_graph import tree
from kimi_graph.checkpoint import Checkpoint, audit, load_packed, param_dtype, plain_tensor
from kimi_graph.config import ModelConfig
from kimi_graph.errors import BundleError
from kimi_graph.models import decoder
from kimi_graph.parallel.placement import with_zeros
from kimi_graph.spec import ParamSpec

from . import recipe
from .bundle import MANIFEST, WEIGHTS, Bundle
from .loads import Loads, expert_slots
from .manifest import layout_in
from .parts import dims_of, mesh_of
from .recipe import Step

BLOCK = 4 << 20  # bytes of a parameter that are in memory at once, where its recipe allows that: what caches hold
ELEMENTWISE = ("view", "cast", "exp", "neg")  # steps that keep elements in their order

Range = tuple[int, int]  # from the first to before the last


class Wanted(NamedTuple):
    """A part to make: of a graph weight, part `index` of each dimension of its parameter."""

    name: str
    index: tuple[int, ...]


Sink = Callable[[Wanted, int, Tensor], None]  # a part, and bytes of it from this byte on


@dataclass(frozen=True)
class Weight:
    """How a graph weight is made.

    Attributes:
        path: of the parameter. form, part: that it is packed in, and what of it; "" where it is plain.
        steps: after the packing. ways: into how many parts each dimension of the parameter is cut.
        local: shape of a part of the parameter. bytes: of a part of the weight.
    """

    path: str
    form: str
    part: str
    steps: tuple[Step, ...]
    ways: tuple[int, ...]
    local: tuple[int, ...]
    bytes: int

    @functools.cached_property
    def grain(self) -> str:
        """What can be made by itself: "elements", any run of them; "rows", of one index of the first dimension; or the
        "whole" part alone."""
        if not self.form and all(step.kind in ELEMENTWISE for step in self.steps):
            return "elements"
        return "rows" if all(map(self._keeps_rows, self.steps)) else "whole"

    def _keeps_rows(self, step: Step) -> bool:
        """Whether a step, after others that do, works on each index of the first dimension by itself."""
        if step.kind == "slice":
            return step.args[0] > 0
        return step.kind not in ("permute", "view") or step.args[0] == {"permute": 0, "view": self.local[0]}[step.kind]

    def apply(self, x: Tensor) -> Tensor:
        """The steps, on a part of the parameter or on some rows or elements of it."""
        if self.grain == "elements":
            return recipe.apply([s for s in self.steps if s.kind != "view"], x)
        if len(x) == self.local[0]:
            return recipe.apply(self.steps, x)
        return recipe.apply([Step("view", (len(x), *s.args[1:])) if s.kind == "view" else s for s in self.steps], x)


@dataclass(frozen=True)
class Task:
    """Parts of one parameter that are made together: of all its rows, or of a stack of tensors of some."""

    path: str
    rows: Range
    parts: tuple[Wanted, ...]
    bytes: int


@dataclass
class Maker:
    """Makes the parts of a bundle's weights.

    Attributes:
        dtype: the model's. specs: of the model, by path. weights: by name.
        slots: which expert is in each slot, of parameters that hold copies of some, by path.
    """

    checkpoint: Checkpoint
    dtype: torch.dtype
    specs: Mapping[str, ParamSpec]
    weights: Mapping[str, Weight]
    slots: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @staticmethod
    def open(bundle: Bundle, config: ModelConfig, checkpoint: Checkpoint, loads: Loads | None = None) -> "Maker":
        """Of a bundle's model, whose config is `config`.

        Args:
            loads: by which copies of experts are chosen, see `loads`.

        Raises:
            CheckpointError: the checkpoint does not hold it. BundleError: the plan has weights that it has not, or
                loads are of another model.
        """
        layout = layout_in(bundle.manifest, config, bundle.folder / MANIFEST)
        config = config if layout is None else layout.config
        model = decoder.model_specs(config)
        audit(model, checkpoint, config.dtype, config).check()
        specs = dict(tree.items(model))
        ranks = 1 if layout is None else layout.rules("decode").ways("experts")
        return Maker(
            checkpoint, config.dtype, specs, planned_weights(bundle, specs), expert_slots(config, ranks, loads)
        )

    def tasks(self, wanted: Iterable[Wanted]) -> list[Task]:
        """Parts by what they are read from, in the order in which the checkpoint's files have it."""
        together: dict[tuple[str, Range], list[Wanted]] = {}
        for part in wanted:
            together.setdefault((self.weights[part.name].path, self._rows(part)), []).append(part)
        tasks = [
            Task(path, rows, tuple(parts), sum(self.weights[p.name].bytes for p in parts))
            for (path, rows), parts in together.items()
        ]
        return sorted(tasks, key=lambda task: (self._place(task.path), task.rows))

    def _rows(self, part: Wanted) -> Range:
        """The rows of a parameter that a part is read from: of a single tensor all, as others read it too."""
        weight, first = self.weights[part.name], part.index[0]
        if len(self.specs[weight.path].source) == 1 or weight.grain == "whole":
            return (0, weight.local[0] * weight.ways[0])
        return (first * weight.local[0], (first + 1) * weight.local[0])

    def _place(self, path: str) -> tuple[str, int]:
        place = self.checkpoint.names.find(self.specs[path].source[0])
        assert place is not None, "the audit has found every tensor"
        stored = self.checkpoint.tensors[place.names[0]]
        return stored.file.name, stored.begin

    def make(self, task: Task, sink: Sink) -> None:
        """Make the parts of a task, from the first byte of each to its last.

        Raises:
            KimiGraphError: the checkpoint holds what it may not.
        """
        weights = [self.weights[part.name] for part in task.parts]
        shape = tuple(n * ways for n, ways in zip(weights[0].local, weights[0].ways, strict=True))
        grains, row = {w.grain for w in weights}, math.prod(shape[1:])
        room = BLOCK // param_dtype(self.specs[task.path], self.dtype).itemsize
        if "whole" in grains:
            room = row * shape[0]
        elif "rows" in grains:
            room = max(room, row)
        source = _Source(self, task.path, shape)
        for block in blocks(task.rows, shape[1:], room):
            read = functools.cache(functools.partial(source.read, block))
            for part, weight in zip(task.parts, weights, strict=True):
                _make_of_block(part, weight, block, read, sink)

    def part(self, name: str, index: tuple[int, ...]) -> Tensor:
        """The bytes of one part: a recipe that runs at load, straight from the checkpoint's files."""
        whole = torch.empty(self.weights[name].bytes, dtype=torch.uint8)

        def keep(_: Wanted, at: int, made: Tensor) -> None:
            whole[at : at + len(made)] = made

        for task in self.tasks([Wanted(name, index)]):
            self.make(task, keep)
        return whole


def planned_weights(bundle: Bundle, specs: Mapping[str, ParamSpec]) -> dict[str, Weight]:
    """The weights of a bundle's plan; `specs`: of its model.

    Raises:
        BundleError: one is not of the model.
    """
    mesh, weights = mesh_of(bundle), {}
    for name, entry in bundle.weights["weights"].items():
        path, steps = entry["parameter"], recipe.from_json(entry["steps"])
        if path not in specs:
            raise BundleError(f"{bundle.folder / WEIGHTS}: {name}: the model has no parameter {path!r}.")
        ways = tuple(mesh.size(axes) for axes in dims_of(entry))
        local = tuple(n // w for n, w in zip(entry.get("padded", specs[path].shape), ways, strict=True))
        form, part = steps[0].args if recipe.form(steps) else ("", "")
        weights[name] = Weight(path, form, part, steps[1:] if form else steps, ways, local, entry["bytes"])
    return weights


# ---- blocks ----------------------------------------------------------------------------------------------------------


def blocks(rows: Range, inner: Sequence[int], room: int) -> Iterator[tuple[Range, ...]]:
    """`[rows, *inner]` in runs of at most `room` elements, in order: single indices of leading dimensions and a range.

    A run has at least one element of the last dimension.
    """
    size = math.prod(inner)
    if size <= room or not inner:
        step = max(1, room // max(1, size))
        for first in range(*rows, step):
            yield ((first, min(first + step, rows[1])),)
    else:
        for row in range(*rows):
            for rest in blocks((0, inner[0]), inner[1:], room):
                yield ((row, row + 1), *rest)


def _make_of_block(
    part: Wanted, weight: Weight, block: tuple[Range, ...], read: Callable[[str], dict[str, Tensor]], sink: Sink
) -> None:
    """What a block gives to a part: nothing, where the part has nothing of it."""
    own = [(i * n, (i + 1) * n) for i, n in zip(part.index, weight.local, strict=True)]
    both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(block, own, strict=False)]
    if any(a >= b for a, b in both):
        return
    x = read(weight.form)[weight.part]
    for dim, ((a, b), (first, _)) in enumerate(zip(both, block, strict=True)):
        x = x.narrow(dim, a - first, b - a)
    if not weight.form:  # what is packed is cut by rows alone
        for dim in range(len(both), len(own)):
            x = x.narrow(dim, own[dim][0], weight.local[dim])
    made = weight.apply(x).contiguous().view(-1).view(torch.uint8)
    before = sum((a - own[dim][0]) * math.prod(weight.local[dim + 1 :]) for dim, (a, _) in enumerate(both))
    sink(part, before * weight.bytes // math.prod(weight.local), made)


class _Source:
    """A parameter with the zeros that pad its first dimension, and with experts in their slots; read in blocks."""

    def __init__(self, maker: Maker, path: str, shape: tuple[int, ...]) -> None:
        self.maker, self.spec, self.shape, self.slots = maker, maker.specs[path], shape, maker.slots.get(path)
        assert shape[1:] == self.spec.shape[1:], f"{path}: only rows are padded"
        self.dtype = param_dtype(self.spec, maker.dtype)
        self.each = len(self.spec.source) // self.spec.shape[0]  # tensors of a row; 0: the tensor has all rows
        self.whole = functools.lru_cache(maxsize=1)(self._whole)

    def read(self, block: tuple[Range, ...], form: str) -> dict[str, Tensor]:
        """A block by parts of a format; plain, it is the part ""."""
        return self._packed(*block[0], form) if form else {"": self._plain(block)}

    def _tensors(self, first: int, last: int) -> tuple[str, ...]:
        """The tensors of some rows of a stack, in order; none for those that pad it."""
        rows = self.slots[first:last] if self.slots else range(first, min(last, self.spec.shape[0]))
        return tuple(name for row in rows for name in self.spec.source[row * self.each : (row + 1) * self.each])

    def _packed(self, first: int, last: int, form: str) -> dict[str, Tensor]:
        names = self._tensors(first, last) or self.spec.source[: self.each]
        some = replace(self.spec, shape=(len(names) // self.each, *self.spec.shape[1:]), source=names)
        parts = load_packed(some, self.maker.checkpoint, form)
        if not self._tensors(first, last):
            parts = {name: x[:0] for name, x in parts.items()}
        return {name: with_zeros(x, (last - first, *x.shape[1:])) for name, x in parts.items()}

    def _plain(self, block: tuple[Range, ...]) -> Tensor:
        sizes = [b - a for a, b in block] + list(self.shape[len(block) :])
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(block))]
        begin = sum(a * stride for (a, _), stride in zip(block, strides, strict=True))
        pieces = [self._elements(*run) for run in self._runs(begin, begin + math.prod(sizes))]
        flat = pieces[0] if len(pieces) == 1 else torch.cat([*pieces, torch.empty(0, dtype=self.dtype)])
        return with_zeros(flat, (math.prod(sizes),)).view(sizes)

    def _runs(self, begin: int, end: int) -> Iterator[tuple[str, int, int]]:
        """The tensors that hold some elements of the parameter, and which of theirs."""
        if not self.each:
            end = min(end, self.spec.numel)
            yield from [(self.spec.source[0], begin, end)] if begin < end else []
            return
        row, size = math.prod(self.shape[1:]), math.prod(self.shape[1:]) // self.each
        first = begin // row
        for at, name in enumerate(self._tensors(first, -(-end // row))):
            a, b = first * row + at * size, first * row + (at + 1) * size
            if begin < b and a < end:
                yield name, max(begin, a) - a, min(end, b) - a

    def _elements(self, name: str, first: int, last: int) -> Tensor:
        place = self.maker.checkpoint.names.find(name)
        assert place is not None, "the audit has found every tensor"
        if place.format is not None or self.spec.padding:
            return self.whole(name)[first:last]
        return self.maker.checkpoint.elements(place.names[0], first, last).to(self.dtype)

    def _whole(self, name: str) -> Tensor:
        return plain_tensor(self.spec, name, self.maker.checkpoint, self.dtype).reshape(-1)
