#include "device.h"
#include "short_conv_plan.h"

namespace optiling {

static ge::graphStatus TilingShortConv(gert::TilingContext* context)
{
    const gert::Shape* x = plan::ShapeOf(context, 0);
    ShortConvTiling* tiling = context->GetTilingData<ShortConvTiling>();
    if (x == nullptr || tiling == nullptr) {
        return ge::GRAPH_FAILED;
    }
    const plan::ShortConvSizes sizes = {uint64_t(x->GetDim(0)), uint64_t(x->GetDim(1)),
                                        uint64_t(x->GetDim(2) * x->GetDim(3)),
                                        plan::BytesOf(context->GetRequiredInputDesc(0)->GetDataType()),
                                        plan::BytesOf(context->GetRequiredInputDesc(1)->GetDataType())};
    const plan::Device device = plan::DeviceOf(context);
    const uint32_t cores = plan::PlanShortConv(sizes, device.cores, device.ub, *tiling);
    return cores == 0 ? ge::GRAPH_FAILED : plan::Launch(context, cores);
}

IMPL_OP_OPTILING(ShortConv).Tiling(TilingShortConv).TilingParse<plan::CompileInfo>(plan::NoCompileInfo);

}  // namespace optiling
