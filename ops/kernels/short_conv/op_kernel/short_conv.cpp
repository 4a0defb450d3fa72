// Causal depthwise convolution of four taps, then SiLU, with the last three inputs of every channel as state.
//
// In memory taps and windows lie beside each other for a channel; the vector unit wants channels beside each other.
// Gather turns one into the other, in UB. A task is a block of channels of a stretch of one row; who has a row's first
// stretch also reads and writes its windows, so that nobody else meets them.
#include "rows.h"
#include "short_conv_tiling.h"

using namespace AscendC;

template <typename T, typename W>
class ShortConv {
public:
    __aicore__ inline ShortConv(const ShortConvTiling& tiling, TPipe* pipe) : t(tiling), pipe(pipe) {}

    __aicore__ inline void Init(GM_ADDR x, GM_ADDR weight, GM_ADDR window, GM_ADDR slots, GM_ADDR lengths,
                                GM_ADDR counts, GM_ADDR y)
    {
        xGm.SetGlobalBuffer((__gm__ T*)x);
        weightGm.SetGlobalBuffer((__gm__ W*)weight);
        windowGm.SetGlobalBuffer((__gm__ T*)window);
        slotsGm.SetGlobalBuffer((__gm__ int32_t*)slots);
        lengthsGm.SetGlobalBuffer((__gm__ int64_t*)lengths);
        countsGm.SetGlobalBuffer((__gm__ int64_t*)counts);
        yGm.SetGlobalBuffer((__gm__ T*)y);
        const uint32_t n = t.block;
        pipe->InitBuffer(xIn, 2, (t.chunk + PAST) * n * sizeof(T));
        pipe->InitBuffer(yOut, 2, t.chunk * n * sizeof(T));
        pipe->InitBuffer(endIn, 1, PAST * n * sizeof(T));
        pipe->InitBuffer(windowIn, 2, PAST * n * sizeof(T));
        pipe->InitBuffer(windowOut, 2, PAST * n * sizeof(T));
        pipe->InitBuffer(weightIn, 1, TAPS * n * sizeof(W));
        pipe->InitBuffer(floatBuf, (3 * t.chunk + PAST + TAPS + 2 * PAST) * n * sizeof(float));
        pipe->InitBuffer(offsetBuf, 5 * n * sizeof(int32_t));
        wide = floatBuf.Get<float>();
        made = wide[(t.chunk + PAST) * n];
        work = made[t.chunk * n];
        taps = work[t.chunk * n];
        flat = taps[TAPS * n];
        end = flat[PAST * n];
        LocalTensor<int32_t> offsets = offsetBuf.Get<int32_t>();
        Offsets(offsets, offsets[n], offsets[2 * n]);
        ofWindow = offsets.ReinterpretCast<uint32_t>();
        ofTaps = offsets[n].ReinterpretCast<uint32_t>();
        toWindow = offsets[2 * n].ReinterpretCast<uint32_t>();
    }

    __aicore__ inline void Process()
    {
        const uint32_t cores = GetBlockNum(), core = GetBlockIdx();
        const uint32_t last = uint64_t(t.tasks) * (core + 1) / cores, of_block = t.batch * t.chunks;
        uint32_t block = UINT32_MAX;
        for (uint32_t task = uint64_t(t.tasks) * core / cores; task < last; task++) {
            if (task / of_block != block) {
                block = task / of_block;
                Taps(block * t.block);
            }
            Stretch(block * t.block, task % of_block / t.chunks, task % t.chunks);
        }
    }

private:
    static constexpr uint32_t TAPS = 4, PAST = 3;

    // Byte offsets: of channel c's window, c * 3 elements; of its taps, c * 4; and of what stands at place c * 3 + j of a
    // window in [3, block]: j * block + c.
    __aicore__ inline void Offsets(LocalTensor<int32_t> window, LocalTensor<int32_t> weight, LocalTensor<int32_t> back)
    {
        const int32_t n = t.block, all = PAST * t.block;
        CreateVecIndex(window, int32_t(0), n);
        Muls(weight, window, int32_t(TAPS * sizeof(float)), n);
        Muls(window, window, int32_t(PAST * sizeof(float)), n);
        LocalTensor<int32_t> place = wide.template ReinterpretCast<int32_t>();
        LocalTensor<int32_t> channel = flat.template ReinterpretCast<int32_t>();
        CreateVecIndex(place, int32_t(0), all);
        Cast(end, place, RoundMode::CAST_NONE, all);
        Adds(end, end, 0.5f, all);  // in the middle of its third: whatever a third is rounded to, floor is right
        Muls(end, end, 1.0f / PAST, all);
        Cast(channel, end, RoundMode::CAST_FLOOR, all);
        Muls(back, place, int32_t(n * sizeof(float)), all);
        Muls(channel, channel, int32_t((PAST * n - 1) * sizeof(float)), all);
        Sub(back, back, channel, all);
    }

    __aicore__ inline void Taps(uint32_t channel)
    {
        LocalTensor<W> in = weightIn.template AllocTensor<W>();
        DataCopy(in, weightGm[uint64_t(channel) * TAPS], TAPS * t.block);
        weightIn.EnQue(in);
        in = weightIn.template DeQue<W>();
        rows::ToFloats(wide, in, TAPS * t.block);
        weightIn.FreeTensor(in);
        for (uint32_t j = 0; j < TAPS; j++) {
            Gather(taps[j * t.block], wide, ofTaps, j * sizeof(float), t.block);
        }
    }

