// How ShortConv is tiled: plain C++, for op_host and for tests.
#pragma once

#include "../op_kernel/short_conv_tiling.h"

namespace plan {

struct ShortConvSizes {
    uint64_t batch, tokens, channels;
    uint32_t element, weight_element;  // bytes
};

// Bytes of UB the kernel takes for a block of channels, a chunk of tokens and a group of rows.
inline uint64_t ShortConvBytes(const ShortConvSizes& s, uint64_t block, uint64_t chunk, uint64_t group)
{
    const uint64_t before = s.tokens > chunk ? 3 : 0;
    const uint64_t queues = 2 * (chunk + before) + 2 * chunk + 2 * 3 + 2 * 3;  // x, y, windows in and out
    const uint64_t floats = (chunk + 3) + 2 * chunk + 3 + 3 + 4;               // wide, y, work, windows twice, offsets
    return block * group * (queues * s.element + floats * 4) + block * (4 * s.weight_element + 5 * 4) + 32 * 16;
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
    while (most > 16 && ShortConvBytes(s, most, chunk, 1) > ub) {
        most -= 16;
    }
    const uint64_t block = BlockOf(s.channels, most), blocks = s.channels / block;
    // Short rows are worked on together: an instruction for all of them.
    uint64_t group = chunks > 1 ? 1 : (s.batch + sharing - 1) / sharing;
    while (group > 1 && (ShortConvBytes(s, block, chunk, group) > ub || chunk * group > 4095)) {
        group--;
    }
    const uint64_t groups = (s.batch + group - 1) / group;
    group = (s.batch + groups - 1) / groups;
    if (ShortConvBytes(s, block, chunk, group) > ub || blocks * groups * chunks > UINT32_MAX) {
        return 0;
    }
    t.batch = uint32_t(s.batch);
    t.tokens = uint32_t(s.tokens);
    t.channels = uint32_t(s.channels);
    t.block = uint32_t(block);
    t.chunk = uint32_t(chunk);
    t.chunks = uint32_t(chunks);
    t.group = uint32_t(group);
    t.groups = uint32_t(groups);
    t.tasks = uint32_t(blocks * groups * chunks);
    const uint64_t most_cores = blocks * sharing < cores ? blocks * sharing : cores;
    return uint32_t(t.tasks < most_cores ? t.tasks : most_cores);
}

}  // namespace plan
