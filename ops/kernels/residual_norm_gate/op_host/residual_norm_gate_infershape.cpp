#include "register/op_impl_registry.h"

namespace ops {

static bool Same(const gert::Shape* a, const gert::Shape* b)
{
    if (a->GetDimNum() != b->GetDimNum()) {
        return false;
    }
    for (size_t i = 0; i < a->GetDimNum(); i++) {
        if (a->GetDim(i) != b->GetDim(i)) {
            return false;
        }
    }
    return true;
}

// x [..., D], residual and gate as it, weight [D] -> y as x; sum too where there is a residual, else without elements.
static ge::graphStatus InferShapeResidualNormGate(gert::InferShapeContext* context)
{
    const gert::Shape *x = context->GetRequiredInputShape(0), *residual = context->GetOptionalInputShape(1);
    const gert::Shape *weight = context->GetOptionalInputShape(2), *gate = context->GetOptionalInputShape(3);
    if (x == nullptr || x->GetDimNum() == 0) {
        return ge::GRAPH_FAILED;
    }
    const bool fits = (residual == nullptr || Same(residual, x)) && (gate == nullptr || Same(gate, x)) &&
                      (weight == nullptr ||
                       (weight->GetDimNum() == 1 && weight->GetDim(0) == x->GetDim(x->GetDimNum() - 1)));
    if (!fits) {
        return ge::GRAPH_FAILED;
    }
    gert::Shape* sum = context->GetOutputShape(1);
    *context->GetOutputShape(0) = *x;
    if (residual != nullptr) {
        *sum = *x;
    } else {
        sum->SetDimNum(1);
        sum->SetDim(0, 0);
    }
    return ge::GRAPH_SUCCESS;
}

static ge::graphStatus InferDataTypeResidualNormGate(gert::InferDataTypeContext* context)
{
    context->SetOutputDataType(0, context->GetRequiredInputDataType(0));
    context->SetOutputDataType(1, context->GetRequiredInputDataType(0));
    return ge::GRAPH_SUCCESS;
}

IMPL_OP_INFERSHAPE(ResidualNormGate)
    .InferShape(InferShapeResidualNormGate)
    .InferDataType(InferDataTypeResidualNormGate);

}  // namespace ops
