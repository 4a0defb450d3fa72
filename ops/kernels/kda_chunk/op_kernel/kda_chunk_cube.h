// What the Cube core of a group does: products between the blocks of a chunk, then its state, news and results.
#pragma once

#include "kda_chunk_steps.h"
#include "matrix.h"

namespace kda_chunk_parts {

using namespace AscendC;
using matrix::Factor;

template <typename T>
class Products {
public:
    __aicore__ inline Products(const KdaChunkTiling& tiling, TPipe* pipe)
        : t(tiling), pipe(pipe), at(ScratchOfChunk(tiling)), kept(ScratchOfGroup(tiling))
    {
    }

    __aicore__ inline void Init(GM_ADDR memory, GM_ADDR slots, GM_ADDR lengths, GM_ADDR counts, GM_ADDR o, GM_ADDR scratch)
    {
        steps.Init(t, counts, GetBlockIdx());
        memoryGm.SetGlobalBuffer((__gm__ float*)memory);
        slotsGm.SetGlobalBuffer((__gm__ int32_t*)slots);
        lengthsGm.SetGlobalBuffer((__gm__ int64_t*)lengths);
        oGm.SetGlobalBuffer((__gm__ T*)o);
        scratchGm.SetGlobalBuffer((__gm__ float*)scratch + GetBlockIdx() * kept.size, kept.size);
        cube.Init(pipe, 8);
    }

    __aicore__ inline void Process()
    {
        const uint32_t all = steps.Left();
        Steps later = steps;
        Chunk step[CHUNKS];
        for (uint32_t i = 0; i <= all; i++) {
            if (i < all) {
                steps.Next(step);
                CrossCoreWaitFlag(PREPARED);
                for (uint32_t c = 0; c < CHUNKS; c++) {
                    Link(InBlocks(step[c].tokens), Slot(t, i, c));
                }
                CrossCoreSetFlag<2, PIPE_FIX>(LINKED);
            }
            if (i > 0) {
                later.Next(step);
                CrossCoreWaitFlag(INVERTED);
                for (uint32_t c = 0; c < CHUNKS; c++) {
                    if (step[c].tokens) {
                        Advance(step[c], Slot(t, i - 1, c));
                    }
                }
                if (i + 1 < all) {
                    CrossCoreSetFlag<2, PIPE_FIX>(DONE);
                }
            }
        }
    }

private:
    // What every block takes from all that come before it in the chunk.
    __aicore__ inline void Link(uint32_t size, uint64_t here)
    {
        uint64_t early = here + at.early;
        for (uint32_t from = ROWS; from < size; from += ROWS) {
            Factor before = cube.Load(scratchGm[early], from, t.key, t.key);
            Factor keys = cube.Load(scratchGm[here + at.key + from * t.key], ROWS, t.key, t.key);
            Factor queries = cube.Load(scratchGm[here + at.query + from * t.key], ROWS, t.key, t.key);
            LocalTensor<float> c = cube.Result();
            cube.Multiply(c, before, keys, true);
            cube.Store(scratchGm[here + at.links + from], c, from, from, ROWS, size);
            c = cube.Result();
            cube.Multiply(c, queries, before, true);
            cube.Store(scratchGm[here + at.scores + from * size], c, ROWS, ROWS, from, size);
            cube.Free(before);
            cube.Free(keys);
            cube.Free(queries);
            early += uint64_t(from) * t.key;
        }
    }

