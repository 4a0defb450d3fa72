"""A checkpoint's tensors are found under every released spelling, and each says for itself how it is stored."""

import pytest

from kimi_graph.naming import PREFIXES, Names, Place

EXPERT = "language_model.model.layers.3.block_sparse_moe.experts.7.w1"


def find(name, *names):
    return Names(set(names)).find(name)


@pytest.mark.parametrize("wanted", PREFIXES)
@pytest.mark.parametrize("stored", PREFIXES)
def test_text_is_found_with_and_without_language_model_and_model(wanted, stored):
    name = f"{stored}layers.12.mlp.gate_proj.weight"
    assert find(f"{wanted}layers.12.mlp.gate_proj.weight", name) == Place(None, (name,))


@pytest.mark.parametrize("stored", ["lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight"])
def test_the_head_is_found_beside_the_model_or_in_it(stored):
    assert find("language_model.lm_head.weight", stored) == Place(None, (stored,))
    assert find("lm_head.weight", stored) == Place(None, (stored,))


def test_a_name_as_it_is_goes_before_another_spelling():
    both = ("model.norm.weight", "language_model.model.norm.weight")
    for name in both:
        assert find(name, *both) == Place(None, (name,))


@pytest.mark.parametrize(
    "name, older",
    [
        ("mm_projector.proj.0.weight", "mm_projector.linear_1.weight"),
        ("mm_projector.proj.2.bias", "mm_projector.linear_2.bias"),
        ("model.layers.3.self_attention_res_proj.weight", "model.layers.3.self_attention_res.proj_weight"),
        ("model.layers.3.mlp_res_norm.weight", "layers.3.mlp_res.norm_weight"),
        ("model.output_attn_res_norm.weight", "model.output_attn_res.norm_weight"),
        ("language_model.model.output_attn_res_proj.weight", "model.output_attn_res.proj_weight"),
    ],
)  # case W7
def test_older_spellings_are_found(name, older):
    assert find(name, older) == Place(None, (older,))
    assert find(name, name) == Place(None, (name,))


@pytest.mark.parametrize("name", ["model.layers.1.mlp_res.proj_weight", "layers.1.norm.weight", "x", ""])
def test_what_is_not_there_is_not_found(name):
    assert find("model.layers.12.norm.weight", name) is None


@pytest.mark.parametrize(
    "form, parts, extras",
    [
        (None, ["weight"], []),
        ("mxfp4", ["weight_packed", "weight_scale"], []),
        ("int4", ["weight_packed", "weight_scale", "weight_shape"], []),
        ("fp8", ["weight", "weight_scale_inv"], []),
        ("w8", ["weight", "weight_scale", "weight_offset"], []),
        # msModelSlim's W8A8_MIX is both: what it needs for activations of a fixed scale is not read.
        (
            "w8",
            ["weight", "weight_scale", "weight_offset"],
            ["quant_bias", "input_scale", "input_offset", "deq_scale"],
        ),
        ("w8-static", ["weight", "deq_scale", "input_scale"], ["quant_bias", "input_offset"]),
        ("w4", ["weight", "weight_scale", "weight_offset"], ["scale_bias"]),
        ("w4-mx", ["weight", "weight_scale"], []),
    ],
)
def test_the_names_beside_a_weight_say_its_format(form, parts, extras):
    names = [f"{EXPERT}.{part}" for part in (*parts, *extras)]
    place = find(f"{EXPERT}.weight", *names, f"{EXPERT}.unknown", "other.weight_scale")
    assert place == Place(form, tuple(names[: len(parts)]), tuple(names[len(parts) :]))


def test_a_packed_weight_is_found_under_another_prefix():
    names = [
        "layers.3.block_sparse_moe.experts.7.w1.weight_packed",
        "layers.3.block_sparse_moe.experts.7.w1.weight_scale",
    ]
    assert find(f"{EXPERT}.weight", *names) == Place("mxfp4", tuple(names))


def test_a_part_that_is_missing_is_named():
    assert find(f"{EXPERT}.weight", f"{EXPERT}.weight_packed") == Place(
        "mxfp4", (f"{EXPERT}.weight_packed", f"{EXPERT}.weight_scale")
    )
