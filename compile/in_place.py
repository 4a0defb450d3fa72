"""How the bytes of a bundle's weights come about: what a loader can read straight into a device's buffer.

Counted after the layout that the operator really takes: experts that are stored as MXFP4 and read in tiles are made
anew, though none of their numbers change.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kimi_graph.spec import ParamSpec

from .bundle import Bundle
from .making import Maker, Weight
from .parts import part_files

IN_PLACE, CUT, MADE = "in place", "cut", "made"
MEANING = {
    IN_PLACE: "one range of bytes of each checkpoint tensor that they are of",
    CUT: "bytes of the checkpoint, in more ranges: columns of matrices",
    MADE: "in another order, dtype or value",
}


@dataclass(frozen=True)
class Shares:
    """Bytes of all ranks, replicas once, by how they come about.

    Attributes:
        target: name. experts: their form. bytes: by `IN_PLACE`, `CUT` and `MADE`.
        why: of what is made, by what is done to it last.
    """

    target: str
    experts: str
    bytes: Mapping[str, int]
    why: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def text(self) -> str:
        """A line for each way, and for each reason."""
        lines = [f"for {self.target}, experts {self.experts}: {self.total:,} bytes, replicas once"]
        for how, meaning in MEANING.items():
            size = self.bytes.get(how, 0)
            lines.append(f"{how:<9}{size / max(1, self.total):>7.2%}{size:>22,}  {meaning}")
        lines += [f"  {size:,} by {why}" for why, size in sorted(self.why.items(), key=lambda item: -item[1])]
        return "\n".join(lines)

    def to_json(self) -> Any:
        return {"target": self.target, "experts": self.experts, "bytes": dict(self.bytes), "why": dict(self.why)}


def shares_of(maker: Maker, bundle: Bundle) -> Shares:
    """Of a bundle and a checkpoint, by headers alone."""
    sizes, why = Counter[str](), Counter[str]()
    ways = {name: way_of(maker, name, bundle.weights["weights"][name]["dtype"]) for name in maker.weights}
    for file in part_files(bundle):
        for name, held in file.held.items():
            how, reason = ways[name]
            sizes[how] += held.bytes
            if reason:
                why[reason] += held.bytes
    manifest = bundle.manifest
    return Shares(manifest["target"]["name"], manifest["weights"]["experts"], sizes, why)


def way_of(maker: Maker, name: str, dtype: str) -> tuple[str, str]:
    """How a weight comes about, and of one that is made, by what.

    Args:
        dtype: as the graph reads it.
    """
    weight = maker.weights[name]
    spec = maker.specs[weight.path]
    if reasons := list(_reasons(maker, weight, spec, dtype)):
        return MADE, reasons[0]
    runs = _runs(weight)
    held = math.prod(weight.local) / math.prod(spec.stored) if len(spec.source) > 1 else 1
    return (IN_PLACE if runs <= max(1, held) else CUT), ""


def _reasons(maker: Maker, weight: Weight, spec: ParamSpec, dtype: str) -> Iterator[str]:
    """What changes the bytes of a weight or their order, the last of it first."""
    words = {"tile": "tiles (FRACTAL_NZ)", "permute": "another order of dimensions"}
    changes = [s for s in weight.steps if s.kind not in ("view", "slice")]
    for step in reversed(changes):
        yield words.get(step.kind, f"{step.kind} {step.args[0]}" if step.kind == "cast" else step.kind)
    place = maker.checkpoint.names.find(spec.source[0])
    assert place is not None, "the audit has found every tensor"
    stored = str(maker.checkpoint.tensors[place.names[0]].dtype).removeprefix("torch.")
    if weight.form and place.format != weight.form:
        yield f"{place.format or stored} to {weight.form}"
    elif not weight.form and place.format is not None:
        yield f"{place.format} to {dtype}"
    elif not weight.form and stored != dtype:
        yield f"{stored} to {dtype}"
    if math.prod(weight.local) * math.prod(weight.ways) != spec.numel:
        yield "zeros or copies of experts beside"


def _runs(weight: Weight) -> int:
    """Ranges of bytes, of the parameter as one tensor, that a part is."""
    size, runs = list(weight.local), 1
    whole = [n * ways for n, ways in zip(weight.local, weight.ways, strict=True)]
    for step in weight.steps:
        if step.kind == "slice":
            dim, first, last = step.args
            size[dim] = last - first
    outermost = max((dim for dim in range(len(size)) if size[dim] != whole[dim]), default=0)
    for dim in range(outermost):
        runs *= size[dim]
    return runs
