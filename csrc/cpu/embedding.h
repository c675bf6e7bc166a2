// Embedding + LayerNorm + dropout on the CPU: the arguments, the entry points, and the kernels that each
// instruction set provides. Contract: fastbert/ops/embedding.py. Strides are in elements.
#pragma once

#include "../layer_norm.h"

namespace fastbert {

// A table whose rows are added: token t takes row ids[t], or row t if `ids` is null.
struct Lookup {
    const void* table;  // [rows, hidden], the last dimension contiguous; null: not added
    std::int64_t stride, rows;
    const std::int64_t* ids;  // within [0, rows): the caller checks
};

struct EmbeddingFwd {
    DType dtype;
    std::int64_t tokens, hidden;
    Lookup word, position, segment;  // word.table is not null
    // Of integers: 8 bits each, or 4, two per byte (see load_nibbles). The word's stride is in bytes.
    int word_bits;            // 0: floats
    const float* word_scale;  // [rows], the value of one integer step
    Param weight, bias;
    double eps;
    DropoutArgs dropout;
    void *y, *z;         // contiguous; z may be null
    float *mean, *rstd;  // may be null
};

// The gradient of one table.
struct TableGrad {
    void* out;                // [rows, hidden], contiguous; null: not wanted
    std::int64_t rows, skip;  // row `skip` is set to 0 (-1: none)
    const std::int64_t* ids;  // within [0, rows): the caller checks
};

struct EmbeddingBwd {
    DType dtype;
    std::int64_t tokens, hidden;
    const void *dy, *z;  // contiguous
    Param weight;
    const float *mean, *rstd;
    DropoutArgs dropout;
    TableGrad word, position, segment;
    void* dinputs_embeds;    // contiguous; may be null
    float *dweight, *dbias;  // both or neither null
};

// Both return nullptr, or the reason why they did nothing.
const char* cpu_embedding_fwd(const EmbeddingFwd& args, int threads);
const char* cpu_embedding_bwd(const EmbeddingBwd& args, int threads);

// --- per instruction set ---

struct EmbeddingKernels {
    // Tokens [begin, end). weight and bias are widened; scratch holds 2 * padded(hidden) floats.
    void (*forward)(const EmbeddingFwd& args, const float* weight, const float* bias, std::int64_t begin,
                    std::int64_t end, float* scratch);
    // Tokens [begin, end): dz in float (null: not wanted), dz rounded into dinputs_embeds, and the sums for
    // dweight and dbias into partial[2][padded(hidden)]. scratch holds padded(hidden) floats.
    void (*backward)(const EmbeddingBwd& args, const float* weight, std::int64_t begin, std::int64_t end,
                     float* dz, float* partial, float* scratch);
    // Columns [column, column + columns) of row `row` of a table's gradient: the sum of the rows of dz that
    // `tokens` lists, in that order.
    void (*sum_rows)(const float* dz, std::int64_t hidden, const std::int64_t* tokens, std::int64_t count,
                     DType dtype, void* out, std::int64_t row, std::int64_t column, std::int64_t columns);
};

}  // namespace fastbert
