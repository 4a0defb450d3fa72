"""Rules: what splits a logical axis, and that every axis has a rule."""

import pytest

from kimi_graph.errors import ShardingError
from kimi_graph.parallel import Mesh, Rules

MESH = Mesh.parse("dp=4,tp=8,ep=16")


def test_a_direction_stands_for_its_atomic_axes():
    rules = Rules.of(MESH, {"batch": "data", "heads": "tensor", "experts": "experts", "embed": None})
    assert rules.on("batch") == ("data_outer", "data_inner")
    assert rules.on("experts") == ("data_inner", "tensor")
    assert rules.on("embed") == ()
    assert rules.ways("experts") == 16


def test_axes_of_one_device_do_not_split():
    rules = Rules.of(Mesh.parse("tp=2"), {"batch": ("data", "context"), "heads": "tensor"})
    assert rules.on("batch") == ()
    assert rules.on("heads") == ("tensor",)


def test_a_dim_without_a_name_is_whole_and_an_axis_without_a_rule_is_an_error():
    rules = Rules.of(MESH, {"heads": "tensor"})
    assert rules.on("_") == rules.on(None) == ()
    with pytest.raises(ShardingError, match="'ffn' has no rule"):
        rules.on("ffn")


@pytest.mark.parametrize(
    "axes, words", [(("rows",), "has no axis 'rows'"), (("tensor", "tensor"), "can split a dim once")]
)
def test_a_rule_of_axes_that_are_not_there_or_twice_there_is_refused(axes, words):
    with pytest.raises(ShardingError, match=words):
        Rules(MESH, {"heads": axes})


def test_changed_rules_keep_the_others_and_print_as_a_table():
    rules = Rules.of(MESH, {"heads": "tensor", "vocab": "tensor"}).changed(heads=None)
    assert rules.on("heads") == ()
    assert rules.on("vocab") == ("tensor",)
    assert str(rules) == "heads  -\nvocab  tensor"
