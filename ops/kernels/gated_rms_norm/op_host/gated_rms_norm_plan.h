// How GatedRmsNorm is tiled: plain C++, for op_host and for tests.
#pragma once

#include "../op_kernel/gated_rms_norm_tiling.h"

namespace plan {

struct GatedRmsNormSizes {
    uint64_t rows, width;
    uint32_t element, weight_element;  // bytes
};

// Bytes of UB the kernel takes for tiles of `tile` rows.
inline uint64_t GatedRmsNormBytes(const GatedRmsNormSizes& s, uint64_t tile)
{
    return tile * s.width * (6 * s.element + 3 * 4) + tile * 9 * 4 + s.width * (s.weight_element + 4);
}

// Cores to use, or 0: the kernel cannot do these sizes.
inline uint32_t PlanGatedRmsNorm(const GatedRmsNormSizes& s, uint32_t cores, uint64_t ub, GatedRmsNormTiling& t)
{
    if (s.rows == 0 || s.rows > UINT32_MAX || s.width < 16 || s.width > 512 || s.width % 16) {
        return 0;
    }
    const uint64_t shares = (s.rows + 7) / 8;  // of eight rows or more: every core reads the weight
    const uint64_t used = shares < cores ? shares : cores, share = (s.rows + used - 1) / used;
    uint64_t tile = (share + 7) / 8 * 8;
    tile = tile < 248 ? tile : 248;
    while (tile > 8 && GatedRmsNormBytes(s, tile) > ub) {
        tile -= 8;
    }
    if (GatedRmsNormBytes(s, tile) > ub) {
        return 0;
    }
    t.rows = uint32_t(s.rows);
    t.width = uint32_t(s.width);
    t.tile = uint32_t(tile);
    return uint32_t(used);
}

}  // namespace plan
