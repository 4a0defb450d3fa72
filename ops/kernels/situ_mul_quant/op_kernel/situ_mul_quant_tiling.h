// What op_host tells the kernel.
#pragma once

#include <cstdint>

struct SituMulQuantTiling {
    uint32_t rows, width;
    float beta, linear_beta;
};
