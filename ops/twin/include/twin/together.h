// Cores that run at once: a fiber each, and the flags by which they wait for each other.
//
// Always the core that has done least goes on, the first of equals, until it ends, has to wait, or reaches a point where
// order between cores is seen (`GiveWay`). What a core has done is its cost: one for an instruction, for every repeat of a
// vector instruction, product of the Cube and 64 bytes copied. It orders cores, the same way every time, and is no time.
#pragma once

#include <memory>
#include <ucontext.h>

#include "types.h"

namespace twin {

// What a kernel must not leave behind.
inline void EndCore()
{
    Core& core = Here();
    for (const Buffer& b : core.buffers)
        if (b.held == Held::QUEUED || b.held == Held::DEQUEUED || b.held == Held::ALLOCATED)
            Refuse("the kernel ended with a tensor of a queue that was not freed");
    for (int from = 0; from < PIPES; from++)
        for (int to = 0; to < PIPES; to++)
            for (int id = 0; id < 8; id++)
                if (core.flags[from][to][id].set)
                    Refuse("the kernel ended with event %d from %s to %s set and not waited for", id, PIPE_NAME[from],
                           PIPE_NAME[to]);
}

struct Fiber {
    static constexpr size_t STACK = 256 << 10;
    Core core;
    ucontext_t context{};
    std::unique_ptr<char[]> stack;
    int waits = -1;  // for a flag
    bool done = false;
};

struct Stop {};  // unwinds a core that another one's refusal ended

struct Together {
    std::deque<Fiber> fibers;
    ucontext_t home{};
    Fiber* now = nullptr;
    void (*kernel)() = nullptr;
    std::string refused;
    std::map<std::pair<uint32_t, uint32_t>, std::deque<News>> sent;  // by core and flag: not yet by all who have to
};

static Together together;

constexpr uint32_t LIBRARY_WORKSPACE = 1024;  // bytes; 16 MiB on A3

inline std::string NameOfCore(uint32_t index) { return together.fibers[index].core.Name(); }

// A core that can go on. `than`: only one that has done less.
inline Fiber* Next(const Fiber* than = nullptr)
{
    Fiber* next = nullptr;
    for (Fiber& f : together.fibers) {
        if (f.done || (f.waits >= 0 && f.core.flags_across[f.waits].empty())) continue;
        const uint64_t most = next ? next->core.counters.cost : than ? than->core.counters.cost : UINT64_MAX;
        if (f.core.counters.cost < most) next = &f;
    }
    return next;
}

inline void Switch()
{
    swapcontext(&together.now->context, &together.home);
    if (!together.refused.empty()) throw Stop{};
}

// Cores that have done less come first.
inline void GiveWay()
{
    if (Next(together.now)) Switch();
}

inline void RunFiber()
{
    try {
        together.kernel();
        EndCore();
    } catch (const Refusal& refusal) {
        together.refused = "core " + Here().Name() + ": " + refusal.what();
    } catch (const Stop&) {
    }
    together.now->done = true;
    setcontext(&together.home);
}

inline void Resume(Fiber& fiber)
{
    if (!fiber.stack) {
        fiber.stack.reset(new char[Fiber::STACK]);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = Fiber::STACK;
        makecontext(&fiber.context, RunFiber, 0);
    }
    together.now = &fiber;
    machine.running = &fiber.core;
    swapcontext(&together.home, &fiber.context);
    if (fiber.done) {  // what it held is not needed again
        fiber.stack.reset();
        for (Space& space : fiber.core.space) space = Space{};
    }
}

// Every core to its end, or to the first refusal.
inline void RunAll()
{
    while (Fiber* next = Next()) {
        Resume(*next);
        if (together.refused.empty()) continue;
        for (Fiber& f : together.fibers)
            if (f.stack && !f.done) Resume(f);
        throw Refusal(together.refused);
    }
    std::string waiting;
    for (const Fiber& f : together.fibers)
        if (!f.done) {
            const bool pairs = f.waits >= 16;
            waiting += (waiting.empty() ? "" : ", ") + f.core.Name() + " for flag " +
                       std::to_string(pairs ? f.waits - 16 : f.waits) + (pairs ? " of mode 4" : "");
        }
    if (!waiting.empty()) {
        together.refused = "deadlock: cores wait for flags that nobody is left to set: " + waiting;
        for (Fiber& f : together.fibers)
            if (!f.done) Resume(f);
        throw Refusal(together.refused);
    }
    for (const Fiber& f : together.fibers)
        for (uint32_t flag = 0; flag < FLAGS; flag++)
            if (!f.core.flags_across[flag].empty())
                Refuse("core %s: the kernel ended with flag %u set for it and not waited for", f.core.Name().c_str(),
                       flag < 16 ? flag : flag - 16);
    for (const auto& [from, news] : together.sent)
        if (!news.empty())
            Refuse("core %s: the kernel ended with flag %u set, which not every core set that has to",
                   NameOfCore(from.first).c_str(), from.second);
}

// Cores of both kinds, in groups: a Cube core, then its vector cores.
inline void MakeCores(const Task& task, uint32_t groups)
{
    machine.task = task;
    uint32_t index = 0;
    for (uint32_t g = 0; g < groups; g++)
        for (uint32_t i = 0; i < task.cubes + task.vectors; i++, index++) {
            if (index == together.fibers.size()) together.fibers.emplace_back();  // the first one may be running
            Core& core = together.fibers[index].core;
            core.index = index;
            core.group = g;
            core.cube = i < task.cubes;
            core.counters.cube = core.cube;
            core.sub = core.cube ? 0 : i - task.cubes;
            core.block = core.cube ? g : g * task.vectors + core.sub;
            core.buffers.reserve(BUFFERS);
        }
    if (index > 254) Refuse("%u cores; 1 to 254 are possible", index);
    if (task.together)
        for (Region& region : machine.regions) region.blocks.resize((region.size + BLOCK - 1) / BLOCK);
}

// What the kernel declares itself to be, on every core.
inline void Declare(const Task& task)
{
    if (machine.named && task.name != machine.task.name)
        Refuse("KERNEL_TASK_TYPE: %s here, %s on another core", task.name, machine.task.name);
    if (machine.named) return;
    if (Here().index || Here().counters.cost) Refuse("KERNEL_TASK_TYPE comes first in a kernel");
    machine.named = true;
    while (together.fibers.size() > 1) together.fibers.pop_back();
    MakeCores(task, machine.groups);
}

// All that `pipe` knows to have ended, here and elsewhere.
inline News Known(Pipe pipe)
{
    const Core& core = Here();
    News news{core.counters.cost, {{core.index, core.now[pipe]}}};
    for (const Heard& h : core.heard)
        if (core.now[pipe][h.pipe] >= h.time) news.of.push_back({h.core, h.at});
    return news;
}

inline void Deliver(Core& to, uint32_t flag, const News& news)
{
    if (to.flags_across[flag].size() == 15)
        Refuse("CrossCoreSetFlag: flag %u of core %s is set 15 times already", flag, to.Name().c_str());
    to.flags_across[flag].push_back(news);
}

// A flag that `takes` receive once all of those that `sets` have set it.
template <typename Sets, typename Takes>
void Gather(uint32_t flag, const News& news, Sets sets, Takes takes)
{
    together.sent[{Here().index, flag}].push_back(news);
    News all;
    for (const Fiber& f : together.fibers)
        if (sets(f.core)) {
            const auto& one = together.sent[{f.core.index, flag}];
            if (one.empty()) return;
            all.cost = std::max(all.cost, one.front().cost);
            all.of.insert(all.of.end(), one.front().of.begin(), one.front().of.end());
        }
    for (Fiber& f : together.fibers) {
        if (sets(f.core)) together.sent[{f.core.index, flag}].pop_front();
        if (takes(f.core)) Deliver(f.core, flag, all);
    }
}

// Pipe `pipe` (the scalar unit: all pipes) goes on when the flag is set.
inline void WaitFor(uint32_t flag, Pipe pipe)
{
    Core& core = Here();
    const uint32_t time = Issue(pipe);
    if (core.flags_across[flag].empty()) {
        together.now->waits = int(flag);
        Switch();
        together.now->waits = -1;
    }
    const News news = std::move(core.flags_across[flag].front());
    core.flags_across[flag].pop_front();
    core.counters.cost = std::max(core.counters.cost, news.cost);
    if (pipe == PIPE_OF_S)
        for (Clock& clock : core.now) clock[PIPE_OF_S] = std::max(clock[PIPE_OF_S], time);
    for (const auto& [other, at] : news.of) {
        if (other == core.index) {  // its own pipe had to come so far too
            if (pipe == PIPE_OF_S)
                for (Clock& clock : core.now) Join(clock, at);
            else
                Join(core.now[pipe], at);
            continue;
        }
        Heard heard{other, at, pipe, time};
        for (size_t i = core.heard.size(); i--;) {  // one entry does for all that every pipe knows
            const Heard& h = core.heard[i];
            bool all = h.core == other;
            for (const Clock& clock : core.now) all = all && clock[h.pipe] >= h.time;
            if (!all) continue;
            Join(heard.at, h.at);
            if (pipe == PIPE_OF_S) core.heard.erase(core.heard.begin() + i);
        }
        core.heard.push_back(heard);
    }
}

}  // namespace twin

