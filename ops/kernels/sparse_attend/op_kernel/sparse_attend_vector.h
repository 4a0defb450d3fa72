// The vector cores: each has half of the heads. They make weights of scores, and add up the weighted sums of blocks.
//
// Softmax goes on from block to block: `top` is the highest score so far, `total` the sum of exp(score - top); where a
// block has a higher one, what was summed before shrinks by `kept`.
#pragma once

#include "sparse_attend_common.h"

namespace sparse {

constexpr float NO_SCORE = -1e30f;
constexpr uint32_t GROUP = 8;   // heads at a time: a block of floats
constexpr uint32_t LIST = 512;  // selected positions at a time

template <typename T>
class Vector {
public:
    __aicore__ inline Vector(const SparseAttendTiling& tiling, TPipe* pipe)
        : t(tiling), pipe(pipe), at(SharesOf(tiling))
    {
    }

    __aicore__ inline void Init(GM_ADDR selected, GM_ADDR lengths, GM_ADDR counts, GM_ADDR o, GM_ADDR lse,
                                GM_ADDR shared)
    {
        selectedGm.SetGlobalBuffer((__gm__ int32_t*)selected);
        lengthsGm.SetGlobalBuffer((__gm__ int64_t*)lengths);
        countsGm.SetGlobalBuffer((__gm__ int64_t*)counts);
        oGm.SetGlobalBuffer((__gm__ T*)o);
        lseGm.SetGlobalBuffer((__gm__ float*)lse);
        for (uint32_t i = 0; i < SLOTS; i++) {
            scoresGm[i].SetGlobalBuffer((__gm__ float*)(shared + i * at.slot + at.scores), t.heads * t.block);
            weightsGm[i].SetGlobalBuffer((__gm__ T*)(shared + i * at.slot + at.weights), t.heads * t.block);
            sumsGm[i].SetGlobalBuffer((__gm__ float*)(shared + i * at.slot + at.sums), t.heads * t.latent);
        }
        const uint32_t half = (t.heads + 1) / 2;
        head = GetSubBlockIdx() * half;
        heads = head < t.heads ? rows::Least(half, t.heads - head) : 0;
        const uint32_t all = rows::RoundUp(half, GROUP), wide = t.block > t.latent ? t.block : t.latent;
        pipe->InitBuffer(in, 2, GROUP * wide * sizeof(float));
        pipe->InitBuffer(out, 2, GROUP * wide * sizeof(T));
        pipe->InitBuffer(listIn, 1, LIST * sizeof(int32_t));
        pipe->InitBuffer(lseOut, 1, all * sizeof(float));
        pipe->InitBuffer(sumBuf, half * t.latent * sizeof(float));
        pipe->InitBuffer(listBuf, 2 * LIST * sizeof(float));
        pipe->InitBuffer(headBuf, (4 * all + GROUP * (PARTS + 1) + GROUP * rows::BLOCK + 2 * rows::BLOCK + 16) *
                                      sizeof(float));
        sum = sumBuf.template Get<float>();
        LocalTensor<float> made = headBuf.template Get<float>();
        Duplicate(made, 0.0f, 4 * all + GROUP * (PARTS + 1));  // whole blocks of them are read
        top = made;
        total = made[all];
        kept = made[2 * all];  // of two slots
        parts = made[4 * all];
        found = parts[GROUP * PARTS];
        spread = found[GROUP];
        number = spread[GROUP * rows::BLOCK];  // two blocks
        beyond = number[2 * rows::BLOCK];
        keptSlot = all;
    }

    __aicore__ inline void Process()
    {
        const uint32_t group = GetBlockIdx() / GetSubBlockNum();
        balance::Tasks tasks(t.queries, 1, GetBlockNum(), group, Cost{t, lengthsGm, countsGm});
        for (balance::Task task; tasks.Next(task);) {
            Query(task.row);
        }
    }

private:
    static constexpr uint32_t PARTS = 8;  // of 64 columns that a block has at most

    __aicore__ inline void Query(uint32_t index)
    {
        const uint32_t rest = Seen(index);
        if (heads && rest) {
            Duplicate(top, NO_SCORE, heads);
            Duplicate(total, 0.0f, heads);
            Duplicate(sum, 0.0f, heads * t.latent);
        }
        for (uint32_t done = 0; done < rest; done += t.block) {
            Weights(rows::Least(t.block, rest - done));
            made++;
            if (made - summed == t.buffers) {
                AddSums();
            }
        }
        while (summed < made) {
            AddSums();
        }
        if (heads) {
            Finish(index, rest);
        }
    }

