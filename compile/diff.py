"""`kimi-graph diff A B`: what changed from one bundle to another, and whether it matters to who runs it.

Compared are contents (not local.json, nor weights that were made ahead), by hash first; where hashes differ, by what
they say: model, target, mesh, state contract, nodes of graphs, recipes of weights, versions.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from . import air
from .bundle import SOURCES, Bundle, as_written, file_hash, inside, open_bundle
from .executor.node import attrs_of
from .expect import bundle_config, config_changes
from .ge_proto import OpDef, dtype_of, is_known, shape_of
from .manifest import NOTHING, differences, short

SHOWN = 6  # changes of one kind that are listed
KINDS = ("model", "target", "mesh", "state", "graphs", "weights", "kernels", "versions", "notes")


@dataclass(frozen=True)
class Change:
    """One difference. `kind`: of `KINDS`. `what`: changed, in words. `matters`: for whom, in words; "" for nobody."""

    kind: str
    what: str
    matters: str = ""


@dataclass(frozen=True)
class Difference:
    """What changed from bundle `old` to bundle `new`."""

    old: str
    new: str
    changes: tuple[Change, ...]

    @property
    def same(self) -> bool:
        return not self.changes

    @property
    def summary(self) -> str:
        if self.same:
            return f"same: {self.old} and {self.new} hold the same bytes"
        kinds = [k for k in KINDS if any(c.kind == k and c.matters for c in self.changes)]
        if not kinds:
            return "they differ, in nothing that matters: graphs, weights and states are the same"
        return f"they differ in {', '.join(kinds)}"

    def text(self) -> str:
        lines = []
        for kind in KINDS:
            of_kind = [c for c in self.changes if c.kind == kind]
            shown = of_kind[:SHOWN] if len(of_kind) > SHOWN + 1 else of_kind
            lines += [f"{kind if not i else '':<10}{c.what}" for i, c in enumerate(shown)]
            lines += [f"{'':<10}... and {len(of_kind) - len(shown)} more"] if len(shown) < len(of_kind) else []
            reasons = dict.fromkeys(c.matters for c in of_kind if c.matters)
            lines += [f"{'':<10}matters: {reason}" for reason in reasons]
            lines += [f"{'':<10}does not matter"] if of_kind and not reasons else []
        return "\n".join(lines)

    def to_json(self) -> Any:
        return {
            "same": self.same,
            "matters": any(c.matters for c in self.changes),
            "changes": [*map(asdict, self.changes)],
        }


def diff_bundles(old: Path, new: Path) -> Difference:
    """What changed from one bundle to another.

    Raises:
        BundleError: one is none, or is damaged.
    """
    first, second = open_bundle(old), open_bundle(new)
    for bundle in (first, second):
        bundle.check_files()
    with as_written(old), as_written(new):
        changes = tuple(_changes(first, second))
    return Difference(str(old), str(new), changes)


def _changes(old: Bundle, new: Bundle) -> Iterator[Change]:
    a, b = old.manifest, new.manifest
    yield from _model(old, new)
    yield from _entries("target", a["target"], b["target"], "graphs are for this target and release alone")
    yield from _entries("mesh", _mesh(a), _mesh(b), "ranks, groups and what each rank holds are others")
    yield from _entries("state", a["state"], b["state"], "a state of one cannot go on in the other")
    yield from _graphs(old, new)
    yield from _weights(old, new)
    yield from _entries(
        "kernels", a["kernels"], b["kernels"], "the operator package has to be built and installed again"
    )
    yield from _entries("kernels", a["packages"], b["packages"], "other operator packages have to be installed")
    yield from _entries("versions", a["made_by"], b["made_by"])
    yield from _entries("notes", _chosen(a), _chosen(b))
    for key in ("memory", "assumptions", "unproved"):
        yield from _entries("notes", {key: a[key]}, {key: b[key]})
    if _sources(old) != _sources(new):
        yield Change("notes", f"{SOURCES}: source lines, for people")


def _entries(kind: str, old: Any, new: Any, matters: str = "") -> Iterator[Change]:
    for key, before, now in differences("", old, new):
        yield Change(kind, f"{key.removeprefix('.') or kind} is {_said(now)}, was {_said(before)}", matters)


def _said(value: Any) -> str:
    return "not there" if value in (NOTHING, None) else short(value)


def _chosen(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Which operators do what in each part, and whose they are."""
    return {f"{c['part']}: {c['kind']}": f"{c['operator']} of {c['provider']}" for c in manifest["choices"]}


def _mesh(manifest: Mapping[str, Any]) -> Any:
    mesh = manifest["mesh"]
    return {} if mesh is None else mesh


def _sources(bundle: Bundle) -> str:
    path = inside(bundle.folder, SOURCES)
    return file_hash(path) if path.is_file() else "none"


