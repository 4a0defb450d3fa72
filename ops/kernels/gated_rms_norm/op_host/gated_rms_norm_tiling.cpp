#include "device.h"
#include "gated_rms_norm_plan.h"

namespace optiling {

static ge::graphStatus TilingGatedRmsNorm(gert::TilingContext* context)
{
    const gert::Shape *x = plan::ShapeOf(context, 0), *weight = plan::ShapeOf(context, 2);
    GatedRmsNormTiling* tiling = context->GetTilingData<GatedRmsNormTiling>();
    const gert::RuntimeAttrs* attrs = context->GetAttrs();
    if (x == nullptr || weight == nullptr || tiling == nullptr || attrs == nullptr || weight->GetShapeSize() == 0) {
        return ge::GRAPH_FAILED;
    }
    const uint64_t width = weight->GetShapeSize();
    const plan::GatedRmsNormSizes sizes = {uint64_t(x->GetShapeSize()) / width, width,
                                           plan::BytesOf(context->GetRequiredInputDesc(0)->GetDataType()),
                                           plan::BytesOf(context->GetRequiredInputDesc(2)->GetDataType())};
    const plan::Device device = plan::DeviceOf(context);
    const uint32_t cores = plan::PlanGatedRmsNorm(sizes, device.cores, device.ub, *tiling);
    tiling->eps = *attrs->GetFloat(0);
    return cores == 0 ? ge::GRAPH_FAILED : plan::Launch(context, cores);
}

IMPL_OP_OPTILING(GatedRmsNorm).Tiling(TilingGatedRmsNorm).TilingParse<plan::CompileInfo>(plan::NoCompileInfo);

}  // namespace optiling
