"""Who does which task: the header that kernels share, compiled as plain C++."""

import ctypes
import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_graph.ops.twin import FOLDER
from kimi_graph.ops.twin.build import compiler, library

SOURCE = """
#include "balance.h"

template <typename Tasks>
static uint32_t Run(Tasks tasks, uint32_t* out)
{
    balance::Task task;
    uint32_t count = 0;
    for (; tasks.Next(task); count++) {
        out[2 * count] = task.row;
        out[2 * count + 1] = task.part;
    }
    return count;
}

// Tasks of one core in its order: rows and parts. `way`: 0 in turn, 1 planned; 2: of one core that takes all.
extern "C" uint32_t deal(uint32_t way, const uint32_t* costs, uint32_t rows, uint32_t each, uint32_t cores,
                         uint32_t core, uint32_t* out)
{
    const auto cost = [costs](uint32_t row) { return costs[row]; };
    if (way == 0) return Run(balance::InTurn(rows, each, cores, core), out);
    if (way == 1) return Run(balance::Tasks<128>(rows, each, cores, core, cost), out);
    balance::Taken<128> taken(rows, each, cost);
    balance::Task task;
    uint32_t count = 0;
    for (uint64_t place = core; taken.At(place, task); place += cores, count++) {
        out[2 * count] = task.row;
        out[2 * count + 1] = task.part;
    }
    return count;
}
"""
IN_TURN, PLANNED, TAKEN = range(3)

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler: g++ or clang++")


@pytest.fixture(scope="module")
def deal(twin_cache):
    """`deal(way, costs, each, cores)`: the tasks of every core, (row, part), in its order."""
    common = FOLDER / "common" / "op_kernel"
    built = library(SOURCE, {}, [common], [common], twin_cache)

    def run(way, costs, each, cores):
        given, found = (ctypes.c_uint32 * max(1, len(costs)))(*costs), []
        for core in range(cores):
            out = (ctypes.c_uint32 * (2 * len(costs) * each + 2))()
            count = built.deal(way, given, len(costs), each, cores, core, out)
            found.append([(out[2 * i], out[2 * i + 1]) for i in range(count)])
        return found

    return run


def loads(found, costs):
    return [sum(costs[row] for row, _ in tasks) for tasks in found]


sizes = {"costs": st.lists(st.integers(0, 10**6), max_size=40), "each": st.integers(1, 12), "cores": st.integers(1, 72)}


@pytest.mark.parametrize("way", [IN_TURN, PLANNED, TAKEN])
@settings(max_examples=60, deadline=None)
@given(**sizes)
def test_every_task_is_done_once(deal, way, costs, each, cores):
    found = deal(way, costs, each, cores)
    assert sorted(t for tasks in found for t in tasks) == [(r, p) for r in range(len(costs)) for p in range(each)]


@settings(max_examples=60, deadline=None)
@given(**sizes)
def test_planned_is_longest_first_to_who_has_least(deal, costs, each, cores):
    """Against the rule in a few lines of Python; and no core has more than the mean and one task."""
    expected, heap = [[] for _ in range(cores)], [(0, core) for core in range(cores)]
    for row in sorted(range(len(costs)), key=lambda r: (-costs[r], r)):
        for part in range(each):
            load, core = heap[0]
            heapq.heapreplace(heap, (load + costs[row], core))
            expected[core].append((row, part))
    found = deal(PLANNED, costs, each, cores)
    assert found == expected
    if costs:
        assert max(loads(found, costs)) <= sum(costs) * each / cores + max(costs)


@settings(max_examples=30, deadline=None)
@given(**sizes)
def test_what_is_taken_falls(deal, costs, each, cores):
    for tasks in deal(TAKEN, costs, each, cores):
        assert [costs[row] for row, _ in tasks] == sorted((costs[row] for row, _ in tasks), reverse=True)


def test_a_long_sequence_among_short_ones_is_left_alone(deal):
    costs = [40, *[10] * 7]
    assert loads(deal(IN_TURN, costs, 1, 4), costs) == [50, 20, 20, 20]
    assert loads(deal(PLANNED, costs, 1, 4), costs) == [40, 30, 20, 20]
