"""The released files of the family mean the released models; what cannot be meant is refused with its key."""

import copy
import dataclasses
import json
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_graph.config import (
    DEEPSEEK_NAMES,
    DenseConfig,
    IndexerConfig,
    KdaConfig,
    MlaConfig,
    MoeConfig,
    QuantConfig,
    RopeConfig,
    SituConfig,
    VisionConfig,
    YarnConfig,
    check_length,
    is_draft,
)
from kimi_graph.errors import ConfigError
from kimi_graph.families import FAMILIES, INERT, INERT_INSIDE, indexer_kinds, score_scale
from kimi_graph.read_config import PRESETS, load_config, parse_config

NAMES = ("kimi-k3", "kimi-k3.1-pro", "kimi-k2.5", "deepseek-v3.2", "glm-5", "glm-5.2")
RELEASED = {name: json.loads((PRESETS / f"{name}.json").read_text()) for name in NAMES}
CONFIG = {name: load_config(name) for name in NAMES}
GONE = object()


def edited(name, **changes):
    """A released file with some keys set (inner ones as `text_config__hidden_size`) or GONE."""
    data = copy.deepcopy(RELEASED[name])
    for path, value in changes.items():
        home = data
        *outer, key = path.split("__")
        for part in outer:
            home = home[part]
        if value is GONE:
            del home[key]
        else:
            home[key] = value
    return data


def parse(name, **changes):
    return parse_config(edited(name, **changes), origin="config.json", name="test")


def refusal(name, **changes):
    with pytest.raises(ConfigError) as e:
        parse(name, **changes)
    return str(e.value).removeprefix("config.json: ")


def mixers(config, kind):
    return [layer.mixer for layer in config.layers if isinstance(layer.mixer, kind)]


# What the files mean.

YARN = {"beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all": 1, "original_len": 4096}


def test_kimi_k3_is_the_released_model():  # case C1: the file as it is, with nested sections
    c = CONFIG["kimi-k3"]
    situ = SituConfig(beta=4, linear_beta=25)
    mla = MlaConfig(
        heads=96,
        latent=512,
        key_nope=128,
        key_rope=64,
        value=128,
        scale=192**-0.5,
        query_latent=1536,
        output_gate=True,
    )
    kda = KdaConfig(
        heads=96,
        key=128,
        value=128,
        conv_width=4,
        gate_rank=128,
        gate_lower_bound=-5,
        full_rank_gate=True,
        stored_rates=(128,),
        conv_dtype=torch.float32,
    )
    moe = MoeConfig(experts=896, top_k=16, ffn=3072, shared_ffn=6144, scale=1, latent=3584, latent_norm=True, situ=situ)
    assert {layer.mixer for layer in c.layers} == {kda, mla}
    assert c.layers[0].ffn == DenseConfig(ffn=33792, situ=situ)
    assert {layer.ffn for layer in c.layers[1:]} == {moe}
    assert (len(c.layers), len(mixers(c, KdaConfig)), len(mixers(c, MlaConfig))) == (93, 69, 24)
    assert (c.embed, c.vocab, c.norm_eps, c.max_len, c.residual_block) == (7168, 163840, 1e-5, 1048576, 12)
    assert (c.bos, c.eos, c.pad, c.dtype, c.tied) == (163584, (163586,), 163839, torch.bfloat16, False)
    assert c.names.prefix == "language_model."
    assert (c.names.moe, c.names.experts) == ("block_sparse_moe", ("w1", "w3", "w2"))


def test_full_layers_of_kimi_k3_are_every_fourth_and_the_last():  # case C5
    mla = [i for i, layer in enumerate(CONFIG["kimi-k3"].layers) if layer.kinds[0] == "mla"]
    assert mla == [*range(3, 92, 4), 92]
    assert len(mla) == 24


def test_no_size_of_kimi_k3_is_hidden_size_over_heads():  # case C8: 7168 / 96 = 74.67; C7: 1024 / 12 = 85.33
    sizes = set(map(int, re.findall(r"\d+", repr(CONFIG["kimi-k3"]))))
    assert not sizes & {74, 75, 85, 86}


