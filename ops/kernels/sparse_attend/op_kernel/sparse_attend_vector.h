// The vector cores: each has half of the heads. They make weights of scores, and add up the weighted sums of blocks.
//
// Softmax goes on from block to block: `top` is the highest score so far, `total` the sum of exp(score - top); where a
// block has a higher one, what was summed before shrinks by `kept`.
#pragma once

#include "sparse_attend_common.h"

namespace sparse {

constexpr float NO_SCORE = -1e30f;
constexpr float LEAST = 1e-37f;  // of a total: that of one row is 1
constexpr uint32_t GROUP = 8;   // heads at a time: a block of floats
constexpr uint32_t LIST = 512;  // selected positions at a time

template <typename T>
class Vector {
public:
    __aicore__ inline Vector(const SparseAttendTiling& tiling, TPipe* pipe)
        : t(tiling), pipe(pipe), at(SharesOf(tiling))
    {
    }

    // shared: of this group. joined: of all groups, for parts of queries.
    __aicore__ inline void Init(GM_ADDR selected, GM_ADDR lengths, GM_ADDR counts, GM_ADDR o, GM_ADDR lse,
                                GM_ADDR shared, GM_ADDR joined)
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
        if (t.parts > 1) {
            const uint64_t all = uint64_t(t.queries) * t.parts * t.heads, stats = all * rows::BLOCK;
            partSums.SetGlobalBuffer((__gm__ float*)joined, all * t.latent);
            partStats[0].SetGlobalBuffer((__gm__ float*)joined + all * t.latent, stats);
            partStats[1].SetGlobalBuffer((__gm__ float*)joined + all * t.latent + stats, stats);
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
        pipe->InitBuffer(headBuf, (4 * all + GROUP * (CHUNKS + 1) + GROUP * rows::BLOCK + 2 * rows::BLOCK + 16) *
                                      sizeof(float));
        sum = sumBuf.template Get<float>();
        LocalTensor<float> made = headBuf.template Get<float>();
        Duplicate(made, 0.0f, 4 * all + GROUP * (CHUNKS + 1));  // whole blocks of them are read
        top = made;
        total = made[all];
        kept = made[2 * all];  // of two slots
        chunks = made[4 * all];
        found = chunks[GROUP * CHUNKS];
        spread = found[GROUP];
        number = spread[GROUP * rows::BLOCK];  // two blocks
        beyond = number[2 * rows::BLOCK];
        keptSlot = all;
    }

    __aicore__ inline void Process()
    {
        const uint32_t groups = GetBlockNum(), group = GetBlockIdx() / GetSubBlockNum();
        Tasks tasks(t.queries * t.parts, 1, groups, group, Cost{t, lengthsGm, countsGm});
        for (balance::Task next; tasks.Next(next);) {
            const Task task = TaskOf(t, next.row);
            Attend(task);
            if (t.parts == 1) {
                Finish(task.query);
            } else {
                Keep(next.row);
            }
        }
        if (t.parts > 1) {
            PipeBarrier<PIPE_ALL>();
            CrossCoreSetFlag<0, PIPE_MTE3>(PARTS);
            CrossCoreWaitFlag(PARTS);
            const uint32_t cores = groups * GetSubBlockNum();
            for (uint32_t i = GetBlockIdx(); i < t.queries * t.heads; i += cores) {
                Join(i);
            }
        }
    }

private:
    static constexpr uint32_t CHUNKS = 8;  // of 64 columns that a block has at most

