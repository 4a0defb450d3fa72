# pyright: reportMissingImports=false
"""What vLLM sees of a bundle: one cache for the rows of all attention layers, one for the memories of all KDA layers.

A graph takes one table of pages and one slot a row for all layers. The engine has tables for each group of layers that
have one kind of cache, and as many groups as it likes; with one cache of each kind there are two, whatever the model.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.sample.logits_processor import LogitsProcessor

from kimi_graph import tree
from kimi_graph.config import KdaConfig, MlaConfig, ModelConfig
from kimi_graph.errors import BundleError

from . import compat
from .bundles import Graphs, Runner, calls_of, inputs_of, row_parts, runner_for
from .caches import KdaCache, MlaCache, Pages, PagesBackend
from .rows import reads_new_pages, rows_of
from .views import Shapes, kda_shapes


def all_shapes(config: ModelConfig) -> Shapes:
    """Shapes of one sequence's state of all KDA layers: a dimension of layers, then those of one."""
    mixers = [layer.mixer for layer in config.layers if isinstance(layer.mixer, KdaConfig)]
    assert len({kda_shapes(m, 1) for m in mixers}) == 1, "one shape for the memories of all layers"
    return tuple((len(mixers), *shape) for shape in kda_shapes(mixers[0], 1))


class AllMemories(KdaCache):
    """The engine's recurrent-state cache, of all KDA layers."""

    def __init__(self, vllm_config: VllmConfig, config: ModelConfig, layers: tuple[int, ...]) -> None:
        mixer = config.layers[layers[0]].mixer
        assert isinstance(mixer, KdaConfig)
        super().__init__(vllm_config, f"layers.{layers[0]}.linear_attn", mixer, 1)
        self.shapes, self.layers = all_shapes(config), layers

    def states(self) -> dict[str, Tensor]:
        """`[blocks, ..]` of each layer, by the bundle's names."""
        windows, memories = self.kv_cache
        found = {}
        for at, i in enumerate(self.layers):
            state = self.state_in(windows[:, at], memories[:, at])
            found |= {f"s.layers.{i}.kda.{leaf}": x for leaf, x in tree.items(state)}
        return found


class AllRows(MlaCache):
    """The engine's paged cache, of all attention layers."""

    def __init__(self, vllm_config: VllmConfig, graphs: Graphs, layers: tuple[int, ...]) -> None:
        config, mixer = graphs.config, graphs.config.layers[layers[0]].mixer
        assert isinstance(mixer, MlaConfig)
        super().__init__(vllm_config, f"layers.{layers[0]}.self_attn", mixer, graphs.row)
        self.graphs = graphs
        mixers = {i: config.layers[i].mixer for i in layers}
        self.widths = {
            f"s.layers.{i}.mla.{leaf}": width
            for i, m in mixers.items()
            if isinstance(m, MlaConfig)
            for leaf, width in row_parts(m).items()
        }

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
        parts = compat.pages_of(self.kv_cache).split(list(self.widths.values()), -1)
        return dict(zip(self.widths, parts, strict=True))


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


class BundleSide:
    """A bundle in one process of the engine: its caches, its graphs, and logits of the step that ran last."""

    def __init__(self, vllm_config: VllmConfig, graphs: Graphs) -> None:
        self.graphs, config = graphs, graphs.config
        self.device = torch.device(vllm_config.device_config.device)
        graphs.check_device(self.device)
        kinds: dict[type, list[int]] = {KdaConfig: [], MlaConfig: []}
        for i, layer in enumerate(config.layers):
            kinds[type(layer.mixer)].append(i)
        kda, mla = (tuple(x) for x in kinds.values())
        self.rows = AllRows(vllm_config, graphs, mla)
        self.memories = AllMemories(vllm_config, config, kda) if kda else None
        self.runner: Runner | None = None
        self.logits = torch.zeros(1, config.vocab)

    def load(self, folder: Path) -> None:
        """Bind weights, made of the checkpoint by the bundle's plan."""
        self.runner = runner_for(self.graphs, folder, self.device)

    def forward(self, tokens: Tensor) -> Tensor:
        """A step: `[N, 1]`, of each token the row of its logits, which `logits_of` looks up.

        A graph gives logits of the last token of each row alone; of the others there is row 0, which is not a number.
        """
        found = torch.zeros(len(tokens), 1)
        metadata = compat.step_metadata()
        if metadata is None:  # a run that only measures memory
            self.logits = torch.zeros(1, self.graphs.config.vocab)
            return found
        made = self._step(metadata, tokens)
        at = torch.tensor(list(made), dtype=torch.int64)
        found[at, 0] = torch.arange(1, len(made) + 1, dtype=found.dtype)
        rows = torch.stack(list(made.values()))
        self.logits = torch.cat([torch.full_like(rows[:1], torch.nan), rows])
        return found.to(tokens.device)

    def logits_of(self, found: Tensor) -> Tensor:
        """`[n, V]`."""
        return self.logits[found[:, 0].long().cpu()].to(found.device)

    def _step(self, metadata: Mapping[str, Any], tokens: Tensor) -> dict[int, Tensor]:
        """Logits `[V]` by the place of their token in the step."""
        assert self.runner is not None, "the engine loads weights before it steps"
        told: Pages = metadata[self.rows.name]
        slots = torch.zeros(len(told.lengths), dtype=torch.int32)
        if self.memories is not None:
            slots = metadata[self.memories.name].state_indices_tensor
        states = self._states()
        made: dict[int, Tensor] = {}
        counts = torch.tensor(told.starts).diff()
        before, page = torch.tensor(told.lengths) - counts, self.graphs.contract["page_tokens"]
        shared = reads_new_pages(told.block_table, before, counts, page)
        for rows in rows_of(told.starts, told.lengths, shared=shared):
            for call in calls_of(rows, self.graphs.gears, shared=shared):
                given = inputs_of(call, self.graphs, tokens, told.block_table, slots)
                logits = self.runner.call(call.gear.phase, given, states)
                last = call.at.gather(1, call.counts[:, None] - 1)[:, 0]
                made |= dict(zip(last.tolist(), logits, strict=False))
        return made

    def _states(self) -> dict[str, Tensor]:
        return self.rows.states() | ({} if self.memories is None else self.memories.states())


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
