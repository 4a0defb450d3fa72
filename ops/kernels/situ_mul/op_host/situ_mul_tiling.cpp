#include "device.h"
#include "situ_mul_plan.h"

namespace optiling {

static ge::graphStatus TilingSituMul(gert::TilingContext* context)
{
    const gert::Shape* gate = plan::ShapeOf(context, 0);
    SituMulTiling* tiling = context->GetTilingData<SituMulTiling>();
    const gert::RuntimeAttrs* attrs = context->GetAttrs();
    if (gate == nullptr || tiling == nullptr || attrs == nullptr) {
        return ge::GRAPH_FAILED;
    }
    tiling->beta = *attrs->GetFloat(0);
    tiling->linear_beta = *attrs->GetFloat(1);
    const uint32_t element = plan::BytesOf(context->GetRequiredInputDesc(0)->GetDataType());
    const plan::Device device = plan::DeviceOf(context);
    const uint32_t cores = plan::PlanSituMul(gate->GetShapeSize(), element, device.cores, device.ub, *tiling);
    if (cores == 0 || !(tiling->beta > 0) || !(tiling->linear_beta > 0)) {
        return ge::GRAPH_FAILED;
    }
    return plan::Launch(context, cores);
}

IMPL_OP_OPTILING(SituMul).Tiling(TilingSituMul).TilingParse<plan::CompileInfo>(plan::NoCompileInfo);

}  // namespace optiling
