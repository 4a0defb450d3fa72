// What op_host tells the kernel.
#pragma once

#include <cstdint>

struct AttnResMixTiling {
    uint32_t tokens, width, sources;
    float eps;
};
