// Attention on the CPU: the entry points, and the kernels that each instruction set provides.
#pragma once

#include <cstdint>

#include "../attention.h"
#include "linear.h"

namespace fastbert {

// Scores of distances, which are added to those of q and k: fastbert/ops/attention_relative.py.
struct Relative {
    std::int64_t reach = 0;                 // the largest distance
    const std::int32_t* columns = nullptr;  // of distance 0, with `reach` others on both sides
    bool half = false;                      // whether query and key are bf16, else float
    Heads query{}, key{};                   // (total, nheads, ncolumns); data null: none
    std::int64_t ncolumns = 0;              // at least 2 if half
    // (nheads, 2 reach + 1) contiguous, at distance 0 of head 0: the bias of each distance; null: none
    const float* bias = nullptr;
    // At distance 0: how many distances from this one on have columns that rise by 1, at most 255.
    const std::uint8_t* runs = nullptr;
};

// Their gradients, contiguous and zero on entry; null: not wanted.
struct RelativeGrads {
    float *query = nullptr, *key = nullptr;  // (total, nheads, ncolumns)
    double* bias = nullptr;                  // (batch, nheads, 2 reach + 1): of each sequence
};

// Static: a function that the units of several instruction sets share might be compiled for instructions
// that this processor lacks.
static inline bool of_tokens(const Relative& scores) {
    return scores.query.data != nullptr || scores.key.data != nullptr;
}
static inline bool given(const Relative& scores) { return of_tokens(scores) || scores.bias != nullptr; }
static inline bool wanted(const RelativeGrads& grads) {
    return grads.query != nullptr || grads.key != nullptr || grads.bias != nullptr;
}

// Scores of distances by a table per head: rows of x times the table's rows [first, first + count), in whole
// panels. Each element is one sum, so it does not depend on which others are computed.
struct TableScores {
    DType dtype;
    std::int64_t rows, nheads, headdim;
    Heads x;
    const void* panels;                     // of every head's table (headdim x table_rows), one after another
    std::int64_t table_rows, first, count;  // rows of each table; those that are multiplied
    void* out;                              // (nheads, rows, table_columns()); floats if dtype is fp16
};

// Columns of `out`, of which the first is that of the table's row `table_begin()`.
static inline std::int64_t table_begin(const TableScores& args) { return args.first / kPanel * kPanel; }
static inline std::int64_t table_columns(const TableScores& args) {
    return (args.first + args.count + kPanel - 1) / kPanel * kPanel - table_begin(args);
}
static inline std::int64_t score_size(DType dtype) { return dtype == DType::kBFloat16 ? 2 : 4; }

// All return nullptr, or the reason why they did nothing.
const char* cpu_table_scores(const TableScores& args, int threads);
const char* cpu_attention_fwd(const AttentionFwd& args, int threads, const Relative& relative = {});
const char* cpu_attention_bwd(const AttentionBwd& args, int threads, const Relative& relative = {},
                              const RelativeGrads& grads = {});

// --- per instruction set ---

inline constexpr std::int64_t kKeyPanel = 64;    // keys of one panel of K transposed
inline constexpr std::int64_t kQueryBlock = 24;  // queries that go through the keys together

// At most so many keys of a sequence of n tokens lie between the first multiple of kKeyPanel that does not
// exceed what `queries` neighbouring queries see, and the last key that they see.
static inline std::int64_t most_keys(const Attention& args, std::int64_t n, std::int64_t queries) {
    const auto [left, right] = args.window;
    const std::int64_t most = queries + left + right + kKeyPanel;
    return left < 0 || right < 0 || n < most ? n : most;
}

struct AttentionKernels {
    // Floats of scratch that one worker needs for sequences of up to `seqlen` tokens; in forward for tasks of
    // up to `queries` queries.
    std::int64_t (*forward_scratch)(const Attention& args, std::int64_t seqlen, std::int64_t queries);
    std::int64_t (*backward_scratch)(const Attention& args, std::int64_t seqlen);
    // Queries [begin, end) of one sequence and head.
    void (*forward)(const AttentionFwd& args, const Relative& relative, std::int64_t sequence,
                    std::int64_t head, std::int64_t begin, std::int64_t end, float* scratch);
    // One sequence and one head of k and v, with all heads of q that read it.
    void (*backward)(const AttentionBwd& args, const Relative& relative, const RelativeGrads& grads,
                     std::int64_t sequence, std::int64_t kv_head, float* scratch);
};

}  // namespace fastbert
