#pragma once

#include "graph/operator_reg.h"

namespace ge {

// RMSNorm of x over its last dimension, times weight, times the sigmoid of gate: x, gate [..., D], weight [D].
REG_OP(GatedRmsNorm)
    .INPUT(x, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .INPUT(gate, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .INPUT(weight, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .OUTPUT(y, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .REQUIRED_ATTR(eps, Float)
    .OP_END_FACTORY_REG(GatedRmsNorm)

}  // namespace ge
