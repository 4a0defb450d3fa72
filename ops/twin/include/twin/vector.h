// Vector instructions. The short form takes the first `count` elements; in the long form a repeat is a mask of lanes
// over up to eight blocks of 32 bytes, and strides are in blocks.
#pragma once

#include <tuple>

#include "copy.h"

namespace twin {

// Strides are 8 bits on the device, where a larger one would wrap without a word.
inline uint8_t Stride8(uint32_t stride)
{
    if (stride > 255) Refuse("a stride of %u blocks; 8 bits hold at most 255", stride);
    return uint8_t(stride);
}

}  // namespace twin

namespace AscendC {

struct BinaryRepeatParams {
    BinaryRepeatParams() = default;
    BinaryRepeatParams(uint32_t dstBlk, uint32_t src0Blk, uint32_t src1Blk, uint32_t dstRep, uint32_t src0Rep,
                       uint32_t src1Rep)
        : dstBlkStride(twin::Stride8(dstBlk)), src0BlkStride(twin::Stride8(src0Blk)),
          src1BlkStride(twin::Stride8(src1Blk)), dstRepStride(twin::Stride8(dstRep)),
          src0RepStride(twin::Stride8(src0Rep)), src1RepStride(twin::Stride8(src1Rep))
    {
    }
    uint8_t dstBlkStride = 1, src0BlkStride = 1, src1BlkStride = 1;
    uint8_t dstRepStride = 8, src0RepStride = 8, src1RepStride = 8;
};

struct UnaryRepeatParams {
    UnaryRepeatParams() = default;
    UnaryRepeatParams(uint16_t dstBlk, uint16_t srcBlk, uint32_t dstRep, uint32_t srcRep)
        : dstBlkStride(dstBlk), srcBlkStride(srcBlk), dstRepStride(twin::Stride8(dstRep)),
          srcRepStride(twin::Stride8(srcRep))
    {
    }
    uint16_t dstBlkStride = 1, srcBlkStride = 1;
    uint8_t dstRepStride = 8, srcRepStride = 8;
};

struct BrcbRepeatParams {
    BrcbRepeatParams() = default;
    BrcbRepeatParams(uint16_t dstBlk, uint16_t dstRep) : dstRepStride(dstRep), dstBlkStride(dstBlk) {}
    uint16_t dstRepStride = 8, dstBlkStride = 1;
};

}  // namespace AscendC

namespace twin {

using AscendC::LocalTensor;

struct Stride {
    uint32_t block, repeat;  // in blocks of 32 bytes
};

struct Reader {
    const char* what;
    const Place& place;
    uint32_t start;
    Stride stride;

    Reader(const char* what, const Place& place, Stride stride = {1, 8}, uint32_t unit = BLOCK)
        : what(what), place(place), start(Aligned(what, place, unit)), stride(stride)
    {
        if (place.space() != UB) Refuse("%s: the vector unit reaches UB, not %s", what, SPACE_NAME[place.space()]);
    }

