// Attention over depth: softmax over sources of RMSNorm(source) * norm . query, times the sources as they are; where
// asked for, the last source is a sum that is made here (and kept, rounded), and the mix is normalised.
//
// With many tokens a core has whole ones and reads each source of a token once: the mix so far is scaled down where a
// source with a larger score comes (online softmax). With few tokens there are two phases: cores have slices of tokens,
// which stay in UB; they tell each other their parts of the scores, then mix. float32 inside, rounded once.
#include "attn_res_mix_tiling.h"
#include "kernel_operator_list_tensor_intf.h"
#include "rows.h"

using namespace AscendC;

template <typename T, typename W>
class AttnResMix {
public:
    __aicore__ inline AttnResMix(const AttnResMixTiling& tiling, TPipe* pipe) : t(tiling), pipe(pipe) {}

    __aicore__ inline void Init(GM_ADDR sources, GM_ADDR norm, GM_ADDR query, GM_ADDR addend, GM_ADDR gain, GM_ADDR y,
                                GM_ADDR total)
    {
        list.Init((__gm__ void*)sources);
        normGm.SetGlobalBuffer((__gm__ W*)norm);
        queryGm.SetGlobalBuffer((__gm__ W*)query);
        yGm.SetGlobalBuffer((__gm__ T*)y);
        if (t.has_addend) {
            addendGm.SetGlobalBuffer((__gm__ T*)addend);
            totalGm.SetGlobalBuffer((__gm__ T*)total);
        }
        pipe->InitBuffer(sourceIn, 2, t.width * sizeof(T));
        pipe->InitBuffer(yOut, 1, t.width * sizeof(T));
        pipe->InitBuffer(floatBuf, (t.has_gain ? 5 : 4) * t.width * sizeof(float));
        pipe->InitBuffer(smallBuf, 128 * sizeof(float));
        aim = floatBuf.Get<float>();
        value = aim[t.width];
        work = value[t.width];
        mix = work[t.width];
        if (t.has_gain) {
            gainGm.SetGlobalBuffer((__gm__ W*)gain);
            gain32 = mix[t.width];
        }
        LocalTensor<float> small = smallBuf.Get<float>();
        Duplicate(small, 0.0f, 128);  // of each block of eight the first counts
        square = small;
        score = small[8];
        peak = small[16];
        sum = small[24];
        kept = small[32];
        share = small[40];
        spread = small[64];
    }

    __aicore__ inline void Process()
    {
        Read(aim, normGm);
        Read(work, queryGm);
        Mul(aim, aim, work, t.width);
        if (t.has_gain) {
            Read(gain32, gainGm);
        }
        const uint32_t cores = GetBlockNum(), core = GetBlockIdx();
        const uint32_t last = uint64_t(t.tokens) * (core + 1) / cores;
        for (uint32_t token = uint64_t(t.tokens) * core / cores; token < last; token++) {
            Token(token);
        }
    }

private:
    static constexpr uint32_t ONE = rows::BLOCK;

    // A weight, in pieces of at most the size of a source.
    __aicore__ inline void Read(const LocalTensor<float>& y, const GlobalTensor<W>& x)
    {
        const uint32_t piece = sizeof(W) > sizeof(T) ? t.width / 2 : t.width;
        for (uint32_t at = 0; at < t.width; at += piece) {
            const uint32_t count = rows::Least(piece, t.width - at);
            LocalTensor<W> in = sourceIn.template AllocTensor<W>();
            DataCopy(in, x[at], count);
            sourceIn.EnQue(in);
            in = sourceIn.template DeQue<W>();
            rows::ToFloats(y[at], in, count);
            sourceIn.FreeTensor(in);
        }
    }

