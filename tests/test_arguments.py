"""What a program gives by mistake is refused in words, by every function of `kg`: no AttributeError from inside."""

import pytest
import torch

import kimi_graph as kg
from kimi_graph.errors import KimiGraphError


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    config = kg.make_fixture(kg.load_config("kimi-linear-48b"), tmp_path_factory.mktemp("small") / "tiny").config
    return config, kg.init_params(config), torch.zeros(2, 4, dtype=torch.int64)


TAKE_A_CONFIG = {
    "count_parameters": (),
    "init_params": (),
    "init_state": (1, 64),
    "make_fixture": ("never",),
    "model_specs": (),
    "parameter_counts": (),
    "encode_image": (None, None),
    "prefill": (None, None, None),
    "decode": (None, None, None),
    "generate": (None, [1], 1),
}


@pytest.mark.parametrize("name", TAKE_A_CONFIG)
def test_a_preset_s_name_where_a_config_belongs_is_told_how_to_become_one(name):
    with pytest.raises(KimiGraphError, match=r"config: found 'kimi-k3', expected a ModelConfig, which kg.load_config"):
        getattr(kg, name)("kimi-k3", *TAKE_A_CONFIG[name])


def test_what_is_swapped_or_of_another_model_is_named(small):
    config, params, tokens = small
    state = kg.init_state(config, 2, 64)
    for given, words in (
        ((params, config, tokens, state), "prefill: config: found Decoder"),
        ((config, state, tokens, params), "prefill: params: found State, expected those of load_params"),
        ((config, params, tokens, None), "prefill: state: found NoneType, expected that of init_state"),
        (
            (kg.load_config("kimi-k3"), params, tokens, state),
            r"kimi-k3 has 93 layers .*; params have 5 and \[512, 256\]",
        ),
    ):
        with pytest.raises(KimiGraphError, match=words):
            kg.prefill(*given)
    with pytest.raises(KimiGraphError, match="load_params: config: found 'build', expected a ModelConfig"):
        kg.load_params(config, "build")


def test_a_preset_has_no_weights_and_load_params_says_what_has(small):
    with pytest.raises(KimiGraphError, match=r"kimi-k3 is a preset, a config without weights; .* kg.init_params"):
        kg.load_params("kimi-k3", small[0])


@pytest.mark.parametrize("found", [None, 3, {"layers": 2}], ids=str)
def test_what_is_no_name_is_said_to_be_none(found):
    for call in (kg.load_config, kg.open_bundle, kg.Mesh.parse):
        with pytest.raises(KimiGraphError, match=f"found {type(found).__name__}, expected a"):
            call(found)


def test_sizes_are_whole_numbers(small):
    config, params, tokens = small
    with pytest.raises(KimiGraphError, match=r"init_state: batch: found 2\.0, expected a whole number"):
        kg.init_state(config, batch=2.0, max_len=64)
    with pytest.raises(KimiGraphError, match=r"max_new_tokens: found 1\.5, expected a whole number"):
        kg.generate(config, params, tokens, max_new_tokens=1.5)
    with pytest.raises(KimiGraphError, match="--batch: found '2', expected a whole number"):
        kg.make_bundle(config, "never", "a3", batch="2")


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "hot", True], ids=str)
def test_the_one_number_of_generate_that_cannot_be_is_named(small, value):
    config, params, tokens = small
    for name in ("temperature", "top_p"):
        with pytest.raises(KimiGraphError, match=f"generate: {name}: found .*, expected a number"):
            kg.generate(config, params, tokens, 2, **{name: value if value is not True else "1"})


def test_text_is_no_prompt_and_no_tokens_are_none(small):
    config, params, tokens = small
    with pytest.raises(KimiGraphError, match="prompt: found text, expected ids of tokens"):
        kg.generate(config, params, "hello", 2)
    with pytest.raises(KimiGraphError, match=r"tokens: found \[2, 0\], which are none"):
        kg.prefill(config, params, tokens[:, :0], kg.init_state(config, 2, 64))


def test_a_layer_alone_says_which_input_it_takes(small):
    config, params, _ = small
    kda, mla, moe = (
        (kg.layers.kda, params.layers[0].kda, config.layers[0].mixer),
        (kg.layers.mla, params.layers[2].mla, config.layers[2].mixer),
        (kg.layers.moe, params.layers[1].moe, config.layers[1].ffn),
    )
    for layer, p, c in (kda, mla, moe):
        with pytest.raises(KimiGraphError, match=r"x: found float32 \[4, 256\], expected \[B, T, 256\]"):
            layer(p, c, torch.zeros(4, 256))
        with pytest.raises(
            KimiGraphError, match=r"x: found bfloat16 \[1, 4, 256\], expected the weights' dtype, float32"
        ):
            layer(p, c, torch.zeros(1, 4, 256, dtype=torch.bfloat16))


def test_experts_of_no_rows_give_no_rows(small):
    config, params, _ = small
    with torch.no_grad():
        assert kg.layers.moe(params.layers[1].moe, config.layers[1].ffn, torch.zeros(1, 0, 256)).shape == (1, 0, 256)


def test_phases_and_providers_may_be_words_with_commas(small, tmp_path):
    with pytest.raises(KimiGraphError, match="--phase 'decode,sing': the phases of"):
        kg.make_bundle(small[0], tmp_path / "never", phases="decode, sing")
    with pytest.raises(KimiGraphError, match="provider 'mine' is not known"):
        kg.make_bundle(small[0], tmp_path / "never", providers="builtin,mine")
