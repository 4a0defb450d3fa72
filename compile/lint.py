"""`kimi-graph lint`: what can be proved of a bundle from its files alone, without weights and without running anything.

One function per proof; each says what it has proved, or the first thing that is not so:

* files: hashes; manifest and weight plan are those of the graphs. Weights made ahead are of this bundle and have the
  sizes that their index says; they are not read.
* kernels: the project that builds operators of ours is whole, unchanged, and has those that graphs need.
* graphs: every graph against operator prototypes, limits and rules (`checks`).
* groups: each group is in the manifest, has every rank of its stages once, and no more ranks than one stage has.
* collectives: in each graph edges make one order of them; all ranks of a group issue the same ones with the same sizes.
* sums: along every mesh axis; each is taken once, and before what is not linear (`sums`).
* stages: what a stage reads an earlier one gives, with the same shape and dtype; no stage waits for a later one.
* made for: where a model, target, CANN release or mesh is given, that it is the bundle's (`expect`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_graph.config import ModelConfig
from kimi_graph.errors import BundleError, KimiGraphError
from kimi_graph.parallel import Mesh
from kimi_graph.progress import Notify, silent

from . import air
from .bundle import Bundle, as_written, open_bundle
from .checks import check_graph
from .executor.node import attrs_of
from .expect import Expected, bundle_config
from .ge_proto import ModelDef, OpDef, dtype_of, get_attr, results_of, shape_of, split_edge
from .manifest import check_claims, is_weight, target_of
from .mesh_manifest import as_dims
from .order import COLLECTIVE, order_collectives
from .places import group_of
from .prototypes import Prototypes
from .sums import check_sums, weight_dims
from .written import open_written

LOOSE = ("_", "input_layout_info", "output_layout_info")  # attributes that say nothing about what a node does


@dataclass(frozen=True)
class Proof:
    """A line of the report. `found`: what was proved, or what is not so."""

    name: str
    passed: bool
    found: str


@dataclass(frozen=True)
class LintReport:
    """All proofs of a bundle."""

    proofs: tuple[Proof, ...]

    @property
    def passed(self) -> bool:
        return all(p.passed for p in self.proofs)

    @property
    def summary(self) -> str:
        bad = next((p for p in self.proofs if not p.passed), None)
        return f"lint: {len(self.proofs)} proofs hold" if bad is None else f"{bad.name}: {bad.found}"

    def text(self) -> str:
        return "\n".join(f"{'ok' if p.passed else 'FAULT':<7}{p.name:<13}{p.found}" for p in self.proofs)

    def to_json(self) -> Any:
        proofs = [{"name": p.name, "passed": p.passed, "found": p.found} for p in self.proofs]
        return {"passed": self.passed, "proofs": proofs}


@dataclass(frozen=True)
class Files:
    """A bundle's content. `models`: by the graph's name."""

    bundle: Bundle
    config: ModelConfig
    models: dict[str, ModelDef]

    @property
    def graphs(self) -> list[dict[str, Any]]:
        return self.bundle.manifest["graphs"]

    @property
    def groups(self) -> dict[str, list[list[int]]]:
        mesh = self.bundle.manifest["mesh"]
        return {} if mesh is None else mesh["groups"]

    def phases(self) -> dict[str, list[dict[str, Any]]]:
        """Entries of the graphs by phase, first stage first."""
        found: dict[str, list[dict[str, Any]]] = {}
        for entry in sorted(self.graphs, key=lambda g: g.get("stage") or 0):
            found.setdefault(entry["phase"], []).append(entry)
        return found

    def ranks(self, stage: int) -> range:
        """Ranks of a stage."""
        stages = self.bundle.manifest["mesh"]["stages"]
        if not 0 <= stage < len(stages):
            raise BundleError(f"there is no stage {stage}; the mesh has {len(stages)}.")
        first, last = stages[stage]["ranks"]
        return range(first, last + 1)


def lint_bundle(
    folder: Path, torchair: Path | None = None, expected: Expected | None = None, progress: Notify = silent
) -> LintReport:
    """Prove what can be proved of a bundle.

    Args:
        torchair: where prototypes of operators are read from that the table has not; see `Prototypes`.
        expected: what it is to be loaded for.

    Raises:
        BundleError: not a bundle, or one whose files cannot be read.
    """
    bundle = open_bundle(folder)
    with as_written(folder):
        models = {g["name"]: air.from_bytes(bundle.graph_bytes(g), g["file"]) for g in bundle.manifest["graphs"]}
        files = Files(bundle, bundle_config(bundle), models)
    proofs: dict[str, Callable[[], str]] = {
        "files": lambda: _files(files),
        "kernels": files.bundle.kernels_state,
        "graphs": lambda: _graphs(files, torchair),
        "groups": lambda: _groups(files),
        "collectives": lambda: _collectives(files),
        "sums": lambda: _sums(files),
        "stages": lambda: _stages(files),
    }
    if expected:
        proofs["made for"] = lambda: expected.check(bundle)
    found = []
    for i, (name, proof) in enumerate(proofs.items()):
        progress("lint", i, len(proofs))
        found.append(_prove(name, folder, proof))
    return LintReport(tuple(found))


def _prove(name: str, folder: Path, proof: Callable[[], str]) -> Proof:
    try:
        with as_written(folder):
            return Proof(name, True, proof())
    except KimiGraphError as error:
        return Proof(name, False, str(error))


def _files(files: Files) -> str:
    files.bundle.check_constants()
    check_claims(files.bundle, files.config, files.models)
    written = open_written(files.bundle)
    return (
        f"{len(files.models)} graphs have the hashes, shapes, weights and states that the manifest says"
        f"{'' if written is None else f'; weights: {written.said}'}"
    )


def _graphs(files: Files, torchair: Path | None) -> str:
    profile = target_of(files.bundle.manifest)
    prototypes, nodes = Prototypes(profile.soc, torchair), 0
    for name, model in files.models.items():
        ops = model.graph[0].op
        nodes += len(ops)
        weights = {op.name for op in ops if is_weight(op) and op.type == "Data"}
        states = {op.name for op in ops if op.type == "RefData"}
        try:
            check_graph(model, profile, prototypes, weights=weights, states=states)
        except KimiGraphError as error:
            raise BundleError(f"{name}: {error}") from None
    return f"{nodes:,} nodes are what {profile.name} and CANN {profile.cann} take"


# ---- collectives -----------------------------------------------------------------------------------------------------


def _issued(model: ModelDef) -> list[OpDef]:
    return [op for op in model.graph[0].op if op.type.startswith(COLLECTIVE)]


def _groups(files: Files) -> str:
    """Every group of a graph is in the manifest and takes each rank of the graph's stage once."""
    named = 0
    for entry in files.graphs:
        for op in _issued(files.models[entry["name"]]):
            name = group_of(op)
            if name not in files.groups:
                raise BundleError(f"{entry['name']}: {op.name}: group {name!r} is not in the manifest.")
            own = files.ranks(entry["stage"])
            lists = [ranks for ranks in files.groups[name] if set(ranks) & set(own)]
            held = sorted(rank for ranks in lists for rank in ranks)
            if held != list(own):
                raise BundleError(
                    f"{entry['name']}: group {name!r} has ranks {_few(held)}, its stage {own.start} to {own.stop - 1}."
                )
            size = attrs_of(op).get("rank_size", len(lists[0]))
            if any(len(ranks) != size for ranks in lists):
                raise BundleError(f"{entry['name']}: {op.name}: rank_size {size}, a group of {name!r} has another.")
            named += 1
    names = ", ".join(f"{name} ({len(lists)} of {len(lists[0])})" for name, lists in files.groups.items())
    return f"{names}; {named:,} collectives name them" if named else "no collectives"


