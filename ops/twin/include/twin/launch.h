// How a kernel's library is called: all its cores one after another, with the addresses of its tensors.
// TWIN_KERNEL is the kernel's name; its source is included before this file.
#pragma once

#include <utility>

#include "machine.h"

namespace twin {

struct Tensor {
    const char* name;
    uint8_t* data;
    uint64_t bytes;
    uint64_t filled;  // 1: holds values before the kernel runs
    uint64_t shared;  // leading bytes that are nobody's
};

template <typename... A, size_t... I>
void Call(void (*kernel)(A...), uint8_t* const* arguments, std::index_sequence<I...>)
{
    kernel(arguments[I]...);
}

template <typename... A>
uint32_t Arity(void (*)(A...))
{
    return sizeof...(A);
}

template <typename... A>
void Call(void (*kernel)(A...), uint8_t* const* arguments)
{
    Call(kernel, arguments, std::index_sequence_for<A...>{});
}

inline void StartCore(uint32_t index)
{
    Core fresh;
    fresh.index = index;
    fresh.buffers.reserve(BUFFERS);
    Core& core = machine.core;
    for (int s = 0; s < SPACES; s++) std::swap(fresh.space[s], core.space[s]);
    core = std::move(fresh);
    const uint32_t sizes[SPACES] = {CAPACITY.ub, CAPACITY.l1, CAPACITY.l0a, CAPACITY.l0b, CAPACITY.l0c};
    for (int s = 0; s < SPACES; s++) core.space[s].Reset(sizes[s]);
}

// What a kernel must not leave behind.
inline void EndCore()
{
    Core& core = machine.core;
    for (const Buffer& b : core.buffers)
        if (b.held == Held::QUEUED || b.held == Held::DEQUEUED || b.held == Held::ALLOCATED)
            Refuse("the kernel ended with a tensor of a queue that was not freed");
    for (int from = 0; from < PIPES; from++)
        for (int to = 0; to < PIPES; to++)
            for (int id = 0; id < 8; id++)
                if (core.flags[from][to][id].set)
                    Refuse("the kernel ended with event %d from %s to %s set and not waited for", id, PIPE_NAME[from],
                           PIPE_NAME[to]);
    machine.counters.push_back(core.counters);
}

// Bytes that some core read, plus bytes that some core wrote: each once.
inline uint64_t Touched()
{
    uint64_t touched = 0;
    for (const Region& r : machine.regions)
        for (uint64_t i = 0; i < r.size; i++) touched += (r.reader[i] != 0) + (r.writer[i] != 0);
    return touched;
}

inline void AllWritten()
{
    for (const Region& r : machine.regions)
        if (!r.filled)
            if (const void* gap = std::memchr(r.writer.data(), 0, r.size))
                Refuse("byte %llu of %s was never written",
                       (unsigned long long)(static_cast<const uint8_t*>(gap) - r.writer.data()), r.name.c_str());
}

}  // namespace twin

// 0 done, 1 refused (the reason is in `error`). `counters` has room for one a core; `touched` is one number.
extern "C" int twin_run(const twin::Tensor* tensors, uint32_t tensor_count, uint8_t* const* arguments,
                        uint32_t argument_count, uint32_t cores, twin::Counters* counters, uint64_t* touched,
                        char* error, uint32_t error_size)
{
    using namespace twin;
    machine.regions.clear();
    machine.counters.clear();
    machine.cores = cores;
    for (uint32_t i = 0; i < tensor_count; i++) {
        const Tensor& t = tensors[i];
        machine.regions.push_back({t.name, t.data, t.bytes, t.filled != 0, t.shared, std::vector<uint8_t>(t.bytes),
                                   std::vector<uint8_t>(t.bytes), {}});
    }
    uint32_t core = 0;
    try {
        if (argument_count != Arity(&TWIN_KERNEL))
            Refuse("the kernel takes %u addresses, %u were given", Arity(&TWIN_KERNEL), argument_count);
        if (cores < 1 || cores > 254) Refuse("%u cores; 1 to 254 are possible", cores);
        for (core = 0; core < cores; core++) {
            StartCore(core);
            Call(&TWIN_KERNEL, arguments);
            EndCore();
        }
        AllWritten();
    } catch (const Refusal& refusal) {
        std::snprintf(error, error_size, "core %u: %s", core, refusal.what());
        return 1;
    }
    *touched = Touched();
    std::copy(machine.counters.begin(), machine.counters.end(), counters);
    return 0;
}
