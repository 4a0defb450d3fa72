"""Fixtures of the family: every kind of layer, head sizes as released, small, and read by transformers."""

import math

import pytest
import torch

import kimi_graph as kg
from kimi_graph import tree
from kimi_graph.checkpoint import Checkpoint
from kimi_graph.config import DenseConfig, KdaConfig, MlaConfig, MoeConfig
from kimi_graph.errors import ConfigError
from kimi_graph.fixture import make_fixture, small_config
from kimi_graph.init import init_tensor
from kimi_graph.layers import vision_specs
from kimi_graph.models import init_params, model_specs
from kimi_graph.models.decoder import schedule
from kimi_graph.read_config import parse_config
from kimi_graph.spec import weight
from kimi_graph.tokenizer import MEDIA

NAMES = ("kimi-k3", "kimi-k3.1-pro", "kimi-k2.5", "deepseek-v3.2", "glm-5", "glm-5.2")
CONFIG = {name: kg.load_config(name) for name in NAMES}


@pytest.fixture(scope="module", params=NAMES)
def made(request, tmp_path_factory):
    """A preset and its fixture. Not to be written to."""
    return CONFIG[request.param], make_fixture(CONFIG[request.param], tmp_path_factory.mktemp("family") / "tiny")


def small(name, layers=None):
    return parse_config(small_config(CONFIG[name], layers), origin="", name="small")


def mixers(config, kind):
    return [layer.mixer for layer in config.layers if isinstance(layer.mixer, kind)]


def kinds(config):
    return [" ".join(layer.kinds) for layer in config.layers]


# The model.


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sparse", [False, True])
def test_a_fixture_has_every_part_of_its_model(name, sparse):
    def parts(config):
        return {use.part.rstrip("0123456789") for use in schedule(config, sparse=sparse)}

    assert parts(small(name)) == parts(CONFIG[name])


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-k3.1-pro"])
def test_kimi_k3_has_three_blocks_and_two_full_layers_at_its_end(name):
    config = small(name)
    assert kinds(config) == ["kda dense", "kda moe", "mla moe", "kda moe", "kda moe", "kda moe", "mla moe", "mla moe"]
    assert math.ceil(len(config.layers) / config.residual_block) == 3
    assert {use.part for use in schedule(config) if "res" in use.part} >= {"attn_res1", "attn_res2", "ffn_res3"}


def test_glm_52_has_full_and_shared_indexers_after_each_other():
    assert "".join("FS"[m.indexer.shared] for m in mixers(small("glm-5.2"), MlaConfig)) == "FFSSFS"
    assert not any(m.indexer.shared for m in mixers(small("glm-5"), MlaConfig))


@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_layers_is_a_model(name):
    for layers in range(2, len(CONFIG[name].layers) + 1):
        config = small(name, layers)
        assert len(config.layers) == layers
        assert {layer.kinds[1] for layer in config.layers} == {"dense", "moe"}
    assert kinds(config) == kinds(CONFIG[name])
    assert config.residual_block == CONFIG[name].residual_block


def fixed(config):
    """What operators are written for, and what is no size."""
    mla = {
        (
            *(m.latent, m.key_nope, m.key_rope, m.value, m.scale, m.latent_eps, m.output_gate, m.rope),
            m.indexer and (m.indexer.heads, m.indexer.key, m.indexer.rope, m.indexer.interleaved, m.indexer.eps),
        )
        for m in mixers(config, MlaConfig)
    }
    kda = {
        (m.key, m.value, m.conv_width, m.gate_rank, m.gate_lower_bound, m.full_rank_gate, m.stored_rates, m.conv_dtype)
        for m in mixers(config, KdaConfig)
    }
    moe = {
        (f.scale, f.groups, f.kept_groups, f.latent_norm, f.situ)
        for f in (layer.ffn for layer in config.layers)
        if isinstance(f, MoeConfig)
    }
    v = config.vision
    vision = v and (v.head_dim, v.patch, v.grid, v.frames, v.interpolation, v.bias, v.norm_eps, v.merge, v.patch_limit)
    return mla, kda, moe, vision, config.norm_eps, config.max_len, config.names, config.dtype