    __aicore__ inline void Attend(const Task& task)
    {
        const uint32_t rest = Seen(task);
        if (heads) {
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
    }

    // Stage one: how many of the selected positions the query sees.
    __aicore__ inline uint32_t Seen(const Task& task)
    {
        const int64_t last = LastSeen(t, lengthsGm, countsGm, task.query);
        if (last < 0) {
            return 0;
        }
        LocalTensor<int32_t> work = listBuf.template Get<int32_t>();
        LocalTensor<float> ones = work[LIST].template ReinterpretCast<float>();
        Duplicate(number, 0.0f, rows::BLOCK);
        for (uint32_t begin = task.begin; begin < task.end; begin += LIST) {
            const uint32_t some = rows::Least(LIST, task.end - begin), all = rows::RoundUp(some, rows::BLOCK);
            LocalTensor<int32_t> list = listIn.template AllocTensor<int32_t>();
            DataCopyPad(list, selectedGm[uint64_t(task.query) * t.room + begin],
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
            const LocalTensor<float> to = c ? chunks : found;
            WholeReduceMax<float>(to, x[c], rows::Least(rows::LANES, wide - c), some, 1, 1, wide / rows::BLOCK,
                                  ReduceOrder::ORDER_ONLY_VALUE);
            if (c) {
                Max(found, found, chunks, some);
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

    // What a query attends to is known. Where it is nothing, the total is 0, and its log is nothing beside NO_SCORE.
    __aicore__ inline void Finish(uint32_t query)
    {
        if (heads == 0) {
            return;
        }
        const uint64_t to = uint64_t(query) * t.heads + head;
        Maxs(total, total, LEAST, heads);
        for (uint32_t h = 0; h < heads; h += GROUP) {
            const uint32_t some = rows::Least(GROUP, heads - h);
            rows::Spread(spread, total[h], some);
            rows::OverEach(sum[h * t.latent], sum[h * t.latent], spread, some, t.latent);
            CopyRows(to + h, sum[h * t.latent], some);
        }
        LocalTensor<float> lse = lseOut.template AllocTensor<float>();
        Ln(lse, total, heads);
        Add(lse, lse, top, heads);
        lseOut.EnQue(lse);
        CopyLse(to, heads);
    }

    // Rows of a result, from row `to` on.
    __aicore__ inline void CopyRows(uint64_t to, const LocalTensor<float>& x, uint32_t some)
    {
        LocalTensor<T> o = out.template AllocTensor<T>();
        rows::FromFloats(o, x, some * t.latent);
        out.EnQue(o);
        o = out.template DeQue<T>();
        DataCopy(oGm[to * t.latent], o, some * t.latent);
        out.FreeTensor(o);
    }

    __aicore__ inline void CopyLse(uint64_t to, uint32_t some)
    {
        LocalTensor<float> lse = lseOut.template DeQue<float>();
        DataCopyPad(lseGm[to], lse, DataCopyExtParams(1, some * sizeof(float), 0, 0, 0));
        lseOut.FreeTensor(lse);
    }

    // ---- parts of a query ----

    // A part is put aside: sums as they are, `top` and `total` of each head in a block of its own.
    __aicore__ inline void Keep(uint32_t task)
    {
        constexpr uint32_t SOME = GROUP * sizeof(T) / sizeof(float);
        const uint64_t to = uint64_t(task) * t.heads + head;
        for (uint32_t h = 0; h < heads; h += SOME) {
            const uint32_t some = rows::Least(SOME, heads - h) * t.latent;
            LocalTensor<float> x = out.template AllocTensor<float>();
            Adds(x, sum[h * t.latent], 0.0f, some);
            Put(partSums[(to + h) * t.latent], x, some);
        }
        for (uint32_t h = 0; h < heads; h += GROUP) {
            const uint32_t some = rows::Least(GROUP, heads - h);
            for (uint32_t i = 0; i < 2; i++) {
                LocalTensor<float> x = out.template AllocTensor<float>();
                rows::Spread(x, i ? total[h] : top[h], some);
                Put(partStats[i][(to + h) * rows::BLOCK], x, some * rows::BLOCK);
            }
        }
    }

    __aicore__ inline void Put(const GlobalTensor<float>& to, LocalTensor<float>& x, uint32_t count)
    {
        out.EnQue(x);
        x = out.template DeQue<float>();
        DataCopy(to, x, count);
        out.FreeTensor(x);
    }

    // One head of one query: its parts are weighed by how their highest scores compare, and added up.
    __aicore__ inline void Join(uint32_t index)
    {
        const uint32_t query = index / t.heads, count = t.parts * rows::BLOCK;
        const uint64_t from = uint64_t(query) * t.parts * t.heads + index % t.heads;
        LocalTensor<float> stats = listIn.template AllocTensor<float>();
        const DataCopyParams each(t.parts, 1, t.heads - 1, 0);
        DataCopy(stats, partStats[0][from * rows::BLOCK], each);
        DataCopy(stats[count], partStats[1][from * rows::BLOCK], each);
        listIn.EnQue(stats);
        stats = listIn.template DeQue<float>();
        const LocalTensor<float> share = stats, totals = stats[count], best = number, all = number[rows::BLOCK];
        Duplicate(best, NO_SCORE, rows::BLOCK);
        for (uint32_t p = 0; p < t.parts; p++) {
            Max(best, best, share[p * rows::BLOCK], rows::BLOCK);
        }
        Sub(share, share, best, rows::BLOCK, t.parts, BinaryRepeatParams(1, 1, 1, 1, 1, 0));
        Exp(share, share, count);
        Mul(totals, totals, share, count);
        Duplicate(all, LEAST, rows::BLOCK);
        Duplicate(sum, 0.0f, t.latent);
        for (uint32_t p = 0; p < t.parts; p++) {
            LocalTensor<float> part = in.template AllocTensor<float>();
            DataCopy(part, partSums[(from + uint64_t(p) * t.heads) * t.latent], t.latent);
            in.EnQue(part);
            part = in.template DeQue<float>();
            rows::AddTimesOne(sum, part, share[p * rows::BLOCK], t.latent);
            in.FreeTensor(part);
            Add(all, all, totals[p * rows::BLOCK], rows::BLOCK);
        }
        listIn.FreeTensor(stats);
        rows::OverOne(sum, sum, all, t.latent);
        CopyRows(index, sum, 1);
        LocalTensor<float> lse = lseOut.template AllocTensor<float>();
        Ln(lse, all, rows::BLOCK);
        Add(lse, lse, best, rows::BLOCK);
        lseOut.EnQue(lse);
        CopyLse(index, 1);
    }

    const SparseAttendTiling t;
    TPipe* pipe;
    const Shares at;
    GlobalTensor<int32_t> selectedGm;
    GlobalTensor<int64_t> lengthsGm, countsGm;
    GlobalTensor<T> oGm, weightsGm[SLOTS];
    GlobalTensor<float> lseGm, scoresGm[SLOTS], sumsGm[SLOTS], partSums, partStats[2];
    TQue<TPosition::VECIN, 2> in;
    TQue<TPosition::VECIN, 1> listIn;
    TQue<TPosition::VECOUT, 2> out;
    TQue<TPosition::VECOUT, 1> lseOut;
    TBuf<TPosition::VECCALC> sumBuf, listBuf, headBuf;
    LocalTensor<float> sum, top, total, kept, chunks, found, spread, number, beyond;
    uint32_t head, heads, keptSlot;  // the first of this core's heads, how many, and floats of a slot of `kept`
    uint32_t made = 0, summed = 0;   // blocks, of all queries
};

}  // namespace sparse
