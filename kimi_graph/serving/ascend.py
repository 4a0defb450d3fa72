# pyright: reportMissingImports=false
"""What is different under vllm-ascend, all of it. Read in its source (22 August 2026, for vLLM 0.27.1), not run on an
NPU; tests run it on the CPU, in an engine that lays caches out as its runner does.

Its runner gives an attention layer two tensors, keys and values, each `[pages, 128, 1, width]`: the latent lies in the
first, rope channels and index key in the second. Beside KDA layers both lie in one buffer with the memories:
windows, then keys or memories, then values, each of all blocks. So that no block reaches into another's bytes, the keys
of a block have to be as many bytes as a memory. Layers are found by their names: `linear_attn` in those with a memory,
`attn` in the others. An attribute `index_topk` or `compress_ratios` of the engine's config would turn on layers of its
own.
"""

import math
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from kimi_graph.config import KdaConfig, MlaConfig, ModelConfig
from kimi_graph.errors import ConfigError
from kimi_graph.layers import MlaState

from .caches import MlaCache, PagesBackend
from .hf_config import is_hybrid
from .views import halves, kda_shapes, mla_state

PAGE = 128  # tokens of a page in its attention's block tables, whatever a block of the engine has


def here() -> bool:
    """Whether the engine runs on NPUs."""
    return current_platform.device_type == "npu"


def page(block: int) -> int:
    """Tokens of a page in block tables, by the engine's block size."""
    return PAGE if here() else block


def fit(vllm_config: VllmConfig, c: ModelConfig) -> int:
    """The width of keys and of values beside KDA layers. The engine is told too: vllm-ascend takes blocks of as many
    tokens as fill a memory's bytes, and asks for the memory before it asks for the width.

    Raises:
        ConfigError: no width does it on so many tensor ranks.
    """
    kda = next(layer.mixer for layer in c.layers if isinstance(layer.mixer, KdaConfig))
    model, ways = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
    width = width_of(kda, ways, max(halves(c)), model.dtype)
    if width is None:
        legal = [w for w in range(1, ways) if not kda.heads % w and width_of(kda, w, max(halves(c)), model.dtype)]
        raise ConfigError(
            f"--tensor-parallel-size {ways}: {kda.heads // ways} heads' memory is not whole pages of {PAGE} keys of "
            f"{max(halves(c))} numbers or more, as vllm-ascend needs; nearest {max(legal, default='none')}."
        )
    model.model_arch_config.head_size = width
    return width


def width_of(kda: KdaConfig, ways: int, least: int, dtype: torch.dtype) -> int | None:
    """The least width of keys of which whole pages are as many bytes as the memory of a rank's heads."""
    memory = 4 * math.prod(kda_shapes(kda, ways)[1])
    numbers, rest = divmod(memory, PAGE * dtype.itemsize)
    return next((w for w in range(least, numbers + 1) if not numbers % w and not rest), None)


class Halves(MlaCache):
    """Keys and values of an attention layer, as vllm-ascend's runner allocates and binds them."""

    def __init__(self, vllm_config: VllmConfig, name: str, m: MlaConfig, c: ModelConfig) -> None:
        hybrid = is_hybrid(c)
        self.widths = (fit(vllm_config, c),) * 2 if hybrid else halves(c)
        super().__init__(vllm_config, name, m, sum(self.widths))
        self.m = m

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Of pages of 128 tokens."""
        return HalvesBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:
        """Keys and values of one head."""
        size, (keys, values) = vllm_config.cache_config.block_size, self.widths
        return FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=keys, head_size_v=values, dtype=self.dtype)

    def state(self) -> MlaState[Tensor]:
        """Views of both tensors, `[pages, 128, width of each]`."""
        keys, values = (half.squeeze(2) for half in self.kv_cache)
        return mla_state(self.m, keys, values)


class HalvesBackend(PagesBackend):
    """Pages of keys and pages of values, see `Halves`."""

    @staticmethod
    def get_name() -> str:
        """Its name in the engine's messages."""
        return "KIMI_GRAPH_HALVES"

    @staticmethod
    def get_supported_kernel_block_sizes(spec: Any = None) -> list[Any]:
        """0.32 gives the spec, 0.27 does not."""
        return [PAGE]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Of keys and values together; the runner takes the first dimension away."""
        return (2, num_blocks, block_size, num_kv_heads, head_size)
