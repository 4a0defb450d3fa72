"""`kimi-graph inspect`: what is in a bundle, for a reader and for a program."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from kimi_graph.display import several
from kimi_graph.ops.kernel_project import commands

from . import air
from .bundle import KERNELS, SOURCES, Bundle, as_written, caches_text, open_bundle, read_json
from .ge_proto import Dtype, GraphDef, OpDef, data_edges, get_attr, is_known, shape_of
from .manifest import target_of
from .mesh_manifest import collective_lines, mesh_lines
from .order import Overlap, overlap_kinds
from .origins import Origins, source_of
from .packages import package_lines
from .wrap import wrapped, wrapped_items
from .written import Written, open_written

PLAIN = (bool, int, float, str, list)  # attribute values that JSON can hold


@dataclass(frozen=True)
class Contents:
    """What a bundle holds. `overlaps`: of each graph of a mesh, by its name. `ahead`: weights that were made ahead."""

    bundle: Bundle
    overlaps: Mapping[str, Sequence[Overlap]] = field(default_factory=dict)
    ahead: Written | None = None

    @property
    def summary(self) -> str:
        m = self.bundle.manifest
        return f"bundle of {m['model']['name']} for {m['target']['name']}: {len(m['graphs'])} graphs"

    def to_json(self) -> Any:
        found = {name: [asdict(kind) for kind in kinds] for name, kinds in self.overlaps.items()}
        return {**self.bundle.manifest, "bytes": sizes(self.bundle), **({"overlaps": found} if found else {})}

    def text(self) -> str:
        m, s, size = self.bundle.manifest, self.bundle.manifest["state"], sizes(self.bundle)
        made = ", ".join(f"{k.replace('_', '-')} {v}" for k, v in m["made_by"].items())
        count = len(self.bundle.weights["weights"])
        held = f"in {m['weights']['constants']['file']}" if "constants" in m["weights"] else "bound at load"
        lines = [
            f"model     {m['model']['name']} ({m['model']['type']}), fingerprint {m['model']['fingerprint'][:16]}",
            f"target    {m['target']['name']} ({m['target']['product']}), CANN {m['target']['cann']}",
            f"made by   {made}",
            *(line for words in package_lines(m) for line in wrapped("package   ", words)),
            *(line for words in (*mesh_lines(m), *_rules_lines(m), *_rank_lines(m)) for line in wrapped("", words)),
            *wrapped("weights   ", f"{size['weights']:,} bytes in {count:,} graph weights, {held}"),
            *(wrapped("          ", self.ahead.said) if self.ahead is not None else ()),
            *wrapped(
                "states    ",
                f"{size['states']:,} bytes in {len(s['states'])} states: {s['slots']} slots, {s['pages']} pages of "
                f"{s['page_tokens']} tokens, {s['tokens_per_sequence']:,} tokens a sequence" + caches_text(s),
            ),
        ]
        for g in m["graphs"]:
            lines += ["", *_graph_lines(g, self.overlaps.get(g["name"], ()))]
        if build := self._build_lines():
            lines += ["", "operators of ours, on a host with CANN", *build]
        for title, points in (
            ("chosen", _choice_lines(m)),
            ("assumed", m["assumptions"]),
            ("not proved", m["unproved"]),
        ):
            if points:
                lines += ["", title]
                lines += [line for point in points for line in wrapped("  ", point)]
        return "\n".join(lines)

    def _build_lines(self) -> list[str]:
        """What makes a package of the operator project, if there is one, and installs it."""
        if self.bundle.manifest["kernels"] is None:
            return []
        said = wrapped("  # ", f"{self.bundle.kernels_state()}; {KERNELS}/README.md says more", "  # ")
        chip = target_of(self.bundle.manifest).op_soc
        made = commands(chip, shlex.quote((self.bundle.folder / KERNELS).as_posix()))
        return [*said, *(f"  {line}" for line in made)]


def _choice_lines(manifest: dict[str, Any]) -> list[str]:
    """Which operator does what in which kind of layer, and why; each once, with the graphs it is in."""
    graphs: dict[tuple[str, ...], list[str]] = {}
    for c in manifest["choices"]:
        said = (c["part"].rstrip("0123456789"), c["kind"], c["operator"], c["provider"], c["reason"])
        graphs.setdefault(said, []).append(c["graph"])
    return [
        f"{part}: {kind}: {operator} ({provider}; {reason}) in {', '.join(dict.fromkeys(where))}"
        for (part, kind, operator, provider, reason), where in graphs.items()
    ]


def _graph_lines(g: dict[str, Any], overlaps: Sequence[Overlap]) -> list[str]:
    nodes = sum(g["ops"].values())
    rows, tokens = several(g["rows"], "row"), several(g["tokens"], "token")
    size = f"{g['tokens']} patches" if g["phase"] == "vision" else f"{rows} x {tokens}"
    head = f"{g['name']}: {size}, {nodes:,} nodes, {g['bytes']:,} bytes, {g['file']}"
    inputs, outputs = ([f"{port['name']} {_shape(port)}" for port in g[side]] for side in ("inputs", "outputs"))
    counts = sorted(g["ops"].items(), key=lambda item: (-item[1], item[0]))
    lines = [head, *wrapped_items("  inputs   ", inputs), *wrapped_items("  outputs  ", outputs)]
    if "stage" in g:
        lines += [*collective_lines(g), *_overlap_lines(overlaps)]
    cells = [f"{count:>6} {name}" for name, count in counts]
    width = max(map(len, cells)) + 2
    columns = max(1, 96 // width)
    for start in range(0, len(cells), columns):
        lines.append("  " + "".join(cell.ljust(width) for cell in cells[start : start + columns]).rstrip())
    return lines


def _overlap_lines(kinds: Sequence[Overlap]) -> list[str]:
    """How many collectives travel while something heavy may run, and what, by the edges of the graph."""
    if not kinds:
        return []
    covered, count = sum(k.covered for k in kinds), sum(k.count for k in kinds)
    said = f"{covered:,} of {count:,} collectives travel while something heavy runs that no edge ties to them"
    lines = wrapped("  overlap  ", said)
    for k in (k for k in kinds if k.covered):
        beside = ", ".join(f"{type_} ({n:,})" for type_, n in k.beside.items())
        lines += wrapped(f"  {k.covered:>6} ", f"{k.type} of {k.part}: {beside}")
    return lines


def _plain(value: Any) -> Any:
    """A number as it was written before it was float32: 1e-05, not 9.999999747378752e-06."""
    return f"{value:.7g}" if isinstance(value, float) else value


def _shape(entry: dict[str, Any]) -> str:
    return f"{entry['dtype']}{entry['shape']}"


def _rules_lines(m: dict[str, Any]) -> list[str]:
    """What is split, by mesh axes; what phases do differently is said once for each."""
    if m["mesh"] is None:
        return []
    rules: dict[str, dict[str, list[str]]] = {}
    for phase, mapping in m["mesh"]["rules"].items():
        for axis, where in mapping.items():
            if where != "whole":
                rules.setdefault(where, {}).setdefault(axis, []).append(phase)
    count = len(m["mesh"]["rules"])
    return [
        f"over {where}: "
        + ", ".join(axis + (f" ({', '.join(p)})" if len(p) < count else "") for axis, p in sorted(axes.items()))
        for where, axes in sorted(rules.items())
    ]


def _rank_lines(m: dict[str, Any]) -> list[str]:
    """What a rank of each stage holds."""
    if m["mesh"] is None:
        return []
    rows = [
        f"a rank of stage {i} holds {held['weights']:,} bytes of weights and {held['states']:,} of states"
        for i, held in enumerate(m["memory"]["stages"])
    ]
    shards = m["state"]["shards"]
    first, last = shards[0], shards[-1]
    words = f"{len(shards)} shards of rows: {_held(first)}" + (f" ... {_held(last)}" if len(shards) > 1 else "")
    return [*rows, words]


def _held(shard: dict[str, Any]) -> str:
    ranges = ", ".join(f"{what} {shard[what][0]:,} to {shard[what][1] - 1:,}" for what in ("rows", "slots", "pages"))
    return f"{len(shard['ranks']):,} ranks have {ranges}"


def sizes(bundle: Bundle) -> dict[str, int]:
    """Bytes of weights (each once, however many graphs read it), states and graphs."""
    states = sum(prod(s["shape"]) * _width(s["dtype"]) for s in bundle.manifest["state"]["states"])
    weights = sum(w["bytes"] for w in bundle.weights["weights"].values())
    return {"weights": weights, "states": states, "graphs": sum(g["bytes"] for g in bundle.manifest["graphs"])}


def _width(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


@dataclass(frozen=True)
class Nodes:
    """The nodes of one graph."""

    name: str
    graph: GraphDef
    origins: dict[str, Origins]

    @property
    def summary(self) -> str:
        return f"graph {self.name}: {len(self.graph.op):,} nodes"

    def text(self) -> str:
        shown = [op for op in self.graph.op if op.type not in ("Const", "Data", "RefData")]
        return "\n".join(self._line(op) for op in shown)

    def _line(self, op: OpDef) -> str:
        results = ", ".join(_desc(d) for d in op.output_desc if is_known(d))
        inputs = ", ".join(edge.removesuffix(":0") or "-" for edge in data_edges(op))
        attrs = " ".join(f"{k}={_plain(v)}" for k, v in sorted(self._attrs(op).items()))
        source = source_of(self.origins, op.name)
        return f"{op.name}: {op.type}({inputs}) -> {results}  {attrs}".rstrip() + (f"  # {source}" if source else "")

    @staticmethod
    def _attrs(op: OpDef) -> dict[str, Any]:
        return {k: get_attr(op, k) for k in op.attr if not k.startswith("_")}

    def to_json(self) -> Any:
        return [
            {
                "name": op.name,
                "type": op.type,
                "inputs": data_edges(op),
                "outputs": [_desc(d) for d in op.output_desc if is_known(d)],
                "attributes": {k: v for k, v in self._attrs(op).items() if isinstance(v, PLAIN)},
                "source": source_of(self.origins, op.name),
            }
            for op in self.graph.op
        ]


def _desc(desc: Any) -> str:
    return f"{Dtype.of_proto(desc.dtype).text}{list(shape_of(desc))}"


def inspect_bundle(folder: Path) -> Contents:
    """What a bundle holds. Raises BundleError where it is not one, or a graph's file is not what the manifest says."""
    bundle = open_bundle(folder)
    with as_written(folder):
        files = {entry["name"]: (bundle.graph_bytes(entry), entry["file"]) for entry in bundle.manifest["graphs"]}
        mesh = files if bundle.manifest["mesh"] is not None else {}
        overlaps = {name: overlap_kinds(air.from_bytes(*file)) for name, file in mesh.items()}
        found = Contents(bundle, overlaps, open_written(bundle))
        str((found.text(), found.summary))  # whatever they need is there
    return found


@dataclass(frozen=True)
class Stages:
    """The nodes of a phase, stage by stage."""

    stages: tuple[Nodes, ...]

    @property
    def summary(self) -> str:
        return ", ".join(nodes.summary for nodes in self.stages)

    def text(self) -> str:
        if len(self.stages) == 1:
            return self.stages[0].text()
        return "\n\n".join(f"{nodes.name}\n{nodes.text()}" for nodes in self.stages)

    def to_json(self) -> Any:
        if len(self.stages) == 1:
            return self.stages[0].to_json()
        return {nodes.name: nodes.to_json() for nodes in self.stages}


def inspect_graph(folder: Path, phase: str) -> Stages:
    """The nodes of a phase's graphs. Raises BundleError where the bundle has no such graph."""
    bundle = open_bundle(folder)
    sources = bundle.folder / SOURCES
    with as_written(folder):
        found = read_json(sources) if sources.is_file() else {}
        models = {e["name"]: air.from_bytes(bundle.graph_bytes(e), e["file"]) for e in bundle.graphs(phase)}
        stages = Stages(tuple(Nodes(name, m.graph[0], found.get(name, {})) for name, m in models.items()))
        stages.text()
    return stages
