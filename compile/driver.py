"""`kimi-graph compile`: config to bundle. Capture, fold, convert, stamp, check, write; no weights, no NPU, no CANN."""

import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from kimi_graph import tree
from kimi_graph.checkpoint import Checkpoint, audit, released_formats
from kimi_graph.config import ModelConfig, arranged, check_length, check_whole
from kimi_graph.errors import CompileError
from kimi_graph.files import Standing
from kimi_graph.models import decoder
from kimi_graph.models.counts import part_of
from kimi_graph.models.decoder import Use
from kimi_graph.ops.kernel_project import operators, project_files
from kimi_graph.parallel import Mesh, Rules
from kimi_graph.progress import Notify, silent

from . import air, bundle, constants
from .at_load import bucket_entries, left_to_do
from .caches import check_kv_dtype, quantise_caches
from .capture import Captured
from .checks import check_graph
from .convert import convert
from .executor import infer_shapes
from .fuse import CHAINS, fuse_chains
from .ge_proto import ModelDef, OpDef, is_tiled
from .kept import Kept
from .least import RUNTIME, check_least, least_weights
from .lower import Choice, Weights
from .manifest import graph_entry, memory_entry, state_contract, target_entry, weight_plan
from .mesh_manifest import mesh_entry, mesh_lines, shared_states, stage_entry
from .meshes import Layout, check_layout, default_chunk
from .order import order_collectives
from .origins import Origins, source_of
from .packages import own_types, package_lines, packages_of
from .passes import bytes_only, weight_name
from .phases import (
    Bucket,
    capture_pieces,
    capture_sharded_pieces,
    fold_piece,
    parameter_path,
    place_of,
    pools,
    state_name,
    uses,
)
from .prototype_rows import ROWS
from .prototypes import Prototypes
from .recipe import Step
from .stamp import Assembly, Piece, alias_states, make_piece
from .targets import Target
from .torchair_host import Host, Late, default_cache
from .weight_formats import Packed, expert_weights, kept_form, native_form, usable
from .wrap import wrapped, wrapped_items


