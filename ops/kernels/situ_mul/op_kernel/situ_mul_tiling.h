// What op_host tells the kernel.
#pragma once

#include <cstdint>

struct SituMulTiling {
    uint64_t count;  // elements
    uint32_t unit;   // elements that are handed out together
    uint32_t tile;   // elements worked on together, a multiple of the unit
    float beta, linear_beta;
};
