"""Collectives: closed forms, and which algorithm is taken."""

import pytest
import torch

from kimi_graph.compile.targets import target
from kimi_graph.parallel import Mesh
from kimi_graph.parallel.collectives import Issued
from kimi_graph.plan.factors import Factors
from kimi_graph.plan.network import crossing, hops

IDEAL = Factors(network=1.0, collective_us=0.0, message_us=0.0)


def issued(name, mesh, size, axis="tensor"):
    return Issued(name, mesh.atoms(axis), (1, size // 2), torch.bfloat16)


def seconds(name, mesh, size, chip="a2", factors=IDEAL, **given):
    return crossing(issued(name, mesh, size), mesh, target(chip).links, factors, **given)


@pytest.mark.parametrize("tensor, levels", [(2, [2]), (16, [2, 16]), (32, [2, 16, 32]), (768, [2, 16, 768])])
def test_a_group_spans_the_levels_that_its_ranks_lie_in(tensor, levels):
    found = hops(Mesh(tensor=tensor), ("tensor",), target("a3-superpod").links)
    assert [hop.ranks for hop in found] == levels
    assert [hop.inside for hop in found] == [1, *levels[:-1]]


def test_neighbours_along_data_are_a_tensor_group_apart():
    mesh = Mesh(data=2, tensor=16)
    assert [hop.link.name for hop in hops(mesh, mesh.atoms("data"), target("a3").links)] == ["network"]


def test_a_group_of_one_takes_no_time():
    assert seconds("all_reduce", Mesh(), 1 << 20).seconds == 0


def test_a_gather_in_a_host_takes_a_step_and_the_bytes_of_all_others():
    link = target("a2").links[0]
    want = link.latency.value + 7 * (1 << 20) / link.bandwidth.value
    assert seconds("all_gather", Mesh(tensor=8), 1 << 20).seconds == pytest.approx(want)


def test_few_bytes_are_reduced_in_one_shot_and_many_in_two():
    assert seconds("all_reduce", Mesh(tensor=8), 1 << 10).algorithm == "one shot"
    assert seconds("all_reduce", Mesh(tensor=8), 1 << 24).algorithm.startswith("two shots")


def test_many_bytes_cross_the_slow_link_once_and_are_spread_inside():
    size, (pair, host, out) = 1 << 24, target("a3").links
    found = seconds("all_gather", Mesh(tensor=32), size, "a3")
    assert found.algorithm == "by levels"
    moved = size / out.bandwidth.value + 7 * 2 * size / host.bandwidth.value + 16 * size / pair.bandwidth.value
    assert moved < found.seconds < 1.01 * moved  # and three steps


def test_tp32_on_a3_crosses_hosts_and_shows_its_cost():
    for size in (1 << 14, 1 << 20):
        near, far = (seconds("all_reduce", Mesh(tensor=n), size, "a3", Factors()) for n in (16, 32))
        assert far.seconds > 1.4 * near.seconds
    assert seconds("all_reduce", Mesh(tensor=32), 1 << 14, "a3").link == "network"
    assert seconds("all_reduce", Mesh(tensor=32), 1 << 14, "a3-superpod").link == "superpod"


def test_rows_to_experts_take_as_long_as_those_of_the_busiest_rank():
    even, skewed = (seconds("expert_dispatch", Mesh(tensor=8), 1 << 24, skew=s).seconds for s in (1.0, 1.5))
    latency = target("a2").links[0].latency.value
    assert skewed - latency == pytest.approx(1.5 * (even - latency))
