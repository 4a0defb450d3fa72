# pyright: reportMissingImports=false
"""The models as vLLM runs them: a step of the engine is one call of the library's schedule for each group of rows.

No layer is computed here. The engine's caches are the library's states (`caches`), its metadata are the library's
batches (`rows`), and the library's forward writes the caches where they lie.

Axes: N tokens of a step, R requests, B rows of a group, T tokens of its longest, D embed, V vocab.
"""

import contextlib
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.sequence import IntermediateTensors

from kimi_graph.config import KdaConfig, ModelConfig
from kimi_graph.errors import ConfigError
from kimi_graph.layers import Batch, MlaState, step_batch
from kimi_graph.models import decoder
from kimi_graph.models.pipeline import value_spec
from kimi_graph.ops import donating
from kimi_graph.parallel import Mesh
from kimi_graph.parallel.processes import Member
from kimi_graph.read_config import load_config

from . import ascend, compat
from .balance import Balance, with_asked
from .bundle_caches import BundleSide, all_shapes
from .bundle_settings import graphs_of
from .caches import KdaCache, MlaCache, Pages
from .hf_config import cached_row
from .ranks import Place, check_mesh
from .rows import Rows, reads_new_pages, rows_of
from .tiers.layers import Transfers
from .views import kda_dtypes, kda_shapes


@functools.lru_cache(maxsize=4)
def config_of(folder: str) -> ModelConfig:
    """The config in a checkpoint's folder.

    Raises:
        ConfigError: see `load_config`.
    """
    return load_config(Path(folder))


