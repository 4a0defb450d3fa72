// Causal depthwise convolution of four taps, then SiLU, with the last three inputs of every channel as state.
//
// In memory taps and windows lie beside each other for a channel; the vector unit wants channels beside each other.
// Gather turns one into the other, in UB. A task is a block of channels of a stretch of one row, or of some short rows:
// [tokens, lanes], where lanes are the rows' channels. Who has a row's first stretch also reads and writes its windows,
// so that nobody else meets them.
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
        const uint32_t n = t.block, most = t.group * n, before = t.chunks > 1 ? PAST : 0;
        pipe->InitBuffer(xIn, 2, (t.chunk + before) * most * sizeof(T));
        pipe->InitBuffer(yOut, 2, t.chunk * most * sizeof(T));
        pipe->InitBuffer(windowIn, 2, PAST * most * sizeof(T));
        pipe->InitBuffer(windowOut, 2, PAST * most * sizeof(T));
        pipe->InitBuffer(weightIn, 1, TAPS * n * sizeof(W));
        pipe->InitBuffer(floatBuf, ((3 * t.chunk + PAST + 2 * PAST) * most + TAPS * n) * sizeof(float));
        pipe->InitBuffer(offsetBuf, ((1 + PAST) * most + n) * sizeof(int32_t));
        wide = floatBuf.Get<float>();
        made = wide[(t.chunk + PAST) * most];
        work = made[t.chunk * most];
        flat = work[t.chunk * most];
        end = flat[PAST * most];
        taps = end[PAST * most];
        LocalTensor<int32_t> offsets = offsetBuf.Get<int32_t>();
        toWindow = offsets;
        CreateVecIndex(offsets[PAST * most], int32_t(0), most);
        Muls(offsets[(PAST + 1) * most], offsets[PAST * most], int32_t(TAPS * sizeof(float)), n);
        Muls(offsets[PAST * most], offsets[PAST * most], int32_t(PAST * sizeof(float)), most);
        ofWindow = offsets[PAST * most].ReinterpretCast<uint32_t>();
        ofTaps = offsets[(PAST + 1) * most].ReinterpretCast<uint32_t>();
    }

    __aicore__ inline void Process()
    {
        const uint32_t cores = GetBlockNum(), core = GetBlockIdx();
        const uint32_t last = uint64_t(t.tasks) * (core + 1) / cores, ofBlock = t.groups * t.chunks;
        uint32_t block = UINT32_MAX;
        for (uint32_t task = uint64_t(t.tasks) * core / cores; task < last; task++) {
            if (task / ofBlock != block) {
                block = task / ofBlock;
                Taps(block * t.block);
            }
            row = task % ofBlock / t.chunks * t.group;
            rowsHere = rows::Least(t.group, t.batch - row);
            channel = block * t.block;
            Stretch(task % t.chunks);
        }
    }