@pytest.mark.parametrize("name", NAMES)
def test_dimensions_an_operator_is_written_for_are_the_released_ones(name):
    assert fixed(small(name)) == fixed(CONFIG[name])


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_small(name):
    config = small(name)
    assert {m.heads for m in mixers(config, KdaConfig)} <= {4}
    assert {m.heads for m in mixers(config, MlaConfig)} == {
        12 if name.startswith("kimi-k3") else 4
    }  # of 96, of 64 or 128
    assert (config.embed, config.vocab) == (256, 512)
    assert {m.query_latent for m in mixers(config, MlaConfig)} == {192}
    for m in mixers(config, MlaConfig):
        assert m.indexer is None or m.indexer.top_k == 64
    for ffn in (layer.ffn for layer in config.layers):
        assert ffn.ffn <= 1280 if isinstance(ffn, DenseConfig) else ffn.top_k == 4 and ffn.experts in (16, 32)
    assert len(config.layers) <= 8


def test_groups_of_experts_keep_four_experts():
    moe = small("deepseek-v3.2").layers[-1].ffn
    assert (moe.experts, moe.groups, moe.kept_groups) == (32, 8, 4)


def test_the_widths_of_latent_experts_differ():
    moe = small("kimi-k3").layers[-1].ffn
    assert (moe.latent, moe.ffn, moe.shared_ffn) == (192, 128, 256)


def test_towers_are_small_and_keep_the_width_of_a_head():
    k3, k25 = small("kimi-k3").vision, small("kimi-k2.5").vision
    assert (k3.embed, k3.heads, k3.head_dim, k3.layers, k3.projector_ffn) == (256, 4, 128, 2, 1024)
    assert (k25.embed, k25.heads, k25.head_dim, k25.layers, k25.projector_ffn) == (288, 4, 72, 2, 1152)


@pytest.mark.parametrize("name", NAMES)
def test_a_fixture_of_a_fixture_is_the_same(name):
    once = small(name)
    assert parse_config(small_config(once, len(once.layers)), origin="", name="again") == once
    assert parse_config(small_config(once), origin="", name="again") == once


@pytest.mark.parametrize("name", NAMES)
def test_ids_stay_apart(name):
    config = small(name)
    ids = [*config.eos, config.pad, *([] if config.bos is None else [config.bos])]
    assert all(256 <= x < 512 for x in ids)
    assert len(set(ids)) == len({*CONFIG[name].eos, CONFIG[name].pad, CONFIG[name].bos} - {None})
    if config.vision:
        assert config.vision.placeholder == 512 - (163840 - 163605)


def test_the_rates_of_the_bounded_gate_do_not_saturate_it():
    spec = weight((96,), "heads", source="A_log", stored=(128,), padding=32)
    rate = init_tensor(spec, "A_log").exp()
    assert 0.5 <= float(rate.min()) < float(rate.max()) <= 2


@pytest.mark.parametrize(
    "name, mean, low", [("norm0.weight", 1, 0.05), ("k_norm.bias", 0, 0.05), ("pos_emb.weight", 0, 0.5)]
)
def test_norms_biases_and_grids_count(name, mean, low):
    value = init_tensor(weight((100, 100), "_ _", source=name), name)
    assert float(value.mean()) == pytest.approx(mean, abs=0.05)  # 10,000 draws: within 5 / 100 deviations
    assert float(value.std()) > low


def test_the_assumptions_of_kimi_k31_are_said_of_its_fixture_too():
    assert small("kimi-k3.1-pro").assumptions == CONFIG["kimi-k3.1-pro"].assumptions


# The files.

F32 = ("A_log", "dt_bias", "e_score_correction_bias", "conv1d.weight", "o_norm.weight")


def test_names_and_dtypes_are_the_released_ones(made):
    base, fixture = made
    tensors = Checkpoint.open(fixture.folder).tensors
    assert len(tensors) == fixture.tensors
    assert fixture.bytes < 65_000_000
    names = {n for spec in tree.leaves(model_specs(base)) for n in spec.source}
    layers = len(fixture.config.layers)
    last = [n for n in tensors if f".layers.{layers - 1}." in n and ".experts." not in n]
    released = len(base.layers) - 1
    assert {n.replace(f".layers.{layers - 1}.", f".layers.{released}.") for n in last} <= names
    assert {n for n in tensors if ".layers." not in n} <= names
    wide = {n for n, t in tensors.items() if t.dtype == torch.float32}
    assert wide <= {n for n in tensors if n.endswith(F32)}
    assert {t.dtype for t in tensors.values()} <= {torch.float32, torch.bfloat16}


def test_decay_rates_of_kimi_k3_are_padded_with_zeros(tmp_path):
    checkpoint = Checkpoint.open(make_fixture(CONFIG["kimi-k3"], tmp_path / "x", layers=2).folder)
    rates = checkpoint.read("language_model.model.layers.0.self_attn.A_log")
    assert (rates.shape, rates.dtype) == ((128,), torch.float32)
    assert rates[:4].all()
    assert not rates[4:].any()
    wide = {n for n, t in checkpoint.tensors.items() if t.dtype == torch.float32}
    assert wide == {n for n in checkpoint.tensors if n.endswith(F32)}


