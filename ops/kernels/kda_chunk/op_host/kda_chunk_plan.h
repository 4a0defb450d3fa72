// How KdaChunk is tiled: plain C++, for op_host and for tests.
#pragma once

#include "../op_kernel/kda_chunk_tiling.h"

namespace plan {

struct KdaChunkSizes {
    uint64_t batch, tokens, heads, key, value;
    uint32_t element;  // bytes of q, k, v
};

// Bytes of UB the kernel takes for `part` rows of a state and `chunk` tokens.
inline uint64_t KdaChunkBytes(const KdaChunkSizes& s, uint64_t part, uint64_t chunk)
{
    const uint64_t in = 2 * s.key * s.element + s.key * 4 + part * s.element + 32, out = part * s.element;
    return 2 * part * s.key * 4 + chunk * (2 * in + 2 * out + (3 * s.key + 2 * part) * 4) + part * 9 * 4 + 64 * 4;
}

// Cores to use, or 0: the kernel cannot do these sizes.
inline uint32_t PlanKdaChunk(const KdaChunkSizes& s, uint32_t cores, uint64_t ub, KdaChunkTiling& t)
{
    if (s.key < 16 || s.key > 256 || s.key % 16 || s.value < 16 || s.value > 256 || s.value % 16 || s.tokens == 0) {
        return 0;
    }
    // Arithmetic takes ten times what copies do: while cores idle, states are split, though q, k and the decay are then
    // read by every part. 16 rows are the least: their results are one block.
    uint64_t parts = 1;
    while (s.value % (32 * parts) == 0 && s.batch * s.heads * parts < cores) {
        parts *= 2;
    }
    while (s.value % (32 * parts) == 0 && KdaChunkBytes(s, s.value / parts, 1) > ub) {
        parts *= 2;
    }
    const uint64_t part = s.value / parts, tasks = s.batch * s.heads * parts;
    if (tasks == 0 || tasks > UINT32_MAX || KdaChunkBytes(s, part, 1) > ub) {
        return 0;
    }
    uint64_t chunk = s.tokens < 64 ? s.tokens : 64;
    while (KdaChunkBytes(s, part, chunk) > ub) {
        chunk--;
    }
    t.batch = uint32_t(s.batch);
    t.tokens = uint32_t(s.tokens);
    t.heads = uint32_t(s.heads);
    t.key = uint32_t(s.key);
    t.value = uint32_t(s.value);
    t.part = uint32_t(part);
    t.parts = uint32_t(parts);
    t.chunk = uint32_t(chunk);
    return uint32_t(tasks < cores ? tasks : cores);
}

}  // namespace plan