namespace AscendC {

// Mode 0: all cores of this kind. 1: the vector cores of the group. 2: its Cube core and its vector cores, each way.
// 4 (950): its Cube core and one vector core; the Cube core's flags of the second begin at 16.
template <uint8_t mode, pipe_t pipe>
void CrossCoreSetFlag(uint16_t flag)
{
    static_assert(mode == 0 || mode == 1 || mode == 2 || mode == 4, "modes are 0, 1, 2 and 4");
    static_assert(pipe != PIPE_ALL && (pipe != PIPE_S || mode == 4), "a flag is set by one pipe, not by PIPE_S");
    if (!twin::machine.task.together)
        twin::Refuse("CrossCoreSetFlag: cores of %s cannot wait for each other", twin::machine.task.name);
    const twin::Core& me = twin::Here();
    const bool mixed = twin::machine.task.cubes && twin::machine.task.vectors;
    if (mode && !mixed) twin::Refuse("CrossCoreSetFlag: mode %u needs a mixed kernel", mode);
    if (mode == 1 && me.cube) twin::Refuse("CrossCoreSetFlag: mode 1 is between vector cores");
    if (mode == 4 && __NPU_ARCH__ != 3510) twin::Refuse("CrossCoreSetFlag: %d has no mode 4", __NPU_ARCH__);
    if (mode == 4 ? flag % 16 > 10 || flag > (me.cube ? 26 : 10) : flag > 15)
        twin::Refuse("CrossCoreSetFlag: no flag %u in mode %u", flag, mode);
    twin::Issue(twin::Pipe(pipe));
    const twin::News news = twin::Known(twin::Pipe(pipe));
    const auto group = [&me](const twin::Core& c) { return c.group == me.group; };
    if constexpr (mode == 4) {
        const uint32_t sub = me.cube ? flag / 16 : me.sub;
        for (twin::Fiber& f : twin::together.fibers)
            if (group(f.core) && f.core.cube != me.cube && (!me.cube || f.core.sub == sub))
                twin::Deliver(f.core, 16 + (me.cube ? flag % 16 : flag + 16 * sub), news);
        return;
    }
    const auto sets = [&](const twin::Core& c) { return (mode == 0 || group(c)) && c.cube == me.cube; };
    const auto takes = [&](const twin::Core& c) { return mode == 2 ? group(c) && c.cube != me.cube : sets(c); };
    twin::Gather(flag, news, sets, takes);
}

// On A3 what the wait holds up is everything that the core would issue; on the 950 a pipe, if one is named.
template <uint8_t mode = 0, pipe_t pipe = PIPE_S>
void CrossCoreWaitFlag(uint16_t flag)
{
    static_assert(pipe != PIPE_ALL, "a flag is waited for by one pipe");
    if (!twin::machine.task.together)
        twin::Refuse("CrossCoreWaitFlag: cores of %s cannot wait for each other", twin::machine.task.name);
    if (flag > (mode == 4 ? 31 : 15)) twin::Refuse("CrossCoreWaitFlag: no flag %u in mode %u", flag, mode);
    twin::WaitFor(mode == 4 ? 16 + flag : flag, __NPU_ARCH__ == 3510 ? twin::Pipe(pipe) : twin::PIPE_OF_S);
}

inline int64_t GetBlockIdx() { return twin::Here().block; }
inline int64_t GetBlockNum() { return twin::machine.groups; }
inline int64_t GetSubBlockIdx() { return twin::Here().sub; }
inline int64_t GetSubBlockNum() { return twin::Here().cube ? 1 : std::max(twin::machine.task.vectors, 1u); }
inline int64_t GetTaskRatio() { return GetSubBlockNum(); }

}  // namespace AscendC

