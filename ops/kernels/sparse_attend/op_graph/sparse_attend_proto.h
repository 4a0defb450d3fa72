#pragma once

#include "graph/operator_reg.h"

namespace ge {

// Attention in the latent space to selected tokens of a paged cache. q [B, T, H, L], q_rope [B, T, H, R], latent
// [P, page, 1, L], rope [P, page, 1, R], selected [B, T, J] positions of the row's sequence by block_table [B, N]; those
// that are negative or after the query, which stands at lengths - counts + i, are not attended to. o as q, lse [B, T, H]
// the log of what weights were divided by; zeros and -1e30 where nothing is attended to, and past `counts`.
REG_OP(SparseAttend)
    .INPUT(q, TensorType({DT_BF16, DT_FLOAT16}))
    .INPUT(q_rope, TensorType({DT_BF16, DT_FLOAT16}))
    .INPUT(latent, TensorType({DT_BF16, DT_FLOAT16}))
    .INPUT(rope, TensorType({DT_BF16, DT_FLOAT16}))
    .INPUT(selected, TensorType({DT_INT32}))
    .INPUT(block_table, TensorType({DT_INT32}))
    .INPUT(lengths, TensorType({DT_INT64}))
    .INPUT(counts, TensorType({DT_INT64}))
    .OUTPUT(o, TensorType({DT_BF16, DT_FLOAT16}))
    .OUTPUT(lse, TensorType({DT_FLOAT}))
    .REQUIRED_ATTR(scale, Float)
    .OP_END_FACTORY_REG(SparseAttend)

}  // namespace ge
