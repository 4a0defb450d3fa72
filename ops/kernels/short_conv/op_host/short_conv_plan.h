// How ShortConv is tiled: plain C++, for op_host and for tests.
#pragma once

#include "../op_kernel/short_conv_tiling.h"

namespace plan {

struct ShortConvSizes {
    uint64_t batch, tokens, channels;
    uint32_t element, weight_element;  // bytes
};

// Bytes of UB the kernel takes for a block of channels and a chunk of tokens.
inline uint64_t ShortConvBytes(const ShortConvSizes& s, uint64_t block, uint64_t chunk)
{
    const uint64_t queues = 2 * (chunk + 3) + 2 * chunk + 3 + 2 * 3 + 2 * 3;  // x, y, its end, window in and out
    const uint64_t floats = (chunk + 3) + 2 * chunk + 4 + 3 + 3;              // wide, y, work, taps, window
    return block * (queues * s.element + 4 * s.weight_element + floats * 4 + 5 * 4) + 32 * 16;
}

// Largest divisor of `channels` that is a multiple of 16 and at most `most`.
inline uint64_t BlockOf(uint64_t channels, uint64_t most)
{
    for (uint64_t block = most / 16 * 16; block > 16; block -= 16) {
        if (channels % block == 0) {
            return block;
        }
    }
    return 16;
}

// Cores to use, or 0: the kernel cannot do these sizes.
inline uint32_t PlanShortConv(const ShortConvSizes& s, uint32_t cores, uint64_t ub, ShortConvTiling& t)
{
    if (s.batch == 0 || s.tokens == 0 || s.channels == 0 || s.channels % 16) {
        return 0;
    }
    // A stretch of 64 tokens reads three before it again, 2 % of what it moves.
    const uint64_t chunk = s.tokens < 64 ? s.tokens : 64;
    const uint64_t chunks = (s.tokens + chunk - 1) / chunk;
    // Cores that share a block of channels read its taps once each: so many that this is 2 % of the bytes at most.
    const uint64_t taps = 4 * s.weight_element, row = (2 * s.tokens + 6) * s.element;
    uint64_t sharing = 1 + (taps + s.batch * row) / (50 * taps);
    sharing = sharing < s.batch * chunks ? sharing : s.batch * chunks;
    sharing = sharing < cores ? sharing : cores;
    // Copies of less than 128 bytes are slow; more than 512 channels are not needed for speed.
    uint64_t most = s.channels * sharing / cores;
    most = most < 64 ? 64 : most > 512 ? 512 : most;
    while (most > 16 && ShortConvBytes(s, most, chunk) > ub) {
        most -= 16;
    }
    const uint64_t block = BlockOf(s.channels, most), blocks = s.channels / block;
    if (ShortConvBytes(s, block, chunk) > ub || blocks * s.batch * chunks > UINT32_MAX) {
        return 0;
    }
    t.batch = uint32_t(s.batch);
    t.tokens = uint32_t(s.tokens);
    t.channels = uint32_t(s.channels);
    t.block = uint32_t(block);
    t.chunk = uint32_t(chunk);
    t.chunks = uint32_t(chunks);
    t.tasks = uint32_t(blocks * s.batch * chunks);
    return uint32_t(blocks * sharing < cores ? blocks * sharing : cores);
}

}  // namespace plan
