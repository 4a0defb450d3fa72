#include "register/op_impl_registry.h"

namespace ops {

// x, gate [..., D], weight [D] -> y as x.
static ge::graphStatus InferShapeGatedRmsNorm(gert::InferShapeContext* context)
{
    const gert::Shape *x = context->GetRequiredInputShape(0), *gate = context->GetRequiredInputShape(1);
    const gert::Shape* weight = context->GetRequiredInputShape(2);
    if (x == nullptr || gate == nullptr || weight == nullptr || x->GetDimNum() == 0 || weight->GetDimNum() != 1 ||
        x->GetDimNum() != gate->GetDimNum() || weight->GetDim(0) != x->GetDim(x->GetDimNum() - 1)) {
        return ge::GRAPH_FAILED;
    }
    for (size_t i = 0; i < x->GetDimNum(); i++) {
        if (x->GetDim(i) != gate->GetDim(i)) {
            return ge::GRAPH_FAILED;
        }
    }
    *context->GetOutputShape(0) = *x;
    return ge::GRAPH_SUCCESS;
}

static ge::graphStatus InferDataTypeGatedRmsNorm(gert::InferDataTypeContext* context)
{
    context->SetOutputDataType(0, context->GetRequiredInputDataType(0));
    return ge::GRAPH_SUCCESS;
}

IMPL_OP_INFERSHAPE(GatedRmsNorm).InferShape(InferShapeGatedRmsNorm).InferDataType(InferDataTypeGatedRmsNorm);

}  // namespace ops
