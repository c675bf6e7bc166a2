// Padded rows to packed rows and back, on the CPU. Contract: fastbert/ops/packing.py. Rows are bytes, of any
// element type. There is no code per instruction set: memcpy uses the best one.
#pragma once

#include <cstdint>

namespace fastbert {

struct Gather {
    const void* x;
    std::int64_t stride, width;   // bytes from row to row of x, and of one row
    const std::int64_t* indices;  // [total], strictly increasing: the caller checks
    std::int64_t total;
};

// out[t] = x[indices[t]]
const char* cpu_packing_fwd(const Gather& args, void* out, int threads);
// out[indices[t]] = x[t], and zeros in the rest of the `rows` rows
const char* cpu_packing_bwd(const Gather& args, std::int64_t rows, void* out, int threads);

}  // namespace fastbert
