"""Legality: every size that does not divide, with remedies that are true."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kimi_graph as kg
from kimi_graph.errors import ShardingError
from kimi_graph.models.decoder import model_specs
from kimi_graph.parallel import Mesh, Rules, place_tree, preset
from kimi_graph.parallel.legality import (
    Size,
    faults,
    legal_meshes,
    nearest_tensor,
    pad,
    require,
    sizes_of,
)
from kimi_graph.spec import weight
from kimi_graph.tree import leaves


@pytest.fixture(scope="module")
def k3():
    return kg.load_config("kimi-k3")


@pytest.fixture(scope="module")
def sizes(k3):
    return sizes_of(model_specs(k3), k3.dtype)


def found(k3, sizes, text, **kwargs):
    mesh = Mesh.parse(text)
    return faults(sizes, preset(k3, mesh, **kwargs))


def test_64_ways_of_96_heads_are_refused_with_the_legal_ones_and_the_nearest(k3, sizes):
    """Public case M1."""
    (fault,) = found(k3, sizes, "tp=64")
    assert str(fault).startswith("layers.0.kda.query (and 923 more): heads=96 does not divide over 64")
    assert "Legal tp: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96; nearest 48" in str(fault)
    assert "dp=2,tp=32" in str(fault)
    with pytest.raises(ShardingError, match="nearest 48"):
        require([fault])


@pytest.mark.parametrize("text", ["tp=32", "pp=4,tp=32", "dp=4,tp=16", "pp=4,dp=4,tp=32,ep=128", "cp=4,tp=8"])
def test_the_meshes_of_k3s_documentation_and_64_ranks_of_attention_16_are_legal(k3, sizes, text):
    """Public cases M1 (dp=4,tp=16) and M3 (pp=4,tp=32)."""
    assert found(k3, sizes, text) == []
    require([])


def test_faults_come_all_at_once_one_line_each(k3, sizes):
    every = found(k3, sizes, "tp=80")
    assert [f.size.axis for f in every] == ["heads", "ffn", "experts", "ffn"]
    with pytest.raises(ShardingError) as e:
        require(every)
    assert len(str(e.value).splitlines()) == 4


def test_more_groups_of_experts_than_divide_name_the_nearest_and_what_padding_costs(k3, sizes):
    (fault,) = found(k3, sizes, "dp=32,tp=32")
    per_expert = 3 * 3072 * 3584 * 2 * 92  # bytes of one more expert in each of 92 layers
    assert "nearest 128, with copies over the rest" in str(fault)
    assert f"--pad: 1,024 physical experts, copies of busy ones or empty (+128, {128 * per_expert:,} bytes" in str(
        fault
    )


def test_padded_sizes_are_no_faults_and_placed(k3, sizes):
    rules = preset(k3, Mesh.parse("tp=3"))
    padding = pad(sizes, rules)
    assert padding == {("vocab", 163840): 163842, ("experts", 896): 897}
    assert [f.size.axis for f in faults(sizes, rules)] == ["vocab", "experts"]
    assert faults(sizes, rules, padding) == []
    placed = place_tree(model_specs(k3), rules, k3.dtype, padding)
    assert placed.embed.shape == (163842, 7168)
    assert placed.layers[1].moe.router.shape == (896, 7168)  # the router knows the model's own experts alone


def test_widths_and_heads_are_never_padded(k3, sizes):
    assert {axis for axis, _ in pad(sizes, preset(k3, Mesh.parse("tp=80")))} == {"experts"}


def test_more_experts_than_the_dispatch_takes_are_said(k3, sizes):
    (fault,) = found(k3, sizes, "dp=43,tp=32")
    assert "1,376 physical experts" in str(fault) and "too many for CANN's dispatch" in str(fault)


def test_a_batch_that_does_not_divide_names_its_neighbours():
    """Public case M10."""
    rules = Rules.of(Mesh.parse("dp=32"), {"batch": "data"})
    (fault,) = faults([Size(axis="batch", size=31, path="--batch", count=0)], rules)
    assert str(fault) == "--batch: batch=31 does not divide over 32 (rule batch -> data). Nearest: 32"


@given(st.integers(1, 400), st.integers(1, 64))
def test_the_nearest_size_named_divides_and_none_is_nearer(size, tensor):
    mesh = Mesh(tensor=tensor, experts=1)
    rules = Rules.of(mesh, {"heads": "tensor"})
    every = faults([Size(axis="heads", size=size, path="p")], rules)
    assert bool(every) == (size % tensor != 0)
    if every:
        near = int(str(every[0]).split("nearest ")[1].split(";")[0])
        assert size % near == 0
        assert not any(size % n == 0 for n in range(1, 2 * tensor) if abs(n - tensor) < abs(near - tensor))
        inner = math.gcd(size, tensor)
        assert (f"tp={inner}" in every[0].remedies[-1]) == (inner > 1)


def test_sizes_are_counted_over_the_tree_and_unnamed_dims_are_not():
    specs = {"a": weight((4, 6), "heads _", source="a"), "b": weight((4, 2), "heads embed", source="b")}
    heads, embed = sizes_of(specs, torch.float32, prefix="layers.0.")
    assert (heads.axis, heads.size, heads.path, heads.count, heads.bytes_per_index) == ("heads", 4, "layers.0.a", 2, 32)
    assert (embed.axis, embed.count, embed.bytes_per_index) == ("embed", 1, 16)


def test_an_axis_without_a_rule_is_refused():
    with pytest.raises(ShardingError, match="'heads' has no rule"):
        faults([Size(axis="heads", size=4, path="p")], Rules.of(Mesh(), {}))


@pytest.mark.parametrize("devices", [1, 6, 16])
def test_legal_meshes_are_all_those_that_place_every_parameter(devices):
    config = kg.load_config("kimi-linear-48b")
    specs = model_specs(config)
    listed = legal_meshes(sizes_of(specs), devices, lambda m: preset(config, m), stages=len(config.layers))
    assert listed and all(mesh.world == devices for mesh in listed)
    for mesh in listed:
        place_tree(specs, preset(config, mesh), config.dtype)
    taken = {(m.pipe, m.data, m.tensor) for m in listed}
    for pipe in range(1, devices + 1):
        for tensor in range(1, devices + 1):
            if devices % (pipe * tensor) or (pipe, devices // pipe // tensor, tensor) in taken:
                continue
            with pytest.raises(ShardingError):
                place_tree(specs, preset(config, Mesh(pipe=pipe, tensor=tensor)), config.dtype)


def test_the_nearest_tensor_size_divides_everything(k3, sizes):
    assert nearest_tensor(sizes, Mesh.parse("tp=64"), lambda m: preset(k3, m)) == 32
    for size, best in ((7, 7), (1, None)):
        odd = [Size(axis="heads", size=size, path="p")]
        assert nearest_tensor(odd, Mesh(tensor=2), lambda m: Rules.of(m, {"heads": "tensor"})) == best


@pytest.mark.parametrize(
    "name", ["kimi-linear-48b", "kimi-k3", "kimi-k3.1-pro", "kimi-k2.5", "deepseek-v3.2", "glm-5.2"]
)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_every_axis_of_every_model_has_a_rule_in_every_phase(name, phase):
    config = kg.load_config(name)
    for exchange in (False, True):
        rules = preset(config, Mesh.parse("dp=2,cp=2,tp=2"), phase, exchange=exchange)
        for path in leaves(model_specs(config)):
            for axis in path.axes:
                rules.on(axis)
        assert set(rules.why) == set(rules.mapping)
