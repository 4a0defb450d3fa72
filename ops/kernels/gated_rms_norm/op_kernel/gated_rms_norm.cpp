// RMSNorm of rows, times a weight, times the sigmoid of a gate; float32 throughout, rounded once.
#include "gated_rms_norm_tiling.h"
#include "rows.h"

using namespace AscendC;

template <typename T, typename W>
class GatedRmsNorm {
public:
    __aicore__ inline GatedRmsNorm(const GatedRmsNormTiling& tiling, TPipe* pipe) : t(tiling), pipe(pipe) {}

    __aicore__ inline void Init(GM_ADDR x, GM_ADDR gate, GM_ADDR weight, GM_ADDR y)
    {
        xGm.SetGlobalBuffer((__gm__ T*)x);
        gateGm.SetGlobalBuffer((__gm__ T*)gate);
        weightGm.SetGlobalBuffer((__gm__ W*)weight);
        yGm.SetGlobalBuffer((__gm__ T*)y);
        const uint32_t tile = t.tile * t.width;
        pipe->InitBuffer(xIn, 2, tile * sizeof(T));
        pipe->InitBuffer(gateIn, 2, tile * sizeof(T));
        pipe->InitBuffer(yOut, 2, tile * sizeof(T));
        pipe->InitBuffer(weightIn, 1, t.width * sizeof(W));
        pipe->InitBuffer(floatBuf, (3 * tile + t.tile * (1 + rows::BLOCK) + t.width) * sizeof(float));
        x32 = floatBuf.Get<float>();
        gate32 = x32[tile];
        work = gate32[tile];
        sums = work[tile];
        spread = sums[t.tile];
        weight32 = spread[t.tile * rows::BLOCK];
    }

    __aicore__ inline void Process()
    {
        const uint32_t cores = GetBlockNum(), core = GetBlockIdx();
        const uint32_t last = uint64_t(t.rows) * (core + 1) / cores;
        LocalTensor<W> in = weightIn.template AllocTensor<W>();
        DataCopy(in, weightGm, t.width);
        weightIn.EnQue(in);
        in = weightIn.template DeQue<W>();
        rows::ToFloats(weight32, in, t.width);
        weightIn.FreeTensor(in);
        for (uint32_t row = uint64_t(t.rows) * core / cores; row < last; row += t.tile) {
            Tile(uint64_t(row) * t.width, rows::Least(t.tile, last - row));
        }
    }

private:
    __aicore__ inline void Tile(uint64_t at, uint32_t count)
    {
        const uint32_t all = count * t.width;
        LocalTensor<T> x = xIn.template AllocTensor<T>();
        DataCopy(x, xGm[at], all);
        xIn.EnQue(x);
        LocalTensor<T> gate = gateIn.template AllocTensor<T>();
        DataCopy(gate, gateGm[at], all);
        gateIn.EnQue(gate);

        x = xIn.template DeQue<T>();
        rows::ToFloats(x32, x, all);
        xIn.FreeTensor(x);
        Mul(work, x32, x32, all);
        Duplicate(sums, 0.0f, rows::RoundUp(count, rows::BLOCK));
        rows::RowSums(sums, work, count, t.width);
        Muls(sums, sums, 1.0f / t.width, count);
        Adds(sums, sums, t.eps, count);
        Sqrt(sums, sums, count);  // Sqrt and Div: Rsqrt has fewer than four digits on A2 and A3
        rows::Spread(spread, sums, count);
        rows::OverEach(x32, x32, spread, count, t.width);
        rows::TimesRow(x32, x32, weight32, count, t.width);

        gate = gateIn.template DeQue<T>();
        rows::ToFloats(gate32, gate, all);
        gateIn.FreeTensor(gate);
        rows::TimesSigmoid(x32, x32, gate32, work, all);
        LocalTensor<T> y = yOut.template AllocTensor<T>();
        rows::FromFloats(y, x32, all);
        yOut.EnQue(y);
        y = yOut.template DeQue<T>();
        DataCopy(yGm[at], y, all);
        yOut.FreeTensor(y);
    }

    const GatedRmsNormTiling t;
    TPipe* pipe;
    GlobalTensor<T> xGm, gateGm, yGm;
    GlobalTensor<W> weightGm;
    TQue<TPosition::VECIN, 2> xIn, gateIn;
    TQue<TPosition::VECIN, 1> weightIn;
    TQue<TPosition::VECOUT, 2> yOut;
    TBuf<TPosition::VECCALC> floatBuf;
    LocalTensor<float> x32, gate32, work, sums, spread, weight32;
};

extern "C" __global__ __aicore__ void gated_rms_norm(GM_ADDR x, GM_ADDR gate, GM_ADDR weight, GM_ADDR y,
                                                     GM_ADDR workspace, GM_ADDR tiling)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    REGISTER_TILING_DEFAULT(GatedRmsNormTiling);
    GET_TILING_DATA_WITH_STRUCT(GatedRmsNormTiling, t, tiling);
    TPipe pipe;
    GatedRmsNorm<DTYPE_X, DTYPE_WEIGHT> op(t, &pipe);
    op.Init(x, gate, weight, y);
    op.Process();
}