def test_a_fixture_holds_the_random_parameters_of_its_seed(made):
    _, fixture = made
    expected = init_params(fixture.config, seed=0, dtype=torch.bfloat16)
    loaded = kg.load_params(fixture.folder, kg.load_config(fixture.folder))
    for (path, a), (_, b) in zip(tree.items(loaded), tree.items(expected), strict=True):
        assert a.dtype == b.dtype, path
        assert torch.equal(a, b), path


def test_a_fixture_runs_in_both_phases(made):
    """Longer than top-k: indexers select."""
    _, fixture = made
    config, tokens = fixture.config, torch.arange(75)[None]
    params = kg.load_params(fixture.folder, config, dtype=torch.float32)
    logits, state = kg.prefill(config, params, tokens[:, :74], kg.init_state(config, 1, 128))
    logits, _ = kg.decode(config, params, tokens[:, 74], state)
    whole, _ = kg.prefill(config, params, tokens, kg.init_state(config, 1, 128))
    assert 0.3 < float(logits.std()) < 3
    assert float((logits - whole[:, -1]).abs().max()) < 1e-3  # of about 4: float32 sums in another order


@pytest.mark.parametrize(
    "name, dtypes",
    [
        ("kimi-k3", {"weight_packed": torch.uint8, "weight_scale": torch.uint8}),
        ("kimi-k2.5", {"weight_packed": torch.int32, "weight_scale": torch.bfloat16, "weight_shape": torch.int64}),
        ("deepseek-v3.2", {"weight": torch.float8_e4m3fn, "weight_scale_inv": torch.float32}),
    ],
)
def test_weights_are_quantised_as_released_if_that_is_asked_for(name, dtypes, tmp_path):
    made = make_fixture(CONFIG[name], tmp_path / "x", layers=2, quantised=True)
    assert made.config.quant == CONFIG[name].quant
    tensors = Checkpoint.open(made.folder).tensors
    assert len(tensors) == made.tensors
    expert = [n for n in tensors if ".experts.3." in n]
    assert len(expert) == 3 * len(dtypes)
    assert all(tensors[n].dtype == dtypes[n.rsplit(".", 1)[1]] for n in expert)
    plain, loaded = init_params(made.config, seed=0), kg.load_params(made.folder, made.config, dtype=torch.float32)
    for (path, a), b in zip(tree.items(loaded), tree.leaves(plain), strict=True):
        # E2M1 has nothing between 4 and 6: a five that is the largest of its group is off by a fifth.
        assert float((a - b).abs().max()) <= 0.2 * float(b.abs().max()), path


def test_a_model_that_is_not_quantised_has_no_quantised_fixture(tmp_path):
    with pytest.raises(ConfigError, match="its weights are not released quantised; leave --quantised out"):
        make_fixture(CONFIG["glm-5"], tmp_path / "x", quantised=True)
    assert not list(tmp_path.iterdir())


# Readers that are not ours.

CLASSES = {
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "kimi_k25": "Kimi_K25ForConditionalGeneration",
}


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("made", [name for name in NAMES if CONFIG[name].model_type in CLASSES], indirect=True)
def test_transformers_loads_a_fixture_without_missing_or_unexpected_keys(made):
    base, fixture = made
    transformers = pytest.importorskip("transformers")
    model, info = getattr(transformers, CLASSES[base.model_type]).from_pretrained(
        fixture.folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    ours = sum(s.numel for s in tree.leaves(model_specs(fixture.config)))
    assert sum(p.numel() for p in model.state_dict().values()) == ours
    stops = model.generation_config.eos_token_id
    assert (tuple(stops) if isinstance(stops, list) else (stops,)) == fixture.config.eos


def test_the_tokenizer_has_the_tokens_of_pictures_and_all_ends(made):
    _, fixture = made
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(fixture.folder)
    assert len(tokenizer) == fixture.config.vocab
    assert tokenizer.eos_token_id == fixture.config.eos[0]
    assert tokenizer.bos_token_id == fixture.config.bos
    if fixture.config.vision:
        pad = fixture.config.vision.placeholder
        ids = tokenizer.encode("".join(MEDIA), add_special_tokens=False)
        assert ids == [pad - 3, pad - 2, pad - 1, pad]
        assert sum(s.numel for s in tree.leaves(vision_specs(fixture.config.vision, 256))) > 1_000_000
