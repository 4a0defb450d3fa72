// How SituMul is tiled: plain C++, for op_host and for tests.
#pragma once

#include "../op_kernel/situ_mul_tiling.h"

namespace plan {

// Cores to use, or 0: nothing to do.
inline uint32_t PlanSituMul(uint64_t count, uint32_t element, uint32_t cores, uint64_t ub, SituMulTiling& t)
{
    t.unit = 512;
    const uint64_t units = (count + t.unit - 1) / t.unit, used = units < cores ? units : cores;
    if (used == 0) {
        return 0;
    }
    const uint64_t share = (units + used - 1) / used * t.unit, fits = ub / (6 * element + 4 * 4) / t.unit * t.unit;
    t.count = count;
    t.tile = uint32_t(share < fits ? share : fits);
    return uint32_t(used);
}

}  // namespace plan
