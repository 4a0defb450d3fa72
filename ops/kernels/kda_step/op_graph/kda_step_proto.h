#pragma once

#include "graph/operator_reg.h"

namespace ge {

// KDA, one token of every sequence. q, k, decay [B, 1, H, K], v [B, 1, H, V], beta [B, 1, H], memory [S, H, V, K] by
// slots [B], in place. With bias [H, K] and log_rate [H] `decay` is raw and the gate is made here; with norm_eps >= 0
// q and k are brought to unit length here.
REG_OP(KdaStep)
    .INPUT(q, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .INPUT(k, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .INPUT(v, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .INPUT(decay, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .INPUT(beta, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .INPUT(memory, TensorType({DT_FLOAT}))
    .INPUT(slots, TensorType({DT_INT32}))
    .OPTIONAL_INPUT(bias, TensorType({DT_FLOAT}))
    .OPTIONAL_INPUT(log_rate, TensorType({DT_FLOAT}))
    .OUTPUT(o, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .OUTPUT(memory, TensorType({DT_FLOAT}))
    .REQUIRED_ATTR(scale, Float)
    .ATTR(norm_eps, Float, -1.0f)
    .ATTR(beta_logits, Bool, false)
    .ATTR(lower_bound, Float, 0.0f)
    .OP_END_FACTORY_REG(KdaStep)

}  // namespace ge
