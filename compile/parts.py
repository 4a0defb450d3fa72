"""Which part of every weight each rank of a bundle holds, and in which file each part lies, once.

Ranks that hold the same part of a weight share a file: what one rank alone holds is in `rank_0003`, what ranks along
`data` have in common in `shared_data_0003`, by the first of them. So a host needs the files of its own ranks alone, and
replicas are there once. In a file every weight starts at a multiple of 512 bytes: GE loads such a file in one piece.
Source: fact sheets of torchair, section 5, and of Ascend, D.2.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kimi_graph.errors import BundleError
from kimi_graph.parallel.mesh import Axes, Mesh

from .bundle import MANIFEST, Bundle
from .mesh_manifest import as_dims

ALIGNMENT = 512  # bytes


def aligned(size: int) -> int:
    """`size` rounded up to where the next weight may start."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Held:
    """A part of a weight in a file.

    Attributes:
        index: which part of each dimension of the parameter. offset, bytes: where it lies.
    """

    index: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class PartFile:
    """What some ranks hold in common, and no others.

    Attributes:
        stem: name of the file, without the hash of its content. ranks: that read all of it.
        held: by weight.
    """

    stem: str
    ranks: tuple[int, ...]
    held: Mapping[str, Held]

    @property
    def bytes(self) -> int:
        """Of the file."""
        return max((aligned(h.offset + h.bytes) for h in self.held.values()), default=0)


def mesh_of(bundle: Bundle) -> Mesh:
    """The ranks of a bundle; one, where it has no mesh."""
    entry = bundle.manifest["mesh"]
    return Mesh() if entry is None else Mesh.parse(entry["text"])


def dims_of(entry: Mapping[str, Any]) -> tuple[Axes, ...]:
    """Mesh axes that split each dimension of the parameter of a plan's entry."""
    return as_dims(entry.get("over", [[] for _ in entry["shape"]]))


def part_files(bundle: Bundle) -> list[PartFile]:
    """Every file, in the order of their ranks."""
    mesh, plan = mesh_of(bundle), bundle.weights["weights"]
    alike: dict[tuple[tuple[int, ...], Axes], list[str]] = {}
    for name, stages in sorted(_stages(bundle).items()):
        used = {axis for dim in dims_of(plan[name]) for axis in dim}
        alike.setdefault((stages, _others(mesh, used)), []).append(name)
    files = [f for (stages, whole), names in alike.items() for f in _files(mesh, plan, stages, whole, names)]
    return sorted(files, key=lambda f: (f.ranks, f.stem))


def _stages(bundle: Bundle) -> dict[str, tuple[int, ...]]:
    """The stages whose graphs read each weight: one, but for an embedding that is the head too."""
    found: dict[str, set[int]] = {}
    for graph in bundle.manifest["graphs"]:
        for name in graph["weights"]:
            if name not in bundle.weights["weights"]:
                raise BundleError(f"{bundle.folder / MANIFEST}: weight {name} of {graph['name']} has no recipe.")
            found.setdefault(name, set()).add(graph.get("stage", 0))
    return {name: tuple(sorted(stages)) for name, stages in found.items()}


def _others(mesh: Mesh, used: Iterable[str]) -> Axes:
    """Axes along which ranks hold the same."""
    return tuple(a for a, size in mesh.axes.items() if size > 1 and a != "pipe" and a not in used)


def _files(
    mesh: Mesh, plan: Mapping[str, Any], stages: tuple[int, ...], whole: Axes, names: list[str]
) -> Iterator[PartFile]:
    """The files of weights that the same stages read and the same axes split."""
    world = mesh.stage.world
    for group in mesh.stage.groups(whole):
        ranks = tuple(stage * world + r for stage in stages for r in group)
        held, end = {}, 0
        for name in names:
            index = tuple(mesh.index(ranks[0], axes) for axes in dims_of(plan[name]))
            held[name] = Held(index, end, plan[name]["bytes"])
            end = aligned(end + plan[name]["bytes"])
        along = ".".join((("pipe",) if len(stages) > 1 else ()) + whole)
        kind = f"shared_{along}" if along else "rank"
        yield PartFile(f"{kind}_{ranks[0]:04}", ranks, held)
