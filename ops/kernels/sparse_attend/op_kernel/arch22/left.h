// The left factor of a product on A2 and A3: L0A has rows of fractals.
#pragma once

#include "kernel_operator.h"

namespace sparse {

// [rows, width] of a matrix that L1 has in columns of fractals, `rows` and `width` multiples of 16.
template <typename T>
__aicore__ inline void LoadLeft(const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src, uint32_t rows,
                                uint32_t width)
{
    const uint32_t high = rows / 16, wide = width / 16;
    for (uint32_t r = 0; r < high; r++) {
        AscendC::LoadData(dst[r * wide * 256], src, AscendC::LoadData2DParams(r, wide, high, 0, 0, false, 0));
    }
}

}  // namespace sparse