    // Tokens [from, from + count) of a row: a block of channels of each.
    __aicore__ inline void CopyTokens(const LocalTensor<T>& in, uint32_t row, uint32_t from, uint32_t count, uint32_t channel)
    {
        const uint32_t gap = (t.channels - t.block) * sizeof(T);
        DataCopyPad(in, xGm[(uint64_t(row) * t.tokens + from) * t.channels + channel],
                    DataCopyExtParams(count, t.block * sizeof(T), gap, 0, 0), DataCopyPadExtParams<T>());
    }

    __aicore__ inline void Stretch(uint32_t channel, uint32_t row, uint32_t chunk)
    {
        const uint32_t from = chunk * t.chunk, count = rows::Least(t.chunk, t.tokens - from), n = t.block;
        const uint32_t before = chunk ? PAST : 0;
        LocalTensor<T> in = xIn.template AllocTensor<T>();
        CopyTokens(in, row, from - before, count + before, channel);
        xIn.EnQue(in);
        if (chunk == 0) {
            CopyWindow(channel, row);
        }
        in = xIn.template DeQue<T>();
        rows::ToFloats(wide[(PAST - before) * n], in, (count + before) * n);
        xIn.FreeTensor(in);
        if (chunk == 0) {
            NextWindow(channel, row, count);
        }
        rows::TimesRow(made, wide, taps, count, n);
        for (uint32_t j = 1; j < TAPS; j++) {
            rows::AddTimesRow(made, wide[j * n], taps[j * n], count, n);
        }
        rows::TimesSigmoid(made, made, made, work, count * n);
        LocalTensor<T> out = yOut.template AllocTensor<T>();
        rows::FromFloats(out, made, count * n);
        yOut.EnQue(out);
        out = yOut.template DeQue<T>();
        DataCopyPad(yGm[(uint64_t(row) * t.tokens + from) * t.channels + channel], out,
                    DataCopyExtParams(count, n * sizeof(T), 0, (t.channels - n) * sizeof(T), 0));
        yOut.FreeTensor(out);
    }

    __aicore__ inline uint64_t WindowAt(uint32_t channel, uint32_t row)
    {
        return (uint64_t(slotsGm.GetValue(row)) * t.channels + channel) * PAST;
    }

    // The three inputs before this step, to the head of `wide`; zeros where the sequence starts in this step.
    __aicore__ inline void CopyWindow(uint32_t channel, uint32_t row)
    {
        const uint32_t n = t.block;
        if (lengthsGm.GetValue(row) <= countsGm.GetValue(row)) {
            Duplicate(wide, 0.0f, PAST * n);
            return;
        }
        LocalTensor<T> in = windowIn.template AllocTensor<T>();
        DataCopy(in, windowGm[WindowAt(channel, row)], PAST * n);
        windowIn.EnQue(in);
        in = windowIn.template DeQue<T>();
        rows::ToFloats(flat, in, PAST * n);
        windowIn.FreeTensor(in);
        for (uint32_t j = 0; j < PAST; j++) {
            Gather(wide[j * n], flat, ofWindow, j * sizeof(float), n);
        }
    }

    // The three inputs before the row's padding become its window: of this stretch's `count` tokens, or later ones.
    __aicore__ inline void NextWindow(uint32_t channel, uint32_t row, uint32_t count)
    {
        const uint32_t n = t.block, real = countsGm.GetValue(row);
        LocalTensor<float> last = wide[real * n];
        if (real > count) {
            LocalTensor<T> in = endIn.template AllocTensor<T>();
            CopyTokens(in, row, real - PAST, PAST, channel);
            endIn.EnQue(in);
            in = endIn.template DeQue<T>();
            rows::ToFloats(end, in, PAST * n);
            endIn.FreeTensor(in);
            last = end;
        }
        Gather(flat, last, toWindow, 0, PAST * n);
        LocalTensor<T> out = windowOut.template AllocTensor<T>();
        rows::FromFloats(out, flat, PAST * n);
        windowOut.EnQue(out);
        out = windowOut.template DeQue<T>();
        DataCopy(windowGm[WindowAt(channel, row)], out, PAST * n);
        windowOut.FreeTensor(out);
    }

    const ShortConvTiling t;
    TPipe* pipe;
    GlobalTensor<T> xGm, windowGm, yGm;
    GlobalTensor<W> weightGm;
    GlobalTensor<int32_t> slotsGm;
    GlobalTensor<int64_t> lengthsGm, countsGm;
    TQue<TPosition::VECIN, 2> xIn, windowIn;
    TQue<TPosition::VECIN, 1> weightIn, endIn;
    TQue<TPosition::VECOUT, 2> yOut, windowOut;
    TBuf<TPosition::VECCALC> floatBuf, offsetBuf;
    LocalTensor<float> wide, made, work, taps, flat, end;  // wide: [3 + chunk, block], the inputs as floats
    LocalTensor<uint32_t> ofWindow, ofTaps, toWindow;
};

extern "C" __global__ __aicore__ void short_conv(GM_ADDR x, GM_ADDR weight, GM_ADDR window, GM_ADDR slots,
                                                 GM_ADDR lengths, GM_ADDR counts, GM_ADDR y, GM_ADDR window_out,
                                                 GM_ADDR workspace, GM_ADDR tiling)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    REGISTER_TILING_DEFAULT(ShortConvTiling);
    GET_TILING_DATA_WITH_STRUCT(ShortConvTiling, t, tiling);
    TPipe pipe;
    ShortConv<DTYPE_X, DTYPE_WEIGHT> op(t, &pipe);
    op.Init(x, weight, window, slots, lengths, counts, y);
    op.Process();
}
