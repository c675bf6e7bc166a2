// Linear layers on a GPU: the entry points. All pointers are the device's; `stream` is a cudaStream_t.
//
// One kernel makes all products, in bfloat16 and float16: c (rows, columns) = a b over `depth`, with an
// epilogue. Starts and rows of a and b lie on 16 bytes, and what is contiguous in them is a multiple of 8.
// With a gate b, bias and pre have twice the columns of c: fastbert/ops/activation.py.
#pragma once

#include <cstdint>

#include "../cpu/linear.h"

namespace fastbert {

// Which dimension of a (rows, depth) and of b (depth, columns) is contiguous.
enum class Layout : int {
    kForward = 0,  // depth, depth: x and weight
    kInputs = 1,   // depth, columns: g and weight, for dx
    kWeights = 2,  // rows, columns: g and x, for dweight
};

// Of 64 columns of a row, or of its last ones: the mean, and the sum of squared differences from it.
struct alignas(8) Moments {
    float mean, square;
};

// LayerNorm of a product's a, whose rows it stores to y (rows, depth), contiguous.
struct RowNorm {
    const Moments* moments;     // [rows][(depth + 63) / 64]
    const void *weight, *bias;  // of the product's dtype
    double eps;
    void* y;  // null: no norm
};

struct LinearProduct {
    DType dtype;
    Layout layout;
    std::int64_t rows, columns, depth;
    const void *a, *b;
    std::int64_t a_stride, b_stride;  // between contiguous runs
    const void* bias;                 // of dtype; may be null
    Activation activation;
    bool exact;            // GELU correctly rounded
    const void* residual;  // may be null
    std::int64_t residual_stride;
    const void* slope_at;  // c = (a b) act'(slope_at), contiguous; may be null
    void *c, *pre;         // contiguous; pre (the activation's argument) may be null
    float* sums;           // of c's columns, one row per 64 rows of c; may be null
    float* partial;        // cuda_linear_partial() floats; not read where that is 0
    int tile_rows, parts;  // from cuda_linear_plan
    Gate gate;             // of a forward product with an activation
    // For cuda_linear_cluster_product alone
    RowNorm norm = {};
    Moments* moments = nullptr;  // [rows][(columns + 63) / 64], of c; may be null
};

// How a product is cut: rows of a tile (its columns are 128), and parts of the depth, which a second kernel
// adds in order. `columns` are those of b.
struct LinearPlan {
    int tile_rows, parts;
};
LinearPlan cuda_linear_plan(Layout layout, std::int64_t rows, std::int64_t columns, std::int64_t depth,
                            int multiprocessors);

// Floats of scratch: for the parts, and for activations that only the second kernel has.
std::int64_t cuda_linear_partial(std::int64_t rows, std::int64_t columns, int parts, Activation activation,
                                 bool exact, Gate gate);
// Rows of `sums`, except for cuda_linear_hopper_product.
static inline constexpr std::int64_t cuda_linear_sums(std::int64_t rows) { return (rows + 63) / 64; }

struct LinearGradient {
    DType dtype;
    std::int64_t rows, columns;  // of dy; columns a multiple of 8
    const void *dy, *pre;        // contiguous; pre is null without an activation
    const float* partial;        // dy as the sum of `partial_parts` matrices of float; null: read dy
    std::int64_t partial_parts;
    Activation activation;
    bool exact;
    void* g;      // the gradient at pre, contiguous; may be null
    float* sums;  // [parts][columns of g]: sums of g's rows before rounding; may be null
    std::int64_t parts;
    Gate gate;  // pre and g have twice as many columns; needs pre, and no `partial`
};

// From so many rows on a product takes longer than a launch, and the rate of the tensor cores shows, of which
// mma.sync has half where warp groups have a product of their own.
constexpr std::int64_t kManyRows = 512;

// Whether the device has compute capability 9.0 and the library code for it.
bool cuda_linear_hopper(int device);
// Whether cuda_linear_hopper_product is for a forward product of these sizes, on such a device.
bool cuda_linear_takes_hopper(std::int64_t rows, std::int64_t columns, std::int64_t depth,
                              Activation activation, bool exact, Gate gate);

// All return nullptr, or the text of the error. Nothing waits for the device.
const char* cuda_linear_product(const LinearProduct& args, int device, std::uintptr_t stream);
// By at most `blocks` blocks of the kernel for compute capability 9.0 (linear_hopper.cuh): forward with GELU
// that is not exact, GELU-tanh, or with a gate also SiLU, without a residual; or with slope_at and kInputs,
// where `sums` has 4 rows per 128 rows of c. columns are a multiple of 8, c, pre and slope_at lie on
// 16 bytes and bias on 4. It reads neither `partial` nor `tile_rows` and `parts`. Where the driver refuses a
// tensor map, nothing runs and `refused` is true.
const char* cuda_linear_hopper_product(const LinearProduct& args, int blocks, int device,
                                       std::uintptr_t stream, bool& refused);
// By clusters of the kernel for compute capability 9.0 that few rows fill (linear_cluster_hopper.cu): forward
// with any activation, without a gate and pre; a norm excludes a residual and moments. columns are a multiple
// of 8, and bias, residual's rows and c lie on 16 bytes. It reads what the one above reads, and refuses as it
// does.
const char* cuda_linear_cluster_product(const LinearProduct& args, int multiprocessors, int device,
                                        std::uintptr_t stream, bool& refused);
const char* cuda_linear_gradient(const LinearGradient& args, int device, std::uintptr_t stream);
// out (columns,) of `dtype`: the sum of `parts` rows, in order.
const char* cuda_linear_add_sums(DType dtype, const float* sums, std::int64_t parts, std::int64_t columns,
                                 void* out, int device, std::uintptr_t stream);

}  // namespace fastbert
