"""Released config.json files are read as they are meant, or refused with the key, the value and what is legal."""

import copy
import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_graph.config import DenseConfig, KdaConfig, MlaConfig, MoeConfig, check_length
from kimi_graph.errors import ConfigError
from kimi_graph.families import INERT
from kimi_graph.read_config import PRESETS, load_config, load_known, parse_config, presets

RELEASED = json.loads((PRESETS / "kimi-linear-48b.json").read_text())
BASE = load_config("kimi-linear-48b")


def edited(**changes):
    """The released file with some keys set (inner ones as `linear_attn_config__head_dim`) or GONE."""
    data = copy.deepcopy(RELEASED)
    for key, value in changes.items():
        home = data
        *outer, key = key.split("__")
        for name in outer:
            home = home[name]
        if value is GONE:
            del home[key]
        else:
            home[key] = value
    return data


GONE = object()


def parse(data):
    return parse_config(data, origin="config.json", name="test")


def refusal(data) -> str:
    with pytest.raises(ConfigError) as e:
        parse(data)
    return str(e.value)


# What a file means.


def test_the_48b_preset_is_the_released_model():
    kda = KdaConfig(heads=32, key=128, value=128, conv_width=4, gate_rank=128, stored_rates=(1, 1, 32, 1))
    mla = MlaConfig(heads=32, latent=512, key_nope=128, key_rope=64, value=128, scale=192**-0.5)
    assert {layer.mixer for layer in BASE.layers} == {kda, mla}
    assert BASE.layers[0].ffn == DenseConfig(ffn=9216)
    moe = MoeConfig(experts=256, top_k=8, ffn=1024, shared_ffn=1024, scale=2.446)
    assert {layer.ffn for layer in BASE.layers[1:]} == {moe}
    assert (BASE.vocab, BASE.embed, len(BASE.layers), BASE.max_len) == (163840, 2304, 27, 1048576)
    assert (BASE.norm_eps, BASE.dtype, BASE.tied) == (1e-5, torch.bfloat16, False)
    assert (BASE.bos, BASE.eos, BASE.pad) == (163584, (163586,), 163839)


def test_layer_lists_count_from_one_and_end_irregularly():  # case C5
    full = [i for i, layer in enumerate(BASE.layers) if layer.kinds[0] == "mla"]
    assert full == [3, 7, 11, 15, 19, 23, 26]


def test_two_adjacent_full_layers_are_read_as_listed():  # case C5, the schedule of Kimi K3 on 93 layers
    full = [*range(4, 93, 4), 93]
    data = edited(
        num_hidden_layers=93,
        linear_attn_config__full_attn_layers=full,
        linear_attn_config__kda_layers=[i for i in range(1, 94) if i not in full],
    )
    mla = [i for i, layer in enumerate(parse(data).layers) if layer.kinds[0] == "mla"]
    assert mla == [*range(3, 92, 4), 92]
    assert len(mla) == 24


def test_no_size_is_derived_from_hidden_size_and_heads():  # case C8: 7168 / 96 = 74.67
    config = parse(
        edited(
            hidden_size=7168,
            num_attention_heads=96,
            num_key_value_heads=96,
            linear_attn_config__num_heads=96,
            head_dim=GONE,
        )
    )
    assert {m.key for m in (layer.mixer for layer in config.layers) if isinstance(m, KdaConfig)} == {128}
    sizes = set(map(int, re.findall(r"\d+", repr(config))))
    assert not sizes & {74, 75}


@pytest.mark.parametrize("head_dim", [72, 1, 0, None, "wide"])
def test_head_dim_has_no_influence(head_dim):
    assert parse(edited(head_dim=head_dim)) == BASE


@pytest.mark.parametrize("key", sorted(INERT))
def test_inert_keys_have_no_influence(key):
    assert parse(edited(**{key: [1, {"a": None}]})) == BASE


