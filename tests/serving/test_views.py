"""An engine's tensors are the library's states, and nothing is copied."""

import pytest
import torch

import kimi_graph as kg
from kimi_graph import tree
from kimi_graph.config import KdaConfig, MlaConfig
from kimi_graph.serving.views import halves, kda_shapes, kda_state, mla_state, pool_facts, row_parts

PRESETS = ["kimi-linear-48b", "kimi-k3", "kimi-k3.1-pro", "kimi-k2.5", "deepseek-v3.2", "glm-5.2"]


def mixers(preset, kind):
    return [layer.mixer for layer in kg.load_config(preset).layers if isinstance(layer.mixer, kind)]


def written_through(state, buffers):
    """Ones into every leaf: how many there were, and how many numbers of the buffers are one."""
    leaves = [leaf for leaf in tree.leaves(state) if leaf is not None]
    for leaf in leaves:
        leaf.fill_(1)
    return sum(leaf.numel() for leaf in leaves), sum(int(x.sum()) for x in buffers)


def test_windows_and_memories_are_written_where_they_lie():
    c = mixers("kimi-linear-48b", KdaConfig)[0]
    windows, memory = (torch.zeros(3, *shape) for shape in kda_shapes(c, 1))
    state = kda_state(c, windows, memory)
    assert state.key.shape == (3, c.heads, c.key, c.conv_width - 1)
    there, here = written_through(state, (windows, memory))
    assert there == here == windows.numel() + memory.numel()


@pytest.mark.parametrize("preset", PRESETS)
def test_rows_of_every_layer_lie_in_keys_and_values_and_do_not_overlap(preset):
    keys, values = halves(kg.load_config(preset))
    for m in {str(row_parts(m)): m for m in mixers(preset, MlaConfig)}.values():
        pools = torch.zeros(2, 3, keys), torch.zeros(2, 3, values)
        there, here = written_through(mla_state(m, *pools), pools)
        assert there == here == 2 * 3 * sum(row_parts(m))


@pytest.mark.parametrize("preset", PRESETS)
def test_sglangs_pools_have_a_place_for_every_layer(preset):
    c = kg.load_config(preset)
    facts, kda = pool_facts(c), mixers(preset, KdaConfig)
    assert sorted(facts["linear_layer_ids"] + facts["full_attention_layer_ids"]) == [*range(len(c.layers))]
    assert len(facts["linear_layer_ids"]) == len(kda)
    latent, rest = halves(c)
    assert facts["head_dim"] >= latent and facts["v_head_dim"] >= rest
    assert (facts["head_dim"] == facts["v_head_dim"]) or not kda  # its pool beside memories has one width
    assert (facts["memory"] is None) == (not kda)
