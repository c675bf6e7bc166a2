// LayerNorm on the CPU: the entry points, and the kernels that each instruction set provides.
#pragma once

#include <cstdint>

#include "../layer_norm.h"

namespace fastbert {

// Both return nullptr, or the reason why they did nothing.
const char* cpu_layer_norm_fwd(const LayerNormFwd& args, int threads);
const char* cpu_layer_norm_bwd(const LayerNormBwd& args, int threads);

// --- per instruction set ---

// The floats of a row of one worker, rounded up to whole cache lines.
static inline constexpr std::int64_t padded(std::int64_t hidden) { return (hidden + 63) / 64 * 64; }

struct LayerNormKernels {
    // out[0 … hidden) = the parameter, or `missing` everywhere where it has no data
    void (*widen)(const Param& param, float missing, float* out, std::int64_t hidden);
    // Rows [begin, end). weight, bias, x_bias (or null) are widened; scratch holds 2 * padded(hidden) floats.
    void (*forward)(const LayerNormFwd& args, const float* weight, const float* bias, const float* x_bias,
                    std::int64_t begin, std::int64_t end, float* scratch);
    // Rows [begin, end), their column sums into partial[3][padded(hidden)]: dweight, dbias, dx_bias.
    void (*backward)(const LayerNormBwd& args, const float* weight, std::int64_t begin, std::int64_t end,
                     float* partial, float* scratch);
    // out[begin … end) = sum over chunks, in order and in double, of partial[chunk * stride + column]
    void (*sum_chunks)(const float* partial, std::int64_t chunks, std::int64_t stride, float* out,
                       std::int64_t begin, std::int64_t end);
};

// --- for the ops that end in a LayerNorm ---

const LayerNormKernels* layer_norm_kernels();  // null: no instruction set to run on

// The elements per task: fewer do not pay for waking a thread.
inline constexpr std::int64_t kNormGrain = 32768;
// Rows of a task of forward, and of a chunk of backward, which depends on the shape alone.
std::int64_t norm_rows_per_task(std::int64_t rows, std::int64_t hidden, int threads);
std::int64_t norm_rows_per_chunk(std::int64_t rows);

}  // namespace fastbert
