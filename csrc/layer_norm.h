// LayerNorm, RMSNorm and NoNorm: the arguments, which are the same on the CPU and on a GPU. Contract:
// fastbert/ops/layer_norm.py. Tensors of `dtype` are [rows, hidden] with a contiguous last dimension; strides
// are in elements.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace fastbert {

// A vector of `hidden` parameters, in its own storage type; data may be null.
struct Param {
    const void* data;
    DType dtype;
};

// Bits: fastbert/ops/dropout.py.
struct DropoutArgs {
    const std::uint64_t* seed;  // on the tensors' device; null: no dropout
    std::uint32_t offset, threshold;
    float scale;  // 1 / (1 - p)
};

struct LayerNormFwd {
    DType dtype;
    std::int64_t rows, hidden;
    const void *x, *residual;  // residual may be null
    std::int64_t x_stride, residual_stride;
    Param weight, bias, x_bias;  // bias, x_bias may be null
    double eps;
    bool rms, none;  // RMSNorm; NoNorm, on the CPU alone
    DropoutArgs dropout;
    void *y, *z;         // contiguous; z may be null
    float *mean, *rstd;  // may be null
};

struct LayerNormBwd {
    DType dtype;
    std::int64_t rows, hidden;
    const void *dy, *dsum, *z;  // dsum, the gradient of the returned z, is contiguous and may be null
    std::int64_t dy_stride, z_stride;
    Param weight;
    const float *mean, *rstd;  // RMSNorm has no mean, NoNorm neither
    bool rms, none;
    DropoutArgs dropout;
    void *dx, *dresidual;              // contiguous; may be null
    float *dweight, *dbias, *dx_bias;  // may be null (dweight and dbias together)
};

}  // namespace fastbert
