"""Claims: what is computed without a trace; the whole table on request, as it takes a minute."""

import pytest

from kimi_graph.compile.targets import target
from kimi_graph.plan.claims import CHUNKS, MODEL, all_to_all, check_claims, expert_seconds, linear, widest
from kimi_graph.plan.factors import Factors
from kimi_graph.read_config import load_config


@pytest.mark.parametrize("name, ranks", [("a3-superpod", 512), ("950-superpod", 1024)])
def test_experts_are_on_as_many_ranks_as_divide_their_slots_within_what_the_pair_takes(name, ranks):
    assert widest(target(name), load_config(MODEL)) == ranks  # 1,024 slots: 896 experts and 128 copies


def test_rows_take_longer_to_reach_more_ranks_and_not_for_want_of_bandwidth_alone():
    config, t = load_config(MODEL), target("950-superpod")
    times = [all_to_all(t, n, 16, config, Factors()) for n in (64, 256, 1024)]
    assert times == sorted(times)
    free = [all_to_all(t, n, 16, config, Factors(message_us=0)) for n in (64, 1024)]
    assert free[1] < 1.1 * free[0]  # a message to every peer is what ends it


def test_in_chunks_the_shorter_of_sending_and_products_is_hidden_but_for_one_chunk():
    found = linear(Factors())
    assert found.rows and "rate of 64 dies" in found.verdict
    config, t, factors = load_config(MODEL), target("a3-superpod"), Factors()
    sent, made = (f(t, 64, 256, config, factors) for f in (all_to_all, expert_seconds))
    want = max(sent, made) + min(sent, made) / CHUNKS
    (row,) = [r for r in found.rows if r[:3] == ("a3-superpod", "256", "64")]
    assert row[6] == f"{1e6 * want:,.0f} us"


@pytest.mark.heavy
def test_a_million_tokens_need_more_than_a_host_and_less_than_a_superpod():
    found = {c.claim: c for c in check_claims(Factors()).claims}
    million = found["a million tokens are prefilled in under 60 s on one machine"]
    assert million.verdict.startswith("holds on one a3-superpod, 950-superpod")
    assert [row[2] for row in million.rows[:2]] == ["-", "-"]
    scale = found["scale on paper"]
    assert {row[1] for row in scale.rows} >= {"128", "1,024", "8,192"}
