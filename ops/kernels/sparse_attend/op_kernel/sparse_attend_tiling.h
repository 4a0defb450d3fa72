// What op_host tells the kernel.
#pragma once

#include <cstdint>

struct SparseAttendTiling {
    uint32_t queries, tokens;  // of all rows, and of one
    uint32_t heads, latent, rope;
    uint32_t page, pages;      // tokens of a page; pages of a sequence
    uint32_t room;             // positions that a query may have selected
    uint32_t parts;            // that they are shared out in, to groups of cores
    uint32_t block;            // cached tokens whose scores are made at once: a multiple of 16
    uint32_t buffers;          // blocks that L1 holds, 1 or 2
    float scale;
};
