// Which core does which task, where tasks take unequal time: sequences of a packed batch, queries with other histories.
//
// There are rows of `each` equal tasks; what a task of a row costs is known when the kernel starts, from tensors on the
// device (how many tokens a sequence has). A graph is tiled without their values, so it is not op_host that plans, but
// every core for itself, by the same rule and with the same result: no core waits for another.
//
// Plain C++: kernels and tests include it. `Words` is room for numbers of 64 bits, RoomOf(rows, cores) of them, with
// GetValue and SetValue of a LocalTensor.
#pragma once

#include <cstdint>

#ifdef __NPU_ARCH__
#define BALANCE_FUNCTION __aicore__ inline
#else
#define BALANCE_FUNCTION inline
#endif

namespace balance {

struct Task {
    uint32_t row, part;  // the part-th of the row's equal tasks
};

constexpr uint32_t MOST_CORES = 256;

BALANCE_FUNCTION uint32_t RoomOf(uint32_t rows, uint32_t cores) { return rows + cores; }

// A heap in words [first, first + count): the smallest on top.
template <typename Words>
class Heap {
public:
    BALANCE_FUNCTION Heap() {}
    BALANCE_FUNCTION Heap(const Words& words, uint32_t first, uint32_t count) : words(words), first(first), count(count) {}

    // What is in the words, put into order.
    BALANCE_FUNCTION void Make()
    {
        for (uint32_t i = count / 2; i > 0; i--) {
            Sink(i - 1, words.GetValue(first + i - 1));
        }
    }
    BALANCE_FUNCTION bool Empty() const { return count == 0; }
    BALANCE_FUNCTION uint64_t Top() const { return words.GetValue(first); }
    BALANCE_FUNCTION void Replace(uint64_t word) { Sink(0, word); }
    BALANCE_FUNCTION void Pop()
    {
        count--;
        if (count) {
            Sink(0, words.GetValue(first + count));
        }
    }

private:
    BALANCE_FUNCTION void Sink(uint32_t at, uint64_t word)
    {
        for (uint32_t child = 2 * at + 1; child < count; child = 2 * at + 1) {
            uint64_t least = words.GetValue(first + child);
            if (child + 1 < count) {
                const uint64_t other = words.GetValue(first + child + 1);
                if (other < least) {
                    least = other;
                    child++;
                }
            }
            if (least >= word) {
                break;
            }
            words.SetValue(first + at, least);
            at = child;
        }
        words.SetValue(first + at, word);
    }

    Words words;
    uint32_t first = 0, count = 0;
};

// Rows by what a task of theirs costs, the most first, earlier ones first among equals.
template <typename Words>
class ByCost {
public:
    BALANCE_FUNCTION ByCost() {}
    // `cost(row)`: of one task.
    template <typename Cost>
    BALANCE_FUNCTION ByCost(const Words& words, uint32_t rows, Cost cost) : heap(words, 0, rows)
    {
        Words to = words;
        for (uint32_t row = 0; row < rows; row++) {
            to.SetValue(row, (uint64_t(UINT32_MAX - cost(row)) << 32) | row);
        }
        heap.Make();
    }
    BALANCE_FUNCTION bool Empty() const { return heap.Empty(); }
    BALANCE_FUNCTION uint32_t Row() const { return uint32_t(heap.Top()); }
    BALANCE_FUNCTION uint32_t Cost() const { return UINT32_MAX - uint32_t(heap.Top() >> 32); }
    BALANCE_FUNCTION void Pop() { heap.Pop(); }

private:
    Heap<Words> heap;
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
template <typename Words>
class Planned {
public:
    BALANCE_FUNCTION Planned() {}
    template <typename Cost>
    BALANCE_FUNCTION Planned(const Words& words, uint32_t rows, uint32_t each, uint32_t cores, uint32_t core, Cost cost)
        : order(words, rows, cost), loads(words, rows, cores), each(each), core(core)
    {
        Words to = words;
        for (uint32_t i = 0; i < cores; i++) {
            to.SetValue(rows + i, i);  // a load above a core's number; all are 0
        }
    }
    // The core's next task; false: it has done all of its own.
    BALANCE_FUNCTION bool Next(Task& task)
    {
        for (; !order.Empty(); order.Pop(), part = 0) {
            const uint64_t cost = uint64_t(order.Cost()) * MOST_CORES;
            while (part < each) {
                const uint64_t least = loads.Top();
                loads.Replace(least + cost);
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
    ByCost<Words> order;
    Heap<Words> loads;
    uint32_t each = 1, core = 0, part = 0;
};

// Taken from a counter that all cores share, in falling order: a core that is done takes the next task.
template <typename Words>
class Taken {
public:
    BALANCE_FUNCTION Taken() {}
    template <typename Cost>
    BALANCE_FUNCTION Taken(const Words& words, uint32_t rows, uint32_t each, Cost cost) : order(words, rows, cost), each(each)
    {
    }
    // The task at a place of the order; places of a core rise.
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
    ByCost<Words> order;
    uint64_t passed = 0;
    uint32_t each = 1;
};

}  // namespace balance
