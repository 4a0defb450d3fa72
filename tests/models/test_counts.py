"""Parameters, tensors and bytes of every preset are the published ones."""

import math

import pytest

import kimi_graph as kg
from kimi_graph import tree
from kimi_graph.config import KdaConfig, MlaConfig
from kimi_graph.models import model_specs, parameter_counts

NAMES = ("kimi-linear-48b", "kimi-k3", "kimi-k3.1-pro", "kimi-k2.5", "deepseek-v3.2", "glm-5", "glm-5.2")
CONFIG = {name: kg.load_config(name) for name in NAMES}
COUNTS = {name: parameter_counts(config) for name, config in CONFIG.items()}


def mixers(name, kind):
    return [layer.mixer for layer in CONFIG[name].layers if isinstance(layer.mixer, kind)]


def own_indexers(name):
    return sum(not m.indexer.shared for m in mixers(name, MlaConfig))


# Text: the fact sheet of models, 1.2, 2.1 and 6.1; DeepSeek-V3.2 and GLM-5 are named after theirs (671 B, 744 B).
@pytest.mark.parametrize(
    "name, text",
    [
        ("kimi-linear-48b", 49_122_681_728),
        ("kimi-k3", 2_779_484_476_000),
        ("kimi-k3.1-pro", 2_779_484_476_000 + 24 * 7_438_592),
        ("kimi-k2.5", 1_026_408_232_448),
        ("deepseek-v3.2", 671_877_944_064),
        ("glm-5", 743_911_218_432),
        ("glm-5.2", 743_911_218_432 - 57 * 9_371_904),
    ],
)
def test_text_models_have_the_published_number_of_parameters(name, text):
    assert kg.count_parameters(CONFIG[name]) == COUNTS[name].text == text
    assert sum(COUNTS[name].parts.values()) == text


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-k3.1-pro"])
def test_the_tower_of_kimi_k3_has_the_published_number_of_parameters(name):
    assert (COUNTS[name].vision, COUNTS[name].projector) == (401_214_464, 46_144_512)


def test_the_projector_of_kimi_k25_has_the_published_shapes():  # norm, 4608 x 4608, 4608 x 7168, with biases
    assert COUNTS["kimi-k2.5"].projector == 2 * 1152 + 4608 * 4608 + 4608 + 7168 * 4608 + 7168


@pytest.mark.parametrize(
    "name, active, without_table",
    [
        ("kimi-k3", 105.36e9, 104.19e9),
        ("kimi-linear-48b", 3.484e9, 3.107e9),
        ("kimi-k2.5", 32.9e9, None),
    ],
)
def test_active_parameters_are_the_published_ones(name, active, without_table):
    counts = COUNTS[name]
    assert counts.active == pytest.approx(active, rel=2e-3)  # 32.9 B is given with three digits
    if without_table:
        assert counts.active - counts.embedding == pytest.approx(without_table, abs=5e6)


def test_layers_of_kimi_linear_have_the_published_sizes():
    parts = COUNTS["kimi-linear-48b"].parts
    assert parts["kda"] == 20 * 39_514_272
    assert parts["mla"] == 7 * 29_114_880
    assert sum(parts[p] for p in ("router", "experts", "shared experts")) == 26 * 1_819_607_296
    assert "latent" not in parts
    assert len(mixers("kimi-linear-48b", KdaConfig)) == 20


@pytest.mark.parametrize(
    "name, each, layers",
    [
        ("deepseek-v3.2", 13_959_424, 61),
        ("glm-5", 9_371_904, 78),
        ("glm-5.2", 9_371_904, 21),
        ("kimi-k3.1-pro", 7_438_592, 24),
    ],
)
def test_indexers_have_the_published_sizes(name, each, layers):
    assert own_indexers(name) == layers
    assert COUNTS[name].parts["indexer"] == layers * each


def stored(spec, config):
    """Tensors and bytes of a parameter where experts are packed as the file says: 4 bits, and a byte for 32."""
    size = math.prod(spec.stored)
    if ".experts." in spec.source[0]:
        return 2 * len(spec.source), len(spec.source) * (size // 2 + size // 32)
    return len(spec.source), len(spec.source) * size * (spec.dtype or config.dtype).itemsize


def test_the_checkpoint_of_kimi_k3_has_the_published_number_of_tensors_and_bytes():
    config = CONFIG["kimi-k3"]
    sizes = [stored(spec, config) for spec in tree.leaves(model_specs(config))]
    assert sum(count for count, _ in sizes) == 497_220
    assert sum(size for _, size in sizes) == 1_560_860_324_864
    experts = [s for s in tree.leaves(model_specs(config)) if ".experts." in s.source[0]]
    assert sum(len(s.source) for s in experts) == 247_296