def _model(old: Bundle, new: Bundle) -> Iterator[Change]:
    a, b = old.manifest["model"], new.manifest["model"]
    if a["fingerprint"] != b["fingerprint"]:
        changes = config_changes(bundle_config(old), bundle_config(new))
        yield from (Change("model", change, "it is another model") for change in changes)
    for key in ("name", "type"):
        yield from _entries("model", {key: a[key]}, {key: b[key]})
    if a["config"] != b["config"] and a["fingerprint"] == b["fingerprint"]:
        yield from _entries("model", {"config.json": a["config"]}, {"config.json": b["config"]})


# ---- graphs ----------------------------------------------------------------------------------------------------------

REBUILD = "what was built of the graph has to be built again"


def _graphs(old: Bundle, new: Bundle) -> Iterator[Change]:
    a, b = ({entry["name"]: entry for entry in x.manifest["graphs"]} for x in (old, new))
    for name in a.keys() - b.keys():
        yield Change("graphs", f"{name} is gone", "a phase or size is no longer served")
    for name in sorted(b.keys() - a.keys()):
        yield Change("graphs", f"{name} is new", "a phase or size is served that was not")
    for name in (name for name in a if name in b):
        if a[name]["sha256"] == b[name]["sha256"]:
            continue
        models = [air.from_bytes(x.graph_bytes(entry), entry["file"]) for x, entry in ((old, a[name]), (new, b[name]))]
        found = [Change("graphs", f"{name}: {text}", REBUILD) for text in _nodes(*(m.graph[0].op for m in models))]
        yield from found or [Change("graphs", f"{name}: other bytes, the same nodes")]


def _nodes(old: Iterable[OpDef], new: Iterable[OpDef]) -> Iterator[str]:
    """Nodes that changed, came or went, and how."""
    a, b = ({op.name: op for op in ops} for ops in (old, new))
    gone, come = [name for name in a if name not in b], [name for name in b if name not in a]
    for what, names, ops in (("gone", gone, a), ("new", come, b)):
        if names:
            more = ", ..." if len(names) > 3 else ""
            shown = ", ".join(f"{name} ({ops[name].type})" for name in names[:3])
            yield f"{len(names):,} nodes are {what}: {shown}{more}"
    moved = 0
    for name in (name for name in b if name in a):
        changes = list(_node(a[name], b[name]))
        if changes and all(change.startswith("index is ") for change in changes):
            moved += 1
        elif changes:
            yield f"{name} ({b[name].type}): {'; '.join(changes[:2])}{' and more' if len(changes) > 2 else ''}"
    if moved:
        yield f"{moved:,} inputs have another place"


def _node(old: OpDef, new: OpDef) -> Iterator[str]:
    if old.type != new.type:
        yield f"was {old.type}"
    if list(old.input) != list(new.input):
        yield f"reads {', '.join(new.input)}, read {', '.join(old.input)}"
    for side in ("input", "output"):
        before, now = ([_described(d) for d in getattr(op, f"{side}_desc")] for op in (old, new))
        if before != now:
            yield f"{side}s are {', '.join(now)}, were {', '.join(before)}"
    for key in sorted(attrs_of(old).keys() | attrs_of(new).keys()):
        if not (key in old.attr and key in new.attr and old.attr[key] == new.attr[key]):
            yield f"{key} is {_value(new, key)}, was {_value(old, key)}"


def _value(op: OpDef, key: str) -> str:
    if key not in op.attr:
        return "not there"
    value = attrs_of(op)[key]
    return "a tensor" if isinstance(value, torch.Tensor) and value.numel() > 8 else " ".join(str(value).split())[:80]


def _described(desc: Any) -> str:
    return f"{str(dtype_of(desc)).removeprefix('torch.')}{list(shape_of(desc))}" if is_known(desc) else "unknown"


# ---- weights ---------------------------------------------------------------------------------------------------------


def _weights(old: Bundle, new: Bundle) -> Iterator[Change]:
    again = "weights that were made ahead have to be made again"
    a, b = old.weights["weights"], new.weights["weights"]
    for names, what in ((a.keys() - b.keys(), "gone"), (b.keys() - a.keys(), "new")):
        for name in sorted(names):
            yield Change("weights", f"{name} is {what}", again)
    for name in sorted(a.keys() & b.keys()):
        yield from _entries("weights", {name: a[name]}, {name: b[name]}, again)
    yield from _entries("weights", old.weights["generated"], new.weights["generated"], "other inputs are generated")
    for key in ("constants", "experts"):
        before, now = (x.manifest["weights"].get(key) for x in (old, new))
        yield from _entries("weights", {key: before}, {key: now}, "weights are held in another form")
    if old.manifest["weights"]["sha256"] != new.manifest["weights"]["sha256"] and old.weights == new.weights:
        yield Change("weights", "weights.json: other bytes, the same plan")
