// The Cube: global memory to L1, L1 to L0A and L0B, products into L0C, L0C to global memory.
//
// Matrices lie in fractals of 512 bytes: 16 rows of C0 = 32 bytes. Capital letters say how fractals follow each other, small
// ones how elements do inside: L1 holds Nz (columns of fractals), L0A Zz on A3 and Nz on the 950, L0B Zn (its "rows" are
// columns of the matrix), L0C Nz of 16 x 16. A fractal may have parts that nothing wrote, beyond the last row or column: it
// is moved with them, and a product or a copy out of L0C may not read them. Products are summed in float, in the order of k.
#pragma once

#include "copy.h"

namespace twin {

// A field of the device's structures: a number that does not fit would wrap without a word.
template <typename T>
struct Field {
    T value = 0;
    Field() = default;
    template <typename X>
    Field(X x) : value(T(x))
    {
        if (int64_t(value) != int64_t(x))
            Refuse("%lld does not fit a field of %d bits", (long long)x, int(8 * sizeof(T)));
    }
    operator T() const { return value; }
};

}  // namespace twin

enum QuantMode_t { NoQuant, F322F16, F322BF16 };

namespace AscendC {

struct Nd2NzParams {
#if __NPU_ARCH__ == 3510
    using Wide = uint64_t;
    using Long = uint32_t;
#else
    using Wide = uint16_t;
    using Long = uint16_t;
#endif
    Nd2NzParams() = default;
    Nd2NzParams(int64_t ndNum, int64_t nValue, int64_t dValue, int64_t srcNdMatrixStride, int64_t srcDValue,
                int64_t dstNzC0Stride, int64_t dstNzNStride, int64_t dstNzMatrixStride)
        : ndNum(ndNum), nValue(nValue), dValue(dValue), srcNdMatrixStride(srcNdMatrixStride), srcDValue(srcDValue),
          dstNzC0Stride(dstNzC0Stride), dstNzNStride(dstNzNStride), dstNzMatrixStride(dstNzMatrixStride)
    {
    }
    twin::Field<uint16_t> ndNum, nValue;
    twin::Field<Long> dValue;
    twin::Field<Wide> srcNdMatrixStride, srcDValue;         // elements
    twin::Field<uint16_t> dstNzC0Stride, dstNzNStride;      // blocks of 32 bytes
    twin::Field<Long> dstNzMatrixStride;                    // elements
};

// Blocks of 32 bytes (in L1): `repeatTimes` times `blockNum` of them, `dstGap` from the end of some to the next.
template <typename T>
struct InitConstValueParams {
    InitConstValueParams() = default;
    InitConstValueParams(int64_t repeatTimes, int64_t blockNum, int64_t dstGap, T initValue)
        : repeatTimes(repeatTimes), blockNum(blockNum), dstGap(dstGap), initValue(initValue)
    {
    }
    twin::Field<uint16_t> repeatTimes, blockNum, dstGap;
    T initValue{};
};

struct LoadData2DParams {
    LoadData2DParams() = default;
    LoadData2DParams(int64_t startIndex, int64_t repeatTimes, int64_t srcStride, int64_t sid, int64_t dstGap,
                     bool ifTranspose, int64_t addrMode)
        : startIndex(startIndex), dstGap(dstGap), srcStride(srcStride), ifTranspose(ifTranspose),
          repeatTimes(repeatTimes), sid(sid), addrMode(addrMode)
    {
    }
    twin::Field<uint16_t> startIndex, dstGap, srcStride;  // fractals
    bool ifTranspose = false;
    twin::Field<uint8_t> repeatTimes, sid, addrMode;
};

struct LoadData2DParamsV2 {
    LoadData2DParamsV2() = default;
    LoadData2DParamsV2(int64_t mStartPosition, int64_t kStartPosition, int64_t mStep, int64_t kStep, int64_t srcStride,
                       int64_t dstStride, bool ifTranspose, int64_t sid)
        : mStartPosition(mStartPosition), kStartPosition(kStartPosition), mStep(mStep), kStep(kStep),
          srcStride(srcStride), dstStride(dstStride), ifTranspose(ifTranspose), sid(sid)
    {
    }
    twin::Field<uint32_t> mStartPosition, kStartPosition;  // 16 rows, 32 bytes
    twin::Field<uint16_t> mStep, kStep;
    twin::Field<int32_t> srcStride;   // fractals from one column of fractals to the next
    twin::Field<uint16_t> dstStride;
    bool ifTranspose = false;
    twin::Field<uint8_t> sid;
};

struct LoadData2dTransposeParams {
    LoadData2dTransposeParams() = default;
    LoadData2dTransposeParams(int64_t startIndex, int64_t repeatTimes, int64_t srcStride, int64_t dstGap,
                              int64_t dstFracGap, int64_t addrMode = 0)
        : startIndex(startIndex), repeatTimes(repeatTimes), srcStride(srcStride), dstGap(dstGap), dstFracGap(dstFracGap),
          addrMode(addrMode)
    {
    }
    twin::Field<uint16_t> startIndex;  // squares of 16 x 16
    twin::Field<uint8_t> repeatTimes;
    twin::Field<uint16_t> srcStride;           // squares
    twin::Field<uint16_t> dstGap, dstFracGap;  // fractals
    twin::Field<uint8_t> addrMode;
};

struct MmadParams {
    MmadParams() = default;
    MmadParams(int64_t m, int64_t n, int64_t k, int64_t unitFlag, bool cmatrixSource, bool cmatrixInitVal)
        : m(m), n(n), k(k), unitFlag(unitFlag), cmatrixSource(cmatrixSource), cmatrixInitVal(cmatrixInitVal)
    {
    }
    twin::Field<uint16_t> m, n, k;
    bool isBias = false;
    twin::Field<uint8_t> unitFlag;
    bool kDirectionAlign = false;
    bool cmatrixSource = false;
    bool cmatrixInitVal = true;
#if __NPU_ARCH__ == 3510
    bool disableGemv = false;
#endif
};

enum class HF32Mode { ENABLE, DISABLE };

enum class CO2Layout : uint8_t { NZ, ROW_MAJOR, COLUMN_MAJOR };

struct FixpipeConfig {
    CO2Layout format;
    bool isToUB = false;
};
constexpr FixpipeConfig CFG_NZ = {CO2Layout::NZ}, CFG_ROW_MAJOR = {CO2Layout::ROW_MAJOR};

struct FixpipeParamsV220 {
    FixpipeParamsV220() = default;
    FixpipeParamsV220(int64_t nSize, int64_t mSize, int64_t srcStride, int64_t dstStride, bool reluEn)
        : nSize(nSize), mSize(mSize), srcStride(srcStride), dstStride(dstStride), reluEn(reluEn)
    {
    }
    twin::Field<uint16_t> nSize, mSize, srcStride;  // srcStride in rows of 16 elements
    twin::Field<uint32_t> dstStride;                // elements of a row
    QuantMode_t quantPre = QuantMode_t::NoQuant;
    uint64_t deqScalar = 0;
    twin::Field<uint16_t> ndNum = 1, srcNdStride, dstNdStride;
    bool reluEn = false;
    twin::Field<uint8_t> unitFlag;
    bool isChannelSplit = false;
};

}  // namespace AscendC