def test_kimi_k31_is_k3_with_an_indexer_in_its_attention_layers():
    k3, k31 = CONFIG["kimi-k3"], CONFIG["kimi-k3.1-pro"]
    index = IndexerConfig(heads=32, key=128, top_k=2048, eps=1e-6, rope=0, interleaved=False)
    assert {m.indexer for m in mixers(k31, MlaConfig)} == {index}

    def without(layer):
        mla = isinstance(layer.mixer, MlaConfig)
        return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, indexer=None)) if mla else layer

    same = dataclasses.replace(k31, model_type="kimi_k3", layers=tuple(map(without, k31.layers)))
    assert same == k3


def test_kimi_k31_says_in_words_what_it_assumes_and_a_real_file_does_not_repeat_the_presets_words():
    said = " ".join(CONFIG["kimi-k3.1-pro"].assumptions)
    for word in ("model_type", "dsa_config", "1e-06", "max_position_embeddings", "Hadamard", "q_a_layernorm"):
        assert word in said
    real = parse("kimi-k3.1-pro", assumptions=GONE)
    assert real == CONFIG["kimi-k3.1-pro"]  # words mean nothing to the model
    assert set(real.assumptions) < set(CONFIG["kimi-k3.1-pro"].assumptions)
    assert not any("model_type" in x for x in real.assumptions)


@pytest.mark.parametrize("name", NAMES)
def test_only_kimi_k3_and_its_successor_assume_anything(name):
    assert bool(CONFIG[name].assumptions) == name.startswith("kimi-k3")


@pytest.mark.parametrize("kind", ["kimi_k31", "kimi_k3"])
def test_a_file_of_kimi_k31_overrides_every_assumed_value(kind):
    c = parse(
        "kimi-k3.1-pro",
        model_type=kind,
        assumptions=GONE,
        text_config__dsa_config__index_n_heads=GONE,
        text_config__dsa_config__num_heads=64,
        text_config__dsa_config__topk=1024,
        text_config__dsa_config__index_topk=GONE,
        text_config__max_position_embeddings=4096,
        vision_config__in_patch_limit=4096,
    )
    assert mixers(c, MlaConfig)[0].indexer == IndexerConfig(
        heads=64, key=128, top_k=1024, eps=1e-6, rope=0, interleaved=False
    )
    assert c.max_len == c.vision.patch_limit == 4096
    assert not any("patches" in words for words in c.assumptions)


def test_kimi_k25_is_the_released_model():
    c = CONFIG["kimi-k2.5"]
    rope = RopeConfig(theta=50000, interleaved=True, yarn=YarnConfig(factor=64, **YARN))
    mla = MlaConfig(
        heads=64,
        latent=512,
        key_nope=128,
        key_rope=64,
        value=128,
        query_latent=1536,
        rope=rope,
        scale=score_scale(192, rope.yarn),
    )
    assert {layer.mixer for layer in c.layers} == {mla}
    assert c.layers[0].ffn == DenseConfig(ffn=18432)
    assert {x.ffn for x in c.layers[1:]} == {MoeConfig(experts=384, top_k=8, ffn=2048, shared_ffn=2048, scale=2.827)}
    assert (len(c.layers), c.embed, c.vocab, c.norm_eps, c.max_len) == (61, 7168, 163840, 1e-5, 262144)
    assert (c.names.prefix, c.names.moe, c.names.experts[0]) == ("language_model.", "mlp", "gate_proj")


def test_deepseek_v32_is_the_released_model():
    c = CONFIG["deepseek-v3.2"]
    rope = RopeConfig(theta=10000, interleaved=True, yarn=YarnConfig(factor=40, **YARN))
    # The rotation of index keys is by halves, that of attention by neighbours.
    index = IndexerConfig(heads=64, key=128, top_k=2048, eps=1e-6, rope=64, interleaved=False)
    (mla,) = {layer.mixer for layer in c.layers}
    assert (mla.rope, mla.indexer, mla.heads, mla.query_latent, mla.output_gate) == (rope, index, 128, 1536, False)
    moe = MoeConfig(experts=256, top_k=8, ffn=2048, shared_ffn=2048, scale=2.5, groups=8, kept_groups=4)
    assert [x.ffn for x in c.layers] == [DenseConfig(ffn=18432)] * 3 + [moe] * 58
    assert (c.embed, c.vocab, c.norm_eps, c.max_len, c.draft_layers) == (7168, 129280, 1e-6, 163840, 1)
    assert (c.bos, c.eos, c.pad) == (0, (1,), 1)  # no pad token is given: the end token fills up
    assert c.names == DEEPSEEK_NAMES


