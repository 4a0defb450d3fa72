// Attention of each query to the cached tokens that were selected for it, in the latent space: a cached row is key and
// value, and is read once.
//
// A group of cores, one for products and two for vectors, has a query at a time, or where there are few, a part of one. Stage one screens the positions
// selected for it: those it does not see, and those that are not here (-1), are passed over, whole stretches of them
// without a copy. Stage two attends to what is left, a block at a time: scores (Cube), weights (vector), weighted sums
// (Cube), which are added up (vector). Scores, weights and sums go through the workspace; so do the sums of parts, which
// are joined once all cores are there.
#include "sparse_attend_cube.h"
#include "sparse_attend_vector.h"

extern "C" __global__ __aicore__ void sparse_attend(GM_ADDR q, GM_ADDR q_rope, GM_ADDR latent, GM_ADDR rope,
                                                    GM_ADDR selected, GM_ADDR block_table, GM_ADDR lengths,
                                                    GM_ADDR counts, GM_ADDR o, GM_ADDR lse, GM_ADDR workspace,
                                                    GM_ADDR tiling)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
    REGISTER_TILING_DEFAULT(SparseAttendTiling);
    GET_TILING_DATA_WITH_STRUCT(SparseAttendTiling, t, tiling);
    AscendC::TPipe pipe;
    GM_ADDR shared = AscendC::GetUserWorkspace(workspace);
    const uint64_t size = uint64_t(sparse::SharesOf(t).slot) * sparse::SLOTS;
    if ASCEND_IS_AIC {
        sparse::Cube<DTYPE_Q> op(t, &pipe);
        op.Init(q, q_rope, latent, rope, selected, block_table, lengths, counts, shared + AscendC::GetBlockIdx() * size);
        op.Process();
    }
    if ASCEND_IS_AIV {
        const uint64_t group = AscendC::GetBlockIdx() / AscendC::GetSubBlockNum();
        sparse::Vector<DTYPE_Q> op(t, &pipe);
        op.Init(selected, lengths, counts, o, lse, shared + group * size, shared + AscendC::GetBlockNum() * size);
        op.Process();
    }
}