namespace twin {

using AscendC::GlobalTensor;
using AscendC::LocalTensor;

constexpr uint32_t FRACTAL = 512;

inline void Lies(const char* what, const Place& place, SpaceId id, uint32_t unit)
{
    Aligned(what, place, unit);
    if (place.space() != id)
        Refuse("%s: %s where %s has to be", what, SPACE_NAME[place.space()], SPACE_NAME[id]);
}

// Bytes that may be unknown are carried from one memory to another.
inline void Carry(const char* what, const Place& dst, uint32_t to, const Place& src, uint32_t from, uint32_t bytes)
{
    Space &there = Here().space[dst.space()], &here = Here().space[src.space()];
    Inside(what, src, from, bytes);
    Inside(what, dst, to, bytes);
    InOrder(what, PIPE_OF_MTE1, src.space(), from, from + bytes, false);
    InOrder(what, PIPE_OF_MTE1, dst.space(), to, to + bytes, true);
    std::memcpy(&there.bytes[to], &here.bytes[from], bytes);
    std::memcpy(&there.known[to], &here.known[from], bytes);
}

// A square of 16 x 16 is transposed: its fractals, one of 16-bit elements or two of 32-bit ones, are at `from` and `to`.
template <typename T>
void CarryTransposed(const char* what, const Place& dst, const uint32_t* to, const Place& src, const uint32_t* from)
{
    constexpr uint32_t C0 = BLOCK / sizeof(T), COUNT = 16 / C0;
    Space &there = Here().space[dst.space()], &here = Here().space[src.space()];
    for (uint32_t f = 0; f < COUNT; f++) {
        Inside(what, src, from[f], FRACTAL);
        Inside(what, dst, to[f], FRACTAL);
        InOrder(what, PIPE_OF_MTE1, src.space(), from[f], from[f] + FRACTAL, false);
    }
    for (uint32_t f = 0; f < COUNT; f++) InOrder(what, PIPE_OF_MTE1, dst.space(), to[f], to[f] + FRACTAL, true);
    for (uint32_t r = 0; r < 16; r++)
        for (uint32_t c = 0; c < 16; c++) {
            const uint32_t a = from[c / C0] + r * BLOCK + c % C0 * uint32_t(sizeof(T));
            const uint32_t b = to[r / C0] + c * BLOCK + r % C0 * uint32_t(sizeof(T));
            std::memcpy(&there.bytes[b], &here.bytes[a], sizeof(T));
            std::memcpy(&there.known[b], &here.known[a], sizeof(T));
        }
}

template <typename T>
void LoadsTo(const char* what, const LocalTensor<T>& dst, const LocalTensor<T>& src)
{
    Takes<T, half, bfloat16_t, float>(what);
    Lies(what, src.place, L1, BLOCK);
    Lies(what, dst.place, dst.place.space() == L0B ? L0B : L0A, FRACTAL);
    Issue(PIPE_OF_MTE1);
}

// sum += a b, [m, n] from [m, k] and [k, n]; a product is rounded before it is added.
__attribute__((optimize("O3"))) inline void Products(float* sum, const float* a, const float* b, uint32_t m, uint32_t n,
                                                     uint32_t k)
{
    for (uint32_t i = 0; i < m; i++)
        for (uint32_t l = 0; l < k; l++) {
            const float x = a[i * k + l];
            for (uint32_t j = 0; j < n; j++) sum[i * n + j] += x * b[l * n + j];
        }
}

// Rows of a matrix in fractals: `at(row block, column block)` is the number of a fractal.
template <typename T, typename At>
void ReadFractals(const LocalTensor<T>& x, uint32_t rows, uint32_t columns, At at, float* made, uint32_t row_step,
                  uint32_t column_step)
{
    constexpr uint32_t C0 = BLOCK / sizeof(T);
    const uint32_t start = x.place.Address("Mmad");
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t c = 0; c < columns; c += C0) {
            const uint32_t n = std::min(C0, columns - c);
            const uint32_t address = start + at(r / 16, c / C0) * FRACTAL + r % 16 * BLOCK;
            const T* from =
                reinterpret_cast<const T*>(Reach("Mmad", PIPE_OF_M, x.place, address, n * sizeof(T), false));
            for (uint32_t i = 0; i < n; i++) made[r * row_step + (c + i) * column_step] = Wide(from[i]);
        }
}

}  // namespace twin

