// Which core does which task, where tasks take unequal time: sequences of a packed batch, queries with other histories.
//
// There are rows of `each` equal tasks; what a task of a row costs is known when the kernel starts, from tensors on the
// device (how many tokens a sequence has). A graph is tiled without their values, so it is not op_host that plans, but
// every core for itself, by the same rule and with the same result: no core waits for another, and the cores of a group
// agree.
//
// Plain C++: kernels and tests include it. The plan is a few numbers on the stack, as a Cube core has no UB.
#pragma once

#include <cstdint>

#ifdef __NPU_ARCH__  // a kernel
#include "kernel_operator.h"
#define BALANCE_FUNCTION __aicore__ inline
#else
#define BALANCE_FUNCTION inline
#endif

namespace balance {

struct Task {
    uint32_t row, part;  // the part-th of the row's equal tasks
};

// `most`: rows that are planned; of more, tasks are so many for a core that they even out in turn.
constexpr uint32_t MOST_CORES = 128;

// ---- a heap: the smallest of `count` words is the first ----

BALANCE_FUNCTION void Sink(uint64_t* words, uint32_t count, uint32_t at, uint64_t word)
{
    for (uint32_t child = 2 * at + 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count && words[child + 1] < words[child]) {
            child++;
        }
        if (words[child] >= word) {
            break;
        }
        words[at] = words[child];
        at = child;
    }
    words[at] = word;
}

// Rows by what a task of theirs costs, the most first, earlier ones first among equals.
template <uint32_t most>
class ByCost {
public:
    BALANCE_FUNCTION ByCost() {}
    // `cost(row)`: of one task, less than 2^32; at most `most` rows.
    template <typename Cost>
    BALANCE_FUNCTION ByCost(uint32_t rows, Cost cost) : left(rows)
    {
        for (uint32_t row = 0; row < rows; row++) {
            words[row] = (uint64_t(UINT32_MAX - cost(row)) << 32) | row;
        }
        for (uint32_t i = rows / 2; i > 0; i--) {
            Sink(words, rows, i - 1, words[i - 1]);
        }
    }
    BALANCE_FUNCTION bool Empty() const { return left == 0; }
    BALANCE_FUNCTION uint32_t Row() const { return uint32_t(words[0]); }
    BALANCE_FUNCTION uint32_t Cost() const { return UINT32_MAX - uint32_t(words[0] >> 32); }
    BALANCE_FUNCTION void Pop()
    {
        left--;
        if (left) {
            Sink(words, left, 0, words[left]);
        }
    }

private:
    uint64_t words[most];
    uint32_t left = 0;
};

// In turn, whatever a task costs: task i is core i % cores's.
class InTurn {
public:
    BALANCE_FUNCTION InTurn() {}
    BALANCE_FUNCTION InTurn(uint32_t rows, uint32_t each, uint32_t cores, uint32_t core)
        : all(uint64_t(rows) * each), at(core), each(each), cores(cores)
    {
    }
    BALANCE_FUNCTION bool Next(Task& task)
    {
        if (at >= all) {
            return false;
        }
        task.row = uint32_t(at / each);
        task.part = uint32_t(at % each);
        at += cores;
        return true;
    }

private:
    uint64_t all = 0, at = 0;
    uint32_t each = 1, cores = 1;
};

// Longest first: of tasks in falling order each goes to the core that has least, the first of equals.
template <uint32_t most>
class LongestFirst {
public:
    BALANCE_FUNCTION LongestFirst() {}
    template <typename Cost>
    BALANCE_FUNCTION LongestFirst(uint32_t rows, uint32_t each, uint32_t cores, uint32_t core, Cost cost)
        : order(rows, cost), each(each), cores(cores), core(core)
    {
        for (uint32_t i = 0; i < cores; i++) {
            loads[i] = i;  // a load above a core's number; all are 0
        }
    }
    // The core's next task; false: it has done all of its own.
    BALANCE_FUNCTION bool Next(Task& task)
    {
        for (; !order.Empty(); order.Pop(), part = 0) {
            const uint64_t cost = uint64_t(order.Cost()) * MOST_CORES;
            while (part < each) {
                const uint64_t least = loads[0];
                Sink(loads, cores, 0, least + cost);
                part++;
                if (least % MOST_CORES == core) {
                    task.row = order.Row();
                    task.part = part - 1;
                    return true;
                }
            }
        }
        return false;
    }

private:
    ByCost<most> order;
    uint64_t loads[MOST_CORES];
    uint32_t each = 1, cores = 1, core = 0, part = 0;
};

// How kernels share out their tasks: planned where there are few rows, in turn where there are many. BALANCE=0 makes it in
// turn always, to compare (benchmarks/balance.py).
#ifndef BALANCE
#define BALANCE 1
#endif
template <uint32_t most>
class Tasks {
public:
    BALANCE_FUNCTION Tasks() {}
    template <typename Cost>
    BALANCE_FUNCTION Tasks(uint32_t rows, uint32_t each, uint32_t cores, uint32_t core, Cost cost)
        : planned(BALANCE && rows <= most)
    {
        if (planned) {
            longest = LongestFirst<most>(rows, each, cores, core, cost);
        } else {
            turn = InTurn(rows, each, cores, core);
        }
    }
    BALANCE_FUNCTION bool Next(Task& task) { return planned ? longest.Next(task) : turn.Next(task); }

private:
    bool planned = false;
    LongestFirst<most> longest;
    InTurn turn;
};

// Taken from a counter that all cores share, in falling order: a core that is done takes the next task.
template <uint32_t most>
class Taken {
public:
    BALANCE_FUNCTION Taken() {}
    template <typename Cost>
    BALANCE_FUNCTION Taken(uint32_t rows, uint32_t each, Cost cost) : order(rows, cost), each(each)
    {
    }
    // The task at a place of the order; places that a core asks for rise.
    BALANCE_FUNCTION bool At(uint64_t place, Task& task)
    {
        for (; !order.Empty() && place >= passed + each; order.Pop()) {
            passed += each;
        }
        if (order.Empty()) {
            return false;
        }
        task.row = order.Row();
        task.part = uint32_t(place - passed);
        return true;
    }

private:
    ByCost<most> order;
    uint64_t passed = 0;
    uint32_t each = 1;
};

}  // namespace balance
