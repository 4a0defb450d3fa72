// What the vector cores of a group do: each prepares one of a step's two chunks, a block of 16 tokens after another.
//
// Every decay is exponentiated once, and exponentials are multiplied, not sums of decays subtracted: all factors are at most
// one, whatever the decay, and nothing cancels.
#pragma once

#include "kda_chunk_steps.h"
#include "rows.h"

namespace kda_chunk_parts {

using namespace AscendC;

template <typename T>
class Vector {
public:
    __aicore__ inline Vector(const KdaChunkTiling& tiling, TPipe* pipe)
        : t(tiling), pipe(pipe), at(ScratchOfChunk(tiling))
    {
    }

    __aicore__ inline void Init(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR decay, GM_ADDR beta, GM_ADDR memory,
                                GM_ADDR slots, GM_ADDR lengths, GM_ADDR counts, GM_ADDR o, GM_ADDR scratch)
    {
        const uint64_t group = GetBlockIdx() / GetSubBlockNum();
        me = GetSubBlockIdx();
        steps.Init(t, counts, group);
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
        const uint64_t size = ScratchOfGroup(t).size;
        scratchGm.SetGlobalBuffer((__gm__ float*)scratch + group * size, size);
        wide = ROWS * t.key;
        Buffers();
    }

    __aicore__ inline void Process()
    {
        const uint32_t all = steps.Left();
        Steps later = steps;
        Chunk step[CHUNKS];
        for (uint32_t i = 0; i <= all; i++) {  // one step is prepared while the Cube has the one before
            if (i < all) {
                if (i >= SLOTS) {
                    CrossCoreWaitFlag(DONE);
                }
                steps.Next(step);
                Prepare(step[me], i);
                CrossCoreSetFlag<2, PIPE_MTE3>(PREPARED);
            }
            if (i > 0) {
                later.Next(step);
                CrossCoreWaitFlag(LINKED);
                Invert(step[me].tokens, i - 1);
                CrossCoreSetFlag<2, PIPE_MTE3>(INVERTED);
            }
        }
        Zeros();
    }

private:
    __aicore__ inline void Buffers()
    {
        pipe->InitBuffer(qkIn, t.in, 2 * wide * sizeof(T));  // each buffer of a queue holds an event, of which there are 8
        pipe->InitBuffer(vIn, 1, ROWS * t.value * sizeof(T));
        pipe->InitBuffer(decayIn, t.in, wide * sizeof(float));
        pipe->InitBuffer(betaIn, 1, ROWS * rows::BLOCK * sizeof(float));
        pipe->InitBuffer(out, t.out, (t.key > t.value ? wide : ROWS * t.value) * sizeof(float));
        pipe->InitBuffer(tileBuf, 5 * wide * sizeof(float));
        pipe->InitBuffer(earlyBuf, t.chunk * t.key * sizeof(float));
        pipe->InitBuffer(linksBuf, SLOTS * t.chunk * t.chunk * sizeof(float));
        pipe->InitBuffer(inverseBuf, t.chunk * t.chunk * sizeof(float));
        pipe->InitBuffer(scoresBuf, ROWS * t.chunk * sizeof(float));
        pipe->InitBuffer(spreadBuf, t.chunk * rows::BLOCK * sizeof(float));
        pipe->InitBuffer(rowBuf, (t.key + 2 * ROWS + 2 * ROWS * rows::BLOCK + ROWS * ROWS) * sizeof(float));
        q = tileBuf.Get<float>();
        k = q[wide];
        keep = k[wide];
        moved = keep[wide];
        product = moved[wide];
        early = earlyBuf.Get<float>();
        inverse = inverseBuf.Get<float>();
        scores = scoresBuf.Get<float>();
        spread = spreadBuf.Get<float>();
        since = rowBuf.Get<float>();
        betaRow = since[t.key];
        minusRow = betaRow[ROWS];
        betaEach = minusRow[ROWS];
        minusEach = betaEach[ROWS * rows::BLOCK];
        unit = minusEach[ROWS * rows::BLOCK];
        Duplicate(unit, 0.0f, ROWS * ROWS);
        Await<HardEvent::V_S>();
        for (uint32_t r = 0; r < ROWS; r++) {
            unit.SetValue(r * (ROWS + 1), 1.0f);
        }
        Await<HardEvent::S_V>();
    }

