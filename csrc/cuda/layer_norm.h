// LayerNorm on a GPU: the entry points. All pointers are the device's; `stream` is a cudaStream_t.
#pragma once

#include <cstdint>

#include "../layer_norm.h"

namespace fastbert {

// Both return nullptr, or the text of the error. Nothing waits for the device.
// x_dtype, dx_dtype: the codes of x and of dx, where args.dtype is float, which the rest of the rows then is.
// Where the two differ: rounded, y once more in x_dtype; drounded, its gradient. Contiguous, or null.
const char* cuda_layer_norm_fwd(const LayerNormFwd& args, int x_dtype, std::uintptr_t rounded, int device,
                                std::uintptr_t stream);

// partial: float [parts, 3, hidden] of scratch, `parts` from cuda_layer_norm_bwd_parts; not needed without
// sums.
std::int64_t cuda_layer_norm_bwd_parts(int dtype, std::int64_t rows, std::int64_t hidden,
                                       int multiprocessors);
const char* cuda_layer_norm_bwd(const LayerNormBwd& args, std::uintptr_t partial, std::int64_t parts,
                                int dx_dtype, std::uintptr_t drounded, int device, std::uintptr_t stream);

}  // namespace fastbert
