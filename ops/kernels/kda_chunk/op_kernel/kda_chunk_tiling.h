// What op_host tells the kernel.
#pragma once

#include <cstdint>

struct KdaChunkTiling {
    uint32_t batch, tokens, heads, key, value;
    uint32_t chunk;  // most tokens of a chunk, a multiple of 16
    uint32_t part;   // most rows of a state that the Cube has at once, a multiple of 16
    uint32_t alone;  // 1: no group has more than one row and head
    uint32_t in, out;  // buffers of keys and decays that come into UB, and of what leaves it: two where they fit
    float scale;
};
