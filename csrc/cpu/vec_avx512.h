// AVX-512 (F, BW, VL, DQ): sixteen lanes; tails by mask registers, which also keep loads from faulting. See
// vec.h.
#pragma once

namespace fastbert {
namespace FASTBERT_ISA {
namespace {

constexpr int kLanes = 16;
using Vec = __m512;
using UVec = __m512i;

FASTBERT_INLINE __mmask16 mask_of(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

FASTBERT_INLINE Vec zero() { return _mm512_setzero_ps(); }
FASTBERT_INLINE Vec broadcast(float x) { return _mm512_set1_ps(x); }
FASTBERT_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
FASTBERT_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
FASTBERT_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
FASTBERT_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
FASTBERT_INLINE Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
FASTBERT_INLINE Vec first(Vec v, int n) { return n == kLanes ? v : _mm512_maskz_mov_ps(mask_of(n), v); }
FASTBERT_INLINE Vec kept(Vec v, std::uint64_t bits) {
    return _mm512_maskz_mov_ps(static_cast<__mmask16>(bits), v);
}
FASTBERT_INLINE Vec neighbours(Vec v) { return _mm512_permute_ps(v, 0xB1); }
FASTBERT_INLINE float sum(Vec v) { return _mm512_reduce_add_ps(v); }

FASTBERT_INLINE Vec load(const float* p, int n) {
    return n == kLanes ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps(mask_of(n), p);
}
FASTBERT_INLINE __m256i load_words(const void* p, int n) {
    return n == kLanes ? _mm256_loadu_si256(static_cast<const __m256i*>(p))
                       : _mm256_maskz_loadu_epi16(mask_of(n), p);
}
FASTBERT_INLINE Vec load(const bf16* p, int n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_words(p, n)), 16));
}
FASTBERT_INLINE Vec load(const fp16* p, int n) { return _mm512_cvtph_ps(load_words(p, n)); }
FASTBERT_INLINE Vec load(const std::int8_t* p, int n) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask_of(n), p)));
}
// Bits [begin, begin + kBits) of each of the words at p, a signed integer.
template <int begin, int kBits>
FASTBERT_INLINE Vec load_part(const void* p) {
    const UVec top = _mm512_slli_epi32(_mm512_loadu_si512(p), 32 - kBits - begin);
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(top, 32 - kBits));
}
FASTBERT_INLINE Vec load_nibbles(const std::uint8_t* p, int n) {
    const __m128i bytes = _mm_maskz_loadu_epi8(mask_of((n + 1) / 2), p), low = _mm_set1_epi8(15);
    const __m128i both =
        _mm_unpacklo_epi8(_mm_and_si128(bytes, low), _mm_and_si128(_mm_srli_epi16(bytes, 4), low));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_sub_epi8(both, _mm_set1_epi8(8))));
}
FASTBERT_INLINE Vec first_of_pairs(Vec pairs) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16));
}
FASTBERT_INLINE Vec second_of_pairs(Vec pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs), _mm512_set1_epi32(-0x10000)));
}

FASTBERT_INLINE void store(float* p, Vec v, int n) {
    if (n == kLanes)
        _mm512_storeu_ps(p, v);
    else
        _mm512_mask_storeu_ps(p, mask_of(n), v);
}
FASTBERT_INLINE void store_words(void* p, __m256i words, int n) {
    if (n == kLanes)
        _mm256_storeu_si256(static_cast<__m256i*>(p), words);
    else
        _mm256_mask_storeu_epi16(p, mask_of(n), words);
}
FASTBERT_INLINE void store(bf16* p, Vec v, int n) {
#ifdef __AVX512BF16__
    // vcvtneps2bf16 rounds the same, except that subnormals become 0.
    constexpr int kSubnormal = 0x20;
    if (__builtin_expect(_mm512_fpclass_ps_mask(v, kSubnormal) == 0, 1))
        return store_words(p, (__m256i)_mm512_cvtneps_pbh(v), n);
#endif
    // The rounding by hand: add half a step, less one for even.
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet =
        _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));  // a NaN must not become infinity
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i result = _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16);
    store_words(p, _mm512_cvtepi32_epi16(result), n);
}
FASTBERT_INLINE void store(fp16* p, Vec v, int n) {
    store_words(p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), n);
}

FASTBERT_INLINE UVec broadcast(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
FASTBERT_INLINE UVec iota(std::uint32_t start) {
    return _mm512_add_epi32(broadcast(start),
                            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}
FASTBERT_INLINE UVec load_indices(const std::int32_t* p, int n) {
    return n == kLanes ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi32(mask_of(n), p);
}
FASTBERT_INLINE UVec multiples(std::int32_t x) { return _mm512_mullo_epi32(iota(0), _mm512_set1_epi32(x)); }
FASTBERT_INLINE UVec plus(UVec a, UVec b) { return _mm512_add_epi32(a, b); }
FASTBERT_INLINE Vec gather(const float* p, UVec i, int n) {
    return n == kLanes ? _mm512_i32gather_ps(i, p, 4) : _mm512_mask_i32gather_ps(zero(), mask_of(n), i, p, 4);
}
FASTBERT_INLINE Vec gather(const bf16* p, UVec i, int n) {
    const UVec none = _mm512_setzero_si512();
    const UVec before = _mm512_max_epi32(_mm512_sub_epi32(i, _mm512_set1_epi32(1)), none);
    const UVec pairs = _mm512_mask_i32gather_epi32(none, mask_of(n), before, p, 2);
    return second_of_pairs(
        _mm512_castsi512_ps(_mm512_mask_slli_epi32(pairs, _mm512_cmpeq_epi32_mask(i, none), pairs, 16)));
}
FASTBERT_INLINE UVec exclusive_or(UVec a, UVec b, UVec c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }
FASTBERT_INLINE void multiply(UVec a, std::uint32_t b, UVec& hi, UVec& lo) {
    const UVec factor = broadcast(b);
    const UVec even = _mm512_mul_epu32(a, factor);
    const UVec odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), factor);
    hi = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xAAAA, odd);
    lo = _mm512_mask_mov_epi32(even, 0xAAAA, _mm512_slli_epi64(odd, 32));
}
// Bits 2 i and 2 i + 1: whether the low and the high half of lane i are at least b.
FASTBERT_INLINE std::uint64_t at_least16(UVec a, std::uint32_t b) {
    return _mm512_cmpge_epu16_mask(a, _mm512_set1_epi16(static_cast<short>(b)));
}

}  // namespace
}  // namespace FASTBERT_ISA
}  // namespace fastbert
