#include "register/op_impl_registry.h"

namespace ops {

// q [B, T, H, L], q_rope [B, T, H, R], latent [P, page, 1, L], rope [P, page, 1, R], selected [B, T, J], block_table
// [B, N], lengths, counts [B] -> o as q, lse [B, T, H].
static ge::graphStatus InferShapeSparseAttend(gert::InferShapeContext* context)
{
    const gert::Shape *q = context->GetRequiredInputShape(0), *rope = context->GetRequiredInputShape(1);
    const gert::Shape *latents = context->GetRequiredInputShape(2), *ropes = context->GetRequiredInputShape(3);
    const gert::Shape *selected = context->GetRequiredInputShape(4), *table = context->GetRequiredInputShape(5);
    if (q == nullptr || rope == nullptr || latents == nullptr || ropes == nullptr || selected == nullptr ||
        table == nullptr || q->GetDimNum() != 4 || rope->GetDimNum() != 4 || latents->GetDimNum() != 4 ||
        ropes->GetDimNum() != 4 || selected->GetDimNum() != 3 || table->GetDimNum() != 2) {
        return ge::GRAPH_FAILED;
    }
    for (size_t i = 0; i < 3; i++) {
        if (rope->GetDim(i) != q->GetDim(i) || ropes->GetDim(i) != latents->GetDim(i)) {
            return ge::GRAPH_FAILED;
        }
    }
    if (selected->GetDim(0) != q->GetDim(0) || selected->GetDim(1) != q->GetDim(1) ||
        table->GetDim(0) != q->GetDim(0) || latents->GetDim(2) != 1 || latents->GetDim(3) != q->GetDim(3) ||
        ropes->GetDim(3) != rope->GetDim(3)) {
        return ge::GRAPH_FAILED;
    }
    *context->GetOutputShape(0) = *q;
    gert::Shape* lse = context->GetOutputShape(1);
    lse->SetDimNum(3);
    for (size_t i = 0; i < 3; i++) {
        lse->SetDim(i, q->GetDim(i));
    }
    return ge::GRAPH_SUCCESS;
}

static ge::graphStatus InferDataTypeSparseAttend(gert::InferDataTypeContext* context)
{
    context->SetOutputDataType(0, context->GetRequiredInputDataType(0));
    context->SetOutputDataType(1, ge::DT_FLOAT);
    return ge::GRAPH_SUCCESS;
}

IMPL_OP_INFERSHAPE(SparseAttend).InferShape(InferShapeSparseAttend).InferDataType(InferDataTypeSparseAttend);

}  // namespace ops
