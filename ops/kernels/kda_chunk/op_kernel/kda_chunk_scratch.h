// Where things lie in the workspace, in floats: for op_host, which asks for it, and for both kinds of cores.
#pragma once

#include "kda_chunk_tiling.h"

#ifndef __aicore__
#define __aicore__
#endif

namespace kda_chunk_parts {

constexpr uint32_t ROWS = 16;   // tokens of a block: a chunk is whole blocks, the last one filled up with zeros
constexpr uint32_t SLOTS = 2;   // steps that are under way at once
constexpr uint32_t CHUNKS = 2;  // of a step: one for each vector core of a group

// What a chunk leaves for the Cube, [tokens, width] each unless said otherwise.
struct ChunkScratch {
    uint64_t query, key;              // decayed since the block's start; key times -beta
    uint64_t query_start, key_start;  // decayed since the chunk's start
    uint64_t early;                   // for block I all earlier keys, decayed until its start: [16 I, key], in turn
    uint64_t write;                   // keys decayed until the chunk's end
    uint64_t value;                   // times beta
    uint64_t links;                   // [tokens, tokens], transposed: what a token's key takes from later ones, times -beta
    uint64_t inverse, scores;         // [tokens, tokens]
    uint64_t keep;                    // [16, key]: exp of the chunk's decay on the diagonals of 16 x 16 blocks
    uint64_t size;
};

struct GroupScratch {
    uint64_t reads;  // [tokens, key]: inverse times key_start
    uint64_t news;   // [tokens, value]
    uint64_t state;  // [value, key], between chunks
    uint64_t size;
};

__aicore__ inline ChunkScratch ScratchOfChunk(const KdaChunkTiling& t)
{
    const uint64_t wide = uint64_t(t.chunk) * t.key, square = uint64_t(t.chunk) * t.chunk, blocks = t.chunk / ROWS;
    ChunkScratch s{};
    s.key = s.query + wide;
    s.query_start = s.key + wide;
    s.key_start = s.query_start + wide;
    s.write = s.key_start + wide;
    s.early = s.write + wide;
    s.value = s.early + blocks * (blocks - 1) / 2 * ROWS * t.key;
    s.links = s.value + uint64_t(t.chunk) * t.value;
    s.inverse = s.links + square;
    s.scores = s.inverse + square;
    s.keep = s.scores + square;
    s.size = s.keep + ROWS * t.key;
    return s;
}

__aicore__ inline GroupScratch ScratchOfGroup(const KdaChunkTiling& t)
{
    GroupScratch s{};
    s.reads = SLOTS * CHUNKS * ScratchOfChunk(t).size;
    s.news = s.reads + uint64_t(t.chunk) * t.key;
    s.state = s.news + uint64_t(t.chunk) * t.value;
    s.size = s.state + uint64_t(t.value) * t.key;
    return s;
}

}  // namespace kda_chunk_parts
