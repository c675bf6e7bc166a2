// Elements of matrices, several in a register of 32 bits: their values, and how sums of products are rounded.
#pragma once

#include <algorithm>

#include "lanes.h"

namespace ptx {

struct BFloat16 {
    static constexpr int PER = 2;  // in a register
    static float rounded(double sum) { return float(sum); }
    static float value(uint32_t word, int which) {
        return bit_cast<float>(which ? word & 0xFFFF0000u : word << 16);
    }
};

struct Float16 {
    static constexpr int PER = 2;
    static float rounded(double sum) { return float(sum); }
    static float value(uint32_t word, int which) {
        const uint32_t half = which ? word >> 16 : word & 0xFFFF;
        const uint32_t sign = (half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3FF;
        if (exponent == 31) return bit_cast<float>(sign | 0x7F800000 | fraction << 13);
        if (exponent) return bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
        const float size = float(fraction) * 0x1p-24f;
        return sign ? -size : size;
    }
};

struct Int8 {
    static constexpr int PER = 4;
    static double value(uint32_t word, int which) { return int8_t(word >> 8 * which); }
    // satfinite
    static int32_t rounded(double sum) { return int32_t(std::clamp(sum, -2147483648.0, 2147483647.0)); }
};

}  // namespace ptx
