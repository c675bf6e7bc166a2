// Attention on the CPU: the arguments, and the kernels that each instruction set provides.
// Contract: fastbert/ops/attention.py. Strides are in elements; the last dimension of q, k, v is contiguous.
#pragma once

#include <cstdint>

#include "../layer_norm.h"

namespace fastbert {

// A (total, nheads, headdim) tensor.
struct Heads {
    const void* data;
    std::int64_t row_stride, head_stride;
};

// Float (batch, nheads, S, S) with contiguous rows; the stride of a broadcast dimension is 0.
struct Bias {
    const float* data;  // null: none
    std::int64_t batch_stride, head_stride, row_stride;
};

struct Attention {
    DType dtype;
    std::int64_t batch, nheads, headdim, total, max_seqlen;
    const std::int32_t* cu_seqlens;  // batch + 1
    Heads q, k, v;
    float softmax_scale;
    bool causal;
    Bias bias;
    const float* gate;  // (nheads,), null: none
    DropoutArgs dropout;
};

struct AttentionFwd : Attention {
    void* out;    // (total, nheads, headdim) contiguous; rows from cu_seqlens[batch] on are not written
    float* lse;   // (nheads, total); the same holds for its rows; null: not wanted
    void* probs;  // (batch, nheads, S, S) of dtype, zero on entry; null: not wanted
    std::int32_t* keep_bits;  // (nheads, total, ceil(S / 32)), with dropout; null: not wanted
};

struct AttentionBwd : Attention {
    const std::int32_t* keep_bits;  // saved by forward; null: draw them again
    const void* dout;               // contiguous
    void *dq, *dk, *dv;  // contiguous; rows from cu_seqlens[batch] on are not written; null: not wanted
    float* ds;      // (batch, nheads, S, S), zero on entry: dS of each sequence and head; null: not wanted
    double* dgate;  // (batch, nheads); null: not wanted
};

// Both return nullptr, or the reason why they did nothing.
const char* cpu_attention_fwd(const AttentionFwd& args, int threads);
const char* cpu_attention_bwd(const AttentionBwd& args, int threads);

// --- per instruction set ---

inline constexpr std::int64_t kKeyPanel = 64;    // keys of one panel of K transposed
inline constexpr std::int64_t kQueryBlock = 24;  // queries that go through the keys together

struct AttentionKernels {
    // Floats of scratch that one worker needs for sequences of up to `seqlen` tokens.
    std::int64_t (*forward_scratch)(std::int64_t seqlen, std::int64_t headdim);
    std::int64_t (*backward_scratch)(std::int64_t seqlen, std::int64_t headdim);
    // Queries [begin, end) of one sequence and head.
    void (*forward)(const AttentionFwd& args, std::int64_t sequence, std::int64_t head, std::int64_t begin,
                    std::int64_t end, float* scratch);
    // One sequence and head.
    void (*backward)(const AttentionBwd& args, std::int64_t sequence, std::int64_t head, float* scratch);
};

}  // namespace fastbert
