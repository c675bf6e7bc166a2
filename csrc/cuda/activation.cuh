// Activations and their derivatives in float, for epilogues: kernels/activation.py, formula by formula.
// bfloat16's polynomials have fewer digits than float16's.
#pragma once

#include "linear.h"
#include "tensor_core.cuh"

namespace fastbert {
namespace cuda {

// NaN where x is NaN.
__device__ __forceinline__ float least(float x, float most) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(most));
    return y;
}
__device__ __forceinline__ float greatest(float x, float lowest) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(lowest));
    return y;
}
// x >= 1; 0 at infinity. Relative error 2^-22.
__device__ __forceinline__ float rsqrt_fast(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

template <class T>
constexpr bool kFewDigits = false;
template <>
constexpr bool kFewDigits<bf16> = true;

__device__ __forceinline__ float exp_fast(float x) { return exp2_fast(x * 1.4426950408889634f); }

// x / by for by >= 1, infinity included.
template <class T>
__device__ __forceinline__ float divided(float x, float by) {
    if (!kFewDigits<T>) return x / by;
    const float root = rsqrt_fast(by);
    return x * root * root;
}

// t and P(t); their product is Q(u) / exp(-u²/2).
template <class T>
__device__ __forceinline__ void gelu_tail(float u, float& t, float& p) {
    const float square = u * u;
    if (kFewDigits<T>) {
        t = rsqrt_fast(fmaf(0.09301f, square, fmaf(0.5698f, u, 1.0f)));
        p = fmaf(0.10227121f, t, 0.051208741f);
        p = fmaf(p, t, 0.11274342f);
        p = fmaf(p, t, 0.11200237f);
        p = fmaf(p, t, 0.12177353f);
    } else {
        t = rsqrt_fast(fmaf(0.11038f, square, fmaf(0.6004f, u, 1.0f)));
        p = fmaf(0.019163624f, t, -0.052328645f);
        p = fmaf(p, t, 0.061336159f);
        p = fmaf(p, t, 0.02858794f);
        p = fmaf(p, t, 0.086181955f);
        p = fmaf(p, t, 0.10464792f);
        p = fmaf(p, t, 0.11987325f);
        p = fmaf(p, t, 0.13253779f);
    }
}

template <class T>
__device__ __forceinline__ float exact_gelu(float z) {
    const float u = least(fabsf(z), 20.0f);
    float t, p;
    gelu_tail<T>(u, t, p);
    return fmaf(-(u * t * p), exp2_fast(u * u * -0.7213475204444817f), fmaxf(z, 0.0f));
}

template <class T>
__device__ __forceinline__ float cheap_gelu(float z) {
    constexpr bool few = kFewDigits<T>;
    const float u = least(fabsf(z), few ? 16.0f : 15.0f);  // where the polynomial is least
    float r = fmaf(few ? 0.00263501f : 0.00318999f, u, few ? -0.03713265f : -0.040898229f);
    r = fmaf(r, u, few ? -0.47983377f : -0.472460395f);
    r = fmaf(r, u, few ? -1.14143745f : -1.14547481f);
    r = fmaf(r, u, few ? -1.00072505f : -1.0005708f);
    return fmaf(-u, exp2_fast(r), fmaxf(z, 0.0f));
}

template <class T>
__device__ __forceinline__ float gelu_tanh(float z) {
    return divided<T>(z, 1.0f + exp_fast(-1.5957691216057308f * fmaf(0.044715f * z * z, z, z)));
}

template <class T>
__device__ __forceinline__ float silu(float z) {
    return divided<T>(z, 1.0f + exp_fast(-z));
}

template <class T>
__device__ __forceinline__ float tanh_of(float z) {
    const float square = z * z, u = fabsf(z);
    float p = fmaf(-0.00570498686f, square, 0.0206390861f);
    p = fmaf(p, square, -0.0537397154f);
    p = fmaf(p, square, 0.133314416f);
    p = fmaf(p, square, -0.333332807f);
    const float e = exp_fast(-2.0f * u);
    const float far = fmaf(-2.0f, divided<T>(e, 1.0f + e), 1.0f);
    return u < 0.625f ? fmaf(z * square, p, z) : z < 0.0f ? -far : far;
}

// d of gelu's slope, which is 1 + d where z > 0, else -d; from W(u).
__device__ __forceinline__ float slope_from(float z, float u, float w) {
    const float d = w * exp2_fast(u * u * -0.7213475204444817f);
    return z > 0.0f ? 1.0f + d : -d;
}

template <class T>
__device__ __forceinline__ float cheap_gelu_slope(float z) {
    constexpr bool few = kFewDigits<T>;
    const float u = least(fabsf(z), 20.0f);
    float w;
    if (few)
        w = fmaf(0.0028755003f, u, -0.026164941f);
    else
        w = fmaf(fmaf(-0.00073464591f, u, 0.0082998143f), u, -0.040482324f);
    w = fmaf(w, u, few ? 0.10166006f : 0.11811384f);
    w = fmaf(w, u, few ? -0.23730794f : -0.24521304f);
    w = fmaf(w, u, few ? 0.79618587f : 0.79736814f);
    return slope_from(z, u, fmaf(w, u, -0.5f));
}

template <class T>
__device__ __forceinline__ float exact_gelu_slope(float z) {
    const float u = least(fabsf(z), 20.0f);
    float t, p;
    gelu_tail<T>(u, t, p);
    return slope_from(z, u, fmaf(u, 0.3989422804014327f, -(t * p)));
}

// s and s (1 - s) of the logistic function s at a number with the sign of z and e = exp(-|number|).
template <class T>
__device__ __forceinline__ float logistic(float z, float e, float& product) {
    product = divided<T>(divided<T>(e, 1.0f + e), 1.0f + e);
    return divided<T>(z > 0.0f ? 1.0f : e, 1.0f + e);
}

template <class T>
__device__ __forceinline__ float gelu_tanh_slope(float z) {
    const float u = least(fabsf(z), 20.0f);
    float product;
    const float e = exp_fast(-1.5957691216057308f * fmaf(0.044715f * u * u, u, u));
    const float s = logistic<T>(z, e, product);
    const float rise = 1.5957691216057308f * fmaf(0.134145f * u * u, u, u) * product;
    return s + (z > 0.0f ? rise : -rise);
}

template <class T>
__device__ __forceinline__ float silu_slope(float z) {
    const float u = least(fabsf(z), 120.0f);
    float product;
    const float s = logistic<T>(z, exp_fast(-u), product);
    return fmaf(z > 0.0f ? u : -u, product, s);
}

template <class T>
__device__ __forceinline__ float tanh_slope(float z) {
    float product;
    logistic<T>(z, exp_fast(-2.0f * fabsf(z)), product);
    return 4.0f * product;
}

// Calls visit(f) with the activation as a function of a float. One branch for all values of a thread.
template <class T, class Visit>
__device__ __forceinline__ void with_activation(Activation activation, bool exact, Visit visit) {
    switch (activation) {
        case Activation::kGelu:
            if (exact)
                visit([](float z) { return exact_gelu<T>(z); });
            else
                visit([](float z) { return cheap_gelu<T>(z); });
            return;
        case Activation::kGeluTanh:
            return visit([](float z) { return gelu_tanh<T>(z); });
        case Activation::kRelu:
            return visit([](float z) { return greatest(z, 0.0f); });
        case Activation::kSilu:
            return visit([](float z) { return silu<T>(z); });
        case Activation::kTanh:
            return visit([](float z) { return tanh_of<T>(z); });
        default:
            return;
    }
}

// The same with its derivative.
template <class T, class Visit>
__device__ __forceinline__ void with_slope(Activation activation, bool exact, Visit visit) {
    switch (activation) {
        case Activation::kGelu:
            if (exact)
                visit([](float z) { return exact_gelu_slope<T>(z); });
            else
                visit([](float z) { return cheap_gelu_slope<T>(z); });
            return;
        case Activation::kGeluTanh:
            return visit([](float z) { return gelu_tanh_slope<T>(z); });
        case Activation::kRelu:
            return visit([](float z) { return z <= 0.0f ? 0.0f : 1.0f; });  // 1 for NaN, as in PyTorch
        case Activation::kSilu:
            return visit([](float z) { return silu_slope<T>(z); });
        case Activation::kTanh:
            return visit([](float z) { return tanh_slope<T>(z); });
        default:
            return;
    }
}

}  // namespace cuda
}  // namespace fastbert
