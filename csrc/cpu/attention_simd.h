// What the attention kernels of all instruction sets share: products by register tiles, softmax of a row,
// dropout. Included by attention_simd.cpp, which computes in float, and by attention_bf16_simd.cpp, which
// multiplies pairs of bf16. An element E of a sum is therefore a float or a Pair of bf16.
#pragma once

#include <cmath>
#include <cstring>

#include "attention.h"
#include "exp.h"
#include "transpose.h"
#include "vec.h"

namespace fastbert {
namespace FASTBERT_ISA {
namespace {

constexpr int kRows = 6;                           // rows of a register tile
constexpr int kMaxVectors = kLanes == 16 ? 4 : 2;  // vectors of a row of that tile
constexpr std::int64_t kDepth = 64;                // elements of a sum of P v per visit of a row

FASTBERT_INLINE std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }
FASTBERT_INLINE std::int64_t less(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
FASTBERT_INLINE std::int64_t width_of(std::int64_t headdim) { return round_up(headdim, kLanes); }

// c (kRows x kVectors vectors) = or += a b. a: element (row, k) at a[row * a_row + k * a_k]; b: row-major.
template <int kVectors, class E>
FASTBERT_INLINE void tile(const E* a, std::int64_t a_row, std::int64_t a_k, const E* b, std::int64_t b_row,
                          std::int64_t depth, float* c, std::int64_t c_row, bool accumulate) {
    Vec sum[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
            sum[r][v] = accumulate ? load(c + r * c_row + v * kLanes, kLanes) : zero();
    for (std::int64_t k = 0; k < depth; ++k) {
        decltype(load(b, kLanes)) right[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) right[v] = load(b + k * b_row + v * kLanes, kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const auto left = broadcast(a[r * a_row + k * a_k]);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) sum[r][v] = fma(left, right[v], sum[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) store(c + r * c_row + v * kLanes, sum[r][v], kLanes);
}

// The same for `rows` rows, in whole tiles: a and c may reach up to kRows - 1 rows further.
template <int kVectors, class E>
FASTBERT_INLINE void column_of_tiles(const E* a, std::int64_t a_row, std::int64_t a_k, const E* b,
                                     std::int64_t b_row, std::int64_t depth, float* c, std::int64_t c_row,
                                     std::int64_t rows, bool accumulate) {
    for (std::int64_t r = 0; r < rows; r += kRows)
        tile<kVectors>(a + r * a_row, a_row, a_k, b, b_row, depth, c + r * c_row, c_row, accumulate);
}

// The same over `columns` (a multiple of kLanes) columns of b and c.
template <class E>
void tiles(const E* a, std::int64_t a_row, std::int64_t a_k, const E* b, std::int64_t b_row,
           std::int64_t depth, float* c, std::int64_t c_row, std::int64_t rows, std::int64_t columns,
           bool accumulate) {
    std::int64_t j = 0;
    for (; j + kMaxVectors * kLanes <= columns; j += kMaxVectors * kLanes)
        column_of_tiles<kMaxVectors>(a, a_row, a_k, b + j, b_row, depth, c + j, c_row, rows, accumulate);
    for (; j + 2 * kLanes <= columns; j += 2 * kLanes)
        column_of_tiles<2>(a, a_row, a_k, b + j, b_row, depth, c + j, c_row, rows, accumulate);
    for (; j < columns; j += kLanes)
        column_of_tiles<1>(a, a_row, a_k, b + j, b_row, depth, c + j, c_row, rows, accumulate);
}

// scores (rows x stride) = a (rows x depth, a_row apart) times the keys [first, end), a multiple of kLanes
// and any number, of panels [depth][kKeyPanel].
template <class E>
void times_panels(const E* a, std::int64_t a_row, std::int64_t rows, const E* panels, std::int64_t first,
                  std::int64_t end, std::int64_t depth, float* scores, std::int64_t stride) {
    for (std::int64_t j = first; j < end;) {
        const std::int64_t panel = j / kKeyPanel * kKeyPanel, next = less(panel + kKeyPanel, end);
        tiles(a, a_row, 1, panels + panel * depth + (j - panel), kKeyPanel, depth, scores + (j - first),
              stride, rows, round_up(next - j, kLanes), false);
        j = next;
    }
}

// out (rows x width) = weights (rows x depth) times b (depth x width, b_row apart).
template <class E>
void times_rows(const E* weights, std::int64_t stride, std::int64_t rows, const E* b, std::int64_t b_row,
                std::int64_t depth, std::int64_t width, float* out) {
    for (std::int64_t j = 0; j < depth; j += kDepth)
        tiles(weights + j, stride, 1, b + j * b_row, b_row, less(kDepth, depth - j), out, width, rows, width,
              j > 0);
}

// sums[j] += Σ_k weights[k][j] b[k], for `keys` keys j and `depth` elements k. The last tile may reach up to
// kRows - 1 keys further: their weights must be 0 where their sums are used.
template <class E>
void add_transposed(const E* weights, std::int64_t stride, std::int64_t depth, const E* b, std::int64_t keys,
                    std::int64_t width, float* sums) {
    tiles(weights, 1, stride, b, width, depth, sums, width, keys, width, true);
}

template <class T>
FASTBERT_INLINE const T* row_of(const Heads& t, std::int64_t row, std::int64_t head) {
    return static_cast<const T*>(t.data) + row * t.row_stride + head * t.head_stride;
}

// Asks for rows [first, first + count) of one head before they are read.
template <class T>
FASTBERT_INLINE void prefetch_rows(const Heads& t, std::int64_t first, std::int64_t head, std::int64_t count,
                                   std::int64_t headdim) {
    for (std::int64_t i = 0; i < count; ++i)
        for (std::int64_t c = 0; c < headdim; c += 64 / sizeof(T))
            __builtin_prefetch(row_of<T>(t, first + i, head) + c);
}

// Rows [first, first + count) as floats, `width` per row, with zeros after `headdim`; then zero rows up to
// `padded`.
template <class T>
void copy_rows(const Heads& t, std::int64_t first, std::int64_t head, std::int64_t count, std::int64_t padded,
               std::int64_t headdim, std::int64_t width, float* out) {
    for (std::int64_t i = 0; i < padded; ++i) {
        for (std::int64_t c = 0; c < width; c += kLanes) {
            const std::int64_t n = less(headdim - c, kLanes);
            store(out + i * width + c,
                  i < count && n > 0 ? load(row_of<T>(t, first + i, head) + c, static_cast<int>(n)) : zero(),
                  kLanes);
        }
    }
}

// Panels [headdim][kKeyPanel] of the transpose of rows [first, first + count); zeros for keys from `count` to
// the next multiple of kLanes.
template <class T>
void transpose_rows(const Heads& t, std::int64_t first, std::int64_t head, std::int64_t count,
                    std::int64_t headdim, float* out) {
    for (std::int64_t j = 0; j < count; j += kLanes) {
        float* const panel = out + j / kKeyPanel * headdim * kKeyPanel + j % kKeyPanel;
        for (std::int64_t c = 0; c < headdim; c += kLanes) {
            const int n = static_cast<int>(less(headdim - c, kLanes));
            Vec block[kLanes];
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i)
                block[i] = j + i < count ? load(row_of<T>(t, first + j + i, head) + c, n) : zero();
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i)
                if (i < n) store(panel + (c + i) * kKeyPanel, block[i], kLanes);
        }
    }
}

template <class T>
void store_rows(const float* rows, std::int64_t count, std::int64_t width, float factor, T* out,
                std::int64_t headdim, std::int64_t out_stride) {
    for (std::int64_t j = 0; j < count; ++j)
        for_vectors(headdim, [&](std::int64_t c, int, int n) __attribute__((always_inline)) {
            store(out + j * out_stride + c, mul(load(rows + j * width + c, n), broadcast(factor)), n);
        });
}

struct Row {
    float top, sum;  // P = exp(s - top) / sum; sum 0 where no key is allowed
};

// The largest of one row of scores after scale and bias; with a bias, the row is left scaled and biased.
FASTBERT_INLINE float top_of_row(float* s, std::int64_t allowed, float scale, const float* bias) {
    const Vec factor = broadcast(scale);
    Vec most[4] = {broadcast(-INFINITY), broadcast(-INFINITY), broadcast(-INFINITY), broadcast(-INFINITY)};
    const auto take = [&](int k, int n, Vec x) __attribute__((always_inline)) {
        most[k] = maximum(most[k], n == kLanes ? x : first_or(x, n, -INFINITY));
    };
    if (bias == nullptr)
        for_vectors(allowed, [&](std::int64_t j, int k, int n)
                                 __attribute__((always_inline)) { take(k, n, mul(load(s + j, n), factor)); });
    else
        for_vectors(allowed, [&](std::int64_t j, int k, int n) __attribute__((always_inline)) {
            const Vec x = add(mul(load(s + j, n), factor), load(bias + j, n));
            store(s + j, x, n);
            take(k, n, x);
        });
    return largest(maximum(maximum(most[0], most[1]), maximum(most[2], most[3])));
}

// exp(scale s - top) of a row in place, and its sum.
FASTBERT_INLINE float exponentials(float* s, std::int64_t allowed, float scale, float top) {
    // No key is allowed, or there are NaNs, which a maximum may lose: the row is then NaN.
    if (top == -INFINITY) {
        float sum = 0.0f;
        for (std::int64_t j = 0; j < allowed; ++j) {
            const float x = s[j] * scale;
            if (x != x) sum = x;
        }
        for (std::int64_t j = 0; j < allowed; ++j) s[j] = sum;
        return sum;
    }
    const Vec factor = broadcast(scale), shift = broadcast(top);
    Vec total[4] = {zero(), zero(), zero(), zero()};
    for_vectors(allowed, [&](std::int64_t j, int k, int n) __attribute__((always_inline)) {
        const Vec e = first(exponential(sub(mul(load(s + j, n), factor), shift)), n);
        store(s + j, e, n);
        total[k] = add(total[k], e);
    });
    return sum4(total);
}

FASTBERT_INLINE const float* bias_row(const Bias& bias, std::int64_t sequence, std::int64_t head,
                                      std::int64_t i) {
    return bias.data == nullptr
               ? nullptr
               : bias.data + sequence * bias.batch_stride + head * bias.head_stride + i * bias.row_stride;
}

// The keys [begin, end) that some neighbouring queries of a sequence see. Their columns in rows of scores
// start at key `first`, the multiple of kLanes below.
struct Keys {
    std::int64_t begin, end, first;
    std::int64_t columns() const { return end - first; }
};

// Those that the queries from i to i + rows - 1 of n tokens see.
FASTBERT_INLINE Keys keys_of(const Attention& args, std::int64_t n, std::int64_t i, std::int64_t rows) {
    const auto [left, right] = args.window;
    const std::int64_t begin = left < 0 || i < left ? 0 : i - left;
    return {begin, right < 0 ? n : less(n, i + rows + right), begin / kLanes * kLanes};
}

// Columns of a block's rows of scores, in sequences of up to n tokens.
FASTBERT_INLINE std::int64_t row_stride(const Attention& args, std::int64_t n) {
    return round_up(most_keys(args, n, kQueryBlock), kKeyPanel);
}

// Where a (batch, nheads, S, S) matrix has query i and key j.
FASTBERT_INLINE std::int64_t cell_of(const Attention& args, std::int64_t sequence, std::int64_t head,
                                     std::int64_t i, std::int64_t j) {
    return ((sequence * args.nheads + head) * args.max_seqlen + i) * args.max_seqlen + j;
}

// Whether every query of n tokens sees every key.
FASTBERT_INLINE bool sees_all(const Attention& args, std::int64_t n) {
    const auto [left, right] = args.window;
    return (left < 0 || left + 1 >= n) && (right < 0 || right + 1 >= n);
}

// The head of k and v that a head of q reads.
FASTBERT_INLINE std::int64_t kv_head_of(const Attention& args, std::int64_t head) {
    return args.kv_heads == args.nheads ? head : head / (args.nheads / args.kv_heads);
}

// The tokens of one sequence.
struct Span {
    std::int64_t start, length;
};

FASTBERT_INLINE Span span_of(const Attention& args, std::int64_t sequence) {
    const std::int64_t start = args.cu_seqlens[sequence];
    return {start, args.cu_seqlens[sequence + 1] - start};
}

// s = scale s + bias + the scores of distances of `rows` queries from query i on, in rows of scores of these
// keys. Columns of near distances lie side by side. So a query's scores of a vector of keys are one load, and
// those of the keys are transposed; others are gathered.
template <class T>
FASTBERT_INLINE void add_relative(const Attention& args, const Relative& relative, std::int64_t sequence,
                                  std::int64_t head, std::int64_t i, std::int64_t rows, const Keys& keys,
                                  float* s, std::int64_t stride) {
    const std::int64_t start = args.cu_seqlens[sequence], step = relative.key.row_stride;
    const std::uint8_t* const runs = relative.runs;
    const Vec scale = broadcast(args.softmax_scale);
    for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t first = keys.first - (i + r);
        const float* bias = bias_row(args.bias, sequence, head, i + r);
        if (bias != nullptr) bias += keys.first;
        const T* query =
            relative.query.data == nullptr ? nullptr : row_of<T>(relative.query, start + i + r, head);
        const float* every = relative.bias;
        if (every != nullptr) every += head * (2 * relative.reach + 1) + first;
        const std::int32_t* columns = relative.columns + first;
        float* const row = s + r * stride;
        for_vectors(keys.columns(), [&](std::int64_t j, int, int n) __attribute__((always_inline)) {
            Vec x = mul(load(row + j, n), scale);
            if (bias != nullptr) x = add(x, load(bias + j, n));
            if (every != nullptr) x = add(x, load(every + j, n));
            if (query != nullptr)
                x = add(x, runs[first + j] >= n ? load(query + columns[j], n)
                                                : gather(query, load_indices(columns + j, n), n));
            store(row + j, x, n);
        });
    }
    if (relative.key.data == nullptr) return;
    const UVec steps = multiples(static_cast<std::int32_t>(step));
    for (std::int64_t j = 0; j < keys.columns(); j += kLanes) {
        const int count = static_cast<int>(less(kLanes, keys.columns() - j));
        const T* const key = row_of<T>(relative.key, start + keys.first + j, head);
        for (std::int64_t r = 0; r < rows; r += kLanes) {
            const int tall = static_cast<int>(less(kLanes, rows - r));
            // from the last of these queries to the first of these keys
            const std::int64_t nearest = keys.first + j - (i + r + tall - 1);
            if (runs[nearest] >= tall + count - 1) {
                const T* const corner = key + relative.columns[nearest];
                Vec block[kLanes];
#pragma GCC unroll 16
                for (int l = 0; l < kLanes; ++l)
                    block[l] = l < count ? load(corner + l * (step + 1), tall) : zero();
                transpose(block);
#pragma GCC unroll 16
                for (int l = 0; l < kLanes; ++l)
                    if (l < tall) {
                        float* const row = s + (r + tall - 1 - l) * stride + j;
                        store(row, add(load(row, count), block[l]), count);
                    }
                continue;
            }
            for (std::int64_t q = r; q < r + tall; ++q) {
                float* const row = s + q * stride + j;
                const UVec column = load_indices(relative.columns + (keys.first + j - (i + q)), count);
                store(row, add(load(row, count), gather(key, plus(column, steps), count)), count);
            }
        }
    }
}

// Adds the gradients of query i's scores of the keys [begin, end) to those of the scores of distances.
FASTBERT_INLINE void add_distances(const Attention& args, const Relative& relative,
                                   const RelativeGrads& grads, std::int64_t sequence, std::int64_t head,
                                   std::int64_t i, const Keys& keys, const float* ds) {
    const std::int64_t start = args.cu_seqlens[sequence], n = relative.ncolumns, step = args.nheads * n;
    const std::int32_t* columns = relative.columns - i;
    if (grads.query != nullptr) {
        float* const row = grads.query + (start + i) * step + head * n;
        for (std::int64_t j = keys.begin; j < keys.end; ++j) row[columns[j]] += ds[j - keys.first];
    }
    if (grads.key != nullptr) {
        float* const rows = grads.key + start * step + head * n;
        for (std::int64_t j = keys.begin; j < keys.end; ++j)
            rows[j * step + columns[j]] += ds[j - keys.first];
    }
    if (grads.bias != nullptr) {
        const std::int64_t distances = 2 * relative.reach + 1;
        double* const row = grads.bias + (sequence * args.nheads + head) * distances + relative.reach - i;
        for (std::int64_t j = keys.begin; j < keys.end; ++j) row[j] += ds[j - keys.first];
    }
}

// Softmax of `rows` rows of scores of these keys, `stride` apart, without the division: exp(s - top) in
// place, and 0 for the keys that a row's query does not see, up to the column `width`. First all maxima, then
// all sums: a row's exponentials need not wait for its own maximum.
FASTBERT_INLINE void softmax_rows(const Attention& args, const Relative& relative, std::int64_t sequence,
                                  std::int64_t head, std::int64_t n, std::int64_t first_row,
                                  std::int64_t rows, const Keys& keys, std::int64_t width, float* s,
                                  std::int64_t stride, Row* out) {
    const bool added = of_tokens(relative), biased = args.bias.data != nullptr || given(relative);
    if (added && relative.half)
        add_relative<bf16>(args, relative, sequence, head, first_row, rows, keys, s, stride);
    else if (added)
        add_relative<float>(args, relative, sequence, head, first_row, rows, keys, s, stride);
    const float scale = biased ? 1.0f : args.softmax_scale;
    const bool limited = args.window.left >= 0 || args.window.right >= 0;
    const auto seen_by = [&](std::int64_t r) { return limited ? keys_of(args, n, first_row + r, 1) : keys; };
    for (std::int64_t r = 0; r < rows; ++r) {
        const Keys seen = seen_by(r);
        const float* bias = added ? nullptr : bias_row(args.bias, sequence, head, first_row + r);
        if (bias != nullptr) bias += seen.begin;
        float* const row = s + r * stride + (seen.begin - keys.first);
        if (!added && given(relative)) {
            const std::int64_t distances = 2 * relative.reach + 1;
            const float* every = relative.bias + head * distances + seen.begin - (first_row + r);
            if (bias != nullptr) {
                const Vec factor = broadcast(args.softmax_scale);
                for_vectors(seen.end - seen.begin,
                            [&](std::int64_t j, int, int n) __attribute__((always_inline)) {
                                store(row + j, fma(load(row + j, n), factor, load(bias + j, n)), n);
                            });
                out[r].top = top_of_row(row, seen.end - seen.begin, 1.0f, every);
                continue;
            }
            bias = every;
        }
        out[r].top = top_of_row(row, seen.end - seen.begin, added ? 1.0f : args.softmax_scale, bias);
    }
    for (std::int64_t r = 0; r < rows; ++r) {
        const Keys seen = seen_by(r);
        float* const row = s + r * stride;
        const std::int64_t begin = seen.begin - keys.first, end = seen.end - keys.first;
        for (std::int64_t j = 0; j < begin; ++j) row[j] = 0.0f;
        out[r].sum = exponentials(row + begin, end - begin, scale, out[r].top);
        for (std::int64_t j = end; j < width; ++j) row[j] = 0.0f;
    }
}

// Whether backward needs dS, the gradient of the scores.
FASTBERT_INLINE bool needs_ds(const AttentionBwd& args, const RelativeGrads& grads) {
    return wanted(grads) || args.dq != nullptr || args.dk != nullptr || args.ds != nullptr ||
           args.dgate != nullptr;
}

// Floats of scratch that hold the bits of one row of up to `columns` columns, from the multiple of 64 below
// their first key on.
FASTBERT_INLINE std::int64_t bits_room(std::int64_t columns) { return round_up(columns / 32 + 4, 16); }

// The place in `keep_bits` of one row's bits from the first of these keys on, and their size in bytes.
template <class Word>
FASTBERT_INLINE Word* saved_bits(Word* keep_bits, const Attention& args, std::int64_t head, std::int64_t row,
                                 const Keys& keys) {
    return keep_bits + (head * args.total + row) * ((args.max_seqlen + 31) / 32) + keys.first / 64 * 2;
}
FASTBERT_INLINE std::size_t saved_size(const Keys& keys) {
    return static_cast<std::size_t>(((keys.end + 31) / 32 - keys.first / 64 * 2) * 4);
}

// Draws the dropout bits of one row into `bits`, 64 keys per word; null without dropout.
FASTBERT_INLINE const std::uint64_t* drawn_bits(const DropoutArgs& args, std::int64_t head, std::int64_t row,
                                                const Keys& keys, std::uint64_t* bits) {
    if (args.seed == nullptr) return nullptr;
    const Dropout dropout{*args.seed, args.offset, static_cast<std::uint32_t>(head), args.threshold};
    const std::int64_t first = keys.first / 64;
    philox_keep(dropout, static_cast<std::uint32_t>(row), (keys.end + 63) / 64 - first, bits, first);
    return bits;
}

// The same; also saves them in `keep_bits`, if it is not null, for backward.
FASTBERT_INLINE const std::uint64_t* kept_in_forward(const AttentionFwd& args, std::int64_t head,
                                                     std::int64_t row, const Keys& keys,
                                                     std::uint64_t* bits) {
    const std::uint64_t* const drawn = drawn_bits(args.dropout, head, row, keys, bits);
    if (drawn != nullptr && args.keep_bits != nullptr)
        std::memcpy(saved_bits(args.keep_bits, args, head, row, keys), drawn, saved_size(keys));
    return drawn;
}

FASTBERT_INLINE const std::uint64_t* kept_in_backward(const AttentionBwd& args, std::int64_t head,
                                                      std::int64_t row, const Keys& keys,
                                                      std::uint64_t* bits) {
    if (args.dropout.seed == nullptr || args.keep_bits == nullptr)
        return drawn_bits(args.dropout, head, row, keys, bits);
    std::memcpy(bits, saved_bits(args.keep_bits, args, head, row, keys), saved_size(keys));
    return bits;
}

// f(j, n, bits) for every vector of a row's columns j. Bit i says whether dropout keeps the key of column
// j + i; without `kept` all are kept.
template <class F>
FASTBERT_INLINE void for_kept(const Keys& keys, const std::uint64_t* kept, const F& f) {
    const std::int64_t columns = keys.columns(), skipped = keys.first % 64;
    for (std::int64_t block = -skipped; block < columns; block += 64) {
        const std::uint64_t bits = kept == nullptr ? ~0ull : *kept++;
        for (std::int64_t j = block < 0 ? 0 : block; j < less(columns, block + 64); j += kLanes)
            f(j, static_cast<int>(less(columns - j, kLanes)), bits >> (j - block));
    }
}

// w = p times `factor` where `bits` keep it, else 0.
FASTBERT_INLINE void weigh(const float* p, float* w, const Keys& keys, float factor,
                           const std::uint64_t* bits) {
    const Vec scale = broadcast(factor);
    for_kept(keys, bits, [&](std::int64_t j, int n, std::uint64_t word) __attribute__((always_inline)) {
        const Vec x = mul(load(p + j, n), scale);
        store(w + j, bits == nullptr ? x : kept(x, word), n);
    });
}

}  // namespace
}  // namespace FASTBERT_ISA
}  // namespace fastbert
