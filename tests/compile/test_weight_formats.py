"""What experts can be for a kernel: recipes give exactly what is said, and the table says what is so."""

import json

import pytest
import torch

from kimi_graph import formats, tree
from kimi_graph.checkpoint import Checkpoint, load_tree, released_formats
from kimi_graph.compile import recipe
from kimi_graph.compile.weight_formats import NAMES, SOCS, choices, expert_weights, form_of, measure_loss, table
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


def as_gmm_reads(form, inputs):
    """The weight `[E, out, in]` that GroupedMatmul computes with, by its documented scales."""
    weight = inputs["weight"]
    if form == "plain":
        return weight.double()
    if form == "mxfp4":
        scale = inputs["scale"].flatten(-2)
        return formats.unpack("mxfp4", {"weight_packed": weight, "weight_scale": scale}, torch.float64)
    scale = inputs["antiquant_scale"].transpose(1, 2)  # [E, group, out] in the kernel
    assert scale.dtype == torch.bfloat16
    if form == "int4-g32":
        low, high = weight.to(torch.int8) << 4 >> 4, weight.view(torch.int8) >> 4
        weight = torch.stack([low, high], -1).flatten(-2)
    return weight.double() * scale.double().repeat_interleave(32, -1)


@pytest.mark.parametrize("form", ["plain", "mxfp4", "int8-g32", "int4-g32"])
def test_the_inputs_of_a_grouped_product_hold_the_experts(made, form):
    config, checkpoint, experts = made
    native = config.quant.format
    for spec in experts:
        plan = expert_weights(form, spec)
        inputs = {name: recipe.make(steps, spec, checkpoint, torch.bfloat16) for name, steps in plan.items()}
        got = as_gmm_reads(form, inputs)
        exact = load_tree(spec, checkpoint, torch.float64).flatten(1, -2)
        assert got.shape == exact.shape
        kept = {("mxfp4", f) for f in ("plain", "mxfp4", "int8-g32")} | {("int4", f) for f in ("int8-g32", "int4-g32")}
        kept |= {("fp8", "plain")}  # the fixture's scales are powers of two, as the release says its are
        error = float((got - exact).square().mean().sqrt() / exact.square().mean().sqrt())
        if (native, form) in kept:
            assert error == 0
        else:  # of a normal distribution: int4 by 0.1, mxfp4 by 0.11, int8 by 0.01, bfloat16 by 0.002
            assert 0 < error < {"plain": 0.003, "int8-g32": 0.012, "int4-g32": 0.12, "mxfp4": 0.13}[form]


@pytest.mark.parametrize("form", ["plain", "mxfp4", "int8-g32", "int4-g32"])
def test_recipes_fit_tensors_without_data_and_survive_json(made, form):
    _, checkpoint, experts = made
    for spec in experts:
        for steps in expert_weights(form, spec).values():
            assert recipe.from_json(json.loads(json.dumps(recipe.to_json(steps)))) == steps
            meta = recipe.apply(steps, torch.empty(spec.shape, dtype=torch.bfloat16, device="meta"))
            real = recipe.make(steps, spec, checkpoint, torch.bfloat16)
            assert (meta.shape, meta.dtype) == (real.shape, real.dtype)


@pytest.mark.parametrize("form", ["mxfp4", "int8-g32"])
def test_steps_on_a_loaded_parameter_give_the_same_values(made, form):
    """What a format holds exactly is the same by either way (mxfp4 has more than one way to write a number)."""
    config, checkpoint, experts = made
    if config.quant.format != "mxfp4":
        return
    for spec in experts:
        loaded = load_tree(spec, checkpoint, torch.bfloat16)
        ways = [
            {name: recipe.make(steps, spec, checkpoint, torch.bfloat16) for name, steps in plan.items()}
            | {name: recipe.apply(steps, loaded) for name, steps in plan.items() if way}
            for way in (0, 1)
            for plan in (expert_weights(form, spec),)
        ]
        assert torch.equal(*(as_gmm_reads(form, inputs) for inputs in ways))


def test_a_step_names_the_part_it_takes():
    spec = weight((2, 4, 64), "_ _ _", source=("a.weight", "b.weight"))
    first = {name: steps[0].short() for name, steps in expert_weights("int4-g32", spec).items()}
    assert first == {"weight": "int4_g32.weight", "antiquant_scale": "int4_g32.weight_scale"}


def test_scales_of_mxfp4_come_in_pairs():
    spec = weight((2, 4, 96), "_ _ _", source=("a.weight", "b.weight"))
    with pytest.raises(CompileError, match=r"a\.weight: 96 inputs; .* a multiple of 64"):
        expert_weights("mxfp4", spec)


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
        ("kimi-k2.5", "bf16", 2.054), ("deepseek-v3.2", "native", 0.674), ("deepseek-v3.2", "bf16", 1.344),
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
