// What both products of linear layers share: the height of tiles, the length of float sums, and the epilogue.
// Included by linear_simd.cpp, which multiplies floats, and by linear_bf16_simd.cpp, which multiplies pairs
// of bf16.
#pragma once

#include "activation.h"
#include "linear.h"

namespace fastbert {
namespace FASTBERT_ISA {
namespace {

constexpr int kTileRows = 6;

FASTBERT_INLINE std::int64_t less(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

// The columns of c that a panel makes from its column j on, and how many of them there are.
struct Columns {
    std::int64_t begin, count;
    Columns(const Product& args, std::int64_t j) {
        const std::int64_t width = panel_columns(args.gate != Gate::kNone);
        begin = j / kPanel * width;
        count = less(width, args.columns - begin);
    }
};

template <class T>
constexpr bool kIsFloat = sizeof(T) == 4;

// v rounded to T.
template <class T>
FASTBERT_INLINE Vec rounded(Vec v) {
    if constexpr (kIsFloat<T>) return v;
    alignas(64) T narrow[kLanes];
    store(narrow, v, kLanes);
    return load(narrow, kLanes);
}

// Tiles of nearly equal height: a tile of one row would wait for its own sums.
FASTBERT_INLINE std::int64_t tile_height(std::int64_t rows, std::int64_t tiles) {
    return (rows + tiles - 1) / tiles;
}

// Bias, activation, residual, norm and rounding of `rows` rows of c from `row` on, columns [column, column +
// n).
template <class T, Activation kind>
void finish(const Product& args, const float* bias, const float* c, std::int64_t c_stride, std::int64_t row,
            std::int64_t rows, std::int64_t column, std::int64_t columns) {
    for (std::int64_t r = 0; r < rows; ++r, c += c_stride) {
        const std::int64_t at = (row + r) * args.columns + column;
        for (std::int64_t j = 0; j < columns; j += kLanes) {
            const int n = static_cast<int>(less(columns - j, kLanes));
            Vec z = load(c + j, kLanes);
            if (bias != nullptr) z = add(z, load(bias + column + j, kLanes));
            if (args.pre != nullptr) store(static_cast<T*>(args.pre) + at + j, z, n);
            z = activate<kind>(z, kIsFloat<T>);
            if (args.multiplies || args.norm_weight != nullptr) z = rounded<T>(z);
            if (args.residual != nullptr) {
                const T* residual = static_cast<const T*>(args.residual);
                const Vec held = load(residual + (row + r) * args.residual_stride + column + j, n);
                z = args.multiplies ? mul(z, held) : add(z, held);
            }
            if (args.norm_weight != nullptr)
                z = fma(z, load(static_cast<const T*>(args.norm_weight) + column + j, n),
                        load(static_cast<const T*>(args.norm_bias) + column + j, n));
            store(static_cast<T*>(args.c) + at + j, z, n);
        }
    }
}

// The same for a gated activation: columns [column, column + kPanel) of the panels are `columns` of c. The
// row of c that it reads holds the first half's sums, then the second half's.
template <class T, Activation kind>
void finish_gated(const Product& args, const float* bias, const float* c, std::int64_t c_stride,
                  std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns) {
    const bool first = args.gate == Gate::kFirst;
    for (std::int64_t r = row; r < row + rows; ++r, c += c_stride) {
        const std::int64_t begin = column / kPanel * kHalfPanel;
        for (std::int64_t j = 0; j < columns; j += kLanes) {
            const int n = static_cast<int>(less(columns - j, kLanes));
            Vec left = load(c + j, kLanes), right = load(c + kHalfPanel + j, kLanes);
            if (bias != nullptr) {
                left = add(left, load(bias + column + j, kLanes));
                right = add(right, load(bias + column + kHalfPanel + j, kLanes));
            }
            if (args.pre != nullptr) {
                T* const pre = static_cast<T*>(args.pre) + 2 * r * args.columns + begin + j;
                store(pre, left, n);
                store(pre + args.columns, right, n);
            }
            Vec y = mul(activate<kind>(first ? left : right, kIsFloat<T>), first ? right : left);
            if (args.residual != nullptr) {
                const T* residual = static_cast<const T*>(args.residual) + r * args.residual_stride;
                y = add(y, load(residual + begin + j, n));
            }
            store(static_cast<T*>(args.c) + r * args.columns + begin + j, y, n);
        }
    }
}

// Prefetches what `finish` reads of the residual. Its rows are too far apart for the processor's own
// prefetch.
template <class T>
FASTBERT_INLINE void fetch_residual(const Product& args, std::int64_t row, std::int64_t rows,
                                    const Columns& of) {
    if (args.residual == nullptr) return;
    const T* from = static_cast<const T*>(args.residual) + row * args.residual_stride + of.begin;
    for (std::int64_t r = 0; r < rows; ++r, from += args.residual_stride)
        for (std::int64_t j = 0; j < of.count; j += 64 / static_cast<std::int64_t>(sizeof(T)))
            __builtin_prefetch(from + j);
}

template <class T>
using Finish = void (*)(const Product&, const float*, const float*, std::int64_t, std::int64_t, std::int64_t,
                        std::int64_t, std::int64_t);
template <class T>
constexpr Finish<T> kFinish[] = {finish<T, Activation::kNone>,     finish<T, Activation::kGelu>,
                                 finish<T, Activation::kGeluTanh>, finish<T, Activation::kRelu>,
                                 finish<T, Activation::kSilu>,     finish<T, Activation::kTanh>};
template <class T>
constexpr Finish<T> kFinishGated[] = {
    finish_gated<T, Activation::kNone>,     finish_gated<T, Activation::kGelu>,
    finish_gated<T, Activation::kGeluTanh>, finish_gated<T, Activation::kRelu>,
    finish_gated<T, Activation::kSilu>,     finish_gated<T, Activation::kTanh>};

// The epilogue of a product whose operands are of type T.
template <class T>
FASTBERT_INLINE auto finish_of(const Product& args) {
    const int kind = static_cast<int>(args.activation);
    if (args.gate != Gate::kNone) return kFinishGated<T>[kind];
    return args.wide_c ? kFinish<float>[kind] : kFinish<T>[kind];
}

}  // namespace
}  // namespace FASTBERT_ISA
}  // namespace fastbert
