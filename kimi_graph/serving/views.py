"""An engine's caches seen as the library's states: views, nothing is copied. Knows no engine."""

from typing import Any

import torch
from torch import Tensor

from kimi_graph.config import KdaConfig, MlaConfig, ModelConfig
from kimi_graph.layers import KdaState, MlaState

Shapes = tuple[tuple[int, ...], ...]


def kda_shapes(c: KdaConfig, ways: int) -> Shapes:
    """Shapes of one sequence's windows and memory, on a rank that has 1/ways of the heads.

    The windows of queries, keys and values are one state, before the memory: vllm-ascend lays out blocks of two states,
    the smaller one first.
    """
    heads = c.heads // ways
    return (heads * (2 * c.key + c.value), c.conv_width - 1), (heads, c.value, c.key)


def kda_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Of the windows, and of the memory."""
    return (dtype, torch.float32)


def kda_state(c: KdaConfig, windows: Tensor, memory: Tensor) -> KdaState[Tensor]:
    """Views of windows `[blocks, channels, W - 1]` and a memory `[blocks, H, V, K]`."""
    heads = memory.shape[1]
    parts = windows.split([heads * channels for channels in (c.key, c.key, c.value)], 1)
    query, key, value = (x.unflatten(1, (heads, -1)) for x in parts)
    return KdaState(memory=memory, query=query, key=key, value=value)


def row_parts(m: MlaConfig) -> tuple[int, int, int]:
    """Widths of latent, rope channels and index key in a token's row; the last is 0 where a layer keeps none."""
    return m.latent, m.key_rope, 0 if m.indexer is None or m.indexer.shared else m.indexer.key


def halves(c: ModelConfig) -> tuple[int, int]:
    """Numbers of a token that are keys, and values, for an engine that keeps both: latent; rope channels and index key.
    The same for all layers.
    """
    rows = [row_parts(layer.mixer) for layer in c.layers if isinstance(layer.mixer, MlaConfig)]
    return max(latent for latent, _, _ in rows), max(rope + index for _, rope, index in rows)


def pool_facts(c: ModelConfig) -> dict[str, Any]:
    """What SGLang asks a config for to make its pools, by its names: widths of keys and values, the same beside
    memories; which layers are in which pool; sizes of `memory`, in its words of Mamba.
    """
    kda = {i: layer.mixer for i, layer in enumerate(c.layers) if isinstance(layer.mixer, KdaConfig)}
    keys, values = (max(halves(c)),) * 2 if kda else halves(c)
    return {
        "head_dim": keys,
        "v_head_dim": values,
        "linear_layer_ids": [*kda],
        "full_attention_layer_ids": [i for i in range(len(c.layers)) if i not in kda],
        "memory": next((_memory(m) for m in kda.values()), None),
    }


def _memory(m: KdaConfig) -> dict[str, int]:
    """Of which SGLang makes windows and a memory with the axes of `kda_shapes`."""
    sizes = {"num_heads": m.heads, "head_dim": m.value, "state_size": m.key, "conv_kernel": m.conv_width}
    return sizes | {"intermediate_size": m.heads * m.value, "n_groups": m.heads}


def mla_state(m: MlaConfig, keys: Tensor, values: Tensor) -> MlaState[Tensor]:
    """Views of keys and values, `[pages, page, width of each]`, see `halves`."""
    latent, rope, index = row_parts(m)
    return MlaState(
        latent=keys[..., :latent],
        rope=values[..., :rope],
        index=values[..., rope : rope + index] if index else None,
    )
