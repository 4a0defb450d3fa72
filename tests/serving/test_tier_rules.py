"""The rules of benchmarks/tiers.py: the engine's own, and what is compared with them."""

import dataclasses
import importlib.util
import random
import sys
from pathlib import Path

import pytest

import kimi_graph

SCRIPT = Path(kimi_graph.__file__).resolve().parents[1] / "benchmarks/tiers.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("benchmark_of_tiers", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def trace_of(bench, name, count, seed=0):
    made = list(bench.TRACES[name](bench.Maker(random.Random(seed)), count))
    for piece in (piece for request in made for piece in request):
        piece.reads += 1
    return made


def test_with_room_for_all_every_rule_finds_all_that_was_seen(bench):
    trace = trace_of(bench, "turns", 60)
    seen, known = 0, set()
    for request in trace:
        pages = bench.pages_of(request)
        seen += sum(page in known for page in pages)
        known.update(pages)
    for rule, result in bench.results_of(trace, 10**6, False).items():
        assert result.found == seen, rule


def test_pages_behind_a_hole_are_not_found(bench):
    piece = bench.Piece([1, 2, 3, 4], 0.0, reads=2)
    rule = bench.Lru(10)
    bench.replay([[piece]], rule, False, lambda request: None)
    del rule.keys[2, 0]
    result = bench.replay([[piece]], rule, False, lambda request: None)
    assert (result.asked, result.found, result.moved) == (4, 1, 1 + 1)  # one is loaded, one stored again


def test_a_prefix_is_found_where_a_memory_is(bench):
    first, more, other = (bench.Piece(pages, 0.0, reads=1) for pages in ([1, 2, 3], [4], [5]))
    rule = bench.Lru(100)
    found = [
        bench.replay([r], rule, True, lambda request: None).found for r in ([first, more], [first, other], [first])
    ]
    assert found == [0, 0, 0]  # the only memory was after 4
    found = [
        bench.replay([r], rule, True, lambda request: None).found for r in ([first, more], [first, other], [first])
    ]
    assert found == [4, 4, 3]


def test_scores_never_take_what_came_in_last(bench):
    """Ten keys, in a room for ten; only what is old and was selected least goes."""
    rule = bench.Scored(10)
    for n in range(10):
        rule.insert((n, 0))
    rule.observe({0: 5.0, 1: 1.0, 2: 3.0, 3: 4.0, 4: 2.0})
    assert rule.evict(2, ()) == [(1, 0), (4, 0)]
    assert rule.evict(9, ()) is None
    assert len(rule.keys) == 8


def test_a_page_counts_as_much_as_what_needs_it(bench):
    request = [bench.Piece([1] * 1, 0.0, reads=1), bench.Piece(list(range(2, 30)), 2.0, reads=9)]
    chain, alone = (list(bench.counts_of(request, 0.9, alone=alone).values()) for alone in (False, True))
    assert chain == sorted(chain, reverse=True)
    assert alone[0] < chain[0] == max(alone)


class Engines:
    """A policy of the engine, as the replay calls a rule."""

    def __init__(self, policy):
        from vllm.v1.kv_offload.base import ReqContext

        self.policy, self.room, self.context = policy, policy.cache_capacity, ReqContext("r")

    def __contains__(self, key):
        return self.policy.get(key) is not None

    def __len__(self):
        import vllm.v1.kv_offload.cpu.policies.arc as arc

        own = self.policy
        return len(own.t1) + len(own.t2) if isinstance(own, arc.ARCCachePolicy) else len(own.chunks)

    def insert(self, key):
        from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

        status = ChunkStatus(0)
        status.ref_cnt = 0
        self.policy.insert(key, status)

    def missed(self, keys):
        type(self.policy).on_store_miss(self.policy, keys, self.context)

    def finished(self, keys, found):
        for place, key in enumerate(keys):
            self.context.set_offload_key_position(key, place)
        self.policy.on_request_finished([keys], {*keys} - {*found}, {*found}, self.context)

    def evict(self, count, kept):
        taken = self.policy.evict(count, set(kept))
        return None if taken is None else [key for key, _ in taken]


@pytest.mark.serving
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("rule", ["lru", "arc"])
@pytest.mark.parametrize("name", ["turns", "documents", "tools"])
def test_rules_are_the_engines_own(bench, name, rule):
    from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

    ours = {"lru": bench.Lru, "arc": bench.Arc}[rule](400)
    theirs = Engines(CachePolicyFactory.get_cache_policy_cls(rule)(400))
    for request in trace_of(bench, name, 120):
        for recurrent in (False, True):
            made = [bench.replay([request], r, recurrent, lambda request: None) for r in (ours, theirs)]
            assert dataclasses.astuple(made[0]) == dataclasses.astuple(made[1])
    assert len(ours) == len(theirs) > 300  # some had to leave
