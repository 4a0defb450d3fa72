# pyright: reportMissingImports=false
"""What vLLM sees of a bundle: one cache for the rows of all attention layers, one for the memories of all KDA layers.

A graph takes one table of pages and one slot a row for all layers. The engine has tables for each group of layers that
have one kind of cache, and as many groups as it likes; with one cache of each kind there are two, whatever the model,
and whatever of it a stage has: caches of all stages have the same names and sizes.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.sample.logits_processor import LogitsProcessor

from kimi_graph import tree
from kimi_graph.config import KdaConfig, MlaConfig
from kimi_graph.errors import BundleError

from . import compat
from .bundle_calls import Call, calls_of, inputs_of, is_picture, picture_inputs_of
from .bundle_runners import Runner, Seat, runner_for
from .bundles import Graphs
from .caches import KdaCache, MlaCache, Pages, PagesBackend
from .rows import reads_new_pages, rows_of
from .views import Shapes, kda_shapes


def all_shapes(graphs: Graphs) -> Shapes:
    """Shapes of one sequence's state of all KDA layers of a stage: a dimension of layers, then those of one."""
    mixers = [layer.mixer for layer in graphs.config.layers if isinstance(layer.mixer, KdaConfig)]
    assert len({kda_shapes(m, 1) for m in mixers}) == 1, "one shape for the memories of all layers"
    return tuple((graphs.memories, *shape) for shape in kda_shapes(mixers[0], graphs.mesh.tensor))


def _first(graphs: Graphs, kind: type) -> tuple[int, Any]:
    """The first layer of a kind, after which a cache is called, and its mixer."""
    return next((i, layer.mixer) for i, layer in enumerate(graphs.config.layers) if isinstance(layer.mixer, kind))


class AllMemories(KdaCache):
    """The engine's recurrent-state cache, of all KDA layers of a stage."""

    def __init__(self, vllm_config: VllmConfig, graphs: Graphs, stage: int) -> None:
        i, mixer = _first(graphs, KdaConfig)
        super().__init__(vllm_config, f"layers.{i}.linear_attn", mixer, graphs.mesh.tensor)
        self.shapes, self.names = all_shapes(graphs), graphs.states(stage, "kda")

    def states(self) -> dict[str, Tensor]:
        """`[blocks, ..]` of each layer, by the bundle's names."""
        windows, memories = self.kv_cache
        found = {}
        for at, i in enumerate(dict.fromkeys(name.split(".")[2] for name in self.names)):
            state = self.state_in(windows[:, at], memories[:, at])
            found |= {f"s.layers.{i}.kda.{leaf}": x for leaf, x in tree.items(state)}
        return found


class AllRows(MlaCache):
    """The engine's paged cache, of all attention layers of a stage."""

    def __init__(self, vllm_config: VllmConfig, graphs: Graphs, stage: int) -> None:
        i, mixer = _first(graphs, MlaConfig)
        super().__init__(vllm_config, f"layers.{i}.self_attn", mixer, graphs.row)
        self.graphs, self.names = graphs, graphs.states(stage, "mla")

    def get_attn_backend(self) -> type[PagesBackend]:
        """Asked by the engine."""
        return _backend(self.row)

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take `[blocks, page, row]`, or what the engine's release has in its place.

        Raises:
            BundleError: the engine has allocated other pages than it was told.
        """
        super().bind_kv_cache(kv_cache)
        found = dict(zip(("pages", "page_tokens"), compat.pages_of(self.kv_cache).shape, strict=False))
        for key, size in found.items():
            if size != (want := self.graphs.contract[key]):
                raise BundleError(f"{self.graphs.where}: state.{key} is {want}; the engine has allocated {size}.")

    def states(self) -> dict[str, Tensor]:
        """`[blocks, page, width]` of each layer, by the bundle's names."""
        widths = [shape[-1] for shape in self.names.values()]
        parts = compat.pages_of(self.kv_cache).split([*widths, self.row - sum(widths)], -1)
        return dict(zip(self.names, parts, strict=False))


