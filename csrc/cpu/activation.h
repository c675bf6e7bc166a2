// Activations of a vector and their derivatives. Needs no include before it: includes exp.h.
//
// The normal distribution Φ for x = |z|: Φ(-x) = exp(-x² / 2) H(x), where H falls slowly. H is fitted as
// t Q(t - 3/4) with t = 1 / (1 + 0.4 x), to 4e-8 of its value for every x. So the negative tail keeps its
// relative accuracy, which 1 + erf loses. Below x = 1.25, where Φ is near 1/2, results in float use
// Φ(z) = 1/2 + z P(z²) instead, to 3e-10.
#pragma once

#include "exp.h"
#include "linear.h"
#include "normal_table.h"

namespace fastbert {
namespace FASTBERT_ISA {
namespace {

#ifdef __AVX512F__
FASTBERT_INLINE Vec magnitude(Vec v) { return _mm512_abs_ps(v); }
// a where v's sign bit is set, else b.
FASTBERT_INLINE Vec where_negative(Vec v, Vec a, Vec b) {
    return _mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(v)), b, a);
}
// a where x < y, else (and for NaN) b.
FASTBERT_INLINE Vec where_less(Vec x, Vec y, Vec a, Vec b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), b, a);
}
#else
FASTBERT_INLINE Vec magnitude(Vec v) { return _mm256_andnot_ps(broadcast(-0.0f), v); }
FASTBERT_INLINE Vec where_negative(Vec v, Vec a, Vec b) { return _mm256_blendv_ps(b, a, v); }
FASTBERT_INLINE Vec where_less(Vec x, Vec y, Vec a, Vec b) {
    return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_LT_OQ));
}
#endif

struct Normal {
    Vec distribution, exponential;  // Φ(z), exp(-z² / 2)
};

// `fine`: with float's own accuracy around 0, which is invisible in a 16-bit result.
FASTBERT_INLINE Normal normal(Vec z, bool fine) {
    const Vec square = mul(z, z), x = magnitude(z);
    const Vec e = exponential(mul(square, broadcast(-0.5f)));
    const Vec t = divide(broadcast(1.0f), fma(x, broadcast(0.4f), broadcast(1.0f)));
    const Vec s = sub(t, broadcast(0.75f));
    Vec q = broadcast(0.0298310053f);
    q = fma(q, s, broadcast(0.0356753357f));
    q = fma(q, s, broadcast(-0.0296828691f));
    q = fma(q, s, broadcast(-0.0107795643f));
    q = fma(q, s, broadcast(0.0596473515f));
    q = fma(q, s, broadcast(-0.0425069593f));
    q = fma(q, s, broadcast(-0.107303642f));
    q = fma(q, s, broadcast(0.155805543f));
    q = fma(q, s, broadcast(0.441154897f));
    q = fma(q, s, broadcast(0.381761611f));
    const Vec tail = mul(mul(e, t), q);
    Vec distribution = where_negative(z, tail, sub(broadcast(1.0f), tail));
    if (fine) {
        Vec p = broadcast(4.76066873e-07f);
        p = fma(p, square, broadcast(-9.05840716e-06f));
        p = fma(p, square, broadcast(0.000115032104f));
        p = fma(p, square, broadcast(-0.00118710962f));
        p = fma(p, square, broadcast(0.00997349992f));
        p = fma(p, square, broadcast(-0.0664903745f));
        p = fma(p, square, broadcast(0.398942292f));
        distribution = where_less(x, broadcast(1.25f), fma(p, z, broadcast(0.5f)), distribution);
    }
    return {distribution, e};
}

// Φ(z) alone, for GELU forward. AVX-512 looks up 16 numbers of a table in one instruction, which takes half
// the time.
#ifdef __AVX512F__
__attribute__((noinline)) Vec far_distribution(Vec z) { return normal(z, true).distribution; }

FASTBERT_INLINE Vec of_interval(const float* table, __m512i interval) {
    return _mm512_permutex2var_ps(_mm512_load_ps(table), interval, _mm512_load_ps(table + kLanes));
}

