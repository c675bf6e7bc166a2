// AVX2, FMA, F16C, BMI2: eight lanes; tails of 16-bit elements go through a small buffer. See vec.h.
#pragma once

namespace fastbert {
namespace FASTBERT_ISA {
namespace {

constexpr int kLanes = 8;
using Vec = __m256;
using UVec = __m256i;

FASTBERT_INLINE UVec iota(std::uint32_t start) {
    return _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(start)),
                            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
FASTBERT_INLINE __m256i mask_of(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), iota(0)); }

FASTBERT_INLINE Vec zero() { return _mm256_setzero_ps(); }
FASTBERT_INLINE Vec broadcast(float x) { return _mm256_set1_ps(x); }
FASTBERT_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
FASTBERT_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
FASTBERT_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
FASTBERT_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
FASTBERT_INLINE Vec fnma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a b
FASTBERT_INLINE Vec first(Vec v, int n) {
    return n == kLanes ? v : _mm256_and_ps(v, _mm256_castsi256_ps(mask_of(n)));
}
FASTBERT_INLINE Vec kept(Vec v, std::uint64_t bits) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i own = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits & 0xff)), lane);
    return _mm256_and_ps(v, _mm256_castsi256_ps(_mm256_cmpeq_epi32(own, lane)));
}
FASTBERT_INLINE Vec neighbours(Vec v) { return _mm256_permute_ps(v, 0xB1); }
FASTBERT_INLINE float sum(Vec v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

FASTBERT_INLINE Vec load(const float* p, int n) {
    return n == kLanes ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, mask_of(n));
}
FASTBERT_INLINE __m128i load_words(const void* p, int n) {
    if (n == kLanes) return _mm_loadu_si128(static_cast<const __m128i*>(p));
    alignas(16) std::uint16_t buffer[kLanes] = {};
    for (int i = 0; i < n; ++i) buffer[i] = static_cast<const std::uint16_t*>(p)[i];
    return _mm_load_si128(reinterpret_cast<const __m128i*>(buffer));
}
FASTBERT_INLINE Vec load(const bf16* p, int n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_words(p, n)), 16));
}
FASTBERT_INLINE Vec load(const fp16* p, int n) { return _mm256_cvtph_ps(load_words(p, n)); }
FASTBERT_INLINE __m128i load_bytes(const void* p, int n) {
    if (n == kLanes) return _mm_loadl_epi64(static_cast<const __m128i*>(p));
    alignas(16) std::uint8_t buffer[16] = {};
    for (int i = 0; i < n; ++i) buffer[i] = static_cast<const std::uint8_t*>(p)[i];
    return _mm_load_si128(reinterpret_cast<const __m128i*>(buffer));
}
FASTBERT_INLINE Vec load(const std::int8_t* p, int n) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_bytes(p, n)));
}
// Bits [begin, begin + kBits) of each of the words at p, a signed integer.
template <int begin, int kBits>
FASTBERT_INLINE Vec load_part(const void* p) {
    const UVec top =
        _mm256_slli_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)), 32 - kBits - begin);
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(top, 32 - kBits));
}
FASTBERT_INLINE Vec load_nibbles(const std::uint8_t* p, int n) {
    const __m128i bytes = load_bytes(p, (n + 1) / 2), low = _mm_set1_epi8(15);
    const __m128i both =
        _mm_unpacklo_epi8(_mm_and_si128(bytes, low), _mm_and_si128(_mm_srli_epi16(bytes, 4), low));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_sub_epi8(both, _mm_set1_epi8(8))));
}
FASTBERT_INLINE Vec first_of_pairs(Vec pairs) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16));
}
FASTBERT_INLINE Vec second_of_pairs(Vec pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(pairs), _mm256_set1_epi32(-0x10000)));
}

FASTBERT_INLINE void store(float* p, Vec v, int n) {
    if (n == kLanes)
        _mm256_storeu_ps(p, v);
    else
        _mm256_maskstore_ps(p, mask_of(n), v);
}
FASTBERT_INLINE void store_words(void* p, __m128i words, int n) {
    if (n == kLanes) {
        _mm_storeu_si128(static_cast<__m128i*>(p), words);
        return;
    }
    alignas(16) std::uint16_t buffer[kLanes];
    _mm_store_si128(reinterpret_cast<__m128i*>(buffer), words);
    for (int i = 0; i < n; ++i) static_cast<std::uint16_t*>(p)[i] = buffer[i];
}
FASTBERT_INLINE void store(bf16* p, Vec v, int n) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet =
        _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));  // a NaN must not become infinity
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i result = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    store_words(p, _mm_packus_epi32(_mm256_castsi256_si128(result), _mm256_extracti128_si256(result, 1)), n);
}
FASTBERT_INLINE void store(fp16* p, Vec v, int n) {
    store_words(p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), n);
}

FASTBERT_INLINE UVec broadcast(std::uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
FASTBERT_INLINE UVec load_indices(const std::int32_t* p, int n) {
    return _mm256_maskload_epi32(p, mask_of(n));
}
FASTBERT_INLINE UVec multiples(std::int32_t x) { return _mm256_mullo_epi32(iota(0), _mm256_set1_epi32(x)); }
FASTBERT_INLINE UVec plus(UVec a, UVec b) { return _mm256_add_epi32(a, b); }
FASTBERT_INLINE Vec gather(const float* p, UVec i, int n) {
    return _mm256_mask_i32gather_ps(zero(), p, i, _mm256_castsi256_ps(mask_of(n)), 4);
}
FASTBERT_INLINE Vec gather(const bf16* p, UVec i, int n) {
    const UVec none = _mm256_setzero_si256();
    const UVec before = _mm256_max_epi32(_mm256_sub_epi32(i, _mm256_set1_epi32(1)), none);
    const UVec pairs =
        _mm256_mask_i32gather_epi32(none, reinterpret_cast<const int*>(p), before, mask_of(n), 2);
    const UVec shift = _mm256_and_si256(_mm256_cmpeq_epi32(i, none), _mm256_set1_epi32(16));
    return second_of_pairs(_mm256_castsi256_ps(_mm256_sllv_epi32(pairs, shift)));
}
FASTBERT_INLINE UVec exclusive_or(UVec a, UVec b, UVec c) {
    return _mm256_xor_si256(a, _mm256_xor_si256(b, c));
}
FASTBERT_INLINE void multiply(UVec a, std::uint32_t b, UVec& hi, UVec& lo) {
    const UVec factor = broadcast(b);
    const UVec even = _mm256_mul_epu32(a, factor);
    const UVec odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), factor);
    hi = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
    lo = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
}
// Bits 2 i and 2 i + 1: whether the low and the high half of lane i are at least b.
FASTBERT_INLINE std::uint64_t at_least16(UVec a, std::uint32_t b) {
    const UVec limit = _mm256_set1_epi16(static_cast<short>(b));  // unsigned a >= b  <=>  max(a, b) == a
    const UVec found = _mm256_cmpeq_epi16(_mm256_max_epu16(a, limit), a);
    return _pext_u32(static_cast<std::uint32_t>(_mm256_movemask_epi8(found)), 0x55555555u);
}

}  // namespace
}  // namespace FASTBERT_ISA
}  // namespace fastbert
