// Storage types. Arithmetic is always in float; these only say how a tensor lies in memory.
#pragma once

#include <cstdint>

namespace fastbert {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };  // the codes of fastbert/runtime/native.py

struct bf16 {
    std::uint16_t bits;
};
struct fp16 {
    std::uint16_t bits;
};

}  // namespace fastbert
