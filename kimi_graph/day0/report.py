"""What a release day found, for a reader (Markdown, HTML), a program (JSON) and a terminal.

All that changes from one run to the next of the same input (date, times, the machine) lies in one place: the last
section, and `run` in the JSON.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kimi_graph
from kimi_graph.check import Report as Check
from kimi_graph.compile.coverage import REST, Coverage, Served
from kimi_graph.compile.lint import LintReport
from kimi_graph.compile.targets import Target
from kimi_graph.compile.verify import Report as Verified
from kimi_graph.compile.wrap import wrapped
from kimi_graph.errors import ConfigError
from kimi_graph.files import check_writable
from kimi_graph.plan.report import commands, count_lines, duration, form
from kimi_graph.plan.search import Plan, dies, gib
from kimi_graph.read_config import read_json

from .document import Block, Code, Heading, Points, Table, Text, as_html, as_markdown
from .steps import Name, Outcome
from .trial import AUDIT, BUNDLE, CONFIG, GRAPHS, OPERATORS, PLAN, SHARDED, VERIFY, VERIFY_SHARDED, WORDS

JSON, MARKDOWN, HTML, WORK = "report.json", "report.md", "report.html", "work"
KIND = "kimi-graph day0"  # says in the JSON that the folder is ours to replace
INDENT = " " * 8  # of further lines of a step
MODES = {
    "exact": "largest difference where every float is float64, of the largest value of the model's.",
    "native": "norm of the difference in the graphs' own dtypes, of the norm of the model's.",
}
SHOWN = 40  # lines of a step's finding; a checkpoint of another model has a hundred thousand


@dataclass(frozen=True, kw_only=True)
class Run:
    """What another run of the same input has otherwise. `date`: in UTC. `machine`: in words."""

    date: str
    seconds: float
    machine: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """A model on some targets.

    Attributes:
        source: as it was named.
        outcomes: of every step, in order.
        without: unknown keys of the config; all but its own step is of the model without them.
    """

    source: str
    targets: tuple[Target, ...]
    outcomes: tuple[Outcome, ...]
    run: Run
    without: tuple[str, ...] = ()

    def found(self, name: Name) -> Any:
        """What a step gave, passed or not; None where it gave nothing."""
        return next((o.found.value for o in self.outcomes if o.name == name), None)

    def of(self, state: str) -> list[Outcome]:
        """The steps that ended so."""
        return [o for o in self.outcomes if o.found.state == state]

    @property
    def passed(self) -> bool:
        return not self.of("failed")

    @property
    def model(self) -> str:
        """The config's name for the model; before there is a config, what it was called on the command line."""
        config = self.found(CONFIG)
        return self.source if config is None else config.name

    @property
    def title(self) -> str:
        """The model and the targets it was tried on."""
        return f"{self.model} for {', '.join(t.name for t in self.targets)}"

    @property
    def summary(self) -> str:
        failed, skipped = self.of("failed"), self.of("skipped")
        words = f"{self.title}: {len(self.of('passed'))} of {len(self.outcomes)} steps passed"
        if failed:
            words += f", {len(failed)} failed ({', '.join(o.title for o in failed)})"
        return words + (f", {len(skipped)} skipped" if skipped else "")

    def text(self) -> str:
        """A line for every step, and under those that failed what they found."""
        width = max(len(o.title) for o in self.outcomes)
        lines = []
        for o in self.outcomes:
            took = f"{o.seconds:.1f} s" if o.found.state != "skipped" else "-"
            lines += wrapped(f"{o.found.state:<8}{o.title:<{width}}{took:>8}  ", o.found.words, INDENT)
            if o.found.state == "failed":
                lines += [line for words in _shown(o) for line in wrapped(f"{INDENT}- ", words)]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        results = {o.name: o.found.value for o in self.outcomes if o.found.value is not None}
        by_target = {
            t.name: {step: _result_json(value) for (target, step), value in results.items() if target == t.name}
            for t in self.targets
        }
        return {
            "kind": KIND,
            "format": 1,
            "source": self.source,
            "model": self.model,
            "made_by": _versions(),
            "passed": self.passed,
            "without_keys": list(self.without),
            "steps": [o.to_json() for o in self.outcomes],
            "audit": _result_json(results.get(AUDIT)),
            "targets": by_target,
            "run": {**vars(self.run), "steps": {o.title: round(o.seconds, 3) for o in self.outcomes}},
        }


def _versions() -> dict[str, str]:
    return {"kimi_graph": kimi_graph.__version__, "torch": torch.__version__}


