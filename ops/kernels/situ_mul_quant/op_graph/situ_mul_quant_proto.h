#pragma once

#include "graph/operator_reg.h"

namespace ge {

// SiTU of gate and up [..., F], quantised by rows: scale [...] is the largest of a row / 127, y [..., F] the row over it.
REG_OP(SituMulQuant)
    .INPUT(gate, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .INPUT(up, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .OUTPUT(y, TensorType({DT_INT8}))
    .OUTPUT(scale, TensorType({DT_FLOAT}))
    .REQUIRED_ATTR(beta, Float)
    .REQUIRED_ATTR(linear_beta, Float)
    .OP_END_FACTORY_REG(SituMulQuant)

}  // namespace ge
