# pyright: reportMissingImports=false
"""The models as SGLang runs them: a step of the engine is one call of the library's schedule for each group of rows.

No layer is computed here. Keys of the engine's token pool are latents, values rope channels and index keys, its other
pool is that of KDA layers' memories: views, written where they lie. One rank, text alone.
Axes: N tokens of a step, R requests, B rows of a group, T tokens of its longest, D embed, V vocab.
"""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.linear_attn_model_registry import LinearAttnModelSpec, register_linear_attn_model
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.model_executor.forward_context import get_req_to_token_pool, get_token_to_kv_pool
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.runtime_context import get_server_args
from torch import Tensor, nn
from transformers import AutoConfig

from kimi_graph.config import KdaConfig, ModelConfig
from kimi_graph.errors import ConfigError
from kimi_graph.families import FAMILIES
from kimi_graph.layers import step_batch
from kimi_graph.models import decoder
from kimi_graph.ops import donating
from kimi_graph.parallel import Mesh
from kimi_graph.read_config import load_config

from .hf_config import ARCHITECTURES, MODEL_TYPE, EngineConfig, engine_facts, is_hybrid
from .ranks import Place
from .rows import Rows, rows_of
from .views import kda_dtypes, kda_state, mla_state, pool_facts


class SglangConfig(EngineConfig):
    """A released config.json as SGLang asks for it: sizes of its pools, and which layers have a place in which."""

    @classmethod
    def facts(cls, c: ModelConfig) -> dict[str, Any]:
        """Attributes of this config."""
        return engine_facts(c) | pool_facts(c)

    @property
    def mamba2_cache_params(self) -> Mamba2CacheParams:
        """Windows and memory of a sequence, with the axes of `views.kda_shapes`."""
        shape = Mamba2StateShape.create(tp_world_size=1, **self.memory)
        windows, memory = self.memory_dtypes
        dtypes = Mamba2StateDType(conv=windows, temporal=memory)
        return Mamba2CacheParams(shape=shape, layers=self.linear_layer_ids, dtype=dtypes)


