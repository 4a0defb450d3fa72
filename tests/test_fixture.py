"""A fixture is a small released checkpoint: names, dtypes and head sizes are real, every kind of layer occurs."""

import itertools
import json
import math
import time

import pytest
import safetensors
import torch

from kimi_graph import tree
from kimi_graph.checkpoint import INDEX, Checkpoint, load_params
from kimi_graph.config import KdaConfig, MlaConfig
from kimi_graph.errors import CheckpointError, ConfigError
from kimi_graph.fixture import MARK, make_fixture, small_config
from kimi_graph.init import init_tensor
from kimi_graph.models import decode, init_params, init_state, model_specs, prefill
from kimi_graph.read_config import load_config, parse_config
from kimi_graph.spec import weight
from kimi_graph.tokenizer import byte_letters

BASE = load_config("kimi-linear-48b")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The default fixture. Not to be written to."""
    return make_fixture(BASE, tmp_path_factory.mktemp("fixture") / "tiny")


def small(layers=None, **changes):
    base = parse_config({**BASE.source, **changes}, origin="", name="base")
    return parse_config(small_config(base, layers), origin="", name="small")


def content(folder):
    return {f.name: f.read_bytes() for f in folder.iterdir()}


# The model.


def test_the_default_has_every_kind_of_layer_and_an_irregular_end():
    kinds = [layer.kinds for layer in small().layers]
    assert kinds == [("kda", "dense"), ("kda", "moe"), ("mla", "moe"), ("kda", "moe"), ("mla", "moe")]


def test_two_layers_are_one_of_each():
    assert [layer.kinds for layer in small(2).layers] == [("kda", "dense"), ("mla", "moe")]


@pytest.mark.parametrize("layers", range(2, 28))
def test_any_number_of_layers_starts_with_kda_and_ends_with_attention(layers):
    kinds = [layer.kinds[0] for layer in small(layers).layers]
    assert len(kinds) == layers
    assert (kinds[0], kinds[-1]) == ("kda", "mla")
    assert ("mla", "mla") not in itertools.pairwise(kinds)  # none are adjacent in the released schedule


def test_all_layers_have_the_released_schedule():
    assert [layer.kinds for layer in small(27).layers] == [layer.kinds for layer in BASE.layers]


@pytest.mark.parametrize("layers", [1, 0, -3, 28])
def test_too_few_or_too_many_layers_are_refused(layers, tmp_path):
    with pytest.raises(ConfigError, match=rf"layers: found {layers}, expected 2 \(one of each mixer\) to 27"):
        make_fixture(BASE, tmp_path / "x", layers=layers)
    assert list(tmp_path.iterdir()) == []


def test_dimensions_an_operator_is_written_for_are_the_released_ones():
    def fixed(mixer):
        if isinstance(mixer, KdaConfig):
            return (mixer.key, mixer.value, mixer.conv_width, mixer.gate_rank, mixer.gate_lower_bound)
        return (mixer.latent, mixer.key_nope, mixer.key_rope, mixer.value, mixer.scale, mixer.rope)

    assert {fixed(x.mixer) for x in small().layers} == {fixed(x.mixer) for x in BASE.layers}
    assert small().norm_eps == BASE.norm_eps
    assert small().layers[1].ffn.scale == BASE.layers[1].ffn.scale


def test_sizes_are_small_and_round():
    config = small()
    assert {x.mixer.heads for x in config.layers} == {4}
    moe = config.layers[1].ffn
    assert (config.embed, config.vocab, config.layers[0].ffn.ffn) == (256, 512, 1024)
    assert (moe.experts, moe.top_k, moe.ffn, moe.shared_ffn) == (16, 4, 128, 128)


def test_a_fixture_of_a_small_model_does_not_grow():
    once = small()
    again = parse_config(small_config(once), origin="", name="again")
    assert again == once


def test_special_tokens_stay_behind_the_bytes():
    assert (small().bos, small().eos, small().pad) == (256, (258,), 511)  # as far from the end as in the released file
    other = small(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    assert (other.bos, other.eos, other.pad) == (257, (258,), 256)


def test_models_without_one_kind_of_layer_have_fixtures_without_it():
    every = list(range(1, 28))
    lists = {**BASE.source["linear_attn_config"], "full_attn_layers": every, "kda_layers": []}
    assert {layer.kinds[0] for layer in small(linear_attn_config=lists).layers} == {"mla"}
    lists |= {"full_attn_layers": [], "kda_layers": every}
    assert {layer.kinds[0] for layer in small(linear_attn_config=lists).layers} == {"kda"}
    assert {layer.kinds[1] for layer in small(first_k_dense_replace=27).layers} == {"dense"}
    assert {layer.kinds[1] for layer in small(first_k_dense_replace=0).layers} == {"moe"}


# The files.


def test_a_fixture_is_small_and_quick(tmp_path):
    start = time.perf_counter()
    made = make_fixture(BASE, tmp_path / "tiny")
    assert time.perf_counter() - start < 3
    assert made.bytes == sum(map(len, content(made.folder).values())) < 40_000_000


def test_names_and_dtypes_are_the_released_ones(tiny):
    tensors = Checkpoint.open(tiny.folder).tensors
    assert len(tensors) == tiny.tensors
    wide = {name for name, t in tensors.items() if t.dtype == torch.float32}
    assert wide == {name for name in tensors if name.endswith(("A_log", "dt_bias", "e_score_correction_bias"))}
    assert {t.dtype for t in tensors.values()} == {torch.float32, torch.bfloat16}
    assert tensors["model.layers.0.self_attn.A_log"].shape == (1, 1, 4, 1)
    assert tensors["model.layers.0.self_attn.q_conv1d.weight"].shape == (512, 1, 4)
    assert tensors["model.layers.2.self_attn.kv_a_proj_with_mqa.weight"].shape == (576, 256)
    assert tensors["model.layers.4.block_sparse_moe.experts.15.w2.weight"].shape == (256, 128)


def test_there_are_several_files_and_an_index(tiny):
    files = set(json.loads((tiny.folder / INDEX).read_text())["weight_map"].values())
    assert len(files) >= 2
    assert all((tiny.folder / name).is_file() for name in files)


def test_a_fixture_holds_the_random_parameters_of_its_seed(tiny):
    expected = init_params(tiny.config, seed=0, dtype=torch.bfloat16)
    loaded = load_params(tiny.folder, tiny.config)
    for (path, a), (_, b) in zip(tree.items(loaded), tree.items(expected), strict=True):
        assert a.dtype == b.dtype, path
        assert torch.equal(a, b), path


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    a, b, c = (
        make_fixture(BASE, tmp_path / n / "x", layers=2, seed=s).folder for n, s in (("a", 3), ("b", 3), ("c", 4))
    )
    assert content(a) == content(b)
    assert content(a)["config.json"] == content(c)["config.json"]
    assert content(a).keys() == content(c).keys()
    assert all(content(a)[f] != content(c)[f] for f in content(a) if f.endswith(".safetensors"))


def test_a_fixture_runs(tiny):
    config = load_config(tiny.folder)
    assert config == tiny.config
    params = load_params(tiny.folder, config, dtype=torch.float32)
    state = init_state(config, batch=1, max_len=64)
    logits, state = prefill(config, params, torch.arange(40)[None], state)
    logits, state = decode(config, params, torch.tensor([7]), state)
    assert 0.3 < float(logits.std()) < 3


# Where it may be written.


def test_a_fixture_is_replaced_only_when_asked(tmp_path):
    make_fixture(BASE, tmp_path / "x", layers=2)
    with pytest.raises(CheckpointError, match="is a fixture already"):
        make_fixture(BASE, tmp_path / "x", layers=3)
    made = make_fixture(BASE, tmp_path / "x", layers=3, overwrite=True)
    assert load_config(tmp_path / "x") == made.config
    assert [f.name for f in tmp_path.iterdir()] == ["x"]


def test_a_folder_of_something_else_is_never_replaced(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="is not a fixture of kimi-graph"):
        make_fixture(BASE, tmp_path / "x", overwrite=True)
    (tmp_path / "x" / MARK).write_text('{"files": ["fixture.json"]}')
    with pytest.raises(CheckpointError, match=r"holds thesis\.txt"):
        make_fixture(BASE, tmp_path / "x", overwrite=True)
    assert (tmp_path / "x" / "thesis.txt").read_text() == "years of work"
    with pytest.raises(CheckpointError, match="is not a fixture"):
        make_fixture(BASE, tmp_path / "x" / "thesis.txt", overwrite=True)


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "x").mkdir()
    make_fixture(BASE, tmp_path / "x", layers=2)
    assert load_config(tmp_path / "x").name == "x"


def test_a_fixture_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    folder = make_fixture(BASE, tmp_path / "x", layers=2).folder
    before = content(folder)
    monkeypatch.setattr("kimi_graph.fixture.chat_tokenizer", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_fixture(BASE, folder, layers=3, overwrite=True)
    assert content(folder) == before
    assert [f.name for f in tmp_path.iterdir()] == ["x"]


# The tokenizer, by what will read it.


@pytest.fixture(scope="module")
def tokenizer(tiny):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(tiny.folder)


def test_every_byte_has_a_letter_of_its_own():
    letters = byte_letters()
    assert len(set(letters)) == 256
    assert [letters[ord(c)] for c in "aZ~ \n"] == ["a", "Z", "~", "Ġ", "Ċ"]


@pytest.mark.parametrize("text", ["Hello, world!\n", "  two  spaces\t", "naïve 漢字 🙂", "\0\x7f", ""])
def test_ids_of_text_are_its_bytes_and_come_back(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_every_id_of_the_vocabulary_has_a_token(tokenizer, tiny):
    assert len(tokenizer) == tiny.config.vocab
    tokens = tokenizer.convert_ids_to_tokens(list(range(tiny.config.vocab)))
    assert len(set(tokens)) == tiny.config.vocab
    assert tokenizer.encode("a<|im_end|>b", add_special_tokens=False) == [97, 258, 98]


def test_special_tokens_are_those_of_the_config(tokenizer, tiny):
    config = tiny.config
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        config.bos,
        config.eos[0],
        config.pad,
    )


def test_the_chat_template_names_each_speaker(tokenizer):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|>"
        "<|im_user|>user<|im_middle|>Hi<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>"
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert sum(i >= 256 for i in ids) == 8


# The model, by transformers.


def test_transformers_loads_a_fixture_without_missing_or_unexpected_keys(tiny):
    transformers = pytest.importorskip("transformers")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tiny.folder, dtype=torch.float32, output_loading_info=True
    )
    assert type(model).__name__ == "KimiLinearForCausalLM"
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert sum(p.numel() for p in model.state_dict().values()) == sum(
        s.numel for s in tree.leaves(model_specs(tiny.config))
    )
    assert model.generation_config.eos_token_id == tiny.config.eos[0]


# Random parameters.


def test_a_value_depends_on_path_and_seed_alone():
    spec = weight((4, 6), "_ _", source="q_proj.weight")
    first = init_tensor(spec, "layers.0.kda.query", 1)
    torch.manual_seed(123)
    assert torch.equal(first, init_tensor(spec, "layers.0.kda.query", 1))
    assert not torch.equal(first, init_tensor(spec, "layers.1.kda.query", 1))
    assert not torch.equal(first, init_tensor(spec, "layers.0.kda.query", 2))


@pytest.mark.parametrize(
    "name, stored, low, high",
    [
        ("A_log", (10_000,), 0.0, math.log(16)),
        ("dt_bias", (10_000,), math.log(math.expm1(1e-3)) - 1e-3, math.log(math.expm1(1e-1)) + 1e-3),
        ("input_layernorm.weight", (10_000,), 0.5, 1.5),
        ("gate.e_score_correction_bias", (10_000,), -0.3, 0.3),
    ],
)
def test_parameters_lie_where_they_do_something(name, stored, low, high):
    value = init_tensor(weight(stored, "_", source=name), name)
    assert low <= float(value.min()) < float(value.max()) <= high
    assert float(value.std()) > 0.04


@pytest.mark.parametrize("fan_in", [16, 1024])
def test_projections_keep_the_scale_of_their_input(fan_in):
    w = init_tensor(weight((4096, fan_in), "_ _", source="q_proj.weight"), "w")
    y = w @ torch.randn(fan_in, 8)
    assert float(y.std()) == pytest.approx(1, rel=0.5)  # 8 vectors of 16 draws: their lengths differ by 1 / sqrt(32)


def test_reading_is_safe_while_transformers_writes_nothing(tiny):
    """The library's own reader agrees that every file is whole."""
    for file in tiny.folder.glob("*.safetensors"):
        with safetensors.safe_open(file, "pt") as f:
            assert f.metadata() == {"format": "pt"}
            assert all(f.get_slice(name).get_shape() is not None for name in f.keys())  # noqa: SIM118 (no mapping)


def test_configs_of_fixtures_differ_from_their_model_in_counts_alone():
    released, scaled = BASE.source, small().source
    changed = {k for k in released.keys() & scaled.keys() if released[k] != scaled[k]}
    assert changed == {
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
        *("moe_intermediate_size", "num_experts", "num_experts_per_token", "vocab_size", "linear_attn_config"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
    }
    assert released.keys() - scaled.keys() == {"auto_map", "head_dim", "rope_theta", "rope_scaling"}
    assert isinstance(small().layers[2].mixer, MlaConfig)


@pytest.mark.parametrize("name", ["kimi-linear-48b", "kimi-k3.1-pro", "glm-5.2"])
def test_heads_and_channels_divide_over_the_ranks_that_were_asked_for(name):
    sizes = {"heads": set(), "ffn": set(), "vocab": set()}
    small = parse_config(small_config(load_config(name), ways=3), origin="small", name="small")
    for _, spec in tree.items(model_specs(small)):
        for axis, size in zip(spec.axes, spec.shape, strict=True):
            sizes.get(axis, set()).add(size)
    assert all(size % 3 == 0 for size in sizes["heads"] | sizes["ffn"])
    assert sizes["vocab"] == {512}
