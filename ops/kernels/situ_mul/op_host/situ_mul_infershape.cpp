#include "register/op_impl_registry.h"

namespace ops {

// gate, up of one shape -> y of it.
static ge::graphStatus InferShapeSituMul(gert::InferShapeContext* context)
{
    const gert::Shape *gate = context->GetRequiredInputShape(0), *up = context->GetRequiredInputShape(1);
    if (gate == nullptr || up == nullptr || gate->GetDimNum() != up->GetDimNum()) {
        return ge::GRAPH_FAILED;
    }
    for (size_t i = 0; i < gate->GetDimNum(); i++) {
        if (gate->GetDim(i) != up->GetDim(i)) {
            return ge::GRAPH_FAILED;
        }
    }
    *context->GetOutputShape(0) = *gate;
    return ge::GRAPH_SUCCESS;
}

static ge::graphStatus InferDataTypeSituMul(gert::InferDataTypeContext* context)
{
    context->SetOutputDataType(0, context->GetRequiredInputDataType(0));
    return ge::GRAPH_SUCCESS;
}

IMPL_OP_INFERSHAPE(SituMul).InferShape(InferShapeSituMul).InferDataType(InferDataTypeSituMul);

}  // namespace ops
