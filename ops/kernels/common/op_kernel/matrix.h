// Products of float matrices on the Cube: global memory to L1, L1 to L0, L0C to global memory, through queues.
//
// Sizes are multiples of 16. A factor comes as its rows lie ([m, k], and [n, k] for the right one), or transposed ([k, m],
// [k, n]). In L1 a matrix is columns of fractals, 16 x 8; on A3 one that is going to be transposed is in squares of 16 x 16
// instead, row after row, since two fractals side by side are transposed there at once.
#pragma once

#include "kernel_operator.h"

namespace matrix {

using AscendC::GlobalTensor;
using AscendC::LocalTensor;
using AscendC::TPosition;

constexpr uint32_t EDGE = 16;       // of a square
constexpr uint32_t FRACTAL = 128;   // floats
constexpr uint32_t OPERAND = 8192;  // floats of the largest factor and result: half of L0A, of L0B, a quarter of L0C

struct Factor {
    LocalTensor<float> x;
    uint32_t rows, columns;  // as it lies
    bool transposed;
};

class Cube {
public:
    // `loaded`: factors that L1 holds at once.
    __aicore__ inline void Init(AscendC::TPipe* pipe, uint32_t loaded)
    {
        AscendC::SetHF32Mode(AscendC::HF32Mode::DISABLE);  // float32 as it is, whatever ran before
        pipe->InitBuffer(l1, loaded, OPERAND * sizeof(float));
        pipe->InitBuffer(l0a, 2, OPERAND * sizeof(float));
        pipe->InitBuffer(l0b, 2, OPERAND * sizeof(float));
        pipe->InitBuffer(l0c, 2, OPERAND * sizeof(float));
    }

    // [rows, columns] of a matrix whose rows are `pitch` apart.
    __aicore__ inline Factor Load(const GlobalTensor<float>& from, uint32_t rows, uint32_t columns, uint32_t pitch,
                                  bool transposed = false)
    {
        LocalTensor<float> x = l1.AllocTensor<float>();
#if __NPU_ARCH__ == 3510
        const bool squares = false;
#else
        const bool squares = transposed;
#endif
        AscendC::Nd2NzParams p;
        p.ndNum = squares ? rows / EDGE : 1;
        p.nValue = squares ? EDGE : rows;
        p.dValue = columns;
        p.srcNdMatrixStride = squares ? EDGE * pitch : 0;
        p.srcDValue = pitch;
        p.dstNzC0Stride = p.nValue;
        p.dstNzNStride = 1;
        p.dstNzMatrixStride = squares ? EDGE * columns : 0;
        AscendC::DataCopy(x, from, p);
        l1.EnQue(x);
        return {l1.DeQue<float>(), rows, columns, transposed};
    }

    __aicore__ inline void Free(Factor& factor) { l1.FreeTensor(factor.x); }

    __aicore__ inline LocalTensor<float> Result() { return l0c.AllocTensor<float>(); }

    // c = left right, or c += left right; [m, n] from [m, k] and [k, n].
    __aicore__ inline void Multiply(const LocalTensor<float>& c, const Factor& left, const Factor& right, bool fresh)
    {
        const uint32_t m = left.transposed ? left.columns : left.rows, k = left.transposed ? left.rows : left.columns;
        const uint32_t n = right.transposed ? right.columns : right.rows;
        LocalTensor<float> a = l0a.AllocTensor<float>();
        Left(a, left);
        l0a.EnQue(a);
        LocalTensor<float> b = l0b.AllocTensor<float>();
        Right(b, right);
        l0b.EnQue(b);
        a = l0a.DeQue<float>();
        b = l0b.DeQue<float>();
        AscendC::MmadParams p;
        p.m = m;
        p.n = n;
        p.k = k;
        p.cmatrixInitVal = fresh;
        if (!fresh) {  // small products follow each other too closely
            AscendC::PipeBarrier<PIPE_M>();
        }
        AscendC::Mmad(c, a, b, p);
        l0a.FreeTensor(a);
        l0b.FreeTensor(b);
    }

    // The first `rows` of a result [m, columns] to rows `pitch` apart, rounded to T; the result is given back.
    template <typename T>
    __aicore__ inline void Store(const GlobalTensor<T>& to, LocalTensor<float>& c, uint32_t m, uint32_t rows,
                                 uint32_t columns, uint32_t pitch)
    {
        l0c.EnQue(c);
        c = l0c.DeQue<float>();
        AscendC::FixpipeParamsV220 p;
        p.nSize = columns;
        p.mSize = rows;
        p.srcStride = m;
        p.dstStride = pitch;
        if constexpr (AscendC::IsSameType<T, half>::value) {
            p.quantPre = QuantMode_t::F322F16;
        } else if constexpr (AscendC::IsSameType<T, bfloat16_t>::value) {
            p.quantPre = QuantMode_t::F322BF16;
        }
        AscendC::Fixpipe<T, float, AscendC::CFG_ROW_MAJOR>(to, c, p);
        l0c.FreeTensor(c);
    }

private:
    __aicore__ inline void Left(const LocalTensor<float>& a, const Factor& f)
    {
        const uint32_t rows = f.rows / EDGE, columns = f.columns / EDGE;
#if __NPU_ARCH__ == 3510
        Whole(a, f);
#else
        if (f.transposed) {  // a row of fractals of the result is a column of squares
            const AscendC::LoadData2dTransposeParams p(0, rows, columns, 1, 0, 0);
            for (uint32_t i = 0; i < columns; i++) {
                AscendC::LoadDataWithTranspose(a[i * rows * 2 * FRACTAL], f.x[i * 2 * FRACTAL], p);
            }
        } else {
            const AscendC::LoadData2DParams p(0, columns * 2, rows, 0, 0, false, 0);
            for (uint32_t i = 0; i < rows; i++) {
                AscendC::LoadData(a[i * columns * 2 * FRACTAL], f.x[i * FRACTAL], p);
            }
        }
#endif
    }

    __aicore__ inline void Right(const LocalTensor<float>& b, const Factor& f)
    {
#if __NPU_ARCH__ == 3510
        Whole(b, f);
#else
        const uint32_t rows = f.rows / EDGE, columns = f.columns / EDGE;
        if (f.transposed) {
            const AscendC::LoadData2dTransposeParams p(0, columns, 1, 0, columns - 1, 0);
            for (uint32_t i = 0; i < rows; i++) {
                AscendC::LoadDataWithTranspose(b[i * columns * 2 * FRACTAL], f.x[i * columns * 2 * FRACTAL], p);
            }
        } else {  // fractals lie as they are wanted
            AscendC::LoadData(b, f.x, AscendC::LoadData2DParams(0, rows * columns * 2, 1, 0, 0, false, 0));
        }
#endif
    }

#if __NPU_ARCH__ == 3510
    __aicore__ inline void Whole(const LocalTensor<float>& to, const Factor& f)
    {
        const uint32_t rows = f.rows / EDGE, columns = f.columns / EDGE;
        const uint32_t stride = f.transposed ? columns : rows;
        AscendC::LoadData(to, f.x, AscendC::LoadData2DParamsV2(0, 0, rows, columns * 2, rows, stride, f.transposed, 0));
    }
#endif

    AscendC::TQue<TPosition::A1, 1> l1;
    AscendC::TQue<TPosition::A2, 2> l0a;
    AscendC::TQue<TPosition::B2, 2> l0b;
    AscendC::TQue<TPosition::CO1, 2> l0c;
};

}  // namespace matrix
