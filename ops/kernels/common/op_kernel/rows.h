// Rows of floats in UB: a tile is [rows, width], `width` a multiple of 8 and at most 2040, rows one after another.
//
// A vector instruction repeats over rows: 64 lanes of each, with a stride from row to row; stride 0 uses one row, or one
// block, again and again. Dependent vector instructions need no barrier here: the compiler puts it (2201), the unit keeps
// order (3510).
#pragma once

#include "kernel_operator.h"

namespace rows {

using AscendC::BinaryRepeatParams;
using AscendC::LocalTensor;

constexpr uint32_t LANES = 64;       // floats of a repeat
constexpr uint32_t BLOCK = 8;        // floats of a data block
constexpr uint32_t MOST = 248;       // rows of one instruction: a multiple of 8 under 256

__aicore__ inline uint32_t Least(uint32_t a, uint32_t b) { return a < b ? a : b; }
__aicore__ inline uint32_t RoundUp(uint32_t n, uint32_t unit) { return (n + unit - 1) / unit * unit; }

// A 16-bit float or float as float.
template <typename T>
__aicore__ inline void ToFloats(const LocalTensor<float>& y, const LocalTensor<T>& x, uint32_t count)
{
    if constexpr (AscendC::IsSameType<T, float>::value) {
        AscendC::Muls(y, x, 1.0f, count);
    } else {
        AscendC::Cast(y, x, AscendC::RoundMode::CAST_NONE, count);
    }
}

template <typename T>
__aicore__ inline void FromFloats(const LocalTensor<T>& y, const LocalTensor<float>& x, uint32_t count)
{
    if constexpr (AscendC::IsSameType<T, float>::value) {
        AscendC::Muls(y, x, 1.0f, count);
    } else {
        AscendC::Cast(y, x, AscendC::RoundMode::CAST_RINT, count);
    }
}

template <typename T>
__aicore__ inline float ScalarFloat(T x)
{
    if constexpr (AscendC::IsSameType<T, bfloat16_t>::value) {
        return AscendC::ToFloat(x);
    } else {
        return static_cast<float>(x);
    }
}

// y[r, :] = x[r, :] * v.
__aicore__ inline void TimesRow(const LocalTensor<float>& y, const LocalTensor<float>& x, const LocalTensor<float>& v,
                                uint32_t rows, uint32_t width)
{
    const BinaryRepeatParams p(1, 1, 1, width / BLOCK, width / BLOCK, 0);
    for (uint32_t r = 0; r < rows; r += MOST) {
        for (uint32_t c = 0; c < width; c += LANES) {
            const uint32_t at = r * width + c;
            AscendC::Mul(y[at], x[at], v[c], Least(LANES, width - c), Least(MOST, rows - r), p);
        }
    }
}

// y[r, :] += x[r, :] * v.
__aicore__ inline void AddTimesRow(const LocalTensor<float>& y, const LocalTensor<float>& x,
                                   const LocalTensor<float>& v, uint32_t rows, uint32_t width)
{
    const BinaryRepeatParams p(1, 1, 1, width / BLOCK, width / BLOCK, 0);
    for (uint32_t r = 0; r < rows; r += MOST) {
        for (uint32_t c = 0; c < width; c += LANES) {
            const uint32_t at = r * width + c;
            AscendC::MulAddDst(y[at], x[at], v[c], Least(LANES, width - c), Least(MOST, rows - r), p);
        }
    }
}

// y[r, :] += s[r] * v, where `spread` has each s[r] in a block of its own.
__aicore__ inline void AddOuter(const LocalTensor<float>& y, const LocalTensor<float>& spread,
                                const LocalTensor<float>& v, uint32_t rows, uint32_t width)
{
    const BinaryRepeatParams p(1, 0, 1, width / BLOCK, 1, 0);
    for (uint32_t r = 0; r < rows; r += MOST) {
        for (uint32_t c = 0; c < width; c += LANES) {
            AscendC::MulAddDst(y[r * width + c], spread[r * BLOCK], v[c], Least(LANES, width - c),
                               Least(MOST, rows - r), p);
        }
    }
}

// y[r, :] = x[r, :] / s[r], where `spread` has each s[r] in a block of its own.
__aicore__ inline void OverEach(const LocalTensor<float>& y, const LocalTensor<float>& x,
                                const LocalTensor<float>& spread, uint32_t rows, uint32_t width)
{
    const BinaryRepeatParams p(1, 1, 0, width / BLOCK, width / BLOCK, 1);
    for (uint32_t r = 0; r < rows; r += MOST) {
        for (uint32_t c = 0; c < width; c += LANES) {
            const uint32_t at = r * width + c;
            AscendC::Div(y[at], x[at], spread[r * BLOCK], Least(LANES, width - c), Least(MOST, rows - r), p);
        }
    }
}

// y[r, :] = x[r, :] * s[r] and y[r, :] = x[r, :] - s[r], in the same way.
__aicore__ inline void TimesEach(const LocalTensor<float>& y, const LocalTensor<float>& x,
                                 const LocalTensor<float>& spread, uint32_t rows, uint32_t width)
{
    const BinaryRepeatParams p(1, 1, 0, width / BLOCK, width / BLOCK, 1);
    for (uint32_t r = 0; r < rows; r += MOST) {
        for (uint32_t c = 0; c < width; c += LANES) {
            const uint32_t at = r * width + c;
            AscendC::Mul(y[at], x[at], spread[r * BLOCK], Least(LANES, width - c), Least(MOST, rows - r), p);
        }
    }
}

__aicore__ inline void MinusEach(const LocalTensor<float>& y, const LocalTensor<float>& x,
                                 const LocalTensor<float>& spread, uint32_t rows, uint32_t width)
{
    const BinaryRepeatParams p(1, 1, 0, width / BLOCK, width / BLOCK, 1);
    for (uint32_t r = 0; r < rows; r += MOST) {
        for (uint32_t c = 0; c < width; c += LANES) {
            const uint32_t at = r * width + c;
            AscendC::Sub(y[at], x[at], spread[r * BLOCK], Least(LANES, width - c), Least(MOST, rows - r), p);
        }
    }
}

// y = x * s, y += x * s, y = x / s, for the one number s that fills the block `one`.
__aicore__ inline void TimesOne(const LocalTensor<float>& y, const LocalTensor<float>& x, const LocalTensor<float>& one,
                                uint32_t count)
{
    const BinaryRepeatParams p(1, 1, 0, BLOCK, BLOCK, 0);
    for (uint32_t c = 0; c < count; c += MOST * LANES) {
        const uint32_t full = Least(MOST, (count - c) / LANES), rest = Least(MOST * LANES, count - c) - full * LANES;
        if (full) AscendC::Mul(y[c], x[c], one, LANES, full, p);
        if (rest) AscendC::Mul(y[c + full * LANES], x[c + full * LANES], one, rest, 1, p);
    }
}

__aicore__ inline void AddTimesOne(const LocalTensor<float>& y, const LocalTensor<float>& x,
                                   const LocalTensor<float>& one, uint32_t count)
{
    const BinaryRepeatParams p(1, 1, 0, BLOCK, BLOCK, 0);
    for (uint32_t c = 0; c < count; c += MOST * LANES) {
        const uint32_t full = Least(MOST, (count - c) / LANES), rest = Least(MOST * LANES, count - c) - full * LANES;
        if (full) AscendC::MulAddDst(y[c], x[c], one, LANES, full, p);
        if (rest) AscendC::MulAddDst(y[c + full * LANES], x[c + full * LANES], one, rest, 1, p);
    }
}

__aicore__ inline void OverOne(const LocalTensor<float>& y, const LocalTensor<float>& x, const LocalTensor<float>& one,
                               uint32_t count)
{
    const BinaryRepeatParams p(1, 1, 0, BLOCK, BLOCK, 0);
    for (uint32_t c = 0; c < count; c += MOST * LANES) {
        const uint32_t full = Least(MOST, (count - c) / LANES), rest = Least(MOST * LANES, count - c) - full * LANES;
        if (full) AscendC::Div(y[c], x[c], one, LANES, full, p);
        if (rest) AscendC::Div(y[c + full * LANES], x[c + full * LANES], one, rest, 1, p);
    }
}

// s[r] in a block of its own each; `rows` of `s` are rounded up to 8, and have to hold something.
__aicore__ inline void Spread(const LocalTensor<float>& spread, const LocalTensor<float>& s, uint32_t rows)
{
    for (uint32_t r = 0; r < rows; r += MOST) {
        AscendC::Brcb(spread[r * BLOCK], s[r], RoundUp(Least(MOST, rows - r), BLOCK) / BLOCK, {1, 8});
    }
}

// sums[r step] = x[r, 0] + x[r, 1] + ...; x is used up.
__aicore__ inline void RowSums(const LocalTensor<float>& sums, const LocalTensor<float>& x, uint32_t rows,
                               uint32_t width, uint32_t step = 1)
{
    const uint32_t stride = width / BLOCK;
    const BinaryRepeatParams p(1, 1, 1, stride, stride, stride);
    for (uint32_t r = 0; r < rows; r += MOST) {
        const uint32_t count = Least(MOST, rows - r);
        for (uint32_t c = LANES; c < width; c += LANES) {  // onto the first 64 lanes
            AscendC::Add(x[r * width], x[r * width], x[r * width + c], Least(LANES, width - c), count, p);
        }
        AscendC::WholeReduceSum<float>(sums[r * step], x[r * width], Least(LANES, width), count, step, 1, stride);
    }
}

// x[0] + x[1] + ... in sum[0]; `count` is a multiple of 8, x is used up. For one long row: halves are added.
__aicore__ inline void LongSum(const LocalTensor<float>& sum, const LocalTensor<float>& x, uint32_t count)
{
    while (count > LANES) {
        const uint32_t half_count = RoundUp(count / 2, BLOCK);
        AscendC::Add(x, x, x[half_count], count - half_count);
        count = half_count;
    }
    AscendC::WholeReduceSum<float>(sum, x, count, 1, 1, 1, 8);
}

// The largest of x[0], x[1], ... in most[0]; as LongSum.
__aicore__ inline void LongMax(const LocalTensor<float>& most, const LocalTensor<float>& x, uint32_t count)
{
    while (count > LANES) {
        const uint32_t half_count = RoundUp(count / 2, BLOCK);
        AscendC::Max(x, x, x[half_count], count - half_count);
        count = half_count;
    }
    AscendC::WholeReduceMax<float>(most, x, count, 1, 1, 1, 8, AscendC::ReduceOrder::ORDER_ONLY_VALUE);
}

// y = numerator / (1 + exp(-x)): times the sigmoid of x. `work` is used up; it may be x, not the numerator.
__aicore__ inline void TimesSigmoid(const LocalTensor<float>& y, const LocalTensor<float>& numerator,
                                    const LocalTensor<float>& x, const LocalTensor<float>& work, uint32_t count)
{
    AscendC::Muls(work, x, -1.0f, count);
    AscendC::Exp(work, work, count);  // infinite for x under -88: then y is 0
    AscendC::Adds(work, work, 1.0f, count);
    AscendC::Div(y, numerator, work, count);
}

}  // namespace rows
