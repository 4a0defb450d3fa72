// Atomics of the scalar unit in global memory: the 950 alone has them. A2 and A3 add only while they copy
// (SetAtomicAdd), which gives nobody the number that was there.
#pragma once

#include "together.h"

namespace twin {

template <typename T>
T* Atomic(const char* what, T* address, Access access)
{
    if (__NPU_ARCH__ != 3510) Refuse("%s: %d has no atomics of the scalar unit", what, __NPU_ARCH__);
    GiveWay();  // cores that have done less come first
    Region& region = RegionOf(what, address);
    const uint64_t at = uint64_t(reinterpret_cast<uint8_t*>(address) - region.base);
    if (reinterpret_cast<uintptr_t>(address) % sizeof(T)) Refuse("%s: an address that is no multiple of %zu", what, sizeof(T));
    Issue(PIPE_OF_S);
    TouchGm(what, PIPE_OF_S, region, at, sizeof(T), access);
    Here().counters.Gm(region, sizeof(T), true);
    return address;
}

}  // namespace twin

namespace AscendC {

// Adds; gives what was there. Cores that add need no order among themselves.
template <typename T>
T AtomicAdd(T* address, T value)
{
    static_assert(std::is_same<T, int32_t>::value || std::is_same<T, uint32_t>::value || std::is_same<T, float>::value ||
                      std::is_same<T, int64_t>::value || std::is_same<T, uint64_t>::value,
                  "AtomicAdd takes int32_t, uint32_t, float, int64_t and uint64_t");
    T* at = twin::Atomic("AtomicAdd", address, twin::Access::ADD);
    const T was = *at;
    *at = was + value;
    return was;
}

// Replaces; gives what was there. To cores that add it is a write: flags have to order it.
template <typename T>
T AtomicExch(T* address, T value)
{
    static_assert(std::is_same<T, uint32_t>::value || std::is_same<T, uint64_t>::value,
                  "AtomicExch takes uint32_t and uint64_t");
    T* at = twin::Atomic("AtomicExch", address, twin::Access::WRITE);
    const T was = *at;
    *at = value;
    return was;
}

}  // namespace AscendC
