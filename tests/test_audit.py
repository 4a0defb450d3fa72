"""What a file holds counts; what its config or description says otherwise is reported."""

import pytest
import torch

from kimi_graph import tree
from kimi_graph.audit import audit_names, said_format
from kimi_graph.checkpoint import pieces_of, released_formats
from kimi_graph.fixture import small_config
from kimi_graph.headers import Stored
from kimi_graph.models import model_specs
from kimi_graph.naming import Names
from kimi_graph.read_config import load_config, parse_config

NAMES = ("kimi-k3", "kimi-k3.1-pro", "kimi-k2.5", "deepseek-v3.2", "glm-5.2", "kimi-linear-48b")


def small(name, **changes):
    released = load_config(name)
    source = small_config(released, 2, quantised=released.quant is not None)
    return parse_config(source | changes, origin="", name="small")


def listed(config, packed=None, names=False):
    """A checkpoint of the model: its tensors by name, with headers or without."""
    specs = model_specs(config)
    forms = released_formats(config, specs) if packed is None else packed
    pieces = pieces_of(specs, config.dtype, forms)
    return {p.name: None if names else Stored("file", p.dtype, p.shape, 0, p.bytes) for p in pieces}  # type: ignore[arg-type]


def audit(config, tensors, described=None):
    return audit_names(model_specs(config), tensors, Names(tensors), config.dtype, "here", config, described)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("names", [False, True], ids=["headers", "names"])
def test_released_checkpoints_are_as_the_model_needs_them(name, names):
    config = small(name)
    tensors = listed(config, names=names)
    found = audit(config, tensors)
    assert found.ok, str(found)
    assert sum(t.tensors for t in found.tallies.values()) == len(tensors)
    headers = listed(config)
    assert sum(t.bytes for t in found.tallies.values()) == sum(s.end for s in headers.values())


def test_a_tensor_the_config_calls_quantised_may_be_plain():  # case C3
    config = small("kimi-k3")
    found = audit(config, listed(config))
    assert found.ok
    at = "language_model.model.layers.*.block_sparse_moe"
    plain = [f"{at}.{n}" for n in ("gate", "routed_expert_down_proj", "routed_expert_up_proj")]
    for module in plain:
        assert f"{module}: config says mxfp4, file has BF16: BF16 used (1 tensors)" in found.disagreements
    assert not [line for line in found.disagreements if "experts.*.w" in line or "self_attn." in line]
    # The same from names alone, and experts that are plain are reported, not refused.
    assert len(audit(config, listed(config, names=True)).disagreements) == len(found.disagreements)
    whole = audit(config, listed(config, packed={}))
    assert whole.ok
    assert f"{at}.experts.*.w2: config says mxfp4, file has BF16: BF16 used (16 tensors)" in whole.disagreements


def test_a_tensor_may_be_quantised_though_the_config_says_nothing():
    plain = load_config("kimi-k3")
    config = parse_config(small_config(plain, 2), origin="", name="small")
    assert config.quant is None
    experts = dict.fromkeys(released_formats(small("kimi-k3"), model_specs(config)), "mxfp4")
    found = audit(config, listed(config, packed=experts))
    assert found.ok
    module = "language_model.model.layers.*.block_sparse_moe.experts.*.w1"
    assert f"{module}: config says not quantised, file has mxfp4: mxfp4 used (16 tensors)" in found.disagreements


def test_another_format_than_the_configs_is_reported():
    config = small("kimi-k2.5")
    forms = dict.fromkeys(released_formats(config, model_specs(config)), "mxfp4")
    found = audit(config, listed(config, packed=forms))
    assert found.ok
    assert any("experts.*.down_proj: config says int4, file has mxfp4: mxfp4 used" in x for x in found.disagreements)


