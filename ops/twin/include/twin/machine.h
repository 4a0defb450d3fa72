// The machine a kernel runs on: memories of one architecture, what may be read and written when, and counters.
//
// Inside a core every pipe (scalar, vector, Cube, the copy engines) runs by itself on the device, so each access is checked
// against vector clocks: `now[p][q]` is the last instruction of pipe q that pipe p knows to have ended, from a queue, an
// event or a barrier. A pipe by itself is in order: the compiler puts barriers between dependent vector instructions
// (cce-auto-sync, on by default in operator projects), the 950 does so itself. What other cores did is known from flags
// across cores (together.h).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
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

constexpr uint32_t SIZE[] = {CAPACITY.ub, CAPACITY.l1, CAPACITY.l0a, CAPACITY.l0b, CAPACITY.l0c};  // by SpaceId
constexpr uint32_t BLOCK = 32;    // bytes of a data block: the unit of local memory
constexpr uint32_t REPEAT = 256;  // bytes of one repeat of a vector instruction
constexpr uint32_t LINE = 64;     // bytes of a line of the scalar unit's data cache
constexpr uint32_t BUFFERS = 64;  // that one TPipe hands out

enum Pipe : uint8_t { PIPE_OF_S, PIPE_OF_V, PIPE_OF_MTE2, PIPE_OF_MTE3, PIPE_OF_MTE1, PIPE_OF_M, PIPE_OF_FIX, PIPES };
constexpr const char* PIPE_NAME[PIPES] = {"S", "V", "MTE2", "MTE3", "MTE1", "M", "FIX"};
constexpr uint32_t FLAGS = 48;  // between cores: 16 of modes 0 to 2, then 32 of mode 4
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

    // `size` more bytes are handed out; nothing wrote them.
    void Grow(uint32_t size)
    {
        used += size;
        bytes.resize(used);
        known.resize(used);
        blocks.resize(used / BLOCK);
    }
};

// Who touched bytes of a block of global memory: a core, by which instruction of which of its pipes.
struct Mark {
    uint32_t core = 0, time = 0;
    Pipe pipe = PIPE_OF_S;
    uint32_t bytes = 0;  // of the block's 32, a bit each: cores may have parts of a block
};

// A tensor in global memory. `writer`, `reader` per byte: core + 1, 0 nobody, SEVERAL (writers: by AtomicAdd).
struct Region {
    static constexpr uint8_t SEVERAL = 255;
    struct Block {  // of 32 bytes; kept only where cores can wait for each other
        std::vector<Mark> writes, reads, adds;  // reads and adds (AtomicAdd) since the byte was written
    };
    std::string name;
    uint8_t* base;
    uint64_t size;
    bool filled;     // holds values before the kernel runs
    uint64_t shared; // leading bytes that are nobody's: cores may race there
    bool scratch;    // a workspace
    std::vector<uint8_t> writer, reader;
    std::vector<Block> blocks;
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
    uint64_t repeats = 0;   // of vector instructions, 256 bytes each
    uint64_t products = 0;  // of the Cube: fractals of 16 x 16 x 32 bytes
    uint64_t gm_read = 0, gm_written = 0, scratch_read = 0, scratch_written = 0;
    uint64_t cube = 0;  // 1: a Cube core
    uint64_t cost = 0;

    void Gm(const Region& region, uint64_t bytes, bool write)
    {
        (region.scratch ? write ? scratch_written : scratch_read : write ? gm_written : gm_read) += bytes;
        cost += bytes / LINE;
    }
};

struct GmAccess {
    Region* region;
    uint64_t begin, end;
    Pipe pipe;
    uint32_t time;
    bool write;
};

// What is known of other cores: of each, the last instructions that have ended.
struct News {
    uint64_t cost = 0;  // when it was sent
    std::vector<std::pair<uint32_t, Clock>> of;
};

// Something heard of another core, by instruction `time` of `pipe`.
struct Heard {
    uint32_t core;
    Clock at;
    Pipe pipe;
    uint32_t time;
};

struct Core {
    uint32_t index = 0;           // among all
    uint32_t block = 0, sub = 0;  // GetBlockIdx, GetSubBlockIdx
    uint32_t group = 0;
    bool cube = false;
    Clock now[PIPES]{};
    std::vector<Heard> heard;
    std::deque<News> flags_across[FLAGS];
    bool exact = false;    // SetHF32Mode(DISABLE)
    int64_t product = -1;  // where in L0C the last matrix product went, if no barrier came after it
    Space space[SPACES];
    std::vector<Buffer> buffers;  // never grows past its capacity: tensors point into it
    std::vector<GmAccess> pending;
    std::map<const Region*, uint32_t> left[PIPES];  // the last instruction that wrote there
    std::vector<const void*> lines;  // of the scalar unit's cache, for counting
    struct Flag {
        bool set = false;
        Clock at{};
    } flags[PIPES][PIPES][8];
    Counters counters;

