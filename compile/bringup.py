"""`kimi-graph bringup`: from an empty machine to all ranks, in steps that name the first tensor that differs.

1. environment: chip, release, devices, operator packages
2. groups: every group gathers its ranks' numbers
3. operators: each golden case, on every rank
4. layers: one layer of each kind, all ranks of its stage
5. stages: each stage's graph, every node of it
6. ranks: all stages, the steps of `verify`, states from step to step

What a step finds is told from the device's own values (`localise`). A journal beside the report remembers what passed:
a later run goes on where the last one stopped, as long as bundle and machine are the same.
"""

import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_graph.errors import BundleError, KimiGraphError
from kimi_graph.files import check_writable, from_json
from kimi_graph.progress import Notify, silent

from .bundle import MANIFEST, Bundle, dump, open_bundle
from .cut import cut, parsed
from .device import CpuDevice, Device, Job
from .executor import Executor
from .executor.node import Edge
from .ge_proto import ModelDef, OpDef, describe, set_attr, split_edge
from .golden import Case, read_golden
from .hosts import _many
from .localise import Finding, difference, differs, first_difference, locate
from .manifest import target_of
from .sides import Recorded, Sides, Stage
from .verify import native_tolerance

JOURNAL, REPORT = "journal.jsonl", "report"
TITLE = "# Bring-up of "  # that a report begins with


@dataclass(frozen=True, kw_only=True)
class Step:
    """One thing to try. `run` gives what is wrong: a tensor, or words; None: nothing."""

    key: str
    title: str
    run: Callable[[], Finding | str | None]


@dataclass
class Outcome:
    """What became of a step: "passed", "passed before", "skipped" or "failed"."""

    key: str
    title: str
    state: str
    seconds: float = 0.0
    note: str = ""


@dataclass
class Report:
    """What bring-up found. `advice`: what to try next."""

    bundle: Bundle
    device: Mapping[str, str]
    outcomes: list[Outcome] = field(default_factory=list)
    finding: Finding | None = None
    problem: str = ""
    advice: str = ""

    @property
    def passed(self) -> bool:
        return not self.problem

    @property
    def summary(self) -> str:
        name = self.bundle.manifest["model"]["name"]
        if self.passed:
            return f"{name} on {self.device.get('name', 'a device')}: {_many(len(self.outcomes), 'step')} passed"
        last = self.outcomes[-1]
        return f"bring-up stopped at {last.title}: {self.problem}"

    def text(self) -> str:
        width = max((len(o.title) for o in self.outcomes), default=0)
        lines = [f"{o.title:{width}}  {o.state}" + (f" ({o.note})" if o.note else "") for o in self.outcomes]
        return "\n".join([*lines, *([self.advice] if self.advice else [])])

    def to_json(self) -> dict[str, Any]:
        m = self.bundle.manifest
        return {
            "passed": self.passed,
            "model": m["model"]["name"],
            "target": m["target"]["name"],
            "mesh": None if m["mesh"] is None else m["mesh"]["text"],
            "device": dict(self.device),
            "steps": [vars(o) for o in self.outcomes],
            "problem": self.problem,
            "finding": None if self.finding is None else self.finding.to_json(),
            "advice": self.advice,
        }

    def markdown(self) -> str:
        """To be shared."""
        m, said = self.bundle.manifest, ", ".join(f"{k} {v}" for k, v in self.device.items())
        mesh = "one rank" if m["mesh"] is None else m["mesh"]["text"]
        rows = [f"| {o.title} | {o.state} | {o.seconds:.1f} | {o.note} |" for o in self.outcomes]
        verdict = "All steps passed." if self.passed else f"**Stopped: {self.problem}.**\n\n{self.advice}"
        return "\n".join(
            [
                f"{TITLE}{m['model']['name']} for {m['target']['name']}, {mesh}", "", f"Device: {said}.", "",
                verdict, "", "| step | result | seconds | |", "| --- | --- | --- | --- |", *rows, "",
            ]
        )  # fmt: skip


