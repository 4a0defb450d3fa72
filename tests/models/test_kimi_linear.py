"""Kimi Linear against transformers' own implementation, on a fixture checkpoint, in float32."""

import pytest
import torch

import kimi_graph as kg

TOLERANCE = 1e-4  # of the logit scale; float32 sums in another order give about 2e-6

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


@pytest.fixture(scope="module")
def both(tiny):
    """(config, our parameters, transformers' model) of one checkpoint."""
    transformers = pytest.importorskip("transformers")
    config = kg.load_config(tiny)
    theirs = transformers.KimiLinearForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    return config, kg.load_params(tiny, config, dtype=torch.float32), theirs


def differ(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


def test_prefill_chunks_and_decode_agree_with_transformers(both):
    config, params, theirs = both
    tokens = torch.randint(config.vocab, (2, 150))
    with torch.no_grad():
        want = theirs(tokens).logits
    whole, _ = kg.prefill(config, params, tokens, kg.init_state(config, 2, 150))
    assert differ(whole, want) < TOLERANCE
    state, parts = kg.init_state(config, 2, 150), []
    for start, end in ((0, 33), (33, 140)):
        logits, state = kg.prefill(config, params, tokens[:, start:end], state)
        parts.append(logits)
    for t in range(140, 150):
        logits, state = kg.decode(config, params, tokens[:, t], state)
        parts.append(logits[:, None])
    assert differ(torch.cat(parts, 1), want) < TOLERANCE


def test_left_padding_agrees_with_transformers(both):
    config, params, theirs = both
    tokens, mask = torch.randint(config.vocab, (2, 70)), torch.ones(2, 70, dtype=torch.bool)
    mask[1, :13] = False
    with torch.no_grad():
        want = theirs(tokens, attention_mask=mask.long()).logits
    got, _ = kg.prefill(config, params, tokens, kg.init_state(config, 2, 70), mask=mask)
    assert differ(got[mask], want[mask]) < TOLERANCE


def test_the_preset_has_the_released_number_of_parameters():
    assert kg.count_parameters(kg.load_config("kimi-linear-48b")) == 49_122_681_728
