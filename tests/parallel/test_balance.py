"""Expert tables: what always holds, how even they are, and that moves lead to them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_graph.errors import ShardingError
from kimi_graph.parallel import balance
from kimi_graph.parallel.balance import Plan, Table, plain_table


@st.composite
def problems(draw):
    ranks, experts = draw(st.integers(1, 6)), draw(st.integers(1, 14))
    least, most = -(-experts // ranks), experts
    slots = ranks * draw(st.integers(least, most))
    load = st.one_of(st.just(0.0), st.floats(0, 1e6), st.integers(0, 10).map(float))
    loads = st.lists(load, min_size=experts, max_size=experts)
    return draw(loads), draw(loads), slots, ranks


def moved(plan: Plan) -> tuple[int, ...]:
    """The old table after the moves, which all read the old table."""
    slots = list(plan.previous.slots)
    for m in plan.moves:
        assert plan.previous.slots[m.source] == m.expert
        slots[m.target] = m.expert
    return tuple(slots)


@given(problems())
@settings(max_examples=300)
def test_a_plan_is_a_legal_table_that_its_moves_make_and_is_never_worse(problem):
    first, second, slots, ranks = problem
    plan = balance(first, slots, ranks)
    again = balance(second, slots, ranks, plan.table)
    for p, loads in ((plan, first), (again, second)):
        assert len(p.table.slots) == slots  # the table itself refuses what is missing, or twice on a rank
        assert p.table.experts == len(loads)
        assert moved(p) == p.table.slots
        assert len({m.target for m in p.moves}) == len(p.moves)
        assert p.skew[1] <= p.skew[0] * (1 + 1e-9)
        assert sum(p.table.loads(loads)) == pytest.approx(sum(loads))
    assert again.previous == plan.table


def test_even_loads_need_no_move():
    plan = balance([1.0] * 16, 16, 4)
    assert plan.moves == ()
    assert plan.skew == (1.0, 1.0)


def test_busy_experts_that_lie_together_are_exchanged_without_copies():
    loads = [10.0, 10, 10, 10, *[1.0] * 12]
    plan = balance(loads, 16, 4)
    assert plan.skew == (pytest.approx(40 / 13), pytest.approx(1.0))
    assert len(plan.moves) == 6  # three experts go out, three come in


@pytest.mark.parametrize("spare", [0, 8, 24])
def test_one_expert_that_gets_everything_is_shared_out_as_far_as_slots_allow(spare):
    loads = [1000.0, *[0.0] * 31]
    plan = balance(loads, 32 + spare, 8)
    copies = len(plan.table.copies[0])
    assert copies == min(8, 1 + spare)
    assert plan.skew[1] == pytest.approx(8 / copies)


def test_skewed_loads_of_k3_become_even_with_1024_slots():
    loads = [1000 / (e + 1) for e in range(896)]  # Zipf's law, and all the busy ones on the first rank
    plan = balance(loads, 1024, 128)
    assert plan.skew[0] > 20
    assert plan.skew[1] < 1.05
    assert "896 experts in 1024 slots of 128 ranks: busiest rank" in str(plan)


def test_a_drift_of_loads_needs_fewer_moves_than_a_new_table():
    loads = [1000 / (e + 1) for e in range(256)]
    plan = balance(loads, 288, 32)
    drifted = [load * (1.3 if e % 2 else 0.8) for e, load in enumerate(loads)]
    again, anew = balance(drifted, 288, 32, plan.table), balance(drifted, 288, 32)
    assert again.skew[0] > 1.05 >= again.skew[1]
    assert len(again.moves) < len(anew.moves) / 2


def test_adversarial_loads_that_alternate_stay_even():
    """Each time the loads are those that the table before is worst at: all on the experts of one rank."""
    plan = balance([1.0] * 32, 40, 8)
    for _ in range(6):
        hot = set(plan.table.by_rank[0])
        loads = [100.0 if e in hot else 1.0 for e in range(32)]
        plan = balance(loads, 40, 8, plan.table)
        assert plan.skew[0] > 3
        assert plan.skew[1] < 1.6  # 5 hot experts and 8 spare slots: 2 or 3 copies each do not come out even on 8 ranks


def test_loads_of_nothing_change_nothing():
    assert balance([0.0] * 8, 12, 4).moves == ()


def test_moves_take_the_nearest_copy_and_know_whether_they_leave_their_rank():
    old = Table((0, 1, 2, 3, 0, 2), 3)
    plan = balance([1.0, 1.0, 1.0, 50.0], 6, 3, old)
    assert all(plan.same_rank(m) == (m.source // 2 == m.target // 2) for m in plan.moves)
    assert len(plan.table.copies[3]) == 3


@pytest.mark.parametrize(
    "loads, slots, ranks, words",
    [
        ([1.0] * 4, 6, 4, "slots: found 6 for 4 experts on 4 ranks; the nearest is 8"),
        ([1.0] * 9, 8, 4, "found 8 for 9 experts; at least 12"),
        ([1.0] * 2, 12, 4, "2 experts, each once on 4 ranks, fill 8"),
        ([1.0, -1.0], 2, 2, "loads: found -1.0, expected numbers from 0 on"),
        ([1.0, float("nan")], 2, 2, "loads: found nan"),
        ([], 4, 2, "for 0 experts"),
    ],
)
def test_what_cannot_be_is_refused(loads, slots, ranks, words):
    with pytest.raises(ShardingError) as e:
        balance(loads, slots, ranks)
    assert words in str(e.value)


def test_tables_that_cannot_be_are_refused():
    with pytest.raises(ShardingError, match="expert 1 has no slot"):
        Table((0, 2), 1)
    with pytest.raises(ShardingError, match="expert 0 is twice on rank 1"):
        Table((0, 1, 0, 0), 2)
    with pytest.raises(ShardingError, match="3 slots do not divide over 2 ranks"):
        Table((0, 1, 2), 2)
    with pytest.raises(ShardingError, match="previous table: 2 experts in 2 slots of 2 ranks, expected 2 in 4 of 2"):
        balance([1.0, 1.0], 4, 2, plain_table(2, 2, 2))
