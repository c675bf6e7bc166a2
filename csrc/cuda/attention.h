// Attention on a GPU: the entry points. All pointers are the device's; `stream` is a cudaStream_t.
#pragma once

#include <cstdint>

#include "../attention.h"

namespace fastbert {

// nullptr, or the text of the error. Nothing waits for the device. headdim 32, 64 and 128, q, k, v at
// multiples of 16 bytes and with strides of such (8 elements, 4 in float32), and no probs; float32 without
// dropout. Backward: attention_backward.h.
const char* cuda_attention_fwd(const AttentionFwd& args, int device, std::uintptr_t stream);

// Whether the device has compute capability 9.0 and the library code for it.
bool cuda_attention_hopper(int device);
// Whether a call is large enough for that kernel. Its blocks have twice the queries of the other kernel's
// blocks, and half as many share a multiprocessor. So it takes calls that have a block per multiprocessor,
// and whose sequences fill a block on average.
bool cuda_attention_fills_hopper(std::int64_t batch, std::int64_t total, std::int64_t max_seqlen,
                                 std::int64_t nheads, std::int64_t headdim, int multiprocessors);
// As cuda_attention_fwd, by the kernel for compute capability 9.0 (attention_hopper.cuh): half precision,
// headdim 64, or 32 without dropout, window and shared heads; no bias and probs, a positive scale, and q, k,
// v whose heads lie side by side in a row. Where the driver refuses a tensor map, cuda_attention_fwd takes
// the call.
const char* cuda_attention_hopper_fwd(const AttentionFwd& args, int device, std::uintptr_t stream);

}  // namespace fastbert