    __aicore__ inline void Token(uint32_t token)
    {
        const uint64_t at = uint64_t(token) * t.width;
        for (uint32_t i = 0; i < t.sources; i++) {
            GlobalTensor<T> source;
            source.SetGlobalBuffer(list.template GetDataPtr<T>(i));
            Load(value, source[at]);
            if (t.has_addend && i + 1 == t.sources) {
                Load(work, addendGm[at]);
                Add(value, value, work, t.width);
                Store(totalGm[at], value, true);
            }
            Score();
            Join(i == 0);
        }
        rows::Spread(spread, sum, 1);
        rows::OverOne(mix, mix, spread, t.width);
        if (t.has_gain) {
            Normalise();
        }
        Store(yGm[at], mix, false);
    }

    __aicore__ inline void Load(const LocalTensor<float>& y, const GlobalTensor<T>& x)
    {
        LocalTensor<T> in = sourceIn.template AllocTensor<T>();
        DataCopy(in, x, t.width);
        sourceIn.EnQue(in);
        in = sourceIn.template DeQue<T>();
        rows::ToFloats(y, in, t.width);
        sourceIn.FreeTensor(in);
    }

    // y = x; where it is kept, x becomes what was written.
    __aicore__ inline void Store(const GlobalTensor<T>& y, const LocalTensor<float>& x, bool kept)
    {
        LocalTensor<T> out = yOut.template AllocTensor<T>();
        rows::FromFloats(out, x, t.width);
        if (kept) {
            rows::ToFloats(x, out, t.width);
        }
        yOut.EnQue(out);
        out = yOut.template DeQue<T>();
        DataCopy(y, out, t.width);
        yOut.FreeTensor(out);
    }

    // mix = mix / sqrt(mean(mix^2) + eps) * gain.
    __aicore__ inline void Normalise()
    {
        Mul(work, mix, mix, t.width);
        rows::LongSum(square, work, t.width);
        Muls(square, square, 1.0f / t.width, ONE);
        Adds(square, square, t.norm_eps, ONE);
        Sqrt(square, square, ONE);
        rows::Spread(spread, square, 1);
        rows::OverOne(mix, mix, spread, t.width);
        Mul(mix, mix, gain32, t.width);
    }

    // score = (value . aim) / sqrt(mean(value^2) + eps).
    __aicore__ inline void Score()
    {
        Mul(work, value, value, t.width);
        rows::LongSum(square, work, t.width);
        Muls(square, square, 1.0f / t.width, ONE);
        Adds(square, square, t.eps, ONE);
        Sqrt(square, square, ONE);  // Sqrt and Div: Rsqrt has fewer than four digits on A2 and A3
        Mul(work, value, aim, t.width);
        rows::LongSum(score, work, t.width);
        Div(score, score, square, ONE);
    }

    // mix, sum and peak with one source more.
    __aicore__ inline void Join(bool first)
    {
        if (first) {
            Muls(mix, value, 1.0f, t.width);
            Duplicate(sum, 1.0f, ONE);
            Muls(peak, score, 1.0f, ONE);
            return;
        }
        Max(square, peak, score, ONE);
        Sub(kept, peak, square, ONE);
        Exp(kept, kept, ONE);
        Sub(share, score, square, ONE);
        Exp(share, share, ONE);
        Muls(peak, square, 1.0f, ONE);
        Mul(sum, sum, kept, ONE);
        Add(sum, sum, share, ONE);
        rows::Spread(spread, kept, 1);
        rows::TimesOne(mix, mix, spread, t.width);
        rows::Spread(spread, share, 1);
        rows::AddTimesOne(mix, value, spread, t.width);
    }

    const AttnResMixTiling t;
    TPipe* pipe;
    ListTensorDesc list;
    GlobalTensor<W> normGm, queryGm, gainGm;
    GlobalTensor<T> addendGm, yGm, totalGm;
    TQue<TPosition::VECIN, 2> sourceIn;
    TQue<TPosition::VECOUT, 1> yOut;
    TBuf<TPosition::VECCALC> floatBuf, smallBuf;
    LocalTensor<float> aim, value, work, mix, gain32, square, score, peak, sum, kept, share, spread;
};