@pytest.mark.parametrize("name, theta, max_len", [("glm-5", 1e6, 202752), ("glm-5.2", 8e6, 1048576)])
def test_glm_5_is_the_released_model(name, theta, max_len):
    c = CONFIG[name]
    for m in mixers(c, MlaConfig):
        assert m.rope == RopeConfig(theta=theta, interleaved=True)
        assert (m.heads, m.query_latent, m.latent, m.key_nope, m.key_rope, m.value) == (64, 2048, 512, 192, 64, 256)
        assert m.scale == 1 / 16
        index = dataclasses.replace(m.indexer, shared=False)
        assert index == IndexerConfig(heads=32, key=128, top_k=2048, eps=1e-6, rope=64, interleaved=True)
    moe = MoeConfig(experts=256, top_k=8, ffn=2048, shared_ffn=2048, scale=2.5)
    assert [x.ffn for x in c.layers] == [DenseConfig(ffn=12288)] * 3 + [moe] * 75
    assert (c.embed, c.vocab, c.norm_eps, c.max_len) == (6144, 154880, 1e-5, max_len)
    assert (c.bos, c.eos, c.pad) == (None, (154820, 154827, 154829), 154820)


def test_glm_52_shares_selections_and_glm_5_does_not():  # case C12
    assert not any(m.indexer.shared for m in mixers(CONFIG["glm-5"], MlaConfig))
    full = [i for i, m in enumerate(mixers(CONFIG["glm-5.2"], MlaConfig)) if not m.indexer.shared]
    assert full == [0, 1, 2, *range(6, 78, 4)]
    assert len(full) == 21


RULE = {"index_topk_freq": 4, "index_skip_topk_offset": 3}


@pytest.mark.parametrize(
    "changes",
    [
        {"indexer_types": GONE},
        {"index_topk_freq": GONE, "index_skip_topk_offset": GONE},
        {"indexer_types": GONE, "index_topk_pattern": "FFF" + "SSSF" * 18 + "SSS"},
    ],
    ids=["rule", "types", "pattern"],
)
def test_shared_layers_may_be_given_by_list_pattern_or_rule(changes):
    assert parse("glm-5.2", **changes) == CONFIG["glm-5.2"]


def test_without_keys_every_layer_has_its_own_indexer():
    gone = dict.fromkeys(("indexer_types", "index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"), GONE)
    assert parse("glm-5.2", **gone).layers == tuple(
        dataclasses.replace(
            x, mixer=dataclasses.replace(x.mixer, indexer=dataclasses.replace(x.mixer.indexer, shared=False))
        )
        for x in CONFIG["glm-5.2"].layers
    )


@pytest.mark.parametrize(
    "layers, offset, every, expected",
    [(8, 2, 3, "FFSSFSSF"), (6, 0, 2, "SFSFSF"), (5, 3, 4, "FFFSS"), (3, 2, 1, "FFF")],
)
def test_the_rule_of_shared_layers(layers, offset, every, expected):
    v = {"indexer_types": None, "index_topk_pattern": None, "num_hidden_layers": layers}
    v |= {"index_topk_freq": every, "index_skip_topk_offset": offset}
    assert "".join(kind[0].upper() for kind in indexer_kinds(v)) == expected


# Vision.


def test_the_tower_of_kimi_k3_is_wider_than_its_hidden_size():  # case C7
    v = CONFIG["kimi-k3"].vision
    assert v == VisionConfig(
        embed=1024,
        layers=27,
        heads=12,
        head_dim=128,
        ffn=4096,
        patch=14,
        grid=(64, 64),
        frames=4,
        interpolation="bilinear",
        bias=False,
        norm_eps=2**-23,
        merge=(2, 2),
        projector_ffn=4096,
        projector_norm="after",
        projector_eps=1e-5,
        patch_limit=65536,
        placeholder=163605,
        chessboard=v.chessboard,
        sized_prompt=True,
    )


