#include "device.h"
#include "kda_chunk_plan.h"

namespace optiling {

static ge::graphStatus TilingKdaChunk(gert::TilingContext* context)
{
    const gert::Shape *q = plan::ShapeOf(context, 0), *v = plan::ShapeOf(context, 2);
    KdaChunkTiling* tiling = context->GetTilingData<KdaChunkTiling>();
    const gert::RuntimeAttrs* attrs = context->GetAttrs();
    if (q == nullptr || v == nullptr || tiling == nullptr || attrs == nullptr) {
        return ge::GRAPH_FAILED;
    }
    const plan::KdaChunkSizes sizes = {uint64_t(q->GetDim(0)), uint64_t(q->GetDim(1)), uint64_t(q->GetDim(2)),
                                       uint64_t(q->GetDim(3)), uint64_t(v->GetDim(3)),
                                       plan::BytesOf(context->GetRequiredInputDesc(0)->GetDataType())};
    const plan::Device device = plan::DeviceOf(context);
    const uint32_t groups = plan::PlanKdaChunk(sizes, device.cubes, device.ub, *tiling);
    tiling->scale = *attrs->GetFloat(0);
    const uint64_t scratch = kda_chunk_parts::ScratchOfGroup(*tiling).size * sizeof(float) * groups;
    return groups == 0 ? ge::GRAPH_FAILED : plan::Launch(context, groups, device.library + scratch);
}

IMPL_OP_OPTILING(KdaChunk).Tiling(TilingKdaChunk).TilingParse<plan::CompileInfo>(plan::NoCompileInfo);

}  // namespace optiling
