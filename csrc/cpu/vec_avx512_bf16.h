// AVX-512-BF16, in addition to vec_avx512.h: sums of products of pairs of bf16. See vec.h.
//
//   Pair               two consecutive bf16 of a sum
//   Pairs              kLanes of them
//   fma(a, b, c)       per lane c + a.second * b.second + a.first * b.first, by vdpbf16ps: products are
//                      exact, each sum is rounded to float (nearest even), whatever MXCSR says. A subnormal
//                      operand counts as 0, a subnormal result becomes 0.
//   narrow(v)          rounded to bf16 (nearest even), by vcvtneps2bf16: subnormals become 0, as fma reads
//                      them; NaN stays NaN
//   interleave(a, b)   lane i is {a[i], b[i]}
//   load_two(p, n)     the first n of 2 kLanes bf16, zeros if n <= 0; float is rounded as by narrow.
//                      lower_pairs and upper_pairs interleave the lower and the upper halves of two such
//                      vectors
//   transpose(block)   of 16 x 16 pairs
#pragma once

namespace fastbert {
namespace FASTBERT_ISA {
namespace {

struct Pair {
    std::uint16_t first, second;
};
using Words = __m256i;  // kLanes bf16
using Pairs = __m512bh;

FASTBERT_INLINE Pairs load(const Pair* p, int) { return (Pairs)_mm512_loadu_si512(p); }
FASTBERT_INLINE void store(Pair* p, __m512i pairs) { _mm512_storeu_si512(p, pairs); }
FASTBERT_INLINE Pairs broadcast(Pair pair) {
    std::uint32_t bits;
    std::memcpy(&bits, &pair, sizeof bits);
    return (Pairs)_mm512_set1_epi32(static_cast<int>(bits));
}
FASTBERT_INLINE Vec fma(Pairs a, Pairs b, Vec c) { return _mm512_dpbf16_ps(c, a, b); }
FASTBERT_INLINE Words narrow(Vec v) { return (Words)_mm512_cvtneps_pbh(v); }
FASTBERT_INLINE __m512i interleave(Words first, Words second) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(first),
                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
}
FASTBERT_INLINE __m512i load_two(const bf16* p, int n) {
    if (n >= 2 * kLanes) return _mm512_loadu_si512(p);
    return n <= 0 ? _mm512_setzero_si512()
                  : _mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << n) - 1), p);
}
FASTBERT_INLINE __m512i load_two(const float* p, int n) {
    const auto part = [n](int from) { return n >= from + kLanes ? kLanes : n > from ? n - from : 0; };
    return (__m512i)_mm512_cvtne2ps_pbh(load(p + kLanes, part(kLanes)), load(p, part(0)));
}
// Word 2 i is word i of the first vector (from `start` on), word 2 i + 1 that of the second.
FASTBERT_INLINE __m512i pairs_from(int start, __m512i first, __m512i second) {
    const __m512i words = _mm512_add_epi32(_mm512_set1_epi32(0x00200000 + 0x00010001 * start),
                                           _mm512_mullo_epi32(iota(0), _mm512_set1_epi32(0x00010001)));
    return _mm512_permutex2var_epi16(first, words, second);
}
FASTBERT_INLINE __m512i lower_pairs(__m512i first, __m512i second) { return pairs_from(0, first, second); }
FASTBERT_INLINE __m512i upper_pairs(__m512i first, __m512i second) {
    return pairs_from(kLanes, first, second);
}

FASTBERT_INLINE void transpose(__m512i (&block)[16]) {
    __m512i half[16];
#pragma GCC unroll 4
    // First 4 x 4 within each 128 bits.
    for (int i = 0; i < 16; i += 4) {
        const __m512i low0 = _mm512_unpacklo_epi32(block[i], block[i + 1]);
        const __m512i high0 = _mm512_unpackhi_epi32(block[i], block[i + 1]);
        const __m512i low1 = _mm512_unpacklo_epi32(block[i + 2], block[i + 3]);
        const __m512i high1 = _mm512_unpackhi_epi32(block[i + 2], block[i + 3]);
        half[i] = _mm512_unpacklo_epi64(low0, low1);
        half[i + 1] = _mm512_unpackhi_epi64(low0, low1);
        half[i + 2] = _mm512_unpacklo_epi64(high0, high1);
        half[i + 3] = _mm512_unpackhi_epi64(high0, high1);
    }
#pragma GCC unroll 4
    // Then 4 x 4 blocks of 128 bits.
    for (int i = 0; i < 4; ++i) {
        const __m512i even0 = _mm512_shuffle_i32x4(half[i], half[i + 4], 0x88);
        const __m512i odd0 = _mm512_shuffle_i32x4(half[i], half[i + 4], 0xdd);
        const __m512i even1 = _mm512_shuffle_i32x4(half[i + 8], half[i + 12], 0x88);
        const __m512i odd1 = _mm512_shuffle_i32x4(half[i + 8], half[i + 12], 0xdd);
        block[i] = _mm512_shuffle_i32x4(even0, even1, 0x88);
        block[i + 4] = _mm512_shuffle_i32x4(odd0, odd1, 0x88);
        block[i + 8] = _mm512_shuffle_i32x4(even0, even1, 0xdd);
        block[i + 12] = _mm512_shuffle_i32x4(odd0, odd1, 0xdd);
    }
}

}  // namespace
}  // namespace FASTBERT_ISA
}  // namespace fastbert