def test_the_tower_of_kimi_k25_is_the_released_one():
    v = CONFIG["kimi-k2.5"].vision
    assert (v.embed, v.layers, v.heads, v.head_dim, v.ffn) == (1152, 27, 16, 72, 4304)
    assert (v.interpolation, v.bias, v.norm_eps) == ("bicubic", True, 1e-5)
    assert (v.projector_ffn, v.projector_norm, v.projector_eps) == (4608, "before", 1e-5)
    assert (v.patch_limit, v.placeholder, v.sized_prompt) == (16384, 163605, False)


def test_the_limit_of_patches_is_the_versions_own():  # case V2
    for name, limit in (("kimi-k2.5", 16384), ("kimi-k3", 65536), ("kimi-k3.1-pro", 65536)):
        assert CONFIG[name].vision.patch_limit == limit
        assert parse(name, vision_config__in_patch_limit=1000).vision.patch_limit == 1000


def test_native_spellings_of_transformers_mean_the_same():
    native = {
        "vt_hidden_size": "hidden_size",
        "vt_num_hidden_layers": "num_hidden_layers",
        "vt_num_attention_heads": "num_attention_heads",
        "vt_intermediate_size": "intermediate_size",
        "init_pos_emb_height": "pos_emb_height",
        "init_pos_emb_width": "pos_emb_width",
        "init_pos_emb_time": "pos_emb_time",
    }
    data = edited("kimi-k2.5", media_placeholder_token_id=GONE, image_token_id=163605, projection_hidden_size=1152)
    for released, other in native.items():
        data["vision_config"][other] = data["vision_config"].pop(released)
    assert parse_config(data, origin="", name="x") == CONFIG["kimi-k2.5"]


# Rotation.


@pytest.mark.parametrize("factor, stretch", [(40, 1.8739), (64, 2.0047)])
def test_yarn_stretches_scores_once(factor, stretch):  # case R3
    yarn = YarnConfig(factor=factor, **YARN)
    assert score_scale(192, yarn) / 192**-0.5 == pytest.approx(stretch, abs=5e-5)
    name = {40: "deepseek-v3.2", 64: "kimi-k2.5"}[factor]
    scales = {m.scale for m in mixers(CONFIG[name], MlaConfig)}
    assert scales == {192**-0.5 * (0.1 * math.log(factor) + 1) ** 2}


def test_the_published_scales_of_yarn_are_met():  # fact sheet, section 7
    assert mixers(CONFIG["kimi-k2.5"], MlaConfig)[0].scale == pytest.approx(0.1446796, abs=5e-8)
    assert mixers(CONFIG["deepseek-v3.2"], MlaConfig)[0].scale == pytest.approx(0.1352338, abs=5e-8)
    assert score_scale(192, YarnConfig(factor=32, **YARN)) == pytest.approx(0.1308608, abs=5e-8)


def test_nothing_is_rotated_in_kimi_k3():  # case R1
    for name in ("kimi-k3", "kimi-k3.1-pro"):
        assert {(m.rope, m.key_rope, m.scale) for m in mixers(CONFIG[name], MlaConfig)} == {(None, 64, 192**-0.5)}


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-k3.1-pro"])
def test_yarn_on_a_model_without_rotation_is_refused(name):  # case R1
    message = refusal(name, text_config__rope_scaling={"type": "yarn", "factor": 40})
    assert message.startswith("text_config.rope_scaling: found")
    assert "there are no rotary positions to scale" in message