// Slices of tokens. Cores come in groups of `slices`; a group has a stretch of the tokens, and goes through it in rounds.
// Letters in layouts: N sources, K tokens of a round, C channels of a slice.
template <typename T, typename W>
class AttnResMixSliced {
public:
    __aicore__ inline AttnResMixSliced(const AttnResMixTiling& tiling, TPipe* pipe) : t(tiling), pipe(pipe) {}

    __aicore__ inline void Init(GM_ADDR sources, GM_ADDR norm, GM_ADDR query, GM_ADDR addend, GM_ADDR gain, GM_ADDR y,
                                GM_ADDR total, GM_ADDR workspace)
    {
        list.Init((__gm__ void*)sources);
        normGm.SetGlobalBuffer((__gm__ W*)norm);
        queryGm.SetGlobalBuffer((__gm__ W*)query);
        yGm.SetGlobalBuffer((__gm__ T*)y);
        if (t.has_addend) {
            addendGm.SetGlobalBuffer((__gm__ T*)addend);
            totalGm.SetGlobalBuffer((__gm__ T*)total);
        }
        if (t.has_gain) {
            gainGm.SetGlobalBuffer((__gm__ W*)gain);
        }
        const uint32_t cores = GetBlockNum(), units = t.width / 16, most = (units + t.slices - 1) / t.slices * 16;
        groups = cores / t.slices;
        group = GetBlockIdx() / t.slices;
        slice = GetBlockIdx() % t.slices;
        first = units * slice / t.slices * 16;
        width = units * (slice + 1) / t.slices * 16 - first;
        lanes = rows::RoundUp(t.held, rows::BLOCK);
        numbers = t.sources * lanes;
        told = rows::RoundUp(2 * t.sources * t.held, rows::BLOCK);
        toldNorms = rows::RoundUp(t.held, rows::BLOCK);
        workGm.SetGlobalBuffer((__gm__ float*)GetUserWorkspace(workspace));

        pipe->InitBuffer(heldIn, 1, (t.sources + t.has_addend) * t.held * most * sizeof(T));
        pipe->InitBuffer(weightIn, 1, most * sizeof(W));
        pipe->InitBuffer(rowOut, 1, most * sizeof(T));
        pipe->InitBuffer(partOut, 1, 2 * numbers * sizeof(float));
        pipe->InitBuffer(partsIn, 1, 2 * numbers * t.slices * sizeof(float));
        pipe->InitBuffer(normOut, 1, lanes * sizeof(float));
        pipe->InitBuffer(normsIn, 1, lanes * t.slices * sizeof(float));
        pipe->InitBuffer(floatBuf, (t.has_gain ? 5 : 4) * most * sizeof(float));
        pipe->InitBuffer(smallBuf, (numbers * (2 + rows::BLOCK) + lanes * (3 + rows::BLOCK)) * sizeof(float));
        aim = floatBuf.Get<float>();
        value = aim[most];
        work = value[most];
        mix = work[most];
        if (t.has_gain) {
            gain32 = mix[most];
        }
        shares = smallBuf.Get<float>();
        squares = shares[numbers];
        spread = squares[numbers];
        peak = spread[numbers * rows::BLOCK];
        sum = peak[lanes];
        norms = sum[lanes];
        spreadNorms = norms[lanes];
    }

    __aicore__ inline void Process()
    {
        Read(aim, normGm);
        Read(work, queryGm);
        Mul(aim, aim, work, width);
        if (t.has_gain) {
            Read(gain32, gainGm);
        }
        const uint32_t start = uint64_t(t.tokens) * group / groups, end = uint64_t(t.tokens) * (group + 1) / groups;
        const uint32_t longest = (t.tokens + groups - 1) / groups;  // all groups wait as often
        for (uint32_t done = 0, round = 0; done < longest; done += t.held, round++) {
            const uint32_t at = start + done;
            Round(at, at < end ? rows::Least(t.held, end - at) : 0, round % 2);
        }
    }

private:
    __aicore__ inline void Read(const LocalTensor<float>& y, const GlobalTensor<W>& x)
    {
        LocalTensor<W> in = weightIn.template AllocTensor<W>();
        DataCopy(in, x[first], width);
        weightIn.EnQue(in);
        in = weightIn.template DeQue<W>();
        rows::ToFloats(y, in, width);
        weightIn.FreeTensor(in);
    }

