// Cross-entropy over the labelled rows on the CPU: the arguments, the entry points, and the kernels that each
// instruction set provides. Contract: fastbert/ops/cross_entropy.py.
#pragma once

#include <cstdint>

#include "../dtype.h"

namespace fastbert {

struct CrossEntropy {
    DType dtype;
    std::int64_t rows, classes;
    const void* logits;  // [rows, classes], the last dimension contiguous
    std::int64_t stride;
    const std::int64_t* labels;  // [rows], within [0, classes) or ignore_index: the caller checks
    std::int64_t ignore_index;
    double label_smoothing;
};

struct CrossEntropyFwd : CrossEntropy {
    float* loss;  // one number
    float* lse;   // [2, rows]: the maximum, and the log of the sum of exp(x - maximum); 0 where ignored
    std::int64_t* count;
};

struct CrossEntropyBwd : CrossEntropy {
    const float *dloss, *lse;
    const std::int64_t* count;
    void* dlogits;  // contiguous
};

// Both return nullptr, or the reason why they did nothing.
const char* cpu_cross_entropy_fwd(const CrossEntropyFwd& args, int threads);
const char* cpu_cross_entropy_bwd(const CrossEntropyBwd& args, int threads);

// --- per instruction set ---

struct CrossEntropyKernels {
    // Rows [begin, end): lse, and the loss of each row into `losses`, 0 where ignored.
    void (*forward)(const CrossEntropyFwd& args, std::int64_t begin, std::int64_t end, double* losses);
    // Rows [begin, end) of dlogits; `factor` is dloss / count.
    void (*backward)(const CrossEntropyBwd& args, std::int64_t begin, std::int64_t end, double factor);
};

}  // namespace fastbert
