#include "register/op_impl_registry.h"

namespace ops {

static bool Same(const gert::Shape* a, const gert::Shape* b)
{
    if (a == nullptr || b == nullptr || a->GetDimNum() != b->GetDimNum()) {
        return false;
    }
    for (size_t i = 0; i < a->GetDimNum(); i++) {
        if (a->GetDim(i) != b->GetDim(i)) {
            return false;
        }
    }
    return true;
}

// sources: some [..., D] of one shape, norm, query [D], addend as a source, gain [D] -> y as each source; total too where
// there is an addend, else without elements.
static ge::graphStatus InferShapeAttnResMix(gert::InferShapeContext* context)
{
    const gert::Shape* first = context->GetDynamicInputShape(0, 0);
    const auto* sources = context->GetIrInputInstanceInfo(0);
    if (first == nullptr || sources == nullptr || first->GetDimNum() == 0) {
        return ge::GRAPH_FAILED;
    }
    for (size_t n = 1; n < sources->GetInstanceNum(); n++) {
        if (!Same(context->GetDynamicInputShape(0, n), first)) {
            return ge::GRAPH_FAILED;
        }
    }
    const gert::Shape *addend = context->GetOptionalInputShape(3), *gain = context->GetOptionalInputShape(4);
    const gert::Shape *norm = context->GetRequiredInputShape(1), *query = context->GetRequiredInputShape(2);
    const bool fits = norm != nullptr && norm->GetDimNum() == 1 &&
                      norm->GetDim(0) == first->GetDim(first->GetDimNum() - 1) && Same(query, norm) &&
                      (gain == nullptr || Same(gain, norm)) && (addend == nullptr || Same(addend, first));
    if (!fits) {
        return ge::GRAPH_FAILED;
    }
    gert::Shape* total = context->GetOutputShape(1);
    *context->GetOutputShape(0) = *first;
    if (addend != nullptr) {
        *total = *first;
    } else {
        total->SetDimNum(1);
        total->SetDim(0, 0);
    }
    return ge::GRAPH_SUCCESS;
}

static ge::graphStatus InferDataTypeAttnResMix(gert::InferDataTypeContext* context)
{
    context->SetOutputDataType(0, context->GetDynamicInputDataType(0, 0));
    context->SetOutputDataType(1, context->GetDynamicInputDataType(0, 0));
    return ge::GRAPH_SUCCESS;
}

IMPL_OP_INFERSHAPE(AttnResMix).InferShape(InferShapeAttnResMix).InferDataType(InferDataTypeAttnResMix);

}  // namespace ops
