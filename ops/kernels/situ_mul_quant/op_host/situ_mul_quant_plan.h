// How SituMulQuant is tiled: plain C++, for op_host and for tests.
#pragma once

#include "../op_kernel/situ_mul_quant_tiling.h"

namespace plan {

// Cores to use, or 0: the kernel cannot do these sizes. A row stays in UB between its largest value and its rounding.
inline uint32_t PlanSituMulQuant(uint64_t rows, uint64_t width, uint32_t element, uint32_t cores, uint64_t ub,
                                 SituMulQuantTiling& t)
{
    const uint64_t bytes = width * (4 * element + 2 + 4 * 4) + 2 * 32 + (64 + 128) * 4;
    if (rows == 0 || rows > UINT32_MAX || width == 0 || width % 16 || bytes > ub) {
        return 0;
    }
    t.rows = uint32_t(rows);
    t.width = uint32_t(width);
    return uint32_t(rows < cores ? rows : cores);
}

}  // namespace plan
