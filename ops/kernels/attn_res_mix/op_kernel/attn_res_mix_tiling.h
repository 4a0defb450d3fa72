// What op_host tells the kernel.
#pragma once

#include <cstdint>

struct AttnResMixTiling {
    uint32_t tokens, width, sources;
    uint32_t has_addend, has_gain;
    float eps, norm_eps;
};
