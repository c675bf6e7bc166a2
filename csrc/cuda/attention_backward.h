// Attention's backward on a GPU: its arguments and its entry point. All pointers are the device's.
#pragma once

#include <cstdint>

#include "../attention.h"

namespace fastbert {

struct CudaAttentionBwd : Attention {
    const std::int32_t* keep_bits;  // saved by forward, (nheads, total, ceil(S / 32)); null: draw them again
    const void *dout, *out;         // (total, nheads, headdim) contiguous
    const float* lse;               // (nheads, total)
    // Four numbers for each slot (fastbert/ops/attention_places.py), of the section for tiles of 64 rows;
    // null: every sequence has the tiles of max_seqlen, and the slots after them share the tail.
    const std::int32_t* places;
    std::int64_t slots;
    // 0 from row cu_seqlens[batch] on; null: not wanted. From row to row of dq grad_stride elements, of dk
    // and dv kv_grad_stride; from head to head headdim.
    void *dq, *dk, *dv;
    std::int64_t grad_stride, kv_grad_stride;
    float *delta, *norm, *dgate;  // (nheads, total): scratch; dgate: the rows' shares, null: not wanted
    // (parts, bias_batch, bias_heads, S or 1, S or 1), null: not wanted. The sum over the parts is dbias.
    float* dbias;
    std::int64_t parts, bias_batch, bias_heads;
    bool bias_has_rows, bias_has_keys;
};

// The slots of a launch without a table.
std::int64_t cuda_attention_bwd_slots(std::int64_t batch, std::int64_t total, std::int64_t max_seqlen);

// nullptr, or the text of the error. Nothing waits for the device. bfloat16 and float16, headdim 32, 64 and
// 128, all tensors of these at multiples of 16 bytes and with strides that are multiples of 8.
const char* cuda_attention_bwd(const CudaAttentionBwd& args, int device, std::uintptr_t stream);

// The same by the kernels for compute capability 9.0: of headdim 64, with dq, dk and dv, the heads of a row
// of q, k and v side by side; no bias, and a gate only where q has as many heads as k and v. Where the
// device or the build has no such kernels (cuda_linear_hopper), it returns the reason. Where the driver
// refuses a tensor map, cuda_attention_bwd takes the call.
const char* cuda_attention_bwd_hopper(const CudaAttentionBwd& args, int device, std::uintptr_t stream);

}  // namespace fastbert