    // Stage one: how many of the selected positions the query sees.
    __aicore__ inline uint32_t Seen(uint32_t index)
    {
        const int64_t last = LastSeen(t, lengthsGm, countsGm, index);
        if (last < 0) {
            return 0;
        }
        LocalTensor<int32_t> work = listBuf.template Get<int32_t>();
        LocalTensor<float> ones = work[LIST].template ReinterpretCast<float>();
        Duplicate(number, 0.0f, rows::BLOCK);
        for (uint32_t begin = 0; begin < t.room; begin += LIST) {
            const uint32_t some = rows::Least(LIST, t.room - begin), all = rows::RoundUp(some, rows::BLOCK);
            LocalTensor<int32_t> list = listIn.template AllocTensor<int32_t>();
            DataCopyPad(list, selectedGm[uint64_t(index) * t.room + begin],
                        DataCopyExtParams(1, some * sizeof(int32_t), 0, 0, 0),
                        DataCopyPadExtParams<int32_t>(true, 0, all - some, -1));
            listIn.EnQue(list);
            list = listIn.template DeQue<int32_t>();
            Zero1(work, list, 1, all);  // one where it is not negative
            Muls(list, list, -1, all);
            Zero1(list, list, int32_t(last) + 1, all);  // one where it is not after the last
            Mul(work, work, list, all);
            listIn.FreeTensor(list);
            Cast(ones, work, RoundMode::CAST_RINT, all);
            rows::LongSum(number[rows::BLOCK], ones, all);
            Add(number, number, number[rows::BLOCK], 1);
        }
        SetFlag<HardEvent::V_S>(pipe->FetchEventID(HardEvent::V_S));
        WaitFlag<HardEvent::V_S>(pipe->FetchEventID(HardEvent::V_S));
        const uint32_t seen = uint32_t(number.GetValue(0));
        SetFlag<HardEvent::S_V>(pipe->FetchEventID(HardEvent::S_V));
        WaitFlag<HardEvent::S_V>(pipe->FetchEventID(HardEvent::S_V));
        return seen;
    }

    // x + by, brought to 0 or 1.
    __aicore__ inline void Zero1(const LocalTensor<int32_t>& y, const LocalTensor<int32_t>& x, int32_t by,
                                 uint32_t count)
    {
        Adds(y, x, by, count);
        Maxs(y, y, 0, count);
        Mins(y, y, 1, count);
    }

    // Weights of the next block of `count` rows.
    __aicore__ inline void Weights(uint32_t count)
    {
        CrossCoreWaitFlag(SCORES);
        const uint32_t slot = made % SLOTS, wide = rows::RoundUp(count, 16);
        if (count < wide) {  // what the last columns get: their rows are none
            CreateVecIndex(beyond, float(wide - 16) - float(count - 1), 16);
            Muls(beyond, beyond, NO_SCORE, 16);
            Mins(beyond, beyond, 0.0f, 16);
        }
        for (uint32_t h = 0; h < heads; h += GROUP) {
            const uint32_t some = rows::Least(GROUP, heads - h);
            const uint64_t from = uint64_t(head + h) * t.block;
            LocalTensor<float> scores = in.template AllocTensor<float>();
            DataCopy(scores, scoresGm[slot][from], DataCopyParams(some, wide / 8, (t.block - wide) / 8, 0));
            in.EnQue(scores);
            scores = in.template DeQue<float>();
            LocalTensor<T> made = out.template AllocTensor<T>();
            Weigh(made, scores, h, some, count, wide);
            in.FreeTensor(scores);
            out.EnQue(made);
            made = out.template DeQue<T>();
            DataCopy(weightsGm[slot][from], made, DataCopyParams(some, wide / 16, 0, (t.block - wide) / 16));
            out.FreeTensor(made);
        }
        CrossCoreSetFlag<2, PIPE_MTE3>(WEIGHTS);
    }