@pytest.mark.parametrize("kind", ["llama3", "longrope", "linear", "dynamic", None, 4])
@pytest.mark.parametrize("name, at", [("deepseek-v3.2", ""), ("kimi-k2.5", "text_config.")])
def test_other_kinds_of_rotation_are_refused(kind, name, at):  # case R5
    key = f"{at.replace('.', '__')}rope_scaling"
    for spelling in ("type", "rope_type"):
        message = refusal(name, **{key: {spelling: kind, "factor": 8}})
        assert message == (
            f'{at}rope_scaling.{spelling}: found {json.dumps(kind)}, expected one of "yarn", "default" '
            "(of another kind positions would be left unscaled)."
        )
    message = refusal("glm-5", rope_parameters={"rope_theta": 1e6, "rope_type": kind})
    assert message.startswith("rope_parameters.rope_type: found")


def test_new_and_old_spellings_of_rotation_mean_the_same():
    scaling = dict(RELEASED["deepseek-v3.2"]["rope_scaling"])
    newer = {"rope_theta": 10000.0, "rope_type": scaling.pop("type"), **scaling}
    base = CONFIG["deepseek-v3.2"]
    assert parse("deepseek-v3.2", rope_theta=GONE, rope_scaling=GONE, rope_parameters=newer) == base
    assert parse("deepseek-v3.2", rope_parameters=newer) == base
    assert parse("deepseek-v3.2", rope_scaling={**scaling, "rope_type": "yarn"}) == base
    plain = parse("deepseek-v3.2", rope_scaling=None)
    assert plain == parse("deepseek-v3.2", rope_scaling={"type": "default"})
    assert {(m.rope.yarn, m.scale) for m in mixers(plain, MlaConfig)} == {(None, 192**-0.5)}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rope_theta": GONE}, "rope_theta: not given, and it has no default; rope_parameters would do as well."),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5000}},
            "rope_theta: 10000 and rope_parameters.rope",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000}}, "rope_scaling and rope_parameters differ"),
        ({"rope_scaling__factor": GONE}, "rope_scaling.factor: not given, and it has no default"),
        ({"rope_scaling__attention_factor": 2}, "rope_scaling.attention_factor: unknown key"),
        ({"rope_scaling": [1]}, "rope_scaling: found [1], expected an object with type"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim: found 63, expected an even number"),
        ({"rope_interleave": False}, "rope_interleave: found false, expected true"),
    ],
)
def test_a_rotation_that_cannot_be_meant_is_refused(changes, message):
    assert refusal("deepseek-v3.2", **changes).startswith(message)


# Quantised weights.


def test_files_say_how_weights_are_quantised():  # cases C1, C2
    k3 = CONFIG["kimi-k3"].quant
    assert (k3.format, k3.block, k3.activations) == ("mxfp4", (1, 32), None)
    assert "re:.*self_attn.*" in k3.ignore
    assert CONFIG["kimi-k3.1-pro"].quant == k3
    k25 = CONFIG["kimi-k2.5"].quant
    assert (k25.format, k25.block, k25.activations) == ("int4", (1, 32), None)
    assert CONFIG["deepseek-v3.2"].quant == QuantConfig(
        format="fp8", block=(128, 128), activations="dynamic", ignore=()
    )
    assert CONFIG["glm-5"].quant is None


def test_quantisation_is_found_where_the_file_has_it():  # case C1: inside text_config, not at the root
    assert "quantization_config" not in RELEASED["kimi-k3"]
    assert parse("kimi-k3", text_config__quantization_config=GONE).quant is None


def test_the_patterns_of_the_file_do_not_decide_what_is_quantised():  # case C3
    plain = ("routed_expert_down_proj", "routed_expert_up_proj", "gate")  # stored in bfloat16
    patterns = [p.removeprefix("re:") for p in CONFIG["kimi-k3"].quant.ignore]
    for name in plain:
        assert not any(re.match(p, f"language_model.model.layers.1.block_sparse_moe.{name}") for p in patterns)


