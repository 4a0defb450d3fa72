// LocalTensor and GlobalTensor: views that know where they may be used.
#pragma once

#include "types.h"

namespace twin {

// A place in a local memory, good for one turn of its buffer through its queue.
struct Place {
    Buffer* buffer = nullptr;
    uint32_t turn = 0;
    AscendC::TPosition position = AscendC::TPosition::MAX;
    uint32_t offset = 0;  // bytes in the buffer

    // The address in its memory, if the tensor is anybody's now.
    uint32_t Address(const char* what) const
    {
        if (!buffer) Refuse("%s: the tensor has no buffer", what);
        if (buffer->turn != turn) {
            constexpr const char* HELD[] = {"was given back", "was allocated again", "is in its queue: DeQue it first",
                                            "was taken out of its queue: use the tensor that DeQue gave", ""};
            Refuse("%s: the tensor %s", what, HELD[int(buffer->held)]);
        }
        return buffer->start + offset;
    }

    SpaceId space() const { return buffer->space; }
};

inline void Inside(const char* what, const Place& place, uint32_t address, uint32_t bytes)
{
    const Buffer& buffer = *place.buffer;
    if (address + bytes > buffer.start + buffer.size)
        Refuse("%s reaches byte %u of a buffer of %u", what, address + bytes - buffer.start, buffer.size);
}

// Bytes [at, at + bytes) of a tensor's memory, checked and noted.
inline uint8_t* Reach(const char* what, Pipe pipe, const Place& place, uint32_t address, uint32_t bytes, bool write)
{
    Inside(what, place, address, bytes);
    Touch(what, pipe, place.space(), address, address + bytes, write);
    return &Here().space[place.space()].bytes[address];
}

inline uint32_t Aligned(const char* what, const Place& place, uint32_t unit = BLOCK)
{
    const uint32_t address = place.Address(what);
    if (address % unit) Refuse("%s: address %u is not a multiple of %u bytes", what, address, unit);
    return address;
}

}  // namespace twin

namespace AscendC {

template <typename T>
class LocalTensor {
public:
    using PrimType = T;

    LocalTensor operator[](uint32_t offset) const
    {
        LocalTensor moved = *this;
        moved.place.offset += offset * sizeof(T);
        moved.size = offset < size ? size - offset : 0;
        return moved;
    }

    template <typename U>
    LocalTensor<U> ReinterpretCast() const
    {
        LocalTensor<U> other;
        other.place = place;
        other.size = uint32_t(size * sizeof(T) / sizeof(U));
        return other;
    }

    T GetValue(uint32_t index) const { return *Scalar("GetValue", index, false); }

    template <typename S>
    void SetValue(uint32_t index, S value) const
    {
        *Scalar("SetValue", index, true) = static_cast<T>(value);
    }

    uint32_t GetSize() const { return size; }
    int32_t GetPosition() const { return int32_t(place.position); }

    twin::Place place;
    uint32_t size = 0;  // elements

private:
    T* Scalar(const char* what, uint32_t index, bool write) const
    {
        const uint32_t address = place.Address(what) + index * uint32_t(sizeof(T));
        if (place.space() != twin::UB) twin::Refuse("%s: the scalar unit reaches UB, not %s", what,
                                                    twin::SPACE_NAME[place.space()]);
        twin::Issue(twin::PIPE_OF_S);
        return reinterpret_cast<T*>(twin::Reach(what, twin::PIPE_OF_S, place, address, sizeof(T), write));
    }
};

template <typename T>
class GlobalTensor {
public:
    using PrimType = T;

    void SetGlobalBuffer(T* buffer, uint64_t size)
    {
        if (!buffer) twin::Refuse("SetGlobalBuffer: a null address, of an optional input that is not there");
        start = reinterpret_cast<uint8_t*>(buffer);
        region = &twin::RegionOf("SetGlobalBuffer", buffer);
        at = uint64_t(start - region->base);
        end = size == UINT64_MAX ? region->size : at + size * sizeof(T);
        if (end > region->size)
            twin::Refuse("SetGlobalBuffer: %llu elements at byte %llu of %s, which has %llu bytes",
                         (unsigned long long)size, (unsigned long long)at, region->name.c_str(),
                         (unsigned long long)region->size);
    }
    void SetGlobalBuffer(T* buffer) { SetGlobalBuffer(buffer, UINT64_MAX); }

    GlobalTensor operator[](uint64_t offset) const
    {
        GlobalTensor moved = *this;
        moved.at += offset * sizeof(T);
        return moved;
    }

    T GetValue(uint64_t offset) const
    {
        // Through the scalar unit's cache: a line is fetched once a core.
        const uint64_t byte = at + offset * sizeof(T);
        twin::Issue(twin::PIPE_OF_S);
        twin::TouchGm("GetValue", twin::PIPE_OF_S, *region, Inside("GetValue", byte, sizeof(T)), sizeof(T),
                      twin::Access::READ);
        const uint64_t line = byte / twin::LINE * twin::LINE;
        auto& lines = twin::Here().lines;
        if (std::find(lines.begin(), lines.end(), region->base + line) == lines.end()) {
            lines.push_back(region->base + line);
            twin::Here().counters.Gm(*region, std::min<uint64_t>(twin::LINE, region->size - line), false);
        }
        T value;
        std::memcpy(&value, region->base + byte, sizeof(T));
        return value;
    }

    T* GetPhyAddr() const { return reinterpret_cast<T*>(region->base + at); }
    uint64_t GetSize() const { return (end - at) / sizeof(T); }

    // First byte of an access in the region, which has to end where the tensor does.
    uint64_t Inside(const char* what, uint64_t byte, uint64_t bytes) const
    {
        if (!region) twin::Refuse("%s: the tensor has no global buffer", what);
        if (byte + bytes > end)
            twin::Refuse("%s reaches byte %llu of %s, whose tensor ends at %llu", what,
                         (unsigned long long)(byte + bytes), region->name.c_str(), (unsigned long long)end);
        return byte;
    }

    twin::Region* region = nullptr;
    uint8_t* start = nullptr;
    uint64_t at = 0, end = 0;  // bytes in the region
};

}  // namespace AscendC
