// What op_host tells the kernel.
#pragma once

#include <cstdint>

struct KdaChunkTiling {
    uint32_t batch, tokens, heads, key, value;
    uint32_t part, parts;  // rows of a head's state that a task has; parts of a state
    uint32_t chunk;        // most tokens in UB at once
    float scale;
};