QUANT = "text_config__quantization_config"
GROUP = f"{QUANT}__config_groups__group_0"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({f"{GROUP}__weights__num_bits": 8}, "weights.num_bits: found 8, expected 4"),  # case C2
        ({f"{GROUP}__weights__type": "int"}, "weights.type: found int, expected float"),
        ({f"{GROUP}__weights__group_size": 128}, "weights.group_size: found 128, expected 32"),
        ({f"{GROUP}__weights__scale_dtype": "torch.bfloat16"}, "weights.scale_dtype: found torch.bfloat16, expected"),
        ({f"{GROUP}__format": "pack-quantized"}, "format: found pack-quantized, expected mxfp4-pack-quantized"),
        ({f"{GROUP}__weights__symmetric": False}, "weights.symmetric: found false, expected true"),
        ({f"{GROUP}__input_activations": {"num_bits": 8}}, "input_activations: found"),
        ({f"{GROUP}__targets": ["Embedding"]}, "targets: found"),
        ({f"{QUANT}__format": "nvfp4-pack-quantized"}, "quantization_config.format: found"),
        ({f"{QUANT}__quant_method": "awq"}, 'quantization_config.quant_method: found "awq", expected one of'),
        ({f"{QUANT}__config_groups__group_1": {}}, "config_groups.group_1: unknown key"),
        ({f"{QUANT}__kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme: found"),
    ],
)
def test_a_contradictory_quantisation_is_refused(changes, message):
    found = refusal("kimi-k3", **changes)
    assert found.startswith("text_config.quantization_config")
    assert message in found
    assert "\n" not in found


def test_other_blocks_of_fp8_are_refused():
    assert refusal("deepseek-v3.2", quantization_config__weight_block_size=[64, 64]).startswith("quantization_config.w")
    assert "expected a list of 2" in refusal("deepseek-v3.2", quantization_config__weight_block_size=[128])


# Draft layers.


@pytest.mark.parametrize(
    "name, draft",
    [
        ("model.layers.93.eh_proj.weight", True),
        ("layers.94.enorm.weight", True),
        ("language_model.model.layers.94.self_attn.q_a_proj.weight", True),
        ("language_model.layers.93.self_attn.q_a_proj.weight", True),
        ("model.layers.92.self_attn.o_proj.weight", False),
        ("model.layers.95.self_attn.o_proj.weight", False),
        ("vision_tower.encoder.layers.93.wo.weight", False),
        ("model.layers.93", False),
        ("model.norm.weight", False),
    ],
)
def test_tensors_of_draft_layers_come_after_the_models_own(name, draft):  # case C10
    config = parse("kimi-k3", text_config__num_nextn_predict_layers=2)
    assert config == CONFIG["kimi-k3"]  # the model is the same
    assert is_draft(config, name) == draft
    assert not is_draft(parse("kimi-k3", text_config__num_nextn_predict_layers=GONE), name)


# What cannot be meant.

