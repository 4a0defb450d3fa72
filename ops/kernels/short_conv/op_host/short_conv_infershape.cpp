#include "register/op_impl_registry.h"

namespace ops {

// x [B, T, H, K], weight [H, K, 4], window [S, H, K, 3], slots, lengths, counts [B] -> y as x, window.
static ge::graphStatus InferShapeShortConv(gert::InferShapeContext* context)
{
    const gert::Shape *x = context->GetRequiredInputShape(0), *weight = context->GetRequiredInputShape(1);
    const gert::Shape* window = context->GetRequiredInputShape(2);
    if (x == nullptr || weight == nullptr || window == nullptr || x->GetDimNum() != 4 || weight->GetDimNum() != 3 ||
        window->GetDimNum() != 4 || weight->GetDim(2) != 4 || window->GetDim(3) != 3) {
        return ge::GRAPH_FAILED;
    }
    for (size_t i = 0; i < 2; i++) {
        if (weight->GetDim(i) != x->GetDim(i + 2) || window->GetDim(i + 1) != x->GetDim(i + 2)) {
            return ge::GRAPH_FAILED;
        }
    }
    *context->GetOutputShape(0) = *x;
    *context->GetOutputShape(1) = *window;
    return ge::GRAPH_SUCCESS;
}

static ge::graphStatus InferDataTypeShortConv(gert::InferDataTypeContext* context)
{
    context->SetOutputDataType(0, context->GetRequiredInputDataType(0));
    context->SetOutputDataType(1, context->GetRequiredInputDataType(2));
    return ge::GRAPH_SUCCESS;
}

IMPL_OP_INFERSHAPE(ShortConv).InferShape(InferShapeShortConv).InferDataType(InferDataTypeShortConv);

}  // namespace ops
