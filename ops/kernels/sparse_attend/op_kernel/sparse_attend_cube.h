// The Cube core: brings the rows that a query keeps into L1, once, and makes products with them twice.
//
// A block of rows lies in L1 in tiles of 128: [(latent + rope) / 16 columns of fractals][128 rows][16]. As it lies it is
// the right factor of the scores, and its latent part, each fractal transposed, that of the weighted sums.
#pragma once

#include "sparse_attend_common.h"

namespace sparse {

template <typename T>
class Cube {
    static constexpr uint32_t TILE = 128;            // rows, and columns, of a product
    static constexpr uint32_t HALF_L0 = 32 * 1024;   // bytes of L0A and L0B, of which there are two halves
    static constexpr uint32_t HALF_L0C = 64 * 1024;

public:
    __aicore__ inline Cube(const SparseAttendTiling& tiling, TPipe* pipe) : t(tiling), pipe(pipe), at(SharesOf(tiling)) {}

    __aicore__ inline void Init(GM_ADDR q, GM_ADDR q_rope, GM_ADDR latent, GM_ADDR rope, GM_ADDR selected,
                                GM_ADDR block_table, GM_ADDR lengths, GM_ADDR counts, GM_ADDR shared)
    {
        qGm.SetGlobalBuffer((__gm__ T*)q);
        qRopeGm.SetGlobalBuffer((__gm__ T*)q_rope);
        latentGm.SetGlobalBuffer((__gm__ T*)latent);
        ropeGm.SetGlobalBuffer((__gm__ T*)rope);
        selectedGm.SetGlobalBuffer((__gm__ int32_t*)selected);
        tableGm.SetGlobalBuffer((__gm__ int32_t*)block_table);
        lengthsGm.SetGlobalBuffer((__gm__ int64_t*)lengths);
        countsGm.SetGlobalBuffer((__gm__ int64_t*)counts);
        for (uint32_t i = 0; i < SLOTS; i++) {
            scoresGm[i].SetGlobalBuffer((__gm__ float*)(shared + i * at.slot + at.scores), t.heads * t.block);
            weightsGm[i].SetGlobalBuffer((__gm__ T*)(shared + i * at.slot + at.weights), t.heads * t.block);
            sumsGm[i].SetGlobalBuffer((__gm__ float*)(shared + i * at.slot + at.sums), t.heads * t.latent);
        }
        width = t.latent + t.rope;
        high = rows::RoundUp(t.heads, 16);
        tiles = (t.block + TILE - 1) / TILE;
        pipe->InitBuffer(queryBuf, high * width * sizeof(T));
        pipe->InitBuffer(weightBuf, high * t.block * sizeof(T));
        pipe->InitBuffer(rowBuf, t.buffers * tiles * TILE * width * sizeof(T));
        pipe->InitBuffer(leftBuf, 2 * HALF_L0);
        pipe->InitBuffer(rightBuf, 2 * HALF_L0);
        pipe->InitBuffer(productBuf, 2 * HALF_L0C);
        query = queryBuf.template Get<T>();
        weights = weightBuf.template Get<T>();
        cached = rowBuf.template Get<T>();
        left = leftBuf.template Get<T>();
        right = rightBuf.template Get<T>();
        product = productBuf.template Get<float>();
        if (high > t.heads) {  // heads that are none: zeros, once; copies leave them as they are
            Zeros(query, high, width / 16, t.heads, high);
            Zeros(weights, high, t.block / 16, t.heads, high);
        }
    }

    __aicore__ inline void Process()
    {
        Begin();
        Tasks tasks(t.queries * t.parts, 1, GetBlockNum(), GetBlockIdx(), Cost{t, lengthsGm, countsGm});
        for (balance::Task next; tasks.Next(next);) {
            Attend(TaskOf(t, next.row));
        }
        End();
    }

private:
    // ---- events: a buffer is free, or filled ----

