// The machine a kernel runs on: memories of one architecture, what may be read and written when, and counters.
//
// Cores run one after another. Inside a core every pipe (scalar, vector, the two copy engines) runs by itself on the
// device, so each access is checked against vector clocks: `now[p][q]` is the last instruction of pipe q that pipe p
// knows to have ended, from a queue, an event or a barrier. A pipe by itself is in order: the compiler puts barriers
// between dependent vector instructions (cce-auto-sync, on by default in operator projects), the 950 does so itself.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace twin {

struct Refusal : std::runtime_error {
    using std::runtime_error::runtime_error;
};

[[noreturn]] __attribute__((format(printf, 1, 2))) inline void Refuse(const char* format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    throw Refusal(text);
}

// Capacities in bytes, as tiling code sees them.
struct Capacity {
    uint32_t ub, l1, l0a, l0b, l0c;
};

#if __NPU_ARCH__ == 2201
constexpr Capacity CAPACITY = {192 << 10, 512 << 10, 64 << 10, 64 << 10, 128 << 10};
#elif __NPU_ARCH__ == 3510
constexpr Capacity CAPACITY = {248 << 10, 512 << 10, 64 << 10, 64 << 10, 256 << 10};
#else
#error "__NPU_ARCH__ has to be 2201 (A2, A3) or 3510 (950)"
#endif

constexpr uint32_t BLOCK = 32;    // bytes of a data block: the unit of local memory
constexpr uint32_t REPEAT = 256;  // bytes of one repeat of a vector instruction
constexpr uint32_t LINE = 64;     // bytes of a line of the scalar unit's data cache
constexpr uint32_t BUFFERS = 64;  // that one TPipe hands out

enum Pipe : uint8_t { PIPE_OF_S, PIPE_OF_V, PIPE_OF_MTE2, PIPE_OF_MTE3, PIPE_OF_MTE1, PIPE_OF_M, PIPE_OF_FIX, PIPES };
constexpr const char* PIPE_NAME[PIPES] = {"S", "V", "MTE2", "MTE3", "MTE1", "M", "FIX"};
enum SpaceId : uint8_t { UB, L1, L0A, L0B, L0C, SPACES };
constexpr const char* SPACE_NAME[SPACES] = {"UB", "L1", "L0A", "L0B", "L0C"};

using Clock = std::array<uint32_t, PIPES>;

inline void Join(Clock& into, const Clock& from)
{
    for (int p = 0; p < PIPES; p++) into[p] = std::max(into[p], from[p]);
}

// A local memory: its bytes, which of them somebody wrote, and who touched each block last.
struct Space {
    struct Touch {
        uint32_t written = 0;
        Pipe writer = PIPE_OF_S;
        Clock read{};
    };
    std::vector<uint8_t> bytes, known;
    std::vector<Touch> blocks;
    uint32_t used = 0;

    // As a core finds it: nothing written. Only what was handed out before can have been.
    void Reset(uint32_t size)
    {
        bytes.resize(size);
        known.resize(size);
        blocks.resize(size / BLOCK);
        std::fill_n(known.begin(), used, 0);
        std::fill_n(blocks.begin(), used / BLOCK, Touch{});
        used = 0;
    }
};

// A tensor in global memory. `writer`, `reader` per byte: core + 1, 0 nobody, SEVERAL.
struct Region {
    static constexpr uint8_t SEVERAL = 255;
    std::string name;
    uint8_t* base;
    uint64_t size;
    bool filled;     // holds values before the kernel runs
    uint64_t shared; // leading bytes that are nobody's: cores may race there
    std::vector<uint8_t> writer, reader;
    uint32_t last_write[PIPES] = {};
};

// What one local buffer of a queue is at the moment; `turn` counts its ways through the queue.
enum class Held : uint8_t { FREE, ALLOCATED, QUEUED, DEQUEUED, ALWAYS };
struct Buffer {
    SpaceId space;
    uint32_t start, size;
    Held held = Held::ALWAYS;
    uint32_t turn = 0;
    Clock ready{}, released{};
};

struct Counters {
    uint64_t instructions[PIPES] = {};
    uint64_t repeats = 0;  // of vector instructions, 256 bytes each
    uint64_t gm_read = 0, gm_written = 0;
};

struct GmAccess {
    Region* region;
    uint64_t begin, end;
    Pipe pipe;
    uint32_t time;
    bool write;
};

struct Core {
    uint32_t index = 0;
    Clock now[PIPES]{};
    Space space[SPACES];
    std::vector<Buffer> buffers;  // never grows past its capacity: tensors point into it
    std::vector<GmAccess> pending;
    std::vector<const void*> lines;  // of the scalar unit's cache, for counting
    struct Flag {
        bool set = false;
        Clock at{};
    } flags[PIPES][PIPES][8];
    Counters counters;
};

struct Machine {
    uint32_t cores = 0;
    Core core;
    std::deque<Region> regions;
    std::vector<Counters> counters;
};

static Machine machine;  // static: each library has its own, inline variables would be one in the process

