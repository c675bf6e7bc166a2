// Encoder layers on a GPU, all in one call: the entry points. All pointers are the device's; `stream` is a
// cudaStream_t. Contract: fastbert/ops/encoder_layers.py.
#pragma once

#include <vector>

#include "../attention.h"
#include "linear.h"

namespace fastbert {

// Matrices are (outputs, inputs), each with its bias; all lie on 16 bytes, and none is null.
struct LayerWeights {
    std::int64_t nheads, headdim, inner;  // inner: columns of the feed-forward block
    Activation activation;
    bool exact;  // GELU correctly rounded
    double eps, last_eps;
    // query, key and value as one matrix; the norm after attention; the one after the feed-forward
    const void *qkv, *qkv_bias, *out, *out_bias, *norm, *norm_bias;
    const void *up, *up_bias, *down, *down_bias, *last, *last_bias;
};

struct LayerStack {
    DType dtype;  // of all parameters and activations
    std::int64_t hidden;
    std::vector<LayerWeights> layers;
};

// What the device is.
struct CudaDevice {
    int index, multiprocessors;
    bool hopper;    // it runs the kernels for compute capability 9.0, and they may be used
    bool groups;    // its tensor cores have more than mma.sync uses
    bool tf32;      // float32 may be multiplied as TF32
    bool clusters;  // products of few rows by linear_cluster_hopper.cu, which the device runs
    bool adds;      // cuBLASLt adds the residual before a norm; otherwise the norm does
    bool chained;   // a call's kernels of few rows begin before their predecessors have ended
};

struct LayersCall {
    std::int64_t rows, batch, max_seqlen;
    const std::int32_t* cu_seqlens;  // batch + 1
    bool causal;
    Bias bias;
    bool first_only;   // the last layer computes the first token of each sequence alone
    const void* x;     // (rows, hidden)
    void* const* out;  // of each layer (rows, hidden), the last one (batch, hidden) with first_only; all but
                       // the last may be null
    void* work;        // cuda_encoder_layers_work() bytes on 16
};

// Bytes of scratch.
std::size_t cuda_encoder_layers_work(const LayerStack& stack, std::int64_t rows, std::int64_t batch,
                                     bool first_only, const CudaDevice& device);

// Why these layers cannot run so, whatever the call; nullptr if they can.
const char* cuda_encoder_layers_gap(const LayerStack& stack);

// nullptr, or the text of the error. Nothing waits for the device.
const char* cuda_encoder_layers(const LayerStack& stack, const LayersCall& call, const CudaDevice& device,
                                std::uintptr_t stream);

}  // namespace fastbert