    __aicore__ inline void Round(uint32_t token, uint32_t count, uint32_t turn)
    {
        if (count) {
            Load(token, count);
            TellScores(token, count, turn);
        }
        Meet();
        if (count) {
            Weigh(count, turn);
            for (uint32_t k = 0; k < count; k++) {
                Mix(token + k, k);
            }
        }
        if (t.has_gain) {
            if (count) {
                TellNorms(count, turn);
            }
            Meet();
            if (count) {
                Normalise(token, count, turn);
            }
        }
        if (count) {
            heldIn.FreeTensor(held);
        }
    }

    // All cores have written what they tell.
    __aicore__ inline void Meet()
    {
        CrossCoreSetFlag<0, PIPE_MTE3>(FLAG);
        CrossCoreWaitFlag(FLAG);
    }

    // The slice of some tokens of every source, then of the addend: [N, K, C].
    __aicore__ inline void Load(uint32_t token, uint32_t count)
    {
        held = heldIn.template AllocTensor<T>();
        const uint64_t at = uint64_t(token) * t.width + first;
        const uint32_t block = 32 / sizeof(T);
        const DataCopyParams stretch(count, width / block, (t.width - width) / block, 0);
        for (uint32_t i = 0; i < t.sources + t.has_addend; i++) {
            GlobalTensor<T> source;
            source.SetGlobalBuffer(i < t.sources ? list.template GetDataPtr<T>(i) : (__gm__ T*)addendGm.GetPhyAddr());
            DataCopy(held[Place(i, 0)], source[at], stretch);
        }
        heldIn.EnQue(held);
        held = heldIn.template DeQue<T>();
    }

    __aicore__ inline uint32_t Place(uint32_t source, uint32_t k) { return (source * t.held + k) * width; }

    // First phase: of every source and token, the slice's part of the sum of squares and of the product with the aim.
    __aicore__ inline void TellScores(uint32_t token, uint32_t count, uint32_t turn)
    {
        LocalTensor<float> part = partOut.template AllocTensor<float>();
        for (uint32_t i = 0; i < t.sources; i++) {
            for (uint32_t k = 0; k < count; k++) {
                rows::ToFloats(value, held[Place(i, k)], width);
                if (t.has_addend && i + 1 == t.sources) {
                    AddTo(token + k, k);
                }
                Mul(work, value, value, width);
                rows::LongSum(part[i * lanes + k], work, width);
                Mul(work, value, aim, width);
                rows::LongSum(part[numbers + i * lanes + k], work, width);
            }
        }
        partOut.EnQue(part);
        part = partOut.template DeQue<float>();
        const uint32_t gap = (lanes - rows::RoundUp(count, rows::BLOCK)) / rows::BLOCK;
        DataCopyPad(workGm[Told(slice, turn)], part, DataCopyExtParams(2 * t.sources, count * sizeof(float), gap, 0, 0));
        partOut.FreeTensor(part);
    }

    // value, the last source of a token, plus the addend; rounded, given out, and kept in its place.
    __aicore__ inline void AddTo(uint32_t token, uint32_t k)
    {
        rows::ToFloats(work, held[Place(t.sources, k)], width);
        Add(value, value, work, width);
        rows::FromFloats(held[Place(t.sources - 1, k)], value, width);
        rows::ToFloats(value, held[Place(t.sources - 1, k)], width);
        Store(totalGm[uint64_t(token) * t.width + first], value);
    }

    __aicore__ inline void Store(const GlobalTensor<T>& y, const LocalTensor<float>& x)
    {
        LocalTensor<T> out = rowOut.template AllocTensor<T>();
        rows::FromFloats(out, x, width);
        rowOut.EnQue(out);
        out = rowOut.template DeQue<T>();
        DataCopy(y, out, width);
        rowOut.FreeTensor(out);
    }

