"""The steps of a release day: of the model its config, its checkpoint and a fixture; of each target a plan, operators,
graphs of the whole model on the plan's mesh, and bundles of the fixture, which are run against the model.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from kimi_graph.check import check_checkpoint, folder_of
from kimi_graph.compile.coverage import Coverage, cover, request_of
from kimi_graph.compile.driver import Clock, Compiled, Request, compile_bundle, compile_model
from kimi_graph.compile.kept import Kept
from kimi_graph.compile.lint import lint_bundle
from kimi_graph.compile.targets import Target
from kimi_graph.compile.torchair_host import Late, default_cache
from kimi_graph.compile.verify import verify_bundle
from kimi_graph.config import LayerConfig, MlaConfig, ModelConfig
from kimi_graph.errors import ConfigError, ShardingError
from kimi_graph.fixture import Fixture, make_fixture
from kimi_graph.headers import INDEX
from kimi_graph.models.counts import parameter_counts
from kimi_graph.parallel import Mesh
from kimi_graph.plan.report import duration, form
from kimi_graph.plan.search import Ask, Plan, gib, make_plan
from kimi_graph.plan.sieve import Choice
from kimi_graph.read_config import load_config, load_known, presets

from .steps import Found, Name, Step

CONFIG, AUDIT, FIXTURE = ("", "config"), ("", "audit"), ("", "fixture")
PLAN, OPERATORS, GRAPHS = "plan", "operators", "graphs"
BUNDLE, VERIFY, SHARDED, VERIFY_SHARDED = "bundle", "verify", "sharded bundle", "sharded verify"
WORDS = {
    "config": "every key of config.json is known and meant",
    "audit": "the checkpoint has the tensors of the model, by headers or an index",
    "fixture": "a small checkpoint of the same kind",
    PLAN: "whether it fits, on how many dies, how fast; nothing is measured",
    OPERATORS: "which operator serves what, within its limits",
    GRAPHS: "the graphs of the whole model on the plan's mesh, made and checked, not written",
    BUNDLE: "the fixture compiled for one rank; what its files alone prove",
    VERIFY: "its graphs run on the CPU, equal to the model",
    SHARDED: "the fixture compiled for a small mesh of the plan's kind; what its files alone prove",
    VERIFY_SHARDED: "all ranks run on the CPU, equal to the model",
}
"""What each step tries."""

PAGE, CHUNK, PATCHES, STEPS, WAYS = 16, 16, 16, 3, 2  # of bundles of fixtures: small, and more than one of each
MOST_RANKS = 8  # that are run on a CPU


@dataclass
class Trial:
    """A model on some targets.

    Attributes:
        source: as it was named.
        work: an empty folder for fixtures and bundles.
        wheel, cache: where torchair is.
        keep: what compiles make is kept there, and taken from there.
        values: what steps gave to later ones.
        without: unknown keys of the config, which are left out.
    """

    source: str
    targets: tuple[Target, ...]
    work: Path
    wheel: Path | None = None
    cache: Path | None = None
    keep: bool = False
    values: dict[Name, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    def steps(self) -> Iterator[Step]:
        """What there is to try, in order. The seconds are those of K3.1-Pro."""
        yield Step(name=CONFIG, run=self.config, seconds=1)
        yield Step(name=AUDIT, run=self.audit, seconds=2, needs=(CONFIG,))
        yield Step(name=FIXTURE, run=self.fixture, seconds=2, needs=(CONFIG,))
        for t in self.targets:
            bundle, sharded = (t.name, BUNDLE), (t.name, SHARDED)
            yield Step(name=(t.name, PLAN), run=partial(self.plan, t), seconds=7, needs=(CONFIG,))
            yield Step(name=(t.name, OPERATORS), run=partial(self.operators, t), seconds=4, needs=(CONFIG,))
            yield Step(name=(t.name, GRAPHS), run=partial(self.graphs, t), seconds=7, needs=(CONFIG,))
            yield Step(name=bundle, run=partial(self.bundle, t), seconds=3, needs=(FIXTURE,))
            yield Step(name=(t.name, VERIFY), run=partial(self.verify, t, BUNDLE), seconds=6, needs=(bundle,))
            yield Step(name=sharded, run=partial(self.sharded, t), seconds=3, needs=(FIXTURE,))
            yield Step(name=(t.name, VERIFY_SHARDED), run=partial(self.verify, t, SHARDED), seconds=8, needs=(sharded,))

    # ---- the model ---------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path | None:
        """The checkpoint's folder; None where a config alone was given."""
        path = Path(self.source)
        if self.source in presets() or not (path.is_dir() or path.name == INDEX):
            return None
        return folder_of(path)

    def config(self) -> Found:
        """With unknown keys it fails; the other steps are then of the model without them."""
        source = self.folder or self.source
        try:
            return self._described(load_config(source))
        except ConfigError as error:
            config, unknown = load_known(source)
            if not unknown:
                raise
            words, *lines = str(error).splitlines()
            self.without = unknown
            lines.append(f"all other steps are of the model without {', '.join(unknown)}, as if that had no influence")
            lines.append(self._described(config).words)
            return Found(words=words, state="failed", lines=tuple(lines), value=config, goes_on=True)

    def _described(self, config: ModelConfig) -> Found:
        counts = parameter_counts(config)
        size = f"{_many(counts.text + counts.vision + counts.projector)} parameters, {_many(counts.active)} for a token"
        words = f"{config.name} ({config.model_type}): {size}; {_layers(config)}"
        if config.quant is not None:
            words += f"; released in {config.quant.format}"
        lines = tuple(f"assumed: {line}" for line in config.assumptions)
        return Found(words=words, lines=lines, value=config)

    def audit(self) -> Found:
        """The checkpoint's names, shapes and dtypes against the model's."""
        source, folder = Path(self.source), self.folder
        if folder is None:
            return Found(words=f"{self.source} is a config: there is no checkpoint to look into", state="skipped")
        if not [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
            return Found(words=f"{folder} has a config alone, no index and no weights", state="skipped")
        report = check_checkpoint(source if source.name == INDEX else folder, self.values[CONFIG])
        lines = [] if report.audit.ok else str(report.audit).splitlines()
        lines += [f"read as the file has it: {line}" for line in report.audit.disagreements]
        lines += [*report.faults, *report.notes]
        state = "passed" if report.passed else "failed"
        return Found(words=report.summary, state=state, lines=tuple(lines), value=report)

    def fixture(self) -> Found:
        """A small checkpoint with the dimensions of the model, in the released format."""
        config: ModelConfig = self.values[CONFIG]
        quantised = config.quant is not None
        made = make_fixture(config, self.work / "fixture", quantised=quantised, ways=WAYS)
        how = f"as released, in {config.quant.format}" if config.quant else "plain"
        words = f"{len(made.config.layers)} layers, {made.tensors} tensors, {made.bytes / 1e6:.1f} MB, {how}"
        return Found(words=words, value=made)

    # ---- the model on a target ---------------------------------------------------------------------------------------

    def plan(self, t: Target) -> Found:
        """The smallest deployment on a target, with its estimated times."""
        plan = make_plan(Ask(model=self.source, config=self.values[CONFIG], target=t))
        best = plan.best
        words = (
            f"{plan.summary}; {best.request.rows} x {best.request.max_len:,} tokens, experts as {form(best)}: "
            f"estimated {duration(best.ttft)} to the first token, {duration(best.tpot)} a token"
        )
        return Found(words=words, value=plan)

    def request(self, t: Target) -> Request:
        """What is compiled: as planned, or where nothing was, for one rank."""
        plan: Plan | None = self.values.get((t.name, PLAN))
        return request_of(self.values[CONFIG], target=t) if plan is None else plan.best.request

    def operators(self, t: Target) -> Found:
        """Who serves each operator of the model on a target."""
        report = cover(self.request(t), self._host.load())
        return Found(
            words=report.summary,
            state="passed" if report.passed else "failed",
            lines=tuple(faults_of(report)),
            value=report,
        )

    def graphs(self, t: Target) -> Found:
        """Graphs of the whole model, on the plan's mesh: made and checked, not written."""
        request = self.request(t)
        request.check()
        manifest = compile_bundle(request, self._host, None, kept=self._kept)
        memory = manifest["memory"]
        words = f"{gib(memory['weights'])} of weights and {gib(memory['states'])} of states, of {gib(memory['die'])}"
        return Found(words=f"{Compiled(manifest, Clock(), '').summary}; of a rank {words}", value=manifest)

    # ---- the fixture on a target -------------------------------------------------------------------------------------

    def bundle(self, t: Target) -> Found:
        """The fixture compiled without a mesh."""
        return self._compiled(t, self.place(t, BUNDLE), None)

    def sharded(self, t: Target) -> Found:
        """On the first small mesh that the fixture's sizes allow."""
        plan: Plan | None = self.values.get((t.name, PLAN))
        refused = []
        for choice in small_choices(plan):
            try:
                found = self._compiled(t, self.place(t, SHARDED), choice)
            except ShardingError as error:
                refused.append(f"not on {choice}: {error}")
                continue
            like = "" if plan is None else f"; {choice}, for {plan.best.choice} of the plan"
            return replace(found, words=found.words + like, lines=(*found.lines, *refused))
        return Found(words="no small mesh can be", state="failed", lines=tuple(refused))

    def place(self, t: Target, what: str) -> Path:
        """Where a bundle of the fixture is."""
        return self.work / (t.name if what == BUNDLE else f"{t.name}-sharded")

    def _compiled(self, t: Target, out: Path, choice: Choice | None) -> Found:
        fixture: Fixture = self.values[FIXTURE]
        plan: Plan | None = self.values.get((t.name, PLAN))
        made = compile_model(
            fixture.config,
            target=t,
            out=out,
            weights_format="bf16" if plan is None else plan.best.request.weights_format,
            **fixture_sizes(fixture.config, choice),
            torch_npu_wheel=self.wheel,
            cache_dir=self.cache,
            keep=self.keep,
        )
        proofs = lint_bundle(out, self._host.root)
        words = made.summary if proofs.passed else f"{made.summary}; lint: {proofs.summary}"
        lines = [f"{p.name}: {p.found}" for p in proofs.proofs if not p.passed]
        state = "passed" if proofs.passed else "failed"
        return Found(words=words, state=state, lines=tuple(lines), value=(made.manifest, proofs))

    def verify(self, t: Target, what: str) -> Found:
        """A compiled fixture, executed on the CPU, against the model.

        `what` is the bundle: that without a mesh, or the one on a mesh.
        """
        fixture: Fixture = self.values[FIXTURE]
        one = what == BUNDLE
        report = verify_bundle(self.place(t, what), checkpoint=fixture.folder, steps=STEPS, bisect=one)
        bad = [f"{r.where} ({r.mode}: {r.error:.1e}, allowed {r.tolerance:.0e})" for r in report.rows if not r.passed]
        lines = (*bad, *report.difference.splitlines()) if bad else ()
        return Found(words=report.summary, state="passed" if report.passed else "failed", lines=lines, value=report)

    @property
    def _host(self) -> Late:
        return Late(self.wheel, self.cache)

    @property
    def _kept(self) -> Kept | None:
        return Kept.at(self.cache or default_cache(), self._host) if self.keep else None


# ---- sizes and words -------------------------------------------------------------------------------------------------


def small_choices(plan: Plan | None) -> list[Choice]:
    """Meshes for a fixture, the best first: the plan's with every direction made small, then ever plainer ones."""
    plain = [Choice(mesh=Mesh(pipe=2, tensor=2)), Choice(mesh=Mesh(tensor=2)), Choice(mesh=Mesh(pipe=2))]
    if plan is None:
        return plain
    best = plan.best.choice
    m = best.mesh
    pipe, data, context, tensor = (min(n, 2) for n in (m.pipe, m.data, m.context, m.tensor))
    if data * context * tensor == 1:  # stages alone cut no tensor
        tensor = 2
    if pipe * data * context * tensor > MOST_RANKS:
        pipe = 1
    whole = m.experts == m.data * m.tensor
    mesh = Mesh(pipe=pipe, data=data, context=context, tensor=tensor, experts=0 if whole else min(m.experts, tensor))
    folded = replace(best, mesh=mesh, copies=mesh.experts if best.copies else 0)
    return [folded, Choice(mesh=mesh), *plain]


def fixture_sizes(config: ModelConfig, choice: Choice | None) -> dict[str, Any]:
    """Options of `compile_model`: more keys than an indexer takes, prefills of several chunks, more rows than one."""
    indexed = [x.mixer.indexer for x in config.layers if isinstance(x.mixer, MlaConfig) and x.mixer.indexer]
    length = 32 + max((x.top_k for x in indexed), default=32)
    sizes: dict[str, Any] = {"batch": 2, "chunk": CHUNK, "page": PAGE, "max_len": -(-length // PAGE) * PAGE}
    if config.vision is not None:
        sizes["patches"] = PATCHES
    if choice is None:
        return sizes
    sent = choice.mesh.data * choice.mesh.tensor * choice.chunks if choice.exchange else 1
    return {
        **sizes,
        "batch": max(2, sent),
        "mesh": choice.mesh,
        "exchange": choice.exchange,
        "split_cache": choice.split_cache,
        "pad": choice.pad,
        "redundant_experts": choice.copies,
        "moe_chunks": choice.chunks,
    }


def _layers(config: ModelConfig) -> str:
    """`93 layers: 69 kda, 24 mla with indexer; 92 moe, 1 dense; vision; at most 1,048,576 tokens`."""
    mixers = Counter(_mixer(layer) for layer in config.layers)
    others = Counter(layer.kinds[1] for layer in config.layers)
    kinds = [", ".join(f"{n} {kind}" for kind, n in counts.items()) for counts in (mixers, others)]
    kinds += ["vision"] * (config.vision is not None)
    return f"{len(config.layers)} layers: {'; '.join(kinds)}; at most {config.max_len:,} tokens"


def _many(count: int) -> str:
    """`2,780.1 B`, `31.5 M`."""
    return f"{count / 1e9:,.1f} B" if count >= 1e9 else f"{count / 1e6:,.1f} M"


def _mixer(layer: LayerConfig) -> str:
    mixer = layer.mixer
    if not isinstance(mixer, MlaConfig) or mixer.indexer is None:
        return layer.kinds[0]
    return "mla with a shared indexer" if mixer.indexer.shared else "mla with an indexer"


def faults_of(report: Coverage) -> Iterator[str]:
    """What cannot be served, and why."""
    yield from (f"{u.phase}, {u.part}: {u.why}" for u in report.unserved)
    yield from (f"{r.phase}, {r.part}, {r.kind}: {words}" for r in report.served for words in r.broken)
    if report.conflict:
        yield report.conflict
