// What tiling has to know of a device, and how a plan is handed over.
#pragma once

#include <cstdint>

#include "register/op_impl_registry.h"
#include "tiling/platform/platform_ascendc.h"

namespace plan {

struct Device {
    uint32_t cores, cubes;  // vector cores, Cube cores
    uint64_t ub;            // bytes of UB
    uint64_t library;       // bytes of a workspace that the framework keeps for itself
};

inline Device DeviceOf(gert::TilingContext* context)
{
    platform_ascendc::PlatformAscendC platform(context->GetPlatformInfo());
    Device device{};
    device.cores = platform.GetCoreNumAiv();
    device.cubes = platform.GetCoreNumAic();
    device.library = platform.GetLibApiWorkSpaceSize();
    platform.GetCoreMemSize(platform_ascendc::CoreMemType::UB, device.ub);
    return device;
}

// Tiling needs nothing that is known when a graph is compiled, but the framework asks for a function that reads it.
struct CompileInfo {};
inline ge::graphStatus NoCompileInfo(gert::TilingParseContext*) { return ge::GRAPH_SUCCESS; }

// Shape of a required input, by its place in the prototype; null where it is missing.
inline const gert::Shape* ShapeOf(gert::TilingContext* context, size_t input)
{
    const gert::StorageShape* shape = context->GetRequiredInputShape(input);
    return shape == nullptr ? nullptr : &shape->GetOriginShape();
}

inline uint32_t BytesOf(ge::DataType type) { return type == ge::DT_FLOAT ? 4 : 2; }

inline ge::graphStatus Launch(gert::TilingContext* context, uint32_t cores, uint64_t workspace_bytes = 0)
{
    context->SetBlockDim(cores);
    size_t* workspace = context->GetWorkspaceSizes(1);
    if (workspace == nullptr) {
        return ge::GRAPH_FAILED;
    }
    workspace[0] = workspace_bytes;
    return ge::GRAPH_SUCCESS;
}

}  // namespace plan