FAULTS = [
    ("kimi-k3", {"text_config__hidden_sise": 1}, "text_config.hidden_sise: unknown key"),
    ("kimi-k3", {"text_config__hidden_sise": 1}, "did you mean text_config.hidden_size?"),
    ("kimi-k3", {"vision_config__qkv_hiden_size": 1}, "did you mean vision_config.qkv_hidden_size?"),
    ("kimi-k3", {"hidden_size": 4096}, "hidden_size: unknown key"),
    ("kimi-k3", {"text_config": GONE}, "text_config: not given, expected an object with"),
    ("kimi-k3", {"vision_config": None}, "vision_config: found null, expected an object with"),
    ("kimi-k3", {"vision_config__merge_type": "avg"}, 'vision_config.merge_type: found "avg", expected "sd2_tpool"'),
    ("kimi-k3", {"vision_config__mm_projector_type": "patchmerger"}, "vision_config.mm_projector_type: found"),
    ("kimi-k3", {"vision_config__attn_bias": True}, "vision_config.attn_bias: found true, expected false"),
    ("kimi-k3", {"vision_config__qkv_hidden_size": 1024}, "vision_config.qkv_hidden_size: found 1024, expected a mult"),
    (
        "kimi-k3",
        {"vision_config__merge_kernel_size": [2]},
        "vision_config.merge_kernel_size: found [2], expected a list",
    ),
    ("kimi-k3", {"vision_config__text_hidden_size": 1}, "vision_config.text_hidden_size: found 1, expected 7168"),
    ("kimi-k3", {"vision_config__mm_hidden_size": 1}, "vision_config.mm_hidden_size: found 1, expected 1024"),
    ("kimi-k3", {"text_config__activation_situ_beta": GONE}, "text_config.activation_situ_beta: not given, but"),
    ("kimi-k3", {"text_config__routed_expert_hidden_size": None}, "text_config.latent_moe_use_norm: found true, exp"),
    ("kimi-k3", {"text_config__hidden_act": "gelu"}, 'text_config.hidden_act: found "gelu", expected one of "situ"'),
    ("kimi-k3", {"text_config__attn_res_block_size": 0}, "text_config.attn_res_block_size: found 0, expected"),
    ("kimi-k3", {"text_config__mla_use_nope": False}, "text_config.mla_use_nope: found false, expected true"),
    ("kimi-k3", {"text_config__num_experts": 2049}, "text_config.num_experts: found 2049, expected an integer from 1"),
    ("kimi-k3", {"eos_token_id": 163585}, "eos_token_id: found 163585, expected 163586 (text_config.eos_token_id)"),
    ("kimi-k3", {"dtype": "float16"}, "dtype: found torch.float16, expected torch.bfloat16 (text_config.dtype)"),
    ("kimi-k3", {"media_placeholder_token_id": 163840}, "media_placeholder_token_id: found 163840, expected at most"),
    ("kimi-k3", {"text_config__num_nextn_predict_layers": -1}, "text_config.num_nextn_predict_layers: found -1"),
    ("kimi-k3", {"architectures": ["KimiK25ForConditionalGeneration"]}, "architectures: found"),
    (
        "kimi-k3",
        {"text_config__dsa_config": RELEASED["kimi-k3.1-pro"]["text_config"]["dsa_config"]},
        "text_config.dsa_config: found an indexer, expected none",
    ),
    ("kimi-k3.1-pro", {"text_config__dsa_config": None}, "text_config.dsa_config: not given"),
    (
        "kimi-k3.1-pro",
        {"text_config__dsa_config__dsa_layers": [4, 8]},
        "text_config.dsa_config.dsa_layers: expected the",
    ),
    ("kimi-k3.1-pro", {"text_config__dsa_config__eps": 1e-5}, "text_config.dsa_config.eps: unknown key"),
    (
        "kimi-k3.1-pro",
        {"text_config__q_lora_rank": None},
        "text_config.dsa_config: found an indexer, expected none: it",
    ),
    ("kimi-k2.5", {"projection_hidden_size": 1}, "projection_hidden_size: found 1, expected 1152"),
    ("kimi-k2.5", {"text_config__index_topk": 2048}, "text_config.index_topk: unknown key"),
    (
        "kimi-k2.5",
        {"vision_config__vt_num_attention_heads": 15},
        "vision_config.vt_hidden_size: found 1152, expected a",
    ),
    ("deepseek-v3.2", {"index_topk": GONE}, "index_topk: not given, and it has no default"),
    ("deepseek-v3.2", {"n_group": 7}, "n_group: found 7, expected a divisor of 256 (n_routed_experts)"),
    ("deepseek-v3.2", {"topk_group": 9}, "topk_group: found 9, expected at most 8 (n_group)"),
    ("deepseek-v3.2", {"n_group": 256}, "n_group: found 256, expected a divisor"),
    ("deepseek-v3.2", {"n_group": 128, "topk_group": 3}, "topk_group: found 3, expected more: 3 groups of 2 hold no 8"),
    ("deepseek-v3.2", {"scoring_func": "softmax"}, 'scoring_func: found "softmax", expected "sigmoid"'),
    ("deepseek-v3.2", {"indexer_types": ["full"] * 61}, "indexer_types: unknown key"),
    ("deepseek-v3.2", {"index_head_dim": 32}, "index_head_dim: found 32, expected 64 (qk_rope_head_dim) or more"),
    ("deepseek-v3.2", {"eos_token_id": []}, "eos_token_id: found [], expected an integer from 0"),
    ("deepseek-v3.2", {"eos_token_id": [1, 129280]}, "eos_token_id: found 129280, expected at most 129279"),
    ("glm-5", {"qk_head_dim": 192}, "qk_head_dim: found 192, expected 256"),
    ("glm-5.2", {"indexer_types": ["full"] * 77}, "indexer_types: found 77 layers, expected 78"),
    ("glm-5.2", {"indexer_types": ["full"] * 78}, "indexer_types: found full for layer 3, expected shared"),
    ("glm-5.2", {"indexer_types": ["half"] * 78}, "indexer_types: found"),
    ("glm-5.2", {"index_topk_freq": 3}, "indexer_types: found shared for layer 5, expected full (index_topk_freq"),
    ("glm-5.2", {"index_topk_pattern": "FSX"}, 'index_topk_pattern: found "FSX", expected a letter'),
    ("glm-5.2", {"index_topk_pattern": "F" * 78}, "index_topk_pattern: found full for layer 3, expected shared"),
    ("glm-5.2", {"mlp_layer_types": ["sparse"] * 78}, "mlp_layer_types: found sparse for layer 0, expected dense"),
    ("glm-5.2", {"moe_router_dtype": "bfloat16"}, 'moe_router_dtype: found "bfloat16", expected "float32"'),
]


