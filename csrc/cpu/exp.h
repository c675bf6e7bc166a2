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
// The integer nearest to v in float, and what `times_power_of_2` takes for it.
struct Power {
    Vec exponent, code;
};
FASTBERT_INLINE Power power_of(Vec x, float factor) {
    const Vec exponent = nearest(mul(x, broadcast(factor)));
    return {exponent, exponent};
}
FASTBERT_INLINE Vec times_power_of_2(Vec v, Vec code) { return _mm512_scalef_ps(v, code); }
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
// The sum with 1.5 2^23 has the nearest integer in its lowest bits. 191 = 127 + 64: with it, these are the
// exponent field of 2^(64 + integer), a normal number down to -150.
constexpr float kShifted = 12582912.0f + 191.0f;
struct Power {
    Vec exponent, code;
};
FASTBERT_INLINE Power power_of(Vec x, float factor) {
    const Vec code = fma(x, broadcast(factor), broadcast(kShifted));
    return {sub(code, broadcast(kShifted)), code};
}
FASTBERT_INLINE Vec times_power_of_2(Vec v, Vec code) {
    const Vec power = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(code), 23));
    return mul(mul(v, power), broadcast(0x1p-64f));
}
#endif

// exp(x) for x <= 0, within one unit in the last place. -inf and underflows give 0, NaN gives NaN.
// x = m ln 2 + r with |r| <= ln(2) / 2; exp(r) by a polynomial that is closest in its relative error, 4e-9.
FASTBERT_INLINE Vec exponential(Vec x) {
    x = maximum(broadcast(-104.0f), x);  // exp(-104) rounds to 0; the second operand is returned for NaN
    const Power m = power_of(x, 1.44269504088896341f);
    Vec r = fnma(m.exponent, broadcast(0.693145751953125f), x);  // ln 2 in two parts, the first with 15 bits
    r = fnma(m.exponent, broadcast(1.428606820309417e-6f), r);
    Vec series = broadcast(0.0013814599f);
    series = fma(series, r, broadcast(0.008368717f));
    series = fma(series, r, broadcast(0.04166839f));
    series = fma(series, r, broadcast(0.16666521f));
    series = fma(series, r, broadcast(0.49999994f));
    series = fma(series, r, broadcast(1.0f));
    series = fma(series, r, broadcast(1.0f));
    return times_power_of_2(series, m.code);
}

}  // namespace
}  // namespace FASTBERT_ISA
}  // namespace fastbert
