// KDA, one token of every sequence: normalise q and k, decay the state, write what v adds along k, read along q.
//
// Every row of a head's state is by itself once k, q, the decay and beta are known, so rows are shared out: a core has
// a stretch of them, over heads and sequences. A state is read once and written once; nothing else is as large.
#include "delta_rule.h"
#include "kda_step_tiling.h"

using namespace AscendC;

template <typename T, typename G>
class KdaStep {
public:
    __aicore__ inline KdaStep(const KdaStepTiling& tiling, TPipe* pipe) : t(tiling), pipe(pipe) {}

    __aicore__ inline void Init(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR decay, GM_ADDR beta, GM_ADDR memory,
                                GM_ADDR slots, GM_ADDR bias, GM_ADDR log_rate, GM_ADDR o)
    {
        qGm.SetGlobalBuffer((__gm__ T*)q);
        kGm.SetGlobalBuffer((__gm__ T*)k);
        vGm.SetGlobalBuffer((__gm__ T*)v);
        decayGm.SetGlobalBuffer((__gm__ G*)decay);
        betaGm.SetGlobalBuffer((__gm__ G*)beta);
        memoryGm.SetGlobalBuffer((__gm__ float*)memory);
        slotsGm.SetGlobalBuffer((__gm__ int32_t*)slots);
        oGm.SetGlobalBuffer((__gm__ T*)o);
        if (t.has_gate) {
            biasGm.SetGlobalBuffer((__gm__ float*)bias);
            rateGm.SetGlobalBuffer((__gm__ float*)log_rate);
        }
        const uint32_t tile = t.tile * t.key * sizeof(float);
        pipe->InitBuffer(stateIn, 2, tile);
        pipe->InitBuffer(stateOut, 2, tile);
        pipe->InitBuffer(productBuf, tile);
        pipe->InitBuffer(vectorsIn, 2, 2 * t.key * sizeof(T) + t.key * sizeof(G) + t.key * sizeof(float));
        pipe->InitBuffer(valuesIn, 2, t.value * sizeof(T));
        pipe->InitBuffer(oOut, 2, t.tile * sizeof(T));
        const uint32_t spare = 2 * t.key < rows::LANES ? rows::LANES : 2 * t.key;
        pipe->InitBuffer(headBuf, (3 * t.key + spare + t.value + 4 * rows::BLOCK) * sizeof(float));
        pipe->InitBuffer(tileBuf, t.tile * (2 + rows::BLOCK) * sizeof(float));
        LocalTensor<float> head = headBuf.Get<float>();
        q32 = head;
        k32 = head[t.key];
        keep = head[2 * t.key];
        work = head[3 * t.key];  // two of them, and no less than one repeat
        v32 = work[spare];
        betaBlock = v32[t.value];
        rateBlock = betaBlock[rows::BLOCK];
        small = rateBlock[rows::BLOCK];  // two blocks
        LocalTensor<float> made = tileBuf.Get<float>();
        sums = made;
        o32 = made[t.tile];
        spread = made[2 * t.tile];
        product = productBuf.Get<float>();
    }

    __aicore__ inline void Process()
    {
        const uint32_t cores = GetBlockNum(), core = GetBlockIdx();
        const uint32_t end = uint64_t(t.units) * (core + 1) / cores, each = t.value / t.unit;
        uint32_t unit = uint64_t(t.units) * core / cores;
        while (unit < end) {
            const uint32_t head = unit / each, first = unit % each, count = rows::Least(each - first, end - unit);
            Head(head, first * t.unit, count * t.unit);
            unit += count;
        }
    }

private:
    // Rows [first, first + count) of the state of one head of one sequence.
    __aicore__ inline void Head(uint32_t head, uint32_t first, uint32_t count)
    {
        CopyVectors(head, first, count);
        MakeVectors(head, count);
        const int64_t slot = slotsGm.GetValue(head / t.heads);
        const uint64_t state = (uint64_t(slot) * t.heads + head % t.heads) * t.value;
        for (uint32_t done = 0; done < count; done += t.tile) {
            const uint32_t tile = rows::Least(t.tile, count - done);
            const uint64_t at = (state + first + done) * t.key;
            LocalTensor<float> in = stateIn.template AllocTensor<float>();
            DataCopy(in, memoryGm[at], tile * t.key);
            stateIn.EnQue(in);
            Step(tile, done);
            LocalTensor<float> next = stateOut.template DeQue<float>();
            DataCopy(memoryGm[at], next, tile * t.key);
            stateOut.FreeTensor(next);
            LocalTensor<T> o = oOut.template DeQue<T>();
            DataCopy(oGm[uint64_t(head) * t.value + first + done], o, tile);
            oOut.FreeTensor(o);
        }
    }

    __aicore__ inline void CopyVectors(uint32_t head, uint32_t first, uint32_t count)
    {
        LocalTensor<T> in = vectorsIn.template AllocTensor<T>();
        const uint64_t at = uint64_t(head) * t.key;
        DataCopy(in, qGm[at], t.key);
        DataCopy(in[t.key], kGm[at], t.key);
        DataCopy(in[2 * t.key].template ReinterpretCast<G>(), decayGm[at], t.key);
        if (t.has_gate) {
            DataCopy(Bias(in), biasGm[head % t.heads * t.key], t.key);
        }
        vectorsIn.EnQue(in);
        LocalTensor<T> values = valuesIn.template AllocTensor<T>();
        DataCopy(values, vGm[uint64_t(head) * t.value + first], count);
        valuesIn.EnQue(values);
    }

