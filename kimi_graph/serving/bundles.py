"""A bundle's graphs in an engine: whether they fit it, of which calls a step is made, and what runs them.

Knows no engine: `bundle_caches` is what vLLM sees. A graph takes one table of pages and one slot a row for all layers,
so the engine keeps the rows of all attention layers in one cache and the memories of all KDA layers in another; both
share its pages, so that slots are as many as pages. Sizes are the bundle's, none is the engine's to choose.

Axes: N tokens of a step, R requests, B rows of a graph, T its tokens a row, P pages of a sequence, V vocab.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kimi_graph import tree
from kimi_graph.checkpoint import load_params
from kimi_graph.compile import air
from kimi_graph.compile.buckets import Gear, Room, gears_of
from kimi_graph.compile.bundle import MANIFEST, Bundle, as_written, open_bundle
from kimi_graph.compile.expect import bundle_config, check_checkpoint_model
from kimi_graph.compile.manifest import check_claims
from kimi_graph.compile.verify import BoundGraphs, Packed, as_kept, find_checkpoint
from kimi_graph.config import KdaConfig, MlaConfig, ModelConfig
from kimi_graph.errors import BundleError, ConfigError
from kimi_graph.layers import kda_state_specs, mla_state_specs, step_batch
from kimi_graph.models import decoder
from kimi_graph.parallel import Mesh

from .rows import Rows

KEY = "kimi_graph"  # in what an engine is told beside its own flags
MODES = ("native", "exact")
ENGINES_DTYPE = {"native": None, "exact": torch.float32}  # that caches have to have; None: the model's
LEAST_PAGE, MOST_PAGE = 16, 1024  # of a bundle, whose pages are multiples of the least


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The bundle that an engine is to call.

    Attributes:
        mode: of the executor. "native": in the dtypes of the graphs. "exact": in float64, with the engine's caches in
            float32, for proof.
    """

    bundle: Path
    mode: str = "native"

    @staticmethod
    def of(told: Any) -> "Choice | None":
        """What `--additional-config` says, `{"kimi_graph": {"bundle": DIR}}`; None: nothing of a bundle.

        Raises:
            ConfigError: a key or a mode that there is not.
        """
        if not isinstance(told, Mapping) or KEY not in told:
            return None
        entry = told[KEY]
        known = [f.name for f in dataclasses.fields(Choice)]
        if not isinstance(entry, Mapping) or "bundle" not in entry or set(entry) - set(known):
            raise ConfigError(
                f"--additional-config {KEY} is {entry!r}; expected an object of {', '.join(known)}, with a bundle."
            )
        if entry.get("mode", "native") not in MODES:
            raise ConfigError(f"--additional-config {KEY}.mode is {entry['mode']!r}; expected {' or '.join(MODES)}.")
        return Choice(bundle=Path(entry["bundle"]), mode=entry.get("mode", "native"))

    @property
    def told(self) -> dict[str, Any]:
        """What `of` reads."""
        return {KEY: {"bundle": str(self.bundle), **({} if self.mode == "native" else {"mode": self.mode})}}