    __aicore__ inline void Begin()
    {
        for (uint32_t i = 0; i < 2; i++) {
            rowsFree[i] = pipe->AllocEventID<HardEvent::MTE1_MTE2>();
            rowsThere[i] = pipe->AllocEventID<HardEvent::MTE2_MTE1>();
            factorsFree[i] = pipe->AllocEventID<HardEvent::M_MTE1>();
            factorsThere[i] = pipe->AllocEventID<HardEvent::MTE1_M>();
            productFree[i] = pipe->AllocEventID<HardEvent::FIX_M>();
            productThere[i] = pipe->AllocEventID<HardEvent::M_FIX>();
            SetFlag<HardEvent::MTE1_MTE2>(rowsFree[i]);
            SetFlag<HardEvent::M_MTE1>(factorsFree[i]);
            SetFlag<HardEvent::FIX_M>(productFree[i]);
        }
        queryFree = pipe->AllocEventID<HardEvent::MTE1_MTE2>();
        weightsFree = pipe->AllocEventID<HardEvent::MTE1_MTE2>();
        queryThere = pipe->AllocEventID<HardEvent::MTE2_MTE1>();
        weightsThere = pipe->AllocEventID<HardEvent::MTE2_MTE1>();
        SetFlag<HardEvent::MTE1_MTE2>(queryFree);
        SetFlag<HardEvent::MTE1_MTE2>(weightsFree);
    }

    __aicore__ inline void End()
    {
        for (uint32_t i = 0; i < 2; i++) {
            WaitFlag<HardEvent::MTE1_MTE2>(rowsFree[i]);
            WaitFlag<HardEvent::M_MTE1>(factorsFree[i]);
            WaitFlag<HardEvent::FIX_M>(productFree[i]);
            pipe->ReleaseEventID<HardEvent::MTE1_MTE2>(rowsFree[i]);
            pipe->ReleaseEventID<HardEvent::MTE2_MTE1>(rowsThere[i]);
            pipe->ReleaseEventID<HardEvent::M_MTE1>(factorsFree[i]);
            pipe->ReleaseEventID<HardEvent::MTE1_M>(factorsThere[i]);
            pipe->ReleaseEventID<HardEvent::FIX_M>(productFree[i]);
            pipe->ReleaseEventID<HardEvent::M_FIX>(productThere[i]);
        }
        WaitFlag<HardEvent::MTE1_MTE2>(queryFree);
        WaitFlag<HardEvent::MTE1_MTE2>(weightsFree);
        pipe->ReleaseEventID<HardEvent::MTE1_MTE2>(queryFree);
        pipe->ReleaseEventID<HardEvent::MTE1_MTE2>(weightsFree);
        pipe->ReleaseEventID<HardEvent::MTE2_MTE1>(queryThere);
        pipe->ReleaseEventID<HardEvent::MTE2_MTE1>(weightsThere);
    }

    // ---- a task ----

    // Scores of a block are made before the sums of the one before it, where L1 holds both.
    __aicore__ inline void Attend(const Task& task)
    {
        first = uint64_t(task.query) * t.room;
        last = LastSeen(t, lengthsGm, countsGm, task.query);
        table = uint64_t(task.query / t.tokens) * t.pages;
        next = task.begin;
        end = task.end;
        if (!More()) {
            return;
        }
        LoadQuery(task.query);
        while (More()) {
            Gather();
            Scores();
            made++;
            if (made - summed == t.buffers) {
                Sums();
            }
        }
        while (summed < made) {
            Sums();
        }
        SetFlag<HardEvent::MTE1_MTE2>(queryFree);
    }

    // Stage one: the next selected position that the query sees, if there is one.
    __aicore__ inline bool More()
    {
        for (; last >= 0 && next < end; next++) {
            position = selectedGm.GetValue(first + next);
            if (position >= 0 && position <= last) {
                return true;
            }
        }
        return false;
    }

    __aicore__ inline void LoadQuery(uint32_t index)
    {
        WaitFlag<HardEvent::MTE1_MTE2>(queryFree);
        const uint64_t at = uint64_t(index) * t.heads;
        DataCopy(query, qGm[at * t.latent], Nd2NzParams(1, t.heads, t.latent, 0, t.latent, high, 1, 0));
        DataCopy(query[t.latent * high], qRopeGm[at * t.rope], Nd2NzParams(1, t.heads, t.rope, 0, t.rope, high, 1, 0));
        SetFlag<HardEvent::MTE2_MTE1>(queryThere);
        WaitFlag<HardEvent::MTE2_MTE1>(queryThere);
    }

