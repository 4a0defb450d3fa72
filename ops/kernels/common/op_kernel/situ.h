// SiTU of floats in UB: beta tanh(g / beta) sigmoid(g) * lb tanh(u / lb).
//
// tanh(x) = 1 - 2 / (1 + exp(2 x)) saturates without a clamp, and is wrong by some 1e-7 whatever x: far less than the
// rounding of a 16-bit result unless that is itself smaller than 1e-4.
#pragma once

#include "rows.h"

namespace situ {

using AscendC::LocalTensor;

// y = limit * tanh(x / limit); `twos` holds twos.
__aicore__ inline void Bound(const LocalTensor<float>& y, const LocalTensor<float>& x, float limit,
                             const LocalTensor<float>& twos, uint32_t count)
{
    AscendC::Muls(y, x, 2.0f / limit, count);
    AscendC::Exp(y, y, count);
    AscendC::Adds(y, y, 1.0f, count);
    AscendC::Div(y, twos, y, count);
    AscendC::Muls(y, y, -limit, count);
    AscendC::Adds(y, y, limit, count);
}

}  // namespace situ
