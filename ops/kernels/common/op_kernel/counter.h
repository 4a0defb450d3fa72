// A counter in the workspace that all vector cores of a kernel take numbers from: AtomicAdd, which the 950 alone has.
//
// What a workspace holds when a kernel starts is anybody's, so the first core sets the counter, and nobody takes from it
// before all cores have started: they wait when they first take, which is after a task or two. The kernel has to be of a
// type whose cores can wait for each other (KERNEL_TYPE_MIX_AIV_1_0), with all of them running at once.
#pragma once

#include "balance.h"
#include "kernel_operator.h"

namespace balance {

constexpr uint32_t COUNTER_BYTES = 64;
constexpr uint16_t COUNTER_FLAG = 0;

class Counter {
public:
    __aicore__ inline Counter() {}
    // `place` holds the counter; the first number taken is `first`.
    __aicore__ inline Counter(GM_ADDR place, uint32_t first) : place((__gm__ uint32_t*)place)
    {
        if (AscendC::GetBlockIdx() == 0) {
            AscendC::AtomicExch(this->place, first);
            AscendC::SetFlag<AscendC::HardEvent::S_MTE3>(EVENT_ID0);
            AscendC::WaitFlag<AscendC::HardEvent::S_MTE3>(EVENT_ID0);
        }
        AscendC::CrossCoreSetFlag<0, PIPE_MTE3>(COUNTER_FLAG);
    }
    __aicore__ inline uint32_t Take()
    {
        if (!ready) {
            AscendC::CrossCoreWaitFlag(COUNTER_FLAG);
            ready = true;
        }
        return AscendC::AtomicAdd(place, uint32_t(1));
    }

private:
    __gm__ uint32_t* place = nullptr;
    bool ready = false;
};

// Tasks from a counter, the longest first; the first of each core needs no counter. Cores may be no more than tasks.
template <uint32_t most>
class FromCounter {
public:
    template <typename Cost>
    __aicore__ inline FromCounter(uint32_t rows, uint32_t each, GM_ADDR place, Cost cost)
        : tasks(rows, each, cost), counter(place, AscendC::GetBlockNum())
    {
    }
    __aicore__ inline bool Next(Task& task)
    {
        const uint32_t place = first ? AscendC::GetBlockIdx() : counter.Take();
        first = false;
        return tasks.At(place, task);
    }

private:
    Taken<most> tasks;
    Counter counter;
    bool first = true;
};

}  // namespace balance