@pytest.mark.parametrize("name, changes, message", FAULTS, ids=lambda x: x if isinstance(x, str) else "")
def test_what_cannot_be_meant_is_refused(name, changes, message):
    assert message in refusal(name, **changes)


def test_a_first_layer_that_shares_is_refused():
    gone = {"index_topk_freq": GONE, "index_skip_topk_offset": GONE}
    message = refusal("glm-5.2", indexer_types=["shared"] + ["full"] * 77, **gone)
    assert message.startswith("indexer_types: found shared for layer 0, expected full: there is no selection yet")


@pytest.mark.parametrize("name", NAMES)
def test_inert_keys_have_no_influence(name):
    anything = {key: [1, {"a": None}] for key in INERT_INSIDE}
    data = RELEASED[name] | {key: anything[key] for key in INERT}
    assert parse_config(data, origin="", name="x") == CONFIG[name]
    if "text_config" in RELEASED[name]:
        data = edited(name)
        data["text_config"] |= anything
        assert parse_config(data, origin="", name="x") == CONFIG[name]


@pytest.mark.parametrize("name", ["glm-5", "glm-5.2"])
@pytest.mark.parametrize("head_dim", [64, 192, None, "wide"])
def test_head_dim_of_glm_has_no_influence(name, head_dim):
    assert parse(name, head_dim=head_dim) == CONFIG[name]


@pytest.mark.parametrize("name", NAMES)
def test_the_kinds_of_the_file_name_its_family(name):
    data = RELEASED[name]
    assert data["architectures"][0] in FAMILIES[data["model_type"]].architectures
    assert CONFIG[name].model_type == data["model_type"]


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def paths(data, before=()):
    for key, value in data.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from paths(value, (*before, key))


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=60)
def test_any_value_is_read_or_refused_in_words(name, data):
    file = copy.deepcopy(RELEASED[name])
    path = data.draw(st.sampled_from(sorted(paths(file))))
    home = file
    for key in path[:-1]:
        home = home[key]
    small = st.integers(-2, 200) | st.sampled_from([True, None, 0.5, "default", "full", [1], [], {}])
    home[path[-1]] = data.draw(small | JUNK)
    try:
        assert len(parse_config(file, origin="config.json", name="x").fingerprint) == 64
    except ConfigError:
        with pytest.raises(ConfigError, match=r"config\.json: "):
            parse_config(file, origin="config.json", name="x")


@pytest.mark.parametrize(
    "name, row",
    [
        ("kimi-k3", 24 * 576),
        ("kimi-k3.1-pro", 24 * (576 + 128)),
        ("kimi-k2.5", 61 * 576),
        ("deepseek-v3.2", 61 * (576 + 128)),
        ("glm-5.2", 78 * 576 + 21 * 128),  # layers that share a selection keep no index keys
    ],
)
def test_a_token_takes_its_latents_and_index_keys(name, row):
    assert check_length(CONFIG[name], 1000, 128).bytes == 1024 * row * 2


def test_no_two_models_have_one_fingerprint():
    assert len({c.fingerprint for c in CONFIG.values()}) == len(NAMES)
