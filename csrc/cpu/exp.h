// exp of a vector, and what else softmax needs. Needs no include before it: includes vec.h.
#pragma once

#include "vec.h"

namespace fastbert {
namespace FASTBERT_ISA {
namespace {

#ifdef __AVX512F__
FASTBERT_INLINE Vec divide(Vec a, Vec b) { return _mm512_div_ps(a, b); }
FASTBERT_INLINE Vec maximum(Vec a, Vec b) { return _mm512_max_ps(a, b); }
FASTBERT_INLINE float largest(Vec v) { return _mm512_reduce_max_ps(v); }
FASTBERT_INLINE Vec first_or(Vec v, int n, float other) {
    return _mm512_mask_mov_ps(broadcast(other), mask_of(n), v);
}
FASTBERT_INLINE Vec nearest(Vec v) {
    return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
FASTBERT_INLINE Vec times_power_of_2(Vec v, Vec power) { return _mm512_scalef_ps(v, power); }
#else
FASTBERT_INLINE Vec divide(Vec a, Vec b) { return _mm256_div_ps(a, b); }
FASTBERT_INLINE Vec maximum(Vec a, Vec b) { return _mm256_max_ps(a, b); }
FASTBERT_INLINE float largest(Vec v) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
FASTBERT_INLINE Vec first_or(Vec v, int n, float other) {
    return _mm256_blendv_ps(broadcast(other), v, _mm256_castsi256_ps(mask_of(n)));
}
FASTBERT_INLINE Vec nearest(Vec v) {
    return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// In two halves: the power goes down to -150, which one exponent field cannot hold.
FASTBERT_INLINE Vec times_power_of_2(Vec v, Vec power) {
    const __m256i e = _mm256_cvtps_epi32(power), low = _mm256_srai_epi32(e, 1),
                  high = _mm256_sub_epi32(e, low);
    const __m256i bias = _mm256_set1_epi32(127);
    const Vec a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(low, bias), 23));
    const Vec b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(high, bias), 23));
    return mul(mul(v, a), b);
}
#endif

// exp(x) for x <= 0, within one unit in the last place. -inf and underflows give 0, NaN gives NaN.
// x = m ln 2 + r with |r| <= ln(2) / 2; exp(r) by its series up to r^7, whose remainder is below 6e-9.
FASTBERT_INLINE Vec exponential(Vec x) {
    x = maximum(broadcast(-104.0f), x);  // exp(-104) rounds to 0; the second operand is returned for NaN
    const Vec m = nearest(mul(x, broadcast(1.44269504088896341f)));
    Vec r = fnma(m, broadcast(0.693145751953125f), x);  // ln 2 in two parts, the first with 15 bits
    r = fnma(m, broadcast(1.428606820309417e-6f), r);
    Vec series = broadcast(1.0f / 5040.0f);
    series = fma(series, r, broadcast(1.0f / 720.0f));
    series = fma(series, r, broadcast(1.0f / 120.0f));
    series = fma(series, r, broadcast(1.0f / 24.0f));
    series = fma(series, r, broadcast(1.0f / 6.0f));
    series = fma(series, r, broadcast(0.5f));
    series = fma(series, r, broadcast(1.0f));
    series = fma(series, r, broadcast(1.0f));
    return times_power_of_2(series, m);
}

}  // namespace
}  // namespace FASTBERT_ISA
}  // namespace fastbert