namespace AscendC {

// Rows of global memory into columns of fractals; a row is filled up to 32 bytes with zeros.
template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const Nd2NzParams& p)
{
    twin::MayFill("DataCopy", dst.place.position, false);
    const uint32_t address = twin::Aligned("DataCopy", dst.place);
    if (p.ndNum > 4095 || p.nValue > 16384 || p.dValue > 65535 || !p.ndNum || !p.nValue || !p.dValue)
        twin::Refuse("DataCopy: %u matrices of %u x %u; 1 to 4095 of 1 to 16384 x 65535", p.ndNum.value, p.nValue.value,
                     uint32_t(p.dValue));
    if (p.srcDValue < 1 || p.srcDValue > 65535 || p.srcNdMatrixStride > 65535 || p.dstNzMatrixStride > 16384 ||
        p.dstNzC0Stride < 1 || p.dstNzC0Stride > 16384 || p.dstNzNStride < 1 || p.dstNzNStride > 16384)
        twin::Refuse("DataCopy: a stride of Nd2NzParams is out of its range");
    twin::Issue(twin::PIPE_OF_MTE2);
    constexpr uint32_t C0 = twin::BLOCK / sizeof(T);
    for (uint32_t d = 0; d < p.ndNum; d++)
        for (uint32_t r = 0; r < p.nValue; r++) {
            const uint64_t row = src.at + (d * uint64_t(p.srcNdMatrixStride) + r * uint64_t(p.srcDValue)) * sizeof(T);
            const uint64_t bytes = uint64_t(p.dValue) * sizeof(T), from = src.Inside("DataCopy", row, bytes);
            twin::TouchGm("DataCopy", twin::PIPE_OF_MTE2, *src.region, from, bytes, twin::Access::READ);
            for (uint32_t c = 0; c < p.dValue; c += C0) {
                const uint32_t at = address + d * p.dstNzMatrixStride * uint32_t(sizeof(T)) +
                                    (c / C0 * p.dstNzC0Stride + r * p.dstNzNStride) * twin::BLOCK;
                uint8_t* to = twin::Reach("DataCopy", twin::PIPE_OF_MTE2, dst.place, at, twin::BLOCK, true);
                const uint64_t some = std::min<uint64_t>(twin::BLOCK, bytes - c * sizeof(T));
                std::memset(to, 0, twin::BLOCK);
                std::memcpy(to, src.region->base + from + c * sizeof(T), some);
            }
        }
    twin::Here().counters.Gm(*src.region, uint64_t(p.ndNum) * p.nValue * p.dValue * sizeof(T), false);
}

