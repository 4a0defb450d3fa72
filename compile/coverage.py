"""`kimi-graph ops`: which operator serves what in each kind of layer, whose it is, how it is known, within what limits.

Asked of the graphs themselves: every kind of part is captured and converted as `compile` does it, and each node is held
against its prototype and limits. No weights.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kimi_graph.ops
from kimi_graph.checkpoint import released_formats
from kimi_graph.config import ModelConfig, arranged
from kimi_graph.errors import CompileError
from kimi_graph.models.decoder import model_specs
from kimi_graph.parallel import Mesh, Rules

from .checks import Claims, operators_hold
from .driver import Request, captured_pieces, convert_piece, legal_phases, stamp_graph
from .executor.registry import SEMANTICS
from .fuse import CHAINS, fuse_chains
from .ge_proto import Dtype, GraphDef
from .limits import LIMITS, Met, Use
from .lower import Choice
from .meshes import default_chunk
from .packages import Needed, folder_of, packages_of
from .phases import Bucket, stage_parts, uses
from .prototype_rows import ROWS
from .prototypes import SHORT, Port, Prototype, Prototypes
from .stamp import Piece
from .targets import Target
from .torchair_host import Host, load
from .view import Node, View, view
from .wrap import wrapped

STRUCTURE = {"Data", "RefData", "Const", "FileConstant", "NetOutput"}
BETWEEN, REST = "between ranks", "the rest"  # kinds of what no lowering chose
NO_KERNEL = "no kernel yet"
KERNELS = Path(kimi_graph.ops.__file__).parent / "kernels"
CODES = re.compile(r"_(type|mode|item|alg)\b|\b(input_)?layout")  # attributes that choose a form: they are no sizes


@dataclass(frozen=True, kw_only=True)
class Served:
    """What one kind of layer needs, and what serves it.

    Attributes:
        phase, part: `decode`, `kda`.
        layers: how often a step has the part.
        kind: what is computed, in words.
        types: GE operator types, with how often a layer has each.
        provider, reason: who serves it and why that one.
        evidence: how it is known to work on a device.
        held: limits that hold, with the numbers.
        broken: what does not.
        instead: of a chain over parts: types that parts list and the whole graph has not, and how many of each.
    """

    phase: str
    part: str
    layers: int
    kind: str
    types: tuple[tuple[str, int], ...]
    provider: str
    reason: str
    evidence: str
    held: tuple[Met, ...] = ()
    broken: tuple[str, ...] = ()
    instead: tuple[tuple[str, int], ...] = ()

    @property
    def operators(self) -> str:
        """GE operator types, and how often a layer has each."""
        return ", ".join(name if n == 1 else f"{name} x {n}" for name, n in self.types)

    @property
    def replaces(self) -> str:
        """What a chain stands for, in words; empty where nothing but itself."""
        if not self.instead or self.instead == self.types:
            return ""
        return "of " + ", ".join(f"{n} {type_}" for type_, n in self.instead)

    @property
    def why(self) -> str:
        """The reason, and what a chain stands for."""
        return "; ".join(words for words in (self.reason, self.replaces and f"instead {self.replaces}") if words)

    @property
    def limits(self) -> str:
        """In a line."""
        if self.broken:
            return "BROKEN: " + "; ".join(self.broken)
        return "; ".join(f"{found} ({expected})" for found, expected in self.held)


@dataclass(frozen=True, kw_only=True)
class Unserved:
    """A kind of layer that cannot be."""

    phase: str
    part: str
    why: str


@dataclass(frozen=True)
class Coverage:
    """Operators of a model on a target.

    Attributes:
        served: by phase and part.
        unserved: parts that cannot be converted.
        packages: that have to be installed.
        conflict: why they cannot all be, "" where they can.
    """

    request: Request
    served: tuple[Served, ...]
    unserved: tuple[Unserved, ...]
    packages: tuple[Needed, ...]
    conflict: str
    prototypes: Prototypes
    markdown: bool = False

    @property
    def passed(self) -> bool:
        return not (self.unserved or self.conflict or any(row.broken for row in self.served))

    @property
    def _where(self) -> str:
        t, mesh = self.request.target, self.request.mesh
        return f"{t.name} with CANN {t.cann}" + ("" if mesh is None else f" on {mesh}")

    @property
    def summary(self) -> str:
        faults = len(self.unserved) + bool(self.conflict) + sum(bool(row.broken) for row in self.served)
        name, types = self.request.config.name, {t for row in self.served for t, _ in row.types}
        if faults:
            return f"{name} for {self._where}: {faults} of its needs cannot be served"
        providers = Counter(map(_provider, types))
        whose = ", ".join(f"{n} of {p}" for p, n in sorted(providers.items()))
        return f"{name} for {self._where}: all is served by {len(types)} operator types ({whose})"

    def text(self) -> str:
        return self._markdown() if self.markdown else self._plain()

    @property
    def _asked(self) -> str:
        r = self.request
        without = f", without {', '.join(r.target.avoid)}" if r.target.avoid else ""
        sizes = f"sequences {r.rows}, chunk {r.chunk}, max-len {r.max_len:,}, page {r.page}"
        return f"asked: {', '.join(r.target.providers)}{without}; {sizes}"

    def _plain(self) -> str:
        lines = wrapped("", self._asked)
        for phase in dict.fromkeys(row.phase for row in (*self.served, *self.unserved)):
            for part in dict.fromkeys(row.part for row in (*self.served, *self.unserved) if row.phase == phase):
                rows = [row for row in self.served if (row.phase, row.part) == (phase, part)]
                times = f" x {rows[0].layers}" if rows else ""
                lines += ["", f"{phase}: {part}{times}"]
                for row in rows:
                    lines += _row_lines(row)
                for u in (u for u in self.unserved if (u.phase, u.part) == (phase, part)):
                    lines += wrapped("  ", f"CANNOT BE SERVED: {u.why}")
        lines += [""] if self.packages or self.conflict else []
        for point in [*self._points(), *([f"CONFLICT: {self.conflict}"] if self.conflict else [])]:
            lines += wrapped("", point)
        return "\n".join(lines)

    def _points(self) -> list[str]:
        """What has to be installed, and what of it is not there yet."""
        points = [f"package: {needed.text()}" for needed in self.packages]
        missing = sorted({t for row in self.served for t, _ in row.types if _evidence(t) == NO_KERNEL})
        if missing:
            points.append(f"{NO_KERNEL}: {', '.join(missing)}; without own in --providers they are composed")
        return points

    def _markdown(self) -> str:
        """Tables for a release note."""
        head = ("layer", "needs", "operators", "from", "why", "evidence", "limits")
        lines = [f"# Operators of {self.request.config.name} for {self._where}", "", self._asked]
        for phase in dict.fromkeys(row.phase for row in self.served):
            rows = [row for row in self.served if row.phase == phase]
            lines += ["", f"## {phase}", "", _cells(head), _cells("---" for _ in head)]
            for r in rows:
                cells = (f"{r.part} x {r.layers}", r.kind, r.operators, r.provider, r.why, r.evidence, r.limits)
                lines.append(_cells(cells))
        points = self._points()
        points += [f"**conflict**: {self.conflict}"] if self.conflict else []
        points += [f"**not served**: {u.part} of {u.phase}: {u.why}" for u in self.unserved]
        return "\n".join([*lines, *([""] if points else []), *(f"- {point}" for point in points), ""])

    def to_json(self) -> Any:
        r, types = self.request, sorted({t for row in self.served for t, _ in row.types})
        t = r.target
        asked = {"providers": list(t.providers), **({"avoid": list(t.avoid)} if t.avoid else {})}
        return {
            "model": r.config.name,
            "target": {"name": t.name, "soc": t.soc, "cann": t.cann, **asked},
            "mesh": None if r.mesh is None else str(r.mesh),
            "sizes": {"sequences": r.rows, "chunk": r.chunk, "max_len": r.max_len, "page": r.page},
            "passed": self.passed,
            "served": [_row_json(row) for row in self.served],
            "unserved": [{"phase": u.phase, "part": u.part, "why": u.why} for u in self.unserved],
            "packages": [n.to_json() for n in self.packages],
            "conflict": self.conflict,
            "operators": [operator_json(p) for p in map(self.prototypes.find, types) if p is not None],
        }


def _row_lines(row: Served) -> Iterator[str]:
    yield from wrapped("  ", f"{row.kind}: {row.operators} of {row.provider}; {row.evidence}")
    if row.reason:
        yield from wrapped("    why     ", row.reason)
    if row.replaces:
        yield from wrapped("    instead ", row.replaces)
    if row.held or row.broken:
        yield from wrapped("    limits  ", row.limits)


def _cells(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _row_json(row: Served) -> dict[str, Any]:
    return {
        "phase": row.phase,
        "part": row.part,
        "layers": row.layers,
        "kind": row.kind,
        "operators": dict(row.types),
        "provider": row.provider,
        "reason": row.reason,
        "evidence": row.evidence,
        "held": [{"found": m.found, "expected": m.expected} for m in row.held],
        "broken": list(row.broken),
        **({"instead": dict(row.instead)} if row.instead else {}),
    }


def operator_json(p: Prototype) -> dict[str, Any]:
    """All that is known of an operator type: registration, where it runs, whose it is, and how all of that is known."""
    semantics = SEMANTICS.get(p.type)

    def ports(some: Sequence[Port]) -> list[dict[str, Any]]:
        return [{"name": x.name, "kind": x.kind, "dtypes": sorted(map(_short, x.dtypes or ()))} for x in some]

    return {
        "type": p.type,
        "inputs": ports(p.inputs),
        "outputs": ports(p.outputs),
        "in_place": list(p.inplace),
        "attributes": {a.name: {"type": a.type, "required": a.required} for a in p.attributes.values()},
        "socs": list(p.socs),
        "since": p.since,
        "limits": p.type in LIMITS,
        "provider": p.provider,
        "source": p.source,
        "evidence": _evidence(p.type),
        "semantics": None if semantics is None else {"provenance": semantics.provenance, "source": semantics.source},
    }


def _short(dtype: int) -> str:
    return SHORT.get(dtype) or Dtype.of_proto(dtype).name


# ---- asking ----------------------------------------------------------------------------------------------------------


def request_of(
    config: ModelConfig,
    *,
    target: Target,
    mesh: Mesh | None = None,
    phases: tuple[str, ...] | None = None,
    batch: int | None = None,
    redundant_experts: int = 0,
    moe_chunks: int = 1,
    **choices: Any,
) -> Request:
    """What `compile` would be asked for, with its default sizes. `choices`: other fields of `Request`."""
    length = min(Request.max_len, config.max_len)
    return Request(
        config=arranged(config, redundant_experts, moe_chunks),
        target=target,
        phases=legal_phases(config) if phases is None else phases,
        rows=batch or (1 if mesh is None else mesh.data),
        chunk=default_chunk(min(Request.chunk, length), mesh),
        max_len=length,
        mesh=mesh,
        stored=released_formats(config, model_specs(config)),
        **choices,
    )


def cover(request: Request, host: Host, *, markdown: bool = False) -> Coverage:
    """The operators of every kind of part, in every phase asked for.

    Raises:
        KimiGraphError: sizes that cannot be at all (a mesh that does not divide).
    """
    request.check()
    prototypes = Prototypes(request.target.soc, host.root)
    served: list[Served] = []
    unserved: list[Unserved] = []
    for b in request.buckets():
        rules = None if request.layout is None else request.layout.rules(b.phase)
        pieces = dict(_pieces(request, b, host, prototypes, rules))
        converted = {part: piece for part, piece in pieces.items() if isinstance(piece, Piece)}
        for part, piece in pieces.items():
            if isinstance(piece, Piece):
                served += _rows(request, b, part, piece, prototypes)
            else:
                unserved.append(Unserved(phase=b.phase, part=part, why=piece))
        if len(converted) == len(pieces):
            served += _chain_rows(request, b, converted, prototypes)
    needed, conflict = _packages(t for row in served for t, _ in row.types)
    return Coverage(
        request, tuple(_merged(served)), tuple(dict.fromkeys(unserved)), needed, conflict, prototypes, markdown
    )


def _pieces(
    request: Request, b: Bucket, host: Host, prototypes: Prototypes, rules: Rules | None
) -> Iterator[tuple[str, Piece | str]]:
    """Every kind of part, converted, or why it cannot be."""
    first = {use.part: use for use in reversed(uses(request.config, b))}
    for name, captured in captured_pieces(request, b, rules).items():
        weights = request.weights_of(first[name], rules)
        try:
            yield name, convert_piece(name, captured, request.target, host, prototypes, weights)
        except CompileError as error:
            yield name, str(error)


def _packages(types: Iterable[str]) -> tuple[tuple[Needed, ...], str]:
    try:
        return tuple(packages_of(types)), ""
    except CompileError as error:
        return (), str(error)


def _rows(request: Request, b: Bucket, part: str, piece: Piece, prototypes: Prototypes) -> Iterator[Served]:
    """What a piece chose, then what crosses ranks, then the rest."""
    layers = sum(use.part == part for use in uses(request.config, b))
    seen = view(GraphDef(op=piece.ops))
    claims = Claims(target=request.target, prototypes=prototypes, weights=set(), states=set(), updated=set())
    broken: dict[str, list[str]] = {}
    for finding in operators_hold(seen, claims):
        broken.setdefault(seen.by_name[finding.node].type, []).append(finding.at(""))
    for type_ in request.target.avoided:  # what a lowering could not do without
        broken.setdefault(type_, []).append(f"--avoid {type_}: nobody else serves what it does")
    counts = Counter(node.type for node in seen.nodes if node.type not in STRUCTURE)
    for choice, types in _by_choice(counts, piece.choices).items():
        nodes = [node for node in seen.nodes if node.type in types]
        yield Served(
            phase=b.phase,
            part=_base(part),
            layers=layers,
            kind=choice.kind,
            types=tuple((t, counts[t]) for t in types),
            provider=choice.provider,
            reason=choice.reason,
            evidence="; ".join(dict.fromkeys(map(_evidence, types))),
            held=tuple(dict.fromkeys(met for node in nodes for met in _met(seen, node, request, prototypes))),
            broken=tuple(words for t in types for words in broken.get(t, ())),
        )


def _chain_rows(request: Request, b: Bucket, pieces: Mapping[str, Piece], prototypes: Prototypes) -> Iterator[Served]:
    """What takes chains that cross parts: asked of the whole graph, or of those of all stages."""
    layout, c = request.layout, request.config
    whole = uses(c, b)
    stages = [(whole, whole[-1].writes)]
    if layout is not None:
        stages = [(part.parts, part.gives) for part in stage_parts(c, b, layout.stages(b))]
    found: dict[Choice, list[tuple[View, Node]]] = {}
    replaced: dict[Choice, Counter[str]] = {}
    for parts, gives in stages:
        graph = stamp_graph(c, b, [(use, pieces[use.part]) for use in parts], prototypes, gives)
        chains = fuse_chains(graph.model, request.target, prototypes)
        seen = view(graph.model.graph[0])
        for choice, names in chains.choices.items():
            found.setdefault(choice, []).extend((seen, seen.by_name[name]) for name in names)
            replaced.setdefault(choice, Counter()).update(chains.replaced[choice])
    for choice, nodes in found.items():
        yield Served(
            phase=b.phase,
            part=CHAINS,
            layers=len(nodes),
            kind=choice.kind,
            types=tuple((t, 1) for t in choice.types),
            provider=choice.provider,
            reason=choice.reason,
            evidence="; ".join(dict.fromkeys(map(_evidence, choice.types))),
            held=tuple(dict.fromkeys(met for seen, node in nodes for met in _met(seen, node, request, prototypes))),
            instead=tuple(sorted(replaced[choice].items())),
        )


def _by_choice(counts: Counter[str], choices: Sequence[Choice]) -> dict[Choice, list[str]]:
    """The types of a piece by the choice that made them: those no choice names are collectives, or the rest."""
    once = {(c.kind, c.operator, c.provider): c for c in choices}  # a choice is said at every line that asked for it
    found = {c: [t for t in c.types if t in counts] for c in once.values()}
    named = {t for types in found.values() for t in types}
    between = [t for t in sorted(counts) if t.startswith("Hcom") and t not in named]
    rest = [t for t in sorted(counts) if t not in named and t not in between]
    found[Choice(BETWEEN, "", "")], found[Choice(REST, "", "")] = between, rest
    return {choice: types for choice, types in found.items() if types}


def _met(seen: View, node: Node, request: Request, prototypes: Prototypes) -> Iterator[Met]:
    """Limits that a node keeps; of attributes that choose a form nothing is said."""
    prototype = prototypes.find(node.type)
    if prototype is None or node.type not in LIMITS:
        return
    for found in LIMITS[node.type](Use(seen, node, prototype, request.target)):
        if isinstance(found, Met) and not CODES.search(found.found):
            yield found


def _provider(type_: str) -> str:
    return ROWS[type_].provider if type_ in ROWS else "builtin"


def _evidence(type_: str) -> str:
    if _provider(type_) == "own":
        return "run on the CPU twin alone" if (KERNELS / folder_of(type_)).is_dir() else NO_KERNEL
    return ROWS[type_].evidence if type_ in ROWS else "documented"


def _base(part: str) -> str:
    """A part without the number of blocks that it mixes: they need the same."""
    return part.rstrip("0123456789")


def _merged(rows: Iterable[Served]) -> Iterator[Served]:
    """Parts that differ in how many blocks they mix, as one."""
    found: dict[Any, list[Served]] = {}
    for row in rows:
        found.setdefault((row.phase, row.part, row.kind, tuple(t for t, _ in row.types), row.provider), []).append(row)
    for same in found.values():
        first = same[0]
        yield Served(
            phase=first.phase,
            part=first.part,
            layers=sum(row.layers for row in same),
            kind=first.kind,
            types=first.types,
            provider=first.provider,
            reason=first.reason,
            evidence=first.evidence,
            held=tuple(dict.fromkeys(met for row in same for met in row.held)),
            broken=tuple(dict.fromkeys(words for row in same for words in row.broken)),
            instead=tuple(sum((Counter(dict(row.instead)) for row in same), Counter()).items()),
        )


def cover_model(
    config: ModelConfig, *, markdown: bool, torch_npu_wheel: Path | None, cache_dir: Path | None, **choices: Any
) -> Coverage:
    """`cover` as the command line asks for it. `choices`: see `request_of`."""
    return cover(request_of(config, **choices), load(torch_npu_wheel, cache=cache_dir), markdown=markdown)
