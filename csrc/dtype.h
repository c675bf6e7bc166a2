// Storage types. Arithmetic is always in float; these only say how a tensor is stored.
#pragma once

#include <cstdint>

namespace fastbert {

// The codes of fastbert/backends/extension.py
enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

struct bf16 {
    std::uint16_t bits;
};
struct fp16 {
    std::uint16_t bits;
};

}  // namespace fastbert
