"""`kg.open_bundle`: a bundle for programs, read only. What it is, what a rank holds, and its weights as tensors."""

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from kimi_graph.checkpoint import Checkpoint
from kimi_graph.config import ModelConfig
from kimi_graph.display import Html, card, facts, fold, listed, pictured, table
from kimi_graph.errors import BundleError
from kimi_graph.parallel import Mesh

from . import air, bundle
from .buckets import check_request
from .bundle import MANIFEST, SOURCES, Bundle, as_written, read_json
from .expect import Expected, bundle_config
from .ge_proto import TensorDescriptor
from .making import Maker
from .manifest import is_weight, target_of
from .nodes import Nodes, read_nodes
from .parts import dims_of, mesh_of
from .targets import Target
from .verify import Report, find_checkpoint, verify_bundle
from .weight_formats import as_read
from .written import Written, open_written


@dataclass(frozen=True)
class Graph:
    """A graph, of all ranks of a stage. Inputs and outputs by name, with dtype and shape of one rank.

    `nodes` are read from its file when they are first asked for; `nodes.within("layers.3.kda")` are those of a part.
    """

    name: str
    phase: str
    stage: int
    rows: int
    tokens: int
    inputs: Mapping[str, tuple[str, tuple[int, ...]]]
    outputs: Mapping[str, tuple[str, tuple[int, ...]]]
    weights: tuple[str, ...]
    states: tuple[str, ...]
    read: Callable[[], Nodes] = field(repr=False, compare=False)

    @functools.cached_property
    def nodes(self) -> Nodes:
        """What it computes, node by node. Raises BundleError where its file is not what the manifest says."""
        return self.read()

    def __repr__(self) -> str:
        return "\n".join([f"Graph {self.name!r}", *listed(self._facts)])

    def _repr_html_(self) -> Html:
        counts = [("nodes", "type"), *((str(count), type_) for type_, count in self.nodes.types.items())]
        by_type = fold(f"{len(self.nodes):,} nodes that compute, by type", table(counts))
        return card(self.name, facts(self._facts), by_type)

    @property
    def _facts(self) -> dict[str, str]:
        def ports(named: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
            return ", ".join(f"{name} {dtype}{pictured(shape)}" for name, (dtype, shape) in named.items())

        return {
            "step": f"{self.phase} of stage {self.stage}, {self.rows:,} x {self.tokens:,}",
            "inputs": ports(self.inputs),
            "outputs": ports(self.outputs),
            "reads": f"{len(self.weights):,} weights, {len(self.states):,} states",
        }


@dataclass(frozen=True)
class State:
    """What a runtime holds between steps. `shape`: of all ranks together; `local`: of one; `axes`: logical ones."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    axes: tuple[str, ...]
    stage: int


@dataclass(frozen=True)
class Weight:
    """A weight of graphs. `parameter`: path in the model's tree; `bytes`: on one rank, in `dtype`."""

    name: str
    parameter: str
    dtype: str
    bytes: int


@dataclass(frozen=True, repr=False)
class OpenBundle:
    """A bundle that was opened.

    Attributes:
        folder: where it lies.
        source: the manifest and the weight plan, as they are written.
    """

    folder: Path
    source: Bundle

    @functools.cached_property
    def model(self) -> ModelConfig:
        """The config of the model that it was made of."""
        return bundle_config(self.source)

    @functools.cached_property
    def target(self) -> Target:
        """What the graphs are for: chip, CANN release, providers."""
        return target_of(self.source.manifest)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The ranks that run it together; one rank is a mesh too."""
        return mesh_of(self.source)

    @functools.cached_property
    def graphs(self) -> Mapping[str, Graph]:
        """By name, in the order in which phases and stages are used."""

        def ports(entries: list[dict[str, Any]]) -> dict[str, tuple[str, tuple[int, ...]]]:
            return {e["name"]: (e["dtype"], tuple(e["shape"])) for e in entries}

        return {
            g["name"]: Graph(
                name=g["name"],
                phase=g["phase"],
                stage=g.get("stage", 0),
                rows=g["rows"],
                tokens=g["tokens"],
                inputs=ports(g["inputs"]),
                outputs=ports(g["outputs"]),
                weights=tuple(g["weights"]),
                states=tuple(g["states"]),
                read=functools.partial(self._nodes, g),
            )
            for g in self.source.manifest["graphs"]
        }

    def graph(self, phase: str, stage: int = 0) -> Graph:
        """The graph of a phase ("prefill", "decode", "vision"), or of that name.

        Args:
            stage: of the pipeline; vision has one.

        Raises:
            BundleError: there is none.
        """
        entries = self.source.graphs(phase)
        found = [g for g in (self.graphs[e["name"]] for e in entries) if g.stage == stage or phase == g.name]
        if not found:
            stages = ", ".join(str(self.graphs[e["name"]].stage) for e in entries)
            raise BundleError(f"{self.folder}: {phase} has no stage {stage}; there are {stages}.")
        return found[0]

    def _nodes(self, entry: dict[str, Any]) -> Nodes:
        with as_written(self.folder):
            sources = self.folder / SOURCES
            origins = read_json(sources) if sources.is_file() else {}
            model = air.from_bytes(self.source.graph_bytes(entry), entry["file"])
            return read_nodes(model.graph[0], origins.get(entry["name"], {}))

    def verify(self, **options: Any) -> Report:
        """Execute its graphs on the CPU and compare them with the model.

        Args:
            options: those of `kimi_graph.compile.verify.verify_bundle`: `steps` of decode, `modes`, `checkpoint`.

        Returns:
            A report: `passed`, `rows` and `text()`.

        Raises:
            KimiGraphError: a damaged bundle, or weights that are not the model's.
        """
        return verify_bundle(self.folder, **options)

    @functools.cached_property
    def states(self) -> Mapping[str, State]:
        """By name."""
        return {
            s["name"]: State(
                name=s["name"],
                dtype=s["dtype"],
                shape=tuple(s["shape"]),
                local=tuple(s.get("local", s["shape"])),
                axes=tuple(s["axes"]),
                stage=s.get("stage", 0),
            )
            for s in self.source.manifest["state"]["states"]
        }

    @functools.cached_property
    def weights(self) -> Mapping[str, Weight]:
        """By name."""
        return {
            name: Weight(name, w["parameter"], w["dtype"], w["bytes"])
            for name, w in self.source.weights["weights"].items()
        }

    @functools.cached_property
    def written(self) -> Written | None:
        """Weights that `kimi-graph weights` has made; None where it has not run."""
        return open_written(self.source)

    def weights_of(self, rank: int) -> tuple[str, ...]:
        """Names of the weights that a rank holds.

        Raises:
            BundleError: there is no such rank.
        """
        stage = self._stage(rank)
        return tuple(sorted({name for g in self.graphs.values() if g.stage == stage for name in g.weights}))

    def read(self, name: str, rank: int = 0, checkpoint: str | Path | None = None) -> Tensor:
        """A weight of a rank, as its graphs read it; four-bit numbers in a wider dtype.

        It is taken from what `kimi-graph weights` has written, checked against its hash; else it is made by its recipe.

        Args:
            checkpoint: to make it from; None: that which the bundle was compiled from.

        Raises:
            BundleError: there is no such weight or rank; a file was changed. CheckpointError: it is not the model's.
        """
        if name not in self.weights_of(rank):
            raise BundleError(f"{self.folder}: rank {rank} has no weight {name!r}.")
        raw = None
        if checkpoint is None and self.written is not None and rank in self.written.ranks:
            raw = self.written.read(rank, name)
        if raw is None:
            entry = self.source.weights["weights"][name]
            index = tuple(self.mesh.index(rank, axes) for axes in dims_of(entry))
            raw = self._maker(self._checkpoint(checkpoint)).part(name, index)
        return as_read(self._descriptors[name], raw)

    def _stage(self, rank: int) -> int:
        if not 0 <= rank < self.mesh.world:
            raise BundleError(f"{self.folder}: no rank {rank}; there are 0 to {self.mesh.world - 1}.")
        return rank // self.mesh.stage.world

    def _checkpoint(self, given: str | Path | None) -> Path:
        return find_checkpoint(self.source, None if given is None else Path(given)).folder

    def _maker(self, folder: Path) -> Maker:
        if folder not in self._makers:
            self._makers[folder] = Maker.open(self.source, self.model, Checkpoint.open(folder, mapped=False))
        return self._makers[folder]

    @functools.cached_property
    def _makers(self) -> dict[Path, Maker]:
        return {}

    @functools.cached_property
    def _descriptors(self) -> dict[str, TensorDescriptor]:
        found: dict[str, TensorDescriptor] = {}
        for entry in self.source.manifest["graphs"]:
            model = air.from_bytes(self.source.graph_bytes(entry), entry["file"])
            found |= {op.name: op.output_desc[0] for op in model.graph[0].op if is_weight(op)}
        return found

    def check_request(self, batch: int, length: int) -> None:
        """Whether every phase serves a batch of sequences that become `length` tokens long; ask before a step.

        Raises:
            BundleError: one does not; what the manifest allows is named.
        """
        check_request(self.source, batch, length)

    def __repr__(self) -> str:
        return "\n".join([f"Bundle {str(self.folder)!r}", *(f"  {k:<8} {said}" for k, said in self._facts.items())])

    def _repr_html_(self) -> Html:
        rows: list[tuple[str, ...]] = [("graph", "rows", "tokens", "nodes", "weights", "states", "file")]
        for g, entry in zip(self.graphs.values(), self.source.manifest["graphs"], strict=True):
            numbers = (g.rows, g.tokens, sum(entry["ops"].values()), len(g.weights), len(g.states))
            rows.append((g.name, *(f"{n:,}" for n in numbers), entry["file"]))
        return card(f"Bundle {self.folder.name}", facts(self._facts), table(rows))

    @property
    def _facts(self) -> dict[str, str]:
        m, ranks = self.source.manifest, self.mesh.world
        size = sum(w.bytes for w in self.weights.values())
        ahead = "" if self.written is None else f"; made ahead for {len(self.written.ranks):,} of {ranks:,} ranks"
        phases = ", ".join(f"{b['phase']} {b['rows']} x {b['tokens']}" for b in m["buckets"])
        return {
            "model": f"{m['model']['name']} ({m['model']['type']}), fingerprint {m['model']['fingerprint'][:16]}",
            "target": f"{m['target']['name']}, CANN {m['target']['cann']}, torch-npu {m['made_by']['torch_npu']}",
            "mesh": f"{self.mesh}: {ranks:,} rank{'s' if ranks > 1 else ''}",
            "graphs": f"{len(self.graphs)}: {phases}",
            "states": f"{len(self.states)}, caches {m['state']['kv_dtype']}, "
            f"{m['state']['tokens_per_sequence']:,} tokens a sequence",
            "weights": f"{len(self.weights):,}, {size:,} bytes if one rank had a part of each{ahead}",
        }


def open_bundle(
    path: str | Path,
    *,
    model: str | Path | None = None,
    target: str | None = None,
    cann: str | None = None,
    torch_npu: str | None = None,
    mesh: str | Mesh | None = None,
) -> OpenBundle:
    """Open a bundle, and hold it against what the caller has.

    Args:
        path: its folder.
        model: a preset, config.json or checkpoint folder that it has to be of.
        target, cann, torch_npu: chip, and releases, that it has to be made for.
        mesh: the ranks there are (`pp=2,tp=8`; "none": one).

    Raises:
        BundleError: it is no bundle, is damaged, or is made for something else: the field is named.
    """
    if not isinstance(path, str | os.PathLike):
        raise BundleError(f"open_bundle: found {type(path).__name__}, expected a bundle's folder.")
    opened = OpenBundle(Path(path), bundle.open_bundle(path))
    with as_written(opened.folder):
        texts = {"model": model, "mesh": mesh}
        given = {name: None if x is None else str(x) for name, x in texts.items()}
        Expected(target=target, cann=cann, **given).check(opened.source)
        made_by = opened.source.manifest["made_by"]["torch_npu"]
        if torch_npu is not None and made_by != torch_npu:
            raise BundleError(f"{opened.folder / MANIFEST}: made_by.torch_npu is {made_by}, expected {torch_npu}.")
        return opened