private:
    static constexpr uint32_t TAPS = 4, PAST = 3;

    // Offsets back into windows: at place c * 3 + j of a window stands lane c of row j of [3, lanes].
    __aicore__ inline void SetLanes(uint32_t count)
    {
        if (count == lanes) {
            return;
        }
        lanes = count;
        const int32_t all = PAST * lanes;
        LocalTensor<int32_t> place = wide.template ReinterpretCast<int32_t>();
        LocalTensor<int32_t> lane = flat.template ReinterpretCast<int32_t>();
        CreateVecIndex(place, int32_t(0), all);
        Cast(end, place, RoundMode::CAST_RINT, all);
        Adds(end, end, 0.5f, all);  // in the middle of its third: whatever a third is rounded to, floor is right
        Muls(end, end, 1.0f / PAST, all);
        Cast(lane, end, RoundMode::CAST_FLOOR, all);
        Muls(toWindow, place, int32_t(lanes * sizeof(float)), all);
        Muls(lane, lane, int32_t((all - 1) * sizeof(float)), all);
        Sub(toWindow, toWindow, lane, all);
    }

    __aicore__ inline void Taps(uint32_t first)
    {
        LocalTensor<W> in = weightIn.template AllocTensor<W>();
        DataCopy(in, weightGm[uint64_t(first) * TAPS], TAPS * t.block);
        weightIn.EnQue(in);
        in = weightIn.template DeQue<W>();
        rows::ToFloats(wide, in, TAPS * t.block);
        weightIn.FreeTensor(in);
        for (uint32_t j = 0; j < TAPS; j++) {
            Gather(taps[j * t.block], wide, ofTaps, j * sizeof(float), t.block);
        }
    }

    // Tokens [from, from + count) of the rows, to or from [count, lanes]: whole rows, or one token of all rows at a time.
    __aicore__ inline void CopyTokens(const LocalTensor<T>& in, uint32_t from, uint32_t count)
    {
        const uint32_t bytes = t.block * sizeof(T), all = t.channels * sizeof(T);
        const uint64_t at = (uint64_t(row) * t.tokens + from) * t.channels + channel;
        if (rowsHere == 1) {
            DataCopyPad(in, xGm[at], DataCopyExtParams(count, bytes, all - bytes, 0, 0), DataCopyPadExtParams<T>());
            return;
        }
        const DataCopyExtParams over(rowsHere, bytes, t.tokens * all - bytes, 0, 0);
        for (uint32_t i = 0; i < count; i++) {
            DataCopyPad(in[i * lanes], xGm[at + uint64_t(i) * t.channels], over, DataCopyPadExtParams<T>());
        }
    }

    __aicore__ inline void CopyResult(const LocalTensor<T>& out, uint32_t from, uint32_t count)
    {
        const uint32_t bytes = t.block * sizeof(T), all = t.channels * sizeof(T);
        const uint64_t at = (uint64_t(row) * t.tokens + from) * t.channels + channel;
        if (rowsHere == 1) {
            DataCopyPad(yGm[at], out, DataCopyExtParams(count, bytes, 0, all - bytes, 0));
            return;
        }
        const DataCopyExtParams over(rowsHere, bytes, 0, t.tokens * all - bytes, 0);
        for (uint32_t i = 0; i < count; i++) {
            DataCopyPad(yGm[at + uint64_t(i) * t.channels], out[i * lanes], over);
        }
    }

    __aicore__ inline void Stretch(uint32_t chunk)
    {
        const uint32_t from = chunk * t.chunk, count = rows::Least(t.chunk, t.tokens - from);
        const uint32_t before = chunk ? PAST : 0;
        SetLanes(rowsHere * t.block);
        LocalTensor<T> in = xIn.template AllocTensor<T>();
        CopyTokens(in, from - before, count + before);
        xIn.EnQue(in);
        if (chunk == 0) {
            CopyWindows();
        }
        in = xIn.template DeQue<T>();
        rows::ToFloats(wide[(PAST - before) * lanes], in, (count + before) * lanes);
        xIn.FreeTensor(in);
        if (chunk == 0) {
            NextWindows(count);
        }
        const uint32_t lines = count * rowsHere;
        rows::TimesRow(made, wide, taps, lines, t.block);
        for (uint32_t j = 1; j < TAPS; j++) {
            rows::AddTimesRow(made, wide[j * lanes], taps[j * t.block], lines, t.block);
        }
        rows::TimesSigmoid(made, made, made, work, count * lanes);
        LocalTensor<T> out = yOut.template AllocTensor<T>();
        rows::FromFloats(out, made, count * lanes);
        yOut.EnQue(out);
        out = yOut.template DeQue<T>();
        CopyResult(out, from, count);
        yOut.FreeTensor(out);
    }

    __aicore__ inline uint64_t WindowAt(uint32_t i)
    {
        return (uint64_t(slotsGm.GetValue(row + i)) * t.channels + channel) * PAST;
    }

    __aicore__ inline bool Starts(uint32_t i) { return lengthsGm.GetValue(row + i) <= countsGm.GetValue(row + i); }

    // The three inputs before this step, to the head of `wide`; zeros where a sequence starts in this step.
    __aicore__ inline void CopyWindows()
    {
        const uint32_t n = t.block;
        if (rowsHere == 1 && Starts(0)) {
            Duplicate(wide, 0.0f, PAST * n);
            return;
        }
        LocalTensor<T> in = windowIn.template AllocTensor<T>();
        for (uint32_t i = 0; i < rowsHere; i++) {
            DataCopy(in[i * PAST * n], windowGm[WindowAt(i)], PAST * n);
        }
        windowIn.EnQue(in);
        in = windowIn.template DeQue<T>();
        rows::ToFloats(flat, in, PAST * lanes);
        windowIn.FreeTensor(in);
        for (uint32_t j = 0; j < PAST; j++) {
            Gather(wide[j * lanes], flat, ofWindow, j * sizeof(float), lanes);
        }
        for (uint32_t i = 0; i < rowsHere; i++) {
            for (uint32_t j = 0; j < PAST && Starts(i); j++) {
                Duplicate(wide[j * lanes + i * n], 0.0f, n);
            }
        }
    }

    // The three inputs before a row's padding become its window: among this stretch's `count` tokens, or later.
    __aicore__ inline void NextWindows(uint32_t count)
    {
        const uint32_t n = t.block;
        Gather(flat, wide[count * lanes], toWindow.template ReinterpretCast<uint32_t>(), 0, PAST * lanes);
        for (uint32_t i = 0; i < rowsHere; i++) {
            const uint32_t real = countsGm.GetValue(row + i);
            LocalTensor<float> last = wide[real * lanes + i * n];
            if (real == count) {
                continue;
            }
            if (real > count) {  // in a later stretch: the row is alone
                LocalTensor<T> in = windowIn.template AllocTensor<T>();
                CopyTokens(in, real - PAST, PAST);
                windowIn.EnQue(in);
                in = windowIn.template DeQue<T>();
                rows::ToFloats(end, in, PAST * n);
                windowIn.FreeTensor(in);
                last = end;
            }
            Gather(flat[i * PAST * n], last, toWindow.template ReinterpretCast<uint32_t>(), 0, PAST * n);
        }
        LocalTensor<T> out = windowOut.template AllocTensor<T>();
        rows::FromFloats(out, flat, PAST * lanes);
        windowOut.EnQue(out);
        out = windowOut.template DeQue<T>();
        for (uint32_t i = 0; i < rowsHere; i++) {
            DataCopy(windowGm[WindowAt(i)], out[i * PAST * n], PAST * n);
        }
        windowOut.FreeTensor(out);
    }

    const ShortConvTiling t;
    TPipe* pipe;
    GlobalTensor<T> xGm, windowGm, yGm;
    GlobalTensor<W> weightGm;
    GlobalTensor<int32_t> slotsGm;
    GlobalTensor<int64_t> lengthsGm, countsGm;
    TQue<TPosition::VECIN, 2> xIn, windowIn;
    TQue<TPosition::VECIN, 1> weightIn;
    TQue<TPosition::VECOUT, 2> yOut, windowOut;
    TBuf<TPosition::VECCALC> floatBuf, offsetBuf;
    LocalTensor<float> wide, made, work, taps, flat, end;  // wide: [3 + chunk, lanes], the inputs as floats
    LocalTensor<uint32_t> ofWindow, ofTaps;
    LocalTensor<int32_t> toWindow;
    uint32_t row = 0, rowsHere = 0, channel = 0, lanes = 0;  // of the task
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