def _result_json(value: Any) -> Any:
    """What a step gave, for a program."""
    if isinstance(value, tuple):  # a bundle's manifest, and what lint says of it
        manifest, proofs = value
        return {**_result_json(manifest), "lint": _result_json(proofs)}
    if isinstance(value, dict):
        graphs = [{k: g[k] for k in ("name", "phase", "bytes", "ops")} for g in value["graphs"]]
        mesh = value["mesh"] and value["mesh"]["text"]
        return {"mesh": mesh, "graphs": graphs, "memory": value["memory"], "unproved": value["unproved"]}
    return value.to_json() if isinstance(value, (Check, Coverage, LintReport, Plan, Verified)) else None


def _shown(o: Outcome) -> Sequence[str]:
    lines, more = o.found.lines[:SHOWN], len(o.found.lines) - SHOWN
    return [*lines, f"... and {more:,} more"] if more > 0 else lines


# ---- the folder ------------------------------------------------------------------------------------------------------


def check_place(out: Path) -> None:
    """Refuse to replace what is no report.

    Raises:
        KimiGraphError: something else is there, or nothing can be.
    """
    check_writable(out)
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    file = out / JSON
    if not file.is_file() or read_json(file, 1 << 30, ConfigError).get("kind") != KIND:
        raise ConfigError(f"{out}: exists and is not a report of day0; choose another folder.")
    if other := sorted({p.name for p in out.iterdir()} - {JSON, MARKDOWN, HTML, WORK}):
        raise ConfigError(f"{out}: holds {other[0]}, which day0 did not write; choose another folder.")