    // What the first unit of the event has issued ends before the second goes on.
    template <HardEvent event>
    __aicore__ inline void Await()
    {
        const TEventID id = pipe->FetchEventID(event);  // one that no queue has
        SetFlag<event>(id);
        WaitFlag<event>(id);
    }

    // All that a chunk knows of itself, but for what links its blocks.
    __aicore__ inline void Prepare(const Chunk& chunk, uint32_t number)
    {
        const uint32_t tokens = chunk.tokens, size = InBlocks(tokens);
        if (tokens == 0) {
            return;
        }
        here = Slot(t, number, me);
        LocalTensor<float> links = linksBuf.Get<float>()[number % SLOTS * t.chunk * t.chunk];
        Duplicate(links, 0.0f, size * size);
        const uint64_t first = (uint64_t(chunk.row) * t.tokens + chunk.from) * t.heads + chunk.head;
        for (uint32_t from = 0; from < tokens; from += ROWS) {
            Block(first + uint64_t(from) * t.heads, from, rows::Least(ROWS, tokens - from), size, links);
        }
        DataCopy(scratchGm[here + at.write], early, size * t.key);
        LocalTensor<float> diagonal = out.template AllocTensor<float>();
        for (uint32_t c = 0; c < t.key; c += ROWS) {
            Mul(diagonal[c], unit, since[c], ROWS, ROWS,
                BinaryRepeatParams(1, 1, 1, t.key / rows::BLOCK, ROWS / rows::BLOCK, 0));
        }
        Send(diagonal, at.keep, wide);
    }

    // `real` tokens from `from` of the chunk on, filled up to 16; `first` counts tokens in heads.
    __aicore__ inline void Block(uint64_t first, uint32_t from, uint32_t real, uint32_t size,
                                 const LocalTensor<float>& links)
    {
        Await<HardEvent::MTE3_V>();  // the last block's keys and scores are out
        if (from) {
            DataCopy(scratchGm[here + at.early + from / ROWS * (from - ROWS) / 2 * t.key], early, from * t.key);
        }
        Read(first, from, real);
        Pairs(from, real, size, links);
        for (uint32_t r = 1; r < real; r++) {  // decay since the block's start
            Mul(keep[r * t.key], keep[(r - 1) * t.key], keep[r * t.key], t.key);
        }
        Mul(q, q, keep, real * t.key);
        SendSince(q, at.query, at.query_start, from);
        Mul(k, k, keep, real * t.key);
        rows::TimesEach(k, k, minusEach, real, t.key);
        SendSince(k, at.key, at.key_start, from);
        const LocalTensor<float> whole = keep[(real - 1) * t.key];
        if (from) {  // earlier keys are out: buffers that were sent after them have come back
            Mul(since, since, whole, t.key);
            rows::TimesRow(early, early, whole, from, t.key);
        } else {
            Muls(since, whole, 1.0f, t.key);
        }
        Muls(early[from * t.key], moved, 1.0f, wide);
        Await<HardEvent::V_MTE3>();  // for the keys, too, of which the next block or the chunk's end sends copies
        DataCopy(scratchGm[here + at.scores + from * size], scores, ROWS * size);
    }