def test_some_experts_may_be_stored_otherwise_than_others():
    """The scheme is decided for each tensor."""
    config = small("kimi-k3")
    tensors = listed(config)
    name = "language_model.model.layers.1.block_sparse_moe.experts.3.w2"
    for part in ("weight_packed", "weight_scale"):
        del tensors[f"{name}.{part}"]
    spec = next(s for _, s in tree.items(model_specs(config)) if f"{name}.weight" in s.source)
    tensors[f"{name}.weight"] = Stored("file", torch.bfloat16, spec.stored, 0, 2 * spec.stored[0] * spec.stored[1])  # type: ignore[arg-type]
    found = audit(config, tensors)
    assert found.ok
    assert dict(found.tallies["layers.1.moe.down"].schemes) == {"mxfp4": 15, "BF16": 1}


@pytest.mark.parametrize(
    "part, change, missing, shapes, dtypes",
    [
        ("weight_scale", None, "w1.weight_scale", "", ""),
        ("weight_packed", None, "w1.weight", "", ""),
        ("weight_scale", (torch.uint8, (64, 3)), "", r"w1.weight_scale: found [64, 3], expected [", ""),
        ("weight_packed", (torch.int8, None), "", "", "w1.weight_packed: found I8, expected U8"),
    ],
)
def test_every_part_of_a_quantised_weight_is_looked_at(part, change, missing, shapes, dtypes):
    config = small("kimi-k3")
    tensors = listed(config)
    name = f"language_model.model.layers.1.block_sparse_moe.experts.0.w1.{part}"
    old = tensors.pop(name)
    if change is not None:
        tensors[name] = Stored("file", change[0], change[1] or old.shape, 0, 1)  # type: ignore[arg-type, union-attr]
    found = audit(config, tensors)
    assert not found.ok
    for lines, text in ((found.missing, missing), (found.shapes, shapes), (found.dtypes, dtypes)):
        assert len(lines) == bool(text)
        assert not text or text in lines[0]


def test_a_matrix_beside_its_packed_form_is_not_expected():
    config = small("kimi-k3")
    tensors = listed(config)
    name = "language_model.model.layers.1.block_sparse_moe.experts.0.w1"
    tensors[f"{name}.weight"] = Stored("file", torch.bfloat16, (64, 64), 0, 8192)  # type: ignore[arg-type]
    assert not audit(config, tensors).ok


def test_old_four_bit_exports_in_groups_are_not_taken_for_others():
    """msModelSlim before version 1.0: a second scale beside the first. vllm-ascend has dropped them as well."""
    config = small("kimi-linear-48b")
    tensors = listed(config)
    stem = "model.layers.1.block_sparse_moe.experts.0.w1."
    whole = tensors.pop(f"{stem}weight")
    o, i = whole.shape  # type: ignore[union-attr]
    tensors[f"{stem}weight"] = Stored("file", torch.int8, (o, i), 0, o * i)  # type: ignore[arg-type]
    for part in ("weight_scale", "weight_offset", "weight_scale_second", "weight_offset_second"):
        tensors[f"{stem}{part}"] = Stored("file", torch.float32, (o, 1), 0, 4 * o)  # type: ignore[arg-type]
    assert audit(config, tensors).unexpected == (f"{stem}weight_offset_second", f"{stem}weight_scale_second")


# Draft layers.


def draft(config, layer, prefix="language_model.model."):
    return {f"{prefix}layers.{layer}.eh_proj.weight": Stored("file", torch.bfloat16, (4, 4), 0, 32)}  # type: ignore[arg-type]


@pytest.mark.parametrize("prefix", ["model.", "", "language_model.model."])
def test_draft_layers_are_not_read(prefix):  # case C10
    config = small("deepseek-v3.2", num_nextn_predict_layers=2)
    tensors = listed(config)
    found = audit(config, tensors | draft(config, 2, prefix) | draft(config, 3, prefix))
    assert found.ok
    assert found.draft == 2
    beyond = draft(config, 4, prefix)
    assert audit(config, tensors | beyond).unexpected == tuple(beyond)
    without = small("deepseek-v3.2", num_nextn_predict_layers=0)
    assert audit(without, tensors | draft(config, 2, prefix)).unexpected == tuple(draft(config, 2, prefix))