// One value in many blocks of L1; the ways to L0A and L0B are not the 950's.
template <typename T>
void Fill(const LocalTensor<T>& dst, const InitConstValueParams<T>& p)
{
    twin::Takes<T, half, bfloat16_t, float>("Fill");
    twin::Lies("Fill", dst.place, twin::L1, twin::BLOCK);
    if (p.repeatTimes > 32767 || p.blockNum > 32767 || p.dstGap > 32767)
        twin::Refuse("Fill: %u times %u blocks, %u apart; 0 to 32767 are possible", p.repeatTimes.value, p.blockNum.value,
                     p.dstGap.value);
    const uint32_t start = twin::Aligned("Fill", dst.place), bytes = p.blockNum * twin::BLOCK;
    twin::Issue(twin::PIPE_OF_MTE2);
    for (uint32_t r = 0; r < p.repeatTimes && bytes; r++) {
        const uint32_t at = start + r * (p.blockNum + p.dstGap) * twin::BLOCK;
        T* to = reinterpret_cast<T*>(twin::Reach("Fill", twin::PIPE_OF_MTE2, dst.place, at, bytes, true));
        std::fill_n(to, bytes / sizeof(T), p.initValue);
    }
}

// Fractals from L1, each transposed if asked (16-bit elements).
template <typename T>
void LoadData(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LoadData2DParams& p)
{
    twin::LoadsTo("LoadData", dst, src);
    if (p.addrMode) twin::Refuse("LoadData: from L1 addresses go up");
    if (p.ifTranspose && sizeof(T) != 2) twin::Refuse("LoadData: fractals of 16-bit elements alone are transposed");
    if (p.dstGap && __NPU_ARCH__ == 3510) twin::Refuse("LoadData: the 950 ignores dstGap; use LoadData2DParamsV2");
    const uint32_t from = src.place.Address("LoadData"), to = dst.place.Address("LoadData");
    for (uint32_t i = 0; i < p.repeatTimes; i++) {
        const uint32_t a = from + (p.startIndex + i * p.srcStride) * twin::FRACTAL;
        const uint32_t b = to + i * (p.dstGap + 1) * twin::FRACTAL;
        if (p.ifTranspose) twin::CarryTransposed<T>("LoadData", dst.place, &b, src.place, &a);
        else twin::Carry("LoadData", dst.place, b, src.place, a, twin::FRACTAL);
    }
    twin::Here().counters.cost += p.repeatTimes;
}