    // Tokens as floats: q scaled, k, exp of the decay; v times beta goes to the workspace.
    __aicore__ inline void Read(uint64_t first, uint32_t from, uint32_t real)
    {
        const uint32_t all = real * t.key, rest = wide - all;
        LocalTensor<T> qk = qkIn.template AllocTensor<T>();
        Copy(qk, qGm[first * t.key], real, t.key);
        Copy(qk[wide], kGm[first * t.key], real, t.key);
        qkIn.EnQue(qk);
        LocalTensor<float> decay = decayIn.template AllocTensor<float>();
        Copy(decay, decayGm[first * t.key], real, t.key);
        decayIn.EnQue(decay);
        LocalTensor<T> v = vIn.template AllocTensor<T>();
        Copy(v, vGm[first * t.value], real, t.value);
        vIn.EnQue(v);
        LocalTensor<float> beta = betaIn.template AllocTensor<float>();
        DataCopyPad(beta, betaGm[first], DataCopyExtParams(real, 4, (t.heads - 1) * 4, 0, 0),
                    DataCopyPadExtParams<float>(true, 0, rows::BLOCK - 1, 0.0f));
        betaIn.EnQue(beta);

        qk = qkIn.template DeQue<T>();
        rows::ToFloats(q, qk, all);
        Muls(q, q, t.scale, all);
        rows::ToFloats(k, qk[wide], all);
        qkIn.FreeTensor(qk);
        decay = decayIn.template DeQue<float>();
        Exp(keep, decay, all);
        decayIn.FreeTensor(decay);
        if (rest) {  // tokens that do nothing
            Duplicate(q[all], 0.0f, rest);
            Duplicate(k[all], 0.0f, rest);
        }
        beta = betaIn.template DeQue<float>();
        Duplicate(betaRow, 0.0f, ROWS);
        WholeReduceSum<float>(betaRow, beta, rows::BLOCK, real, 1, 1, 1);  // beside zeros: out of their blocks
        betaIn.FreeTensor(beta);
        Muls(minusRow, betaRow, -1.0f, ROWS);
        rows::Spread(betaEach, betaRow, ROWS);
        rows::Spread(minusEach, minusRow, ROWS);

        v = vIn.template DeQue<T>();
        LocalTensor<float> news = out.template AllocTensor<float>();
        rows::ToFloats(news, v, real * t.value);
        vIn.FreeTensor(v);
        if (rest) {
            Duplicate(news[real * t.value], 0.0f, (ROWS - real) * t.value);
        }
        rows::TimesEach(news, news, betaEach, real, t.value);
        Send(news, at.value + from * t.value, ROWS * t.value);
    }

    // Pairs of tokens of a block, those `lag` apart at once: `moved` has each key decayed until the later token, in the end
    // until the block's end. What a later token's key takes goes to `links`, times -beta; what its query does to `scores`.
    __aicore__ inline void Pairs(uint32_t from, uint32_t real, uint32_t size, const LocalTensor<float>& links)
    {
        Muls(moved, k, 1.0f, wide);
        Duplicate(scores, 0.0f, ROWS * size);
        Mul(product, moved, q, real * t.key);
        rows::RowSums(scores[from], product, real, t.key, size + 1);
        for (uint32_t lag = 1; lag < real; lag++) {
            const uint32_t count = real - lag, later = lag * t.key;
            Mul(moved, moved, keep[later], count * t.key);
            Mul(product, moved, k[later], count * t.key);
            rows::RowSums(links[from * size + from + lag], product, count, t.key, size + 1);
            Mul(product, moved, q[later], count * t.key);
            rows::RowSums(scores[lag * size + from], product, count, t.key, size + 1);
        }
        const uint32_t stride = size / rows::BLOCK;
        const LocalTensor<float> block = links[from * size + from];
        Mul(block, block, minusRow, ROWS, ROWS, BinaryRepeatParams(1, 1, 1, stride, stride, 0));
    }

    // A block decayed since its start, and since the chunk's.
    __aicore__ inline void SendSince(const LocalTensor<float>& x, uint64_t block, uint64_t chunk, uint32_t from)
    {
        LocalTensor<float> y = out.template AllocTensor<float>();
        if (from) {
            rows::TimesRow(y, x, since, ROWS, t.key);
        } else {
            Muls(y, x, 1.0f, wide);
        }
        Send(y, chunk + from * t.key, wide);
        if (from) {  // nothing comes before the first
            y = out.template AllocTensor<float>();
            Muls(y, x, 1.0f, wide);
            Send(y, block + from * t.key, wide);
        }
    }

    __aicore__ inline void Send(LocalTensor<float>& y, uint64_t to, uint32_t count)
    {
        out.EnQue(y);
        y = out.template DeQue<float>();
        DataCopy(scratchGm[here + to], y, count);
        out.FreeTensor(y);
    }

