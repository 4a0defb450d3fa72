// SiTU of a gate and a linear part; float32 inside, rounded once.
#include "situ.h"
#include "situ_mul_tiling.h"

using namespace AscendC;

template <typename T>
class SituMul {
public:
    __aicore__ inline SituMul(const SituMulTiling& tiling, TPipe* pipe) : t(tiling), pipe(pipe) {}

    __aicore__ inline void Init(GM_ADDR gate, GM_ADDR up, GM_ADDR y)
    {
        gateGm.SetGlobalBuffer((__gm__ T*)gate, t.count);
        upGm.SetGlobalBuffer((__gm__ T*)up, t.count);
        yGm.SetGlobalBuffer((__gm__ T*)y, t.count);
        pipe->InitBuffer(gateIn, 2, t.tile * sizeof(T));
        pipe->InitBuffer(upIn, 2, t.tile * sizeof(T));
        pipe->InitBuffer(yOut, 2, t.tile * sizeof(T));
        pipe->InitBuffer(floatBuf, 4 * t.tile * sizeof(float));
        value = floatBuf.Get<float>();
        bound = value[t.tile];
        work = bound[t.tile];
        twos = work[t.tile];
        Duplicate(twos, 2.0f, t.tile);
    }

    __aicore__ inline void Process()
    {
        const uint64_t cores = GetBlockNum(), core = GetBlockIdx(), units = (t.count + t.unit - 1) / t.unit;
        const uint64_t end = units * (core + 1) / cores * t.unit, last = end < t.count ? end : t.count;
        for (uint64_t at = units * core / cores * t.unit; at < last; at += t.tile) {
            Tile(at, last - at < t.tile ? uint32_t(last - at) : t.tile);
        }
    }

private:
    __aicore__ inline void Tile(uint64_t at, uint32_t count)
    {
        const DataCopyExtParams whole(1, count * sizeof(T), 0, 0, 0);
        LocalTensor<T> gate = gateIn.template AllocTensor<T>();
        DataCopyPad(gate, gateGm[at], whole, DataCopyPadExtParams<T>());
        gateIn.EnQue(gate);
        LocalTensor<T> up = upIn.template AllocTensor<T>();
        DataCopyPad(up, upGm[at], whole, DataCopyPadExtParams<T>());
        upIn.EnQue(up);

        gate = gateIn.template DeQue<T>();
        rows::ToFloats(value, gate, count);
        gateIn.FreeTensor(gate);
        situ::Bound(bound, value, t.beta, twos, count);
        rows::TimesSigmoid(bound, bound, value, work, count);
        up = upIn.template DeQue<T>();
        rows::ToFloats(value, up, count);
        upIn.FreeTensor(up);
        situ::Bound(work, value, t.linear_beta, twos, count);
        Mul(bound, bound, work, count);
        LocalTensor<T> y = yOut.template AllocTensor<T>();
        rows::FromFloats(y, bound, count);
        yOut.EnQue(y);
        y = yOut.template DeQue<T>();
        DataCopyPad(yGm[at], y, whole);
        yOut.FreeTensor(y);
    }

    const SituMulTiling t;
    TPipe* pipe;
    GlobalTensor<T> gateGm, upGm, yGm;
    TQue<TPosition::VECIN, 2> gateIn, upIn;
    TQue<TPosition::VECOUT, 2> yOut;
    TBuf<TPosition::VECCALC> floatBuf;
    LocalTensor<float> value, bound, work, twos;
};

extern "C" __global__ __aicore__ void situ_mul(GM_ADDR gate, GM_ADDR up, GM_ADDR y, GM_ADDR workspace, GM_ADDR tiling)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    REGISTER_TILING_DEFAULT(SituMulTiling);
    GET_TILING_DATA_WITH_STRUCT(SituMulTiling, t, tiling);
    TPipe pipe;
    SituMul<DTYPE_GATE> op(t, &pipe);
    op.Init(gate, up, y);
    op.Process();
}
