// KDA over many tokens of every row, by its recurrence, on the vector cores.
//
// A task has some rows of the state of one head of one sequence: rows of a state never meet, so a state may be split. They
// stay in UB from the first token to the last; tokens come a few at a time. Nothing is rounded before the result, and
// no exponent is positive, whatever the decay. Matrix products on the Cube would take less time for long prompts.
#include "delta_rule.h"
#include "kda_chunk_tiling.h"

using namespace AscendC;

template <typename T>
class KdaChunk {
public:
    __aicore__ inline KdaChunk(const KdaChunkTiling& tiling, TPipe* pipe) : t(tiling), pipe(pipe) {}

    __aicore__ inline void Init(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR decay, GM_ADDR beta, GM_ADDR memory,
                                GM_ADDR slots, GM_ADDR lengths, GM_ADDR counts, GM_ADDR o)
    {
        qGm.SetGlobalBuffer((__gm__ T*)q);
        kGm.SetGlobalBuffer((__gm__ T*)k);
        vGm.SetGlobalBuffer((__gm__ T*)v);
        decayGm.SetGlobalBuffer((__gm__ float*)decay);
        betaGm.SetGlobalBuffer((__gm__ float*)beta);
        memoryGm.SetGlobalBuffer((__gm__ float*)memory);
        slotsGm.SetGlobalBuffer((__gm__ int32_t*)slots);
        lengthsGm.SetGlobalBuffer((__gm__ int64_t*)lengths);
        countsGm.SetGlobalBuffer((__gm__ int64_t*)counts);
        oGm.SetGlobalBuffer((__gm__ T*)o);
        pipe->InitBuffer(qkIn, 2, 2 * t.chunk * t.key * sizeof(T));
        pipe->InitBuffer(vIn, 2, t.chunk * t.part * sizeof(T));
        pipe->InitBuffer(decayIn, 2, t.chunk * t.key * sizeof(float));
        pipe->InitBuffer(betaIn, 2, t.chunk * rows::BLOCK * sizeof(float));
        pipe->InitBuffer(oOut, 2, t.chunk * t.part * sizeof(T));
        pipe->InitBuffer(stateBuf, t.part * t.key * sizeof(float));
        pipe->InitBuffer(productBuf, t.part * t.key * sizeof(float));
        pipe->InitBuffer(tokenBuf, t.chunk * (3 * t.key + 2 * t.part) * sizeof(float));
        pipe->InitBuffer(roomBuf, (t.part * (1 + rows::BLOCK) + rows::LANES) * sizeof(float));
        state = stateBuf.Get<float>();
        q32 = tokenBuf.Get<float>();
        k32 = q32[t.chunk * t.key];
        keep = k32[t.chunk * t.key];
        v32 = keep[t.chunk * t.key];
        o32 = v32[t.chunk * t.part];
        room.product = productBuf.Get<float>();
        room.sums = roomBuf.Get<float>();
        room.spread = room.sums[t.part];
        betaBlock = room.spread[t.part * rows::BLOCK];
    }

    __aicore__ inline void Process()
    {
        const uint64_t cores = GetBlockNum(), core = GetBlockIdx(), tasks = uint64_t(t.batch) * t.heads * t.parts;
        const uint32_t last = tasks * (core + 1) / cores;
        for (uint32_t task = tasks * core / cores; task < last; task++) {
            row = task / (t.heads * t.parts);
            head = task / t.parts % t.heads;
            first = task % t.parts * t.part;
            Sequence(countsGm.GetValue(row));
        }
    }

private:
    // All tokens of a row; those past `count` are padding.
    __aicore__ inline void Sequence(uint32_t count)
    {
        const uint64_t slot = slotsGm.GetValue(row), at = ((slot * t.heads + head) * t.value + first) * t.key;
        if (lengthsGm.GetValue(row) <= count) {
            Duplicate(state, 0.0f, t.part * t.key);
        } else {
            DataCopy(state, memoryGm[at], t.part * t.key);
            Await<HardEvent::MTE2_V>();
        }
        for (uint32_t from = 0; from < t.tokens; from += t.chunk) {
            const uint32_t here = rows::Least(t.chunk, t.tokens - from);
            Chunk(from, here, count <= from ? 0 : rows::Least(here, count - from));
        }
        Await<HardEvent::V_MTE3>();
        DataCopyPad(memoryGm[at], state, DataCopyExtParams(1, t.part * t.key * sizeof(float), 0, 0, 0));
        Await<HardEvent::MTE3_V>();  // the next task fills the same buffer, by either unit
        Await<HardEvent::MTE3_MTE2>();
    }

    // What the first unit of the event has issued ends before the second goes on.
    template <HardEvent event>
    __aicore__ inline void Await()
    {
        const TEventID id = pipe->FetchEventID(event);  // one that no queue has
        SetFlag<event>(id);
        WaitFlag<event>(id);
    }

