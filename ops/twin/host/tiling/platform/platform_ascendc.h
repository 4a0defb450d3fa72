#pragma once

#include "twin_host.h"

namespace platform_ascendc {

enum class CoreMemType { L0_A, L0_B, L0_C, L1, L2, UB, HBM };

class PlatformAscendC {
public:
    explicit PlatformAscendC(fe::PlatFormInfos* info) : info(*info) {}
    uint32_t GetCoreNumAiv() const { return info.cores; }
    uint32_t GetCoreNumAic() const { return info.cores / 2; }
    uint32_t GetLibApiWorkSpaceSize() const { return 1024; }  // 16 MiB on A3; what GetUserWorkspace skips
    void GetCoreMemSize(const CoreMemType& type, uint64_t& size) const
    {
        const bool a3 = info.ub < (200u << 10);
        switch (type) {
            case CoreMemType::UB: size = info.ub; break;
            case CoreMemType::L1: size = 512u << 10; break;
            case CoreMemType::L0_A: case CoreMemType::L0_B: size = 64u << 10; break;
            case CoreMemType::L0_C: size = (a3 ? 128u : 256u) << 10; break;
            case CoreMemType::L2: size = (a3 ? 192ull : 128ull) << 20; break;
            default: size = 0;
        }
    }

private:
    fe::PlatFormInfos info;
};

}  // namespace platform_ascendc
