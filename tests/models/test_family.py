"""Whole models of the family against transformers' own, on fixture checkpoints, in float32."""

from pathlib import Path

import pytest
import torch

import kimi_graph as kg
from kimi_graph.fixture import make_fixture

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4  # of the logit scale; float32 sums in another order give a few 1e-6

MODELS = {
    "deepseek-v3.2": "DeepseekV32ForCausalLM",
    "glm-5": "GlmMoeDsaForCausalLM",
    "glm-5.2": "GlmMoeDsaForCausalLM",
    "kimi-k2.5": "Kimi_K25ForConditionalGeneration",
}

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


@pytest.fixture(scope="module", params=sorted(MODELS))
def both(request, tmp_path_factory):
    """(config, our parameters, transformers' model) of one checkpoint."""
    folder: Path = make_fixture(kg.load_config(request.param), tmp_path_factory.mktemp("family") / "model").folder
    theirs = getattr(transformers, MODELS[request.param]).from_pretrained(folder, dtype=torch.float32).eval()
    config = kg.load_config(str(folder))
    return config, kg.load_params(folder, config, dtype=torch.float32), theirs


def differ(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


def test_prefill_chunks_and_decode_agree_with_transformers(both):
    config, params, theirs = both
    tokens = torch.randint(250, (2, 110))  # no placeholder of a picture among them
    with torch.no_grad():
        want = theirs(tokens).logits
    whole, _ = kg.prefill(config, params, tokens, kg.init_state(config, 2, 110))
    assert differ(whole, want) < TOLERANCE
    state, parts = kg.init_state(config, 2, 110), []
    for start, end in ((0, 33), (33, 104)):
        logits, state = kg.prefill(config, params, tokens[:, start:end], state)
        parts.append(logits)
    for t in range(104, 110):
        logits, state = kg.decode(config, params, tokens[:, t], state)
        parts.append(logits[:, None])
    assert differ(torch.cat(parts, 1), want) < TOLERANCE