// The 950's: a rectangle of an Nz matrix, transposed as a whole if asked.
template <typename T>
void LoadData(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LoadData2DParamsV2& p)
{
    if (__NPU_ARCH__ != 3510) twin::Refuse("LoadData: %d does not take LoadData2DParamsV2", __NPU_ARCH__);
    twin::LoadsTo("LoadData", dst, src);
    constexpr uint32_t COUNT = sizeof(T) / 2;  // fractals of a square
    if (p.mStep > 255 || p.kStep > 255) twin::Refuse("LoadData: %u x %u steps; 0 to 255", p.mStep.value, p.kStep.value);
    if (p.ifTranspose && p.kStep % COUNT) twin::Refuse("LoadData: %u steps; 32-bit squares take two", p.kStep.value);
    const uint32_t from = src.place.Address("LoadData"), to = dst.place.Address("LoadData");
    const auto source = [&](uint32_t m, uint32_t k) {
        return from + uint32_t((p.kStartPosition + k) * p.srcStride + p.mStartPosition + m) * twin::FRACTAL;
    };
    for (uint32_t k = 0; k < p.kStep; k += p.ifTranspose ? COUNT : 1)
        for (uint32_t m = 0; m < p.mStep; m++) {
            if (!p.ifTranspose) {
                const uint32_t b = to + (k * p.dstStride + m) * twin::FRACTAL;
                twin::Carry("LoadData", dst.place, b, src.place, source(m, k), twin::FRACTAL);
                continue;
            }
            uint32_t a[COUNT], b[COUNT];
            for (uint32_t f = 0; f < COUNT; f++) {
                a[f] = source(m, k + f);
                b[f] = to + ((m * COUNT + f) * p.dstStride + k / COUNT) * twin::FRACTAL;
            }
            twin::CarryTransposed<T>("LoadData", dst.place, b, src.place, a);
        }
    twin::Here().counters.cost += uint64_t(p.mStep) * p.kStep;
}

// Squares of 16 x 16 from L1, each transposed; of 32-bit elements a square is two fractals side by side.
template <typename T>
void LoadDataWithTranspose(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LoadData2dTransposeParams& p)
{
    twin::LoadsTo("LoadDataWithTranspose", dst, src);
    if (p.addrMode) twin::Refuse("LoadDataWithTranspose: the twin's addresses go up");
    if (__NPU_ARCH__ == 3510 && (sizeof(T) == 4 || dst.place.space() == twin::L0A))
        twin::Refuse("LoadDataWithTranspose: on %d of 16-bit elements to L0B alone; use LoadData2DParamsV2", __NPU_ARCH__);
    constexpr uint32_t COUNT = sizeof(T) / 2;
    const uint32_t from = src.place.Address("LoadData"), to = dst.place.Address("LoadData");
    for (uint32_t i = 0; i < p.repeatTimes; i++) {
        const uint32_t square = from + (p.startIndex + i * p.srcStride) * COUNT * twin::FRACTAL;
        const uint32_t first = to + i * (p.dstGap + 1) * twin::FRACTAL;
        const uint32_t a[2] = {square, square + twin::FRACTAL};
        const uint32_t b[2] = {first, first + (p.dstFracGap + 1) * twin::FRACTAL};
        twin::CarryTransposed<T>("LoadDataWithTranspose", dst.place, b, src.place, a);
    }
    twin::Here().counters.cost += p.repeatTimes * COUNT;
}

