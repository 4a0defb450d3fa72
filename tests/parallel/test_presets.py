"""Rules of the models: which axes are split in which phase, and that what is whole says why."""

import pytest

import kimi_graph as kg
from kimi_graph.errors import ShardingError
from kimi_graph.parallel import Mesh, preset


@pytest.fixture(scope="module")
def k31():
    return kg.load_config("kimi-k3.1-pro")


def test_heads_widths_vocabulary_and_experts_are_split_and_hidden_states_are_whole(k31):
    rules = preset(k31, Mesh.parse("pp=4,dp=4,tp=32,ep=64"))
    for axis in ("heads", "ffn", "vocab", "expert_embed"):
        assert rules.on(axis) == ("tensor",)
    assert rules.on("experts") == ("data_inner", "tensor")
    assert rules.on("batch") == rules.on("slots") == rules.on("pages") == ("data_outer", "data_inner")
    for axis in ("embed", "key", "latent", "query_latent", "gate_rank", "expert_ffn", "index_heads"):
        assert rules.on(axis) == ()
        assert rules.why[axis]


def test_states_are_placed_alike_in_all_phases(k31):
    for split_cache in (False, True):
        mesh = Mesh.parse("dp=2,cp=2,tp=4")
        each = [preset(k31, mesh, phase, split_cache=split_cache) for phase in ("vision", "prefill", "decode")]
        for axis in ("slots", "pages", "heads", "latent", "cached"):
            assert len({rules.on(axis) for rules in each}) == 1


def test_queries_and_rows_of_experts_are_split_over_context_in_prefill_alone_and_caches_always(k31):
    mesh = Mesh.parse("cp=4,tp=2")
    prefill, decode = preset(k31, mesh, "prefill"), preset(k31, mesh, "decode")
    for axis in ("queries", "token"):
        assert (prefill.on(axis), decode.on(axis)) == (("context",), ())
    for axis in ("pages", "cached"):
        assert prefill.on(axis) == decode.on(axis) == ("context",)
    assert prefill.on("sequence") == decode.on("sequence") == ()


def test_the_indexer_splits_its_queries_in_prefill_and_the_sequence_in_decode(k31):
    mesh = Mesh.parse("cp=2,tp=4")
    prefill, decode = preset(k31, mesh, "prefill"), preset(k31, mesh, "decode")
    assert prefill.on("index_queries") == ("context", "tensor")
    assert (decode.on("index_queries"), decode.on("cached")) == ((), ("context",))


def test_caches_split_over_tensor_leave_attention_all_heads(k31):
    rules = preset(k31, Mesh.parse("cp=2,tp=4"), split_cache=True)
    assert rules.on("pages") == rules.on("cached") == ("context", "tensor")
    assert (rules.on("heads"), rules.on("attn_heads")) == (("tensor",), ())


@pytest.mark.parametrize(
    "text, gathered, sent",
    [
        ("dp=4,tp=8", (), ("data", "tensor")),
        ("dp=4,tp=8,ep=16", ("data_outer",), ("data_outer", "data_inner", "tensor")),
        ("dp=4,tp=8,ep=8", ("data",), ("data", "tensor")),
        ("dp=4,tp=8,ep=4", ("data",), ("data", "tensor_outer", "tensor_inner")),
    ],
)
def test_rows_are_whole_along_their_experts_or_sent_to_them(k31, text, gathered, sent):
    mesh = Mesh.parse(text)
    assert preset(k31, mesh).on("token") == gathered
    assert preset(k31, mesh, exchange=True).on("token") == sent
    assert preset(k31, mesh, exchange=True).on("expert_embed") == ()
    assert not set(gathered) & set(mesh.atoms("experts"))


@pytest.mark.parametrize("tensor", [1, 2, 3, 4, 6, 12])
def test_a_tower_of_12_heads_is_split_where_they_divide(tensor):
    config = kg.load_config("kimi-k3")
    assert preset(config, Mesh(tensor=tensor), "vision").ways("vision_heads") == tensor


@pytest.mark.parametrize("tensor", [8, 16, 32])
def test_a_tower_of_12_heads_is_whole_elsewhere_and_says_so_and_the_text_is_split(tensor):
    """Public case M4."""
    rules = preset(kg.load_config("kimi-k3"), Mesh(tensor=tensor), "vision")
    assert rules.on("vision_heads") == rules.on("vision_ffn") == ()
    assert rules.why["vision_heads"] == (
        f"the tower's 12 heads do not divide over tp={tensor}: every rank computes all of it"
    )
    assert rules.ways("heads") == tensor


def test_widths_of_a_tower_or_of_latent_experts_that_do_not_divide_are_whole_and_say_so():
    rules = preset(kg.load_config("kimi-k3"), Mesh(tensor=3))
    assert rules.on("vision_heads") == ("tensor",)
    assert rules.on("vision_ffn") == rules.on("expert_embed") == ()
    assert "4,096 channels do not divide over tp=3" in rules.why["vision_ffn"]
    assert "3,584 does not divide over tp=3" in rules.why["expert_embed"]


def test_a_phase_that_a_model_does_not_have_is_refused():
    with pytest.raises(ShardingError, match="phase 'vision': the phases of kimi-linear-48b are prefill, decode"):
        preset(kg.load_config("kimi-linear-48b"), Mesh(), "vision")
    with pytest.raises(ShardingError, match="the phases of kimi-k3 are vision, prefill, decode"):
        preset(kg.load_config("kimi-k3"), Mesh(), "training")
