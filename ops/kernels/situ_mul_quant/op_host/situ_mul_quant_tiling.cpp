#include "device.h"
#include "situ_mul_quant_plan.h"

namespace optiling {

static ge::graphStatus TilingSituMulQuant(gert::TilingContext* context)
{
    const gert::Shape* gate = plan::ShapeOf(context, 0);
    SituMulQuantTiling* tiling = context->GetTilingData<SituMulQuantTiling>();
    const gert::RuntimeAttrs* attrs = context->GetAttrs();
    if (gate == nullptr || tiling == nullptr || attrs == nullptr || gate->GetDimNum() == 0 ||
        gate->GetShapeSize() == 0) {
        return ge::GRAPH_FAILED;
    }
    tiling->beta = *attrs->GetFloat(0);
    tiling->linear_beta = *attrs->GetFloat(1);
    const uint64_t width = gate->GetDim(gate->GetDimNum() - 1), rows = gate->GetShapeSize() / width;
    const uint32_t element = plan::BytesOf(context->GetRequiredInputDesc(0)->GetDataType());
    const plan::Device device = plan::DeviceOf(context);
    const uint32_t cores = plan::PlanSituMulQuant(rows, width, element, device.cores, device.ub, *tiling);
    if (cores == 0 || !(tiling->beta > 0) || !(tiling->linear_beta > 0)) {
        return ge::GRAPH_FAILED;
    }
    return plan::Launch(context, cores);
}

IMPL_OP_OPTILING(SituMulQuant).Tiling(TilingSituMulQuant).TilingParse<plan::CompileInfo>(plan::NoCompileInfo);

}  // namespace optiling
