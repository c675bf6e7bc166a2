// Attention: the arguments, which are the same on the CPU and on a GPU. Contract: fastbert/ops/attention.py.
// Strides are in elements; the last dimension of q, k, v is contiguous.
#pragma once

#include <cstdint>

#include "layer_norm.h"

namespace fastbert {

// A (total, nheads, headdim) tensor.
struct Heads {
    const void* data;
    std::int64_t row_stride, head_stride;
};

// Query i sees the keys from i - left to i + right of its sequence, both inclusive; -1: no limit.
struct Window {
    std::int64_t left = -1, right = -1;
};

// Float (batch, nheads, S, S) with contiguous rows; the stride of a broadcast dimension is 0.
struct Bias {
    const float* data;  // null: none
    std::int64_t batch_stride, head_stride, row_stride;
};

struct Attention {
    DType dtype;
    std::int64_t batch, nheads, headdim, total, max_seqlen;
    std::int64_t kv_heads;           // of k and v; head h of q reads their head h / (nheads / kv_heads)
    const std::int32_t* cu_seqlens;  // batch + 1
    Heads q, k, v;
    float softmax_scale;
    Window window;
    bool causal;  // whether `window` is that of a causal mask, for the kernels that have no other
    Bias bias;
    const float* gate;  // (nheads,), null: none
    DropoutArgs dropout;
};

struct AttentionFwd : Attention {
    // Rows from cu_seqlens[batch] on are not written on the CPU, and 0 on a GPU.
    void* out;                // (total, nheads, headdim) contiguous
    float* lse;               // (nheads, total); null: not wanted
    void* probs;              // (batch, nheads, S, S) of dtype, zero on entry; null: not wanted
    std::int32_t* keep_bits;  // (nheads, total, ceil(S / 32)), with dropout; null: not wanted
};

struct AttentionBwd : Attention {
    const std::int32_t* keep_bits;  // saved by forward; null: draw them again
    const void* dout;               // contiguous
    void *dq, *dk, *dv;             // contiguous, rows as those of out; null: not wanted
    float* ds;      // (batch, nheads, S, S), zero on entry: dS of each sequence and head; null: not wanted
    double* dgate;  // (batch, nheads); null: not wanted
};

}  // namespace fastbert
