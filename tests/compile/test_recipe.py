"""Recipes: how a weight is made of checkpoint tensors, on real and on meta tensors, and in JSON."""

import json

import pytest
import torch

from kimi_graph import formats
from kimi_graph.compile import recipe
from kimi_graph.compile.recipe import Step
from kimi_graph.errors import BundleError

CASES = {
    "view": (Step("view", (2, 12)), lambda x: x.reshape(2, 12)),
    "slice": (Step("slice", (1, 1, 3)), lambda x: x[:, 1:3]),
    "permute": (Step("permute", (2, 0, 1)), lambda x: x.permute(2, 0, 1)),
    "cast": (Step("cast", ("bfloat16",)), lambda x: x.bfloat16()),
    "exp": (Step("exp"), torch.exp),
    "neg": (Step("neg"), torch.neg),
    "pack": (Step("pack", ("w8", "weight_scale")), lambda x: formats.pack("w8", x)["weight_scale"]),
    "tile": (Step("tile"), recipe.tile),
}
SHAPES = {"tile": (2, 32, 64)}


def test_every_step_has_a_case():
    assert set(CASES) == set(recipe.STEPS)


@pytest.mark.parametrize("kind", CASES)
def test_a_step_is_the_torch_function_of_its_name(kind):
    step, expected = CASES[kind]
    x = torch.randn(SHAPES.get(kind, (4, 3, 2)))
    assert torch.equal(recipe.apply([step], x), expected(x))
    meta = recipe.apply([step], x.to("meta"))
    assert (meta.shape, meta.dtype) == (expected(x).shape, expected(x).dtype)


def test_tiles_are_columns_of_16_rows_by_32_bytes():
    x = torch.arange(2 * 48 * 64).view(2, 48, 64)
    tiles = recipe.tile(x)
    assert tiles.shape == (2, 2, 3, 16, 32)
    assert all(
        int(tiles[e, k // 32, n // 16, n % 16, k % 32]) == int(x[e, n, k])
        for e, n, k in [(0, 0, 0), (1, 17, 33), (0, 47, 31), (1, 5, 63)]
    )
    assert torch.equal(recipe.untile(tiles), x)


def test_steps_are_taken_in_order():
    x = torch.arange(6.0)
    steps = (Step("view", (2, 3)), Step("slice", (0, 1, 2)), Step("neg"))
    assert recipe.apply(steps, x).tolist() == [[-3.0, -4.0, -5.0]]


def test_the_parameter_is_not_changed_and_twice_is_the_same():
    """Public case W10: a transform that ran twice on the same weight."""
    steps, x = (Step("exp"), Step("neg")), torch.randn(4)
    before = x.clone()
    first, second = recipe.apply(steps, x), recipe.apply(steps, x)
    assert torch.equal(first, second)
    assert torch.equal(x, before)


def test_float64_is_not_cast_because_it_stands_for_exact_numbers():
    assert recipe.apply([Step("cast", ("bfloat16",))], torch.ones(2, dtype=torch.float64)).dtype == torch.float64


def test_recipes_survive_json():
    steps = tuple(step for step, _ in CASES.values())
    assert recipe.from_json(json.loads(json.dumps(recipe.to_json(steps)))) == steps


def test_an_unknown_step_is_refused_with_the_known_ones():
    with pytest.raises(
        BundleError, match="'transpose' is not known; known are cast, exp, neg, pack, permute, slice, tile, view"
    ):
        recipe.apply([Step("transpose")], torch.ones(1))


@pytest.mark.parametrize(
    "step, name",
    [(CASES["slice"][0], "slice1_1_3"), (CASES["permute"][0], "permute201"), (CASES["cast"][0], "bfloat16"),
     (CASES["exp"][0], "exp"), (CASES["pack"][0], "w8.weight_scale")],
)  # fmt: skip
def test_a_step_has_a_short_name_for_the_weight_it_makes(step, name):
    assert step.short() == name
