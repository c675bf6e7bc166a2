// Arithmetic of f32 and f64. `.approx` forms are computed in the host's functions, whose error is below what the
// ISA allows; `.full` division is rounded exactly.
#include <cmath>

#include "lanes.h"

namespace ptx {
namespace {

template <bool ftz>
inline float flushed(float a) {
    if (!ftz) return a;
    const uint32_t bits = bit_cast<uint32_t>(a);
    return bit_cast<float>((bits & 0x7F800000) ? bits : bits & 0x80000000);
}
template <bool ftz>
inline double flushed(double a) { return a; }

const uint32_t NAN_BITS = 0x7FFFFFFF;
inline float a_nan(float) { return bit_cast<float>(NAN_BITS); }
inline double a_nan(double) { return bit_cast<double>(0x7FFFFFFFFFFFFFFFull); }

template <class T>
inline T saturated(T a) { return a > 0 ? (a < 1 ? a : T(1)) : T(0); }  // NaN becomes 0

template <class T, bool ftz, bool sat>
inline T finish(T a) {
    a = flushed<ftz>(a);
    return sat ? saturated(a) : a;
}

template <class T, bool z, bool s> struct Add {
    T operator()(T a, T b) const { return finish<T, z, s>(flushed<z>(a) + flushed<z>(b)); }
};
template <class T, bool z, bool s> struct Sub {
    T operator()(T a, T b) const { return finish<T, z, s>(flushed<z>(a) - flushed<z>(b)); }
};
template <class T, bool z, bool s> struct Mul {
    T operator()(T a, T b) const { return finish<T, z, s>(flushed<z>(a) * flushed<z>(b)); }
};
template <class T, bool z, bool s> struct Fma {
    T operator()(T a, T b, T c) const {
        return finish<T, z, s>(std::fma(flushed<z>(a), flushed<z>(b), flushed<z>(c)));
    }
};
template <class T, bool z> struct Div {
    T operator()(T a, T b) const { return flushed<z>(flushed<z>(a) / flushed<z>(b)); }
};
template <class T, bool z> struct Rcp { T operator()(T a) const { return flushed<z>(T(1) / flushed<z>(a)); } };
template <class T, bool z> struct Sqrt { T operator()(T a) const { return flushed<z>(std::sqrt(flushed<z>(a))); } };
template <class T, bool z> struct Rsqrt {
    T operator()(T a) const { return flushed<z>(T(1 / std::sqrt(double(flushed<z>(a))))); }
};
template <bool z> struct Ex2 { float operator()(float a) const { return flushed<z>(std::exp2(flushed<z>(a))); } };
template <bool z> struct Lg2 { float operator()(float a) const { return flushed<z>(std::log2(flushed<z>(a))); } };
template <bool z> struct Sin { float operator()(float a) const { return flushed<z>(std::sin(flushed<z>(a))); } };
template <bool z> struct Cos { float operator()(float a) const { return flushed<z>(std::cos(flushed<z>(a))); } };
struct Tanh { float operator()(float a) const { return float(std::tanh(double(a))); } };

// -0 is less than +0; of a NaN and a number the number remains, unless .NaN asks for the NaN.
template <class T, bool z, bool nan> struct Min {
    T operator()(T a, T b) const {
        a = flushed<z>(a), b = flushed<z>(b);
        const bool first = a < b || (a == b && std::signbit(a));
        const T least = first ? a : b;
        if (nan) return a != a || b != b ? a_nan(a) : least;
        const T kept = a != a ? b : b != b ? a : least;
        return kept != kept ? a_nan(a) : kept;
    }
};
template <class T, bool z, bool nan> struct Max {
    T operator()(T a, T b) const {
        a = flushed<z>(a), b = flushed<z>(b);
        const bool first = a > b || (a == b && !std::signbit(a));
        const T most = first ? a : b;
        if (nan) return a != a || b != b ? a_nan(a) : most;
        const T kept = a != a ? b : b != b ? a : most;
        return kept != kept ? a_nan(a) : kept;
    }
};
template <class T, bool z> struct Neg { T operator()(T a) const { return -flushed<z>(a); } };
template <class T, bool z> struct Abs { T operator()(T a) const { return std::fabs(flushed<z>(a)); } };
// copysign d, a, b: the sign of a, the magnitude of b.
template <class T> struct CopySign { T operator()(T a, T b) const { return std::copysign(b, a); } };

template <class T, bool z>
REGISTERS void common(const std::string& type) {
    const std::string ftz = z ? ".ftz" : "";
    for (const char* rounding : {"", ".rn"}) {
        const std::string r = rounding;
        value_form<Add<T, z, false>, T, T, T>("add" + r + ftz + type);
        value_form<Sub<T, z, false>, T, T, T>("sub" + r + ftz + type);
        value_form<Mul<T, z, false>, T, T, T>("mul" + r + ftz + type);
        value_form<Add<T, z, true>, T, T, T>("add" + r + ftz + ".sat" + type);
        value_form<Sub<T, z, true>, T, T, T>("sub" + r + ftz + ".sat" + type);
        value_form<Mul<T, z, true>, T, T, T>("mul" + r + ftz + ".sat" + type);
    }
    value_form<Fma<T, z, false>, T, T, T, T>("fma.rn" + ftz + type);
    value_form<Fma<T, z, true>, T, T, T, T>("fma.rn" + ftz + ".sat" + type);
    value_form<Fma<T, z, false>, T, T, T, T>("mad.rn" + ftz + type);
    value_form<Div<T, z>, T, T, T>("div.rn" + ftz + type);
    value_form<Rcp<T, z>, T, T>("rcp.rn" + ftz + type);
    value_form<Sqrt<T, z>, T, T>("sqrt.rn" + ftz + type);
    value_form<Rsqrt<T, z>, T, T>("rsqrt.approx" + ftz + type);
    value_form<Min<T, z, false>, T, T, T>("min" + ftz + type);
    value_form<Max<T, z, false>, T, T, T>("max" + ftz + type);
    value_form<Min<T, z, true>, T, T, T>("min" + ftz + ".NaN" + type);
    value_form<Max<T, z, true>, T, T, T>("max" + ftz + ".NaN" + type);
    value_form<Neg<T, z>, T, T>("neg" + ftz + type);
    value_form<Abs<T, z>, T, T>("abs" + ftz + type);
}

template <bool z>
REGISTERS void approximate() {
    const std::string end = std::string(z ? ".ftz" : "") + ".f32";
    value_form<Div<float, z>, float, float, float>("div.full" + end);
    value_form<Div<float, z>, float, float, float>("div.approx" + end);
    value_form<Rcp<float, z>, float, float>("rcp.approx" + end);
    value_form<Sqrt<float, z>, float, float>("sqrt.approx" + end);
    value_form<Ex2<z>, float, float>("ex2.approx" + end);
    value_form<Lg2<z>, float, float>("lg2.approx" + end);
    value_form<Sin<z>, float, float>("sin.approx" + end);
    value_form<Cos<z>, float, float>("cos.approx" + end);
}

template <class T>
struct TestNan { bool operator()(T a) const { return a != a; } };

}  // namespace

REGISTERS void float_forms() {
    common<float, false>(".f32"), common<float, true>(".f32"), common<double, false>(".f64");
    approximate<false>(), approximate<true>();
    value_form<Tanh, float, float>("tanh.approx.f32");
    value_form<CopySign<float>, float, float, float>("copysign.f32");
    value_form<CopySign<double>, double, double, double>("copysign.f64");
}

}  // namespace ptx