def write_report(report: Report, folder: Path) -> None:
    """Write it in its three forms.

    Raises:
        OSError: it cannot be written.
    """
    blocks = list(document(report))
    (folder / MARKDOWN).write_text(as_markdown(blocks), encoding="utf-8")
    (folder / HTML).write_text(as_html(blocks), encoding="utf-8")
    (folder / JSON).write_text(json.dumps(report.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- the document ----------------------------------------------------------------------------------------------------


def document(r: Report) -> Iterator[Block]:
    """The whole report; the last section alone has dates and times."""
    yield Heading(r.title, 1)
    yield Text(r.summary + ".", "passed" if r.passed else "failed")
    if r.without:
        yield Text(
            f"All but the step config is of the model without {', '.join(r.without)}, as if that had no influence."
        )
    yield from _matrix(r)
    for o in r.of("failed"):
        yield Heading(f"Failed: {o.title}")
        yield Text(o.found.words)
        if o.found.lines:
            yield Points(_shown(o))
    yield Heading("Steps")
    rows = [(o.name[0] or "the model", o.name[1], o.found.state, o.found.words) for o in r.outcomes]
    yield Table([("of", "step", "result", "found"), *rows])
    yield from _model(r)
    yield from _plans(r)
    yield from _operators(r)
    yield from _verified(r)
    yield from _unproved(r)
    yield from _next(r)
    yield from _run(r)


def _matrix(r: Report) -> Iterator[Block]:
    """What was tried by what of it became of what, on one glance."""
    states = {o.name: o.found.state for o in r.outcomes}
    names = [t.name for t in r.targets]
    steps = list(dict.fromkeys(step for _, step in states))
    rows = []
    for step in steps:
        own = states.get(("", step))
        cells = [own or states[target, step] for target in names]
        rows.append((step, WORDS[step], *cells))
    yield Table([("step", "tries", *names), *rows])


def _model(r: Report) -> Iterator[Block]:
    config, audit = r.found(CONFIG), r.found(AUDIT)
    if config is None:
        return
    if config.assumptions:
        yield Heading("What the config assumes")
        yield Points(config.assumptions)
    if audit is None:
        return
    yield Heading("Checkpoint")
    rows = [("part", "parameters", "tensors", "bytes", "stored as")]
    for c in audit.components:
        stored = ", ".join(f"{name} {n:,}" for name, n in sorted(c.schemes.items()))
        rows.append((c.name, f"{c.parameters:,}", f"{c.tensors:,}", f"{c.bytes:,}", stored))
    yield Table(rows)
    if points := [*(f"read as the file has it: {line}" for line in audit.audit.disagreements), *audit.notes]:
        yield Points(points)


def _plans(r: Report) -> Iterator[Block]:
    plans = {t.name: plan for t in r.targets if (plan := r.found((t.name, PLAN))) is not None}
    if not plans:
        return
    yield Heading("Plan")
    yield Text("By a roofline: rates are those of data sheets, efficiencies are assumed, nothing is measured.")
    rows = [("target", "dies", "mesh", "free of a die", "experts", "sequences", "first token", "a token", "bound by")]
    for name, plan in plans.items():
        o = plan.best
        rows.append((
            name, dies(plan.devices, plan.ask.target), str(o.choice), gib(o.room), form(o),
            f"{o.request.rows} x {o.request.max_len:,}", duration(o.ttft), duration(o.tpot),
            o.decode.median.spent.bound,
        ))  # fmt: skip
    yield Table(rows)
    if points := [f"{name}: {line}" for name, plan in plans.items() for line in count_lines(plan)]:
        yield Points(points)


def _operators(r: Report) -> Iterator[Block]:
    """By phase and need, what serves it on every target."""
    found: dict[str, Coverage] = {t.name: c for t in r.targets if (c := r.found((t.name, OPERATORS))) is not None}
    if not found:
        return
    yield Heading("Operators")
    yield from (Text(c.summary + ".") for c in found.values())
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for target, c in found.items():
        for row in c.served:
            cells.setdefault((row.phase, row.part, row.kind), {}).setdefault(target, _serves(row))
        for u in c.unserved:
            cells.setdefault((u.phase, u.part, "all of it"), {})[target] = "CANNOT BE SERVED"
    for phase in dict.fromkeys(phase for phase, _, _ in cells):
        needs = [(part, need, own) for (p, part, need), own in cells.items() if p == phase]
        parts = list(dict.fromkeys(part for part, _, _ in needs))
        needs.sort(key=lambda row: parts.index(row[0]))
        rows = [(part, need, *(own.get(t, "-") for t in found)) for part, need, own in needs]
        yield Heading(phase, 3)
        yield Table([("part", "needs", *found), *rows])
    yield Heading("How operators are known to work on a device", 3)
    yield Table([("evidence", *found), *_evidence(found)])
    packages = dict.fromkeys(needed.text() for c in found.values() for needed in c.packages)
    if packages:
        yield Points([f"package: {words}" for words in packages])


def _serves(row: Served) -> str:
    """`KdaChunk (own)`; of what no choice made the types alone."""
    types = ", ".join(name for name, _ in row.types)
    whose = f" ({row.provider})" if row.provider and row.kind != REST else ""
    return types + whose + (" BROKEN" if row.broken else "")


def _evidence(found: Mapping[str, Coverage]) -> Iterator[tuple[str, ...]]:
    """Operators of the choices by how they are known, one row for each way."""
    known: dict[str, dict[str, dict[str, None]]] = {}
    for target, c in found.items():
        for row in c.served:
            if row.kind != REST:
                types = known.setdefault(row.evidence, {}).setdefault(target, {})
                types |= dict.fromkeys(name for name, _ in row.types)
    for evidence, own in known.items():
        yield (evidence, *(", ".join(own.get(target, {})) or "-" for target in found))


def _verified(r: Report) -> Iterator[Block]:
    """A table for each mode: tensors by bundle."""
    reports: dict[str, Verified] = {}
    for t in r.targets:
        for verify, bundle in ((VERIFY, BUNDLE), (VERIFY_SHARDED, SHARDED)):
            if (v := r.found((t.name, verify))) is not None:
                mesh = r.found((t.name, bundle))[0]["mesh"]
                reports[t.name if mesh is None else f"{t.name}, {mesh['text']}"] = v
    if not reports:
        return
    yield Heading("Graphs of the fixture against the model")
    for mode, words in MODES.items():
        cells: dict[str, dict[str, str]] = {"allowed": {}}
        for bundle, v in reports.items():
            for row in (row for row in v.rows if row.mode == mode):
                cells["allowed"][bundle] = f"{row.tolerance:.1e}"
                cells.setdefault(row.what, {})[bundle] = f"{row.error:.1e}" + ("" if row.passed else " DIFFERS")
        yield Text(f"{mode}: {words}")
        yield Table(
            [("tensor", *reports), *((what, *(own.get(b, "-") for b in reports)) for what, own in cells.items())]
        )
    counts = {b: ", ".join(f"{n} {kind}" for kind, n in v.provenance.items()) for b, v in reports.items()}
    yield Points([f"{bundle}: semantics of the operator types that ran: {words}" for bundle, words in counts.items()])


def _unproved(r: Report) -> Iterator[Block]:
    manifests = [m for t in r.targets if (m := r.found((t.name, GRAPHS))) is not None]
    if manifests:
        yield Heading("What no CPU can show")
        yield Points(list(dict.fromkeys(line for m in manifests for line in m["unproved"])))


def _next(r: Report) -> Iterator[Block]:
    lines = [line for t in r.targets if (plan := r.found((t.name, PLAN))) is not None for line in commands(plan)[:1]]
    if lines:
        yield Heading("Next")
        yield Code(lines)


def _run(r: Report) -> Iterator[Block]:
    yield Heading("This run")
    made_by = ", ".join(f"{name} {version}" for name, version in _versions().items())
    yield Text(f"{r.run.date}, {r.run.seconds:.0f} s, {r.run.machine}; {made_by}.")
    yield Table([("step", "seconds"), *((o.title, f"{o.seconds:.1f}") for o in r.outcomes)])
