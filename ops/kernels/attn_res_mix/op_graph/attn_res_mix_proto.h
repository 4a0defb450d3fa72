#pragma once

#include "graph/operator_reg.h"

namespace ge {

// Attention over depth: softmax over the sources [..., D] of RMSNorm(source) * norm . query, times the sources. With an
// addend the last source is the sum of both, which is `total`, else empty. With a gain y is RMSNorm(mix) * gain.
REG_OP(AttnResMix)
    .DYNAMIC_INPUT(sources, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .INPUT(norm, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .INPUT(query, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .OPTIONAL_INPUT(addend, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .OPTIONAL_INPUT(gain, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .OUTPUT(y, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .OUTPUT(total, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .REQUIRED_ATTR(eps, Float)
    .ATTR(norm_eps, Float, 0.0f)
    .OP_END_FACTORY_REG(AttnResMix)

}  // namespace ge
