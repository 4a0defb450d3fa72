"""Pictures in a prompt: embeddings take the places of their placeholders, whatever the layout of the rows."""

import pytest
import torch

import kimi_graph as kg
from kimi_graph.errors import ConfigError
from kimi_graph.fixture import make_fixture

PIL = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module", params=["kimi-k3", "kimi-k2.5"])
def seen(request, tmp_path_factory):
    """(config, parameters, embeddings of two pictures, a prompt with their placeholders)."""
    folder = make_fixture(kg.load_config(request.param), tmp_path_factory.mktemp("vision") / "model").folder
    config = kg.load_config(str(folder))
    params = kg.load_params(folder, config, dtype=torch.float64)
    pictures = [PIL.effect_noise(size, 80).convert("RGB") for size in ((56, 56), (84, 28))]
    found = [kg.encode_image(config, params, picture) for picture in pictures]
    spot = config.vision.placeholder
    text = [5, *[spot] * len(found[0]), 6, 7, *[spot] * len(found[1]), 8]
    return config, params, found, torch.tensor([text])


def test_a_prompt_with_pictures_read_in_chunks_is_the_prompt_read_at_once(seen):
    config, params, found, tokens = seen
    width, cut = tokens.shape[1], len(found[0]) + 2
    whole, _ = kg.prefill(config, params, tokens, kg.init_state(config, 1, width), vision=found)
    first, state = kg.prefill(config, params, tokens[:, :cut], kg.init_state(config, 1, width), vision=found[:1])
    second, _ = kg.prefill(config, params, tokens[:, cut:], state, vision=found[1:])
    assert float((torch.cat([first, second], 1) - whole).abs().max() / whole.abs().max()) < 1e-12
    blind, _ = kg.prefill(config, params, tokens, kg.init_state(config, 1, width))
    assert not torch.allclose(blind, whole)


def test_padding_moves_pictures_with_their_tokens(seen):
    config, params, found, tokens = seen
    width = tokens.shape[1]
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), tokens], 1)
    mask = torch.arange(width + 3)[None] >= 3
    whole, _ = kg.prefill(config, params, tokens, kg.init_state(config, 1, width), vision=found)
    moved, _ = kg.prefill(config, params, padded, kg.init_state(config, 1, width + 3), mask=mask, vision=found)
    assert float((moved[:, 3:] - whole).abs().max() / whole.abs().max()) < 1e-12


def test_pictures_that_do_not_fit_their_placeholders_are_refused_in_words(seen):
    config, params, found, tokens = seen
    state = kg.init_state(config, 1, tokens.shape[1])
    with pytest.raises(ConfigError, match="placeholders"):
        kg.prefill(config, params, tokens, state, vision=found[:1])
    for bad in ([], found[0]):
        with pytest.raises(ConfigError, match="expected a list of embeddings"):
            kg.prefill(config, params, tokens, state, vision=bad)


def test_a_text_model_refuses_pictures(tiny):
    config = kg.load_config(tiny)
    tokens = torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(ConfigError, match="has no vision tower"):
        kg.prefill(
            config, kg.init_params(config), tokens, kg.init_state(config, 1, 8), vision=[torch.zeros(4, config.embed)]
        )
