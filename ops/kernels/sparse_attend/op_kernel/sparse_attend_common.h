// What the Cube core and the vector cores of a group agree on: queries, blocks, workspace, flags.
#pragma once

#if defined(__NPU_ARCH__) && __NPU_ARCH__ == 3510
#include "arch35/left.h"
#else
#include "arch22/left.h"
#endif
#include "balance.h"
#include "rows.h"
#include "sparse_attend_tiling.h"

namespace sparse {

using namespace AscendC;

constexpr uint32_t SLOTS = 2;  // blocks that are between the cores of a group
enum Flag : uint16_t { SCORES, WEIGHTS, SUMS, PARTS };

// Workspace of a group: for each slot scores [heads, block] float, weights [heads, block], sums [heads, latent] float.
struct Shares {
    uint32_t scores, weights, sums, slot;  // where they are, and a slot's size, in bytes
};

__aicore__ inline Shares SharesOf(const SparseAttendTiling& t)
{
    Shares s{};
    s.weights = t.heads * t.block * 4;
    s.sums = rows::RoundUp(s.weights + t.heads * t.block * 2, 512);
    s.slot = rows::RoundUp(s.sums + t.heads * t.latent * 4, 512);
    return s;
}

// What a group has to do at a time: a query's part of its selected positions, [begin, end) of its list.
struct Task {
    uint32_t query, begin, end;
};

__aicore__ inline Task TaskOf(const SparseAttendTiling& t, uint32_t index)
{
    const uint32_t part = index % t.parts;
    return {index / t.parts, uint32_t(uint64_t(t.room) * part / t.parts),
            uint32_t(uint64_t(t.room) * (part + 1) / t.parts)};
}

// The last position that a query sees; -1 for padding.
__aicore__ inline int64_t LastSeen(const SparseAttendTiling& t, const GlobalTensor<int64_t>& lengths,
                                   const GlobalTensor<int64_t>& counts, uint32_t query)
{
    const uint32_t row = query / t.tokens, token = query % t.tokens;
    const int64_t count = counts.GetValue(row);
    return token < count ? lengths.GetValue(row) - count + token : -1;
}

// What a task costs, at most: the positions of its part that the query sees, as those selected come before what fills
// the list up; without any it is about 16.
struct Cost {
    const SparseAttendTiling& t;
    const GlobalTensor<int64_t>&lengths, &counts;
    __aicore__ inline uint32_t operator()(uint32_t index) const
    {
        const Task task = TaskOf(t, index);
        const int64_t seen = LastSeen(t, lengths, counts, task.query) + 1;
        const int64_t end = seen < task.end ? seen : task.end;
        return (end > task.begin ? uint32_t(end - task.begin) : 0) + 16;
    }
};

using Tasks = balance::Tasks<512>;

}  // namespace sparse
