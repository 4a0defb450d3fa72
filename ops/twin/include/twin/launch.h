// How a kernel's library is called: all its cores, with the addresses of its tensors.
// TWIN_KERNEL is the kernel's name; its source is included before this file.
#pragma once

#include <utility>

#include "together.h"

namespace twin {

struct Tensor {
    const char* name;
    uint8_t* data;
    uint64_t bytes;
    uint64_t filled;  // 1: holds values before the kernel runs
    uint64_t shared;  // leading bytes that are nobody's
    uint64_t scratch;  // 1: a workspace
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

// Bytes of tensors that some core read, plus bytes that some core wrote: each once.
inline uint64_t Touched()
{
    uint64_t touched = 0;
    for (const Region& r : machine.regions)
        for (uint64_t i = 0; i < r.size && !r.scratch; i++) touched += (r.reader[i] != 0) + (r.writer[i] != 0);
    return touched;
}

inline void AllWritten()
{
    for (const Region& r : machine.regions)
        if (!r.filled && !r.scratch)
            if (const void* gap = std::memchr(r.writer.data(), 0, r.size))
                Refuse("byte %llu of %s was never written",
                       (unsigned long long)(static_cast<const uint8_t*>(gap) - r.writer.data()), r.name.c_str());
}

}  // namespace twin

// 0 done, 1 refused (the reason is in `error`). `cores` is what the tiling set; `counters` has room for three times as many,
// and `made` says how many there are. `touched` is one number.
extern "C" int twin_run(const twin::Tensor* tensors, uint32_t tensor_count, uint8_t* const* arguments,
                        uint32_t argument_count, uint32_t cores, twin::Counters* counters, uint32_t* made,
                        uint64_t* touched, char* error, uint32_t error_size)
{
    using namespace twin;
    machine = Machine{};
    together = Together{};
    machine.groups = cores;
    for (uint32_t i = 0; i < tensor_count; i++) {
        const Tensor& t = tensors[i];
        machine.regions.push_back({t.name, t.data, t.bytes, t.filled != 0, t.shared, t.scratch != 0,
                                   std::vector<uint8_t>(t.bytes), std::vector<uint8_t>(t.bytes), {}});
    }
    static uint8_t* const* given;
    given = arguments;
    together.kernel = [] { Call(&TWIN_KERNEL, given); };
    const char* when = "";
    try {
        if (argument_count != Arity(&TWIN_KERNEL))
            Refuse("the kernel takes %u addresses, %u were given", Arity(&TWIN_KERNEL), argument_count);
        if (cores < 1 || cores > 254) Refuse("%u cores; 1 to 254 are possible", cores);
        MakeCores(TASK_OF_KERNEL_TYPE_AIV_ONLY, cores);
        RunAll();
        when = "after all cores: ";
        AllWritten();
    } catch (const Refusal& refusal) {
        std::snprintf(error, error_size, "%s%s", when, refusal.what());
        return 1;
    }
    *touched = Touched();
    *made = uint32_t(together.fibers.size());
    for (const Fiber& f : together.fibers) *counters++ = f.core.counters;
    return 0;
}
