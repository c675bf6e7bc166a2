// A whole encoder layer for inference on the CPU: the kernels of attention, linear (or linear_int8), rotary
// and layer_norm in the order of fastbert/layers/encoder.py, pre_norm.py or bottleneck.py. A layer costs one
// call from Python, and its intermediate results stay in one workspace, which is mapped already.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"
#include "linear.h"

namespace fastbert {

struct LayerLinear {
    const void* panels;  // in the layout of linear or linear_int8
    const float* scale;  // of linear_int8; null: the layer is a `linear`
    Param bias;          // data may be null
    // Of linear_int8: smooth and range may be null, and with float_rows they are
    const float *smooth, *range;
    bool float_rows;
};

struct LayerNormParams {
    Param weight, bias;  // bias may be null
    double eps;          // negative: there is no norm
};

// A feed-forward block of a layer with bottlenecks.
struct LayerFeed {
    LayerLinear up, down;
    LayerNormParams norm;
};

// What a layer with bottlenecks has beside query, key, value, attention_output and attention_norm. Its norms
// are NoNorms, whose parameters have the layer's dtype.
struct LayerBottleneck {
    std::int64_t width;  // columns of its blocks; 0: the layer has no bottlenecks
    // Whether queries and keys, and values too, are made from the bottleneck `keys`, and not from x
    bool narrow_keys, narrow_values;
    LayerLinear keys, residual, output;
    LayerNormParams keys_norm, residual_norm, output_norm;
    std::vector<LayerFeed> feeds;
};

// The tables that rotate queries and keys, [positions, half]; null: they are not rotated.
struct LayerTables {
    const float *cos, *sin;
    std::int64_t half;
};

// The tables that queries and keys are multiplied with, to score distances: see TableScores. Null: none.
struct DistanceTables {
    const void *query, *key;
    std::int64_t rows, first;
};

struct EncoderLayer {
    DType dtype;
    std::int64_t batch, nheads, kv_heads, headdim, total, max_seqlen, inner, hidden;
    const std::int32_t* cu_seqlens;  // batch + 1
    const void* x;                   // (total, hidden); attention is nheads * headdim wide
    std::int64_t x_stride;
    LayerLinear query, key, value;  // without panels of key, query holds all three: one product of three
    bool head_major;  // that product's columns are [nheads, 3, headdim], not [3, nheads, headdim]
    LayerLinear attention_output, intermediate, output;
    LayerLinear activated;  // of the half that is activated, if intermediate has the other half alone
    bool pre_norm;          // whether the norms come before the blocks, not after their residual sums
    bool rms;               // whether they are RMSNorms
    LayerNormParams attention_norm, output_norm;  // with pre_norm the first may be missing
    Activation activation;
    Gate gated;  // the half of intermediate's columns that is activated, and multiplies the other one
    Window window;
    LayerTables tables;
    bool interleaved;               // whether neighbouring columns are rotated as pairs
    const std::int64_t* positions;  // (total,), within the tables: the caller checks
    float softmax_scale;
    Bias bias;
    Relative relative;         // without scores of tokens, which `distances` make
    DistanceTables distances;  // with columns of `relative`
    const float* gate;         // (nheads,), null: none
    LayerBottleneck bottleneck;
    // (batch + 1,): where the tokens of each sequence end that are kept after attention, at least the first
    // token; null: all are kept. `kept_rows` gets the rows of x that they have.
    const std::int32_t* kept;
    std::int64_t* kept_rows;
    void* y;     // (total, or as many as are kept, hidden), contiguous
    void* work;  // cpu_encoder_layer_work() bytes, 64-byte aligned; null: allocated for the call
};

// An upper bound of the bytes that a layer works in.
std::int64_t cpu_encoder_layer_work(const EncoderLayer& args, int threads);

// nullptr, or the reason why y is not the result.
const char* cpu_encoder_layer_fwd(const EncoderLayer& args, int threads);

}  // namespace fastbert
