// cvt: between integers, between floating-point types, and across.
#include <cmath>
#include <limits>

#include "halves.h"

namespace ptx {
namespace {

template <class D, class S> struct Integer { D operator()(S a) const { return D(a); } };
template <class D, class S> struct IntegerSaturated {
    D operator()(S a) const {
        using Limits = std::numeric_limits<D>;
        const __int128 v = a;
        return D(v < __int128(Limits::min()) ? __int128(Limits::min())
                                             : v > __int128(Limits::max()) ? __int128(Limits::max()) : v);
    }
};
template <class D, class S> struct ToFloating { D operator()(S a) const { return D(a); } };
template <class D, class S> struct ToHalf { D operator()(S a) const { return from_double<D>(double(a)); } };

struct Nearest { template <class T> T operator()(T a) const { return std::nearbyint(a); } };
struct Zero { template <class T> T operator()(T a) const { return std::trunc(a); } };
struct Down { template <class T> T operator()(T a) const { return std::floor(a); } };
struct Up { template <class T> T operator()(T a) const { return std::ceil(a); } };

inline double wide(float a) { return a; }
inline double wide(double a) { return a; }
inline double wide(Half a) { return to_float(a); }
inline double wide(Bf16 a) { return to_float(a); }

// What does not fit becomes the nearest that does; a NaN becomes 0, in 64 bits the lowest bit pattern with its
// sign bit set.
template <class D, class S, class R> struct ToInteger {
    D operator()(S a) const {
        using Limits = std::numeric_limits<D>;
        const double v = R{}(wide(a));
        if (v != v) return sizeof(D) == 8 ? D(1ull << 63) : D(0);
        if (v <= double(Limits::min())) return Limits::min();
        if (v >= double(Limits::max())) return Limits::max();
        return D(v);
    }
};
template <class S, class R> struct Integral { S operator()(S a) const { return R{}(a); } };

inline float flush(float a) {
    const uint32_t bits = bit_cast<uint32_t>(a);
    return bit_cast<float>((bits & 0x7F800000) ? bits : bits & 0x80000000);
}
struct Flush { float operator()(float a) const { return flush(a); } };
struct Saturate { float operator()(float a) const { return a > 0 ? (a < 1 ? a : 1.0f) : 0.0f; } };
template <class H> struct Widen { float operator()(H a) const { return to_float(a); } };
template <class H> struct WidenTwice { double operator()(H a) const { return double(to_float(a)); } };
template <class H, bool relu> struct Narrow {
    H operator()(float a) const { return from_float<H>(relu && a <= 0 ? 0.0f : a); }
};
template <class H> struct NarrowDouble { H operator()(double a) const { return from_double<H>(a); } };
template <class H> struct TowardsZero {
    H operator()(float a) const {
        H h = from_float<H>(a);
        if (std::fabs(to_float(h)) > std::fabs(a)) --h.bits;
        return h;
    }
};
template <class H, bool relu> struct NarrowPair {  // the first operand becomes the upper half
    uint32_t operator()(float a, float b) const {
        const Narrow<H, relu> narrow;
        return uint32_t(narrow(a).bits) << 16 | narrow(b).bits;
    }
};
struct FloatOfDouble { float operator()(double a) const { return float(a); } };
struct DoubleOfFloat { double operator()(float a) const { return double(a); } };
// 10 bits of fraction, halves away from zero.
struct ToTf32 {
    float operator()(float a) const {
        const uint32_t bits = bit_cast<uint32_t>(a);
        if ((bits & 0x7F800000) == 0x7F800000) return a;
        return bit_cast<float>((bits + 0x1000) & ~0x1FFFu);
    }
};

template <class D, class S>
REGISTERS void between_integers(const std::string& d, const std::string& s) {
    value_form<Integer<D, S>, D, S>("cvt." + d + "." + s);
    rare_form<IntegerSaturated<D, S>, D, S>("cvt.sat." + d + "." + s);
}

template <class S>
REGISTERS void of_integer(const std::string& s) {
    between_integers<uint8_t, S>("u8", s), between_integers<int8_t, S>("s8", s);
    between_integers<uint16_t, S>("u16", s), between_integers<int16_t, S>("s16", s);
    between_integers<uint32_t, S>("u32", s), between_integers<int32_t, S>("s32", s);
    between_integers<uint64_t, S>("u64", s), between_integers<int64_t, S>("s64", s);
    value_form<ToFloating<float, S>, float, S>("cvt.rn.f32." + s);
    rare_form<ToFloating<double, S>, double, S>("cvt.rn.f64." + s);
    rare_form<ToHalf<Half, S>, Half, S>("cvt.rn.f16." + s);
    rare_form<ToHalf<Bf16, S>, Bf16, S>("cvt.rn.bf16." + s);
}

template <class D, class S, class R>
REGISTERS void to_integer(const std::string& rounding, const std::string& d, const std::string& s) {
    for (const char* mode : {"", ".ftz"})
        for (const char* sat : {"", ".sat"})
            rare_form<ToInteger<D, S, R>, D, S>("cvt." + rounding + mode + sat + "." + d + "." + s);
}
template <class S, class R>
REGISTERS void rounded(const std::string& rounding, const std::string& s) {
    to_integer<uint8_t, S, R>(rounding, "u8", s), to_integer<int8_t, S, R>(rounding, "s8", s);
    to_integer<uint16_t, S, R>(rounding, "u16", s), to_integer<int16_t, S, R>(rounding, "s16", s);
    to_integer<uint32_t, S, R>(rounding, "u32", s), to_integer<int32_t, S, R>(rounding, "s32", s);
    to_integer<uint64_t, S, R>(rounding, "u64", s), to_integer<int64_t, S, R>(rounding, "s64", s);
}
template <class S>
REGISTERS void of_floating(const std::string& s) {
    rounded<S, Nearest>("rni", s), rounded<S, Zero>("rzi", s);
    rounded<S, Down>("rmi", s), rounded<S, Up>("rpi", s);
}
template <class S>
REGISTERS void integral(const std::string& s) {
    value_form<Integral<S, Nearest>, S, S>("cvt.rni." + s + "." + s);
    value_form<Integral<S, Zero>, S, S>("cvt.rzi." + s + "." + s);
    value_form<Integral<S, Down>, S, S>("cvt.rmi." + s + "." + s);
    value_form<Integral<S, Up>, S, S>("cvt.rpi." + s + "." + s);
}

template <class H>
REGISTERS void halves(const std::string& h) {
    value_form<Widen<H>, float, H>("cvt.f32." + h);
    value_form<Widen<H>, float, H>("cvt.ftz.f32." + h);
    rare_form<WidenTwice<H>, double, H>("cvt.f64." + h);
    value_form<Narrow<H, false>, H, float>("cvt.rn." + h + ".f32");
    value_form<Narrow<H, true>, H, float>("cvt.rn.relu." + h + ".f32");
    rare_form<TowardsZero<H>, H, float>("cvt.rz." + h + ".f32");
    rare_form<NarrowDouble<H>, H, double>("cvt.rn." + h + ".f64");
    value_form<NarrowPair<H, false>, uint32_t, float, float>("cvt.rn." + h + "x2.f32");
    value_form<NarrowPair<H, true>, uint32_t, float, float>("cvt.rn.relu." + h + "x2.f32");
}

}  // namespace

REGISTERS void convert_forms() {
    of_integer<uint8_t>("u8"), of_integer<int8_t>("s8"), of_integer<uint16_t>("u16");
    of_integer<int16_t>("s16"), of_integer<uint32_t>("u32"), of_integer<int32_t>("s32");
    of_integer<uint64_t>("u64"), of_integer<int64_t>("s64");
    of_floating<float>("f32"), of_floating<double>("f64"), of_floating<Half>("f16"), of_floating<Bf16>("bf16");
    integral<float>("f32"), integral<double>("f64");
    halves<Half>("f16"), halves<Bf16>("bf16");
    value_form<FloatOfDouble, float, double>("cvt.rn.f32.f64");
    value_form<DoubleOfFloat, double, float>("cvt.f64.f32");
    value_form<Flush, float, float>("cvt.ftz.f32.f32");
    value_form<Saturate, float, float>("cvt.sat.f32.f32");
    value_form<ToTf32, float, float>("cvt.rna.tf32.f32");
}

}  // namespace ptx
