"""Caches as vllm-ascend's runner lays them out give the library's tokens. On the CPU: nothing here ran on an NPU."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kimi_graph as kg
from kimi_graph.config import KdaConfig
from kimi_graph.errors import ConfigError
from tests.serving.served import engine
from tests.serving.test_tokens import BLOCK, PRESETS, rounds

pytestmark = [pytest.mark.serving, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("preset", ["kimi-linear-48b", "kimi-k3.1-pro", "deepseek-v3.2"])
def test_keys_and_values_in_two_tensors_give_the_librarys_tokens(folder, library, preset, monkeypatch):
    from tests.serving import ascend_runner

    ascend_runner.install(monkeypatch)
    lib = library(preset)
    prompts = lib.prompts(8, 140, 300)
    with engine(folder(preset)) as llm:
        cached = rounds(lib, llm, prompts, times=2)
        assert {type(c.kv_cache) for c in caches_of(llm).values()} <= {tuple, list}
    assert cached[1] == [0, BLOCK, 2 * BLOCK]


def test_preempted_requests_give_the_same_tokens_from_that_layout(folder, library, monkeypatch):
    from tests.serving import ascend_runner

    ascend_runner.install(monkeypatch)
    lib = library("kimi-linear-48b")
    with engine(
        folder("kimi-linear-48b"), num_gpu_blocks_override=12, max_num_batched_tokens=161, max_model_len=512
    ) as llm:
        rounds(lib, llm, lib.prompts(*[118] * 8, 250, seed=2), count=14, times=1)


def caches_of(llm: Any) -> dict[str, Any]:
    return llm.llm_engine.vllm_config.compilation_config.static_forward_context


def bytes_of(x: Tensor) -> range:
    start = x.data_ptr()
    return range(start, start + x.numel() * x.element_size())


@pytest.mark.parametrize("preset, ways", [("kimi-linear-48b", 16), ("kimi-k3", 32), ("kimi-k3.1-pro", 16)])
def test_no_block_reaches_into_the_bytes_of_another(preset, ways):
    """Of released sizes: a block is a layer's with a memory or one's with pages, and others keep what they hold."""
    from kimi_graph.serving import ascend
    from kimi_graph.serving.views import halves, kda_dtypes, kda_shapes
    from tests.serving import ascend_runner

    c = kg.load_config(preset)
    kda = next(layer.mixer for layer in c.layers if isinstance(layer.mixer, KdaConfig))
    width = ascend.width_of(kda, ways, max(halves(c)), torch.bfloat16)
    assert width is not None
    shapes, dtypes = kda_shapes(kda, ways), kda_dtypes(torch.bfloat16)
    windows, memory = (torch.Size(s).numel() * d.itemsize for s, d in zip(shapes, dtypes, strict=True))
    tokens, blocks = memory // (2 * width), 3
    assert tokens % ascend_runner.KERNEL == 0
    buffer = torch.empty(blocks * (windows + 2 * memory), dtype=torch.int8)
    states = ascend_runner.states(buffer, shapes, dtypes, blocks)
    halves = ascend_runner.halves(buffer, (width, width), torch.bfloat16, blocks * tokens)
    pages = tokens // ascend_runner.KERNEL
    for mine, theirs in itertools.permutations(range(blocks), 2):
        for state, half in itertools.product(states, halves):
            a, b = bytes_of(state[mine]), bytes_of(half[theirs * pages : (theirs + 1) * pages])
            assert max(a.start, b.start) >= min(a.stop, b.stop)


def test_tensor_ranks_whose_memories_are_no_whole_pages_are_refused():
    from kimi_graph.serving import ascend

    c = kg.load_config("kimi-k3")
    arch = SimpleNamespace(head_size=0)
    model = SimpleNamespace(dtype=torch.bfloat16, model_arch_config=arch)
    for ways, width in ((1, 512), (16, 512), (32, 768)):
        config: Any = SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(tensor_parallel_size=ways))
        ascend.fit(config, c)
        assert arch.head_size == width
    config.parallel_config.tensor_parallel_size = 96
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 96: 1 heads' memory .* nearest 48"):
        ascend.fit(config, c)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_engines_config_has_no_name_that_turns_on_layers_of_vllm_ascend(preset):
    from kimi_graph.serving.hf_config import EngineConfig, engine_facts

    made = EngineConfig(**engine_facts(kg.load_config(preset)))
    assert not [name for name in ("index_topk", "compress_ratios", "kv_lora_rank") if hasattr(made, name)]
