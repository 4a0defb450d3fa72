#include "register/op_impl_registry.h"

namespace ops {

// q, k, decay [B, T, H, K], v [B, T, H, V], beta [B, T, H], memory [S, H, V, K], slots, lengths, counts [B] -> o as v,
// memory.
static ge::graphStatus InferShapeKdaChunk(gert::InferShapeContext* context)
{
    const gert::Shape *q = context->GetRequiredInputShape(0), *v = context->GetRequiredInputShape(2);
    const gert::Shape* memory = context->GetRequiredInputShape(5);
    if (q == nullptr || v == nullptr || memory == nullptr || q->GetDimNum() != 4 || v->GetDimNum() != 4 ||
        memory->GetDimNum() != 4 || memory->GetDim(1) != q->GetDim(2) || memory->GetDim(2) != v->GetDim(3) ||
        memory->GetDim(3) != q->GetDim(3)) {
        return ge::GRAPH_FAILED;
    }
    *context->GetOutputShape(0) = *v;
    *context->GetOutputShape(1) = *memory;
    return ge::GRAPH_SUCCESS;
}

static ge::graphStatus InferDataTypeKdaChunk(gert::InferDataTypeContext* context)
{
    context->SetOutputDataType(0, context->GetRequiredInputDataType(2));
    context->SetOutputDataType(1, context->GetRequiredInputDataType(5));
    return ge::GRAPH_SUCCESS;
}

IMPL_OP_INFERSHAPE(KdaChunk).InferShape(InferShapeKdaChunk).InferDataType(InferDataTypeKdaChunk);

}  // namespace ops