namespace AscendC {

// The framework keeps the first bytes of a workspace for itself; the kernel's come after them.
inline uint8_t* GetUserWorkspace(uint8_t* workspace) { return workspace + twin::LIBRARY_WORKSPACE; }

}  // namespace AscendC

#define ASCEND_IS_AIC (twin::Here().cube)
#define ASCEND_IS_AIV (!twin::Here().cube)

// A kernel's cores. Flags between cores need a MIX kernel: without it the unit that carries them is off.
#define KERNEL_TASK_TYPE_DEFAULT(type) twin::Declare(twin::TASK_OF_##type)
namespace twin {
constexpr Task TASK_OF_KERNEL_TYPE_AIV_ONLY = {"KERNEL_TYPE_AIV_ONLY", 0, 1, false};
constexpr Task TASK_OF_KERNEL_TYPE_AIC_ONLY = {"KERNEL_TYPE_AIC_ONLY", 1, 0, false};
constexpr Task TASK_OF_KERNEL_TYPE_MIX_AIV_1_0 = {"KERNEL_TYPE_MIX_AIV_1_0", 0, 1, true};
constexpr Task TASK_OF_KERNEL_TYPE_MIX_AIC_1_0 = {"KERNEL_TYPE_MIX_AIC_1_0", 1, 0, true};
constexpr Task TASK_OF_KERNEL_TYPE_MIX_AIC_1_1 = {"KERNEL_TYPE_MIX_AIC_1_1", 1, 1, true};
constexpr Task TASK_OF_KERNEL_TYPE_MIX_AIC_1_2 = {"KERNEL_TYPE_MIX_AIC_1_2", 1, 2, true};
}  // namespace twin
