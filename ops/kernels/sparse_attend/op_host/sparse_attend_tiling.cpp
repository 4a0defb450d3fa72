#include "device.h"
#include "sparse_attend_plan.h"

namespace optiling {

enum Input { Q, Q_ROPE, LATENT, ROPE, SELECTED, BLOCK_TABLE };

static ge::graphStatus TilingSparseAttend(gert::TilingContext* context)
{
    const gert::Shape *q = plan::ShapeOf(context, Q), *rope = plan::ShapeOf(context, Q_ROPE);
    const gert::Shape *latents = plan::ShapeOf(context, LATENT), *selected = plan::ShapeOf(context, SELECTED);
    const gert::Shape* table = plan::ShapeOf(context, BLOCK_TABLE);
    SparseAttendTiling* tiling = context->GetTilingData<SparseAttendTiling>();
    const gert::RuntimeAttrs* attrs = context->GetAttrs();
    size_t* workspace = context->GetWorkspaceSizes(1);
    if (q == nullptr || rope == nullptr || latents == nullptr || selected == nullptr || table == nullptr ||
        tiling == nullptr || attrs == nullptr || workspace == nullptr) {
        return ge::GRAPH_FAILED;
    }
    const plan::SparseAttendSizes sizes = {uint64_t(q->GetDim(0)),       uint64_t(q->GetDim(1)),
                                           uint64_t(q->GetDim(2)),       uint64_t(q->GetDim(3)),
                                           uint64_t(rope->GetDim(3)),    uint64_t(latents->GetDim(1)),
                                           uint64_t(table->GetDim(1)),   uint64_t(selected->GetDim(2))};
    platform_ascendc::PlatformAscendC platform(context->GetPlatformInfo());
    const uint32_t groups = plan::PlanSparseAttend(sizes, platform.GetCoreNumAic(), plan::DeviceOf(context).ub, *tiling);
    tiling->scale = *attrs->GetFloat(0);
    context->SetBlockDim(groups);
    context->SetScheduleMode(1);  // all cores or none: they wait for each other
    workspace[0] = platform.GetLibApiWorkSpaceSize() + groups * plan::SparseAttendShare(sizes, tiling->block) +
                   plan::SparseAttendJoined(sizes, tiling->parts);
    return groups == 0 ? ge::GRAPH_FAILED : ge::GRAPH_SUCCESS;
}

IMPL_OP_OPTILING(SparseAttend).Tiling(TilingSparseAttend).TilingParse<plan::CompileInfo>(plan::NoCompileInfo);

}  // namespace optiling
