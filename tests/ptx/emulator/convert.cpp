// cvt: between integers, from integers to f32, from f32 to integers, and between f32 and the shorter
// floating-point types.
#include <algorithm>
#include <limits>

#include "halves.h"

namespace ptx {
namespace {

template <class D, class S> struct Cast { D operator()(S a) const { return D(a); } };
template <class H> struct Widen { float operator()(H a) const { return to_float(a); } };
template <class H> struct Narrow { H operator()(float a) const { return from_float<H>(a); } };
template <class H> struct NarrowPair {  // the first operand becomes the upper half
    uint32_t operator()(float a, float b) const {
        const Narrow<H> narrow;
        return uint32_t(narrow(a).bits) << 16 | narrow(b).bits;
    }
};

template <class D> struct Cut {  // toward zero, to the type's limits; NaN is 0
    D operator()(float a) const {
        const double low = std::numeric_limits<D>::min(), high = std::numeric_limits<D>::max();
        return a != a ? D(0) : D(std::clamp(std::trunc(double(a)), low, high));
    }
};
struct E4m3Pair {  // the first operand becomes the upper byte; at most 448
    static uint32_t byte(float a) {
        if (a != a) return 0x7F;
        const double magnitude = std::min(std::fabs(double(a)), 448.0);
        const int exponent = magnitude > 0 ? std::max(std::ilogb(magnitude), -6) : -6;
        const double units = std::nearbyint(std::ldexp(magnitude, 3 - exponent));
        return (bit_cast<uint32_t>(a) >> 31 << 7) | (uint32_t(exponent + 6) * 8 + uint32_t(units));
    }
    uint16_t operator()(float a, float b) const { return uint16_t(byte(a) << 8 | byte(b)); }
};

template <class D, class S>
REGISTERS void cast(const std::string& name) {
    value_form<Cast<D, S>, D, S>(name);
}

template <class S>
REGISTERS void of_integer(const std::string& s) {
    cast<uint8_t, S>("cvt.u8." + s), cast<int8_t, S>("cvt.s8." + s);
    cast<uint16_t, S>("cvt.u16." + s), cast<int16_t, S>("cvt.s16." + s);
    cast<uint32_t, S>("cvt.u32." + s), cast<int32_t, S>("cvt.s32." + s);
    cast<uint64_t, S>("cvt.u64." + s), cast<int64_t, S>("cvt.s64." + s);
    cast<float, S>("cvt.rn.f32." + s);
}

template <class H>
REGISTERS void halves(const std::string& h) {
    value_form<Widen<H>, float, H>("cvt.f32." + h);
    value_form<Narrow<H>, H, float>("cvt.rn." + h + ".f32");
    value_form<NarrowPair<H>, uint32_t, float, float>("cvt.rn." + h + "x2.f32");
}

}  // namespace

REGISTERS void convert_forms() {
    of_integer<uint8_t>("u8"), of_integer<int8_t>("s8"), of_integer<uint16_t>("u16");
    of_integer<int16_t>("s16"), of_integer<uint32_t>("u32"), of_integer<int32_t>("s32");
    of_integer<uint64_t>("u64"), of_integer<int64_t>("s64");
    halves<Half>("f16"), halves<Bf16>("bf16");
    value_form<Cast<float, double>, float, double>("cvt.rn.f32.f64");
    value_form<Cut<int32_t>, int32_t, float>("cvt.rzi.s32.f32");
    value_form<Cut<int16_t>, int16_t, float>("cvt.rzi.s16.f32");
    value_form<E4m3Pair, uint16_t, float, float>("cvt.rn.satfinite.e4m3x2.f32");
}

}  // namespace ptx
