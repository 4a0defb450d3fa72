// SiTU of a gate and a linear part, each row over its largest value / 127 and rounded to int8, ties to even: what
// DynamicQuant makes of SiTU, without its way through memory. Rows of zeros have the scale 0.
#include "situ.h"
#include "situ_mul_quant_tiling.h"

using namespace AscendC;

template <typename T>
class SituMulQuant {
public:
    __aicore__ inline SituMulQuant(const SituMulQuantTiling& tiling, TPipe* pipe) : t(tiling), pipe(pipe) {}

    __aicore__ inline void Init(GM_ADDR gate, GM_ADDR up, GM_ADDR y, GM_ADDR scale)
    {
        gateGm.SetGlobalBuffer((__gm__ T*)gate);
        upGm.SetGlobalBuffer((__gm__ T*)up);
        yGm.SetGlobalBuffer((__gm__ int8_t*)y);
        scaleGm.SetGlobalBuffer((__gm__ float*)scale);
        pipe->InitBuffer(gateIn, 2, rows::RoundUp(t.width * sizeof(T), 32));
        pipe->InitBuffer(upIn, 2, rows::RoundUp(t.width * sizeof(T), 32));
        pipe->InitBuffer(yOut, 2, rows::RoundUp(t.width, 32));
        pipe->InitBuffer(scaleOut, 1, BATCH * sizeof(float));
        pipe->InitBuffer(floatBuf, 4 * t.width * sizeof(float));
        pipe->InitBuffer(smallBuf, 128 * sizeof(float));
        value = floatBuf.Get<float>();
        bound = value[t.width];
        work = bound[t.width];
        twos = work[t.width];
        Duplicate(twos, 2.0f, t.width);
        peak = smallBuf.Get<float>();
        spread = peak[rows::LANES];
        Duplicate(peak, 0.0f, rows::LANES);  // of the block the first counts
    }

    __aicore__ inline void Process()
    {
        const uint32_t cores = GetBlockNum(), core = GetBlockIdx();
        const uint32_t last = uint64_t(t.rows) * (core + 1) / cores;
        for (uint32_t row = uint64_t(t.rows) * core / cores; row < last; row += BATCH) {
            const uint32_t count = rows::Least(BATCH, last - row);
            LocalTensor<float> scales = scaleOut.template AllocTensor<float>();
            for (uint32_t i = 0; i < count; i++) {
                Row(row + i, scales[i]);
            }
            Muls(scales, scales, 1.0f / 127, count);
            scaleOut.EnQue(scales);
            scales = scaleOut.template DeQue<float>();
            DataCopyPad(scaleGm[row], scales, DataCopyExtParams(1, count * sizeof(float), 0, 0, 0));
            scaleOut.FreeTensor(scales);
        }
    }

private:
    static constexpr uint32_t BATCH = 64;  // rows whose scales are written together

    __aicore__ inline void Row(uint32_t row, const LocalTensor<float>& most)
    {
        const uint64_t at = uint64_t(row) * t.width;
        const DataCopyExtParams whole(1, t.width * sizeof(T), 0, 0, 0);
        LocalTensor<T> gate = gateIn.template AllocTensor<T>();
        DataCopyPad(gate, gateGm[at], whole, DataCopyPadExtParams<T>());
        gateIn.EnQue(gate);
        LocalTensor<T> up = upIn.template AllocTensor<T>();
        DataCopyPad(up, upGm[at], whole, DataCopyPadExtParams<T>());
        upIn.EnQue(up);

        gate = gateIn.template DeQue<T>();
        rows::ToFloats(value, gate, t.width);
        gateIn.FreeTensor(gate);
        situ::Bound(bound, value, t.beta, twos, t.width);
        rows::TimesSigmoid(bound, bound, value, work, t.width);
        up = upIn.template DeQue<T>();
        rows::ToFloats(value, up, t.width);
        upIn.FreeTensor(up);
        situ::Bound(work, value, t.linear_beta, twos, t.width);
        Mul(bound, bound, work, t.width);

        Abs(work, bound, t.width);
        rows::LongMax(peak, work, t.width);
        WholeReduceMax<float>(most, peak, rows::BLOCK, 1, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);
        Muls(peak, peak, 1.0f / 127, rows::BLOCK);
        Maxs(peak, peak, LEAST, rows::BLOCK);
        rows::Spread(spread, peak, 1);
        rows::OverOne(bound, bound, spread, t.width);
        Round(at);
    }

    // bound as int8. There is no way to it but from half, which holds whole numbers of this size exactly.
    __aicore__ inline void Round(uint64_t at)
    {
        LocalTensor<int32_t> whole = work.template ReinterpretCast<int32_t>();
        LocalTensor<half> narrow = value.template ReinterpretCast<half>();
        Cast(whole, bound, RoundMode::CAST_RINT, t.width);
        Cast(bound, whole, RoundMode::CAST_RINT, t.width);
        Cast(narrow, bound, RoundMode::CAST_RINT, t.width);
        LocalTensor<int8_t> y = yOut.template AllocTensor<int8_t>();
        Cast(y, narrow, RoundMode::CAST_RINT, t.width);
        yOut.EnQue(y);
        y = yOut.template DeQue<int8_t>();
        DataCopyPad(yGm[at], y, DataCopyExtParams(1, t.width, 0, 0, 0));
        yOut.FreeTensor(y);
    }

    static constexpr float LEAST = 1.17549435e-38f;  // of a divisor: rows of zeros are zeros

    const SituMulQuantTiling t;
    TPipe* pipe;
    GlobalTensor<T> gateGm, upGm;
    GlobalTensor<int8_t> yGm;
    GlobalTensor<float> scaleGm;
    TQue<TPosition::VECIN, 2> gateIn, upIn;
    TQue<TPosition::VECOUT, 2> yOut;
    TQue<TPosition::VECOUT, 1> scaleOut;
    TBuf<TPosition::VECCALC> floatBuf, smallBuf;
    LocalTensor<float> value, bound, work, twos, peak, spread;
};

extern "C" __global__ __aicore__ void situ_mul_quant(GM_ADDR gate, GM_ADDR up, GM_ADDR y, GM_ADDR scale,
                                                     GM_ADDR workspace, GM_ADDR tiling)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    REGISTER_TILING_DEFAULT(SituMulQuantTiling);
    GET_TILING_DATA_WITH_STRUCT(SituMulQuantTiling, t, tiling);
    TPipe pipe;
    SituMulQuant<DTYPE_GATE> op(t, &pipe);
    op.Init(gate, up, y, scale);
    op.Process();
}