// What a core's register says before is not documented: products of float32 need it set.
inline void SetHF32Mode(HF32Mode mode)
{
    if (mode != HF32Mode::DISABLE) twin::Refuse("SetHF32Mode: the twin multiplies float32 as it is");
    twin::Here().exact = true;
}

// dst [m, n] = (or, without cmatrixInitVal, +=) fm [m, k] filter [k, n].
template <typename T, typename U, typename S>
void Mmad(const LocalTensor<T>& dst, const LocalTensor<U>& fm, const LocalTensor<S>& filter, const MmadParams& p)
{
    static_assert(std::is_same_v<U, S>, "both factors are of one type");
    twin::Takes<U, half, bfloat16_t, float>("Mmad");
    twin::Takes<T, float>("Mmad: a result that");
    twin::Lies("Mmad", fm.place, twin::L0A, twin::FRACTAL);
    twin::Lies("Mmad", filter.place, twin::L0B, twin::FRACTAL);
    twin::Lies("Mmad", dst.place, twin::L0C, 1024);
    const uint32_t m = p.m, n = p.n, k = p.k;
    if (!m || !n || !k || m > 4095 || n > 4095 || k > 4095)
        twin::Refuse("Mmad: %u x %u x %u; 1 to 4095 are possible", m, n, k);
    if (p.isBias || p.unitFlag || p.cmatrixSource) twin::Refuse("Mmad: the twin has no bias and no unit flag");
#if __NPU_ARCH__ == 3510
    const bool gemv = m == 1 && !p.disableGemv;
    if (p.kDirectionAlign) twin::Refuse("Mmad: the 950 has no kDirectionAlign");
#else
    const bool gemv = m == 1;
#endif
    if (gemv) twin::Refuse("Mmad: one row is read as a vector, not as fractals; take at least two");
    twin::Issue(twin::PIPE_OF_M);
    if (std::is_same_v<U, float> && !twin::Here().exact)
        twin::Refuse("Mmad: whether float32 is rounded first depends on SetHF32Mode, which nothing called");
    constexpr uint32_t C0 = twin::BLOCK / sizeof(U);
    const uint32_t rows = (m + 15) / 16, columns = (n + 15) / 16;
    const uint32_t deep = p.kDirectionAlign ? (k + 15) / 16 * 16 / C0 : (k + C0 - 1) / C0;
    std::vector<float> a(m * k), b(k * n), c(m * n);
    const auto left = [&](uint32_t r, uint32_t d) { return __NPU_ARCH__ == 3510 ? d * rows + r : r * deep + d; };
    twin::ReadFractals(fm, m, k, left, a.data(), k, 1);
    twin::ReadFractals(filter, n, k, [&](uint32_t j, uint32_t d) { return d * columns + j; }, b.data(), 1, n);
    const uint32_t start = dst.place.Address("Mmad");
    const auto row = [&](uint32_t i, uint32_t j, bool write) {
        const uint32_t at = start + ((j / 16 * rows + i / 16) * 256 + i % 16 * 16) * 4;
        return twin::Reach("Mmad", twin::PIPE_OF_M, dst.place, at, std::min(16u, n - j) * 4, write);
    };
    if (!p.cmatrixInitVal) {
        if ((m / 16) * (n / 16) < 10 && twin::Here().product == start)
            twin::Refuse("Mmad: %u x %u are added to what the product before wrote: PipeBarrier<PIPE_M> first", m, n);
        for (uint32_t i = 0; i < m; i++)
            for (uint32_t j = 0; j < n; j += 16) std::memcpy(&c[i * n + j], row(i, j, false), std::min(16u, n - j) * 4);
    }
    twin::Products(c.data(), a.data(), b.data(), m, n, k);
    for (uint32_t i = 0; i < m; i++)
        for (uint32_t j = 0; j < n; j += 16) std::memcpy(row(i, j, true), &c[i * n + j], std::min(16u, n - j) * 4);
    twin::Here().product = start;
    const uint64_t products = uint64_t(rows) * columns * deep;
    twin::Here().counters.products += products;
    twin::Here().counters.cost += products;
}

