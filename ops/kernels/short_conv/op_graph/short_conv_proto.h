#pragma once

#include "graph/operator_reg.h"

namespace ge {

// Causal depthwise convolution of four taps, oldest first, then SiLU: x [B, T, H, K], weight [H, K, 4], window
// [S, H, K, 3] by slots [B], in place, zeros where lengths <= counts; the last three of a row's `counts` tokens stay.
REG_OP(ShortConv)
    .INPUT(x, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .INPUT(weight, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .INPUT(window, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .INPUT(slots, TensorType({DT_INT32}))
    .INPUT(lengths, TensorType({DT_INT64}))
    .INPUT(counts, TensorType({DT_INT64}))
    .OUTPUT(y, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .OUTPUT(window, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .OP_END_FACTORY_REG(ShortConv)

}  // namespace ge
