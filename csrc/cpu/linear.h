// Linear layers on the CPU: the entry points, and the kernels that each instruction set provides.
//
// One product serves forward and backward: c = act(a b + bias) + residual, with b in panels of kPanel
// columns. With panels every step of the inner loop reads one run of memory. Making them costs one pass over
// b, done once per weight where the caller keeps them. Otherwise each task copies the part of a panel that it
// works on: for b row by row, as in backward, and for few rows.
#pragma once

#include <cstdint>

#include "../layer_norm.h"

namespace fastbert {

enum class Activation : int { kNone = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kSilu = 4, kTanh = 5 };

// A gated activation multiplies the two halves of a product's columns: the first or the second is activated.
enum class Gate : int { kNone = 0, kFirst = 1, kSecond = 2 };

constexpr std::int64_t kPanel = 64;  // columns
// Of a gated product a panel holds the same columns of both halves, so that one tile's epilogue has both.
constexpr std::int64_t kHalfPanel = kPanel / 2;
static inline constexpr std::int64_t panel_columns(bool gated) { return gated ? kHalfPanel : kPanel; }
static inline constexpr std::int64_t panel_count(std::int64_t columns, bool gated) {
    const std::int64_t width = panel_columns(gated);
    return ((gated ? columns / 2 : columns) + width - 1) / width;
}

static inline constexpr std::int64_t even(std::int64_t depth) { return (depth + 1) / 2 * 2; }

// Elements of b (depth x columns) in panels [columns / kPanel][even(depth)][kPanel], filled with zeros. In
// bf16 a panel is [even(depth) / 2][kPanel][2]: the pairs {b[2 k][j], b[2 k + 1][j]} that vdpbf16ps
// multiplies. The layout is the same for every instruction set.
static inline constexpr std::int64_t panels_size(std::int64_t depth, std::int64_t columns, bool gated) {
    return panel_count(columns, gated) * kPanel * even(depth);
}

struct ToPanels {
    DType dtype;
    std::int64_t depth, columns;
    const void* b;
    std::int64_t depth_stride, column_stride;  // one of them is 1
    void* panels;
    bool gated;  // columns is even
};

struct Product {
    DType dtype;                        // of a, b, residual, c and pre
    std::int64_t rows, columns, depth;  // columns: of c; with a gate b, bias and pre have twice as many
    const void* a;
    std::int64_t row_stride, depth_stride;   // of a; one of them is 1
    const void* panels;                      // b in panels; null: read b itself
    const void* b;                           // (depth x its columns)
    std::int64_t b_stride, b_column_stride;  // of its rows and columns; one of them is 1
    Param bias;                              // data may be null
    Activation activation;
    const void* residual;  // may be null
    std::int64_t residual_stride;
    void *c, *pre;    // contiguous; pre (the activation's argument) may be null
    bool wide_b;      // b, where it is not in panels, is float32, whatever dtype is, and is rounded to dtype
    bool wide_c;      // c is float32, whatever dtype is; pre and residual are null
    Gate gate;        // none where wide_c
    bool multiplies;  // c = residual * the rest, which is rounded first; not with a gate
    // (columns,) of dtype, or null: c = norm_weight * (residual + the rest, which is rounded first) +
    // norm_bias; not with a gate, nor where wide_c
    const void *norm_weight = nullptr, *norm_bias = nullptr;
    // Factors of b's columns, or null. With them panels are those of linear_int8.h, `group` elements in four
    // bytes. The kernels get them in the order of the panels' columns.
    const float* scale = nullptr;
    int group = 0;
};

struct ActivationBwd {
    DType dtype;
    std::int64_t rows, columns;  // of dy; with a gate pre, g and dbias have twice as many columns
    const void *dy, *pre;        // contiguous; pre is null without an activation
    Activation activation;
    void* g;       // dy * act'(pre), contiguous; may be null
    float* dbias;  // sum of g's rows, before rounding; may be null
    Gate gate;
};

// All return nullptr, or the reason why they did nothing.
const char* cpu_linear_panels(const ToPanels& args, int threads);
const char* cpu_linear_product(const Product& args, int threads);
const char* cpu_linear_activation_bwd(const ActivationBwd& args, int threads);

// --- per instruction set ---

struct LinearKernels {
    void (*make_panel)(const ToPanels& args, std::int64_t panel);
    // Floats of scratch that one task of `rows` x `columns` needs.
    std::int64_t (*product_scratch)(const Product& args, std::int64_t rows, std::int64_t columns);
    // Rows [row, row_end) of columns [column, column_end) of the panels, multiples of kPanel. bias (or null)
    // is widened, in the order of the panels' columns. next_column is this thread's probable next column: the
    // kernel prefetches its panel.
    void (*product)(const Product& args, const float* bias, std::int64_t row, std::int64_t row_end,
                    std::int64_t column, std::int64_t column_end, std::int64_t next_column, float* scratch);
    // Rows [begin, end); their column sums go to partial (or null).
    void (*activation_bwd)(const ActivationBwd& args, std::int64_t begin, std::int64_t end, float* partial);
};

}  // namespace fastbert
