#pragma once

#include "graph/operator_reg.h"

namespace ge {

// y = RMSNorm(x + residual) * weight * sigmoid(gate), of what is given: x, residual, gate [..., D], weight [D]. sum is
// x + residual, and empty where there is no residual.
REG_OP(ResidualNormGate)
    .INPUT(x, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .OPTIONAL_INPUT(residual, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .OPTIONAL_INPUT(weight, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .OPTIONAL_INPUT(gate, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .OUTPUT(y, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .OUTPUT(sum, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .ATTR(eps, Float, 0.0f)
    .OP_END_FACTORY_REG(ResidualNormGate)

}  // namespace ge