    // One chunk onwards. With S the state before:
    //   news = inverse (value + key_start S'),  o = query_start S' + scores news,  S = S keep + news' write.
    __aicore__ inline void Advance(const Chunk& chunk, uint64_t here)
    {
        const uint32_t size = InBlocks(chunk.tokens);
        const uint64_t slot = slotsGm.GetValue(chunk.row), own = (slot * t.heads + chunk.head) * t.value * t.key;
        const bool begins = chunk.from == 0, ends = chunk.from + chunk.tokens == chunk.count;
        const bool old = !begins || lengthsGm.GetValue(chunk.row) > chunk.count;
        const GlobalTensor<float> source = begins ? memoryGm[own] : scratchGm[kept.state];
        const GlobalTensor<float> target = ends ? memoryGm[own] : scratchGm[kept.state];
        const uint64_t token = (uint64_t(chunk.row) * t.tokens + chunk.from) * t.heads + chunk.head;

        Await();  // scores are there, and the state
        Factor inverse = cube.Load(scratchGm[here + at.inverse], size, size, size), reads, queries, keep;
        if (old) {
            Factor keys = cube.Load(scratchGm[here + at.key_start], size, t.key, t.key, true);
            LocalTensor<float> c = cube.Result();
            cube.Multiply(c, inverse, keys, true);
            cube.Store(scratchGm[kept.reads], c, size, size, t.key, t.key);
            cube.Free(keys);
            Await();
            reads = cube.Load(scratchGm[kept.reads], size, t.key, t.key);
            queries = cube.Load(scratchGm[here + at.query_start], size, t.key, t.key);
            keep = cube.Load(scratchGm[here + at.keep], ROWS, t.key, t.key);
        }
        Factor scores = cube.Load(scratchGm[here + at.scores], size, size, size);
        Factor write = cube.Load(scratchGm[here + at.write], size, t.key, t.key, true);
        for (uint32_t v = 0; v < t.value; v += t.part) {
            const uint32_t part = t.part < t.value - v ? t.part : t.value - v;
            Factor state;
            if (old) {
                state = cube.Load(source[uint64_t(v) * t.key], part, t.key, t.key);
            }
            Factor values = cube.Load(scratchGm[here + at.value + v], size, part, t.value, true);
            LocalTensor<float> c = cube.Result();
            cube.Multiply(c, inverse, values, true);
            cube.Free(values);
            if (old) {
                cube.Multiply(c, reads, state, false);
            }
            cube.Store(scratchGm[kept.news + v], c, size, size, part, t.value);
            Await();
            Factor news = cube.Load(scratchGm[kept.news + v], size, part, t.value, true);
            c = cube.Result();
            cube.Multiply(c, scores, news, true);
            if (old) {
                cube.Multiply(c, queries, state, false);
            }
            cube.Store(oGm[token * t.value + v], c, size, chunk.tokens, part, t.heads * t.value);
            c = cube.Result();
            for (uint32_t i = 0; old && i < t.key; i += ROWS) {  // a diagonal matrix, block after block
                const Factor columns = {state.x[i * part], part, ROWS, false}, block = {keep.x[i * ROWS], ROWS, ROWS, false};
                cube.Multiply(c[i * part], columns, block, true);
            }
            cube.Multiply(c, {news.x, size, part, true}, write, !old);
            cube.Store(target[uint64_t(v) * t.key], c, part, part, t.key, t.key);
            cube.Free(news);
            if (old) {
                cube.Free(state);
            }
        }
        cube.Free(inverse);
        cube.Free(scores);
        cube.Free(write);
        if (old) {
            cube.Free(reads);
            cube.Free(queries);
            cube.Free(keep);
        }
    }

    // What was stored is there before it is loaded.
    __aicore__ inline void Await()
    {
        const TEventID id = pipe->FetchEventID(HardEvent::FIX_MTE2);
        SetFlag<HardEvent::FIX_MTE2>(id);
        WaitFlag<HardEvent::FIX_MTE2>(id);
    }

    const KdaChunkTiling t;
    TPipe* pipe;
    const ChunkScratch at;
    const GroupScratch kept;
    Steps steps;
    matrix::Cube cube;
    GlobalTensor<T> oGm;
    GlobalTensor<float> memoryGm, scratchGm;
    GlobalTensor<int32_t> slotsGm;
    GlobalTensor<int64_t> lengthsGm;
};

}  // namespace kda_chunk_parts