def legal_phases(config: ModelConfig) -> tuple[str, ...]:
    """What a model can be compiled for, in the order it is used."""
    return ("prefill", "decode") if config.vision is None else ("vision", "prefill", "decode")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to compile.

    Attributes:
        phases: "prefill", "decode" or both.
        rows: sequences of a step.
        chunk: tokens of a prefill step.
        max_len: longest sequence, tokens.
        page: tokens of a cache page.
        pages: of the pool, None: as many as needed.
        slots: of KDA states, nobody's included; None: one for each row.
        patches: of a picture, at most; None: 4,096 (models with vision alone).
        kv_dtype: of the caches of sparse attention: "bf16" (the model's own), "int8" or "fp8".
        target: what it is lowered for.
        constants: weights inside the graphs, as FileConstant nodes.
        weights_format: of the routed experts, see `weight_formats`.
        stored: formats of parameters that are stored quantised, by path.
        mesh: of ranks that run it together; all numbers are those of all ranks. None: one rank.
        exchange, split_cache, pad: of a mesh, see `meshes.Layout`.
    """

    config: ModelConfig
    target: Target
    phases: tuple[str, ...] = ("prefill", "decode")
    rows: int = 1
    chunk: int = 512
    max_len: int = 4096
    page: int = 128
    pages: int | None = None
    slots: int | None = None
    constants: bool = False
    patches: int | None = None
    kv_dtype: str = "bf16"
    weights_format: str = "bf16"
    stored: Mapping[str, str] = field(default_factory=dict)
    mesh: Mesh | None = None
    exchange: bool = False
    split_cache: bool = False
    pad: bool = False

    @functools.cached_property
    def layout(self) -> Layout | None:
        """The model on its mesh; None for one rank."""
        if self.mesh is None:
            return None
        choices = {"exchange": self.exchange, "split_cache": self.split_cache, "pad": self.pad}
        return Layout(config=self.config, mesh=self.mesh, **choices)

    @functools.cached_property
    def placed(self) -> Layout:
        """The model on its mesh; on a mesh of one rank where there is none."""
        return Layout(config=self.config, mesh=Mesh()) if self.layout is None else self.layout

    @functools.cached_property
    def form(self) -> str:
        """What graphs keep the routed experts in, "plain" or a form of `weight_formats`.

        Raises:
            CompileError: no kernel of the target takes that.
        """
        return kept_form(self.weights_format, self.native, self.target.soc)

    @functools.cached_property
    def native(self) -> str:
        """What the routed experts are stored in."""
        return native_form(self.config, decoder.model_specs(self.config), self.stored)

    @property
    def experts(self) -> str:
        """The form of the routed experts in words, with a better one where there is one."""
        text = str(self.config.dtype).removeprefix("torch.") if self.form == "plain" else self.form
        if self.form != "plain" or self.native == "plain" or not usable(self.native, self.target.soc):
            return text
        return f"{text}; {self.target.soc} has a kernel for them as stored ({self.native}): --weights-format native"

    @functools.cached_property
    def _specs(self) -> dict[str, Any]:
        return dict(tree.items(decoder.model_specs(self.config)))

    def packed(self, parameter: str, rules: Rules | None = None) -> Mapping[str, Packed]:
        """Inputs that hold a parameter, by its path, where it is kept packed; empty where it is not.

        Args:
            rules: of a mesh: of one rank's experts, which are whole.

        Raises:
            CompileError: a mesh splits experts that are kept packed.
        """
        if self.form == "plain" or part_of(parameter) != "experts":
            return {}
        spec = self._specs[parameter]
        if rules is not None:
            ways = [rules.mesh.size(rules.on(axis)) for axis in spec.axes]
            if any(n > 1 for n in ways[1:]):
                raise CompileError(f"{parameter}: an expert kept as {self.form} is not split; split experts alone.")
            own, each = rules.physical("experts", spec.shape[0]) // ways[0], len(spec.source) // spec.shape[0]
            spec = replace(spec, shape=(own, *spec.shape[1:]), source=spec.source[: own * each])
        return expert_weights(self.form, spec)

    def weights_of(self, use: Use, rules: Rules | None = None) -> Weights:
        """How a part's weights are kept."""
        return Weights(
            form=self.form,
            packed=lambda parameter: self.packed(parameter_path(self.config, parameter, use.prefix), rules),
        )

    def check(self) -> None:
        """Refuse what cannot be had, before anything is made.

        Raises:
            CompileError: choices that exclude each other, or that this model, mesh or format does not have.
        """
        self._check_choices()
        self.buckets()
        form = self.form
        if self.constants and form != "plain":
            raise CompileError(f"--weights-format {self.weights_format}: packed weights need --weights input.")
        if self.constants and self.mesh is not None:
            raise CompileError("--weights constant: ranks of a mesh have different weights; take --weights input.")

    def check_least(self) -> None:
        """Whether there is hope that the ranks of a mesh hold their weights, before any graph is made.

        Raises:
            CompileError: there is none.
        """
        if (layout := self.layout) is None or not {"prefill", "decode"} & set(self.phases):
            return
        rules = layout.rules("decode")
        packed = {path: self.packed(path, rules) for path in self._specs}
        held = least_weights(layout, self._specs, packed)
        stages = [stage.layers for stage in layout.stages(self.buckets()[-1])]
        check_least(
            f"{self.config.name} on {self.mesh}", self.target.name, self.target.memory_bytes, RUNTIME, stages, held
        )

    def _check_choices(self) -> None:
        """Choices of a mesh need one."""
        moe = self.config.moe
        chosen = {
            "--exchange": self.exchange,
            "--split-cache": self.split_cache,
            "--pad": self.pad,
            "--redundant-experts": moe is not None and moe.redundant > 0,
            "--moe-chunks": moe is not None and moe.chunks > 1,
        }
        if self.mesh is None and (flag := next((flag for flag, given in chosen.items() if given), None)):
            raise CompileError(f"{flag} is for many ranks; give a --mesh.")

    def buckets(self) -> tuple[Bucket, ...]:
        """The static shapes, checked.

        Raises:
            CompileError: a number that cannot be meant.
        """
        sizes = {"--batch": self.rows, "--chunk": self.chunk, "--max-len": self.max_len, "--page": self.page}
        check_whole("compile", CompileError, **sizes)
        optional = {"--pages": self.pages, "--patches": self.patches}
        check_whole("compile", CompileError, least=None, **{name: n for name, n in optional.items() if n is not None})
        legal = legal_phases(self.config)
        if self.config.vision is None and self.patches is not None:
            raise CompileError(f"--patches {self.patches}: {self.config.name} has no vision tower.")
        if not self.phases or set(self.phases) - set(legal):
            raise CompileError(
                f"--phase {','.join(self.phases)!r}: the phases of {self.config.name} are {', '.join(legal)}."
            )
        if self.page % 16 or not 16 <= self.page <= 1024:
            raise CompileError(
                f"--page {self.page}: CANN's paged attention takes multiples of 16 up to 1,024; "
                f"the nearest is {min(1024, max(16, round(self.page / 16) * 16))}."
            )
        pools = 1 if self.layout is None else self.layout.pools
        sequence_pages = -(-check_length(self.config, self.max_len, self.page).pages // pools) * pools
        check_kv_dtype(self.config, self.target, self.kv_dtype, sequence_pages * self.page, split=pools > 1)
        if "prefill" in self.phases and self.chunk > self.max_len:
            raise CompileError(f"--chunk {self.chunk} is over --max-len {self.max_len}; the largest is {self.max_len}.")
        if self.layout is not None:
            sparse = decoder.is_sparse(self.config, sequence_pages * self.page)
            check_layout(
                self.layout, phases=self.phases, rows=self.rows, chunk=self.chunk, pages=self.pages, sparse=sparse
            )
        slots, enough = self._pools(sequence_pages)
        pages = enough if self.pages is None else self.pages
        self._check_pages(pages, sequence_pages)
        slots = self._check_slots(slots)
        shape = Bucket(
            phase="decode", rows=self.rows, tokens=1, page=self.page, pages=pages, sequence_pages=sequence_pages,
            slots=slots, images=self._images(),
        )  # fmt: skip
        sizes = {"decode": 1, "prefill": self.chunk, "vision": self._patches}
        return tuple(replace(shape, phase=p, tokens=sizes[p]) for p in dict.fromkeys(self.phases))

    def _pools(self, sequence_pages: int) -> tuple[int, int]:
        """Slots, and pages that are enough for full sequences."""
        if self.layout is None:
            return self.rows + 1, self.rows * sequence_pages + 1
        return pools(self.layout.rules("decode"), self.rows, sequence_pages)

    def _check_pages(self, pages: int, sequence_pages: int) -> None:
        """A pool must hold one sequence of the longest length, a page for each row, and the tokens of one step."""
        for name, value in (("--batch", self.rows), ("--pages", pages)):
            if value >= 2**31:
                raise CompileError(f"{name} {value:,}: slots and pages are numbered in 32 bits, at most {2**31 - 1:,}.")
        shards, share = (1, 1) if self.layout is None else (self.layout.shards, self.layout.pools)
        rows = self.rows // shards
        tokens = rows * (self.chunk if "prefill" in self.phases else 1)
        least = max(sequence_pages // share + 1, rows + 1, -(-tokens // (self.page * share))) * shards * share
        if pages < least:
            whose = "" if shards * share == 1 else f" on each of {shards * share} ranks that share them out"
            raise CompileError(
                f"--pages {pages}: a sequence of {self.max_len:,} tokens takes {sequence_pages} pages of {self.page}, "
                f"a step writes {tokens:,} tokens, and page 0 is nobody's{whose}; at least {least}"
                + (f", {self._pools(sequence_pages)[1]} for {self.rows} sequences as long." if self.rows > 1 else ".")
            )

    def _check_slots(self, least: int) -> int:
        """Slots that there are: of each shard one for each row and nobody's, or more."""
        shards = 1 if self.layout is None else self.layout.shards
        slots = least if self.slots is None else self.slots
        if slots < least or slots % shards or slots >= 2**31:
            nearest = min(max(least, slots - slots % shards), (2**31 - 1) // shards * shards)
            whose = "" if shards == 1 else f", as many on each of {shards} shards"
            why = f"each row has one, and slot 0 is nobody's{whose}"
            raise CompileError(f"--slots {slots}: {why}; at least {least}, nearest {nearest}.")
        return slots

    @property
    def _patches(self) -> int:
        return 4096 if self.patches is None else self.patches

    def _images(self) -> int:
        """Rows of image embeddings: one of each merged group of patches."""
        if self.config.vision is None:
            return 0
        merged, patches = math.prod(self.config.vision.merge), self._patches
        if patches < merged or patches % merged:
            nearest = max(merged, patches // merged * merged)
            raise CompileError(f"--patches {patches}: {merged} patches become one token; the nearest is {nearest}.")
        return patches // merged


@dataclass(frozen=True)
class Graph:
    """A finished graph of one bucket, and where everything in it comes from.

    Attributes:
        weights: parameter and recipe steps of each weight. origins: of each piece, for people and for `bisect`.
        choices: operators that lowerings chose, by piece.
        stage: of a mesh; None: a graph of one rank. reads, gives: values of other stages, see `pipeline`.
    """

    bucket: Bucket
    model: ModelDef
    weights: dict[str, tuple[str, tuple[Step, ...]]]
    origins: dict[str, Origins]
    choices: dict[str, tuple[Choice, ...]] = field(default_factory=dict)
    stage: int | None = None
    reads: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.model.graph[0].name


@dataclass
class Clock:
    """Seconds spent in each step of a compile."""

    seconds: dict[str, float] = field(default_factory=dict)
    notify: Callable[[str], None] = lambda step: None

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Inside, time counts as that of the step `name`, of which `notify` is told."""
        self.notify(name)
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start


# ---- one graph -------------------------------------------------------------------------------------------------------


def build_graph(
    request: Request,
    b: Bucket,
    host: Host | Late,
    clock: Clock | None = None,
    *,
    rules: Rules | None = None,
    kept: Kept | None = None,
) -> Graph:
    """The whole graph of one bucket: every distinct piece traced and converted once, stamped to all layers.

    Args:
        rules: of a mesh: the graph that each of its ranks runs (`own_index.*` inputs say where it stands). Sizes of `b`
            are those of all ranks together.
        kept: of earlier compiles.
    """
    clock = clock or Clock()
    prototypes = Prototypes(request.target.soc, host.root)
    pieces = build_pieces(request, b, host, prototypes, clock, rules, kept)
    placed = uses(request.config, b)
    with clock.step("stamp"):
        graph = stamp_graph(request.config, b, [(use, pieces[use.part]) for use in placed], prototypes)
        graph = fused(graph, request.target, prototypes)
    with clock.step("check"):
        check(graph, request.target, prototypes)
    return graph


def build_pieces(
    request: Request,
    b: Bucket,
    host: Host | Late,
    prototypes: Prototypes,
    clock: Clock,
    rules: Rules | None = None,
    kept: Kept | None = None,
) -> dict[str, Piece]:
    """Every distinct piece of a bucket, traced and converted, or as it was kept; see `build_graph`."""
    if kept is not None:
        with clock.step("cache"):
            found = kept.pieces(request, b, rules)
        if found is not None:
            return found
    with clock.step("torchair"):
        loaded = host.load()
    with clock.step("trace"):
        captured = captured_pieces(request, b, rules)
    first = {use.part: use for use in reversed(uses(request.config, b))}
    with clock.step("convert"):
        made = {
            name: convert_piece(name, c, request.target, loaded, prototypes, request.weights_of(first[name], rules))
            for name, c in captured.items()
        }
    if kept is not None:
        with clock.step("cache"):
            kept.keep_pieces(request, b, rules, made)
    return made


def captured_pieces(request: Request, b: Bucket, rules: Rules | None = None) -> dict[str, Captured]:
    """Every distinct piece of a bucket, traced."""
    if rules is None:
        captured = capture_pieces(request.config, b)
    else:
        sharded = capture_sharded_pieces(request.config, b, rules)
        captured = {name: piece.captured for name, piece in sharded.items()}
    return {name: quantise_caches(c, request.kv_dtype) for name, c in captured.items()}


def fused(graph: Graph, target: Target, prototypes: Prototypes) -> Graph:
    """The graph with its chains fused, see `fuse`; what moved is noted among the origins."""
    found = fuse_chains(graph.model, target, prototypes)
    if not found.choices:
        return graph
    moved: Origins = {"lines": {}, "values": {edge: [now] for edge, now in found.moved.items()}}
    return replace(
        graph, choices=graph.choices | {CHAINS: tuple(found.choices)}, origins=graph.origins | {CHAINS: moved}
    )


def check(graph: Graph, target: Target, prototypes: Prototypes) -> None:
    """Hold a finished graph against every rule.

    Raises:
        CompileError: what does not hold, with source lines.
    """
    ops = graph.model.graph[0].op
    check_graph(
        graph.model,
        target,
        prototypes,
        weights=set(graph.weights),
        states={op.name for op in ops if op.type == "RefData"},
        sources={op.name: source_of(graph.origins, op.name) for op in ops},
    )


def convert_piece(
    name: str, captured: Captured, target: Target, host: Host, prototypes: Prototypes, weights: Weights | None = None
) -> Piece:
    """Passes on the FX graph, torchair's conversion, passes on the GE graph. `weights`: how they are kept."""
    folded = fold_piece(captured)
    placeholders = [n.name for n in folded.captured.module.graph.nodes if n.op == "placeholder"]
    inputs = dict(zip(placeholders, folded.captured.inputs, strict=True))
    recipes = {node: folded.weights[dotted] for node, dotted in inputs.items() if dotted in folded.weights}
    kept = replace(weights or Weights(), recipes=recipes)
    made = convert(folded.captured.module, name=name, host=host, target=target, cann=target.cann, weights=kept)
    inputs |= {added: added for added in made.added}
    outputs = alias_states(made.model, inputs, folded.captured.outputs, prototypes)
    try:
        infer_shapes(made.model)
    except CompileError as error:
        node = str(error).partition(" ")[0]
        raise CompileError(f"{made.sources.get(node, name)}: {error}") from error
    origins: Origins = {"lines": made.sources, "values": made.edges}
    piece = make_piece(made.model, inputs, outputs, {**folded.weights, **made.weights}, origins, prototypes)
    return replace(piece, choices=made.choices)


def stamp_graph(
    config: ModelConfig,
    b: Bucket,
    placed: Sequence[tuple[Use, Piece]],
    prototypes: Prototypes,
    outputs: Sequence[str] | None = None,
    name: str = "",
) -> Graph:
    """Copy the pieces to their places, in order, and tie them together.

    Args:
        outputs: names of values; those of the last part by default. name: of the graph; the bucket's by default.
    """
    assembly = Assembly(name or b.name)
    weights: dict[str, tuple[str, tuple[Step, ...]]] = {}
    values: dict[str, str] = {}
    for use, piece in placed:
        read = {f"in{i}": name for i, name in enumerate(use.reads)}

        def bind(
            name: str, op: OpDef, use: Use = use, piece: Piece = piece, read: dict[str, str] = read, values=values
        ) -> str:
            if name in read:
                return values.get(read[name]) or assembly.input(read[name], op)
            if name.startswith("p."):
                parameter, steps = piece.weights[name]
                path = parameter_path(config, parameter, use.prefix)
                full, made = "p." + weight_name(path, steps), (path, bytes_only(steps))
                assert weights.setdefault(full, made) == made, f"{full} is made by {weights[full]} and by {made}"
                return assembly.input(full, op)
            if name.startswith("s."):
                return assembly.input(state_name(config, use, name.removeprefix("s.")), op)
            return assembly.input(name, op)

        out = assembly.stamp(piece, place_of(use), bind)
        values |= {name: out[f"out.{i}"] for i, name in enumerate(use.writes)}
    origins = {use.part: piece.origins for use, piece in placed}
    choices = {use.part: piece.choices for use, piece in placed if piece.choices}
    model = assembly.finish({name: values[name] for name in outputs or placed[-1][0].writes}, prototypes)
    order_collectives(model)
    return Graph(b, model, weights, origins, choices)


# ---- the bundle ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """What `compile_model` made."""

    manifest: dict[str, Any]
    clock: Clock
    experts: str = ""
    kept: tuple[str, ...] = ()  # what was done with earlier compiles', in words

    @property
    def summary(self) -> str:
        nodes = sum(sum(g["ops"].values()) for g in self.manifest["graphs"])
        names = ", ".join(g["name"] for g in self.manifest["graphs"])
        mesh = self.manifest["mesh"]
        ranks = "" if mesh is None else "1 rank" if mesh["ranks"] == 1 else f"{mesh['ranks']:,} ranks"
        where = "" if mesh is None else f" on {mesh['text']} ({ranks})"
        model, target = self.manifest["model"]["name"], self.manifest["target"]["name"]
        return f"{model} for {target}{where}: {names} ({nodes:,} nodes)"

    def text(self) -> str:
        m, s = self.manifest, self.manifest["state"]
        steps = [f"{name} {seconds:.1f} s" for name, seconds in self.clock.seconds.items()]
        sizes = {True: "{tokens} patches", False: "{rows} x {tokens} tokens"}
        shapes = [
            f"{g['name']}: {sizes[g['phase'] == 'vision'].format(**g)}, {g['bytes'] / 1e6:.1f} MB" for g in m["graphs"]
        ]
        return "\n".join(
            [
                f"target    {m['target']['name']} ({m['target']['product']}), CANN {m['target']['cann']}",
                *mesh_lines(m),
                *(line for words in package_lines(m) for line in wrapped("package   ", words)),
                *wrapped("graphs    ", "; ".join(shapes)),
                f"state     {s['slots']} slots, {s['pages']} pages of {s['page_tokens']} tokens, "
                f"{s['tokens_per_sequence']:,} tokens a sequence" + bundle.caches_text(s),
                f"experts   {self.experts}",
                f"memory    {_memory(m)}",
                *(line for i, words in enumerate(self.kept) for line in wrapped(f"{'' if i else 'cache':<10}", words)),
                *wrapped_items("time      ", steps),
            ]
        )

    def to_json(self) -> Any:
        return {"manifest": self.manifest, "seconds": self.clock.seconds}


def _memory(m: dict[str, Any]) -> str:
    """Weights and states beside what a die has."""
    weights, states, die = (m["memory"][part] for part in ("weights", "states", "die"))
    one, most = ("one rank", "") if m["mesh"] is None else ("a rank", "the rank that holds most: ")
    fits = "" if weights + states <= die else f"; NOT ENOUGH for {one}: kimi-graph plan says for how many it is"
    return f"{most}{_size(weights)} of weights, {_size(states)} of states; a die has {_size(die)}{fits}"


def _size(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


def compile_model(
    config: ModelConfig,
    *,
    target: Target,
    out: Path | None,
    checkpoint: Path | None = None,
    phases: tuple[str, ...] | None = None,
    batch: int | None = None,
    chunk: int | None = None,
    max_len: int | None = None,
    page: int | None = None,
    pages: int | None = None,
    slots: int | None = None,
    patches: int | None = None,
    kv_dtype: str = "bf16",
    weights: str = "input",
    weights_format: str = "bf16",
    mesh: Mesh | None = None,
    exchange: bool = False,
    split_cache: bool = False,
    pad: bool = False,
    redundant_experts: int = 0,
    moe_chunks: int = 1,
    torch_npu_wheel: Path | None = None,
    cache_dir: Path | None = None,
    keep: bool = False,
    must_fit: bool = True,
    progress: Notify = silent,
) -> Compiled:
    """Compile a model into a bundle. See `Request` for the numbers; None takes its default (phases: all).

    Args:
        out: the bundle's folder, replaced if it is a bundle; None makes and checks the graphs and writes nothing.
        checkpoint: where the weights lie; remembered beside the bundle's hashed content, for `verify`.
        weights: "input" (bound when the bundle is loaded) or "constant" (in the bundle, pointed to by the graphs).
        weights_format: of the routed experts, of `weight_formats.NAMES`.
        mesh: of ranks that run it together: `batch` and the other numbers are those of all of them (`batch` by default
            one row for each of `data`).
        exchange, split_cache, pad: of a mesh, see `meshes.Layout`.
        redundant_experts, moe_chunks: see `MoeConfig`.
        cache_dir: where torchair is, and `keep`: take from there what an earlier compile made, and keep what this one
            makes, see `kept`.
        must_fit: of a mesh: refuse what its ranks have no room for. Without one a bundle is of one rank whatever a die
            has: it is for looking, proving and lowering a model whole.

    Raises:
        KimiGraphError: a request that cannot be met; nothing is written.
    """
    length = min(Request.max_len, config.max_len) if max_len is None else max_len
    batch = mesh.data if batch is None and mesh is not None else batch
    numbers = {"rows": batch, "page": page, "pages": pages, "slots": slots, "patches": patches}
    given: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    request = Request(
        config=arranged(config, redundant_experts, moe_chunks),
        target=target,
        phases=legal_phases(config) if phases is None else phases,
        chunk=default_chunk(max(1, min(Request.chunk, length)), mesh) if chunk is None else chunk,
        max_len=length,
        constants=weights == "constant",
        kv_dtype=kv_dtype,
        weights_format=weights_format,
        stored=_stored_formats(config, checkpoint, weights_format),
        mesh=mesh,
        exchange=exchange,
        split_cache=split_cache,
        pad=pad,
        **given,
    )
    request.check()  # before anything expensive
    if must_fit:
        request.check_least()
    if out is not None:
        bundle.check_place(out)
    if request.constants:
        if checkpoint is None:
            raise CompileError(
                f"--weights constant: graphs are to hold their weights, and {config.name} is no checkpoint's folder; "
                "give one, or take --weights input."
            )
        audit(decoder.model_specs(config), Checkpoint.open(checkpoint), config.dtype, config).check()
    clock = Clock(notify=lambda step: progress(step, 0, 0))
    host = Late(torch_npu_wheel, cache_dir)
    kept = Kept.at(cache_dir or default_cache(), host) if keep and must_fit else None  # all that is kept fits
    manifest = compile_bundle(request, host, out, checkpoint, clock, progress, kept, must_fit)
    return Compiled(manifest, clock, request.experts, () if kept is None else tuple(kept.lines()))


def _stored_formats(config: ModelConfig, checkpoint: Path | None, weights_format: str) -> dict[str, str]:
    """Formats of parameters that are stored quantised, by path: as a checkpoint's headers say, else as released.

    Headers are not read where it does not matter: a folder may hold a config alone.
    """
    specs = decoder.model_specs(config)
    if checkpoint is None:
        return released_formats(config, specs)
    if weights_format == "bf16":
        return {}
    return audit(specs, Checkpoint.open(checkpoint), config.dtype, config).stored_formats()


def compile_bundle(
    request: Request,
    host: Host | Late,
    out: Path | None,
    checkpoint: Path | None = None,
    clock: Clock | None = None,
    progress: Notify = silent,
    kept: Kept | None = None,
    must_fit: bool = True,
) -> dict[str, Any]:
    """Compile every bucket and write the bundle; `out` None builds and checks everything but writes nothing.

    Args:
        kept: of earlier compiles.
        must_fit: refuse a mesh whose ranks do not.

    Returns:
        The manifest.
    """
    clock = clock or Clock()
    standing = None if out is None else Standing.of(out, bundle.MANIFEST)
    files = None
    if kept is not None and not request.constants:  # those hold weights
        with clock.step("cache"):
            files = kept.bundle(request)
    if files is None:
        files = bundle_files(request, host, clock, kept, must_fit)
        if kept is not None and not request.constants:
            with clock.step("cache"):
                kept.keep_bundle(request, files)
    manifest = json.loads(files.pop(bundle.MANIFEST))
    if checkpoint is not None:
        files[bundle.LOCAL] = bundle.dump({"checkpoint": str(checkpoint.absolute())})
    if out is not None:
        with clock.step("write"), bundle.writing(out, standing) as folder:
            for name, data in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)
            if request.constants:
                assert checkpoint is not None
                plan = json.loads(files[bundle.WEIGHTS])["weights"]
                where = folder / bundle.CONSTANTS
                constants.write(where, plan, request.config, Checkpoint.open(checkpoint), progress)
                manifest["weights"]["constants"] = {"file": bundle.CONSTANTS, "sha256": bundle.file_hash(where)}
            (folder / bundle.MANIFEST).write_bytes(bundle.dump(manifest))
    return manifest


def bundle_files(
    request: Request, host: Host | Late, clock: Clock, kept: Kept | None = None, must_fit: bool = True
) -> dict[str, bytes]:
    """Bytes by name of all that a bundle holds whatever the checkpoint; the manifest last.

    Raises:
        CompileError: it cannot be had; with `must_fit`, a rank of a mesh does not fit its die.
    """
    graphs = [g for b in request.buckets() for g in build_all(request, b, host, clock, kept)]
    _check_avoided(request.target, graphs)
    sources = {name: made for g in graphs for name, made in g.weights.items()}
    plan = weight_plan(request.config, [g.model for g in graphs], sources, request.layout)
    if request.constants:
        constants.place(plan["weights"])
        graphs = [replace(g, model=constants.to_file_constants(g.model, plan["weights"])) for g in graphs]
    with clock.step("write"):
        files = {f"{bundle.GRAPHS}/{g.name}.air": air.to_bytes(g.model) for g in graphs}
        files[bundle.WEIGHTS] = bundle.dump(plan)
        files |= kernel_files(graphs)
        files[bundle.SOURCES] = bundle.dump({g.name: g.origins for g in graphs})
        manifest = make_manifest(request, host, graphs, files, plan["weights"])
        files[bundle.MANIFEST] = bundle.dump(manifest)
    if must_fit and request.mesh is not None:
        from .fit import check_fit, held_by_stage  # reads graphs as the executor does, which a cached compile need not

        with clock.step("fit"):
            held = held_by_stage(manifest, {g.name: g.model for g in graphs})
            check_fit(f"{request.config.name} on {request.mesh}", manifest, held, CompileError)
    return files


def kernel_files(graphs: Iterable[Graph]) -> dict[str, bytes]:
    """The project that builds our operators, by names in the bundle; nothing where no graph has one."""
    if not own_types(types_of(graphs)):
        return {}
    return {f"{bundle.KERNELS}/{name}": data for name, data in project_files().items()}


def build_all(request: Request, b: Bucket, host: Host | Late, clock: Clock, kept: Kept | None = None) -> list[Graph]:
    """The graphs of a bucket: one, or on a mesh one for each pipeline stage that has a part in it."""
    if request.layout is None:
        return [build_graph(request, b, host, clock, kept=kept)]
    from .pipeline import build_stages  # it is made of this module's functions

    stages = request.layout.stages(b)
    made = build_stages(request, b, host, request.layout.rules(b.phase), stages, clock, kept)
    return [stage.graph for stage in made]


def make_manifest(
    request: Request, host: Host | Late, graphs: list[Graph], files: Mapping[str, bytes], weights: dict[str, Any]
) -> dict[str, Any]:
    """What the bundle says of itself. `files`: bytes by name in the bundle; `weights`: of the weight plan."""
    import kimi_graph

    c, b, layout = request.config, graphs[0].bucket, request.layout
    state = state_contract(c, b, [g.model for g in graphs], request.kv_dtype)
    if layout is not None:
        state = shared_states(layout, request.kv_dtype, b, state)
    project = {name: data for name, data in files.items() if name.startswith(f"{bundle.KERNELS}/")}
    entries = [_graph_entry(request, g, f"{bundle.GRAPHS}/{g.name}.air", files) for g in graphs]
    manifest = {
        "format": bundle.FORMAT,
        "made_by": {"kimi_graph": kimi_graph.__version__, "torch": torch.__version__, "torch_npu": host.version},
        "model": {"name": c.name, "type": c.model_type, "fingerprint": arranged(c).fingerprint, "config": c.source},
        "target": target_entry(request.target),
        "weights": {
            "file": bundle.WEIGHTS,
            "sha256": hashlib.sha256(files[bundle.WEIGHTS]).hexdigest(),
            "experts": request.form,
        },
        "state": state,
        "mesh": None if layout is None else mesh_entry(layout, zip(entries, [g.model for g in graphs], strict=True)),
        "memory": memory_entry(weights, state, entries, request.target.memory_bytes),
        "buckets": bucket_entries(entries),
        "graphs": entries,
        "choices": [
            {"graph": g.name, "part": part, **asdict(choice)}
            for g in graphs
            for part, choices in g.choices.items()
            for choice in choices
        ],
        "kernels": bundle.kernels_entry(project, operators()) if project else None,
        "packages": [needed.to_json() for needed in packages_of(types_of(graphs))],
        "assumptions": list(c.assumptions),
        "unproved": unproved(graphs),
    }
    generated = json.loads(files[bundle.WEIGHTS])["generated"]
    return manifest | {"at_load": left_to_do(manifest, generated, constants=request.constants)}


def _graph_entry(request: Request, g: Graph, file: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    entry = graph_entry(g.bucket, g.model, file, files[file])
    if request.layout is None or g.stage is None:
        return entry
    return stage_entry(request.layout, g.bucket, g.model, entry, g.stage)


def _check_avoided(target: Target, graphs: Sequence[Graph]) -> None:
    """Raises CompileError where a type is left that --avoid names: what only it does is no choice of a lowering."""
    counts = Counter(op.type for g in graphs for op in g.model.graph[0].op)
    if left := sorted(set(target.avoided) & set(counts)):
        raise CompileError(
            f"--avoid {left[0]}: {counts[left[0]]:,} nodes of the graphs are it, and nobody else serves what it does; "
            "kimi-graph ops says where there is a choice."
        )


def types_of(graphs: Iterable[Graph]) -> set[str]:
    """Operator types of some graphs."""
    return {op.type for g in graphs for op in g.model.graph[0].op}


def unproved(graphs: list[Graph]) -> list[str]:
    """What no CPU can show of these graphs, in words."""
    types = types_of(graphs)
    own = own_types(types)
    ours = [f"{', '.join(own)}: {OURS}"] if own else []
    tiled = any(is_tiled(op.output_desc[0]) for g in graphs for op in g.model.graph[0].op if op.type == "Data")
    rows = "KvQuantSparseFlashAttention" in types
    theirs = sorted(name for name in types if name in ROWS and ROWS[name].provider == "vllm-ascend")
    ours += [f"{', '.join(theirs)}: {AS_NODES}"] if theirs else []
    return [*UNPROVED, *ours, *([TILED] if tiled else []), *([QUANTISED_ROWS] if rows else [])]


OURS = (
    "operators of this project. The bundle has the sources of their kernels, which a host with CANN builds; no "
    "device's compiler has read them, and they have run on the CPU twin alone."
)
AS_NODES = (
    "operators of vllm-ascend's package, which has to be installed. They have run on devices, called one by one; that "
    "they run as nodes of a graph that GE compiles nobody has said."
)
TILED = "Packed experts lie in tiles (FRACTAL_NZ) as documents say; no device has read them so."
UNPROVED = [
    "No graph was compiled by GE or run on an NPU: operator prototypes, dtypes, shapes and limits were checked against "
    "published ones, and the graphs were executed on a CPU.",
]

QUANTISED_ROWS = (
    "Rows of 8-bit caches are put together by Bitcast, whose registration lists neither bfloat16 nor 8-bit floats; "
    "torchair makes it of both, and GE runs it as a Reshape."
)
