// What op_host tells the kernel.
#pragma once

#include <cstdint>

struct ResidualNormGateTiling {
    uint64_t count;  // elements
    uint32_t unit;   // elements that are handed out together: a row where there is a norm
    uint32_t tile;   // elements worked on together: a row where there is a norm, else a multiple of the unit
    uint32_t has_residual, has_weight, has_gate;
    float eps;
};
