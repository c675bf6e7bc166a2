// 8-bit linear layers: panels, quantised rows, the product of a block. Compiled once per instruction set.
#include <type_traits>

#include "activation.h"
#include "linear_int8.h"
#include "pace.h"

namespace fastbert {
namespace FASTBERT_ISA {
namespace {

constexpr int kTileRows = 6;
constexpr int kTileVectors = kLanes == 16 ? 4 : 2;
constexpr int kTileColumns = kTileVectors * kLanes;

FASTBERT_INLINE std::int64_t less(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

#ifdef __AVX512F__
FASTBERT_INLINE UVec load_bits(const void* p) { return _mm512_loadu_si512(p); }
FASTBERT_INLINE void store_bits(void* p, UVec v) { _mm512_storeu_si512(p, v); }
FASTBERT_INLINE UVec dot_pairs(UVec sums, UVec a, UVec b) {
    return _mm512_add_epi32(sums, _mm512_madd_epi16(a, b));
}
FASTBERT_INLINE UVec subtract(UVec a, UVec b) { return _mm512_sub_epi32(a, b); }
FASTBERT_INLINE UVec multiply(UVec a, UVec b) { return _mm512_mullo_epi32(a, b); }
FASTBERT_INLINE Vec to_float(UVec v) { return _mm512_cvtepi32_ps(v); }
FASTBERT_INLINE UVec to_int(Vec v) { return _mm512_cvtps_epi32(v); }
FASTBERT_INLINE Vec minimum(Vec a, Vec b) { return _mm512_min_ps(a, b); }
FASTBERT_INLINE float smallest(Vec v) { return _mm512_reduce_min_ps(v); }
FASTBERT_INLINE void store_bytes(std::uint8_t* p, UVec v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v));
}
FASTBERT_INLINE void store_shorts(std::uint16_t* p, UVec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(v));
}
#else
FASTBERT_INLINE UVec load_bits(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
FASTBERT_INLINE void store_bits(void* p, UVec v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
FASTBERT_INLINE UVec dot_pairs(UVec sums, UVec a, UVec b) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
}
FASTBERT_INLINE UVec subtract(UVec a, UVec b) { return _mm256_sub_epi32(a, b); }
FASTBERT_INLINE UVec multiply(UVec a, UVec b) { return _mm256_mullo_epi32(a, b); }
FASTBERT_INLINE Vec to_float(UVec v) { return _mm256_cvtepi32_ps(v); }
FASTBERT_INLINE UVec to_int(Vec v) { return _mm256_cvtps_epi32(v); }
FASTBERT_INLINE Vec minimum(Vec a, Vec b) { return _mm256_min_ps(a, b); }
FASTBERT_INLINE float smallest(Vec v) { return -largest(sub(zero(), v)); }
FASTBERT_INLINE void store_bytes(std::uint8_t* p, UVec v) {
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}
FASTBERT_INLINE void store_shorts(std::uint16_t* p, UVec v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
}
#endif

// sums (kRows x kTileColumns) of `groups` rows of a panel. `ahead`: as in linear_simd.cpp.
#define FASTBERT_TILE_INT8(NAME, DOT, ...)                                                            \
    template <int kRows, int kLines>                                                                  \
    __VA_ARGS__ __attribute__((noinline)) void NAME(                                                  \
        const std::uint32_t* a, std::int64_t a_stride, const std::uint8_t* b, std::int64_t groups,    \
        std::int32_t* sums, const char* ahead, std::int64_t ahead_step) {                             \
        UVec acc[kRows][kTileVectors];                                                                \
        _Pragma("GCC unroll 8") for (int r = 0; r < kRows; ++r)                                       \
            _Pragma("GCC unroll 8") for (int v = 0; v < kTileVectors; ++v) acc[r][v] = broadcast(0u); \
        for (std::int64_t k = 0; k < groups; ++k, b += 4 * kPanel, ahead += ahead_step) {             \
            _Pragma("GCC unroll 8") for (int i = 0; i < kLines; ++i)                                  \
                __builtin_prefetch(ahead + i * kLine, 0, 2);                                          \
            UVec right[kTileVectors];                                                                 \
            _Pragma("GCC unroll 8") for (int v = 0; v < kTileVectors; ++v) right[v] =                 \
                load_bits(b + 4 * v * kLanes);                                                        \
            _Pragma("GCC unroll 8") for (int r = 0; r < kRows; ++r) {                                 \
                const UVec left = broadcast(a[r * a_stride + k]);                                     \
                _Pragma("GCC unroll 8") for (int v = 0; v < kTileVectors; ++v) acc[r][v] =            \
                    DOT(acc[r][v], left, right[v]);                                                   \
            }                                                                                         \
        }                                                                                             \
        _Pragma("GCC unroll 8") for (int r = 0; r < kRows; ++r)                                       \
            _Pragma("GCC unroll 8") for (int v = 0; v < kTileVectors; ++v)                            \
                store_bits(sums + r * kPanel + v * kLanes, acc[r][v]);                                \
    }

FASTBERT_TILE_INT8(tile_pairs, dot_pairs)
#ifdef __AVX512F__
FASTBERT_TILE_INT8(tile_vnni, _mm512_dpbusd_epi32, __attribute__((target("avx512vnni"))))
#else
FASTBERT_TILE_INT8(tile_vnni, _mm256_dpbusd_avx_epi32, __attribute__((target("avxvnni"))))
#endif
#undef FASTBERT_TILE_INT8

using Tile = void (*)(const std::uint32_t*, std::int64_t, const std::uint8_t*, std::int64_t, std::int32_t*,
                      const char*, std::int64_t);

template <int kGroup>
struct Tiles {
    static constexpr Tile kAll[3][kTileRows] = {{tile_pairs<1, 1>, tile_pairs<2, 1>, tile_pairs<3, 1>,
                                                 tile_pairs<4, 1>, tile_pairs<5, 1>, tile_pairs<6, 1>},
                                                {tile_pairs<1, 2>, tile_pairs<2, 2>, tile_pairs<3, 2>,
                                                 tile_pairs<4, 2>, tile_pairs<5, 2>, tile_pairs<6, 2>},
                                                {tile_pairs<1, 4>, tile_pairs<2, 4>, tile_pairs<3, 4>,
                                                 tile_pairs<4, 4>, tile_pairs<5, 4>, tile_pairs<6, 4>}};
};
template <>
struct Tiles<4> {
    static constexpr Tile kAll[3][kTileRows] = {{tile_vnni<1, 1>, tile_vnni<2, 1>, tile_vnni<3, 1>,
                                                 tile_vnni<4, 1>, tile_vnni<5, 1>, tile_vnni<6, 1>},
                                                {tile_vnni<1, 2>, tile_vnni<2, 2>, tile_vnni<3, 2>,
                                                 tile_vnni<4, 2>, tile_vnni<5, 2>, tile_vnni<6, 2>},
                                                {tile_vnni<1, 4>, tile_vnni<2, 4>, tile_vnni<3, 4>,
                                                 tile_vnni<4, 4>, tile_vnni<5, 4>, tile_vnni<6, 4>}};
};

// Rows [row, row + rows) of one panel, whose integer sums are a buffer of kPanel columns. The pointers to
// column_sums, scale and bias (or null) are those of the panel. By value: a store to y could change what a
// reference refers to, so every vector would load the pointers again.
struct PanelSums {
    const QuantizedRow* quantized;
    const float *scale, *bias;
    const std::int32_t *column_sums, *sums;
    std::int64_t row, rows;
};

// The zero point and the step of a row.
struct RowScale {
    UVec point;
    Vec step;
};
FASTBERT_INLINE RowScale scale_of(const PanelSums& of, std::int64_t r) {
    return {broadcast(static_cast<std::uint32_t>(of.quantized[of.row + r].zero)),
            broadcast(of.quantized[of.row + r].step)};
}

// The product of row r at column j of the panel, with its bias.
FASTBERT_INLINE Vec product_at(const PanelSums& of, const RowScale& row, std::int64_t r, std::int64_t j) {
    const UVec acc =
        subtract(load_bits(of.sums + r * kPanel + j), multiply(row.point, load_bits(of.column_sums + j)));
    const Vec z = mul(to_float(acc), mul(row.step, load(of.scale + j, kLanes)));
    return of.bias == nullptr ? z : add(z, load(of.bias + j, kLanes));
}

// Columns [column, column + columns) of y.
template <class T, Activation kind>
void finish(const ProductInt8& args, PanelSums of, std::int64_t column, std::int64_t columns) {
    for (std::int64_t r = 0; r < of.rows; ++r) {
        const RowScale row = scale_of(of, r);
        T* const y = static_cast<T*>(args.y) + (of.row + r) * args.columns + column;
        for (std::int64_t j = 0; j < columns; j += kLanes)
            store(y + j, activate<kind>(product_at(of, row, r, j), sizeof(T) == 4),
                  static_cast<int>(less(columns - j, kLanes)));
    }
}

template <class T>
void finish_onto(const ProductInt8& args, PanelSums of, std::int64_t column, std::int64_t columns) {
    const bool adds = args.onto == Onto::kAdds, onto = args.onto != Onto::kNone;
    for (std::int64_t r = 0; r < of.rows; ++r) {
        const RowScale row = scale_of(of, r);
        T* const y = static_cast<T*>(args.y) + (of.row + r) * args.columns + column;
        for (std::int64_t j = 0; j < columns; j += kLanes) {
            const int n = static_cast<int>(less(columns - j, kLanes));
            const Vec held = load(y + j, onto ? n : 0);
            store(y + j, product_at(of, row, r, j), n);
            Vec z = load(y + j, n);
            if (onto) z = adds ? add(held, z) : mul(held, z);
            if (args.norm_weight != nullptr)
                z = fma(z, load(static_cast<const T*>(args.norm_weight) + column + j, n),
                        load(static_cast<const T*>(args.norm_bias) + column + j, n));
            if (onto || args.norm_weight != nullptr) store(y + j, z, n);
        }
    }
}

template <class T, Activation kind>
void finish_gated(const ProductInt8& args, PanelSums of, std::int64_t column, std::int64_t columns) {
    const std::int64_t active = args.gate == Gate::kFirst ? 0 : kHalfPanel;
    for (std::int64_t r = 0; r < of.rows; ++r) {
        const RowScale row = scale_of(of, r);
        T* const y = static_cast<T*>(args.y) + (of.row + r) * args.columns + column;
        for (std::int64_t j = 0; j < columns; j += kLanes) {
            const Vec z = activate<kind>(product_at(of, row, r, active + j), sizeof(T) == 4);
            store(y + j, mul(z, product_at(of, row, r, kHalfPanel - active + j)),
                  static_cast<int>(less(columns - j, kLanes)));
        }
    }
}

using Finish = void (*)(const ProductInt8&, PanelSums, std::int64_t, std::int64_t);
template <class T>
constexpr Finish kFinish[] = {finish<T, Activation::kNone>,     finish<T, Activation::kGelu>,
                              finish<T, Activation::kGeluTanh>, finish<T, Activation::kRelu>,
                              finish<T, Activation::kSilu>,     finish<T, Activation::kTanh>};
template <class T>
constexpr Finish kFinishGated[] = {
    finish_gated<T, Activation::kNone>,     finish_gated<T, Activation::kGelu>,
    finish_gated<T, Activation::kGeluTanh>, finish_gated<T, Activation::kRelu>,
    finish_gated<T, Activation::kSilu>,     finish_gated<T, Activation::kTanh>};

template <int kGroup, class T>
void product_of(const ProductInt8& args, const std::uint32_t* groups, const QuantizedRow* quantized,
                const float* scale, const float* bias, std::int64_t row, std::int64_t row_end,
                std::int64_t column, std::int64_t column_end, std::int64_t next_column) {
    const std::int64_t count = groups_of(args.depth, kGroup), panel_bytes = count * 4 * kPanel;
    const bool gated = args.gate != Gate::kNone;
    const std::int64_t width = panel_columns(gated);
    const std::int64_t panels = panel_count(gated ? 2 * args.columns : args.columns, gated);
    const auto* const column_sums = reinterpret_cast<const std::int32_t*>(args.panels + panels * panel_bytes);
    const Finish finish = args.onto != Onto::kNone || args.norm_weight != nullptr
                              ? finish_onto<T>
                              : (gated ? kFinishGated<T> : kFinish<T>)[static_cast<int>(args.activation)];
    alignas(64) std::int32_t buffer[kTileRows * kPanel];
    for (std::int64_t j = column; j < column_end; j += kPanel) {
        const std::uint8_t* const panel = args.panels + j / kPanel * panel_bytes;
        std::int64_t tiles = (row_end - row + kTileRows - 1) / kTileRows;
        Pace ahead(args.panels + (j + kPanel < column_end ? j + kPanel : next_column) / kPanel * panel_bytes,
                   4 * kPanel / kLine, tiles);
        for (std::int64_t i = row, n; i < row_end; i += n, --tiles) {
            n = (row_end - i + tiles - 1) / tiles;
            for (int part = 0; part < kPanel; part += kTileColumns)
                Tiles<kGroup>::kAll[ahead.kind()][n - 1](groups + i * count, count, panel + 4 * part, count,
                                                         buffer + part, ahead.from, ahead.step);
            ahead.next(count);
            const PanelSums of{
                quantized, scale + j, bias == nullptr ? nullptr : bias + j, column_sums + j, buffer, i, n};
            const std::int64_t first = j / kPanel * width;
            finish(args, of, first, less(width, args.columns - first));
        }
    }
}

template <int kGroup>
void product(const ProductInt8& args, const std::uint32_t* groups, const QuantizedRow* quantized,
             const float* scale, const float* bias, std::int64_t row, std::int64_t row_end,
             std::int64_t column, std::int64_t column_end, std::int64_t next_column) {
    constexpr decltype(&product_of<kGroup, float>) kTypes[] = {
        product_of<kGroup, float>, product_of<kGroup, bf16>, product_of<kGroup, fp16>};
    kTypes[static_cast<int>(args.dtype)](args, groups, quantized, scale, bias, row, row_end, column,
                                         column_end, next_column);
}

template <int kGroup, class T, bool kSmooth>
QuantizedRow quantize_of(const ProductInt8& args, std::int64_t row, std::uint32_t* groups) {
    const T* const x = static_cast<const T*>(args.x) + row * args.x_stride;
    const auto input = [&](std::int64_t i, int n) __attribute__((always_inline)) {
        if constexpr (kSmooth) return mul(load(x + i, n), load(args.smooth + i, n));
        return load(x + i, n);
    };
    Vec low[4], high[4];
    for (int k = 0; k < 4; ++k) low[k] = high[k] = zero();
    if (args.range != nullptr) {
        low[0] = broadcast(args.range[0]);  // the other vectors are 0
        high[0] = broadcast(args.range[1]);
    } else {
        for_vectors(args.depth, [&](std::int64_t i, int k, int n) __attribute__((always_inline)) {
            // Lanes after the end are 0, which is always within the range.
            const Vec v = input(i, n);
            low[k] = minimum(low[k], v);
            high[k] = maximum(high[k], v);
        });
    }
    const float lo = smallest(minimum(minimum(low[0], low[1]), minimum(low[2], low[3])));
    const float hi = largest(maximum(maximum(high[0], high[1]), maximum(high[2], high[3])));
    const float width = hi - lo;
    float step = width / 255.0f;
    if (step < 1.17549435e-38f) step = 1.0f;  // the smallest normal number: below it 1 / step overflows
    const float inv = 1.0f / step;
    const float point = __builtin_rintf(-lo * inv);
    const Vec factor = broadcast(inv), shift = broadcast(point), most = broadcast(255.0f);
    Vec nothing = zero();
    alignas(64) std::uint32_t tail[kLanes] = {};
    for (std::int64_t i = 0; i < args.depth; i += kLanes) {
        const int n = static_cast<int>(less(args.depth - i, kLanes));
        const Vec v = input(i, n), rounded = add(nearest(mul(v, factor)), shift);
        nothing = fma(v, zero(), nothing);  // NaN once there is NaN or infinity
        const UVec u = to_int(first(minimum(maximum(rounded, zero()), most), n));
        std::uint32_t* const to = n == kLanes ? groups + i / kGroup : tail;
        if constexpr (kGroup == 4)
            store_bytes(reinterpret_cast<std::uint8_t*>(to), u);
        else
            store_shorts(reinterpret_cast<std::uint16_t*>(to), u);
        if (n < kLanes)
            __builtin_memcpy(groups + i / kGroup, tail, static_cast<std::size_t>(groups_of(n, kGroup)) * 4);
    }
    // Whatever the integers of such a row are. Of an infinite step they are 0, which makes NaN too
    if (sum(nothing) != 0.0f) return {__builtin_nanf(""), 0};
    return {step, static_cast<std::int32_t>(point)};
}

template <int kGroup>
QuantizedRow quantize(const ProductInt8& args, std::int64_t row, std::uint32_t* groups) {
    constexpr decltype(&quantize_of<kGroup, float, true>) kTypes[][2] = {
        {quantize_of<kGroup, float, false>, quantize_of<kGroup, float, true>},
        {quantize_of<kGroup, bf16, false>, quantize_of<kGroup, bf16, true>},
        {quantize_of<kGroup, fp16, false>, quantize_of<kGroup, fp16, true>}};
    return kTypes[static_cast<int>(args.dtype)][args.smooth != nullptr](args, row, groups);
}

template <int kGroup>
void make_panel(const ToPanelsInt8& args, std::int64_t panel, std::int32_t* sums) {
    using Element = std::conditional_t<kGroup == 4, std::int8_t, std::int16_t>;
    const std::int64_t width = panel_columns(args.gated), columns = args.columns / (args.gated ? 2 : 1);
    const std::int64_t first = panel * width, count = groups_of(args.depth, kGroup);
    std::uint8_t* const out = args.panels + panel * count * 4 * kPanel;
    __builtin_memset(out, 0, static_cast<std::size_t>(count) * 4 * kPanel);
    for (std::int64_t j = 0; j < kPanel; ++j) {
        std::int32_t sum = 0;
        const std::int64_t column = first + j % width;  // of one half
        const std::int64_t row = column + (j < width ? 0 : columns);
        for (std::int64_t i = 0; column < columns && i < args.depth; ++i) {
            const Element w = args.weight[row * args.depth + i];
            sum += w;
            __builtin_memcpy(out + (i / kGroup * kPanel + j) * 4 + i % kGroup * sizeof(Element), &w,
                             sizeof w);
        }
        sums[panel * kPanel + j] = sum;
    }
}

}  // namespace

extern const LinearInt8Kernels linear_int8_kernels;
const LinearInt8Kernels linear_int8_kernels = {2, make_panel<2>, quantize<2>, product<2>};
extern const LinearInt8Kernels linear_int8_vnni_kernels;
const LinearInt8Kernels linear_int8_vnni_kernels = {4, make_panel<4>, quantize<4>, product<4>};

}  // namespace FASTBERT_ISA
}  // namespace fastbert
