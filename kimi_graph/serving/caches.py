# pyright: reportMissingImports=false
"""The engine's cache of each layer, seen as the library's state of that layer: views, nothing is copied.

A KDA layer's windows and memory are a block of the engine's recurrent-state cache, in the state contract's order of
axes. Of an attention layer one page holds rows of latent, rope channels and index key beside each other; under
vllm-ascend that is otherwise, see `ascend`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from kimi_graph.config import KdaConfig, MlaConfig
from kimi_graph.layers import KdaState, MlaState

from . import compat
from .views import Shapes, kda_dtypes, kda_shapes, kda_state, row_parts


class KdaCache(nn.Module, MambaBase):
    """The engine's recurrent-state cache of a KDA layer."""

    mamba_type = MambaAttentionBackendEnum.LINEAR

    def __init__(self, vllm_config: VllmConfig, name: str, c: KdaConfig, ways: int) -> None:
        super().__init__()
        self.name, self.shapes, self.dtypes = name, kda_shapes(c, ways), kda_dtypes(vllm_config.model_config.dtype)
        self.c = c
        self.kv_cache: Any = ()
        vllm_config.compilation_config.static_forward_context[name] = self

    def get_state_shape(self) -> Shapes:
        return self.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self.dtypes

    def state(self) -> KdaState[Tensor]:
        return self.state_in(*self.kv_cache)

    def state_in(self, windows: Tensor, memory: Tensor) -> KdaState[Tensor]:
        """See `views.kda_state`."""
        return kda_state(self.c, windows, memory)


class MlaCache(nn.Module, AttentionLayerBase):
    """The engine's paged cache of an attention layer."""

    def __init__(self, vllm_config: VllmConfig, name: str, c: MlaConfig, row: int) -> None:
        super().__init__()
        self.name, self.parts, self.row = name, row_parts(c), row
        self.dtype = vllm_config.model_config.dtype
        self.kv_cache = torch.empty(0)
        vllm_config.compilation_config.static_forward_context[name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return PagesBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MLAAttentionSpec:
        size = vllm_config.cache_config.block_size
        return MLAAttentionSpec(block_size=size, num_kv_heads=1, head_size=self.row, dtype=self.dtype)

    def state(self) -> MlaState[Tensor]:
        rows = compat.pages_of(self.kv_cache)
        latent, rope, index, _ = rows.split([*self.parts, self.row - sum(self.parts)], -1)
        return MlaState(latent=latent, rope=rope, index=index if self.parts[2] else None)


@dataclass(frozen=True)
class Pages:
    """What the engine says of a step to a layer with pages.

    Attributes:
        starts, lengths: see `rows.rows_of`.
        block_table: `[R, pages]`.
    """

    starts: list[int]
    lengths: list[int]
    block_table: Tensor


class PagesBuilder(AttentionMetadataBuilder[Pages]):
    """What the engine knows of a step's pages, as `Pages`."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Pages:
        m = common_attn_metadata
        return Pages(m.query_start_loc_cpu.tolist(), m.seq_lens.tolist(), m.block_table_tensor)


class PagesBackend(AttentionBackend):
    """Pages of rows that the library's own attention reads: the engine allocates them and runs nothing."""

    supported_dtypes = [torch.float32, torch.bfloat16, torch.float16]  # noqa: RUF012 (the engine's name and form)

    @staticmethod
    def get_name() -> str:
        return "KIMI_GRAPH_PAGES"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("the library attends")

    @staticmethod
    def get_builder_cls() -> type[PagesBuilder]:
        return PagesBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Asked by 0.27 alone."""
        return (num_blocks, block_size, head_size)
