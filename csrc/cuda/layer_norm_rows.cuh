// What LayerNorm's forward and backward on a GPU share: parameters, dropout of a row, alignment.
#pragma once

#include "common.cuh"
#include "layer_norm.h"

namespace fastbert {
namespace cuda {

// The threads of a block that owns one row.
constexpr int kRowThreads = 256;

__device__ __forceinline__ float load_param(const Param& param, std::int64_t column) {
    switch (param.dtype) {
        case DType::kFloat32:
            return static_cast<const float*>(param.data)[column];
        case DType::kBFloat16:
            return widen(static_cast<const bf16*>(param.data)[column]);
        default:
            return widen(static_cast<const fp16*>(param.data)[column]);
    }
}

// Loads kPack<T> parameters, stored as T or as float.
template <class T>
__device__ __forceinline__ void load_params(const Param& param, std::int64_t column, float* out) {
    if (param.dtype == DType::kFloat32) {
#pragma unroll
        for (int i = 0; i < kPack<T>; i += 4)
            widen_pack(load_pack(static_cast<const float*>(param.data) + column + i), out + i);
    } else {
        widen_pack(load_pack(static_cast<const T*>(param.data) + column), out);
    }
}

// N consecutive values of `p`, whose packs may be smaller than N.
template <int N, class T>
__device__ __forceinline__ void load_values(const T* p, float* out) {
#pragma unroll
    for (int i = 0; i < N; i += kPack<T>) widen_pack(load_pack(p + i), out + i);
}
template <int N, class T>
__device__ __forceinline__ void store_values(T* p, const float* values) {
#pragma unroll
    for (int i = 0; i < N; i += kPack<T>) store_pack(p + i, values + i);
}

// Multiplies kCount values, 4 or 8, from `column` (a multiple of kCount) on, by 1 / (1 - p) or by 0.
template <int kCount>
__device__ __forceinline__ void drop(const DropoutArgs& dropout, std::uint64_t seed, std::int64_t row,
                                     std::int64_t column, float* values) {
    static_assert(kCount == 4 || kCount == 8, "one call of Philox");
    const Philox bits = philox(seed, static_cast<std::uint32_t>(column >> 3), static_cast<std::uint32_t>(row),
                               0, dropout.offset);
    // No indexing by `column`: it would go through memory.
    const bool late = kCount == 4 && (column & 4) != 0;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
        const std::uint32_t word = late ? bits.word[(k >> 1) | 2] : bits.word[k >> 1];
        values[k] = kept_lane(word, k & 1, dropout.threshold) ? values[k] * dropout.scale : 0.0f;
    }
}

__device__ __forceinline__ float drop_one(const DropoutArgs& dropout, std::int64_t row, std::int64_t column,
                                          float value) {
    const Philox bits = philox(*dropout.seed, static_cast<std::uint32_t>(column >> 3),
                               static_cast<std::uint32_t>(row), 0, dropout.offset);
    const int place = static_cast<int>(column >> 1 & 3);
    // No indexing: it would go through memory.
    const std::uint32_t first = place == 0 ? bits.word[0] : bits.word[1];
    const std::uint32_t last = place == 2 ? bits.word[2] : bits.word[3];
    const std::uint32_t word = place < 2 ? first : last;
    // Rounded, as the sum takes it: a difference from the mean of one column is 0.
    return kept_lane(word, column & 1, dropout.threshold) ? rounded_product(value, dropout.scale) : 0.0f;
}

// --- host ---

inline bool aligned(const Param& param) { return cuda::aligned(param.data); }

template <class T>
bool rows_aligned(const void* p, std::int64_t stride) {
    return cuda::aligned(p) && (p == nullptr || stride % kPack<T> == 0);
}

}  // namespace cuda
}  // namespace fastbert
