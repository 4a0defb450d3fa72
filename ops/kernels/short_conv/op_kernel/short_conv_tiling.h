// What op_host tells the kernel.
#pragma once

#include <cstdint>

struct ShortConvTiling {
    uint32_t batch, tokens, channels;  // channels: heads * key
    uint32_t block;                    // channels worked on together; divides `channels`
    uint32_t chunk, chunks;            // tokens worked on together; stretches of them in a row
    uint32_t group, groups;            // rows worked on together, one where a row has several stretches; groups of them
    uint32_t tasks;                    // blocks * groups * chunks, in this order
};