    __aicore__ inline LocalTensor<float> Bias(const LocalTensor<T>& in)
    {
        return in[2 * t.key].template ReinterpretCast<G>()[t.key].template ReinterpretCast<float>();
    }

    // q32, k32, keep = exp(decay), v32 and beta of a head.
    __aicore__ inline void MakeVectors(uint32_t head, uint32_t count)
    {
        LocalTensor<T> in = vectorsIn.template DeQue<T>();
        rows::ToFloats(q32, in, t.key);
        rows::ToFloats(k32, in[t.key], t.key);
        rows::ToFloats(keep, in[2 * t.key].template ReinterpretCast<G>(), t.key);
        if (t.has_gate) {
            Gate(Bias(in), rateGm.GetValue(head % t.heads));
        }
        vectorsIn.FreeTensor(in);
        Exp(keep, keep, t.key);
        if (t.norm_eps >= 0.0f) {
            Normalise(q32);
            Normalise(k32);
        }
        Muls(q32, q32, t.scale, t.key);
        LocalTensor<T> values = valuesIn.template DeQue<T>();
        rows::ToFloats(v32, values, count);
        valuesIn.FreeTensor(values);
        Duplicate(betaBlock, rows::ScalarFloat(betaGm.GetValue(head)), rows::BLOCK);
        if (t.beta_logits) {
            Duplicate(small, 1.0f, rows::BLOCK);
            rows::TimesSigmoid(betaBlock, small, betaBlock, small[rows::BLOCK], rows::BLOCK);
        }
    }

    // keep = the natural log of the decay, from its raw value: lower_bound * sigmoid(rate * z), or -rate * softplus(z).
    __aicore__ inline void Gate(const LocalTensor<float>& bias, float logRate)
    {
        Duplicate(rateBlock, logRate, rows::BLOCK);
        Exp(rateBlock, rateBlock, rows::BLOCK);
        Add(keep, keep, bias, t.key);
        if (t.lower_bound != 0.0f) {
            rows::TimesOne(keep, keep, rateBlock, t.key);
            Duplicate(work, t.lower_bound, t.key);
            rows::TimesSigmoid(keep, work, keep, work[t.key], t.key);
        } else {  // softplus(z) = max(z, 0) + ln(1 + exp(-|z|))
            Abs(work, keep, t.key);
            Muls(work, work, -1.0f, t.key);
            Exp(work, work, t.key);
            Adds(work, work, 1.0f, t.key);
            Ln(work, work, t.key);
            Maxs(keep, keep, 0.0f, t.key);
            Add(keep, keep, work, t.key);
            rows::TimesOne(keep, keep, rateBlock, t.key);
            Muls(keep, keep, -1.0f, t.key);
        }
    }

    // x /= sqrt(sum(x^2) + eps). Sqrt and Div: Rsqrt has fewer than four digits on A2 and A3.
    __aicore__ inline void Normalise(const LocalTensor<float>& x)
    {
        Mul(work, x, x, t.key);
        Duplicate(small, 0.0f, rows::BLOCK);
        rows::RowSums(small, work, 1, t.key);
        Adds(small, small, t.norm_eps, rows::BLOCK);
        Sqrt(small, small, rows::BLOCK);
        rows::Spread(work, small, 1);
        rows::OverOne(x, x, work, t.key);
    }

    // Some rows of a state.
    __aicore__ inline void Step(uint32_t tile, uint32_t done)
    {
        LocalTensor<float> in = stateIn.template DeQue<float>();
        LocalTensor<float> next = stateOut.template AllocTensor<float>();
        rows::DeltaStep(next, in, o32, {q32, k32, keep, v32[done], betaBlock}, {product, sums, spread}, tile, t.key);
        stateIn.FreeTensor(in);
        stateOut.EnQue(next);
        LocalTensor<T> o = oOut.template AllocTensor<T>();
        rows::FromFloats(o, o32, tile);
        oOut.EnQue(o);
    }

    const KdaStepTiling t;
    TPipe* pipe;
    GlobalTensor<T> qGm, kGm, vGm, oGm;
    GlobalTensor<G> decayGm, betaGm;
    GlobalTensor<float> memoryGm, biasGm, rateGm;
    GlobalTensor<int32_t> slotsGm;
    TQue<TPosition::VECIN, 2> stateIn, vectorsIn, valuesIn;
    TQue<TPosition::VECOUT, 2> stateOut, oOut;
    TBuf<TPosition::VECCALC> productBuf, headBuf, tileBuf;
    LocalTensor<float> q32, k32, keep, work, v32, betaBlock, rateBlock, small, sums, o32, spread, product;
};

extern "C" __global__ __aicore__ void kda_step(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR decay, GM_ADDR beta,
                                               GM_ADDR memory, GM_ADDR slots, GM_ADDR bias, GM_ADDR log_rate,
                                               GM_ADDR o, GM_ADDR memory_out, GM_ADDR workspace, GM_ADDR tiling)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    REGISTER_TILING_DEFAULT(KdaStepTiling);
    GET_TILING_DATA_WITH_STRUCT(KdaStepTiling, t, tiling);
    TPipe pipe;
    KdaStep<DTYPE_Q, DTYPE_DECAY> op(t, &pipe);
    op.Init(q, k, v, decay, beta, memory, slots, bias, log_rate, o);
    op.Process();
}
