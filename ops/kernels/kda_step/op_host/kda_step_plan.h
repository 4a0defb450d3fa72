// How KdaStep is tiled: plain C++, for op_host and for tests.
#pragma once

#include "../op_kernel/kda_step_tiling.h"

namespace plan {

struct KdaStepSizes {
    uint64_t batch, heads, key, value;
    uint32_t element, gate_element;  // bytes of q, k, v, and of decay and beta
};

// Bytes of UB the kernel takes for tiles of `tile` rows.
inline uint64_t KdaStepBytes(const KdaStepSizes& s, uint64_t tile)
{
    const uint64_t state = tile * s.key * 4, spare = 2 * s.key < 64 ? 64 : 2 * s.key;
    const uint64_t vectors = s.key * (2 * s.element + s.gate_element + 4) + s.value * s.element + tile * s.element;
    return 5 * state + 2 * vectors + (3 * s.key + spare + s.value + 32) * 4 + tile * 10 * 4;
}

// Cores to use, or 0: the kernel cannot do these sizes. Needs the sizes, the cores and bytes of UB of the device.
inline uint32_t PlanKdaStep(const KdaStepSizes& s, uint32_t cores, uint64_t ub, KdaStepTiling& t)
{
    if (s.key < 16 || s.key > 256 || s.key % 16 || s.value < 16 || s.value > 256 || s.value % 16) {
        return 0;
    }
    // A core reads q, k and the decay of every head that it has rows of: with 32 rows or more those are few bytes.
    const uint64_t unit = s.value % 32 ? 16 : 32;
    const uint64_t units = s.batch * s.heads * (s.value / unit);
    if (units == 0 || units > UINT32_MAX) {
        return 0;
    }
    uint64_t tile = s.value;
    while (tile > 16 && (s.value % tile || KdaStepBytes(s, tile) > ub)) {
        tile -= 16;
    }
    if (KdaStepBytes(s, tile) > ub) {
        return 0;
    }
    t.heads = uint32_t(s.heads);
    t.key = uint32_t(s.key);
    t.value = uint32_t(s.value);
    t.unit = uint32_t(unit);
    t.units = uint32_t(units);
    t.tile = uint32_t(tile);
    return uint32_t(units < cores ? units : cores);
}

}  // namespace plan