def test_moe_layers_follow_first_dense_and_frequency():
    sparse = [layer.kinds[1] == "moe" for layer in parse(edited(first_k_dense_replace=3, moe_layer_freq=2)).layers]
    assert [i for i, s in enumerate(sparse) if s] == list(range(4, 27, 2))


def test_shared_experts_are_one_layer_of_their_summed_width():
    ffn = parse(edited(num_shared_experts=2)).layers[1].ffn
    assert isinstance(ffn, MoeConfig)
    assert ffn.shared_ffn == 2048


# The same meaning has the same fingerprint.

DEFAULTS = (
    "num_key_value_heads",
    "moe_layer_freq",
    "moe_renormalize",
    "moe_router_activation_func",
    "num_expert_group",
    "topk_group",
    "num_nextn_predict_layers",
    "use_grouped_topk",
    "q_lora_rank",
    "rope_scaling",
    "tie_word_embeddings",
    "hidden_act",
)


@pytest.mark.parametrize("key", DEFAULTS)
def test_a_left_out_default_means_the_released_value(key):
    config = parse(edited(**{key: GONE}))
    assert config == BASE
    assert config.fingerprint == BASE.fingerprint


@given(st.permutations(sorted(RELEASED)), st.permutations(RELEASED["linear_attn_config"]["kda_layers"]))
@settings(max_examples=20, deadline=None)
def test_order_of_keys_and_layer_lists_does_not_change_the_fingerprint(keys, kda):
    data = {k: RELEASED[k] for k in keys} | {
        "linear_attn_config": {**RELEASED["linear_attn_config"], "kda_layers": kda}
    }
    assert parse(data).fingerprint == BASE.fingerprint


def test_spellings_of_older_and_newer_files_mean_the_same():
    older = edited(dtype=GONE, model_max_length=GONE, num_experts_per_token=GONE, num_shared_experts=GONE)
    older |= {
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 1048576,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
    }
    assert parse(older).fingerprint == BASE.fingerprint
    assert parse(RELEASED | {"torch_dtype": "bfloat16"}) == BASE


def test_integers_and_floats_of_one_value_have_one_fingerprint():
    assert parse(edited(routed_scaling_factor=2)).fingerprint == parse(edited(routed_scaling_factor=2.0)).fingerprint


def test_the_name_is_no_part_of_the_fingerprint():
    assert parse_config(RELEASED, origin="x", name="another") == BASE


MEANT = {
    "hidden_size": 2048,
    "vocab_size": 163841,
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
    "tie_word_embeddings": True,
    "model_max_length": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "intermediate_size": 4096,
    "moe_intermediate_size": 512,
    "first_k_dense_replace": 2,
    "moe_layer_freq": 2,
    "num_experts": 128,
    "num_experts_per_token": 4,
    "num_shared_experts": 2,
    "num_expert_group": 2,
    "routed_scaling_factor": 1.0,
    "linear_attn_config__num_heads": 16,
    "linear_attn_config__head_dim": 64,
    "linear_attn_config__short_conv_kernel_size": 3,
    "linear_attn_config__gate_lower_bound": -5.0,
}


def test_every_meaningful_key_changes_the_fingerprint():
    prints = [parse(edited(**{key: value})).fingerprint for key, value in MEANT.items()]
    assert len({*prints, BASE.fingerprint}) == len(MEANT) + 1


# What is refused.

CONTRADICTIONS = {
    "num_experts": 2049,  # case K11
    "num_experts_per_token": 257,
    "num_expert_group": 3,
    "topk_group": 4,
    "moe_renormalize": False,
    "moe_router_activation_func": "softmax",
    "hidden_act": "gelu",
    "mla_use_nope": False,
    "q_lora_rank": 1536,
    "rope_scaling": {"type": "yarn", "factor": 40},  # case R1
    "num_key_value_heads": 8,
    "first_k_dense_replace": 28,
    "moe_layer_freq": 0,
    "num_shared_experts": 0,
    "num_nextn_predict_layers": -1,
    "architectures": ["DeepseekV3ForCausalLM"],
    "bos_token_id": 163840,
    "attention_bias": True,
    "quantization_config": {"quant_method": "fp8"},
    "hidden_size": 2304.0,
    "num_hidden_layers": True,
    "vocab_size": -1,
    "intermediate_size": 10**30,
    "qk_rope_head_dim": 0,
    "kv_lora_rank": "512",
    "rms_norm_eps": True,
    "routed_scaling_factor": -1.0,
    "dtype": "int8",
    "linear_attn_config": [4, 8],
    "linear_attn_config__head_dim": None,
    "linear_attn_config__gate_lower_bound": 5.0,
    "linear_attn_config__full_attn_layers": "4",
    "linear_attn_config__use_full_rank_gate": True,
}