FASTBERT_INLINE Vec distribution(Vec z, bool) {
    const Vec x = magnitude(z);
    // Also for NaN.
    if (__builtin_expect(_mm512_cmp_ps_mask(x, broadcast(5.98f), _CMP_NLT_UQ) != 0, 0))
        return far_distribution(z);
    const __m512i interval = _mm512_cvttps_epi32(mul(x, broadcast(32.0f / 6.0f)));
    const Vec t = sub(x, of_interval(kPoint, interval));
    Vec slope = of_interval(kTail[6], interval);
#pragma GCC unroll 8
    for (int i = 5; i >= 1; --i) slope = fma(slope, t, of_interval(kTail[i], interval));
    // 1 - Φ(-x) for positive z. It is exact at the interval's point, so that only one rounding is left.
    const Vec at_point = of_interval(kTail[0], interval);
    const __mmask16 positive = _knot_mask16(_mm512_movepi32_mask(_mm512_castps_si512(z)));
    return fma(_mm512_mask_sub_ps(t, positive, zero(), t), slope,
               _mm512_mask_sub_ps(at_point, positive, broadcast(1.0f), at_point));
}
#else
FASTBERT_INLINE Vec distribution(Vec z, bool fine) { return normal(z, fine).distribution; }
#endif

struct Logistic {
    Vec value, complement;  // σ(x), 1 - σ(x)
};

FASTBERT_INLINE Logistic logistic(Vec x) {
    const Vec e = exponential(sub(zero(), magnitude(x)));
    const Vec r = divide(broadcast(1.0f), add(broadcast(1.0f), e)), small = mul(e, r);
    return {where_negative(x, small, r), where_negative(x, r, small)};
}

// (1 + tanh(√(2/π) (z + 0.044715 z³))) / 2 is the logistic function of twice that argument.
FASTBERT_INLINE Logistic tanh_logistic(Vec z) {
    const Vec cubic =
        fma(mul(z, z), broadcast(0.044715f * 1.5957691216057308f), broadcast(1.5957691216057308f));
    return logistic(mul(z, cubic));
}

// Below 0.625 by an odd polynomial, to 5e-9 of its value: 1 - 2 σ(-2 |z|) would lose the digits there.
FASTBERT_INLINE Vec hyperbolic_tangent(Vec z) {
    const Vec square = mul(z, z), x = magnitude(z);
    Vec p = broadcast(-0.00570498686f);
    p = fma(p, square, broadcast(0.0206390861f));
    p = fma(p, square, broadcast(-0.0537397154f));
    p = fma(p, square, broadcast(0.133314416f));
    p = fma(p, square, broadcast(-0.333332807f));
    const Vec near = fma(mul(z, square), p, z);
    const Vec far = fma(logistic(add(x, x)).complement, broadcast(-2.0f), broadcast(1.0f));
    return where_less(x, broadcast(0.625f), near, where_negative(z, sub(zero(), far), far));
}

template <Activation kind>
FASTBERT_INLINE Vec activate(Vec z, bool fine) {
    switch (kind) {
        case Activation::kGelu:
            return mul(z, distribution(z, fine));
        case Activation::kGeluTanh:
            return mul(z, tanh_logistic(z).value);
        case Activation::kRelu:
            return maximum(zero(), z);  // the second operand is returned for NaN
        case Activation::kSilu:
            return mul(z, logistic(z).value);
        case Activation::kTanh:
            return hyperbolic_tangent(z);
        default:
            return z;
    }
}

// g act'(z)
template <Activation kind>
FASTBERT_INLINE Vec activate_bwd(Vec g, Vec z, bool fine) {
    switch (kind) {
        case Activation::kGelu: {
            const Normal n = normal(z, fine);
            return mul(g, fma(mul(z, n.exponential), broadcast(0.398942280401432678f), n.distribution));
        }
        case Activation::kGeluTanh: {
            const Logistic l = tanh_logistic(z);
            const Vec slope =
                fma(mul(z, z), broadcast(0.134145f * 1.5957691216057308f), broadcast(1.5957691216057308f));
            // Far out, z slope overflows and σ (1 - σ) is 0.
            const Vec both = mul(l.value, l.complement);
            return mul(g, where_less(zero(), both, fma(mul(z, slope), both, l.value), l.value));
        }
        case Activation::kRelu:
            return where_less(zero(), z, g, where_less(z, broadcast(__builtin_inff()), zero(), g));
        case Activation::kSilu: {
            const Logistic l = logistic(z);
            return mul(mul(g, l.value), fma(z, l.complement, broadcast(1.0f)));
        }
        case Activation::kTanh: {
            const Logistic l = logistic(add(z, z));
            return mul(g, mul(mul(l.value, l.complement), broadcast(4.0f)));
        }
        default:
            return g;
    }
}

}  // namespace
}  // namespace FASTBERT_ISA
}  // namespace fastbert