# ---- the command -----------------------------------------------------------------------------------------------------


def rehearsal(bundle: Bundle) -> CpuDevice:
    """A CPU that says it is the machine the bundle is for."""
    t, mesh = bundle.manifest["target"], bundle.manifest["mesh"]
    ranks = 1 if mesh is None else mesh["ranks"]
    own = sorted(o for n in bundle.manifest["packages"] for o in n["operators"])
    said = {"soc_version": t["soc_version"], "cann": t["cann"], "devices": str(ranks), "operators": ",".join(own)}
    return CpuDevice({"name": "a CPU in place of devices", **said})


def bring_up(
    folder: Path,
    device: Device | None = None,
    *,
    checkpoint: Path | None = None,
    out: Path | None = None,
    restart: bool = False,
    known: "Known | None" = None,
    progress: Notify = silent,
) -> Report:
    """Try a bundle on a machine step by step, and stop at the first tensor that differs.

    Args:
        device: None: a CPU in place of it.
        checkpoint: weights; None: those the bundle was compiled from.
        out: report and journal; None: neither is written.
        restart: try again what passed before.
        known: what the CPU makes of the bundle, where several devices are tried with it.

    Raises:
        KimiGraphError: a damaged bundle, or no weights.
    """
    bundle = open_bundle(folder)
    device = rehearsal(bundle) if device is None else device
    facts = device.facts()
    report = Report(bundle, facts)
    journal = _Journal.open(out, bundle, facts, restart)
    steps = list(_Trial(known or Known.of(bundle, checkpoint), device).steps())
    for at, step in enumerate(steps):
        progress(f"{at + 1} of {len(steps)}: {step.title}", 0, 0)
        if journal.knows(step.key):
            report.outcomes.append(Outcome(step.key, step.title, "passed before"))
            continue
        started = time.perf_counter()
        try:
            found = step.run()
        except KimiGraphError as error:
            found = f"the device refused: {error}"
        seconds = time.perf_counter() - started
        if isinstance(found, str) and found.startswith("skipped: "):
            report.outcomes.append(Outcome(step.key, step.title, "skipped", seconds, found.removeprefix("skipped: ")))
        elif found is None:
            report.outcomes.append(Outcome(step.key, step.title, "passed", seconds))
            journal.note(step.key)
        else:
            report.outcomes.append(Outcome(step.key, step.title, "failed", seconds))
            report.problem = str(found)
            report.finding = found if isinstance(found, Finding) else None
            report.advice = _advice(bundle, report.finding)
            break
    if out is not None:
        (out / f"{REPORT}.md").write_text(report.markdown())
        (out / f"{REPORT}.json").write_bytes(dump(report.to_json()))
    return report


def _advice(bundle: Bundle, finding: Finding | None) -> str:
    if finding is None:
        return "Look at the machine first: the runbook of `kimi-graph deploy` says what has to be there."
    if finding.weight:
        how = "kimi-graph weights --verify reads what was written again"
        return f"Look at how weights are bound: {finding.weight} is not this rank's part; {how}."
    if finding.type == "group":
        return "Look at the rank table and at ge.exec.hcomGrouplist: every rank has to list a group's ranks alike."
    if finding.type.startswith("Hcom"):
        return f"Look at HCCL: {finding.type} of {finding.node} gave something else than its group's ranks gave it."
    if any(choice["operator"] == finding.type for choice in bundle.manifest["choices"]):
        return (
            f"To go on without the operator: kimi-graph compile ... --avoid {finding.type}; the next provider serves."
        )
    return f"{finding.type} was no choice, nobody else serves it: share the report with who supports the machine."


def _check_place(out: Path) -> None:
    """Raises KimiGraphError where journal or report cannot be, or would take the place of a file of no bring-up."""
    check_writable(out / JOURNAL)
    for name, start in ((JOURNAL, '{"mark": '), (f"{REPORT}.json", '{\n "advice": '), (f"{REPORT}.md", TITLE)):
        file = out / name
        if file.exists() and not (file.is_file() and _starts(file, start.encode())):
            raise BundleError(f"{file}: exists and is of no bring-up, and would be lost; choose another folder.")


