#include "attn_res_mix_plan.h"
#include "device.h"

namespace optiling {

static ge::graphStatus TilingAttnResMix(gert::TilingContext* context)
{
    const gert::Shape *source = plan::ShapeOf(context, 0), *norm = plan::ShapeOf(context, 1);
    const auto* sources = context->GetIrInputInstanceInfo(0);
    AttnResMixTiling* tiling = context->GetTilingData<AttnResMixTiling>();
    const gert::RuntimeAttrs* attrs = context->GetAttrs();
    if (source == nullptr || norm == nullptr || sources == nullptr || tiling == nullptr || attrs == nullptr ||
        norm->GetShapeSize() == 0) {
        return ge::GRAPH_FAILED;
    }
    const uint64_t width = norm->GetShapeSize();
    const plan::AttnResMixSizes sizes = {uint64_t(source->GetShapeSize()) / width, width, sources->GetInstanceNum(),
                                         plan::BytesOf(context->GetDynamicInputDesc(0, 0)->GetDataType()),
                                         plan::BytesOf(context->GetRequiredInputDesc(1)->GetDataType()),
                                         context->GetOptionalInputShape(3) != nullptr,
                                         context->GetOptionalInputShape(4) != nullptr};
    const plan::Device device = plan::DeviceOf(context);
    const uint32_t cores = plan::PlanAttnResMix(sizes, device.cores, device.ub, *tiling);
    tiling->eps = *attrs->GetFloat(0);
    tiling->norm_eps = *attrs->GetFloat(1);
    if (cores == 0) {
        return ge::GRAPH_FAILED;
    }
    context->SetScheduleMode(1);  // cores wait for each other
    return plan::Launch(context, cores, device.library + plan::AttnResMixWorkspace(sizes, *tiling, cores));
}

IMPL_OP_OPTILING(AttnResMix).Tiling(TilingAttnResMix).TilingParse<plan::CompileInfo>(plan::NoCompileInfo);

}  // namespace optiling