// Rows of L0C to global memory, as they are or rounded to a 16-bit float.
template <typename T, typename U, const FixpipeConfig& config = CFG_ROW_MAJOR>
void Fixpipe(const GlobalTensor<T>& dst, const LocalTensor<U>& src, const FixpipeParamsV220& p)
{
    static_assert(config.format == CO2Layout::ROW_MAJOR && !config.isToUB, "the twin's Fixpipe writes rows");
    twin::Takes<U, float>("Fixpipe");
    twin::Takes<T, half, bfloat16_t, float>("Fixpipe");
    constexpr QuantMode_t MODE = std::is_same_v<T, half> ? F322F16 : std::is_same_v<T, bfloat16_t> ? F322BF16 : NoQuant;
    if (p.quantPre != MODE) twin::Refuse("Fixpipe: quantPre does not fit %s", twin::TypeName<T>());
    twin::Lies("Fixpipe", src.place, twin::L0C, 64);
    if (p.nSize % 16 || !p.nSize || p.nSize > 4095 || !p.mSize || p.mSize > 8192)
        twin::Refuse("Fixpipe: %u rows of %u; up to 8192 of a multiple of 16 up to 4080", p.mSize.value, p.nSize.value);
    if (p.ndNum != 1 || p.reluEn || p.unitFlag || p.isChannelSplit) twin::Refuse("Fixpipe: the twin copies one matrix");
    twin::Issue(twin::PIPE_OF_FIX);
    const uint32_t start = src.place.Address("Fixpipe");
    for (uint32_t i = 0; i < p.mSize; i++) {
        const uint64_t bytes = p.nSize * sizeof(T);
        const uint64_t to = dst.Inside("Fixpipe", dst.at + uint64_t(i) * p.dstStride * sizeof(T), bytes);
        twin::TouchGm("Fixpipe", twin::PIPE_OF_FIX, *dst.region, to, bytes, twin::Access::WRITE);
        for (uint32_t j = 0; j < p.nSize; j += 16) {
            const uint32_t at = start + (j / 16 * p.srcStride + i) * 64;
            const uint8_t* from = twin::Reach("Fixpipe", twin::PIPE_OF_FIX, src.place, at, 64, false);
            for (uint32_t l = 0; l < 16; l++)
                reinterpret_cast<T*>(dst.region->base + to)[j + l] = twin::Store<T>(reinterpret_cast<const float*>(from)[l]);
        }
    }
    twin::Here().counters.Gm(*dst.region, uint64_t(p.mSize) * p.nSize * sizeof(T), true);
}

// The 950's parameters; FixpipeParamsC310 is their older name.
template <CO2Layout format = CO2Layout::ROW_MAJOR>
struct FixpipeParamsArch3510 : FixpipeParamsV220 {
    FixpipeParamsArch3510() = default;
    FixpipeParamsArch3510(int64_t nSize, int64_t mSize, int64_t srcStride, int64_t dstStride)
        : FixpipeParamsV220(nSize, mSize, srcStride, dstStride, false)
    {
    }
};
template <CO2Layout format = CO2Layout::ROW_MAJOR>
using FixpipeParamsC310 = FixpipeParamsArch3510<format>;

}  // namespace AscendC