def _starts(file: Path, start: bytes) -> bool:
    """Whether a file begins so, or ends before it differs: a run may have been killed there."""
    with file.open("rb") as f:
        found = f.read(len(start))
    return start.startswith(found)


@dataclass
class _Journal:
    """Keys of steps that passed, for one bundle and machine."""

    file: Path | None
    mark: str
    passed: set[str]

    @staticmethod
    def open(out: Path | None, bundle: Bundle, facts: Mapping[str, str], restart: bool) -> "_Journal":
        what = (bundle.folder / MANIFEST).read_bytes() + dump(dict(facts))
        mark = hashlib.sha256(what).hexdigest()
        if out is None:
            return _Journal(None, mark, set())
        _check_place(out)
        out.mkdir(parents=True, exist_ok=True)
        file, passed = out / JOURNAL, set[str]()
        if restart:
            file.unlink(missing_ok=True)
        for line in file.read_text().splitlines() if file.is_file() else []:
            try:
                entry = from_json(line)
            except ValueError:
                continue  # a line that was being written when the run ended
            if isinstance(entry, dict) and entry.get("mark") == mark:
                passed.add(str(entry.get("step")))
        return _Journal(file, mark, passed)

    def knows(self, key: str) -> bool:
        return key in self.passed

    def note(self, key: str) -> None:
        if self.file is not None:
            with self.file.open("a") as out:
                out.write(json.dumps({"mark": self.mark, "step": key}) + "\n")


# ---- steps -----------------------------------------------------------------------------------------------------------


@dataclass
class Known:
    """What a bundle does, as far as the CPU knows: its golden cases, and its ranks' steps, which are run when asked."""

    bundle: Bundle
    sides: Sides
    cases: list[Case]

    @staticmethod
    def of(bundle: Bundle, checkpoint: Path | None) -> "Known":
        return Known(bundle, Sides(bundle, checkpoint), read_golden(bundle))

    @functools.cached_property
    def played(self) -> list[tuple[int, Any, list[Stage]]]:
        """Every step; of the last one of each phase with all values."""
        return list(self.sides.play(self.sides.last_of_phases()))


