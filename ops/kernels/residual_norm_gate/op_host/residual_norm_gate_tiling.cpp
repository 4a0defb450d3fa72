#include "device.h"
#include "residual_norm_gate_plan.h"

namespace optiling {

static ge::graphStatus TilingResidualNormGate(gert::TilingContext* context)
{
    const gert::Shape* x = plan::ShapeOf(context, 0);
    ResidualNormGateTiling* tiling = context->GetTilingData<ResidualNormGateTiling>();
    const gert::RuntimeAttrs* attrs = context->GetAttrs();
    if (x == nullptr || tiling == nullptr || attrs == nullptr || x->GetDimNum() == 0) {
        return ge::GRAPH_FAILED;
    }
    const plan::ResidualNormGateSizes sizes = {uint64_t(x->GetShapeSize()), uint64_t(x->GetDim(x->GetDimNum() - 1)),
                                               plan::BytesOf(context->GetRequiredInputDesc(0)->GetDataType()),
                                               context->GetOptionalInputShape(1) != nullptr,
                                               context->GetOptionalInputShape(2) != nullptr,
                                               context->GetOptionalInputShape(3) != nullptr};
    const plan::Device device = plan::DeviceOf(context);
    const uint32_t cores = plan::PlanResidualNormGate(sizes, device.cores, device.ub, *tiling);
    tiling->eps = *attrs->GetFloat(0);
    return cores == 0 ? ge::GRAPH_FAILED : plan::Launch(context, cores);
}

IMPL_OP_OPTILING(ResidualNormGate).Tiling(TilingResidualNormGate).TilingParse<plan::CompileInfo>(plan::NoCompileInfo);

}  // namespace optiling
