// What op_host tells the kernel.
#pragma once

#include <cstdint>

struct GatedRmsNormTiling {
    uint32_t rows, width;
    uint32_t tile;  // rows worked on together, a multiple of 8
    float eps;
};