    // Where a core of this group tells scores, and norms.
    __aicore__ inline uint64_t Told(uint32_t of, uint32_t turn)
    {
        return uint64_t((turn * groups + group) * t.slices + of) * told;
    }

    __aicore__ inline uint64_t ToldNorms(uint32_t of, uint32_t turn)
    {
        return 2 * uint64_t(groups) * t.slices * told + uint64_t((turn * groups + group) * t.slices + of) * toldNorms;
    }

    // Second phase: shares [N, K] of the sources, each in a block of its own.
    __aicore__ inline void Weigh(uint32_t count, uint32_t turn)
    {
        LocalTensor<float> parts = partsIn.template AllocTensor<float>();
        const uint32_t gap = (lanes - rows::RoundUp(count, rows::BLOCK)) / rows::BLOCK;
        const DataCopyExtParams numbersOfOne(2 * t.sources, count * sizeof(float), 0, gap, 0);
        for (uint32_t i = 0; i < t.slices; i++) {
            DataCopyPad(parts[2 * numbers * i], workGm[Told(i, turn)], numbersOfOne, Pad(count));
        }
        partsIn.EnQue(parts);
        parts = partsIn.template DeQue<float>();
        for (uint32_t i = 0; i < t.sources; i++) {
            const uint32_t at = i * lanes;
            Muls(squares[at], parts[at], 1.0f, count);
            Muls(shares[at], parts[numbers + at], 1.0f, count);
            for (uint32_t other = 1; other < t.slices; other++) {
                Add(squares[at], squares[at], parts[2 * numbers * other + at], count);
                Add(shares[at], shares[at], parts[2 * numbers * other + numbers + at], count);
            }
            Muls(squares[at], squares[at], 1.0f / t.width, count);
            Adds(squares[at], squares[at], t.eps, count);
            Sqrt(squares[at], squares[at], count);  // Sqrt and Div: Rsqrt has fewer than four digits on A2 and A3
            Div(shares[at], shares[at], squares[at], count);
            if (i == 0) {
                Muls(peak, shares, 1.0f, count);
            } else {
                Max(peak, peak, shares[at], count);
            }
        }
        partsIn.FreeTensor(parts);
        Duplicate(sum, 0.0f, count);
        for (uint32_t i = 0; i < t.sources; i++) {
            Sub(shares[i * lanes], shares[i * lanes], peak, count);
            Exp(shares[i * lanes], shares[i * lanes], count);
            Add(sum, sum, shares[i * lanes], count);
        }
        Duplicate(squares, 0.0f, lanes);  // lanes without a token hold something too
        for (uint32_t i = 0; i < t.sources; i++) {
            Div(squares, shares[i * lanes], sum, count);
            rows::Spread(spread[i * lanes * rows::BLOCK], squares, lanes);
        }
    }

    __aicore__ inline DataCopyPadExtParams<float> Pad(uint32_t count)
    {
        const uint32_t rest = rows::RoundUp(count, rows::BLOCK) - count;
        return DataCopyPadExtParams<float>(rest != 0, 0, rest, 0.0f);
    }

    __aicore__ inline void Mix(uint32_t token, uint32_t k)
    {
        for (uint32_t i = 0; i < t.sources; i++) {
            rows::ToFloats(value, held[Place(i, k)], width);
            const LocalTensor<float> share = spread[(i * lanes + k) * rows::BLOCK];
            if (i == 0) {
                rows::TimesOne(mix, value, share, width);
            } else {
                rows::AddTimesOne(mix, value, share, width);
            }
        }
        if (!t.has_gain) {
            Store(yGm[uint64_t(token) * t.width + first], mix);
            return;
        }
        Mul(work, mix, mix, width);
        rows::LongSum(norms[k], work, width);
        for (uint32_t i = 0; i < PIECES; i++) {  // in the place of sources that are not needed any more
            Muls(Kept(i, k), mix[i * width / PIECES], 1.0f, width / PIECES);
        }
    }

    __aicore__ inline LocalTensor<float> Kept(uint32_t piece, uint32_t k)
    {
        return held[Place(piece, k)].template ReinterpretCast<float>();
    }