    uint8_t* At(uint32_t repeat, uint32_t block, uint32_t bytes, bool write = false) const
    {
        return Reach(what, PIPE_OF_V, place, start + (repeat * stride.repeat + block * stride.block) * BLOCK, bytes,
                     write);
    }
};

inline void Repeats(uint64_t repeats)
{
    Here().counters.repeats += repeats;
    Here().counters.cost += repeats;
}

inline void Begin(const char* what, int64_t mask, uint32_t lanes, int64_t repeats)
{
    if (mask < 1 || mask > lanes) Refuse("%s: a mask of %lld; 1 to %u lanes", what, (long long)mask, lanes);
    if (repeats < 1 || repeats > 255) Refuse("%s: %lld repeats; 1 to 255", what, (long long)repeats);
    Issue(PIPE_OF_V);
    Repeats(repeats);
}

// A source may be the result's own memory, element for element, or lie elsewhere; nothing between.
inline void Apart(const char* what, const Reader& dst, uint32_t dst_bytes, const Reader& src, uint32_t src_bytes)
{
    const bool meet = dst.start < src.start + src_bytes && src.start < dst.start + dst_bytes;
    const bool same = dst.start == src.start && dst_bytes == src_bytes && dst.stride.block == src.stride.block &&
                      dst.stride.repeat == src.stride.repeat;
    if (meet && !same) Refuse("%s: a source and the result overlap in part", what);
}

inline void Begin(const char* what, int64_t count, uint32_t element)
{
    if (count < 1) Refuse("%s: %lld elements", what, (long long)count);
    Issue(PIPE_OF_V);
    Repeats((count * element + REPEAT - 1) / REPEAT);
}

// dst[i] = f(src[i]...). Sources are read, and checked, before anything is written.
template <typename D, typename... S, typename F>
void Apply(F f, uint32_t lanes, uint8_t* dst, const std::tuple<const S*...>& src)
{
    D* to = reinterpret_cast<D*>(dst);
    std::apply(
        [&](const S*... from) {
            for (uint32_t i = 0; i < lanes; i++) to[i] = Store<D>(f(Load(from[i])...));
        },
        src);
}

template <typename D, typename F, typename... S>
void Short(const char* what, F f, const LocalTensor<D>& dst, int64_t count, const LocalTensor<S>&... src)
{
    Begin(what, count, std::max({uint32_t(sizeof(D)), uint32_t(sizeof(S))...}));
    const Reader to(what, dst.place);
    (Apart(what, to, uint32_t(count * sizeof(D)), Reader(what, src.place), uint32_t(count * sizeof(S))), ...);
    const std::tuple<const S*...> from{
        reinterpret_cast<const S*>(Reader(what, src.place).At(0, 0, uint32_t(count * sizeof(S))))...};
    Apply<D, S...>(f, uint32_t(count), to.At(0, 0, uint32_t(count * sizeof(D)), true), from);
}

template <typename T, typename F, typename... R>
void Long(const char* what, F f, int64_t mask, int64_t repeats, const Reader& dst, const R&... src)
{
    constexpr uint32_t per = BLOCK / sizeof(T);
    Begin(what, mask, REPEAT / sizeof(T), repeats);
    const auto span = [&](const Reader& x) {
        return uint32_t(((mask - 1) / per * x.stride.block) * BLOCK + ((mask - 1) % per + 1) * sizeof(T));
    };
    (Apart(what, dst, span(dst), src, span(src)), ...);
    for (uint32_t r = 0; r < repeats; r++)
        for (uint32_t b = 0; b * per < mask; b++) {
            const uint32_t lanes = uint32_t(std::min<int64_t>(per, mask - b * per)), bytes = lanes * sizeof(T);
            const std::tuple<decltype((void)src, (const T*)nullptr)...> from{
                reinterpret_cast<const T*>(src.At(r, b, bytes))...};
            Apply<T, decltype((void)src, T{})...>(f, lanes, dst.At(r, b, bytes, true), from);
        }
}

struct AddOf { template <class T> T operator()(T a, T b) const { return a + b; } };
struct SubOf { template <class T> T operator()(T a, T b) const { return a - b; } };
struct MulOf { template <class T> T operator()(T a, T b) const { return a * b; } };
struct DivOf { template <class T> T operator()(T a, T b) const { return a / b; } };
struct MaxOf { template <class T> T operator()(T a, T b) const { return a > b ? a : b; } };
struct MinOf { template <class T> T operator()(T a, T b) const { return a < b ? a : b; } };
struct ExpOf { float operator()(float a) const { return std::exp(a); } };
struct LnOf { float operator()(float a) const { return std::log(a); } };
struct SqrtOf { float operator()(float a) const { return std::sqrt(a); } };
struct AbsOf { float operator()(float a) const { return std::fabs(a); } };

}  // namespace twin

