"""What vLLM was told of a bundle, held against it: when its config is made, and again where the model is.

Knows vLLM's config by its attributes alone: it is asked before more of the engine is imported.
"""

import functools
from pathlib import Path
from typing import Any

from kimi_graph.parallel import Mesh

from .bundles import Choice, Graphs, Settings


def settings_of(vllm_config: Any) -> Settings:
    """What the engine was told."""
    cache, model, parallel = vllm_config.cache_config, vllm_config.model_config, vllm_config.parallel_config
    pictures, moves = model.multimodal_config, vllm_config.kv_transfer_config
    return Settings(
        page=cache.block_size,
        pages=cache.num_gpu_blocks_override,
        length=model.max_model_len,
        sequences=vllm_config.scheduler_config.max_num_seqs,
        tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        dtype=model.dtype,
        mesh=Mesh(pipe=parallel.pipeline_parallel_size, tensor=parallel.tensor_parallel_size),
        pictures=0 if pictures is None else pictures.get_limit_per_prompt("image"),
        connector=None if moves is None else moves.kv_connector,
    )


@functools.lru_cache(maxsize=2)
def _opened(choice: Choice, folder: str) -> Graphs:
    return Graphs.open(choice, Path(folder))


def graphs_of(vllm_config: Any) -> Graphs | None:
    """The bundle that the engine was told to call, held against its settings; None: there is none.

    Raises:
        KimiGraphError: it cannot be called, or not by this engine.
    """
    choice = Choice.of(vllm_config.additional_config)
    if choice is None:
        return None
    graphs = _opened(choice, vllm_config.model_config.model)
    settings_of(vllm_config).check(graphs)
    return graphs
