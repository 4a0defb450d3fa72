"""Pipeline stages: where layers are split, and what crosses."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kimi_graph as kg
from kimi_graph.errors import ShardingError
from kimi_graph.models.decoder import schedule
from kimi_graph.models.pipeline import model_stages, stages_of
from kimi_graph.parallel.stages import crossing, parts_by_stage, split


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_no_other_split_has_a_cheaper_dearest_stage(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    ranges = split(costs, stages)
    assert [n for r in ranges for n in r] == list(range(len(costs)))
    assert all(len(r) for r in ranges)
    worst = max(sum(costs[n] for n in r) for r in ranges)
    for cuts in itertools.combinations(range(1, len(costs)), stages - 1):
        edges = [0, *cuts, len(costs)]
        assert worst <= max(sum(costs[a:b]) for a, b in itertools.pairwise(edges))


def test_equal_layers_are_split_evenly_and_the_earlier_stages_are_the_longer():
    assert [len(r) for r in split([5] * 93, 4)] == [24, 24, 24, 21]
    assert [len(r) for r in split([1, 5, 5, 5, 5], 2)] == [3, 2]


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ShardingError, match="pp=4: there are 3 layers, a stage has one or more; nearest 3"):
        split([1, 1, 1], 4)


def test_k3_on_four_stages_is_split_as_published_with_two_four_and_six_closed_blocks():
    """Public case M3."""
    config = kg.load_config("kimi-k3.1-pro")
    stages = model_stages(config, 4, rows=2, tokens=3, sparse=True)
    kinds = [[config.layers[i].kinds[0] for i in s.layers] for s in stages]
    assert [len(k) for k in kinds] == [24, 23, 23, 23]
    assert [k.count("mla") for k in kinds] == [6, 5, 6, 7]
    assert [k.count("kda") for k in kinds] == [18, 18, 17, 16]
    edges = [s.edge.values if s.edge else {} for s in stages]
    assert [list(e) for e in edges[:2]] == [["x", "11.x", "23.x"], ["x", "11.x", "23.x", "35.x", "46.x"]]
    assert [len(e) for e in edges] == [3, 5, 7, 0]
    assert all(spec.shape == (2, 3, 7168) for e in edges for spec in e.values())
    assert [s.edge.bytes if s.edge else 0 for s in stages] == [n * 6 * 7168 * 2 for n in (3, 5, 7, 0)]


@pytest.mark.parametrize("stages", [2, 3, 5, 93])
def test_every_stage_is_given_all_that_it_reads(stages):
    """What a stage reads is written there, handed on to it by the one before, or an input of the first."""
    uses = schedule(kg.load_config("kimi-k3"))
    parts = parts_by_stage(uses, split([1] * 93, stages))
    assert [use for part in parts for use in part] == list(uses)
    given = {"tokens"}
    for i, part in enumerate(parts):
        known = set(given)
        for use in part:
            assert set(use.reads) <= known
            known |= set(use.writes)
        given = set(crossing(parts, i))
        assert given <= known
    assert given == set()


def test_an_ordinary_model_hands_on_its_hidden_state_alone():
    stages = model_stages(kg.load_config("kimi-linear-48b"), 3)
    assert [list(s.edge.values) if s.edge else [] for s in stages] == [["8.x"], ["17.x"], []]


def test_a_selection_crosses_only_into_layers_that_share_it():
    config = kg.load_config("glm-5.2")
    uses, count = schedule(config, sparse=True), len(config.layers)
    for cut in range(1, count):
        parts = parts_by_stage(uses, [range(cut), range(cut, count)])
        shares = config.layers[cut].mixer.indexer.shared
        assert ("selected" in crossing(parts, 0)) == shares
    stages = model_stages(config, 3, sparse=True)
    spec = stages[0].edge.values["selected"]
    assert (spec.shape, spec.dtype) == ((1, 1, 2048), torch.int32)


def test_parameters_are_in_the_stage_of_their_layer_and_the_ends_at_the_ends():
    config = kg.load_config("kimi-k3")
    stages = model_stages(config, 4)
    where = {path: stages_of(path, config, stages) for path in ("embed", "head", "norm", "out_res.norm", "vision.grid")}
    assert where == {"embed": (0,), "head": (3,), "norm": (3,), "out_res.norm": (3,), "vision.grid": (0,)}
    assert stages_of("layers.24.kda.query", config, stages) == (1,)
    assert stages_of("s.layers.92.mla.latent", config, stages) == (3,)
