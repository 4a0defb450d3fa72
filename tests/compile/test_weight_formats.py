"""What experts can be for a kernel: recipes give exactly what is said, and the table says what is so."""

import json

import pytest
import torch

from kimi_graph import formats, tree
from kimi_graph.checkpoint import Checkpoint, load_tree, released_formats
from kimi_graph.compile import recipe
from kimi_graph.compile.ge_proto import TensorDescriptor, bytes_of, describe, describe_tiled
from kimi_graph.compile.weight_formats import (
    NAMES,
    SOCS,
    as_read,
    choices,
    expert_weights,
    form_of,
    kept_form,
    measure_loss,
    table,
)
from kimi_graph.errors import CompileError
from kimi_graph.fixture import make_fixture
from kimi_graph.models import model_specs
from kimi_graph.read_config import load_config
from kimi_graph.spec import weight


@pytest.fixture(scope="module", params=["kimi-k3", "kimi-k2.5", "deepseek-v3.2"])
def made(request, tmp_path_factory):
    """A small checkpoint, quantised as released: its config, itself, and the spec of each stack of experts."""
    folder = tmp_path_factory.mktemp("formats") / "tiny"
    config = make_fixture(load_config(request.param), folder, layers=2, quantised=True).config
    specs = dict(tree.items(model_specs(config)))
    experts = [s for s in specs.values() if len(s.source) > 1]
    assert len(experts) >= 2
    return config, Checkpoint.open(folder), experts


def as_gmm_reads(form, spec, make):
    """The weight `[E, out, in]` that GroupedMatmul computes with, by its documented scales. `make`: bytes of steps."""
    inputs = {}
    for name, packed in expert_weights(form, spec).items():
        desc = TensorDescriptor()
        (describe_tiled if packed.tiled else describe)(desc, packed.shape, packed.dtype)
        made = make(packed.steps).contiguous().view(torch.uint8)
        assert made.numel() == bytes_of(desc)
        inputs[name] = as_read(desc, made)
        assert (inputs[name].shape, inputs[name].dtype) == (packed.shape, packed.dtype.held)
    weight = inputs["weight"].double()
    if form == "mxfp4":
        return weight * inputs["antiquant_scale"].double().flatten(-2).repeat_interleave(32, -1)
    if form == "fp8":
        scale = inputs["scale"].double().repeat_interleave(128, 1).repeat_interleave(128, 2)
        return weight * scale[:, : weight.shape[1], : weight.shape[2]]
    assert inputs["antiquant_scale"].dtype == torch.bfloat16
    return weight * inputs["antiquant_scale"].double().transpose(1, 2).repeat_interleave(32, -1)


@pytest.mark.parametrize("form", ["mxfp4", "fp8", "int4-g32"])
def test_the_inputs_of_a_grouped_product_hold_the_experts(made, form):
    config, checkpoint, experts = made
    native = config.quant.format
    for spec in experts:
        got = as_gmm_reads(form, spec, lambda steps, spec=spec: recipe.make(steps, spec, checkpoint, torch.bfloat16))
        exact = load_tree(spec, checkpoint, torch.float64).flatten(1, -2)
        assert got.shape == exact.shape
        error = float((got - exact).square().mean().sqrt() / exact.square().mean().sqrt())
        if (native, form) in {("mxfp4", "mxfp4"), ("int4", "int4-g32"), ("fp8", "fp8")}:
            assert error == 0
        else:  # of a normal distribution: int4 by 0.1, mxfp4 by 0.11, E4M3 by 0.03; numbers on a coarse grid by less
            assert error < {"int4-g32": 0.12, "mxfp4": 0.13, "fp8": 0.04}[form]
            assert error > 0 or (native, form) == ("mxfp4", "fp8")


@pytest.mark.parametrize("form", ["mxfp4", "fp8", "int4-g32"])
def test_recipes_fit_tensors_without_data_and_survive_json(made, form):
    _, checkpoint, experts = made
    for spec in experts:
        for packed in expert_weights(form, spec).values():
            steps = packed.steps
            assert recipe.from_json(json.loads(json.dumps(recipe.to_json(steps)))) == steps
            meta = recipe.apply(steps, torch.empty(spec.shape, dtype=torch.bfloat16, device="meta"))
            real = recipe.make(steps, spec, checkpoint, torch.bfloat16)
            assert (meta.shape, meta.dtype) == (real.shape, real.dtype)


def test_steps_on_a_loaded_parameter_give_the_same_values(made):
    """What a format holds exactly is the same by either way (mxfp4 has more than one way to write a number)."""
    config, checkpoint, experts = made
    if config.quant.format != "mxfp4":
        return
    for spec in experts:
        loaded = load_tree(spec, checkpoint, torch.bfloat16)
        ways = (
            lambda steps, spec=spec: recipe.make(steps, spec, checkpoint, torch.bfloat16),
            lambda steps, loaded=loaded: recipe.apply(steps, loaded),
        )
        assert torch.equal(*(as_gmm_reads("mxfp4", spec, way) for way in ways))


def test_a_step_names_the_part_it_takes():
    spec = weight((2, 4, 64), "_ _ _", source=("a.weight", "b.weight"))
    first = {name: packed.steps[0].short() for name, packed in expert_weights("int4-g32", spec).items()}
    assert first == {"weight": "int4_g32.weight", "antiquant_scale": "int4_g32.weight_scale"}