    // Stage two begins: the next rows, as many as a block has, each by itself.
    __aicore__ inline void Gather()
    {
        const uint32_t buffer = made % t.buffers;
        WaitFlag<HardEvent::MTE1_MTE2>(rowsFree[buffer]);
        uint32_t count = 0;
        while (count < t.block && More()) {
            const uint64_t page = tableGm.GetValue(table + position / t.page), row = page * t.page + position % t.page;
            const LocalTensor<T> to = Tile(buffer, count / TILE)[count % TILE * 16];
            DataCopy(to, latentGm[row * t.latent], Nd2NzParams(1, 1, t.latent, 0, t.latent, TILE, 1, 0));
            DataCopy(to[t.latent * TILE], ropeGm[row * t.rope], Nd2NzParams(1, 1, t.rope, 0, t.rope, TILE, 1, 0));
            count++;
            next++;
        }
        if (count % 16) {  // whole fractals of scores are copied out
            Zeros(Tile(buffer, count / TILE), TILE, width / 16, count % TILE, rows::RoundUp(count % TILE, 16));
        }
        counts[made % SLOTS] = count;
        SetFlag<HardEvent::MTE2_MTE1>(rowsThere[buffer]);
        WaitFlag<HardEvent::MTE2_MTE1>(rowsThere[buffer]);
    }

    // scores = query [heads, width] rows^T [width, count], some channels at a time.
    __aicore__ inline void Scores()
    {
        const uint32_t slot = made % SLOTS, count = rows::RoundUp(counts[slot], 16);
        for (uint32_t begin = 0; begin < count; begin += TILE) {
            const uint32_t some = rows::Least(TILE, count - begin);
            const LocalTensor<T> tile = Tile(made % t.buffers, begin / TILE);
            WaitFlag<HardEvent::FIX_M>(productFree[products % 2]);
            for (uint32_t c = 0; c < width; c += TILE) {
                const uint32_t deep = rows::Least(TILE, width - c), half = factors % 2;
                WaitFlag<HardEvent::M_MTE1>(factorsFree[half]);
                LoadLeft(Left(half), query[c * high], high, deep);
                for (uint32_t k = 0; k < deep; k += 16) {
                    LoadData(Right(half)[k * some], tile[(c + k) * TILE],
                             LoadData2DParams(0, some / 16, 1, 0, 0, false, 0));
                }
                Multiply(some, deep, c == 0);
            }
            CopyOut(scoresGm[slot][begin], some, t.block);
        }
        CrossCoreSetFlag<2, PIPE_FIX>(SCORES);
    }

    // sums = weights [heads, count] rows [count, latent], some channels of the result at a time.
    __aicore__ inline void Sums()
    {
        const uint32_t slot = summed % SLOTS, buffer = summed % t.buffers, count = counts[slot];
        CrossCoreWaitFlag(WEIGHTS);
        WaitFlag<HardEvent::MTE1_MTE2>(weightsFree);
        const uint32_t wide = rows::RoundUp(count, 16);
        DataCopy(weights, weightsGm[slot], Nd2NzParams(1, t.heads, wide, 0, t.block, high, 1, 0));
        SetFlag<HardEvent::MTE2_MTE1>(weightsThere);
        WaitFlag<HardEvent::MTE2_MTE1>(weightsThere);
        for (uint32_t c = 0; c < t.latent; c += TILE) {
            const uint32_t some = rows::Least(TILE, t.latent - c);
            WaitFlag<HardEvent::FIX_M>(productFree[products % 2]);
            for (uint32_t begin = 0; begin < count; begin += TILE) {
                const uint32_t deep = rows::Least(TILE, count - begin), whole = rows::RoundUp(deep, 16);
                const LocalTensor<T> tile = Tile(buffer, begin / TILE)[c * TILE];
                const uint32_t half = factors % 2;
                WaitFlag<HardEvent::M_MTE1>(factorsFree[half]);
                LoadLeft(Left(half), weights[begin * high], high, whole);
                for (uint32_t k = 0; k < whole / 16; k++) {
                    LoadData(Right(half)[k * 16 * some], tile,
                             LoadData2DParams(k, some / 16, TILE / 16, 0, 0, true, 0));
                }
                Multiply(some, deep, begin == 0);
            }
            CopyOut(sumsGm[slot][c], some, t.latent);
        }
        SetFlag<HardEvent::MTE1_MTE2>(weightsFree);
        SetFlag<HardEvent::MTE1_MTE2>(rowsFree[buffer]);
        CrossCoreSetFlag<2, PIPE_FIX>(SUMS);
        summed++;
    }