class _Trial:
    """The steps of a bundle on a device."""

    def __init__(self, known: Known, device: Device) -> None:
        self.known, self.device = known, device
        self.bundle, self.sides = known.bundle, known.sides
        self.carried: dict[int, dict[str, Tensor]] = {}

    def steps(self) -> Iterator[Step]:
        yield Step(key="environment", title="environment", run=self.environment)
        for name in sorted(self.sides.groups):
            yield Step(key=f"group:{name}", title=f"group {name}", run=lambda name=name: self.group(name))
        if not self.known.cases:
            yield Step(key="operators", title="operators", run=lambda: "skipped: compile --golden N stores cases")
        for case in self.known.cases:
            title = f"operator {case.type} ({case.name})"
            yield Step(key=f"operator:{case.name}", title=title, run=lambda case=case: self.operator(case))
        for phase, index, kinds in self.layers():
            title = f"layer {index} ({' and '.join(kinds)}), {phase}"
            yield Step(
                key=f"layer:{phase}:{index}", title=title, run=lambda p=phase, i=index: self.layer(p, i)
            )  # fmt: skip
        for entry in self.bundle.manifest["graphs"]:
            phase, stage = entry["phase"], entry.get("stage", 0)
            title = f"stage {stage}, {phase}"
            yield Step(key=f"stage:{phase}:{stage}", title=title, run=lambda p=phase, s=stage: self.stage(p, s))
        yield Step(key="ranks", title=f"all {_many(self.sides.world, 'rank')}", run=self.ranks)

    def environment(self) -> str | None:
        said, wanted = self.device.facts(), self.bundle.manifest["target"]
        target = target_of(self.bundle.manifest)
        if (chip := said.get("soc_version")) is not None and chip not in target.soc_versions:
            return f"the chip is {chip}; the bundle is for {target.name}, {wanted['soc_version']} or one like it"
        if (cann := said.get("cann")) is not None and _release(cann) < _release(wanted["cann"]):
            return f"CANN is {cann}; the bundle needs {wanted['cann']} or later"
        if (count := said.get("devices")) is not None and int(count) < self.sides.world:
            return f"there are {count} devices; the bundle has {self.sides.world} ranks"
        if (operators := said.get("operators")) is not None:
            needed = {o for n in self.bundle.manifest["packages"] for o in n["operators"]}
            if missing := sorted(needed - set(operators.split(","))):
                return f"no package has {', '.join(missing)}; the bundle's kernels/ or its provider's package builds it"
        return None

    def group(self, name: str) -> Finding | str | None:
        """Every rank gives its number; its group gathers them."""
        if ":" in name:
            return "skipped: nothing but its own operators may use it"
        lists = self.sides.groups[name]
        jobs = {
            rank: Job(_gather(name, len(own)), {"x": torch.tensor([rank], dtype=torch.int32)}, {})
            for own in lists
            for rank in own
        }
        ran = self.device.run(jobs, self.sides.groups)
        for own in lists:
            found = {rank: ran[rank].outputs[0].flatten().tolist() for rank in own}
            if wrong := [rank for rank in own if found[rank] != list(own)]:
                why = f"its ranks stand as {found[wrong[0]]}, expected {list(own)}"
                return Finding(node=name, type="group", ranks=tuple(wrong), error=1.0, why=why)
        return None

    def operator(self, case: Case) -> Finding | None:
        jobs = {rank: Job(case.model, case.inputs, case.states) for rank in range(self.sides.world)}
        ran = self.device.run(jobs, {})
        wrong = {}
        for rank, made in ran.items():
            pairs = [*zip(made.outputs, case.outputs, strict=True)]
            pairs += [(made.states[name], x) for name, x in case.after.items()]
            if bad := [difference(a, b) for a, b in pairs if differs(a, b, case.type)]:
                wrong[rank] = max(bad)
        if not wrong:
            return None
        why = first_difference(self.device, jobs, {})
        words = "" if why is None else why.why
        return Finding(node=case.node, type=case.type, ranks=tuple(wrong), error=max(wrong.values()), why=words)

    def layers(self) -> Iterator[tuple[str, int, tuple[str, ...]]]:
        """Of each phase the first layer of each kind."""
        phases = dict.fromkeys(g["phase"] for g in self.bundle.manifest["graphs"] if g["phase"] != "vision")
        for phase in phases:
            seen = set()
            for i, layer in enumerate(self.sides.config.layers):
                if layer.kinds not in seen:
                    seen.add(layer.kinds)
                    yield phase, i, layer.kinds

    def recorded(self, phase: str, stage: int) -> Stage:
        """What the CPU did in the last step of a phase."""
        for index, step, stages in reversed(self.known.played):
            if step.phase == phase and index in self.sides.last_of_phases():
                return next(s for s in stages if next(iter(s.values())).stage == stage)
        raise BundleError(f"no step of phase {phase}.")

    def layer(self, phase: str, index: int) -> Finding | str | None:
        prefix = f"layers.{index}."
        stage = next(s for s in self._stages(phase) if any(n.startswith(prefix) for n in _names(s)))
        jobs = {rank: _part(run, prefix) for rank, run in stage.items()}
        return locate(self.device, jobs, self.sides.groups)

    def _stages(self, phase: str) -> list[Stage]:
        stages = [g.get("stage", 0) for g in self.bundle.manifest["graphs"] if g["phase"] == phase]
        return [self.recorded(phase, s) for s in stages]

    def stage(self, phase: str, stage: int) -> Finding | None:
        jobs = {rank: run.job for rank, run in self.recorded(phase, stage).items()}
        return locate(self.device, jobs, self.sides.groups)

    def ranks(self) -> Finding | None:
        """All steps, with the device's own states and with what its stages give each other."""
        tolerance = native_tolerance(self.sides.config)
        entries = {g["name"]: g for g in self.bundle.manifest["graphs"]}
        for index, _, stages in self.known.played:
            crossed: dict[int, dict[str, Tensor]] = {}
            for stage in stages:
                entry = entries[next(iter(stage.values())).graph]
                jobs = {r: self._carried(run, entry, crossed.get(p, {})) for p, (r, run) in enumerate(stage.items())}
                ran = self.device.run(jobs, self.sides.groups)
                for place, (rank, run) in enumerate(stage.items()):
                    self.carried.setdefault(rank, {}).update(ran[rank].states)
                    gives = entry.get("gives", [o["name"] for o in entry["outputs"]])
                    crossed[place] = {**crossed.get(place, {}), **dict(zip(gives, ran[rank].outputs, strict=True))}
                    pairs = zip(gives, ran[rank].outputs, run.ran.outputs, strict=True)
                    states = [(n, ran[rank].states[n], x) for n, x in run.ran.states.items()]
                    for name, found, expected in [*pairs, *states]:
                        error = difference(_counted(name, found), _counted(name, expected))
                        if not error <= (tolerance if expected.is_floating_point() else 0):
                            node = first_difference(self.device, jobs, self.sides.groups)
                            words = f"seen in {name}, step {index}"
                            return node or Finding(node=name, type="result", ranks=(rank,), error=error, why=words)
        return None

    def _carried(self, run: Recorded, entry: Mapping[str, Any], crossed: Mapping[str, Tensor]) -> Job:
        known = self.carried.get(run.rank, {})
        reads = {name: crossed[name] for name in entry.get("reads", ()) if name in crossed}
        states = {name: known.get(name, x) for name, x in run.job.states.items()}
        return replace(run.job, inputs={**run.job.inputs, **reads}, states=states)