@pytest.mark.parametrize(
    "form, shape, message",
    [
        ("mxfp4", (2, 64, 96), r"a\.weight: 96 inputs; the kernel for mxfp4 takes multiples of 64, such as 128"),
        ("mxfp4", (2, 24, 64), r"a\.weight: 24 outputs; .* multiples of 64, such as 64"),
        ("fp8", (2, 2, 192, 128), r"a\.weight: 192 outputs; the kernel for fp8 takes multiples of 128, such as 256"),
    ],
)
def test_sizes_that_a_kernel_does_not_take_are_refused(form, shape, message):
    count = 2 * (shape[1] if len(shape) == 4 else 1)
    spec = weight(shape, " ".join("_" for _ in shape), source=tuple("abcd"[i] + ".weight" for i in range(count)))
    with pytest.raises(CompileError, match=message):
        expert_weights(form, spec)


@pytest.mark.parametrize(
    "name, native, soc, form",
    [
        ("native", "mxfp4", "950", "mxfp4"), ("native", "fp8", "950", "fp8"), ("native", "int4", "a3", "int4-g32"),
        ("native", "plain", "a2", "plain"), ("bf16", "mxfp4", "a3", "plain"), ("int4", "mxfp4", "a2", "int4-g32"),
    ],
)  # fmt: skip
def test_experts_are_kept_in_the_form_that_was_asked_for(name, native, soc, form):
    assert kept_form(name, native, soc) == form


@pytest.mark.parametrize(
    "name, native, soc, message",
    [
        ("native", "mxfp4", "a3", r"native: experts as mxfp4 on a3: no FP4 in the hardware; use bf16 or int4\."),
        ("native", "fp8", "a2", r"experts as fp8 on a2: no FP8 in the hardware; use bf16 or int4\."),
        ("int8-g32", "mxfp4", "950", r"a scale per output only, .*; use native or bf16 or int4\."),
        ("native", "w8", "a3", r"graphs for experts as w8 are not made yet; use bf16 or int4\."),
    ],
)
def test_what_no_kernel_takes_is_refused_with_what_can_be_had(name, native, soc, message):
    with pytest.raises(CompileError, match=message):
        kept_form(name, native, soc)


@pytest.mark.parametrize("name", ["native", "int8-g32", "int4"])
def test_measured_losses_are_those_the_table_names(made, name):
    config, checkpoint, _ = made
    loss = measure_loss(config, checkpoint, name)
    stored = released_formats(config, specs := model_specs(config))
    said = {c.exact for c in choices(config, specs, stored) if c.name == name}
    assert len(said) == 1
    assert (loss.worst == 0) == (said.pop() in ("exact", "as stored"))


# The table.


def rows(name):
    config = load_config(name)
    specs = model_specs(config)
    return {(c.name, c.soc): c for c in choices(config, specs, released_formats(config, specs))}


def test_every_format_has_a_row_for_every_chip():
    assert set(rows("kimi-k2.5")) == {(name, soc) for name in NAMES for soc in SOCS}


@pytest.mark.parametrize(
    "model, name, terabytes",
    [
        ("kimi-k3", "native", 1.561), ("kimi-k3", "bf16", 5.560), ("kimi-k3", "int8-g32", 3.007),
        ("kimi-k3", "int4", 1.646), ("kimi-k2.5", "native", 0.595), ("kimi-k2.5", "int4", 0.595),
        ("kimi-k2.5", "bf16", 2.054), ("deepseek-v3.2", "native", 0.690), ("deepseek-v3.2", "bf16", 1.344),
        ("glm-5.2", "native", 1.487), ("glm-5.2", "bf16", 1.487),
    ],
)  # fmt: skip
def test_weights_have_the_bytes_of_their_format(model, name, terabytes):
    assert rows(model)[name, "a3"].bytes / 1e12 == pytest.approx(terabytes, abs=6e-4)


def test_kernels_are_those_of_the_chip():
    k3, k25, v32 = rows("kimi-k3"), rows("kimi-k2.5"), rows("deepseek-v3.2")
    assert [k3["native", soc].taken for soc in SOCS] == [False, False, True]
    assert [v32["native", soc].taken for soc in SOCS] == [False, False, True]
    assert [k25["native", soc].taken for soc in SOCS] == [True, True, True]
    assert not any(r["int8-g32", soc].taken for r in (k3, k25, v32) for soc in SOCS)
    assert all(r[name, soc].taken for r in (k3, k25, v32) for soc in SOCS for name in ("bf16", "int4"))


def test_chips_that_are_served_alike_share_a_line():
    lines = table(rows("kimi-k3").values())
    assert [line.split()[0] for line in lines] == ["native", "native", "bf16", "int8-g32", "int4"]
    assert lines[0].startswith("native     1.56 TB  a2, a3       NO ")
    assert lines[1].startswith("native     1.56 TB  950          yes")


def test_experts_in_two_formats_are_not_one_choice():
    config = load_config("kimi-k3")
    specs = model_specs(config)
    stored = released_formats(config, specs) | {"layers.5.moe.down": "int4"}
    with pytest.raises(CompileError, match="experts are stored in several formats: int4, mxfp4"):
        choices(config, specs, stored)


def test_a_form_is_a_format_or_plain():
    for name in NAMES:
        for native in ("plain", *formats.IN_CHECKPOINTS):
            assert form_of(name, native) in {"plain", *formats.FORMATS}
