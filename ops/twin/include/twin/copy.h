// Copies between memories.
#pragma once

#include "pipe.h"

namespace AscendC {

// Lengths and gaps in blocks of 32 bytes.
struct DataCopyParams {
    DataCopyParams() = default;
    DataCopyParams(uint16_t count, uint16_t length, uint16_t src, uint16_t dst)
        : blockCount(count), blockLen(length), srcStride(src), dstStride(dst)
    {
    }
    uint16_t blockCount = 1, blockLen = 0, srcStride = 0, dstStride = 0;
};

// Length in bytes; the gap in bytes on the global side, in blocks of 32 bytes on the local side.
struct DataCopyExtParams {
#if __NPU_ARCH__ == 3510
    using Stride = int64_t;
#else
    using Stride = uint32_t;
#endif
    DataCopyExtParams() = default;
    DataCopyExtParams(uint16_t count, uint32_t length, Stride src, Stride dst, uint32_t reserved)
        : blockCount(count), blockLen(length), srcStride(src), dstStride(dst), rsv(reserved)
    {
    }
    uint16_t blockCount = 1;
    uint32_t blockLen = 0;
    Stride srcStride = 0, dstStride = 0;
    uint32_t rsv = 0;
};

template <typename T>
struct DataCopyPadExtParams {
    DataCopyPadExtParams() = default;
    DataCopyPadExtParams(bool pad, uint8_t left, uint8_t right, T value)
        : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value)
    {
    }
    bool isPad = false;
    uint8_t leftPadding = 0, rightPadding = 0;
    T paddingValue{};
};

}  // namespace AscendC

namespace twin {

using AscendC::TPosition;

inline uint64_t Up(uint64_t bytes) { return (bytes + BLOCK - 1) / BLOCK * BLOCK; }

inline const char* NameOf(TPosition p)
{
    return p == TPosition::VECIN ? "VECIN" : p == TPosition::VECOUT ? "VECOUT" : p == TPosition::VECCALC ? "VECCALC"
                                                                                   : SPACE_NAME[SpaceOf(p)];
}

inline const char* Kind() { return Here().cube ? "Cube" : "vector"; }

// The documented ways. From global memory to VECIN and L1; padded copies also to VECOUT, and to VECCALC on the 950.
inline void MayFill(const char* what, TPosition to, bool padded)
{
    const bool beside = padded && (to == TPosition::VECOUT || (to == TPosition::VECCALC && __NPU_ARCH__ == 3510));
    if (Here().cube ? SpaceOf(to) == L1 : to == TPosition::VECIN || beside) return;
    Refuse("%s: on %d there is no way from GM to %s for a %s core", what, __NPU_ARCH__, NameOf(to), Kind());
}

// To global memory from VECOUT; padded copies also from VECIN; from L1 before the 950.
inline void MayLeave(const char* what, TPosition from, bool padded)
{
    const bool vector = from == TPosition::VECOUT || (padded && from == TPosition::VECIN);
    if (Here().cube ? SpaceOf(from) == L1 && __NPU_ARCH__ == 2201 : vector) return;
    Refuse("%s: on %d there is no way from %s to GM for a %s core", what, __NPU_ARCH__, NameOf(from), Kind());
}

struct Bursts {
    const char* what;
    uint64_t count, bytes;
    int64_t gm_step;      // bytes from the start of a burst to that of the next
    uint64_t local_step;  // the same in local memory, a multiple of a block
    bool padded = false;
};

template <typename T>
void Fill(const AscendC::LocalTensor<T>& dst, const AscendC::GlobalTensor<T>& src, const Bursts& b)
{
    MayFill(b.what, dst.place.position, b.padded);
    const uint32_t address = Aligned(b.what, dst.place);
    Issue(PIPE_OF_MTE2);
    for (uint64_t i = 0; i < b.count; i++) {
        const uint64_t from = src.Inside(b.what, src.at + i * b.gm_step, b.bytes);
        TouchGm(b.what, PIPE_OF_MTE2, *src.region, from, b.bytes, Access::READ);
        uint8_t* to = Reach(b.what, PIPE_OF_MTE2, dst.place, address + uint32_t(i * b.local_step), uint32_t(b.bytes), true);
        std::memcpy(to, src.region->base + from, b.bytes);
    }
    Here().counters.Gm(*src.region, b.count * b.bytes, false);
}

template <typename T>
void Drain(const AscendC::GlobalTensor<T>& dst, const AscendC::LocalTensor<T>& src, const Bursts& b)
{
    MayLeave(b.what, src.place.position, b.padded);
    const uint32_t address = Aligned(b.what, src.place);
    Issue(PIPE_OF_MTE3);
    for (uint64_t i = 0; i < b.count; i++) {
        const uint64_t to = dst.Inside(b.what, dst.at + i * b.gm_step, b.bytes);
        const uint8_t* from =
            Reach(b.what, PIPE_OF_MTE3, src.place, address + uint32_t(i * b.local_step), uint32_t(b.bytes), false);
        TouchGm(b.what, PIPE_OF_MTE3, *dst.region, to, b.bytes, Access::WRITE);
        std::memcpy(dst.region->base + to, from, b.bytes);
    }
    Here().counters.Gm(*dst.region, b.count * b.bytes, true);
}

// Inside UB from VECIN to VECCALC and from there to VECOUT, by the vector unit; UB to L1 exists on the 950.
template <typename T>
void Move(const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src, uint64_t count, uint64_t bytes,
          uint64_t src_step, uint64_t dst_step)
{
    const TPosition from = src.place.position, to = dst.place.position;
    const bool across = SpaceOf(from) == UB && SpaceOf(to) == L1 && __NPU_ARCH__ == 3510;
    const bool inside = (from == TPosition::VECIN && to == TPosition::VECCALC) ||
                        (from == TPosition::VECCALC && to == TPosition::VECOUT);
    if (!across && !inside)
        Refuse("DataCopy: on %d there is no way from %s to %s", __NPU_ARCH__, NameOf(from), NameOf(to));
    const uint32_t read = Aligned("DataCopy", src.place), written = Aligned("DataCopy", dst.place);
    const Pipe pipe = across ? PIPE_OF_MTE3 : PIPE_OF_V;
    Issue(pipe);
    for (uint64_t i = 0; i < count; i++) {
        const uint8_t* a = Reach("DataCopy", pipe, src.place, read + uint32_t(i * src_step), uint32_t(bytes), false);
        uint8_t* b = Reach("DataCopy", pipe, dst.place, written + uint32_t(i * dst_step), uint32_t(bytes), true);
        std::memmove(b, a, bytes);
    }
}

template <typename T>
uint64_t WholeBlocks(uint32_t count)
{
    const uint64_t bytes = uint64_t(count) * sizeof(T);
    if (!bytes || bytes % BLOCK)
        Refuse("DataCopy: %u elements are %llu bytes, no multiple of %u: use DataCopyPad", count,
               (unsigned long long)bytes, BLOCK);
    return bytes;
}

inline Bursts Padded(const AscendC::DataCopyExtParams& p, uint32_t element, bool fills)
{
    if (p.blockCount < 1 || p.blockCount > 4095)
        Refuse("DataCopyPad: %u blocks; 1 to 4095 are possible", p.blockCount);
    if (!p.blockLen || p.blockLen > 2097151 || p.blockLen % element)
        Refuse("DataCopyPad: blocks of %u bytes; a multiple of %u up to 2097151 is possible", p.blockLen, element);
    const int64_t gm_gap = fills ? p.srcStride : p.dstStride, local_gap = fills ? p.dstStride : p.srcStride;
    return {"DataCopyPad", p.blockCount, p.blockLen, int64_t(p.blockLen) + gm_gap, Up(p.blockLen) + BLOCK * local_gap,
            true};
}

inline Bursts Whole(const AscendC::DataCopyParams& p, bool fills)
{
    if (p.blockCount < 1 || p.blockCount > 4095 || !p.blockLen)
        Refuse("DataCopy: %u blocks of %u x 32 bytes; 1 to 4095 of at least one are possible", p.blockCount, p.blockLen);
    const uint64_t bytes = uint64_t(p.blockLen) * BLOCK;
    const uint64_t gm_gap = fills ? p.srcStride : p.dstStride, local_gap = fills ? p.dstStride : p.srcStride;
    return {"DataCopy", p.blockCount, bytes, int64_t(bytes + gm_gap * BLOCK), bytes + local_gap * BLOCK};
}

}  // namespace twin