@functools.cache
def _backend(row: int) -> type[PagesBackend]:
    """A backend whose rows have as many numbers: the engine makes pages as large as the memories by it."""

    class AllPagesBackend(PagesBackend):
        @classmethod
        def customize_spec(cls, spec: Any) -> Any:
            if isinstance(spec, MLAAttentionSpec):  # the cache's own
                return spec
            return dataclasses.replace(spec, head_size=row // 2, head_size_v=row // 2)  # keys, values of one head

    return AllPagesBackend


def seat_of(graphs: Graphs) -> Seat:
    """Where this process stands among the engine's ranks."""
    if graphs.mesh.world == 1:
        return Seat()
    from vllm.distributed import get_pp_group, get_tp_group

    tensor = get_tp_group()
    rank = get_pp_group().rank_in_group * graphs.mesh.tensor + tensor.rank_in_group
    return Seat(rank, tensor.ranks, tensor.cpu_group)


class BundleSide:
    """A bundle in one process of the engine: its caches, its graphs, and logits of the step that ran last."""

    def __init__(self, vllm_config: VllmConfig, graphs: Graphs) -> None:
        self.graphs, self.seat = graphs, seat_of(graphs)
        self.device = torch.device(vllm_config.device_config.device)
        graphs.check_device(self.device)
        self.stage = self.seat.rank // graphs.mesh.tensor
        self.last = self.stage == graphs.mesh.pipe - 1
        self.rows = AllRows(vllm_config, graphs, self.stage)
        self.memories = AllMemories(vllm_config, graphs, self.stage) if graphs.hybrid else None
        self.runner: Runner | None = None
        self.logits = torch.zeros(1, graphs.config.vocab)

    def load(self, folder: Path) -> None:
        """Bind weights, made of the checkpoint by the bundle's plan."""
        self.runner = runner_for(self.graphs, folder, self.device, self.seat)

    def room(self, tokens: int, *, after: int) -> dict[str, Tensor]:
        """For what `after` stages are read by the next one, `[tokens, ..]` each."""
        read = self.graphs.read_by(self.stage + after)
        return {name: torch.zeros(tokens, *shape, dtype=dtype) for name, (shape, dtype) in read.items()}

    def forward(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A step: `rows`, `[N, 1]`, of each token the row of its logits, which `logits_of` looks up; on a stage before
        the last what the next one reads.

        A graph gives logits of the last token of each row alone; of the others there is row 0, which is not a number.

        Args:
            values: `tokens` `[N]`, what the stage before has given, `vision.values` of `marked`.

        Raises:
            BundleError: results of the ranks do not fit together.
        """
        count = len(values["tokens"])
        self.logits = torch.full((1, self.graphs.config.vocab), torch.nan)
        made = {"rows": torch.zeros(count, 1)} if self.last else self.room(count, after=1)
        if (metadata := compat.step_metadata()) is None:  # a run that only measures memory
            return made
        for call, gives in self._calls(metadata, values):
            if self.last:
                logits = gives["logits"][: len(call.counts)].float()
                last = call.at.gather(1, call.counts[:, None] - 1)[:, 0]
                made["rows"][last, 0] = torch.arange(len(logits), dtype=torch.float32) + len(self.logits)
                self.logits = torch.cat([self.logits, logits])
                continue
            for name, x in made.items():
                x[call.at[call.real]] = gives[name][: len(call.counts)][call.real]
        return made

    def logits_of(self, found: Tensor) -> Tensor:
        """`[n, V]`."""
        return self.logits[found[:, 0].long().cpu()].to(found.device)

    def embed(self, patches: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Embeddings of a picture, `[tokens, D]`, made by the graph of pictures; on a later stage zeros."""
        config = self.graphs.config
        assert self.runner is not None and config.vision is not None
        tokens = grid[1] * grid[2] // math.prod(config.vision.merge)
        if self.stage > 0:  # the engine asks all of them as it measures memory
            return torch.zeros(tokens, config.embed)
        (made,) = self.runner.call("vision", picture_inputs_of(self.graphs, patches, grid), {}).values()
        return made[:tokens]

    def marked(self, count: int, embeddings: Sequence[Tensor], where: Tensor | None) -> Tensor:
        """`[count, D]`: embeddings at the places of a picture's tokens; others, which graphs embed, are not numbers."""
        made = torch.full((count, self.graphs.config.embed), torch.nan, dtype=self.graphs.settings.dtype)
        if where is not None and len(embeddings):
            made[where.cpu()] = torch.cat([x.flatten(0, -2) for x in embeddings]).to("cpu", made.dtype)
        return made

    def _calls(self, metadata: Mapping[str, Any], values: Mapping[str, Tensor]) -> Iterator[tuple[Call, Any]]:
        """The calls of a step, and what each of them gives."""
        assert self.runner is not None, "the engine loads weights before it steps"
        told: Pages = metadata[self.rows.name]
        slots = torch.zeros(len(told.lengths), dtype=torch.int32)
        if self.memories is not None:
            slots = metadata[self.memories.name].state_indices_tensor
        states = self._states()
        counts = torch.tensor(told.starts).diff()
        before, page = torch.tensor(told.lengths) - counts, self.graphs.contract["page_tokens"]
        shared = reads_new_pages(told.block_table, before, counts, page)
        pictured = is_picture(values["vision.values"]) if "vision.values" in values else None
        most = self.graphs.bundle.graph("prefill")["images"]
        for rows in rows_of(told.starts, told.lengths, shared=shared):
            for call in calls_of(rows, self.graphs.gears, shared=shared, pictured=pictured, most=most):
                given = inputs_of(call, self.graphs, values, told.block_table, slots)
                yield call, self.runner.call(call.gear.phase, given, states)

    def _states(self) -> dict[str, Tensor]:
        """By the bundle's names.

        Raises:
            BundleError: of another shape than the manifest says.
        """
        found = self.rows.states() | ({} if self.memories is None else self.memories.states())
        for kind in ("mla", "kda"):
            for name, shape in self.graphs.states(self.stage, kind).items():
                if tuple(found[name].shape) != shape:
                    words = f"state.states: {name} is {list(shape)} on a rank"
                    raise BundleError(f"{self.graphs.where}: {words}; the engine has {list(found[name].shape)}.")
        return found


class LastTokenAlone(LogitsProcessor):
    """Refuses requests that ask for logits which graphs do not give; changes none."""

    def __init__(self, vllm_config: VllmConfig, device: Any, is_pin_memory: bool) -> None:
        pass

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        if sampling_params.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: graphs of a bundle give logits of the last token alone; leave it out.")

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor) -> Tensor:
        return logits

    def update_state(self, batch_update: Any) -> None:
        pass