    // (I + links')^-1, from which each token's news are those of the tokens themselves: column after column, forwards.
    __aicore__ inline void Invert(uint32_t tokens, uint32_t number)
    {
        const uint32_t size = InBlocks(tokens);
        if (tokens == 0) {
            return;
        }
        here = Slot(t, number, me);
        LocalTensor<float> links = linksBuf.Get<float>()[number % SLOTS * t.chunk * t.chunk];
        Await<HardEvent::V_MTE2>();
        for (uint32_t from = ROWS; from < size; from += ROWS) {  // what the Cube found for later blocks
            const uint32_t gap = size - ROWS;
            DataCopyPad(links[from], scratchGm[here + at.links + from],
                        DataCopyExtParams(from, ROWS * 4, gap * 4, gap / rows::BLOCK, 0), DataCopyPadExtParams<float>());
        }
        Await<HardEvent::MTE2_V>();
        Await<HardEvent::MTE3_V>();
        Duplicate(inverse, 0.0f, size * size);
        for (uint32_t from = 0; from < size; from += ROWS) {
            Muls(inverse[from * size + from], unit, 1.0f, ROWS, ROWS,
                 UnaryRepeatParams(1, 1, size / rows::BLOCK, ROWS / rows::BLOCK));
        }
        for (uint32_t s = 0; s + 1 < tokens; s++) {
            const uint32_t next = s + 1, whole = next / rows::BLOCK * rows::BLOCK;
            rows::Spread(spread, links[s * size + whole], size - whole);
            rows::AddOuter(inverse[next * size], spread[(next - whole) * rows::BLOCK], inverse[s * size], tokens - next,
                           size);
        }
        Await<HardEvent::V_MTE3>();
        DataCopy(scratchGm[here + at.inverse], inverse, size * size);
    }

    // Results of padding, and states of rows that have neither tokens now nor had any: all vector cores take turns.
    __aicore__ inline void Zeros()
    {
        const uint64_t tasks = uint64_t(t.batch) * t.heads, cores = GetBlockNum() * GetSubBlockNum();
        for (uint64_t task = GetBlockIdx(); task < tasks; task += cores) {
            const uint32_t row = task / t.heads, head = task % t.heads, count = countsGm.GetValue(row);
            if (count < t.tokens) {
                LocalTensor<T> zeros = out.template AllocTensor<T>();
                Duplicate(zeros, T{}, ROWS * t.value);
                out.EnQue(zeros);
                zeros = out.template DeQue<T>();
                const uint32_t bytes = t.value * sizeof(T);
                for (uint32_t from = count; from < t.tokens; from += ROWS) {
                    const uint64_t first = (uint64_t(row) * t.tokens + from) * t.heads + head;
                    DataCopyPad(oGm[first * t.value], zeros,
                                DataCopyExtParams(rows::Least(ROWS, t.tokens - from), bytes, 0, (t.heads - 1) * bytes, 0));
                }
                out.FreeTensor(zeros);
            }
            if (count == 0 && lengthsGm.GetValue(row) <= 0) {
                LocalTensor<float> zeros = out.template AllocTensor<float>();
                Duplicate(zeros, 0.0f, wide);
                out.EnQue(zeros);
                zeros = out.template DeQue<float>();
                const uint64_t state = (uint64_t(slotsGm.GetValue(row)) * t.heads + head) * t.value * t.key;
                for (uint32_t r = 0; r < t.value; r += ROWS) {
                    DataCopy(memoryGm[state + r * t.key], zeros, wide);
                }
                out.FreeTensor(zeros);
            }
        }
    }

    template <typename X>
    __aicore__ inline void Copy(const LocalTensor<X>& to, const GlobalTensor<X>& from, uint32_t count, uint32_t width)
    {
        const uint32_t bytes = width * sizeof(X);
        DataCopyPad(to, from, DataCopyExtParams(count, bytes, (t.heads - 1) * bytes, 0, 0), DataCopyPadExtParams<X>());
    }

    const KdaChunkTiling t;
    TPipe* pipe;
    const ChunkScratch at;
    Steps steps;
    uint32_t me = 0, wide = 0;  // floats of a block of keys
    uint64_t here = 0;
    GlobalTensor<T> qGm, kGm, vGm, oGm;
    GlobalTensor<float> decayGm, betaGm, memoryGm, scratchGm;
    GlobalTensor<int32_t> slotsGm;
    GlobalTensor<int64_t> lengthsGm, countsGm;
    TQue<TPosition::VECIN, 1> qkIn, vIn, decayIn, betaIn;
    TQue<TPosition::VECOUT, 2> out;
    TBuf<TPosition::VECOUT> earlyBuf, inverseBuf, scoresBuf;
    TBuf<TPosition::VECIN> linksBuf;
    TBuf<TPosition::VECCALC> tileBuf, spreadBuf, rowBuf;
    LocalTensor<float> q, k, keep, moved, product, unit, early, inverse, scores, spread;
    LocalTensor<float> since, betaRow, minusRow, betaEach, minusEach;
};

}  // namespace kda_chunk_parts
