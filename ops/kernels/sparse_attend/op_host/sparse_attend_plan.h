// How SparseAttend is tiled: plain C++, for op_host and for tests.
#pragma once

#include "../op_kernel/sparse_attend_tiling.h"

namespace plan {

struct SparseAttendSizes {
    uint64_t batch, tokens, heads, latent, rope, page, pages, room;
};

constexpr uint64_t SPARSE_TILE = 128;    // rows of the cache in L1 come in tiles of as many
constexpr uint64_t SPARSE_L1 = 512 << 10;  // bytes, on every chip

inline uint64_t SparseRound(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

// Bytes of L1 that the Cube core takes.
inline uint64_t SparseAttendL1(const SparseAttendSizes& s, uint64_t block, uint64_t buffers)
{
    const uint64_t high = SparseRound(s.heads, 16), width = s.latent + s.rope;
    return 2 * (high * width + high * block + buffers * SparseRound(block, SPARSE_TILE) * width);
}

// Bytes of UB that a vector core takes.
inline uint64_t SparseAttendUb(const SparseAttendSizes& s, uint64_t block)
{
    const uint64_t half = (s.heads + 1) / 2, all = SparseRound(half, 8), wide = block > s.latent ? block : s.latent;
    return 2 * 8 * wide * (4 + 2) + 512 * 4 * 3 + all * 4 + half * s.latent * 4 + (4 * all + 8 * 9 + 64 + 16 + 16) * 4;
}

// Bytes of workspace of a group of cores.
inline uint64_t SparseAttendShare(const SparseAttendSizes& s, uint64_t block)
{
    return 2 * SparseRound(SparseRound(s.heads * block * 6, 512) + s.heads * s.latent * 4, 512);
}

// Bytes of workspace of all parts of queries.
inline uint64_t SparseAttendJoined(const SparseAttendSizes& s, uint64_t parts)
{
    return parts == 1 ? 0 : s.batch * s.tokens * parts * s.heads * (s.latent + 2 * 8) * 4;
}

// In how many parts each query's selection is shared out: as many as make the groups' rounds shorter by a tenth or more.
// A part's sums go out and in once, which a few rows do not outweigh.
inline uint64_t SparseAttendParts(const SparseAttendSizes& s, uint64_t groups)
{
    const uint64_t queries = s.batch * s.tokens, few = s.heads * s.latent / 36;
    const uint64_t rows = few < SPARSE_TILE ? SPARSE_TILE : few;
    uint64_t best = 1;
    for (uint64_t parts = 2; parts <= s.room / rows && parts <= 32; parts++) {
        const uint64_t now = (queries * parts + groups - 1) / groups, before = (queries * best + groups - 1) / groups;
        if (10 * now * best < 9 * before * parts) {
            best = parts;
        }
    }
    return best;
}

// Groups of cores to use, or 0: the kernel cannot do these sizes. Needs the sizes, the groups and bytes of UB of the
// device.
inline uint32_t PlanSparseAttend(const SparseAttendSizes& s, uint32_t groups, uint64_t ub, SparseAttendTiling& t)
{
    const uint64_t queries = s.batch * s.tokens;
    if (s.heads < 1 || s.heads > 128 || s.latent < 16 || s.latent > 512 || s.latent % 16 || s.rope < 16 ||
        s.rope > 64 || s.rope % 16 || s.page < 1 || s.pages < 1 || s.room < 1 || queries < 1 || queries > UINT32_MAX ||
        s.page * s.pages > INT32_MAX || s.room > INT32_MAX || queries * s.heads > UINT32_MAX / 32 || groups < 1) {
        return 0;
    }
    // Sums of a block go out and in once, heads x latent floats: with more heads blocks are larger, and L1 holds one.
    const uint64_t parts = SparseAttendParts(s, groups), most = SparseRound((s.room + parts - 1) / parts, 16);
    uint64_t buffers = s.heads > 6 ? 1 : 2, block = s.heads > 6 ? 384 : 192;
    if (most < block) {
        block = most;
    }
    while (block > 16 && (SparseAttendL1(s, block, buffers) > SPARSE_L1 || SparseAttendUb(s, block) > ub)) {
        block -= 16;
    }
    if (SparseAttendL1(s, block, buffers) > SPARSE_L1 || SparseAttendUb(s, block) > ub) {
        return 0;
    }
    t.queries = uint32_t(queries);
    t.tokens = uint32_t(s.tokens);
    t.heads = uint32_t(s.heads);
    t.latent = uint32_t(s.latent);
    t.rope = uint32_t(s.rope);
    t.page = uint32_t(s.page);
    t.pages = uint32_t(s.pages);
    t.room = uint32_t(s.room);
    t.parts = uint32_t(parts);
    t.block = uint32_t(block);
    t.buffers = uint32_t(buffers);
    return uint32_t(queries * parts < groups ? queries * parts : groups);
}

}  // namespace plan
