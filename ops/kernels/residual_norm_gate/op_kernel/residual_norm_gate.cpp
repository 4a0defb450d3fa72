// What stands around attention without a product or a collective in between: a residual is added (and the sum kept,
// rounded), RMSNorm of rows times a weight, times the sigmoid of a gate; each where it is given. float32 inside.
#include "residual_norm_gate_tiling.h"
#include "rows.h"

using namespace AscendC;

template <typename T, typename W>
class ResidualNormGate {
public:
    __aicore__ inline ResidualNormGate(const ResidualNormGateTiling& tiling, TPipe* pipe) : t(tiling), pipe(pipe) {}

    __aicore__ inline void Init(GM_ADDR x, GM_ADDR residual, GM_ADDR weight, GM_ADDR gate, GM_ADDR y, GM_ADDR sum)
    {
        xGm.SetGlobalBuffer((__gm__ T*)x, t.count);
        yGm.SetGlobalBuffer((__gm__ T*)y, t.count);
        if (t.has_residual) {
            residualGm.SetGlobalBuffer((__gm__ T*)residual, t.count);
            sumGm.SetGlobalBuffer((__gm__ T*)sum, t.count);
        }
        if (t.has_gate) {
            gateGm.SetGlobalBuffer((__gm__ T*)gate, t.count);
        }
        pipe->InitBuffer(rowIn, 2, t.tile * sizeof(T));
        pipe->InitBuffer(rowOut, 2, t.tile * sizeof(T));
        pipe->InitBuffer(floatBuf, (t.has_weight ? 3 : 2) * t.tile * sizeof(float));
        pipe->InitBuffer(smallBuf, 2 * rows::LANES * sizeof(float));
        value = floatBuf.Get<float>();
        work = value[t.tile];
        if (t.has_weight) {
            weightGm.SetGlobalBuffer((__gm__ W*)weight, t.tile);
            gain = work[t.tile];
        }
        square = smallBuf.Get<float>();
        spread = square[rows::LANES];
        Duplicate(square, 0.0f, rows::LANES);  // of the block the first counts
    }

    __aicore__ inline void Process()
    {
        if (t.has_weight) {
            ReadWeight();
        }
        const uint64_t cores = GetBlockNum(), core = GetBlockIdx(), units = (t.count + t.unit - 1) / t.unit;
        const uint64_t end = units * (core + 1) / cores * t.unit, last = end < t.count ? end : t.count;
        for (uint64_t at = units * core / cores * t.unit; at < last; at += t.tile) {
            Tile(at, last - at < t.tile ? uint32_t(last - at) : t.tile);
        }
    }

private:
    // In pieces of at most the size of a row.
    __aicore__ inline void ReadWeight()
    {
        const uint32_t piece = sizeof(W) > sizeof(T) ? t.tile / 2 : t.tile;
        for (uint32_t at = 0; at < t.tile; at += piece) {
            const uint32_t count = rows::Least(piece, t.tile - at);
            LocalTensor<W> in = rowIn.template AllocTensor<W>();
            DataCopy(in, weightGm[at], count);
            rowIn.EnQue(in);
            in = rowIn.template DeQue<W>();
            rows::ToFloats(gain[at], in, count);
            rowIn.FreeTensor(in);
        }
    }

    __aicore__ inline void Tile(uint64_t at, uint32_t count)
    {
        Load(value, xGm[at], count);
        if (t.has_residual) {
            Load(work, residualGm[at], count);
            Add(value, value, work, count);
            Store(sumGm[at], value, count, true);
        }
        if (t.has_weight) {
            Normalise(count);
        }
        if (t.has_gate) {
            Load(work, gateGm[at], count);
            rows::TimesSigmoid(value, value, work, work, count);
        }
        Store(yGm[at], value, count, false);
    }

    __aicore__ inline void Load(const LocalTensor<float>& y, const GlobalTensor<T>& x, uint32_t count)
    {
        LocalTensor<T> in = rowIn.template AllocTensor<T>();
        DataCopyPad(in, x, DataCopyExtParams(1, count * sizeof(T), 0, 0, 0), DataCopyPadExtParams<T>());
        rowIn.EnQue(in);
        in = rowIn.template DeQue<T>();
        rows::ToFloats(y, in, count);
        rowIn.FreeTensor(in);
    }

    // y = x; where it is kept, x becomes what was written.
    __aicore__ inline void Store(const GlobalTensor<T>& y, const LocalTensor<float>& x, uint32_t count, bool kept)
    {
        LocalTensor<T> out = rowOut.template AllocTensor<T>();
        rows::FromFloats(out, x, count);
        if (kept) {
            rows::ToFloats(x, out, count);
        }
        rowOut.EnQue(out);
        out = rowOut.template DeQue<T>();
        DataCopyPad(y, out, DataCopyExtParams(1, count * sizeof(T), 0, 0, 0));
        rowOut.FreeTensor(out);
    }

    // value = value / sqrt(mean(value^2) + eps) * gain. Sqrt and Div: Rsqrt has fewer than four digits on A2 and A3.
    __aicore__ inline void Normalise(uint32_t count)
    {
        Mul(work, value, value, count);
        rows::LongSum(square, work, count);
        Muls(square, square, 1.0f / count, rows::BLOCK);
        Adds(square, square, t.eps, rows::BLOCK);
        Sqrt(square, square, rows::BLOCK);
        rows::Spread(spread, square, 1);
        rows::OverOne(value, value, spread, count);
        Mul(value, value, gain, count);
    }

    const ResidualNormGateTiling t;
    TPipe* pipe;
    GlobalTensor<T> xGm, residualGm, gateGm, yGm, sumGm;
    GlobalTensor<W> weightGm;
    TQue<TPosition::VECIN, 2> rowIn;
    TQue<TPosition::VECOUT, 2> rowOut;
    TBuf<TPosition::VECCALC> floatBuf, smallBuf;
    LocalTensor<float> value, work, gain, square, spread;
};

#ifndef DTYPE_WEIGHT
#define DTYPE_WEIGHT DTYPE_X  // the weight is optional
#endif

extern "C" __global__ __aicore__ void residual_norm_gate(GM_ADDR x, GM_ADDR residual, GM_ADDR weight, GM_ADDR gate,
                                                         GM_ADDR y, GM_ADDR sum, GM_ADDR workspace, GM_ADDR tiling)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    REGISTER_TILING_DEFAULT(ResidualNormGateTiling);
    GET_TILING_DATA_WITH_STRUCT(ResidualNormGateTiling, t, tiling);
    TPipe pipe;
    ResidualNormGate<DTYPE_X, DTYPE_WEIGHT> op(t, &pipe);
    op.Init(x, residual, weight, gate, y, sum);
    op.Process();
}
