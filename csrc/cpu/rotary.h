// Rotary positions on the CPU: the arguments, the entry point, and the kernel that each instruction set
// provides. Contract: fastbert/ops/rotary.py. Strides are in elements.
#pragma once

#include <cstdint>

#include "../dtype.h"

namespace fastbert {

struct Rotary {
    DType dtype;
    std::int64_t rows, heads, headdim;
    const void* x;  // the last dimension contiguous
    std::int64_t row_stride, head_stride;
    const float *cos, *sin;  // [max_positions, half], contiguous
    std::int64_t half;       // pairs per head: 2 half <= headdim
    const void* positions;   // [rows], int64 if `wide`, else int32; within the tables: the caller checks
    bool wide, interleaved, back;  // back: by the negative angle
    void* y;                       // [rows, heads, headdim], a row contiguous; or x, with x's strides
    std::int64_t y_stride;         // from row to row
};

static inline std::int64_t position_of(const Rotary& args, std::int64_t row) {
    return args.wide ? static_cast<const std::int64_t*>(args.positions)[row]
                     : static_cast<const std::int32_t*>(args.positions)[row];
}

// Returns nullptr, or the reason why it did nothing.
const char* cpu_rotary(const Rotary& args, int threads);

// --- per instruction set ---

struct RotaryKernels {
    // Rows [begin, end). If interleaved, scratch holds 4 * half floats.
    void (*rotate)(const Rotary& args, std::int64_t begin, std::int64_t end, float* scratch);
};

}  // namespace fastbert
