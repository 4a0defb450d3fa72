// Which tokens a group of cores has, step after step: the same for its Cube core and its vector cores.
#pragma once

#include "kernel_operator.h"  // first: it says what __aicore__ is

#include "balance.h"
#include "kda_chunk_scratch.h"

namespace kda_chunk_parts {

// Flags across the cores of a group, all of mode 2.
constexpr uint16_t PREPARED = 0;  // vector to Cube: a chunk's factors are there
constexpr uint16_t LINKED = 1;    // Cube to vector: links and scores between its blocks are there
constexpr uint16_t INVERTED = 2;  // vector to Cube: its inverse is there
constexpr uint16_t DONE = 3;      // Cube to vector: the step's slot is free

__aicore__ inline uint32_t InBlocks(uint32_t tokens) { return (tokens + ROWS - 1) / ROWS * ROWS; }

// Some tokens of a row and head, from `from` on; `count` are those of the whole row that are no padding.
struct Chunk {
    uint32_t row, head, from, tokens, count;
};

// What a task costs: its blocks; those of its first chunk are a fifth less, as there may be no state to read. Measured on
// the twin, between the work of vector cores (an eighth less) and of the Cube (two fifths).
struct Cost {
    const AscendC::GlobalTensor<int64_t>& counts;
    __aicore__ inline uint32_t operator()(uint32_t row) const
    {
        const uint32_t blocks = InBlocks(counts.GetValue(row)) / ROWS;
        return 5 * blocks - (blocks < 4 ? blocks : 4);
    }
};

// The chunks of a group: tasks are rows and heads, shared out by the tokens that rows have. A step is two chunks, whoever's.
class Steps {
public:
    __aicore__ inline void Init(const KdaChunkTiling& tiling, GM_ADDR counts, uint64_t group)
    {
        t = tiling;
        countsGm.SetGlobalBuffer((__gm__ int64_t*)counts);
        tasks = Tasks(t.batch, t.heads, AscendC::GetBlockNum(), group, Cost{countsGm});
        from = count = 0;
    }

    // Chunks of a row are alike; where a group has one task they are even in number, so that both vector cores have some.
    __aicore__ inline bool Next(Chunk& chunk)
    {
        while (from == count) {
            if (!tasks.Next(task)) {
                return false;
            }
            count = countsGm.GetValue(task.row);
            from = 0;
        }
        uint32_t chunks = (count + t.chunk - 1) / t.chunk;
        chunks += t.alone ? chunks % CHUNKS : 0;
        const uint32_t size = InBlocks((count + chunks - 1) / chunks), left = count - from;
        chunk = {task.row, task.part, from, left < size ? left : size, count};
        from += chunk.tokens;
        return true;
    }

    // Those that a step lacks at the end have no tokens.
    __aicore__ inline void Next(Chunk (&step)[CHUNKS])
    {
        for (uint32_t c = 0; c < CHUNKS; c++) {
            if (!Next(step[c])) {
                step[c] = {};
            }
        }
    }

    __aicore__ inline uint32_t Left() const
    {
        Steps copy = *this;
        Chunk chunk;
        uint32_t count = 0;
        while (copy.Next(chunk)) {
            count++;
        }
        return (count + CHUNKS - 1) / CHUNKS;
    }

private:
    using Tasks = balance::Tasks<128>;

    KdaChunkTiling t;
    AscendC::GlobalTensor<int64_t> countsGm;
    Tasks tasks;
    balance::Task task{};
    uint32_t from, count;  // of the task: its next token, and how many it has
};

// Where a step's chunk lies in a group's workspace.
__aicore__ inline uint64_t Slot(const KdaChunkTiling& t, uint32_t step, uint32_t chunk)
{
    return (uint64_t(step % SLOTS) * CHUNKS + chunk) * ScratchOfChunk(t).size;
}

}  // namespace kda_chunk_parts
