#pragma once

#include "graph/operator_reg.h"

namespace ge {

// KDA over the first `counts` tokens of every row: q, k of unit length and decay [B, T, H, K], v [B, T, H, V], beta
// [B, T, H], memory [S, H, V, K] by slots [B], in place, zeros where lengths <= counts; o is zero past `counts`.
REG_OP(KdaChunk)
    .INPUT(q, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .INPUT(k, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .INPUT(v, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .INPUT(decay, TensorType({DT_FLOAT}))
    .INPUT(beta, TensorType({DT_FLOAT}))
    .INPUT(memory, TensorType({DT_FLOAT}))
    .INPUT(slots, TensorType({DT_INT32}))
    .INPUT(lengths, TensorType({DT_INT64}))
    .INPUT(counts, TensorType({DT_INT64}))
    .OUTPUT(o, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .OUTPUT(memory, TensorType({DT_FLOAT}))
    .REQUIRED_ATTR(scale, Float)
    .OP_END_FACTORY_REG(KdaChunk)

}  // namespace ge
