// Products by cuBLASLt, which PyTorch has loaded: it is found in the process, and never linked.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../dtype.h"

namespace fastbert {
namespace cuda {

// c = a bᵀ + bias + residual, in rows that lie side by side: a (rows, depth), b (columns, depth), bias
// (columns,) or null, residual (rows, columns) or null, c (rows, columns), which may not be the residual. All
// start on 16 bytes. Sums are made in float, also those of several parts of the depth; float32 is multiplied
// as such, or with `tf32` as TF32.
struct LtProduct {
    DType dtype;
    std::int64_t rows, columns, depth;
    const void *a, *b, *bias, *residual;
    void* c;
    bool tf32;
};

// Whether the process has a cuBLASLt with the functions that are needed.
bool has_cublas_lt();

// Bytes that a product may use as scratch.
constexpr std::size_t kLtWork = std::size_t{32} << 20;

// nullptr, or the text of the error. `work`: kLtWork bytes on 16. The algorithm for a shape is asked for
// once per process and device. Nothing waits for the device.
const char* lt_product(const LtProduct& args, void* work, int device, std::uintptr_t stream);

}  // namespace cuda
}  // namespace fastbert