// An instruction begins: its time on its pipe.
inline uint32_t Issue(Pipe pipe)
{
    Core& core = machine.core;
    core.counters.instructions[pipe]++;
    return ++core.now[pipe][pipe];
}

inline void Known(const char* what, Pipe pipe, Pipe other, uint32_t time, const char* did, const char* place)
{
    if (other != pipe && machine.core.now[pipe][other] < time)
        Refuse("%s on pipe %s meets %s that pipe %s %s, with no queue, event or barrier between them", what,
               PIPE_NAME[pipe], place, PIPE_NAME[other], did);
}

// Bytes [begin, end) of a local memory are read, or written. `what` names the instruction.
inline void Touch(const char* what, Pipe pipe, SpaceId id, uint32_t begin, uint32_t end, bool write)
{
    Core& core = machine.core;
    Space& space = core.space[id];
    if (end > space.used)
        Refuse("%s reaches byte %u of %s, of which %u are allocated", what, end, SPACE_NAME[id], space.used);
    const uint32_t time = core.now[pipe][pipe];
    for (uint32_t b = begin / BLOCK; b * BLOCK < end; b++) {
        Space::Touch& block = space.blocks[b];
        if (!write && block.written == time && block.writer == pipe)
            Refuse("%s reads what an earlier part of the same instruction wrote", what);
        if (block.written) Known(what, pipe, block.writer, block.written, "wrote", SPACE_NAME[id]);
        if (write) {
            for (int p = 0; p < PIPES; p++)
                if (block.read[p]) Known(what, pipe, Pipe(p), block.read[p], "reads", SPACE_NAME[id]);
            block = {time, pipe, {}};
        } else {
            block.read[pipe] = time;
        }
    }
    if (write) {
        std::memset(&space.known[begin], 1, end - begin);
    } else if (const void* gap = std::memchr(&space.known[begin], 0, end - begin)) {
        Refuse("%s reads byte %u of %s, which nothing wrote", what,
               uint32_t(static_cast<const uint8_t*>(gap) - space.known.data()), SPACE_NAME[id]);
    }
}

inline Region& RegionOf(const char* what, const void* address)
{
    const uint8_t* a = static_cast<const uint8_t*>(address);
    for (Region& r : machine.regions)
        if (a >= r.base && a < r.base + std::max<uint64_t>(r.size, 1)) return r;
    Refuse("%s: an address in no tensor of the operator", what);
}

// Bytes of global memory are read, or written. In the leading bytes that are nobody's, order does not matter.
inline void TouchGm(const char* what, Pipe pipe, Region& region, uint64_t begin, uint64_t bytes, bool write)
{
    const uint64_t end = begin + bytes;
    if (end > region.size)
        Refuse("%s %s bytes %llu to %llu of %s, which has %llu", what, write ? "writes" : "reads",
               (unsigned long long)begin, (unsigned long long)end, region.name.c_str(),
               (unsigned long long)region.size);
    Core& core = machine.core;
    const uint8_t me = core.index + 1;
    for (uint64_t i = std::max(begin, region.shared); i < end; i++) {
        uint8_t &writer = region.writer[i], &reader = region.reader[i];
        if (writer && writer != me)
            Refuse("%s: core %u and core %u race for byte %llu of %s", what, writer - 1, core.index,
                   (unsigned long long)i, region.name.c_str());
        if (write) {
            if (reader && reader != me)
                Refuse("%s: core %u writes byte %llu of %s, which another core reads", what, core.index,
                       (unsigned long long)i, region.name.c_str());
            writer = me;
        } else {
            if (!writer && !region.filled)
                Refuse("%s reads byte %llu of %s, which nothing wrote", what, (unsigned long long)i,
                       region.name.c_str());
            reader = reader && reader != me ? Region::SEVERAL : me;
        }
    }
    if (end <= region.shared) return;
    const uint32_t time = core.now[pipe][pipe];
    for (const GmAccess& a : core.pending)
        if (a.region == &region && a.begin < end && begin < a.end && (write || a.write))
            Known(what, pipe, a.pipe, a.time, a.write ? "wrote" : "reads", region.name.c_str());
    if (pipe == PIPE_OF_S && region.last_write[PIPE_OF_MTE3])
        Known(what, pipe, PIPE_OF_MTE3, region.last_write[PIPE_OF_MTE3], "wrote", region.name.c_str());
    if (write) region.last_write[pipe] = time;
    if (!core.pending.empty()) {
        GmAccess& last = core.pending.back();
        if (last.region == &region && last.end == begin && last.pipe == pipe && last.time == time &&
            last.write == write) {
            last.end = end;
            return;
        }
    }
    if (core.pending.size() > 64)  // forget what both copy engines know of
        core.pending.erase(std::remove_if(core.pending.begin(), core.pending.end(),
                                          [&](const GmAccess& a) {
                                              return core.now[PIPE_OF_MTE2][a.pipe] >= a.time &&
                                                     core.now[PIPE_OF_MTE3][a.pipe] >= a.time;
                                          }),
                           core.pending.end());
    core.pending.push_back({&region, begin, end, pipe, time, write});
}

}  // namespace twin
