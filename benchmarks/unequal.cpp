// Tasks of unequal length on vector cores alone: KDA's recurrence over the tokens of a row, for some rows of one head's
// state. Only to compare ways of sharing tasks out (balance.py); WAY: 0 in turn, 1 longest first, 2 from a counter.
#include "counter.h"
#include "delta_rule.h"

using namespace AscendC;

struct Counts {
    GlobalTensor<int32_t> of;
    __aicore__ inline uint32_t operator()(uint32_t row) const { return of.GetValue(row) + 2; }
};

class Unequal {
public:
    __aicore__ inline Unequal(GM_ADDR counts, GM_ADDR tokens, GM_ADDR states, TPipe* pipe) : pipe(pipe)
    {
        countsGm.SetGlobalBuffer((__gm__ int32_t*)counts);
        tokensGm.SetGlobalBuffer((__gm__ float*)tokens);
        statesGm.SetGlobalBuffer((__gm__ float*)states);
        pipe->InitBuffer(tokenIn, 2, (3 * KEY + PART + 8) * sizeof(float));
        pipe->InitBuffer(stateBuf, PART * KEY * sizeof(float));
        pipe->InitBuffer(productBuf, PART * KEY * sizeof(float));
        pipe->InitBuffer(roomBuf, (10 * PART + 64) * sizeof(float));
        state = stateBuf.Get<float>();
        room.product = productBuf.Get<float>();
        room.sums = roomBuf.Get<float>();
        room.spread = room.sums[PART];
        o = room.spread[PART * rows::BLOCK];
    }

    template <typename Tasks>
    __aicore__ inline void Process(Tasks tasks)
    {
        for (balance::Task task; tasks.Next(task);) {
            const uint64_t at = (uint64_t(task.row) * EACH + task.part) * PART * KEY;
            DataCopy(state, statesGm[at], PART * KEY);
            Await<HardEvent::MTE2_V>();
            const uint32_t count = countsGm.GetValue(task.row);
            for (uint32_t i = 0; i < count; i++) {
                Token(i);
            }
            Await<HardEvent::V_MTE3>();
            DataCopyPad(statesGm[at], state, DataCopyExtParams(1, PART * KEY * sizeof(float), 0, 0, 0));
            Await<HardEvent::MTE3_MTE2>();
            Await<HardEvent::MTE3_V>();
        }
    }

    GlobalTensor<int32_t> countsGm;

private:
    __aicore__ inline void Token(uint32_t i)
    {
        constexpr uint32_t SIZE = 3 * KEY + PART + 8;
        LocalTensor<float> x = tokenIn.AllocTensor<float>();
        DataCopy(x, tokensGm[uint64_t(i) * SIZE], SIZE);
        tokenIn.EnQue(x);
        x = tokenIn.DeQue<float>();
        const rows::Token token = {x, x[KEY], x[2 * KEY], x[3 * KEY], x[3 * KEY + PART]};
        rows::DeltaStep(state, state, o, token, room, PART, KEY);
        tokenIn.FreeTensor(x);
    }

    template <HardEvent event>
    __aicore__ inline void Await()
    {
        const TEventID id = pipe->FetchEventID(event);
        SetFlag<event>(id);
        WaitFlag<event>(id);
    }

    TPipe* pipe;
    GlobalTensor<float> tokensGm, statesGm;
    TQue<TPosition::VECIN, 2> tokenIn;
    TBuf<TPosition::VECIN> stateBuf;
    TBuf<TPosition::VECCALC> productBuf, roomBuf;
    LocalTensor<float> state, o;
    rows::Room room;
};

extern "C" __global__ __aicore__ void unequal(GM_ADDR counts, GM_ADDR place, GM_ADDR tokens, GM_ADDR states)
{
#if WAY == 2
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
#else
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
#endif
    TPipe pipe;
    Unequal op(counts, tokens, states, &pipe);
#if WAY == 0
    op.Process(balance::InTurn(ROWS, EACH, GetBlockNum(), GetBlockIdx()));
#elif WAY == 1
    op.Process(balance::LongestFirst<ROWS>(ROWS, EACH, GetBlockNum(), GetBlockIdx(), Counts{op.countsGm}));
#else
    op.Process(balance::FromCounter<ROWS>(ROWS, EACH, place, Counts{op.countsGm}));
#endif
}
