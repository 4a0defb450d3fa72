// 16-bit floats of the device, words of its compiler, and the enums of the public interface that kernels name.
#pragma once

#include "machine.h"

#define __aicore__
#define __global__
#define __gm__
#define GM_ADDR uint8_t*

struct half {
    uint16_t bits = 0;
    explicit operator float() const;  // a scalar of the device has it; bfloat16_t has ToFloat
};
struct bfloat16_t {
    uint16_t bits = 0;
};

namespace twin {

inline uint32_t BitsOf(float x)
{
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return u;
}

inline float OfBits(uint32_t u)
{
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}

inline float Wide(float x) { return x; }
inline float Wide(bfloat16_t x) { return OfBits(uint32_t(x.bits) << 16); }
inline float Wide(half x)
{
    const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
    if (exponent == 31) return OfBits(sign | 0x7F800000 | fraction << 13);
    if (exponent) return OfBits(sign | (exponent + 112) << 23 | fraction << 13);
    const float small = float(fraction) * 0x1p-24f;  // subnormal
    return sign ? -small : small;
}

}  // namespace twin

inline half::operator float() const { return twin::Wide(*this); }

namespace twin {

// To the nearest, ties to even: RoundMode::CAST_RINT.
inline bfloat16_t NarrowBf16(float x)
{
    uint32_t u = BitsOf(x);
    if (x != x) return {uint16_t(u >> 16 | 0x40)};
    return {uint16_t((u + 0x7FFF + (u >> 16 & 1)) >> 16)};
}

inline half NarrowHalf(float x)
{
    const uint16_t sign = BitsOf(x) >> 16 & 0x8000;
    if (x != x) return half{uint16_t(sign | 0x7E00)};
    const float size = std::fabs(x);
    if (size >= 65520.f) return half{uint16_t(sign | 0x7C00)};
    if (size == 0) return half{sign};
    int exponent = 0;
    std::frexp(size, &exponent);
    const int step = std::max(exponent - 11, -24);  // exponent of the last bit
    const float units = std::nearbyint(std::ldexp(size, -step));
    if (step == -24) return half{uint16_t(sign | uint16_t(units))};  // a carry gives the smallest normal number
    const uint16_t bits = uint16_t((step + 24) << 10) + uint16_t(units);  // units has the hidden bit 1024
    return half{uint16_t(sign | bits)};
}

// Arithmetic of the 16-bit floats is done in float and rounded once.
template <typename T>
auto Load(T x)
{
    if constexpr (std::is_same_v<T, half> || std::is_same_v<T, bfloat16_t>) return Wide(x);
    else return x;
}

template <typename T, typename X>
T Store(X x)
{
    if constexpr (std::is_same_v<T, half>) return NarrowHalf(x);
    else if constexpr (std::is_same_v<T, bfloat16_t>) return NarrowBf16(x);
    else return static_cast<T>(x);
}

template <typename T>
constexpr const char* TypeName()
{
    if constexpr (std::is_same_v<T, float>) return "float";
    if constexpr (std::is_same_v<T, half>) return "half";
    if constexpr (std::is_same_v<T, bfloat16_t>) return "bfloat16_t";
    if constexpr (std::is_same_v<T, int32_t>) return "int32_t";
    if constexpr (std::is_same_v<T, uint32_t>) return "uint32_t";
    if constexpr (std::is_same_v<T, int16_t>) return "int16_t";
    if constexpr (std::is_same_v<T, int8_t>) return "int8_t";
    if constexpr (std::is_same_v<T, int64_t>) return "int64_t";
    return "this type";
}

template <typename T, typename... Known>
void Takes(const char* what)
{
    if constexpr (!(std::is_same_v<T, Known> || ...))
        Refuse("%s does not take %s on %d", what, TypeName<T>(), __NPU_ARCH__);
}

}  // namespace twin

enum pipe_t { PIPE_S, PIPE_V, PIPE_MTE2, PIPE_MTE3, PIPE_MTE1, PIPE_M, PIPE_FIX, PIPE_ALL };
enum event_t { EVENT_ID0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };

namespace AscendC {

enum class TPosition : uint8_t {
    GM, A1, A2, B1, B2, C1, C2, CO1, CO2, VECIN, VECOUT, VECCALC, LCM = VECCALC, SPM, SHM = SPM, TSCM, C2PIPE2GM,
    C2PIPE2LOCAL, MAX
};
using QuePosition = TPosition;

enum class ReduceOrder : uint8_t { ORDER_VALUE_INDEX, ORDER_INDEX_VALUE, ORDER_ONLY_VALUE, ORDER_ONLY_INDEX };

enum class RoundMode : uint8_t { CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD };

// From a pipe to another; only those that kernels use.
enum class HardEvent : uint8_t {
    MTE2_V, V_MTE2, MTE3_V, V_MTE3, MTE2_MTE3, MTE3_MTE2, V_S, S_V, MTE2_S, S_MTE2, MTE3_S, S_MTE3, MTE2_MTE1, MTE1_MTE2,
    MTE1_M, M_MTE1, M_FIX, FIX_M, MTE2_FIX, FIX_MTE2, FIX_S, M_S
};

template <typename A, typename B>
struct IsSameType {
    static constexpr bool value = std::is_same_v<A, B>;
};

inline float ToFloat(const bfloat16_t& x) { return twin::Wide(x); }

}  // namespace AscendC

namespace twin {

struct Ends {
    Pipe from, to;
};

constexpr Ends EndsOf(AscendC::HardEvent event)
{
    constexpr Ends ENDS[] = {{PIPE_OF_MTE2, PIPE_OF_V}, {PIPE_OF_V, PIPE_OF_MTE2},    {PIPE_OF_MTE3, PIPE_OF_V},
                             {PIPE_OF_V, PIPE_OF_MTE3}, {PIPE_OF_MTE2, PIPE_OF_MTE3}, {PIPE_OF_MTE3, PIPE_OF_MTE2},
                             {PIPE_OF_V, PIPE_OF_S},    {PIPE_OF_S, PIPE_OF_V},       {PIPE_OF_MTE2, PIPE_OF_S},
                             {PIPE_OF_S, PIPE_OF_MTE2}, {PIPE_OF_MTE3, PIPE_OF_S},    {PIPE_OF_S, PIPE_OF_MTE3},
                             {PIPE_OF_MTE2, PIPE_OF_MTE1}, {PIPE_OF_MTE1, PIPE_OF_MTE2}, {PIPE_OF_MTE1, PIPE_OF_M},
                             {PIPE_OF_M, PIPE_OF_MTE1}, {PIPE_OF_M, PIPE_OF_FIX},     {PIPE_OF_FIX, PIPE_OF_M},
                             {PIPE_OF_MTE2, PIPE_OF_FIX}, {PIPE_OF_FIX, PIPE_OF_MTE2}, {PIPE_OF_FIX, PIPE_OF_S},
                             {PIPE_OF_M, PIPE_OF_S}};
    return ENDS[int(event)];
}

constexpr SpaceId SpaceOf(AscendC::TPosition position)
{
    using P = AscendC::TPosition;
    switch (position) {
        case P::A1: case P::B1: case P::C1: case P::TSCM: return L1;
        case P::A2: return L0A;
        case P::B2: return L0B;
        case P::CO1: return L0C;
        default: return UB;
    }
}

}  // namespace twin