    // `here` tokens from `from` on, of which the first `real` are no padding; padding gives zeros.
    __aicore__ inline void Chunk(uint32_t from, uint32_t here, uint32_t real)
    {
        if (real) {
            Read(from, real);
        }
        for (uint32_t i = 0; i < real; i++) {
            rows::Spread(betaBlock, beta[i * rows::BLOCK], 1);
            const rows::Token token = {q32[i * t.key], k32[i * t.key], keep[i * t.key], v32[i * t.part], betaBlock};
            rows::DeltaStep(state, state, o32[i * t.part], token, room, t.part, t.key);
        }
        if (real) {
            betaIn.FreeTensor(beta);
        }
        if (real < here) {
            Duplicate(o32[real * t.part], 0.0f, (here - real) * t.part);
        }
        LocalTensor<T> o = oOut.template AllocTensor<T>();
        rows::FromFloats(o, o32, here * t.part);
        oOut.EnQue(o);
        o = oOut.template DeQue<T>();
        const uint32_t bytes = t.part * sizeof(T), all = t.heads * t.value * sizeof(T);
        DataCopyPad(oGm[At(from) * t.value + first], o, DataCopyExtParams(here, bytes, 0, all - bytes, 0));
        oOut.FreeTensor(o);
    }

    // Tokens as floats: q scaled, k, exp of the decay, v; beta stays in blocks of its own.
    __aicore__ inline void Read(uint32_t from, uint32_t count)
    {
        const uint32_t all = count * t.key;
        LocalTensor<T> qk = qkIn.template AllocTensor<T>();
        Copy(qk, qGm[At(from) * t.key], count, t.key, t.heads * t.key);
        Copy(qk[t.chunk * t.key], kGm[At(from) * t.key], count, t.key, t.heads * t.key);
        qkIn.EnQue(qk);
        LocalTensor<float> decay = decayIn.template AllocTensor<float>();
        Copy(decay, decayGm[At(from) * t.key], count, t.key, t.heads * t.key);
        decayIn.EnQue(decay);
        LocalTensor<T> v = vIn.template AllocTensor<T>();
        Copy(v, vGm[At(from) * t.value + first], count, t.part, t.heads * t.value);
        vIn.EnQue(v);
        beta = betaIn.template AllocTensor<float>();
        DataCopyPad(beta, betaGm[At(from)], DataCopyExtParams(count, 4, (t.heads - 1) * 4, 0, 0),
                    DataCopyPadExtParams<float>(true, 0, rows::BLOCK - 1, 0.0f));
        betaIn.EnQue(beta);

        qk = qkIn.template DeQue<T>();
        rows::ToFloats(q32, qk, all);
        Muls(q32, q32, t.scale, all);
        rows::ToFloats(k32, qk[t.chunk * t.key], all);
        qkIn.FreeTensor(qk);
        decay = decayIn.template DeQue<float>();
        Exp(keep, decay, all);
        decayIn.FreeTensor(decay);
        v = vIn.template DeQue<T>();
        rows::ToFloats(v32, v, count * t.part);
        vIn.FreeTensor(v);
        beta = betaIn.template DeQue<float>();
    }

    // A token of this row and head, counted in heads.
    __aicore__ inline uint64_t At(uint32_t token) { return (uint64_t(row) * t.tokens + token) * t.heads + head; }

    template <typename X>
    __aicore__ inline void Copy(const LocalTensor<X>& to, const GlobalTensor<X>& from, uint32_t count, uint32_t width,
                                uint32_t step)
    {
        const uint32_t bytes = width * sizeof(X);
        DataCopyPad(to, from, DataCopyExtParams(count, bytes, step * sizeof(X) - bytes, 0, 0), DataCopyPadExtParams<X>());
    }

    const KdaChunkTiling t;
    TPipe* pipe;
    GlobalTensor<T> qGm, kGm, vGm, oGm;
    GlobalTensor<float> decayGm, betaGm, memoryGm;
    GlobalTensor<int32_t> slotsGm;
    GlobalTensor<int64_t> lengthsGm, countsGm;
    TQue<TPosition::VECIN, 2> qkIn, vIn, decayIn, betaIn;
    TQue<TPosition::VECOUT, 2> oOut;
    TBuf<TPosition::VECIN> stateBuf;
    TBuf<TPosition::VECCALC> productBuf, tokenBuf, roomBuf;
    LocalTensor<float> state, q32, k32, keep, v32, o32, beta, betaBlock;
    rows::Room room;
    uint32_t row = 0, head = 0, first = 0;  // of the task
};

extern "C" __global__ __aicore__ void kda_chunk(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR decay, GM_ADDR beta,
                                                GM_ADDR memory, GM_ADDR slots, GM_ADDR lengths, GM_ADDR counts,
                                                GM_ADDR o, GM_ADDR memory_out, GM_ADDR workspace, GM_ADDR tiling)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    REGISTER_TILING_DEFAULT(KdaChunkTiling);
    GET_TILING_DATA_WITH_STRUCT(KdaChunkTiling, t, tiling);
    TPipe pipe;
    KdaChunk<DTYPE_Q> op(t, &pipe);
    op.Init(q, k, v, decay, beta, memory, slots, lengths, counts, o);
    op.Process();
}