    std::string Name() const;
};

// How a kernel is launched: cores of both kinds in a group, and whether they can wait for each other.
struct Task {
    const char* name;
    uint32_t cubes, vectors;
    bool together;
};

struct Machine {
    uint32_t groups = 0;
    Task task{};
    bool named = false;  // by the kernel; else it is vector cores alone
    Core* running = nullptr;
    std::deque<Region> regions;
};

static Machine machine;  // static: each library has its own, inline variables would be one in the process

inline Core& Here() { return *machine.running; }

inline std::string Core::Name() const
{
    const bool mixed = machine.task.cubes && machine.task.vectors;
    return (mixed ? cube ? "AIC " : "AIV " : "") + std::to_string(block);
}

// An instruction begins: its time on its pipe.
inline uint32_t Issue(Pipe pipe)
{
    Core& core = Here();
    if (core.cube ? pipe == PIPE_OF_V : pipe == PIPE_OF_MTE1 || pipe == PIPE_OF_M || pipe == PIPE_OF_FIX)
        Refuse("a %s core has no pipe %s", core.cube ? "Cube" : "vector", PIPE_NAME[pipe]);
    core.counters.instructions[pipe]++;
    core.counters.cost++;
    return ++core.now[pipe][pipe];
}

inline void Known(const char* what, Pipe pipe, Pipe other, uint32_t time, const char* did, const char* place)
{
    if (other != pipe && Here().now[pipe][other] < time)
        Refuse("%s on pipe %s meets %s that pipe %s %s, with no queue, event or barrier between them", what,
               PIPE_NAME[pipe], place, PIPE_NAME[other], did);
}

// Bytes [begin, end) of a local memory are read, or written, after what other pipes did to them. `what` names the
// instruction.
inline void InOrder(const char* what, Pipe pipe, SpaceId id, uint32_t begin, uint32_t end, bool write)
{
    Core& core = Here();
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
}

