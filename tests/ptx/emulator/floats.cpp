// Arithmetic of f32. `.approx` forms are computed in the host's functions, whose error is below what the
// ISA allows; `.full` division is rounded exactly.
#include <cmath>
#include <functional>

#include "lanes.h"

namespace ptx {
namespace {

template <bool ftz>
inline float flushed(float a) {
    if (!ftz) return a;
    const uint32_t bits = bit_cast<uint32_t>(a);
    return bit_cast<float>((bits & 0x7F800000) ? bits : bits & 0x80000000);
}

inline float a_nan() { return bit_cast<float>(0x7FFFFFFFu); }

template <bool z, class F> struct Flushing {
    float operator()(float a, float b) const { return flushed<z>(F{}(flushed<z>(a), flushed<z>(b))); }
};
template <bool z> using Add = Flushing<z, std::plus<float>>;
template <bool z> using Sub = Flushing<z, std::minus<float>>;
template <bool z> using Mul = Flushing<z, std::multiplies<float>>;
template <bool z> using Div = Flushing<z, std::divides<float>>;
template <bool z> struct Fma {
    float operator()(float a, float b, float c) const {
        return flushed<z>(std::fma(flushed<z>(a), flushed<z>(b), flushed<z>(c)));
    }
};
template <bool z> struct Rcp { float operator()(float a) const { return flushed<z>(1 / flushed<z>(a)); } };
template <bool z> struct Sqrt { float operator()(float a) const { return flushed<z>(std::sqrt(flushed<z>(a))); } };
template <bool z> struct Rsqrt {
    float operator()(float a) const { return flushed<z>(float(1 / std::sqrt(double(flushed<z>(a))))); }
};
template <bool z> struct Ex2 { float operator()(float a) const { return flushed<z>(std::exp2(flushed<z>(a))); } };
template <bool z> struct Lg2 { float operator()(float a) const { return flushed<z>(std::log2(flushed<z>(a))); } };
struct Tanh { float operator()(float a) const { return float(std::tanh(double(a))); } };

// -0 is less than +0; of a NaN and a number the number remains, unless .NaN asks for the NaN.
template <bool z, bool nan> struct Min {
    float operator()(float a, float b) const {
        a = flushed<z>(a), b = flushed<z>(b);
        const bool first = a < b || (a == b && std::signbit(a));
        const float least = first ? a : b;
        if (nan) return a != a || b != b ? a_nan() : least;
        const float kept = a != a ? b : b != b ? a : least;
        return kept != kept ? a_nan() : kept;
    }
};
template <bool z, bool nan> struct Max {
    float operator()(float a, float b) const {
        a = flushed<z>(a), b = flushed<z>(b);
        const bool first = a > b || (a == b && !std::signbit(a));
        const float most = first ? a : b;
        if (nan) return a != a || b != b ? a_nan() : most;
        const float kept = a != a ? b : b != b ? a : most;
        return kept != kept ? a_nan() : kept;
    }
};
template <bool z> struct Neg { float operator()(float a) const { return -flushed<z>(a); } };
template <bool z> struct Abs { float operator()(float a) const { return std::fabs(flushed<z>(a)); } };

// b with a's sign
struct CopySign { float operator()(float a, float b) const { return std::copysign(b, a); } };

template <class F>
REGISTERS void unary_form(const std::string& name) {
    value_form<F, float, float>(name);
}
template <class F>
REGISTERS void binary_form(const std::string& name) {
    value_form<F, float, float, float>(name);
}

template <bool z>
REGISTERS void arithmetic() {
    const std::string ftz = z ? ".ftz" : "", end = ftz + ".f32";
    for (const char* rounding : {"", ".rn"}) {
        const std::string last = rounding + end;
        binary_form<Add<z>>("add" + last), binary_form<Sub<z>>("sub" + last), binary_form<Mul<z>>("mul" + last);
    }
    value_form<Fma<z>, float, float, float, float>("fma.rn" + end);
    for (const char* how : {".rn", ".full", ".approx"}) binary_form<Div<z>>("div" + (how + end));
    for (const char* how : {".rn", ".approx"}) {
        unary_form<Rcp<z>>("rcp" + (how + end));
        unary_form<Sqrt<z>>("sqrt" + (how + end));
    }
    unary_form<Rsqrt<z>>("rsqrt.approx" + end), unary_form<Ex2<z>>("ex2.approx" + end);
    unary_form<Lg2<z>>("lg2.approx" + end);
    binary_form<Min<z, false>>("min" + end), binary_form<Min<z, true>>("min" + ftz + ".NaN.f32");
    binary_form<Max<z, false>>("max" + end), binary_form<Max<z, true>>("max" + ftz + ".NaN.f32");
    unary_form<Neg<z>>("neg" + end), unary_form<Abs<z>>("abs" + end);
}

}  // namespace

REGISTERS void float_forms() {
    arithmetic<false>(), arithmetic<true>();
    unary_form<Tanh>("tanh.approx.f32"), binary_form<CopySign>("copysign.f32");
}

}  // namespace ptx