def _counted(name: str, x: Tensor) -> Tensor:
    """Of a state all but slot 0 and page 0, which are nobody's."""
    return x[1:] if name.startswith("s.") and x.shape[0] > 1 else x


def _names(stage: Stage) -> list[str]:
    return [op.name for op in next(iter(stage.values())).model.graph[0].op]


def _part(run: Recorded, prefix: str) -> Job:
    """A layer of a rank's graph alone, with what it read."""
    keep = {n.name for n in parsed(run.model).order if n.name.startswith(prefix)}
    part = cut(run.model, keep, f"{run.graph}.{prefix.rstrip('.')}")
    alone = Executor(part.model)

    def value(name: str) -> Tensor:
        edge: Edge = split_edge(part.boundary[name]) if name in part.boundary else (name, 0)
        if edge[0] in run.job.inputs:
            return run.job.inputs[edge[0]]
        return run.job.states[edge[0]] if edge[0] in run.job.states else run.values[edge]

    return Job(part.model, {n: value(n) for n in alone.inputs}, {n: value(n) for n in alone.states})


def _gather(group: str, ranks: int) -> ModelDef:
    """A graph that gathers one number of each rank of a group."""
    model = ModelDef()
    graph = model.graph.add(name=f"group.{group}")
    source: OpDef = graph.op.add(name="x", type="Data")
    gather: OpDef = graph.op.add(name="gather", type="HcomAllGather")
    net: OpDef = graph.op.add(name="NetOutput", type="NetOutput")
    for op, edges, read, made in ((source, [], 1, 1), (gather, ["x:0"], 1, ranks), (net, ["gather:0"], ranks, 0)):
        op.input.extend(edges)
        desc = op.input_desc.add()
        describe(desc, (read,), torch.int32)
        desc.name = "x" if op is not net else "input0"
        if made:
            desc = op.output_desc.add()
            describe(desc, (made,), torch.int32)
            desc.name = "y"
    set_attr(source, "index", 0)
    for name, value in {"rank_size": ranks, "group": group, "fusion": 0, "fusion_id": -1}.items():
        set_attr(gather, name, value)
    return model


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
