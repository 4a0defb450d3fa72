// How KdaChunk is tiled: plain C++, for op_host and for tests.
#pragma once

#include "../op_kernel/kda_chunk_scratch.h"

namespace plan {

struct KdaChunkSizes {
    uint64_t batch, tokens, heads, key, value;
    uint32_t element;  // bytes of q, k, v
};

// Bytes of UB a vector core takes: a block of tokens as they come, and as floats with its work, what is on its way out, the
// keys of a chunk, its matrices (those of two chunks where they wait for the Cube), and small rows.
inline uint64_t KdaChunkBytes(const KdaChunkSizes& s, uint64_t chunk, uint64_t in, uint64_t out)
{
    const uint64_t wide = 16 * s.key * 4, most = 16 * 4 * (s.key > s.value ? s.key : s.value);
    const uint64_t pairs = 32 * s.key * s.element + wide, rest = 16 * (s.value * s.element + 32);
    const uint64_t square = chunk * chunk * 4;
    return in * pairs + rest + out * most + 5 * wide + chunk * (s.key + 16 + 8) * 4 + 3 * square + (s.key + 32 + 512) * 4;
}

// Groups of cores to use, or 0: the kernel cannot do these sizes.
inline uint32_t PlanKdaChunk(const KdaChunkSizes& s, uint32_t groups, uint64_t ub, KdaChunkTiling& t)
{
    if (s.key < 16 || s.key > 256 || s.key % 16 || s.value < 16 || s.value > 256 || s.value % 16 || s.tokens == 0) {
        return 0;
    }
    constexpr uint64_t MOST = 8192;  // floats of an operand: half of L0A, half of L0B
    uint64_t chunk = s.key <= MOST / 64 ? 64 : MOST / s.key / 16 * 16;
    while (chunk > 16 && (chunk - 16 >= s.tokens || KdaChunkBytes(s, chunk, 1, 2) > ub)) {
        chunk -= 16;
    }
    t.in = KdaChunkBytes(s, chunk, 2, 2) <= ub ? 2 : 1;
    t.out = KdaChunkBytes(s, chunk, t.in, 2) <= ub ? 2 : 1;
    uint64_t part = MOST / (s.key > chunk ? s.key : chunk) / 16 * 16;
    part = part < s.value ? part : s.value;
    const uint64_t tasks = s.batch * s.heads;
    if (tasks == 0 || tasks > UINT32_MAX || KdaChunkBytes(s, chunk, t.in, t.out) > ub) {
        return 0;
    }
    t.batch = uint32_t(s.batch);
    t.tokens = uint32_t(s.tokens);
    t.heads = uint32_t(s.heads);
    t.key = uint32_t(s.key);
    t.value = uint32_t(s.value);
    t.chunk = uint32_t(chunk);
    t.part = uint32_t(part);
    t.alone = tasks <= groups;
    return uint32_t(tasks < groups ? tasks : groups);
}

}  // namespace plan