namespace AscendC {

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const uint32_t count)
{
    const uint64_t bytes = twin::WholeBlocks<T>(count);
    twin::Fill(dst, src, {"DataCopy", 1, bytes, 0, 0});
}

template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count)
{
    const uint64_t bytes = twin::WholeBlocks<T>(count);
    twin::Drain(dst, src, {"DataCopy", 1, bytes, 0, 0});
}

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count)
{
    twin::Move(dst, src, 1, twin::WholeBlocks<T>(count), 0, 0);
}

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& p)
{
    twin::Fill(dst, src, twin::Whole(p, true));
}

template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& p)
{
    twin::Drain(dst, src, twin::Whole(p, false));
}

template <typename T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& p,
                 const DataCopyPadExtParams<T>& pad)
{
    const uint32_t right = pad.rightPadding * sizeof(T), whole = p.blockLen + right;
    if (pad.leftPadding || (right && !pad.isPad)) twin::Refuse("DataCopyPad: the twin pads on the right, with a value");
    if (right > twin::BLOCK) twin::Refuse("DataCopyPad: %u bytes of padding; at most 32 are possible", right);
    twin::Bursts bursts = twin::Padded(p, sizeof(T), true);
    bursts.local_step += twin::Up(whole) - twin::Up(p.blockLen);
    twin::Fill(dst, src, bursts);
    const uint32_t end = pad.isPad ? uint32_t(twin::Up(whole)) : p.blockLen;  // what is left of the block is filled too
    for (uint32_t i = 0; i < p.blockCount && end > p.blockLen; i++) {
        const uint32_t at = dst.place.Address("DataCopyPad") + uint32_t(i * bursts.local_step) + p.blockLen;
        T* to = reinterpret_cast<T*>(twin::Reach("DataCopyPad", twin::PIPE_OF_MTE2, dst.place, at, end - p.blockLen, true));
        std::fill_n(to, (end - p.blockLen) / sizeof(T), pad.paddingValue);
    }
}

template <typename T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& p)
{
    twin::Drain(dst, src, twin::Padded(p, sizeof(T), false));
}

}  // namespace AscendC