# ---- whether they fit ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What an engine was told, as far as graphs depend on it.

    Attributes:
        page: tokens of a page.
        pages: in all; None: the engine counts them by its memory.
        length: tokens of the longest sequence.
        sequences, tokens: of a step, at most.
        dtype: of the model in the engine.
        mesh: of the engine's ranks.
        pictures: that a prompt may have.
        connector: what moves pages out of the engine and back, None: nothing.
    """

    page: int
    pages: int | None
    length: int
    sequences: int
    tokens: int
    dtype: torch.dtype
    mesh: Mesh
    pictures: int = 0
    connector: str | None = None

    def check(self, graphs: "Graphs") -> None:
        """Hold an engine against the bundle's contract.

        Raises:
            ConfigError: the first setting that differs, with the manifest's key, both values, and the flag to give.
        """
        want = graphs.settings
        if self.connector is not None:
            why = "caches are laid out in another way than what moves them knows"
            raise ConfigError(f"{graphs.where}: --kv-transfer-config {self.connector}: {why}; leave it out.")
        for flag, mine, key, theirs in (
            ("--tensor-parallel-size and --pipeline-parallel-size", self.mesh, "mesh", want.mesh),
            ("--dtype", _words(self.dtype), "model.config", _words(want.dtype)),
            ("--block-size", self.page, "state.page_tokens", want.page),
            ("--num-gpu-blocks-override", self.pages, "state.pages", want.pages),
        ):
            if mine != theirs:
                found = "not given" if mine is None else mine
                raise ConfigError(f"{graphs.where}: {key} is {theirs}, {flag} {found}; give {theirs}.")
        for flag, mine, key, theirs in (
            ("--max-model-len", self.length, "state.tokens_per_sequence", want.length),
            ("--max-num-seqs", self.sequences, "buckets.rows", want.sequences),
            ("--max-num-batched-tokens", self.tokens, "buckets.rows x tokens of prefill", want.tokens),
            ("--limit-mm-per-prompt image", self.pictures, "pictures that the engine gives to graphs", want.pictures),
        ):
            if mine > theirs:
                raise ConfigError(f"{graphs.where}: {key} is {theirs:,}, {flag} {mine:,}; lower it to {theirs}.")


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Graphs:
    """A bundle that an engine can call: of one rank, with prefill and decode, and memories in the engine's pages."""

    bundle: Bundle
    config: ModelConfig
    mode: str

    @staticmethod
    def open(choice: Choice, folder: Path) -> "Graphs":
        """A bundle with the checkpoint that is served by it.

        Raises:
            BundleError: no bundle, a damaged one, one that no engine can call, or one of another model.
            ConfigError: the checkpoint's config.json cannot be read.
        """
        bundle = open_bundle(choice.bundle)
        with as_written(choice.bundle):
            config = bundle_config(bundle)
            models = {g["name"]: air.from_bytes(bundle.graph_bytes(g), g["file"]) for g in bundle.manifest["graphs"]}
            check_claims(bundle, config, models)
            bundle.check_files()
            graphs = Graphs(bundle, config, choice.mode)
            graphs.check()
        if not (folder / "config.json").is_file():
            raise BundleError(f"{folder}: no config.json; expected the checkpoint that {choice.bundle} is of.")
        check_checkpoint_model(bundle, folder)
        return graphs

    @property
    def where(self) -> Path:
        """The manifest's file."""
        return self.bundle.folder / MANIFEST

    @property
    def contract(self) -> Mapping[str, Any]:
        """Of states, as the manifest has it."""
        return self.bundle.manifest["state"]

    @property
    def gears(self) -> dict[str, list[Gear]]:
        """By phase, small ones first."""
        found: dict[str, list[Gear]] = {}
        for gear in gears_of(self.bundle):
            found.setdefault(gear.phase, []).append(gear)
        return found

    @property
    def hybrid(self) -> bool:
        """Whether some layers have a memory of fixed size."""
        return any(isinstance(layer.mixer, KdaConfig) for layer in self.config.layers)

    @property
    def settings(self) -> Settings:
        """What an engine has to be told."""
        state, gears, text = self.contract, self.gears, self.bundle.manifest["mesh"]
        prefill, decode = gears["prefill"][-1], gears["decode"][-1]
        rows = min(prefill.rows, decode.rows)
        return Settings(
            page=state["page_tokens"],
            pages=state["pages"],
            length=Room.of(state, self.config).length,
            sequences=rows,
            tokens=rows * prefill.tokens,
            dtype=ENGINES_DTYPE[self.mode] or self.config.dtype,
            mesh=Mesh() if text is None else Mesh.parse(text["text"]),
        )

    @property
    def flags(self) -> list[str]:
        """What vLLM is told, but for the length."""
        s, told = self.settings, json.dumps(Choice(bundle=self.bundle.folder, mode=self.mode).told)
        words = ["--additional-config", told, "--dtype", _words(s.dtype), "--block-size", str(s.page)]
        words += ["--num-gpu-blocks-override", str(s.pages), "--max-num-seqs", str(s.sequences)]
        words += ["--max-num-batched-tokens", str(s.tokens)]
        return words + (["--limit-mm-per-prompt", '{"image": 0}'] if self.config.vision is not None else [])

    def check(self) -> None:
        """Whether an engine can call it at all.

        Raises:
            BundleError: the key of the manifest, with what to compile.
        """
        where, state, gears = self.where, self.contract, self.gears
        if self.bundle.manifest["mesh"] is not None:
            text = self.bundle.manifest["mesh"]["text"]
            raise BundleError(f"{where}: mesh is {text}; an engine calls bundles of one rank, made without --mesh.")
        if missing := [phase for phase in ("prefill", "decode") if phase not in gears]:
            raise BundleError(f"{where}: buckets has no {missing[0]}; an engine needs it: compile it without --phase.")
        if state["kv_dtype"] != "bf16":
            raise BundleError(
                f"{where}: state.kv_dtype is {state['kv_dtype']}; an engine's caches have the model's dtype: compile "
                "it with --kv-dtype bf16."
            )
        if not self.hybrid:
            return
        self._check_memories()

    def check_device(self, device: torch.device) -> None:
        """Whether anything here calls it where an engine runs.

        Raises:
            BundleError: nothing does; said before caches are made.
        """
        if device.type != "cpu":
            raise BundleError(
                f"{self.bundle.folder}: nothing here calls a bundle on {device.type} in an engine: GE takes a state as "
                "one tensor without gaps, a page of the engine holds several; leave it out to serve the checkpoint."
            )

    def _check_memories(self) -> None:
        """Whether pages hold memories: one table of pages is all that an engine has."""
        where, state, least, step = self.where, self.contract, self.least_page, self.settings.tokens
        page, slots, pages = state["page_tokens"], state["slots"], state["pages"]
        if least > MOST_PAGE:
            raise BundleError(
                f"{where}: a page of the engine holds the memories of all KDA layers, which takes {least:,} tokens; a "
                f"bundle's pages have at most {MOST_PAGE:,}."
            )
        for fault in (
            page < least and f"state.page_tokens is {page}; a page holds all memories from {least} on",
            slots != pages and f"state.slots is {slots}, state.pages {pages}; each page of the engine may be a slot",
            step < page and f"a step of prefill has {step} tokens, a page {page}; the engine reads to its end at once",
        ):
            if fault:
                raise BundleError(f"{where}: {fault}. Compile it with {self._sizes(max(page, least))}.")

    def _sizes(self, page: int) -> str:
        """Sizes with which compile makes a bundle that fits, of as many and as long sequences as this one."""
        rows, (prefill, *_) = self.settings.sequences, self.gears["prefill"]
        pages = rows * (-(-self.settings.length // page) + 2) + 1  # two of a sequence are memories, one is nobody's
        chunk = max(prefill.tokens, -(-page // rows))
        return f"--page {page} --pages {pages} --slots {pages} --chunk {chunk}"

    @property
    def least_page(self) -> int:
        """Tokens whose rows take as many bytes as the memories of a sequence."""
        row, memory = self.row * self.settings.dtype.itemsize, 0
        for layer in self.config.layers:
            if isinstance(layer.mixer, KdaConfig):
                specs = tree.leaves(kda_state_specs(layer.mixer, 1, self.settings.dtype))
                memory += sum(s.numel * (s.dtype or self.settings.dtype).itemsize for s in specs)
        return -(-memory // (row * LEAST_PAGE)) * LEAST_PAGE

    @property
    def row(self) -> int:
        """Numbers of a token in all attention layers together."""
        mixers = [layer.mixer for layer in self.config.layers]
        return sum(sum(row_parts(m).values()) for m in mixers if isinstance(m, MlaConfig))


def row_parts(m: MlaConfig) -> dict[str, int]:
    """Numbers of a token in an attention layer, by the names of its states."""
    return {name: spec.shape[-1] for name, spec in tree.items(mla_state_specs(m, 1, 1, torch.float32))}


def graphs_for(choice: Choice, checkpoint: Path | None) -> tuple[Graphs, Path]:
    """A bundle, and the checkpoint to serve by it: the one given, or the one that it was compiled from.

    Raises:
        BundleError: there is none; see `Graphs.open`.
    """
    folder = find_checkpoint(open_bundle(choice.bundle), checkpoint).folder
    return Graphs.open(choice, folder), folder


# ---- calls of a step -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call of a graph.

    Attributes:
        requests: `[n]` int64, their numbers in the step; n is at most the graph's rows.
        at: `[n, t]` int64, where their tokens are among the step's; padding repeats a row's last.
        before, counts: `[n]` int64, tokens that the caches hold of each, and new ones.
    """

    gear: Gear
    requests: Tensor
    at: Tensor
    before: Tensor
    counts: Tensor


def calls_of(rows: Rows, gears: Mapping[str, Sequence[Gear]], *, shared: bool = False) -> list[Call]:
    """The calls that compute a group of rows, one after another.

    A row with more tokens than a graph takes is several pieces, each in a call of its own. More rows than a graph has
    take turns. Of the graphs that have enough rows the one with the fewest is called.

    Args:
        shared: a row may read pages that another one writes, see `rows_of`: pieces go in the order of their positions.
    """
    of_phase = gears["decode" if rows.step else "prefill"]
    widest = of_phase[-1]
    pieces: list[tuple[int, int, int]] = []  # order, row, first token
    for row, (before, count) in enumerate(zip(rows.before.tolist(), rows.counts.tolist(), strict=True)):
        for first in range(0, count, widest.tokens):
            pieces.append((before + first if shared else first, row, first))
    return [_call(rows, group, of_phase) for group in _packed(sorted(pieces), widest.rows)]


def _packed(pieces: Sequence[tuple[int, int, int]], most: int) -> Iterator[list[tuple[int, int]]]:
    """Rows and first tokens, in order; no more than `most` together, and none of one row twice."""
    some: dict[int, int] = {}
    for _, row, first in pieces:
        if row in some or len(some) == most:
            yield list(some.items())
            some = {}
        some[row] = first
    if some:
        yield list(some.items())


def _call(rows: Rows, group: Sequence[tuple[int, int]], gears: Sequence[Gear]) -> Call:
    gear = next(g for g in gears if g.rows >= len(group))
    row, first = (torch.tensor(x, dtype=torch.int64) for x in zip(*group, strict=True))
    counts = (rows.counts.cpu()[row] - first).clamp(max=gear.tokens)
    column = first[:, None] + torch.minimum(torch.arange(gear.tokens), counts[:, None] - 1)
    at = rows.at.cpu()[row].gather(1, column)
    return Call(gear, rows.requests.cpu()[row], at, rows.before.cpu()[row] + first, counts)


def inputs_of(call: Call, graphs: Graphs, tokens: Tensor, table: Tensor, slots: Tensor) -> dict[str, Tensor]:
    """What a graph is given besides weights and states; rows that are left are nobody's.

    Args:
        tokens: `[N]` of the step.
        table: `[R, pages]` of each request, in order.
        slots: `[R]`.
    """
    rows, state = call.gear.rows, graphs.contract
    page, most = state["page_tokens"], state["pages_per_sequence"]
    held = -(-(call.before + call.counts) // page)  # pages that a sequence has; what a table says after them is old
    own = table.cpu()[call.requests, :most]
    own = own * (torch.arange(own.shape[1]) < held[:, None])
    batch = step_batch(
        _padded(own, (rows, most)).int(),
        _padded(slots.cpu()[call.requests], (rows,)).int(),
        _padded(call.before, (rows,)),
        _padded(call.counts, (rows,)),
        call.gear.tokens,
        page,
        rope=graphs.config.rotation,
    )
    given = {"tokens": _padded(tokens.cpu()[call.at], (rows, call.gear.tokens)).long()}
    return given | {f"batch.{name}": x for name, x in tree.items(batch)}


def _padded(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros after what is there, in every dimension."""
    made = x.new_zeros(shape)
    made[tuple(slice(size) for size in x.shape)] = x
    return made


# ---- what runs them --------------------------------------------------------------------------------------------------


class Runner(Protocol):
    """Runs graphs on an engine's own caches."""

    def call(self, phase: str, given: Mapping[str, Tensor], states: Mapping[str, Tensor]) -> Tensor:
        """Logits `[B, V]` of each row's last token.

        Args:
            given: see `inputs_of`.
            states: by name, `[slots, ..]` and `[pages, page, ..]`, as the engine's caches hold them: views with any
                strides. They are written where they lie.
        """
        ...


def runner_for(graphs: Graphs, folder: Path, device: torch.device) -> Runner:
    """What runs graphs on a device, with the weights of a checkpoint.

    Raises:
        BundleError: nothing here does.
        CheckpointError: the checkpoint is not the model's.
    """
    graphs.check_device(device)
    return CpuRunner(graphs, folder)


class CpuRunner:
    """Graphs in the executor: slow, and what it gives is what `verify` has compared with the model."""

    def __init__(self, graphs: Graphs, folder: Path) -> None:
        self.graphs = graphs
        bundle, config = graphs.bundle, graphs.config
        checkpoint = find_checkpoint(bundle, folder)
        packed = Packed(checkpoint, dict(tree.items(decoder.model_specs(config))))
        exact = graphs.mode == "exact"
        params = load_params(checkpoint, config, torch.float64) if exact else load_params(checkpoint, config)
        if exact:
            params = as_kept(bundle.weights, params, packed)
        self.bound = BoundGraphs(bundle, params, graphs.mode, packed)
        self.shapes = {s["name"]: s["graph_shape"] for s in graphs.contract["states"]}
        self.constant = self._no_pictures()

    def _no_pictures(self) -> dict[str, Tensor]:
        """Inputs of prefill that say where pictures are: nowhere."""
        entry = self.graphs.bundle.graph("prefill")
        return {
            i["name"]: torch.zeros(i["shape"], dtype=getattr(torch, i["dtype"]))
            for i in entry["inputs"]
            if i["name"].startswith("vision.")
        }

    def call(self, phase: str, given: Mapping[str, Tensor], states: Mapping[str, Tensor]) -> Tensor:
        """Logits `[B, V]` of each row's last token, see `Runner.call`."""
        given = {**self.constant, **given}
        if self.graphs.mode == "native":
            seen = {name: x.view(self.shapes[name]) for name, x in states.items()}
            return self.bound.run(phase, given, seen, in_place=True).outputs[0]
        seen = {name: x.reshape(self.shapes[name]) for name, x in states.items()}
        ran = self.bound.run(phase, given, seen)
        page = self.graphs.contract["page_tokens"]
        pages = (given["batch.slot_mapping"] // page).unique()
        for name, x in states.items():  # of others' pages nothing: other states share their memory
            at = given["batch.slots"].long().unique() if ".kda." in name else pages
            x[at] = ran.states[name].view(x.shape)[at].to(x.dtype)
        return ran.outputs[0].float()