class KimiGraph(nn.Module):
    """The text part of a model. Parameters are a tree of the library's, not of `nn.Parameter`s."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        check(told := get_server_args())
        self.config, self.folder, self.dtype = config, Path(told.model_path), torch.get_default_dtype()
        self.place = Place(load_config(self.folder), Mesh())
        self.params: Any = None
        config.memory_dtypes = kda_dtypes(self.dtype)  # of --dtype; the engine makes its pools after the model
        self.logits_processor = LogitsProcessor(config)
        self.head = SimpleNamespace(quant_method=SimpleNamespace(apply=self._logits))  # as it asks quantised heads

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """The library reads the checkpoint's folder itself; what the engine would read is not asked for."""
        self.params = self.place.load(self.folder, self.dtype)

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any, input_embeds: Any = None) -> Any:
        """Logits of the tokens of which the engine wants them, by its LogitsProcessor. `input_ids`: `[N]`."""
        embedded = self._outside(decoder.schedule(self.place.config)[0], {"tokens": input_ids[None]})
        x_ND = embedded if input_embeds is None else input_embeds.to(self.dtype)
        made_ND = torch.empty_like(x_ND)
        for rows in rows_of(*ends_of(forward_batch)):
            self._run(rows, forward_batch.req_pool_indices[rows.requests], x_ND, made_ND)
        return self.logits_processor(input_ids, made_ND, self.head, forward_batch)

    def _logits(self, _: Any, x_nD: Tensor, bias: None = None) -> Tensor:
        return self._outside(head := decoder.schedule(self.place.config)[-1], {head.reads[0]: x_nD[None]})

    def _outside(self, use: decoder.Use, values: dict[str, Tensor]) -> Tensor:
        """A part without state, of tokens in one row: `[n, ...]`."""
        return self.place.run([use], self.params, values, {}, {}, step=False)[use.writes[0]][0]

    def _run(self, rows: Rows, requests_B: Tensor, x_ND: Tensor, made_ND: Tensor) -> None:
        """One group of a step: reads `x_ND`, writes `made_ND` and the pools."""
        c, pool, page = self.place.config, get_req_to_token_pool(), get_token_to_kv_pool().page_size
        pages = -(-rows.longest // page)
        table = pool.req_to_token[requests_B, : pages * page : page] // page
        slots = pool.get_mamba_indices(requests_B).int() if is_hybrid(c) else torch.zeros_like(table[:, 0])
        width, sparse = rows.at.shape[1], decoder.is_sparse(c, pages * page)
        batch = step_batch(table, slots, rows.before, rows.counts, width, page, rope=c.rotation)
        uses, own, batches = self.place.uses(sparse=sparse), states(c), dict.fromkeys(self.place.layers, batch)
        with donating():
            values = self.place.run(uses, self.params, {"x": x_ND[rows.at]}, own, batches, step=rows.step)
        made_ND[rows.at[rows.real]] = values[self.place.gives(sparse=sparse)[0]][rows.real]


def states(c: ModelConfig) -> dict[int, Any]:
    """The engine's pools as the states of all layers."""
    tokens, memories, found = get_token_to_kv_pool(), get_req_to_token_pool(), {}
    for i, mixer in enumerate(layer.mixer for layer in c.layers):
        if isinstance(mixer, KdaConfig):
            own = memories.mamba2_layer_cache(i)
            found[i] = kda_state(mixer, own.conv[0], own.temporal)
        else:
            pair = tokens.get_key_buffer(i), tokens.get_value_buffer(i)
            found[i] = mla_state(mixer, *(x.view(-1, tokens.page_size, x.shape[-1]) for x in pair))
    return found


def ends_of(told: Any) -> tuple[list[int], list[int]]:
    """Where the tokens of each request begin in the step, and the lengths of the sequences after it."""
    lengths = told.seq_lens.tolist()
    counts = [1] * len(lengths) if told.forward_mode.is_decode() else told.extend_seq_lens.tolist()
    return [0, *torch.tensor(counts).cumsum(0).tolist()], lengths


def check(t: Any) -> None:
    """Refuse flags of the engine that the adapter does nothing with.

    Raises:
        ConfigError: with all of them.
    """
    refused = {
        f"--device {t.device}: it has run on the CPU alone": t.device != "cpu",
        "--enable-torch-compile: a step reads lengths on the host": t.enable_torch_compile,
        "--tp-size, --pp-size, --dp-size: one rank runs here": t.tp_size * t.pp_size * t.dp_size > 1,
        f"--kv-cache-dtype {t.kv_cache_dtype}: caches have the model's dtype": t.kv_cache_dtype != "auto",
        "--speculative-algorithm, --enable-lora: no other model takes part": t.speculative_algorithm or t.enable_lora,
        "--quantization, --json-model-override-args: files count": t.quantization or t.json_model_override_args != "{}",
        "--enable-unified-memory: pools lie apart": t.enable_unified_memory or t.enable_page_major_kv_layout,
    }
    if found := [words for words, asked in refused.items() if asked]:
        raise ConfigError("; ".join(found) + ".")


def register() -> None:
    """The entry point of SGLang's plugins: called in every process, before a config is read."""
    for name in (*FAMILIES, MODEL_TYPE):
        SglangConfig.model_type = name  # transformers compares the two
        AutoConfig.register(name, SglangConfig, exist_ok=True)
    backend = "sglang.srt.layers.attention.hybrid_linear_attn_backend.MambaAttnBackendBase"  # computes nothing
    register_linear_attn_model(LinearAttnModelSpec(SglangConfig, backend, config_predicate=lambda c: c.memory))
    ModelRegistry.models |= dict.fromkeys(ARCHITECTURES.values(), KimiGraph)
