// Vectors of floats for `<op>_simd.cpp`: one small set of functions, once in AVX2 and once in AVX-512.
//
//   Vec            kLanes floats
//   load(p, n)     the first n elements of float, bf16, fp16 or int8 at p, widened; lanes from n on are 0.
//   store(p, v, n) the first n lanes, rounded to nearest even. Neither touches memory past p[n - 1].
//   load_nibbles(p, n)  n integers of 4 bits, less 8: two per byte, the first in the low half. Lanes past the
//                  last byte are -8.
//   neighbours(v)  each lane's neighbour: lanes 2 i and 2 i + 1 exchanged
//   first_of_pairs(v), second_of_pairs(v)  the lower or the upper bf16 of each lane's 32 bits, widened
//   first(v, n)    lanes from n on set to 0
//   kept(v, bits)  lanes whose bit is 0 set to 0
//   sum(v)         of all lanes, in a fixed order
//   load_indices(p, n), multiples(x), plus(a, b)  of integers: the first n at p; 0, x, 2 x, …; their sum
//   gather(p, i, n)  elements p[i] of float or bf16, widened, at the first n lanes' indices. Of bf16 it reads
//                  pairs: elements i - 1 and i, or 0 and 1.
//   philox_keep    dropout bits of a row
// n is 1 … kLanes. If n is the constant kLanes, the compiler leaves a plain load or store.
#pragma once

#if !FASTBERT_X86 && !defined(__AVX2__)
#error "this file is compiled once per instruction set, with its flags"
#endif

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "../dtype.h"

#define FASTBERT_INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__
#include "vec_avx512.h"
#ifdef __AVX512BF16__
#include "vec_avx512_bf16.h"
#endif
#else
#include "vec_avx2.h"
#endif

namespace fastbert {
namespace FASTBERT_ISA {
namespace {

constexpr std::uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;
constexpr std::uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;

struct Dropout {
    std::uint64_t seed;
    std::uint32_t offset, plane, threshold;
};

// Bit i of bits[b] says whether column 64 * (first + b) + i of `row` is kept, for b < blocks: the 16-bit lane
// (col & 7) of Philox4x32-10 with counter (col >> 3, row, plane, offset) is at least the threshold's upper
// half.
FASTBERT_INLINE void philox_keep(const Dropout& dropout, std::uint32_t row, std::int64_t blocks,
                                 std::uint64_t* bits, std::int64_t first = 0) {
    constexpr int kBlocks = kLanes / 8;  // that one vector of counters serves: eight columns a counter
    constexpr std::uint64_t kPairs = 0x0303030303030303ull;
    for (std::int64_t block = 0; block < blocks; block += kBlocks) {
        UVec c0 = iota(static_cast<std::uint32_t>((first + block) * 8)), c1 = broadcast(row);
        UVec c2 = broadcast(dropout.plane), c3 = broadcast(dropout.offset);
        std::uint32_t k0 = static_cast<std::uint32_t>(dropout.seed);
        std::uint32_t k1 = static_cast<std::uint32_t>(dropout.seed >> 32);
        for (int round = 0; round < 10; ++round, k0 += kPhiloxW0, k1 += kPhiloxW1) {
            UVec hi0, lo0, hi1, lo1;
            multiply(c0, kPhiloxM0, hi0, lo0);
            multiply(c2, kPhiloxM1, hi1, lo1);
            c0 = exclusive_or(hi1, c1, broadcast(k0));
            c2 = exclusive_or(hi0, c3, broadcast(k1));
            c1 = lo1;
            c3 = lo0;
        }
        const UVec words[4] = {c0, c1, c2, c3};
        std::uint64_t masks[4];  // bits 2 i and 2 i + 1: the halves of counter i's word
        for (int word = 0; word < 4; ++word) masks[word] = at_least16(words[word], dropout.threshold >> 16);
        for (int b = 0; b < kBlocks && block + b < blocks; ++b) {
            std::uint64_t kept = 0;
            for (int word = 0; word < 4; ++word)
                kept |= _pdep_u64(masks[word] >> (16 * b), kPairs << (2 * word));
            bits[block + b] = kept;
        }
    }
}

// f(column, k, n) for every vector of a row: n lanes from `column` on. k cycles through 0 … 3, so that a sum
// can have four accumulators.
template <class F>
FASTBERT_INLINE void for_vectors(std::int64_t columns, const F& f) {
    std::int64_t column = 0;
    for (; column + 4 * kLanes <= columns; column += 4 * kLanes) {
        f(column, 0, kLanes);
        f(column + kLanes, 1, kLanes);
        f(column + 2 * kLanes, 2, kLanes);
        f(column + 3 * kLanes, 3, kLanes);
    }
    for (; column + kLanes <= columns; column += kLanes) f(column, 0, kLanes);
    if (column < columns) f(column, 0, static_cast<int>(columns - column));
}

FASTBERT_INLINE float sum4(const Vec (&a)[4]) { return sum(add(add(a[0], a[1]), add(a[2], a[3]))); }

}  // namespace
}  // namespace FASTBERT_ISA
}  // namespace fastbert
