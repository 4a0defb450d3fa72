// Attention over depth: softmax over sources of RMSNorm(source) * norm . query, times the sources as they are; where
// asked for, the last source is a sum that is made here (and kept, rounded), and the mix is normalised.
//
// A core has whole tokens and reads each source of a token once: the mix so far is scaled down where a source with a
// larger score comes (online softmax). float32 inside, rounded once.
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

extern "C" __global__ __aicore__ void attn_res_mix(GM_ADDR sources, GM_ADDR norm, GM_ADDR query, GM_ADDR addend,
                                                   GM_ADDR gain, GM_ADDR y, GM_ADDR total, GM_ADDR workspace,
                                                   GM_ADDR tiling)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    REGISTER_TILING_DEFAULT(AttnResMixTiling);
    GET_TILING_DATA_WITH_STRUCT(AttnResMixTiling, t, tiling);
    TPipe pipe;
    AttnResMix<DTYPE_SOURCES, DTYPE_NORM> op(t, &pipe);
    op.Init(sources, norm, query, addend, gain, y, total);
    op.Process();
}