    __aicore__ inline void TellNorms(uint32_t count, uint32_t turn)
    {
        LocalTensor<float> out = normOut.template AllocTensor<float>();
        Muls(out, norms, 1.0f, count);
        normOut.EnQue(out);
        out = normOut.template DeQue<float>();
        DataCopyPad(workGm[ToldNorms(slice, turn)], out, DataCopyExtParams(1, count * sizeof(float), 0, 0, 0));
        normOut.FreeTensor(out);
    }

    // y = mix / sqrt(mean(mix^2) + eps) * gain.
    __aicore__ inline void Normalise(uint32_t token, uint32_t count, uint32_t turn)
    {
        LocalTensor<float> parts = normsIn.template AllocTensor<float>();
        const uint32_t gap = (lanes - rows::RoundUp(count, rows::BLOCK)) / rows::BLOCK;
        const uint32_t skipped = (toldNorms - count) * sizeof(float);
        DataCopyPad(parts, workGm[ToldNorms(0, turn)], DataCopyExtParams(t.slices, count * sizeof(float), skipped, gap, 0),
                    Pad(count));
        normsIn.EnQue(parts);
        parts = normsIn.template DeQue<float>();
        Duplicate(norms, 0.0f, lanes);
        for (uint32_t i = 0; i < t.slices; i++) {
            Add(norms, norms, parts[i * lanes], count);
        }
        normsIn.FreeTensor(parts);
        Muls(norms, norms, 1.0f / t.width, count);
        Adds(norms, norms, t.norm_eps, count);
        Sqrt(norms, norms, count);
        rows::Spread(spreadNorms, norms, lanes);
        for (uint32_t k = 0; k < count; k++) {
            for (uint32_t i = 0; i < PIECES; i++) {
                Muls(mix[i * width / PIECES], Kept(i, k), 1.0f, width / PIECES);
            }
            rows::OverOne(mix, mix, spreadNorms[k * rows::BLOCK], width);
            Mul(mix, mix, gain32, width);
            Store(yGm[uint64_t(token + k) * t.width + first], mix);
        }
    }

    static constexpr uint16_t FLAG = 0;
    static constexpr uint32_t PIECES = sizeof(float) / sizeof(T);  // sources whose place a row of floats takes

    const AttnResMixTiling t;
    TPipe* pipe;
    uint32_t groups, group, slice, first, width, lanes, numbers, told, toldNorms;
    ListTensorDesc list;
    GlobalTensor<W> normGm, queryGm, gainGm;
    GlobalTensor<T> addendGm, yGm, totalGm;
    GlobalTensor<float> workGm;
    TQue<TPosition::VECIN, 1> heldIn, weightIn, partsIn, normsIn;
    TQue<TPosition::VECOUT, 1> rowOut, partOut, normOut;
    TBuf<TPosition::VECCALC> floatBuf, smallBuf;
    LocalTensor<T> held;
    LocalTensor<float> aim, value, work, mix, gain32, shares, squares, spread, peak, sum, norms, spreadNorms;
};

extern "C" __global__ __aicore__ void attn_res_mix(GM_ADDR sources, GM_ADDR norm, GM_ADDR query, GM_ADDR addend,
                                                   GM_ADDR gain, GM_ADDR y, GM_ADDR total, GM_ADDR workspace,
                                                   GM_ADDR tiling)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);  // vector cores that may wait for each other
    REGISTER_TILING_DEFAULT(AttnResMixTiling);
    GET_TILING_DATA_WITH_STRUCT(AttnResMixTiling, t, tiling);
    TPipe pipe;
    if (t.slices > 1) {
        AttnResMixSliced<DTYPE_SOURCES, DTYPE_NORM> op(t, &pipe);
        op.Init(sources, norm, query, addend, gain, y, total, workspace);
        op.Process();
    } else {
        AttnResMix<DTYPE_SOURCES, DTYPE_NORM> op(t, &pipe);
        op.Init(sources, norm, query, addend, gain, y, total);
        op.Process();
    }
}
