// What op_host tells the kernel.
#pragma once

#include <cstdint>

struct AttnResMixTiling {
    uint32_t tokens, width, sources;
    uint32_t has_addend, has_gain;
    float eps, norm_eps;
    // With few tokens a token is split: `slices` cores have a stretch of its width each, and go on together, `held` tokens
    // at a time. 1: a core has whole tokens.
    uint32_t slices, held;
};