namespace AscendC {

#define TWIN_BINARY(NAME, ...)                                                                                        \
    template <typename T>                                                                                             \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count) \
    {                                                                                                                 \
        twin::Takes<T, __VA_ARGS__>(#NAME);                                                                           \
        twin::Short(#NAME, twin::NAME##Of{}, dst, count, src0, src1);                                                 \
    }                                                                                                                 \
    template <typename T, bool isSetMask = true>                                                                      \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t mask,       \
              int32_t repeatTime, const BinaryRepeatParams& p)                                                        \
    {                                                                                                                 \
        twin::Takes<T, __VA_ARGS__>(#NAME);                                                                           \
        twin::Long<T>(#NAME, twin::NAME##Of{}, mask, repeatTime,                                                      \
                      twin::Reader(#NAME, dst.place, {p.dstBlkStride, p.dstRepStride}),                               \
                      twin::Reader(#NAME, src0.place, {p.src0BlkStride, p.src0RepStride}),                            \
                      twin::Reader(#NAME, src1.place, {p.src1BlkStride, p.src1RepStride}));                           \
    }

TWIN_BINARY(Add, half, float, int16_t, int32_t)
TWIN_BINARY(Sub, half, float, int16_t, int32_t)
TWIN_BINARY(Mul, half, float, int16_t, int32_t)
TWIN_BINARY(Max, half, float, int16_t, int32_t)
TWIN_BINARY(Min, half, float, int16_t, int32_t)
TWIN_BINARY(Div, half, float)
#undef TWIN_BINARY

#define TWIN_SCALAR(NAME, OF)                                                                                         \
    template <typename T, bool isSetMask = true>                                                                      \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar, const int32_t& count)            \
    {                                                                                                                 \
        twin::Takes<T, half, float, int16_t, int32_t>(#NAME);                                                         \
        const auto s = twin::Load(scalar);                                                                            \
        twin::Short(#NAME, [s](auto x) { return twin::OF{}(x, s); }, dst, count, src);                                \
    }                                                                                                                 \
    template <typename T, bool isSetMask = true>                                                                      \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar, uint64_t mask,                   \
              int32_t repeatTime, const UnaryRepeatParams& p)                                                         \
    {                                                                                                                 \
        twin::Takes<T, half, float, int16_t, int32_t>(#NAME);                                                         \
        const auto s = twin::Load(scalar);                                                                            \
        twin::Long<T>(#NAME, [s](auto x) { return twin::OF{}(x, s); }, mask, repeatTime,                              \
                      twin::Reader(#NAME, dst.place, {p.dstBlkStride, p.dstRepStride}),                               \
                      twin::Reader(#NAME, src.place, {p.srcBlkStride, p.srcRepStride}));                              \
    }

TWIN_SCALAR(Adds, AddOf)
TWIN_SCALAR(Muls, MulOf)
TWIN_SCALAR(Maxs, MaxOf)
TWIN_SCALAR(Mins, MinOf)
#undef TWIN_SCALAR

#define TWIN_UNARY(NAME)                                                               \
    template <typename T>                                                              \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t& count) \
    {                                                                                  \
        twin::Takes<T, half, float>(#NAME);                                            \
        twin::Short(#NAME, twin::NAME##Of{}, dst, count, src);                         \
    }

TWIN_UNARY(Exp)
TWIN_UNARY(Ln)
TWIN_UNARY(Sqrt)
TWIN_UNARY(Abs)
#undef TWIN_UNARY

// dst += src * scalar.
template <typename T, typename U>
void Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src, const U& scalar, const int32_t& count)
{
    static_assert(std::is_same_v<T, U>, "the twin's Axpy has one type");
    twin::Takes<T, half, float>("Axpy");
    const auto s = twin::Load(scalar);
    twin::Short("Axpy", [s](auto y, auto x) { return y + x * s; }, dst, count, dst, src);
}

// dst += src0 * src1.
template <typename T, typename U, bool isSetMask = true>
void MulAddDst(const LocalTensor<T>& dst, const LocalTensor<U>& src0, const LocalTensor<U>& src1, uint64_t mask,
               int32_t repeatTime, const BinaryRepeatParams& p)
{
    static_assert(std::is_same_v<T, U>, "the twin's MulAddDst has one type");
    twin::Takes<T, half, float>("MulAddDst");
    const twin::Reader to("MulAddDst", dst.place, {p.dstBlkStride, p.dstRepStride});
    twin::Long<T>("MulAddDst", [](auto d, auto a, auto b) { return d + a * b; }, mask, repeatTime, to, to,
                  twin::Reader("MulAddDst", src0.place, {p.src0BlkStride, p.src0RepStride}),
                  twin::Reader("MulAddDst", src1.place, {p.src1BlkStride, p.src1RepStride}));
}

template <typename T, typename U>
void MulAddDst(const LocalTensor<T>& dst, const LocalTensor<U>& src0, const LocalTensor<U>& src1, const int32_t& count)
{
    static_assert(std::is_same_v<T, U>, "the twin's MulAddDst has one type");
    twin::Takes<T, half, float>("MulAddDst");
    twin::Short("MulAddDst", [](auto d, auto a, auto b) { return d + a * b; }, dst, count, dst, src0, src1);
}

template <typename T>
void Duplicate(const LocalTensor<T>& dst, const T& scalar, const int32_t& count)
{
    twin::Takes<T, half, bfloat16_t, float, int16_t, int32_t, uint32_t>("Duplicate");
    const T s = scalar;
    twin::Short("Duplicate", [s] { return twin::Load(s); }, dst, count);
}

// first, first + 1, ...
template <typename T>
void CreateVecIndex(LocalTensor<T> dst, const T& first, uint32_t count)
{
    twin::Takes<T, half, float, int16_t, int32_t>("CreateVecIndex");
    auto next = twin::Load(first);
    twin::Short("CreateVecIndex", [&next] { return next++; }, dst, count);
}

template <typename T, typename U>
void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& mode, const uint32_t count)
{
    constexpr bool narrow16 = std::is_same_v<T, half> || std::is_same_v<T, bfloat16_t>;
    constexpr bool widen = std::is_same_v<T, float> && !std::is_same_v<U, float>;
    if constexpr (widen && (std::is_same_v<U, half> || std::is_same_v<U, bfloat16_t>)) {
        if (mode != RoundMode::CAST_NONE) twin::Refuse("Cast: to float nothing is rounded; CAST_NONE");
        twin::Short("Cast", [](auto x) { return x; }, dst, count, src);
    } else if constexpr (widen && std::is_same_v<U, int32_t>) {
        if (mode != RoundMode::CAST_RINT) twin::Refuse("Cast: both chips make float of int32_t with CAST_RINT");
        twin::Short("Cast", [](auto x) { return float(x); }, dst, count, src);
    } else if constexpr (narrow16 && std::is_same_v<U, float>) {
        const bool nearest = mode == RoundMode::CAST_RINT || (mode == RoundMode::CAST_NONE && std::is_same_v<T, half>);
        if (!nearest) twin::Refuse("Cast: the twin makes %s of float with CAST_RINT", twin::TypeName<T>());
        twin::Short("Cast", [](auto x) { return x; }, dst, count, src);
    } else if constexpr (std::is_same_v<T, int32_t> && std::is_same_v<U, float>) {
        if (mode == RoundMode::CAST_FLOOR)
            twin::Short("Cast", [](auto x) { return std::floor(x); }, dst, count, src);
        else if (mode == RoundMode::CAST_RINT)
            twin::Short("Cast", [](auto x) { return std::nearbyint(x); }, dst, count, src);
        else twin::Refuse("Cast: the twin makes int32_t of float with CAST_FLOOR or CAST_RINT");
    } else if constexpr (std::is_same_v<T, int8_t> && std::is_same_v<U, half>) {
        if (mode != RoundMode::CAST_RINT) twin::Refuse("Cast: the twin makes int8_t of half with CAST_RINT");
        twin::Short("Cast", [](auto x) { return std::clamp(std::nearbyint(x), -128.0f, 127.0f); }, dst, count, src);
    } else {
        twin::Refuse("Cast: no way from %s to %s", twin::TypeName<U>(), twin::TypeName<T>());
    }
}

// Each of eight elements fills a block.
template <typename T>
void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeatTime, const BrcbRepeatParams& p)
{
    twin::Takes<T, half, bfloat16_t, float, int16_t, int32_t, uint32_t>("Brcb");
    constexpr uint32_t per = twin::BLOCK / sizeof(T);
    twin::Begin("Brcb", 1, 1, repeatTime);
    const twin::Reader from("Brcb", src.place), to("Brcb", dst.place, {p.dstBlkStride ? p.dstBlkStride : 1u, p.dstRepStride});
    for (int32_t r = 0; r < repeatTime; r++) {
        const uint32_t at = from.start + uint32_t(r * 8 * sizeof(T));
        T values[8];
        std::memcpy(values, twin::Reach("Brcb", twin::PIPE_OF_V, src.place, at, 8 * sizeof(T), false), sizeof values);
        for (uint32_t j = 0; j < 8; j++) std::fill_n(reinterpret_cast<T*>(to.At(r, j, twin::BLOCK, true)), per, values[j]);
    }
}

// One sum for each repeat, side by side for dstRepStride 1. Lanes are added pairwise.
template <typename T, bool isSetMask = true>
void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t mask, const int32_t repeatTime,
                    const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride)
{
    twin::Takes<T, half, float>("WholeReduceSum");
    constexpr uint32_t lanes = twin::REPEAT / sizeof(T), per = twin::BLOCK / sizeof(T);
    twin::Begin("WholeReduceSum", mask, lanes, repeatTime);
    const twin::Reader from("WholeReduceSum", src.place, {uint32_t(srcBlkStride), uint32_t(srcRepStride)});
    const uint32_t start = twin::Aligned("WholeReduceSum", dst.place, sizeof(T));
    for (int32_t r = 0; r < repeatTime; r++) {
        float sum[lanes] = {};
        for (int32_t b = 0; b * int32_t(per) < mask; b++) {
            const uint32_t n = std::min<uint32_t>(per, mask - b * per);
            const T* x = reinterpret_cast<const T*>(from.At(r, b, n * sizeof(T)));
            for (uint32_t i = 0; i < n; i++) sum[b * per + i] = twin::Load(x[i]);
        }
        for (uint32_t half_lanes = lanes / 2; half_lanes; half_lanes /= 2)
            for (uint32_t i = 0; i < half_lanes; i++) sum[i] += sum[i + half_lanes];
        const uint32_t at = start + uint32_t(r * dstRepStride * sizeof(T));
        *reinterpret_cast<T*>(twin::Reach("WholeReduceSum", twin::PIPE_OF_V, dst.place, at, sizeof(T), true)) =
            twin::Store<T>(sum[0]);
    }
}

// One maximum for each repeat, side by side for dstRepStride 1; of values alone, not with their places.
template <typename T, bool isSetMask = true>
void WholeReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t mask, const int32_t repeatTime,
                    const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,
                    ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX)
{
    twin::Takes<T, half, float>("WholeReduceMax");
    if (order != ReduceOrder::ORDER_ONLY_VALUE) twin::Refuse("WholeReduceMax: the twin gives values alone");
    constexpr uint32_t lanes = twin::REPEAT / sizeof(T), per = twin::BLOCK / sizeof(T);
    twin::Begin("WholeReduceMax", mask, lanes, repeatTime);
    const twin::Reader from("WholeReduceMax", src.place, {uint32_t(srcBlkStride), uint32_t(srcRepStride)});
    const uint32_t start = twin::Aligned("WholeReduceMax", dst.place, sizeof(T));
    for (int32_t r = 0; r < repeatTime; r++) {
        auto most = twin::Load(*reinterpret_cast<const T*>(from.At(r, 0, sizeof(T))));
        for (int32_t b = 0; b * int32_t(per) < mask; b++) {
            const uint32_t n = std::min<uint32_t>(per, mask - b * per);
            const T* x = reinterpret_cast<const T*>(from.At(r, b, n * sizeof(T)));
            for (uint32_t i = 0; i < n; i++) most = std::max(most, twin::Load(x[i]));
        }
        const uint32_t at = start + uint32_t(r * dstRepStride * sizeof(T));
        *reinterpret_cast<T*>(twin::Reach("WholeReduceMax", twin::PIPE_OF_V, dst.place, at, sizeof(T), true)) =
            twin::Store<T>(most);
    }
}

// dst[i] = the element at byte base + offset[i] of src.
template <typename T>
void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint32_t>& offset,
            const uint32_t base, const uint32_t count)
{
    twin::Takes<T, half, bfloat16_t, float, int16_t, int32_t, uint32_t>("Gather");
    twin::Begin("Gather", count, sizeof(T));
    const twin::Reader from("Gather", src.place), at("Gather", offset.place), to("Gather", dst.place);
    const uint32_t* offsets = reinterpret_cast<const uint32_t*>(at.At(0, 0, count * 4));
    std::vector<T> made(count);
    for (uint32_t i = 0; i < count; i++) {
        if ((base + offsets[i]) % sizeof(T)) twin::Refuse("Gather: byte %u is inside an element", base + offsets[i]);
        const uint32_t address = from.start + base + offsets[i];
        if (address + sizeof(T) > to.start && address < to.start + count * sizeof(T))
            twin::Refuse("Gather: the source and the result overlap");
        const uint8_t* x = twin::Reach("Gather", twin::PIPE_OF_V, src.place, address, sizeof(T), false);
        std::memcpy(&made[i], x, sizeof(T));
    }
    std::memcpy(to.At(0, 0, uint32_t(count * sizeof(T)), true), made.data(), count * sizeof(T));
}

}  // namespace AscendC
