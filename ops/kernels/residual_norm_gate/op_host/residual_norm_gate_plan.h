// How ResidualNormGate is tiled: plain C++, for op_host and for tests.
#pragma once

#include "../op_kernel/residual_norm_gate_tiling.h"

namespace plan {

struct ResidualNormGateSizes {
    uint64_t count, width;  // elements, and of a row
    uint32_t element;       // bytes
    bool has_residual, has_weight, has_gate;
};

// Cores to use, or 0: the kernel cannot do these sizes.
inline uint32_t PlanResidualNormGate(const ResidualNormGateSizes& s, uint32_t cores, uint64_t ub,
                                     ResidualNormGateTiling& t)
{
    const uint64_t each = 4 * s.element + (s.has_weight ? 3 : 2) * 4, fits = (ub - 2 * 64 * 4) / each;
    if (s.count == 0 || s.width == 0 || !(s.has_residual || s.has_weight || s.has_gate)) {
        return 0;
    }
    if (s.has_weight && (s.width % 16 || s.width > fits)) {
        return 0;
    }
    t.unit = s.has_weight ? uint32_t(s.width) : 512;
    const uint64_t units = (s.count + t.unit - 1) / t.unit, used = units < cores ? units : cores;
    const uint64_t share = (units + used - 1) / used * t.unit, most = fits / t.unit * t.unit;
    t.count = s.count;
    t.tile = s.has_weight ? t.unit : uint32_t(share < most ? share : most);
    t.has_residual = s.has_residual;
    t.has_weight = s.has_weight;
    t.has_gate = s.has_gate;
    return uint32_t(used);
}

}  // namespace plan
