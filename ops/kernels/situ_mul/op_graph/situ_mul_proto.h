#pragma once

#include "graph/operator_reg.h"

namespace ge {

// SiTU of a gate and a linear part of one shape: beta tanh(gate / beta) sigmoid(gate) * lb tanh(up / lb).
REG_OP(SituMul)
    .INPUT(gate, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .INPUT(up, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .OUTPUT(y, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .REQUIRED_ATTR(beta, Float)
    .REQUIRED_ATTR(linear_beta, Float)
    .OP_END_FACTORY_REG(SituMul)

}  // namespace ge
