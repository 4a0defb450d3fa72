#pragma once

#include "graph/operator_reg.h"

namespace ge {

// Attention over depth: softmax over the sources [..., D] of RMSNorm(source) * norm . query, times the sources.
REG_OP(AttnResMix)
    .DYNAMIC_INPUT(sources, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .INPUT(norm, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .INPUT(query, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .OUTPUT(y, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .REQUIRED_ATTR(eps, Float)
    .OP_END_FACTORY_REG(AttnResMix)

}  // namespace ge
