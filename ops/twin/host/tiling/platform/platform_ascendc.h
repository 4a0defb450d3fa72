#pragma once

#include "twin_host.h"

namespace platform_ascendc {

enum class CoreMemType { L0_A, L0_B, L0_C, L1, L2, UB, HBM };

class PlatformAscendC {
public:
    explicit PlatformAscendC(fe::PlatFormInfos* info) : info(*info) {}
    uint32_t GetCoreNumAiv() const { return info.cores; }
    void GetCoreMemSize(const CoreMemType& type, uint64_t& size) const { size = type == CoreMemType::UB ? info.ub : 0; }

private:
    fe::PlatFormInfos info;
};

}  // namespace platform_ascendc
