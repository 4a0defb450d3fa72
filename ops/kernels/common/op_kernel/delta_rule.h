// One token of KDA on some rows of a head's state, all of it float32 in UB.
#pragma once

#include "rows.h"

namespace rows {

// What a token brings, as floats: `keep` is exp of the decay; `beta` fills a block.
struct Token {
    LocalTensor<float> q, k, keep, v, beta;
};

// Room for a step: `product` as large as the rows of the state, `sums` a number and `spread` a block for each row.
struct Room {
    LocalTensor<float> product, sums, spread;
};

// next = state diag(keep); next += beta (v - next k) k^T; o = next q. `next` may be the state; q is scaled.
__aicore__ inline void DeltaStep(const LocalTensor<float>& next, const LocalTensor<float>& state,
                                 const LocalTensor<float>& o, const Token& token, const Room& room, uint32_t count,
                                 uint32_t width)
{
    TimesRow(next, state, token.keep, count, width);
    TimesRow(room.product, next, token.k, count, width);
    RowSums(room.sums, room.product, count, width);
    AscendC::Sub(room.sums, token.v, room.sums, count);
    TimesOne(room.sums, room.sums, token.beta, count);
    Spread(room.spread, room.sums, count);
    AddOuter(next, room.spread, token.k, count, width);
    TimesRow(room.product, next, token.q, count, width);
    RowSums(o, room.product, count, width);
}

}  // namespace rows
