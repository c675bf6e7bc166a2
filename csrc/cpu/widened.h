// One element of a parameter as a float, in code without SIMD.
#pragma once

#include <cstdint>
#include <cstring>

#include "../layer_norm.h"

namespace fastbert {

inline float widened(const Param& param, std::int64_t i) {
    if (param.dtype == DType::kFloat32) return static_cast<const float*>(param.data)[i];
    const std::uint32_t bits = static_cast<const std::uint16_t*>(param.data)[i];
    float out;
    if (param.dtype == DType::kBFloat16) {
        const std::uint32_t word = bits << 16;
        std::memcpy(&out, &word, sizeof out);
        return out;
    }
    // IEEE half: shift the exponent and mantissa into place and scale by 2^112, which also handles subnormals
    const std::uint32_t word = (bits & 0x7fff) << 13;
    std::memcpy(&out, &word, sizeof out);
    if ((bits & 0x7c00) == 0x7c00) {
        const std::uint32_t special = 0x7f800000u | (bits & 0x3ff) << 13;
        std::memcpy(&out, &special, sizeof out);
    } else {
        out *= 5.192296858534828e33f;  // 2^112
    }
    return bits & 0x8000 ? -out : out;
}

}  // namespace fastbert
