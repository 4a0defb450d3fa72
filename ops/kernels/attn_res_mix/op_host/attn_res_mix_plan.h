// How AttnResMix is tiled: plain C++, for op_host and for tests.
#pragma once

#include "../op_kernel/attn_res_mix_tiling.h"

namespace plan {

struct AttnResMixSizes {
    uint64_t tokens, width, sources;
    uint32_t element, weight_element;  // bytes
    bool has_addend, has_gain;

    // Bytes of tensors for each channel: all there have to be, and those that every core with the channel reads.
    uint64_t All() const { return tokens * (sources + 1 + 2 * has_addend) * element + Own(); }
    uint64_t Own() const { return (2 + has_gain) * weight_element; }
};

inline uint64_t UpTo(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

// Channels of the widest of some slices: multiples of 16.
inline uint64_t AttnResMixSlice(const AttnResMixSizes& s, uint64_t slices)
{
    return (s.width / 16 + slices - 1) / slices * 16;
}

// Bytes of UB for slices of some tokens: the tokens, weights and rows, numbers of other slices, numbers of these tokens.
inline uint64_t AttnResMixHeldBytes(const AttnResMixSizes& s, uint64_t slices, uint64_t held)
{
    const uint64_t slice = AttnResMixSlice(s, slices), rows = UpTo(held, 8), numbers = 2 * s.sources * rows;
    return slice * ((s.sources + s.has_addend) * held * s.element + s.element + s.weight_element +
                    (s.has_gain ? 5 : 4) * 4) +
           numbers * 4 * (slices + 2) + s.sources * rows * 8 * 4 + (slices + 4) * rows * 4 + rows * 8 * 4;
}

// Bytes of workspace: numbers of all cores, for this round and the next.
inline uint64_t AttnResMixWorkspace(const AttnResMixSizes& s, const AttnResMixTiling& t, uint64_t cores)
{
    return t.slices < 2 ? 0 : 2 * cores * (UpTo(2 * s.sources * t.held * 4, 32) + UpTo(t.held * 4, 32));
}

// Cores to use for slices of tokens, or 0: what they would tell each other and read again is over 5 % of all bytes.
inline uint64_t PlanAttnResMixSlices(const AttnResMixSizes& s, uint64_t cores, uint64_t ub, AttnResMixTiling& t)
{
    uint64_t most = 0;
    for (uint64_t slices = 2; s.sources > 1 && slices <= cores && slices * 16 <= s.width; slices++) {
        for (uint64_t groups = 1; groups * slices <= cores && groups <= s.tokens; groups++) {
            const uint64_t numbers = s.tokens * (s.sources * 8 + (s.has_gain ? 4 : 0));
            const uint64_t more = (groups - 1) * s.Own() * s.width + numbers * slices * (slices + 1);
            uint64_t held = (s.tokens + groups - 1) / groups;
            while (held > 1 && AttnResMixHeldBytes(s, slices, held) > ub) {
                held--;
            }
            const bool fits = AttnResMixHeldBytes(s, slices, held) <= ub && more * 20 <= s.All() * s.width;
            if (fits && groups * slices > most) {
                most = groups * slices;
                t.slices = uint32_t(slices);
                t.held = uint32_t(held);
            }
        }
    }
    return most;
}

// Cores to use, or 0: the kernel cannot do these sizes.
inline uint32_t PlanAttnResMix(const AttnResMixSizes& s, uint32_t cores, uint64_t ub, AttnResMixTiling& t)
{
    const uint64_t bytes = s.width * (3 * s.element + (s.has_gain ? 5 : 4) * 4) + 128 * 4;
    if (s.tokens == 0 || s.tokens > UINT32_MAX || s.width == 0 || s.width % 16 || s.sources == 0 || bytes > ub) {
        return 0;
    }
    t.tokens = uint32_t(s.tokens);
    t.width = uint32_t(s.width);
    t.sources = uint32_t(s.sources);
    t.has_addend = s.has_addend;
    t.has_gain = s.has_gain;
    // Every core reads the weights of its channels: with whole tokens no more cores than keep these reads under 4 % of all.
    const uint64_t few = 1 + s.All() / (25 * s.Own()), whole = s.tokens < few ? s.tokens : few;
    const uint64_t used = whole < cores ? whole : cores;
    const uint64_t split = used < cores ? PlanAttnResMixSlices(s, cores, ub, t) : 0;
    if (split <= used) {
        t.slices = t.held = 1;
    }
    return uint32_t(split > used ? split : used);
}

}  // namespace plan