@pytest.mark.parametrize("key", sorted(CONTRADICTIONS))
def test_what_cannot_be_meant_is_refused_with_its_key_and_value(key):
    value = CONTRADICTIONS[key]
    message = refusal(edited(**{key: value}))
    assert message.startswith(f"config.json: {key.replace('__', '.')}: ")
    assert json.dumps(value)[:20] in message
    assert "expected" in message
    assert "\n" not in message  # one fault, one line


def test_more_experts_than_the_routing_operators_take_are_refused_with_the_limit():  # case K11
    assert "expected an integer from 1 to 2,048" in refusal(edited(num_experts=2049))
    assert parse(edited(num_experts=2048)).layers[1].ffn.experts == 2048


def test_yarn_is_refused_because_nothing_is_rotated():  # case R1
    message = refusal(edited(rope_scaling={"type": "yarn", "factor": 40}))
    assert "no rotary positions to scale" in message


def test_a_file_without_rope_keys_is_read():  # case R1: Kimi K3 has none
    assert parse(edited(rope_theta=GONE, rope_scaling=GONE)) == BASE


@pytest.mark.parametrize(
    "wrong, right", [("hidden_sise", "hidden_size"), ("num_expert", "num_experts"), ("rope_scalling", "rope_scaling")]
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(wrong, right):
    message = refusal(RELEASED | {wrong: 5})
    assert f"{wrong}: unknown key (its value is 5)" in message
    assert f"did you mean {right}?" in message


def test_an_unknown_inner_key_is_named_with_its_path():
    message = refusal(edited(linear_attn_config__num_head=32))
    assert "linear_attn_config.num_head: unknown key" in message
    assert "did you mean linear_attn_config.num_heads?" in message


def test_an_unknown_key_like_no_other_is_refused():
    assert "it would be ignored; delete it" in refusal(RELEASED | {"attn_res_block_size": 12})


WITH_DEFAULT = ("tie_word_embeddings", "moe_layer_freq", "num_expert_group")
REQUIRED = [k for k in RELEASED if k in MEANT and k not in WITH_DEFAULT]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_size_is_not_guessed(key):
    assert f"{key}: not given, and it has no default" in refusal(edited(**{key: GONE}))


def test_a_missing_section_names_its_keys():
    assert "linear_attn_config: not given, expected an object with num_heads" in refusal(
        edited(linear_attn_config=GONE)
    )


@pytest.mark.parametrize(
    "full, kda, message",
    [
        ([4, 4], [1, 2, 3], "full_attn_layers: layer 4 is listed twice"),
        ([4, 3], [1, 2, 3], "layer 3 is in full_attn_layers and in kda_layers"),
        ([4], [1, 2], "layer 3 is in neither"),
        ([4, 5], [1, 2, 3], "full_attn_layers: layer 5, but num_hidden_layers is 4"),
        ([3], [0, 1, 2], "kda_layers: found [0, 1, 2], expected a list, each member an integer from 1"),
    ],
)
def test_layer_lists_must_name_each_layer_once(full, kda, message):
    lists = {"linear_attn_config__full_attn_layers": full, "linear_attn_config__kda_layers": kda}
    assert message in refusal(edited(num_hidden_layers=4, **lists))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_expert_group": 256}, "num_expert_group: found 256, expected a divisor of 256 (num_experts), two"),
        ({"num_expert_group": 64}, "topk_group: found 1, expected more: 1 groups of 4 hold no 8 experts"),
        ({"num_expert_group": 8, "topk_group": 9}, "topk_group: found 9, expected at most 8 (num_expert_group)"),
        ({"num_expert_group": 8, "use_grouped_topk": False}, "use_grouped_topk: found false, expected true"),
    ],
)
def test_groups_of_experts_must_hold_the_chosen_ones(changes, message):
    assert message in refusal(edited(**changes))


