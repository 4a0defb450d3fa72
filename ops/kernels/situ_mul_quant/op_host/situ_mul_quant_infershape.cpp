#include "register/op_impl_registry.h"

namespace ops {

// gate, up [..., F] of one shape -> y of it, scale [...].
static ge::graphStatus InferShapeSituMulQuant(gert::InferShapeContext* context)
{
    const gert::Shape *gate = context->GetRequiredInputShape(0), *up = context->GetRequiredInputShape(1);
    if (gate == nullptr || up == nullptr || gate->GetDimNum() == 0 || gate->GetDimNum() != up->GetDimNum()) {
        return ge::GRAPH_FAILED;
    }
    gert::Shape *y = context->GetOutputShape(0), *scale = context->GetOutputShape(1);
    *y = *gate;
    scale->SetDimNum(gate->GetDimNum() - 1);
    for (size_t i = 0; i < gate->GetDimNum(); i++) {
        if (gate->GetDim(i) != up->GetDim(i)) {
            return ge::GRAPH_FAILED;
        }
        if (i + 1 < gate->GetDimNum()) {
            scale->SetDim(i, gate->GetDim(i));
        }
    }
    return ge::GRAPH_SUCCESS;
}

static ge::graphStatus InferDataTypeSituMulQuant(gert::InferDataTypeContext* context)
{
    context->SetOutputDataType(0, ge::DT_INT8);
    context->SetOutputDataType(1, ge::DT_FLOAT);
    return ge::GRAPH_SUCCESS;
}

IMPL_OP_INFERSHAPE(SituMulQuant).InferShape(InferShapeSituMulQuant).InferDataType(InferDataTypeSituMulQuant);

}  // namespace ops
