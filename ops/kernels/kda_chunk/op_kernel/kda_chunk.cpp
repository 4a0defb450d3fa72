// KDA over many tokens of every row, chunk by chunk (WY form): vector cores prepare, the Cube multiplies.
//
// A group of cores has the chunks of a row and head one after another. What a chunk knows of itself does not wait for the
// state: the vector cores, one for each of two chunks, decay queries and keys, and take pairs within blocks of 16 tokens one
// by one; the Cube takes pairs of blocks; the vector cores invert the unit triangle; the Cube does all that needs the state.
// Tensors are read and written once. Between cores, and for results that are factors again, goes a workspace that stays in
// the L2 cache (1.3 MB of a group at K = V = 128): A3 has no other way for float32, and from L0C to L1 the 950 leaves columns
// of 16 floats, of which no factor is made.
//
// The Cube multiplies float32 by float32, as both chips do, at half of bfloat16's rate on paper. A state in bfloat16 would
// be 1e-3 off; floats split into three bfloat16 each would take six products, three times as long, and half as much
// workspace again.
#include "kda_chunk_cube.h"
#include "kda_chunk_vector.h"

using namespace AscendC;

extern "C" __global__ __aicore__ void kda_chunk(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR decay, GM_ADDR beta,
                                                GM_ADDR memory, GM_ADDR slots, GM_ADDR lengths, GM_ADDR counts,
                                                GM_ADDR o, GM_ADDR memory_out, GM_ADDR workspace, GM_ADDR tiling)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
    REGISTER_TILING_DEFAULT(KdaChunkTiling);
    GET_TILING_DATA_WITH_STRUCT(KdaChunkTiling, t, tiling);
    GM_ADDR scratch = GetUserWorkspace(workspace);
    TPipe pipe;
    if ASCEND_IS_AIC {
        kda_chunk_parts::Products<DTYPE_Q> op(t, &pipe);
        op.Init(memory, slots, lengths, counts, o, scratch);
        op.Process();
    }
    if ASCEND_IS_AIV {
        kda_chunk_parts::Vector<DTYPE_Q> op(t, &pipe);
        op.Init(q, k, v, decay, beta, memory, slots, lengths, counts, o, scratch);
        op.Process();
    }
}
