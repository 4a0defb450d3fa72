import pytest

from kimi_graph.plan.routing import routing


def test_without_spread_many_rows_are_even_and_few_are_not():
    many, few = routing(64, 1_000_000, 8, spread=0.0), routing(64, 64, 8, spread=0.0)
    assert many.median.rows == pytest.approx(1.0, abs=0.02)
    assert few.high.rows > few.median.rows > 1.2


def test_the_quantiles_are_in_order_and_never_below_even():
    found = routing(896, 4096, 32)
    assert 1 == found.even.rows <= found.median.rows <= found.high.rows
    assert 0 < found.even.touched <= found.median.touched <= found.high.touched <= 1


def test_popular_experts_make_a_rank_busier_and_copies_less_so():
    plain, copied = routing(64, 100_000, 16, spread=1.0), routing(64, 100_000, 16, redundant=64, spread=1.0)
    assert plain.median.rows > 1.5 and copied.median.rows < 1 + (plain.median.rows - 1) / 2


def test_with_one_choice_a_rank_touches_one_expert_at_most():
    assert routing(896, 1, 32).even.touched == pytest.approx(1 / 896, rel=1e-2)