def test_two_spellings_that_differ_are_refused():
    message = refusal(RELEASED | {"torch_dtype": "float32"})
    assert 'dtype: "bfloat16" and torch_dtype: "float32"' in message


def test_all_faults_are_reported_at_once():
    message = refusal(edited(num_experts=4096, hidden_act="gelu", vocab_size=GONE))
    assert [line.split(": ")[1] for line in message.splitlines()] == ["vocab_size", "hidden_act", "num_experts"]


def test_many_faults_are_counted():
    message = refusal(RELEASED | {f"unheard_of_{i}": i for i in range(20)})
    assert len(message.splitlines()) == 9
    assert message.endswith("... and 12 more")


@pytest.mark.parametrize(
    "kind, hint", [("kimi_liner", "Did you mean kimi_linear?"), (None, "found null"), ([1], "[1]")]
)
def test_an_unknown_model_type_is_refused_with_the_known_ones(kind, hint):
    message = refusal(edited(model_type=kind))
    assert "expected one of kimi_linear" in message
    assert hint in message


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PATHS = [*RELEASED, *(f"linear_attn_config__{k}" for k in RELEASED["linear_attn_config"])]


@given(st.dictionaries(st.sampled_from(PATHS), JUNK | st.just(GONE), min_size=1, max_size=3))
@settings(max_examples=200, deadline=None)
def test_any_value_is_read_or_refused_in_words(changes):
    if "linear_attn_config" in changes:
        changes = {"linear_attn_config": changes["linear_attn_config"]}
    data = edited(**changes)
    try:
        assert len(parse(data).fingerprint) == 64
    except ConfigError:
        assert refusal(data).startswith("config.json: ")


# Files, folders and presets.


@pytest.fixture
def write(tmp_path):
    def put(text, name="config.json"):
        path = tmp_path / "my-model" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return put


def test_a_preset_a_file_and_a_folder_are_the_same_model(write):
    path = write(json.dumps(RELEASED))
    assert load_config(path) == load_config(path.parent) == load_config(str(path)) == BASE
    assert load_config(path).name == load_config(path.parent).name == "my-model"
    assert BASE.name == "kimi-linear-48b"


def test_a_config_file_of_another_name_is_called_after_itself(write):
    assert load_config(write(json.dumps(RELEASED), "linear-small.json")).name == "linear-small"


def test_every_preset_is_read():
    assert "kimi-linear-48b" in presets()
    for name in presets():
        assert load_config(name).name == name


