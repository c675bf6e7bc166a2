// 8-bit linear layers on the CPU: the entry points, and the kernels that each instruction set provides.
// Contract: fastbert/ops/linear_int8.py.
//
// A group is the input of one lane of a multiply-add instruction: four bytes with VNNI, else two 16-bit
// integers (the byte instruction before VNNI saturates). In both cases rows of x and panels of the weight are
// stored in groups of four bytes.
#pragma once

#include <cstdint>

#include "linear.h"

namespace fastbert {

struct ToPanelsInt8 {
    std::int64_t depth, columns;
    const std::int8_t* weight;  // (columns, depth), contiguous
    std::uint8_t* panels;       // int8_panels_size() bytes, of any alignment
    bool gated;                 // columns is even
};

// y = the product, or what y holds plus or times the product, which is rounded first. Only the product itself
// may have an activation or a gate. A product with a norm has neither.
enum class Onto : int { kNone = 0, kAdds = 1, kMultiplies = 2 };

struct ProductInt8 {
    DType dtype;                        // of x and y
    std::int64_t rows, columns, depth;  // columns: of y; with a gate scale and bias have twice as many
    const void* x;
    std::int64_t x_stride;
    const std::uint8_t* panels;
    const float* scale;
    Param bias;  // data may be null
    Activation activation;
    void* y;  // contiguous
    Gate gate;
    Onto onto;
    const void *norm_weight = nullptr, *norm_bias = nullptr;  // see Product
    const float* smooth = nullptr;                            // (depth,) factors of x's columns; null: none
    const float* range = nullptr;  // the least and the largest of x smooth; null: each row has its own
};

// Bytes of the panels and of the weight's column sums after them, for the instruction set in use.
std::int64_t int8_panels_size(std::int64_t depth, std::int64_t columns, bool gated);

int int8_group();  // elements in four bytes of the panels

// Both return nullptr, or the reason why they did nothing.
const char* cpu_linear_int8_panels(const ToPanelsInt8& args, int threads);
const char* cpu_linear_int8(const ProductInt8& args, int threads);

// --- per instruction set ---

struct QuantizedRow {
    float step;
    std::int32_t zero;
};

struct LinearInt8Kernels {
    int group;  // elements in four bytes
    void (*make_panel)(const ToPanelsInt8& args, std::int64_t panel, std::int32_t* sums);
    // A row of x into ceil(depth / group) groups, with zeros after the last element.
    QuantizedRow (*quantize)(const ProductInt8& args, std::int64_t row, std::uint32_t* groups);
    // Rows [row, row_end) of columns [column, column_end) of the panels, multiples of kPanel. scale and bias
    // (or null) are in the order of the panels' columns. next_column: as in LinearKernels.
    void (*product)(const ProductInt8& args, const std::uint32_t* groups, const QuantizedRow* quantized,
                    const float* scale, const float* bias, std::int64_t row, std::int64_t row_end,
                    std::int64_t column, std::int64_t column_end, std::int64_t next_column);
};

static inline constexpr std::int64_t groups_of(std::int64_t depth, int group) {
    return (depth + group - 1) / group;
}

}  // namespace fastbert