def _few(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def terms(op: OpDef) -> tuple[Any, ...]:
    """What all ranks of a group have to agree on: type, attributes, and the size that goes in."""
    attrs = {key: value for key, value in attrs_of(op).items() if not key.startswith(LOOSE)}
    return op.type, sorted(attrs.items()), shape_of(op.input_desc[0]), dtype_of(op.input_desc[0])


def _collectives(files: Files) -> str:
    """One order on every rank, and the same one on all ranks of a group."""
    count = 0
    for phase, entries in files.phases().items():
        order = {entry["name"]: _issued(files.models[entry["name"]]) for entry in entries}
        for name, ops in order.items():
            check_ordered(name, files.models[name])
            count += len(ops)
        if not any(order.values()):
            continue
        of = {rank: order[entry["name"]] for entry in entries for rank in files.ranks(entry["stage"])}
        for group, lists in files.groups.items():
            for ranks in lists:
                _check_same(phase, group, ranks, of)
    return f"{count:,} in one order on every rank, the same on all ranks of a group" if count else "none"


def check_ordered(name: str, model: ModelDef) -> None:
    """Edges make one order of a graph's collectives: none of two could be started first."""
    copy = ModelDef()
    copy.CopyFrom(model)
    before = {op.name: len(op.input) for op in _issued(copy)}
    if order_collectives(copy):
        late = next(op for op in _issued(copy) if len(op.input) > before[op.name])
        first, _ = split_edge(late.input[-1])
        raise BundleError(f"{name}: {late.name} and {first} may be started in either order; an edge is missing.")


def _check_same(phase: str, group: str, ranks: list[int], of: dict[int, list[OpDef]]) -> None:
    """All ranks of a group issue the same sequence. All collectives count: others between them could wait across."""
    first = next((rank for rank in ranks if rank in of), None)
    for rank in ranks:
        if first is None or of.get(rank) is of.get(first):
            continue
        mine, theirs = of[first], of.get(rank, [])
        for step in range(max(len(mine), len(theirs))):
            a, b = (ops[step] if step < len(ops) else None for ops in (mine, theirs))
            if a is None or b is None or terms(a) != terms(b):
                raise BundleError(
                    f"{phase}: group {group!r}: at its collective {step} rank {first} is at {_told(a)}, "
                    f"rank {rank} at {_told(b)}."
                )


def _told(op: OpDef | None) -> str:
    if op is None:
        return "its end"
    return f"{op.name} ({op.type} {get_attr(op, 'group')} {list(shape_of(op.input_desc[0]))})"


def _sums(files: Files) -> str:
    """Sums over ranks are taken once, before the first use that is not linear; what is whole is the same everywhere."""
    manifest, count = files.bundle.manifest, 0
    if manifest["mesh"] is None:
        return "one rank, none"
    sizes, plan = Mesh.parse(manifest["mesh"]["text"]).axes, files.bundle.weights["weights"]
    states = {s["name"]: as_dims(s["over"]) for s in manifest["state"]["states"]}
    for entry in files.graphs:
        model = files.models[entry["name"]]
        shapes = {op.name: shape_of(op.output_desc[0]) for op in model.graph[0].op if is_weight(op)}
        weights = {name: weight_dims(plan[name], shape, sizes) for name, shape in shapes.items()}
        given = {i["name"]: as_dims(i["over"]) for i in entry["inputs"]}
        results = [(o["name"], as_dims(o["over"])) for o in entry["outputs"]]
        try:
            count += check_sums(model, given | weights | states, results)
        except BundleError as error:
            raise BundleError(f"{entry['name']}: {error}") from None
    return f"{count:,} collectives: each sum is taken once, and before what is not linear"


# ---- stages ----------------------------------------------------------------------------------------------------------


def _stages(files: Files) -> str:
    """Edges between stages pair, and go one way."""
    if files.bundle.manifest["mesh"] is None:
        return "one rank, no stages"
    edges = size = 0
    for phase, entries in files.phases().items():
        given: dict[str, tuple[Any, ...]] = {}
        givers = {o["name"]: e["stage"] for e in entries for o in e["outputs"]}
        unread = {name for name, stage in givers.items() if stage != entries[-1]["stage"]}
        for entry in entries:
            model = files.models[entry["name"]]
            for name, desc in _read(entry, model):
                if name not in given:
                    where = f"stage {givers[name]} gives" if name in givers else "no stage gives"
                    waits = f"{phase}: stage {entry['stage']} waits for {name}"
                    raise BundleError(f"{waits}, which {where}; stages would wait in a circle.")
                if given[name] != desc:
                    raise BundleError(
                        f"{phase}: {name} is given as {_text(given[name])}, stage {entry['stage']} reads {_text(desc)}."
                    )
                unread.discard(name)
                edges += 1
            given |= dict(_given(entry, model))
        if unread:
            raise BundleError(f"{phase}: nobody reads {min(unread)}, which stage {givers[min(unread)]} gives.")
        size = max(size, len(entries))
    return f"{edges} values pair over {size} stages, none waits for a later one"


def _read(entry: dict[str, Any], model: ModelDef) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """What a stage gets from others, described as its graph reads it."""
    ops = {op.name: op for op in model.graph[0].op if op.type == "Data"}
    for name in entry["reads"]:
        if name not in ops:
            raise BundleError(f"{entry['name']}: reads {name}, which is no input of the graph.")
        yield name, (shape_of(ops[name].output_desc[0]), dtype_of(ops[name].output_desc[0]))


def _given(entry: dict[str, Any], model: ModelDef) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """What a stage gives, described as its graph does."""
    results = results_of(model.graph[0].op).input_desc
    if len(entry["gives"]) != len(results):
        raise BundleError(f"{entry['name']}: the graph has {len(results)} results, the manifest {len(entry['gives'])}.")
    for name, desc in zip(entry["gives"], results, strict=True):
        yield name, (shape_of(desc), dtype_of(desc))


def _text(desc: tuple[Any, ...]) -> str:
    return f"{str(desc[1]).removeprefix('torch.')}{list(desc[0])}"
