// The left factor of a product on the 950: L0A has columns of fractals, as L1 has.
#pragma once

#include "kernel_operator.h"

namespace sparse {

// [rows, width] of a matrix that L1 has in columns of fractals, `rows` and `width` multiples of 16.
template <typename T>
__aicore__ inline void LoadLeft(const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src, uint32_t rows,
                                uint32_t width)
{
    AscendC::LoadData(dst, src, AscendC::LoadData2DParams(0, rows * width / 256, 1, 0, 0, false, 0));
}

}  // namespace sparse