    __aicore__ inline void Weigh(const LocalTensor<T>& weights, const LocalTensor<float>& x, uint32_t h, uint32_t some,
                                 uint32_t count, uint32_t wide)
    {
        Muls(x, x, t.scale, some * wide);
        if (count < wide) {
            Add(x[wide - 16], x[wide - 16], beyond, 16, some, BinaryRepeatParams(1, 1, 1, wide / 8, wide / 8, 0));
        }
        Highest(x, some, wide);
        Max(found, found, top[h], some);
        const LocalTensor<float> shrink = kept[made % SLOTS * keptSlot + h];
        Sub(shrink, top[h], found, some);
        Exp(shrink, shrink, some);
        Adds(top[h], found, 0.0f, some);
        rows::Spread(spread, found, some);
        rows::MinusEach(x, x, spread, some, wide);
        Exp(x, x, some * wide);
        rows::FromFloats(weights, x, some * wide);
        rows::RowSums(found, x, some, wide);
        Mul(total[h], total[h], shrink, some);
        Add(total[h], total[h], found, some);
    }

    // found[r] = the highest of x[r, :].
    __aicore__ inline void Highest(const LocalTensor<float>& x, uint32_t some, uint32_t wide)
    {
        for (uint32_t c = 0; c < wide; c += rows::LANES) {
            const LocalTensor<float> to = c ? parts : found;
            WholeReduceMax<float>(to, x[c], rows::Least(rows::LANES, wide - c), some, 1, 1, wide / rows::BLOCK,
                                  ReduceOrder::ORDER_ONLY_VALUE);
            if (c) {
                Max(found, found, parts, some);
            }
        }
    }

    // sum = sum * kept + what the Cube made of the next block.
    __aicore__ inline void AddSums()
    {
        CrossCoreWaitFlag(SUMS);
        const uint32_t slot = summed % SLOTS;
        for (uint32_t h = 0; h < heads; h += GROUP) {
            const uint32_t some = rows::Least(GROUP, heads - h);
            LocalTensor<float> part = in.template AllocTensor<float>();
            DataCopy(part, sumsGm[slot][uint64_t(head + h) * t.latent], some * t.latent);
            in.EnQue(part);
            part = in.template DeQue<float>();
            rows::Spread(spread, kept[slot * keptSlot + h], some);
            rows::TimesEach(sum[h * t.latent], sum[h * t.latent], spread, some, t.latent);
            Add(sum[h * t.latent], sum[h * t.latent], part, some * t.latent);
            in.FreeTensor(part);
        }
        summed++;
    }

    __aicore__ inline void Finish(uint32_t index, uint32_t seen)
    {
        const uint64_t to = uint64_t(index) * t.heads + head;
        for (uint32_t h = 0; h < heads; h += GROUP) {
            const uint32_t some = rows::Least(GROUP, heads - h);
            LocalTensor<T> o = out.template AllocTensor<T>();
            if (seen) {
                rows::Spread(spread, total[h], some);
                rows::OverEach(sum[h * t.latent], sum[h * t.latent], spread, some, t.latent);
                rows::FromFloats(o, sum[h * t.latent], some * t.latent);
            } else {
                Duplicate(o, T{}, some * t.latent);
            }
            out.EnQue(o);
            o = out.template DeQue<T>();
            DataCopy(oGm[(to + h) * t.latent], o, some * t.latent);
            out.FreeTensor(o);
        }
        LocalTensor<float> lse = lseOut.template AllocTensor<float>();
        if (seen) {
            Ln(lse, total, heads);
            Add(lse, lse, top, heads);
        } else {
            Duplicate(lse, NO_SCORE, heads);
        }
        lseOut.EnQue(lse);
        lse = lseOut.template DeQue<float>();
        DataCopyPad(lseGm[to], lse, DataCopyExtParams(1, heads * sizeof(float), 0, 0, 0));
        lseOut.FreeTensor(lse);
    }

    const SparseAttendTiling t;
    TPipe* pipe;
    const Shares at;
    GlobalTensor<int32_t> selectedGm;
    GlobalTensor<int64_t> lengthsGm, countsGm;
    GlobalTensor<T> oGm, weightsGm[SLOTS];
    GlobalTensor<float> lseGm, scoresGm[SLOTS], sumsGm[SLOTS];
    TQue<TPosition::VECIN, 2> in;
    TQue<TPosition::VECIN, 1> listIn;
    TQue<TPosition::VECOUT, 2> out;
    TQue<TPosition::VECOUT, 1> lseOut;
    TBuf<TPosition::VECCALC> sumBuf, listBuf, headBuf;
    LocalTensor<float> sum, top, total, kept, parts, found, spread, number, beyond;
    uint32_t head, heads, keptSlot;  // the first of this core's heads, how many, and floats of a slot of `kept`
    uint32_t made = 0, summed = 0;   // blocks, of all queries
};

}  // namespace sparse
