"""Whether a bundle's graphs fit an engine.

Knows no engine: `bundle_calls` makes calls of a step, `bundle_runners` runs them, `bundle_caches` is what vLLM sees. A
graph takes one table of pages and one slot a row for all layers, so the engine keeps the rows of all attention layers
in one cache and the memories of all KDA layers in another; both share its pages, so that slots are as many as pages.
Sizes are the bundle's, none is the engine's to choose. On a mesh a rank has its stage's layers and its part of their
states; tables and pages are the same on all of them.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kimi_graph import tree
from kimi_graph.compile import air
from kimi_graph.compile.buckets import Gear, Room, gears_of
from kimi_graph.compile.bundle import MANIFEST, Bundle, as_written, open_bundle
from kimi_graph.compile.expect import bundle_config, check_checkpoint_model
from kimi_graph.compile.manifest import check_claims
from kimi_graph.compile.verify import find_checkpoint
from kimi_graph.config import KdaConfig, ModelConfig
from kimi_graph.errors import BundleError, ConfigError
from kimi_graph.layers import kda_state_specs
from kimi_graph.parallel import Mesh

KEY = "kimi_graph"  # in what an engine is told beside its own flags
MODES = ("native", "exact")
ENGINES_DTYPE = {"native": None, "exact": torch.float32}  # that caches have to have; None: the model's
EXPERTS = "kimi_graph_experts"  # beside it, see `balance`
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
        if EXPERTS in told:
            words = "copies of experts are the bundle's own, compile --redundant-experts"
            raise ConfigError(f"--additional-config {EXPERTS}: {words}; leave it out.")
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
            ("--limit-mm-per-prompt image", self.pictures, "without phase vision the most pictures", want.pictures),
        ):
            if mine > theirs:
                raise ConfigError(f"{graphs.where}: {key} is {theirs:,}, {flag} {mine:,}; lower it to {theirs}.")


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Graphs:
    """A bundle that an engine can call: with prefill and decode, and memories in the engine's pages."""

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
    def patches(self) -> int:
        """That the graph of pictures takes; 0 where there is none."""
        return max((gear.tokens for gear in self.gears.get("vision", ())), default=0)

    @property
    def settings(self) -> Settings:
        """What an engine has to be told."""
        state, gears = self.contract, self.gears
        prefill, decode = gears["prefill"][-1], gears["decode"][-1]
        rows = min(prefill.rows, decode.rows)
        return Settings(
            page=state["page_tokens"],
            pages=state["pages"],
            length=Room.of(state, self.config).length,
            sequences=rows,
            tokens=rows * prefill.tokens,
            dtype=ENGINES_DTYPE[self.mode] or self.config.dtype,
            mesh=self.mesh,
            pictures=sys.maxsize if self.patches else 0,
        )

    @property
    def flags(self) -> list[str]:
        """What vLLM is told, but for the length."""
        s, told = self.settings, json.dumps(Choice(bundle=self.bundle.folder, mode=self.mode).told)
        words = ["--additional-config", told, "--dtype", _words(s.dtype), "--block-size", str(s.page)]
        words += ["--num-gpu-blocks-override", str(s.pages), "--max-num-seqs", str(s.sequences)]
        words += ["--max-num-batched-tokens", str(s.tokens)]
        without = self.config.vision is not None and not self.patches
        return words + (["--limit-mm-per-prompt", '{"image": 0}'] if without else [])

    def check(self) -> None:
        """Whether an engine can call it at all.

        Raises:
            BundleError: the key of the manifest, with what to compile.
        """
        where, state, gears = self.where, self.contract, self.gears
        nearest = Mesh(pipe=self.mesh.pipe, tensor=self.mesh.tensor)
        if self.mesh != nearest:
            words = "an engine's ranks are stages and tensor ranks, which share out experts"
            raise BundleError(f"{where}: mesh is {self.mesh}; {words}: compile it with --mesh {nearest}.")
        if (pools := state.get("pools", 1)) > 1:
            raise BundleError(
                f"{where}: state.pools is {pools}; ranks of an engine have the same pages: compile it without "
                "--split-cache."
            )
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
                f"{where}: a page of the engine holds the memories of all KDA layers of a rank, which takes {least:,} "
                f"tokens; a bundle's pages have at most {MOST_PAGE:,}.{self._mesh_with_room()}"
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
        """Tokens whose rows take as many bytes as the memories of a sequence, on any rank."""
        return self._least_page(self.mesh.tensor)

    def _least_page(self, ways: int) -> int:
        """The same with so many tensor ranks, which share the heads of memories and all have whole rows."""
        row, memory = self.row * self.settings.dtype.itemsize, 0
        if self.memories:
            specs = tree.leaves(kda_state_specs(self._kda, 1, self.settings.dtype))
            each = sum(s.numel * (s.dtype or self.settings.dtype).itemsize for s in specs)
            memory = self.memories * each // ways
        return -(-memory // (row * LEAST_PAGE)) * LEAST_PAGE

    @property
    def _kda(self) -> KdaConfig:
        return next(m for m in (layer.mixer for layer in self.config.layers) if isinstance(m, KdaConfig))

    def _mesh_with_room(self) -> str:
        """The fewest tensor ranks of which each has few enough memories, in words."""
        for ways in range(self.mesh.tensor + 1, self._kda.heads + 1):
            if self._kda.heads % ways == 0 and self._least_page(ways) <= MOST_PAGE:
                return f" With --mesh tp={ways} of compile it takes {self._least_page(ways):,}."
        return ""

    # ---- on a mesh ----

    @property
    def mesh(self) -> Mesh:
        """Of the ranks that run it together."""
        entry = self.bundle.manifest["mesh"]
        return Mesh() if entry is None else Mesh.parse(entry["text"])

    def states(self, stage: int, kind: str) -> dict[str, tuple[int, ...]]:
        """Shapes of the states of a stage as each of its ranks has them, of its "kda" or "mla" layers, by name."""
        return {
            s["name"]: tuple(s.get("local", s["shape"]))
            for s in self.contract["states"]
            if s.get("stage", 0) == stage and s["name"].split(".")[3] == kind
        }

    @property
    def row(self) -> int:
        """Numbers of a token in all attention layers of a stage together; of the stage that has most."""
        return max(sum(shape[-1] for shape in self.states(s, "mla").values()) for s in range(self.mesh.pipe))

    @property
    def memories(self) -> int:
        """KDA layers of a stage, of the one that has most."""
        return max(len({n.split(".")[2] for n in self.states(s, "kda")}) for s in range(self.mesh.pipe))

    def read_by(self, stage: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Values that stages before hand on to a stage, for itself and later ones: a token's shape, and dtype."""
        entries = [g for g in self.bundle.manifest["graphs"] if g["phase"] == "prefill"]
        read = {name for g in entries for name in g.get("reads", ()) if g["stage"] >= stage}
        given = [o for g in entries if g.get("stage", 0) < stage for o in g["outputs"] if o["name"] in read]
        dtypes = {o["name"]: getattr(torch, o["dtype"]) for o in given}
        if self.mode == "exact":
            dtypes = {name: torch.float64 if d.is_floating_point else d for name, d in dtypes.items()}
        return {o["name"]: (tuple(o["shape"][2:]), dtypes[o["name"]]) for o in given}


def graphs_for(choice: Choice, checkpoint: Path | None) -> tuple[Graphs, Path]:
    """A bundle, and the checkpoint to serve by it: the one given, or the one that it was compiled from.

    Raises:
        BundleError: there is none; see `Graphs.open`.
    """
    folder = find_checkpoint(open_bundle(choice.bundle), checkpoint).folder
    return Graphs.open(choice, folder), folder