// The same, and what is read was written before.
inline void Touch(const char* what, Pipe pipe, SpaceId id, uint32_t begin, uint32_t end, bool write)
{
    InOrder(what, pipe, id, begin, end, write);
    Space& space = Here().space[id];
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

// Whether pipe `pipe` here comes after an instruction of another core.
inline bool After(Pipe pipe, const Mark& mark)
{
    const Core& core = Here();
    for (const Heard& h : core.heard)
        if (h.core == mark.core && h.at[mark.pipe] >= mark.time && core.now[pipe][h.pipe] >= h.time) return true;
    return false;
}

std::string NameOfCore(uint32_t index);

enum class Access : uint8_t { READ, WRITE, ADD };  // ADD: atomic, so that cores need no order among themselves

// Cores that cannot wait for each other: none may write what another touches.
inline void AloneOn(const char* what, Region& region, uint64_t i, Access access)
{
    const bool write = access != Access::READ;
    const Core& core = Here();
    const uint8_t me = uint8_t(core.index + 1), writer = region.writer[i], reader = region.reader[i];
    if (writer == Region::SEVERAL) {
        if (access == Access::ADD) return;
        Refuse("%s: core %s meets byte %llu of %s, which cores add to", what, core.Name().c_str(), (unsigned long long)i,
               region.name.c_str());
    }
    if (writer && writer != me)
        Refuse("%s: core %s and core %s race for byte %llu of %s", what, NameOfCore(writer - 1u).c_str(),
               core.Name().c_str(), (unsigned long long)i, region.name.c_str());
    if (write && reader && reader != me)
        Refuse("%s: core %s writes byte %llu of %s, which another core reads", what, core.Name().c_str(),
               (unsigned long long)i, region.name.c_str());
}

// Cores that can: between two that touch a byte of a block, one of them writing, there has to be a flag.
inline void InTurnOn(const char* what, Pipe pipe, Region& region, uint64_t at, uint32_t bytes, Access access)
{
    const Core& core = Here();
    Region::Block& block = region.blocks[at];
    const auto check = [&](const Mark& mark, const char* did) {
        if ((mark.bytes & bytes) && mark.core != core.index && !After(pipe, mark))
            Refuse("%s on pipe %s: core %s meets bytes %llu to %llu of %s that core %s %s on pipe %s, with no flag "
                   "between them",
                   what, PIPE_NAME[pipe], core.Name().c_str(), (unsigned long long)at * BLOCK,
                   (unsigned long long)(at + 1) * BLOCK, region.name.c_str(), NameOfCore(mark.core).c_str(), did,
                   PIPE_NAME[mark.pipe]);
    };
    const auto forget = [bytes](std::vector<Mark>& marks) {
        for (Mark& mark : marks) mark.bytes &= ~bytes;
        marks.erase(std::remove_if(marks.begin(), marks.end(), [](const Mark& m) { return !m.bytes; }), marks.end());
    };
    const Mark mine = {core.index, core.now[pipe][pipe], pipe, bytes};
    for (const Mark& mark : block.writes) check(mark, "wrote");
    if (access != Access::READ)
        for (const Mark& mark : block.reads) check(mark, "reads");
    if (access != Access::ADD)
        for (const Mark& mark : block.adds) check(mark, "adds to");
    if (access == Access::WRITE) {
        for (std::vector<Mark>* marks : {&block.reads, &block.adds, &block.writes}) forget(*marks);
        block.writes.push_back(mine);
        return;
    }
    std::vector<Mark>& among = access == Access::ADD ? block.adds : block.reads;
    for (Mark& mark : among)
        if (mark.core == mine.core && mark.pipe == pipe && mark.bytes == bytes) return void(mark = mine);
    among.push_back(mine);
}

// Bytes of global memory are read, or written. In the leading bytes that are nobody's, order does not matter.
inline void TouchGm(const char* what, Pipe pipe, Region& region, uint64_t begin, uint64_t bytes, Access access)
{
    const bool write = access != Access::READ;
    const uint64_t end = begin + bytes;
    if (end > region.size)
        Refuse("%s %s bytes %llu to %llu of %s, which has %llu", what, write ? "writes" : "reads",
               (unsigned long long)begin, (unsigned long long)end, region.name.c_str(),
               (unsigned long long)region.size);
    Core& core = Here();
    const uint8_t me = uint8_t(core.index + 1);
    const uint64_t from = std::max(begin, region.shared);
    for (uint64_t i = from; i < end; i++) {
        if (!machine.task.together) AloneOn(what, region, i, access);
        if (access != Access::WRITE && !region.writer[i] && !region.filled)
            Refuse("%s reads byte %llu of %s, which nothing wrote", what, (unsigned long long)i, region.name.c_str());
        uint8_t& who = write ? region.writer[i] : region.reader[i];
        if (pipe == PIPE_OF_S && !write && region.writer[i] == Region::SEVERAL)
            Refuse("%s reads byte %llu of %s, which cores add to: the scalar unit's cache may hold another value", what,
                   (unsigned long long)i, region.name.c_str());
        const bool others = access == Access::ADD ? machine.task.together || who != me : !write && who && who != me;
        who = others ? Region::SEVERAL : me;
    }
    if (machine.task.together && from < end)
        for (uint64_t b = from / BLOCK; b * BLOCK < end; b++) {
            const uint64_t first = std::max(from, b * BLOCK) % BLOCK, some = std::min(end - b * BLOCK, uint64_t(BLOCK)) - first;
            InTurnOn(what, pipe, region, b, uint32_t(((uint64_t(1) << some) - 1) << first), access);
        }
    if (end <= region.shared) return;
    const uint32_t time = core.now[pipe][pipe];
    for (const GmAccess& a : core.pending)
        if (a.region == &region && a.begin < end && begin < a.end && (write || a.write))
            Known(what, pipe, a.pipe, a.time, a.write ? "wrote" : "reads", region.name.c_str());
    for (const Pipe out : {PIPE_OF_MTE3, PIPE_OF_FIX})  // the scalar unit's knowledge is not asked for in `pending`
        if (const auto it = core.left[out].find(&region); pipe == PIPE_OF_S && it != core.left[out].end())
            Known(what, pipe, out, it->second, "wrote", region.name.c_str());
    if (write) core.left[pipe][&region] = time;
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
                                              const Pipe out = core.cube ? PIPE_OF_FIX : PIPE_OF_MTE3;
                                              return core.now[PIPE_OF_MTE2][a.pipe] >= a.time &&
                                                     core.now[out][a.pipe] >= a.time;
                                          }),
                           core.pending.end());
    core.pending.push_back({&region, begin, end, pipe, time, write});
}

}  // namespace twin