    // ---- products ----

    // product (+)= left [heads, deep] right [deep, columns], of the halves that were filled last.
    __aicore__ inline void Multiply(uint32_t columns, uint32_t deep, bool begins)
    {
        const uint32_t half = factors % 2;
        SetFlag<HardEvent::MTE1_M>(factorsThere[half]);
        WaitFlag<HardEvent::MTE1_M>(factorsThere[half]);
        if (!begins && (high / 16) * (columns / 16) < 10) {  // so short a product does not order itself
            PipeBarrier<PIPE_M>();
        }
        Mmad(Product(), Left(half), Right(half), MmadParams(high, columns, deep, 0, false, begins));
        SetFlag<HardEvent::M_MTE1>(factorsFree[half]);
        factors++;
    }

    // The product [heads, columns] to rows of `stride` floats.
    __aicore__ inline void CopyOut(const GlobalTensor<float>& to, uint32_t columns, uint32_t stride)
    {
        const uint32_t half = products % 2;
        SetFlag<HardEvent::M_FIX>(productThere[half]);
        WaitFlag<HardEvent::M_FIX>(productThere[half]);
        Fixpipe(to, Product(), FixpipeParamsV220(columns, t.heads, high, stride, false));
        SetFlag<HardEvent::FIX_M>(productFree[half]);
        products++;
    }

    // Rows [begin, end) of `columns` columns of fractals, each `stride` rows long.
    __aicore__ inline void Zeros(const LocalTensor<T>& x, uint32_t stride, uint32_t columns, uint32_t begin,
                                 uint32_t end)
    {
        Fill(x[begin * 16], InitConstValueParams<T>(columns, end - begin, stride - (end - begin), T{}));
    }

    __aicore__ inline LocalTensor<T> Tile(uint32_t buffer, uint32_t tile)
    {
        return cached[(buffer * tiles + tile) * TILE * width];
    }
    __aicore__ inline LocalTensor<T> Left(uint32_t half) { return left[half * (HALF_L0 / sizeof(T))]; }
    __aicore__ inline LocalTensor<T> Right(uint32_t half) { return right[half * (HALF_L0 / sizeof(T))]; }
    __aicore__ inline LocalTensor<float> Product() { return product[products % 2 * (HALF_L0C / sizeof(float))]; }

    const SparseAttendTiling t;
    TPipe* pipe;
    const Shares at;
    GlobalTensor<T> qGm, qRopeGm, latentGm, ropeGm, weightsGm[SLOTS];
    GlobalTensor<float> scoresGm[SLOTS], sumsGm[SLOTS];
    GlobalTensor<int32_t> selectedGm, tableGm;
    GlobalTensor<int64_t> lengthsGm, countsGm;
    TBuf<TPosition::A1> queryBuf, weightBuf;
    TBuf<TPosition::B1> rowBuf;
    TBuf<TPosition::A2> leftBuf;
    TBuf<TPosition::B2> rightBuf;
    TBuf<TPosition::CO1> productBuf;
    LocalTensor<T> query, weights, cached, left, right;
    LocalTensor<float> product;
    TEventID rowsFree[2], rowsThere[2], factorsFree[2], factorsThere[2], productFree[2], productThere[2];
    TEventID queryFree, queryThere, weightsFree, weightsThere;
    uint32_t width, high, tiles;  // channels of a row; heads in whole fractals; tiles of a block
    uint64_t first, table;        // of the query: its selected positions, its row of the block table
    int64_t last;                 // the last position that it sees
    uint32_t next, end;           // of its selected positions: the one to look at, and that after the part's last
    int32_t position;
    uint32_t counts[SLOTS];
    uint32_t made = 0, summed = 0;       // blocks, of all queries
    uint32_t factors = 0, products = 0;  // uses of L0A and L0B, and of L0C
};

}  // namespace sparse
