#include "register/op_impl_registry.h"

namespace ops {

// sources: some [..., D] of one shape, norm, query [D] -> y as each of them.
static ge::graphStatus InferShapeAttnResMix(gert::InferShapeContext* context)
{
    const gert::Shape* first = context->GetDynamicInputShape(0, 0);
    const auto* sources = context->GetIrInputInstanceInfo(0);
    if (first == nullptr || sources == nullptr || first->GetDimNum() == 0) {
        return ge::GRAPH_FAILED;
    }
    for (size_t n = 1; n < sources->GetInstanceNum(); n++) {
        const gert::Shape* other = context->GetDynamicInputShape(0, n);
        if (other == nullptr || other->GetDimNum() != first->GetDimNum()) {
            return ge::GRAPH_FAILED;
        }
        for (size_t i = 0; i < first->GetDimNum(); i++) {
            if (other->GetDim(i) != first->GetDim(i)) {
                return ge::GRAPH_FAILED;
            }
        }
    }
    for (size_t input = 1; input < 3; input++) {
        const gert::Shape* weight = context->GetRequiredInputShape(input);
        if (weight == nullptr || weight->GetDimNum() != 1 || weight->GetDim(0) != first->GetDim(first->GetDimNum() - 1)) {
            return ge::GRAPH_FAILED;
        }
    }
    *context->GetOutputShape(0) = *first;
    return ge::GRAPH_SUCCESS;
}

static ge::graphStatus InferDataTypeAttnResMix(gert::InferDataTypeContext* context)
{
    context->SetOutputDataType(0, context->GetDynamicInputDataType(0, 0));
    return ge::GRAPH_SUCCESS;
}

IMPL_OP_INFERSHAPE(AttnResMix).InferShape(InferShapeAttnResMix).InferDataType(InferDataTypeAttnResMix);

}  // namespace ops