@pytest.mark.parametrize(
    "text, message",
    [
        (json.dumps(RELEASED)[:-400], "not JSON at line 1, column"),
        ("", "not JSON at line 1, column 1"),
        ("[1, 2]", "expected a JSON object ({...}), found [1, 2]"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', 'the key "c" is given twice'),
        ('{"rms_norm_eps": NaN}', "found NaN"),
        ('{"rms_norm_eps": -Infinity}', "found -Infinity"),
        ("[" * 100_000, "not JSON that can be read: its brackets are nested thousands deep"),
        ('{"a": ' + "1" * 5000 + "}", "not JSON that can be read: a number in it has thousands of digits"),
        (b"\xff\xfe\x00", "byte 0 is not UTF-8"),
        (b" " * (5 << 20), "a file of this kind has at most"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_what_is_not_a_config_file_is_refused_with_its_path(write, text, message):
    path = write(text)
    with pytest.raises(ConfigError) as e:
        load_config(path)
    assert str(e.value).startswith(str(path))
    assert message in str(e.value)


def test_a_number_too_large_for_a_float_is_refused(write):
    text = json.dumps(RELEASED).replace("1e-05", "1e-05".replace("-05", "999"))
    with pytest.raises(ConfigError, match="rms_norm_eps: found Infinity, expected a number above 0 and below 1"):
        load_config(write(text))


def test_a_byte_order_mark_is_no_fault(write):
    assert load_config(write(b"\xef\xbb\xbf" + json.dumps(RELEASED).encode())) == BASE


def test_a_folder_without_config_is_refused_with_the_presets(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json; expected .* folder\. Presets: .*kimi-linear-48b"):
        load_config(tmp_path)


@pytest.mark.parametrize("name", ["kimi-linear-48", "Kimi-Linear-48B", "kimi_linear_48b", "kimi-liner-48b"])
def test_a_misspelt_preset_is_refused_with_the_nearest(name):
    with pytest.raises(ConfigError, match="Did you mean the preset kimi-linear-48b"):
        load_config(name)


@pytest.mark.parametrize("name", ["", "  ", "\0", "no/such/file.json", "x" * 5000])
def test_a_name_of_nothing_is_refused(name):
    with pytest.raises(ConfigError):
        load_config(name)


# Lengths.


@pytest.mark.parametrize("page, tokens", [(128, 1_000_064), (384, 1_000_320)])
def test_a_length_is_rounded_up_to_whole_pages(page, tokens):  # case R7
    capacity = check_length(BASE, 1_000_000, page)
    assert capacity.tokens == tokens
    assert capacity.pages * page == tokens
    assert capacity.bytes == tokens * 7 * (512 + 64) * 2  # seven MLA layers, bfloat16


def test_a_length_over_the_limit_is_refused():  # case R7
    assert check_length(BASE, 1_048_576, 128).tokens == 1_048_576
    with pytest.raises(ConfigError, match="found 1,048,577, expected 1 to 1,048,576"):
        check_length(BASE, 1_048_577, 128)


@pytest.mark.parametrize("length, page", [(0, 128), (-1, 128), (10, 0)])
def test_a_length_or_page_of_nothing_is_refused(length, page):
    with pytest.raises(ConfigError):
        check_length(BASE, length, page)


# ---- unknown keys ----------------------------------------------------------------------------------------------------


def with_keys(tmp_path, name, change):
    data = json.loads((PRESETS / f"{name}.json").read_text())
    change(data)
    (tmp_path / "config.json").write_text(json.dumps(data))
    return tmp_path / "config.json"


@pytest.mark.parametrize("name", presets())
def test_a_config_without_unknown_keys_is_itself(name):
    config, unknown = load_known(name)
    assert unknown == () and config == load_config(name) and config.source == load_config(name).source


def test_unknown_keys_are_found_at_every_depth(tmp_path):
    def change(data):
        data["a"] = 1
        data["text_config"]["b"] = {"model_type": "x"}
        data["text_config"]["linear_attn_config"]["c"] = None
        data["vision_config"]["d"] = []

    config, unknown = load_known(with_keys(tmp_path, "kimi-k3", change))
    inside = ("text_config.b", "text_config.linear_attn_config.c", "vision_config.d", "a")
    assert sorted(unknown) == sorted(inside)
    assert config == load_config("kimi-k3")


def test_keys_that_depend_on_a_kind_are_known_by_it(tmp_path):
    def change(data):
        data["rope_scaling"]["e"] = 1

    config, unknown = load_known(with_keys(tmp_path, "deepseek-v3.2", change))
    assert unknown == ("rope_scaling.e",) and config == load_config("deepseek-v3.2")


def test_another_fault_is_still_refused(tmp_path):
    with pytest.raises(ConfigError, match="hidden_size"):
        load_known(with_keys(tmp_path, "deepseek-v3.2", lambda data: data.update(hidden_size="wide", extra=1)))