# Descriptions.


def exported(config):
    """An export of msModelSlim: int8 attention with fixed activations, w8 elsewhere, w4 experts."""
    specs = model_specs(config)
    forms, described = {}, {}
    for path, spec in tree.items(specs):
        if ".moe.gate_up" in path or path.endswith(".moe.down"):
            forms[path] = "w4"
        elif len(spec.stored) == 2 and spec.source[0].endswith("proj.weight"):
            forms[path] = "w8"
    types = {"w4": "W4A8_DYNAMIC", "w8": "W8A8_DYNAMIC"}
    for piece in pieces_of(specs, config.dtype, forms):
        described[piece.name] = types[piece.packed[0]] if piece.packed else "FLOAT"
    return listed(config, packed=forms), {"version": "1.0.0", "model_quant_type": "W8A8_DYNAMIC", **described}


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-linear-48b", "deepseek-v3.2"])
def test_exports_of_msmodelslim_are_read_as_they_describe_themselves(name):
    config = small(name)
    tensors, described = exported(config)
    for tensor in [t for t in tensors if ".experts." in t and t.endswith("weight_scale")]:
        bias = tensor.replace("weight_scale", "scale_bias")
        tensors[bias], described[bias] = Stored("file", torch.float32, (4, 16), 0, 256), "W4A8_DYNAMIC"  # type: ignore[arg-type]
    found = audit(config, tensors, described)
    assert found.ok, str(found)
    assert found.disagreements == ()
    schemes = {s for t in found.tallies.values() for s in t.schemes}
    assert schemes == {"w4", "w8", "BF16", "F32"}


def test_a_description_that_says_otherwise_is_reported():
    config = small("kimi-linear-48b")
    tensors, described = exported(config)
    name = "model.layers.0.mlp.gate_proj.weight"
    for said, words in (("FLOAT", "not quantised"), ("W8A8_MXFP8", "W8A8_MXFP8"), (None, "nothing")):
        changed = {k: v for k, v in described.items() if k != name} | ({name: said} if said else {})
        lines = [line for line in audit(config, tensors, changed).disagreements if "mlp.gate_proj" in line]
        assert lines == [
            f"model.layers.*.mlp.gate_proj: quant_model_description.json says {words}, file has w8: w8 used (1 tensors)"
        ]


# What configs say.


@pytest.mark.parametrize(
    "model, module, shape, said",
    [
        ("kimi-k3", "language_model.model.layers.5.block_sparse_moe.experts.0.w1", (64, 64), "mxfp4"),
        ("kimi-k3", "language_model.model.layers.5.self_attn.q_proj", (64, 64), None),
        ("kimi-k3", "language_model.model.layers.5.block_sparse_moe.shared_experts.up_proj", (64, 64), None),
        ("kimi-k3", "language_model.model.layers.0.mlp.up_proj", (64, 64), None),
        ("kimi-k3", "language_model.lm_head", (64, 64), None),
        ("kimi-k3", "language_model.model.embed_tokens", (64, 64), None),
        ("kimi-k3", "language_model.model.norm", (64,), None),
        ("kimi-k3", "vision_tower.encoder.blocks.0.wo", (64, 64), None),
        ("kimi-k2.5", "language_model.lm_head", (64, 64), None),
        ("kimi-k2.5", "mm_projector.proj.0", (64, 64), None),
        ("kimi-k2.5", "language_model.model.layers.5.mlp.experts.0.up_proj", (64, 64), "int4"),
        ("deepseek-v3.2", "model.layers.5.self_attn.kv_b_proj", (64, 64), "fp8"),
        ("glm-5.2", "model.layers.5.self_attn.kv_b_proj", (64, 64), None),
    ],
)
def test_a_config_speaks_of_linear_layers_but_for_its_exceptions(model, module, shape, said):
    assert said_format(load_config(model), f"{module}.weight", shape) == said
