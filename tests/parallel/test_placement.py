"""Placements: local shapes, who holds what, and a tensor taken apart and put together again."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kimi_graph.errors import ShardingError
from kimi_graph.parallel import Mesh, Rules, place, place_tree, shard, unshard
from kimi_graph.parallel.simulate import scatter
from kimi_graph.spec import weight

MESH = Mesh.parse("pp=2,dp=2,tp=4,ep=8")
RULES = Rules.of(MESH, {"heads": "tensor", "experts": "experts", "batch": "data", "embed": None, "vocab": "tensor"})


def spec(shape, axes):
    return weight(shape, axes, source="x.weight")


def placed(shape, axes, rules=RULES, padding=None):
    return place("x", spec(shape, axes), rules, torch.float32, padding)


def test_a_placement_has_local_shape_bytes_and_replicas():
    p = placed((8, 3, 12), "heads _ embed")
    assert (p.local, p.bytes, p.replicas) == ((2, 3, 12), 2 * 3 * 12 * 4, 2)
    assert str(p) == "[8@tensor, 3, 12]"
    assert p.whole_over == ("data",)


def test_experts_over_data_and_tensor_count_through_both():
    p = placed((16, 6), "experts embed")
    assert str(p) == "[16@data*tensor, 6]"
    assert p.replicas == 1
    assert [list(p.own(0, rank)) for rank in (0, 1, 7)] == [[0, 1], [2, 3], [14, 15]]


def test_an_expert_is_where_some_rank_owns_it_in_each_stage():
    p = placed((16, 6), "experts embed")
    assert p.where(0, 15) == [7, 15]
    assert p.where(1, 0) == list(range(16))


def test_ranks_of_other_stages_hold_parts_alike():
    p = placed((16, 6), "experts embed")
    assert p.own(0, 8) == p.own(0, 0)
    assert p.holders(3) == [3]


def test_holders_are_the_ranks_with_the_same_part():
    p = placed((8, 12), "heads embed")
    assert p.holders(1) == [1, 5]
    for rank in p.holders(1):
        assert p.own(0, rank) == p.own(0, 1)


dims = st.lists(st.sampled_from(["heads", "embed", "_", "batch"]), min_size=1, max_size=3, unique_by=lambda a: a)


@given(dims, st.sampled_from(["tp=1", "tp=4", "dp=2,tp=2", "dp=2,cp=2,tp=3", "pp=2,dp=2,tp=2"]), st.data())
def test_what_is_taken_apart_is_put_together_again(axes, text, data):
    mesh = Mesh.parse(text)
    rules = Rules.of(mesh, {"heads": "tensor", "batch": "data", "embed": None})
    shape = tuple(rules.ways(a) * data.draw(st.integers(1, 3)) for a in axes)
    x = torch.arange(math.prod(shape)).view(shape)
    p = placed(shape, " ".join(axes), rules)
    parts = [shard(x, p, rank) for rank in range(mesh.world)]
    assert all(tuple(part.shape) == p.local and part.is_contiguous() for part in parts)
    assert torch.equal(unshard(parts, p), x)


@pytest.mark.parametrize("axes", ["heads embed", "experts embed", "batch heads", "_ batch"])
def test_a_tensor_is_taken_apart_as_the_lockstep_run_takes_it(axes):
    p = placed((16, 8), axes)
    x = torch.arange(128.0).view(16, 8)
    mesh = MESH.stage
    for rank, part in enumerate(scatter(mesh, x, p.dims)):
        assert torch.equal(shard(x, p, rank), part)


def test_padding_is_zeros_at_the_end_and_is_cut_off():
    p = placed((10, 2), "vocab embed", padding={("vocab", 10): 12})
    x = torch.ones(10, 2)
    parts = [shard(x, p, rank) for rank in range(MESH.world)]
    assert p.given == (10, 2) and p.shape == (12, 2)
    assert parts[3].tolist() == [[1, 1], [0, 0], [0, 0]]
    assert torch.equal(unshard(parts, p), x)


def test_replicas_that_differ_are_named_and_a_tolerance_lets_them():
    p = placed((4,), "heads")
    parts = [shard(torch.zeros(4), p, rank) for rank in range(MESH.world)]
    parts[5] = parts[5] + 1e-3
    with pytest.raises(ShardingError, match=r"ranks 1 and 5 should hold the same part but differ by 1\.00e-03"):
        unshard(parts, p)
    assert unshard(parts, p, tolerance=1e-2).tolist() == [0, 0, 0, 0]
    parts[5] = parts[5] * float("nan")
    with pytest.raises(ShardingError, match="ranks 1 and 5"):
        unshard(parts, p, tolerance=1e-2)


def test_parts_that_are_missing_or_of_another_shape_are_refused():
    p = placed((4,), "heads")
    with pytest.raises(ShardingError, match="found 1 parts, expected one per rank: 16"):
        unshard([torch.zeros(1)], p)
    with pytest.raises(ShardingError, match=r"rank 0 has shape \[2\], expected \[1\]"):
        unshard([torch.zeros(2)] * 16, p)
    with pytest.raises(ShardingError, match=r"found shape \[5\], expected \[4\]"):
        shard(torch.zeros(5), p, 0)


def test_a_size_that_does_not_divide_and_an_axis_used_twice_are_refused_by_path():
    with pytest.raises(ShardingError, match="x: axis 'heads' has size 6, not divisible by tensor = 4"):
        placed((6,), "heads")
    with pytest.raises(ShardingError, match="x: mesh axis 'tensor' would split both 'heads' and 'vocab'"):
        placed((4, 4), "heads vocab")
    with pytest.raises(ShardingError, match="'ffn' has no rule"):
        placed((4,), "ffn")


def test_a_tree_of_specs_becomes_a_tree_of_placements_with_paths():
    tree = place_tree({"a": spec((8,), "heads"), "b": (spec((3,), "_"),)}, RULES, torch.float16, prefix="layers.3.")
    assert tree["a"].path == "layers.3.a"
    assert tree["b"][0].path == "layers.3.b.0"
    assert tree["a"].bytes == 4


def test_the_padded_rates_of_k3_are_shared_out_by_heads_not_by_what_is_stored():
    """A file holds 128 rates for 96 heads: rank 7 of 8 has heads 84 to 95."""
    rates = weight((96,), "heads", source="A_log", stored=(128,), padding=32)
    rules = Rules.of(Mesh.parse("tp=8"), {"heads": "tensor"})
    assert place("rates", rates, rules, torch.float32).own(0, 7) == range(84, 96)
    rules = Rules.of(Mesh.parse("tp=32"), {"heads": "tensor"})
    assert place("rates", rates, rules, torch.float32).own(0, 31) == range(93, 96)
