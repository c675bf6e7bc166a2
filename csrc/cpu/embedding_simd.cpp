// Embedding + LayerNorm + dropout of a run of tokens, for one instruction set (see isa.h). Contract:
// fastbert/ops/embedding.py.
//
// Math       z = word[id] + position[pos] + segment[type];  x_hat = (z - mean) rstd
//            y = dropout(x_hat weight + bias)
//            dn = dropout'(dy), g = dn weight:  dz = rstd (g - mean(g) - x_hat mean(g x_hat))
//            dtable[v] = sum of dz over the tokens with id v
// Tiling     Forward: one token at a time, with z in a float row in L1. Backward: four tokens at a time.
//            A table's gradient: four vectors of columns of one row at a time, in registers.
// Precision  Widened to float on load (a word's integers times their row's scale), rounded once on store;
// statistics as in norm_rows.h. dz stays in
//            float. 32 tokens of a row are summed in float, these sums in double: a row of thousands of
//            tokens is as exact as a row of a few.
// Saved      z rounded to T, mean and rstd; the dropout bits are drawn again.
#include "embedding.h"
#include "norm_rows.h"

namespace fastbert {
namespace FASTBERT_ISA {
namespace {

FASTBERT_INLINE std::int64_t row_number(const Lookup& lookup, std::int64_t token) {
    return lookup.ids == nullptr ? token : lookup.ids[token];
}

template <class T>
FASTBERT_INLINE const T* row_of(const Lookup& lookup, std::int64_t token) {
    if (lookup.table == nullptr) return nullptr;
    return static_cast<const T*>(lookup.table) + row_number(lookup, token) * lookup.stride;
}

// z of one token into `row_z`, also rounded into z_out if wanted; returns the sum of z. word(j, n) loads n
// columns of the word's row, from column j on.
template <class T, class W>
FASTBERT_INLINE float sum_tables(const EmbeddingFwd& args, std::int64_t token, float* row_z, const W& word) {
    const T* position = row_of<T>(args.position, token);
    const T* segment = row_of<T>(args.segment, token);
    T* z_out = args.z == nullptr ? nullptr : static_cast<T*>(args.z) + token * args.hidden;
    Vec total[4] = {zero(), zero(), zero(), zero()};
    for_vectors(args.hidden, [&](std::int64_t j, int k, int n) __attribute__((always_inline)) {
        Vec z = word(j, n);
        if (position != nullptr) z = add(z, load(position + j, n));
        if (segment != nullptr) z = add(z, load(segment + j, n));
        if (z_out != nullptr) store(z_out + j, z, n);
        store(row_z + j, z, n);
        total[k] = add(total[k], z);
    });
    return sum4(total);
}

template <class T>
FASTBERT_INLINE float gather_token(const EmbeddingFwd& args, std::int64_t token, float* row_z) {
    if (args.word_bits == 0) {
        const T* row = row_of<T>(args.word, token);
        return sum_tables<T>(args, token, row_z, [&](std::int64_t j, int n) __attribute__((always_inline)) {
            return load(row + j, n);
        });
    }
    const Vec scale = broadcast(args.word_scale[row_number(args.word, token)]);
    if (args.word_bits == 8) {
        const std::int8_t* row = row_of<std::int8_t>(args.word, token);
        return sum_tables<T>(args, token, row_z, [&](std::int64_t j, int n) __attribute__((always_inline)) {
            return mul(load(row + j, n), scale);
        });
    }
    const std::uint8_t* row = row_of<std::uint8_t>(args.word, token);
    return sum_tables<T>(args, token, row_z, [&](std::int64_t j, int n) __attribute__((always_inline)) {
        // Lanes past the row hold -8
        return first(mul(load_nibbles(row + j / 2, n), scale), n);
    });
}

template <class T>
void forward_tokens(const EmbeddingFwd& args, const float* weight, const float* bias, std::int64_t begin,
                    std::int64_t end, float* scratch) {
    const std::int64_t hidden = args.hidden;
    std::uint64_t* bits =
        args.dropout.seed != nullptr ? reinterpret_cast<std::uint64_t*>(scratch + padded(hidden)) : nullptr;
    const Vec keep_scale = broadcast(args.dropout.scale);
    for (std::int64_t token = begin; token < end; ++token) {
        const float total = gather_token<T>(args, token, scratch);
        const Moments moments = moments_of(scratch, hidden, total, args.eps);
        if (args.mean != nullptr) {
            args.mean[token] = moments.mean + moments.correction;
            args.rstd[token] = moments.rstd;
        }
        if (bits != nullptr) draw_bits(args.dropout, token, hidden, bits);
        T* y = static_cast<T*>(args.y) + token * hidden;
        normalise(scratch, moments, weight, bias, hidden,
                  [&](std::int64_t j, int n, Vec v) __attribute__((always_inline)) {
                      if (bits != nullptr) v = kept(mul(v, keep_scale), bits_at(bits, j));
                      store(y + j, v, n);
                  });
    }
}

// Tokens [token, token + kRows).
template <class T, int kRows>
FASTBERT_INLINE void backward_block(const EmbeddingBwd& args, const float* weight, std::int64_t token,
                                    float* dz_out, float* partial, std::uint64_t* bits) {
    const std::int64_t hidden = args.hidden, bit_words = padded(hidden) / 64, at = token * hidden;
    const T* dy = static_cast<const T*>(args.dy) + at;
    T* dinputs = args.dinputs_embeds == nullptr ? nullptr : static_cast<T*>(args.dinputs_embeds) + at;
    if (dz_out != nullptr) dz_out += at;
    const bool dropout = args.dropout.seed != nullptr, sum_params = args.dweight != nullptr;
    if (dropout)
        for (int r = 0; r < kRows; ++r) draw_bits(args.dropout, token + r, hidden, bits + r * bit_words);
    const Vec keep_scale = broadcast(args.dropout.scale);
    const NormRows<T> rows{
        hidden, hidden, static_cast<const T*>(args.z) + at, args.mean + token, args.rstd + token, weight};
    norm_backward<kRows>(
        rows,
        [&](int r, std::int64_t j, int n) __attribute__((always_inline)) {
            const Vec grad = load(dy + r * hidden + j, n);
            return dropout ? kept(mul(grad, keep_scale), bits_at(bits + r * bit_words, j)) : grad;
        },
        sum_params ? partial : nullptr, sum_params ? partial + padded(hidden) : nullptr,
        dz_out != nullptr || dinputs != nullptr,
        [&](std::int64_t j, int n, const Vec(&dz)[kRows]) __attribute__((always_inline)) {
            for (int r = 0; r < kRows; ++r) {
                if (dz_out != nullptr) store(dz_out + r * hidden + j, dz[r], n);
                if (dinputs != nullptr) store(dinputs + r * hidden + j, dz[r], n);
            }
        });
}

template <class T>
void backward_tokens(const EmbeddingBwd& args, const float* weight, std::int64_t begin, std::int64_t end,
                     float* dz, float* partial, float* scratch) {
    for (std::int64_t j = 0; j < 2 * padded(args.hidden); ++j) partial[j] = 0.0f;
    std::uint64_t* bits = reinterpret_cast<std::uint64_t*>(scratch);
    std::int64_t token = begin;
    for (; token + 4 <= end; token += 4) backward_block<T, 4>(args, weight, token, dz, partial, bits);
    for (; token < end; ++token) backward_block<T, 1>(args, weight, token, dz, partial, bits);
}

constexpr int kWide = 4;             // vectors of columns that go through the tokens together
constexpr std::int64_t kGroup = 32;  // tokens summed in float

// kVectors vectors of columns from dz on, the last one with `last` lanes, summed over up to kGroup tokens.
template <int kVectors>
FASTBERT_INLINE void sum_group(const float* dz, std::int64_t hidden, const std::int64_t* tokens,
                               std::int64_t count, int last, Vec (&sums)[kVectors]) {
    for (int v = 0; v < kVectors; ++v) sums[v] = zero();
    for (std::int64_t t = 0; t < count; ++t) {
        const float* row = dz + tokens[t] * hidden;
        for (int v = 0; v < kVectors; ++v)
            sums[v] = add(sums[v], load(row + v * kLanes, v + 1 < kVectors ? kLanes : last));
    }
}

template <class T, int kVectors>
FASTBERT_INLINE void sum_columns(const float* dz, std::int64_t hidden, const std::int64_t* tokens,
                                 std::int64_t count, int last, T* out) {
    Vec sums[kVectors];
    if (count <= kGroup) {
        sum_group<kVectors>(dz, hidden, tokens, count, last, sums);
    } else {
        constexpr int kColumns = kVectors * kLanes;
        double total[kColumns] = {};
        alignas(64) float group[kColumns];
        for (std::int64_t t = 0; t < count; t += kGroup) {
            sum_group<kVectors>(dz, hidden, tokens + t, count - t < kGroup ? count - t : kGroup, last, sums);
            for (int v = 0; v < kVectors; ++v) store(group + v * kLanes, sums[v], kLanes);
            for (int i = 0; i < kColumns; ++i) total[i] += group[i];
        }
        for (int i = 0; i < kColumns; ++i) group[i] = static_cast<float>(total[i]);
        for (int v = 0; v < kVectors; ++v) sums[v] = load(group + v * kLanes, kLanes);
    }
    for (int v = 0; v < kVectors; ++v) store(out + v * kLanes, sums[v], v + 1 < kVectors ? kLanes : last);
}

template <class T>
void sum_rows_as(const float* dz, std::int64_t hidden, const std::int64_t* tokens, std::int64_t count, T* out,
                 std::int64_t columns) {
    std::int64_t j = 0;
    for (; j + kWide * kLanes <= columns; j += kWide * kLanes)
        sum_columns<T, kWide>(dz + j, hidden, tokens, count, kLanes, out + j);
    for (; j < columns; j += kLanes) {
        const int n = static_cast<int>(columns - j < kLanes ? columns - j : kLanes);
        sum_columns<T, 1>(dz + j, hidden, tokens, count, n, out + j);
    }
}

void sum_rows(const float* dz, std::int64_t hidden, const std::int64_t* tokens, std::int64_t count,
              DType dtype, void* out, std::int64_t row, std::int64_t column, std::int64_t columns) {
    const std::int64_t at = row * hidden + column;
    switch (dtype) {
        case DType::kFloat32:
            return sum_rows_as(dz + column, hidden, tokens, count, static_cast<float*>(out) + at, columns);
        case DType::kBFloat16:
            return sum_rows_as(dz + column, hidden, tokens, count, static_cast<bf16*>(out) + at, columns);
        case DType::kFloat16:
            return sum_rows_as(dz + column, hidden, tokens, count, static_cast<fp16*>(out) + at, columns);
    }
}

void forward(const EmbeddingFwd& args, const float* weight, const float* bias, std::int64_t begin,
             std::int64_t end, float* scratch) {
    switch (args.dtype) {
        case DType::kFloat32:
            return forward_tokens<float>(args, weight, bias, begin, end, scratch);
        case DType::kBFloat16:
            return forward_tokens<bf16>(args, weight, bias, begin, end, scratch);
        case DType::kFloat16:
            return forward_tokens<fp16>(args, weight, bias, begin, end, scratch);
    }
}

void backward(const EmbeddingBwd& args, const float* weight, std::int64_t begin, std::int64_t end, float* dz,
              float* partial, float* scratch) {
    switch (args.dtype) {
        case DType::kFloat32:
            return backward_tokens<float>(args, weight, begin, end, dz, partial, scratch);
        case DType::kBFloat16:
            return backward_tokens<bf16>(args, weight, begin, end, dz, partial, scratch);
        case DType::kFloat16:
            return backward_tokens<fp16>(args, weight, begin, end, dz, partial, scratch);
    }
}

}  // namespace

extern const EmbeddingKernels embedding_kernels;
const EmbeddingKernels embedding_kernels = {forward, backward, sum_rows};

}  // namespace FASTBERT_ISA
}  // namespace fastbert