class KimiGraphForCausalLM(nn.Module):
    """A text model of attention layers alone. Parameters are a tree of the library's, not of `nn.Parameter`s."""

    supports_pp = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        check(vllm_config)
        self.folder, self.dtype = Path(vllm_config.model_config.model), vllm_config.model_config.dtype
        self.config, self.cache_config = config_of(str(self.folder)), vllm_config.cache_config
        ways = vllm_config.parallel_config.tensor_parallel_size
        self.config, self.every = with_asked(self.config, vllm_config.additional_config, ways)  # none with a bundle
        graphs = graphs_of(vllm_config)
        self.bundle = None if graphs is None else BundleSide(vllm_config, graphs)
        if self.bundle is not None:
            self.requires_raw_input_tokens = True  # graphs embed
            return
        self.place = place_of(vllm_config, self.config)
        self.params: Any = None
        self.balance: Balance | None = None
        self.caches: dict[int, KdaCache | MlaCache] = {}
        row = cached_row(self.config)
        for i in self.place.layers:
            mixer = self.config.layers[i].mixer
            if isinstance(mixer, KdaConfig):
                self.caches[i] = KdaCache(vllm_config, f"layers.{i}.linear_attn", mixer, self.place.mesh.tensor)
            elif ascend.here():
                self.caches[i] = ascend.Halves(vllm_config, f"layers.{i}.self_attn", mixer, self.config)
            else:
                self.caches[i] = MlaCache(vllm_config, f"layers.{i}.self_attn", mixer, row)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """The library reads the checkpoint's folder itself; what the engine would read is not asked for."""
        if self.bundle is not None:
            self.bundle.load(self.folder)
            return set()
        self.params = self.place.load(self.folder, self.dtype)
        balance = Balance(self.place, self.params, self.every)
        self.balance = balance if balance.shelves else None
        return set()

    # ---- what the engine calls ----

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """`[N]` -> `[N, D]`."""
        return self._outside(decoder.schedule(self.config)[0], {"tokens": input_ids[None]})

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor | IntermediateTensors:
        """What `compute_logits` takes, `[N, D]`; on a stage before the last, what the next one reads."""
        if self.bundle is not None:
            assert input_ids is not None, "graphs embed, so the engine gives them ids"
            before = {} if intermediate_tensors is None else intermediate_tensors.tensors
            pictures = {} if inputs_embeds is None else {"vision.values": inputs_embeds}
            made = self.bundle.forward({"tokens": input_ids.long(), **before, **pictures})
            return made["rows"].to(input_ids.device) if self.bundle.last else IntermediateTensors(made)
        if intermediate_tensors is not None:
            given: Mapping[str, Tensor] = intermediate_tensors.tensors
        elif inputs_embeds is not None:
            given = {"x": inputs_embeds}
        else:
            assert input_ids is not None, "a step with neither ids nor embeddings"
            given = {"x": self.embed_input_ids(input_ids)}
        x = next(iter(given.values()))
        made = self._empty(self.place.gives(sparse=True), len(x), x.device)
        if (metadata := compat.step_metadata()) is not None:
            self._step(metadata, given, made)
        return next(iter(made.values())) if self.place.last else IntermediateTensors(made)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """`[n, D]` -> `[n, V]`."""
        if self.bundle is not None:
            return self.bundle.logits_of(hidden_states)
        head = decoder.schedule(self.config)[-1]
        return self._outside(head, {head.reads[0]: hidden_states[None]})

    def make_empty_intermediate_tensors(self, batch_size: int, dtype: torch.dtype, device: Any) -> IntermediateTensors:
        """Room for what the stage before hands on, `[batch_size, D]` each."""
        if self.bundle is not None:
            return IntermediateTensors(self.bundle.room(batch_size, after=0))
        return IntermediateTensors(self._empty(self.place.reads(sparse=True), batch_size, device))

    # ---- a step ----

    def _outside(self, use: decoder.Use, values: Mapping[str, Tensor]) -> Tensor:
        """A part without state, of tokens in one row: `[n, ...]`."""
        return self.place.run([use], self.params, values, {}, {}, step=False)[use.writes[0]][0]

    def _empty(self, names: Iterable[str], tokens: int, device: Any) -> dict[str, Tensor]:
        """Values of a step between parts, a row for each token."""
        specs = {name: value_spec(self.config, name, 1, tokens) for name in names}
        return {name: torch.zeros(s.shape[1:], dtype=s.dtype or self.dtype, device=device) for name, s in specs.items()}

    def _step(self, metadata: Mapping[str, Any], given: Mapping[str, Tensor], made: dict[str, Tensor]) -> None:
        if self.balance is not None:
            self.balance.between_steps()
        told = {i: metadata[cache.name] for i, cache in self.caches.items()}
        starts, lengths = ends_of(next(iter(told.values())))
        counts = torch.tensor(starts).diff()
        before = torch.tensor(lengths) - counts
        tables = {id(m): m.block_table for m in told.values() if isinstance(m, Pages)}.values()
        shared = any(reads_new_pages(table, before, counts, self.page) for table in tables)
        transfers = Transfers({i: cache for i, cache in self.caches.items() if isinstance(told[i], Pages)})
        for rows in rows_of(starts, lengths, shared=shared, ways=self.place.mesh.tensor):
            self._run(rows, told, given, made, transfers)
        transfers.written(told)

    def _run(
        self,
        rows: Rows,
        told: Mapping[int, Any],
        given: Mapping[str, Tensor],
        made: dict[str, Tensor],
        transfers: Transfers,
    ) -> None:
        """One group of a step: reads `given`, writes `made` and the caches."""
        pages = -(-rows.longest // self.page)
        sparse = decoder.is_sparse(self.config, pages * self.page)
        uses = self.place.uses(sparse=sparse)
        values = {name: given[name][rows.at] for name in self.place.reads(sparse=sparse)}
        states = {i: cache.state() for i, cache in self.caches.items()}
        batches = {id(m): self._batch(m, rows, pages) for m in told.values()}
        own = {i: batches[id(m)] for i, m in told.items()}
        counting: Any = contextlib.nullcontext()
        if self.balance is not None:
            values |= self.balance.tables(uses)
            counting = self.balance.counting(rows.real)
        with donating(), counting:
            for some in transfers.awaited(uses):
                values = self.place.run(some, self.params, values, states, own, step=rows.step)
        at = rows.at[rows.real]
        for name in self.place.gives(sparse=sparse):
            made[name][at] = values[name][rows.real]

    @property
    def page(self) -> int:
        """Tokens of a page, as the caches were allocated.

        The engine's config is not asked: where vLLM's server has the worker in the engine's process, it reads the
        platform's defaults into the config once more when the caches are there already, and it says 128 again.
        """
        states = (cache.state() for cache in self.caches.values())
        pools = (state.latent for state in states if isinstance(state, MlaState))
        return next((pool.shape[1] for pool in pools), ascend.page(self.cache_config.block_size))

    def _batch(self, told: Any, rows: Rows, pages: int) -> Batch[Tensor]:
        """Where a group stands in the caches of some layers: those with pages, or those with slots."""
        nobody = torch.zeros(len(rows.requests), dtype=torch.int32, device=rows.at.device)
        table, slots = nobody[:, None], nobody
        if isinstance(told, Pages):
            table = told.block_table[rows.requests, :pages].int()
        else:
            slots = told.state_indices_tensor[rows.requests].int()
        turn = self.config.rotation if isinstance(told, Pages) else None
        tokens = rows.at.shape[1]
        return step_batch(table, slots, rows.before, rows.counts, tokens, self.page, rope=turn)


def ends_of(told: Any) -> tuple[list[int], list[int]]:
    """Where the tokens of each request begin in the step, and the lengths of the sequences after it."""
    if isinstance(told, Pages):
        return told.starts, told.lengths
    return told.query_start_loc.tolist(), told.seq_lens.tolist()


class KimiGraphHybridForCausalLM(KimiGraphForCausalLM, HasInnerState, IsHybrid):
    """A text model with KDA layers, whose memories the engine keeps beside the pages."""

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> Any:
        config = config_of(vllm_config.model_config.model)
        if (graphs := graphs_of(vllm_config)) is not None:
            return all_shapes(graphs)
        if ascend.here():
            ascend.fit(vllm_config, config)
        kda = next(layer.mixer for layer in config.layers if isinstance(layer.mixer, KdaConfig))
        return kda_shapes(kda, vllm_config.parallel_config.tensor_parallel_size)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> Any:
        return kda_dtypes(vllm_config.model_config.dtype)

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        """Windows and memories are copied whole: a state is that of one number of tokens."""
        return (get_temporal_copy_spec,) * len(kda_dtypes(torch.float32))


def check(vllm_config: VllmConfig) -> None:
    """Refuse what the adapter does not do, before anything is allocated.

    Raises:
        ConfigError: with the engine's flag.
    """
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    refused = {
        f"--kv-cache-dtype {cache.cache_dtype}: caches have the model's dtype": cache.cache_dtype != "auto",
        "--speculative-config: nothing is drafted": vllm_config.speculative_config is not None,
        "--enable-lora: there are no adapters": vllm_config.lora_config is not None,
        "--decode-context-parallel-size: caches are not split by sequence here": (
            getattr(parallel, "decode_context_parallel_size", 1) > 1
        ),
    }
    for words, found in refused.items():
        if found:
            raise ConfigError(f"{words}; leave it out.")
    if ascend.here() and not vllm_config.model_config.enforce_eager:
        raise ConfigError(
            "--enforce-eager is missing: a step reads lengths on the host, vllm-ascend cannot capture it."
        )


def place_of(vllm_config: VllmConfig, config: ModelConfig) -> Place:
    """Where this process stands among the engine's ranks.

    Raises:
        ShardingError: the model's sizes do not divide.
    """
    parallel = vllm_config.parallel_config
    mesh = Mesh(pipe=parallel.pipeline_parallel_size, tensor=parallel.tensor_parallel_size)
    if mesh.world == 1:
        return Place(config, mesh)
    from vllm.distributed import get_pp_group, get_tp_group

    check_mesh(config, mesh)
    tensor, member = get_tp_group(), None
    if mesh.tensor > 1:
        member = Member(mesh.stage, tensor.rank_in_group, tensor.device_group, tensor.device)
    return Place(config, mesh, get_pp_group().rank_in_group, member)
