// How AttnResMix is tiled: plain C++, for op_host and for tests.
#pragma once

#include "../op_kernel/attn_res_mix_tiling.h"

namespace plan {

struct AttnResMixSizes {
    uint64_t tokens, width, sources;
    uint32_t element, weight_element;  // bytes
    bool has_addend, has_gain;
};

// Cores to use, or 0: the kernel cannot do these sizes.
inline uint32_t PlanAttnResMix(const AttnResMixSizes& s, uint32_t cores, uint64_t ub, AttnResMixTiling& t)
{
    const uint64_t bytes = s.width * (3 * s.element + (s.has_gain ? 5 : 4) * 4) + 128 * 4;
    if (s.tokens == 0 || s.tokens > UINT32_MAX || s.width == 0 || s.width % 16 || s.sources == 0 || bytes > ub) {
        return 0;
    }
    uint64_t used = s.tokens < cores ? s.tokens : cores;
    // Every core reads norm, query and gain. With many tokens half the cores draw all that memory gives: then no more cores
    // than keep these reads under 4 % of all.
    if (s.tokens > 2 * cores) {
        const uint64_t all = s.tokens * (s.sources + 1 + 2 * s.has_addend) * s.element;
        const uint64_t own = (2 + s.has_gain) * s.weight_element;
        const uint64_t few = 1 + all / (25 * own), least = cores / 2;
        used = used < few ? used : few > least ? few : least;
    }
    t.tokens = uint32_t(s.tokens);
    t.width = uint32_t(s.width);
    t.sources = uint32_t(s.sources);
    t.has_addend = s.has_addend;
    t.has_gain = s.has_gain;
    return uint32_t(used);
}

}  // namespace plan
