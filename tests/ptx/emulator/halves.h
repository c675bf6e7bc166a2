// float16 and bfloat16 as bits, and the conversions that round to nearest even. A NaN becomes 0x7FFF.
#pragma once

#include <cmath>

#include "lanes.h"

namespace ptx {

struct Half { uint16_t bits; };
struct Bf16 { uint16_t bits; };

inline float to_float(float a) { return a; }
inline float to_float(Bf16 a) { return bit_cast<float>(uint32_t(a.bits) << 16); }
inline float to_float(Half a) {
    const uint32_t sign = uint32_t(a.bits & 0x8000) << 16, rest = a.bits & 0x7FFF;
    if (rest >= 0x7C00) return bit_cast<float>(sign | 0x7F800000 | (rest & 0x3FF) << 13);
    // 2**-14 is the smallest normal number; scaling by 2**112 makes subnormal ones right as well.
    const float magnitude = bit_cast<float>(rest << 13) * 0x1p112f;
    return bit_cast<float>(bit_cast<uint32_t>(magnitude) | sign);
}

// From double: values of float are exact in it, and a fused result is rounded once.
inline uint16_t round_to(double value, int exponent_bits, int fraction_bits) {
    const uint64_t bits = bit_cast<uint64_t>(value);
    const uint32_t sign = uint32_t(bits >> 63) << (exponent_bits + fraction_bits);
    if (value != value) return 0x7FFF;
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const uint32_t infinite = ((1u << exponent_bits) - 1) << fraction_bits;
    const double magnitude = std::fabs(value);
    if (std::isinf(magnitude)) return uint16_t(sign | infinite);
    if (magnitude == 0) return uint16_t(sign);
    int exponent = std::ilogb(magnitude);
    if (exponent < 1 - bias) exponent = 1 - bias;
    const double units = std::nearbyint(std::ldexp(magnitude, fraction_bits - exponent));
    const uint32_t result = uint32_t(exponent + bias - 1) * (1u << fraction_bits) + uint32_t(units);
    return uint16_t(sign | (result < infinite ? result : infinite));
}

template <class T>
T from_double(double value);
template <>
inline Half from_double<Half>(double value) { return {round_to(value, 5, 10)}; }
template <>
inline Bf16 from_double<Bf16>(double value) { return {round_to(value, 8, 7)}; }

template <class T>
T from_float(float value);
template <>
inline Bf16 from_float<Bf16>(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value);
    const uint16_t rounded = uint16_t((uint64_t(bits) + 0x7FFF + (bits >> 16 & 1)) >> 16);
    return {(bits & 0x7FFFFFFF) > 0x7F800000 ? uint16_t(0x7FFF) : rounded};
}
template <>
inline Half from_float<Half>(float value) {
#if defined(__F16C__)
    return {value != value ? uint16_t(0x7FFF) : uint16_t(_cvtss_sh(value, 0))};
#else
    return from_double<Half>(value);
#endif
}
template <>
inline float from_float<float>(float value) { return value; }

}  // namespace ptx
