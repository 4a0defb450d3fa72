#include "device.h"
#include "kda_step_plan.h"

namespace optiling {

enum Input { Q, K, V, DECAY, BETA, MEMORY, SLOTS, BIAS, LOG_RATE };
enum Attr { SCALE, NORM_EPS, BETA_LOGITS, LOWER_BOUND };

static ge::graphStatus TilingKdaStep(gert::TilingContext* context)
{
    const gert::Shape *q = plan::ShapeOf(context, Q), *v = plan::ShapeOf(context, V);
    KdaStepTiling* tiling = context->GetTilingData<KdaStepTiling>();
    const gert::RuntimeAttrs* attrs = context->GetAttrs();
    if (q == nullptr || v == nullptr || tiling == nullptr || attrs == nullptr) {
        return ge::GRAPH_FAILED;
    }
    const plan::KdaStepSizes sizes = {uint64_t(q->GetDim(0)), uint64_t(q->GetDim(2)), uint64_t(q->GetDim(3)),
                                      uint64_t(v->GetDim(3)),
                                      plan::BytesOf(context->GetRequiredInputDesc(Q)->GetDataType()),
                                      plan::BytesOf(context->GetRequiredInputDesc(DECAY)->GetDataType())};
    const plan::Device device = plan::DeviceOf(context);
    const uint32_t cores = plan::PlanKdaStep(sizes, device.cores, device.ub, *tiling);
    const bool bias = context->GetOptionalInputShape(BIAS) != nullptr;
    const bool rate = context->GetOptionalInputShape(LOG_RATE) != nullptr;
    if (cores == 0 || bias != rate) {  // the gate is made here from both, or before from neither
        return ge::GRAPH_FAILED;
    }
    tiling->has_gate = bias;
    tiling->beta_logits = *attrs->GetBool(BETA_LOGITS);
    tiling->scale = *attrs->GetFloat(SCALE);
    tiling->norm_eps = *attrs->GetFloat(NORM_EPS);
    tiling->lower_bound = *attrs->GetFloat(LOWER_BOUND);
    return plan::Launch(context, cores);
}

IMPL_OP_OPTILING(KdaStep).Tiling(TilingKdaStep).TilingParse<plan::CompileInfo>(plan::NoCompileInfo);

}  // namespace optiling
