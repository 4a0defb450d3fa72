// Which tokens a group of cores has, step after step: the same for its Cube core and its vector cores.
#pragma once

#include "balance.h"
#include "kda_chunk_scratch.h"
#include "kernel_operator.h"

namespace kda_chunk_parts {

// Flags across the cores of a group, all of mode 2.
constexpr uint16_t PREPARED = 0;  // vector to Cube: a chunk's factors are there
constexpr uint16_t LINKED = 1;    // Cube to vector: links and scores between its blocks are there
constexpr uint16_t INVERTED = 2;  // vector to Cube: its inverse is there
constexpr uint16_t DONE = 3;      // Cube to vector: the step's slot is free

// Two chunks of a row and head, one after another, the second perhaps empty.
struct Step {
    uint32_t row, head, from, count;  // the first token; tokens of the row that are no padding
    uint32_t tokens[CHUNKS];
};

// What a task costs: its tokens in whole blocks; reading and writing its state is about one more.
struct Cost {
    const AscendC::GlobalTensor<int64_t>& counts;
    __aicore__ inline uint32_t operator()(uint32_t row) const { return counts.GetValue(row) / ROWS + 2; }
};

// Tasks are rows and heads; a group has some of them, shared out by the tokens that rows have.
class Steps {
public:
    __aicore__ inline void Init(const KdaChunkTiling& tiling, GM_ADDR counts, uint64_t group)
    {
        t = tiling;
        countsGm.SetGlobalBuffer((__gm__ int64_t*)counts);
        tasks = balance::Tasks(t.batch, t.heads, AscendC::GetBlockNum(), group, Cost{countsGm});
        from = count = 0;
    }

    __aicore__ inline bool Next(Step& step)
    {
        while (from == count) {
            if (!tasks.Next(task)) {
                return false;
            }
            count = countsGm.GetValue(task.row);
            from = 0;
        }
        const uint32_t left = count - from, both = left < CHUNKS * t.chunk ? left : CHUNKS * t.chunk;
        const uint32_t half = (both + CHUNKS * ROWS - 1) / (CHUNKS * ROWS) * ROWS;  // in whole blocks
        const uint32_t first = both < half ? both : half;
        step = {task.row, task.part, from, count, {first, both - first}};
        from += both;
        return true;
    }

    __aicore__ inline uint32_t Left() const
    {
        Steps copy = *this;
        Step step;
        uint32_t count = 0;
        while (copy.Next(step)) {
            count++;
        }
        return count;
    }

private:
    KdaChunkTiling t;
    AscendC::GlobalTensor<int64_t> countsGm;
    balance::Tasks tasks;
    balance::Task task{};
    uint32_t from, count;  // of the task: its next token, and how many it has
};

// Where a step's chunk lies in a group's workspace.
__aicore__ inline uint64_t Slot(const KdaChunkTiling& t, uint32_t step, uint32_t chunk)
{
    return (uint64_t(step % SLOTS) * CHUNKS + chunk) * ScratchOfChunk(t).size;
}

__aicore__ inline uint32_t InBlocks(uint32_t tokens) { return (tokens + ROWS - 1) / ROWS * ROWS; }

}  // namespace kda_chunk_parts
