// What one sequence's tokens receive by one head, for one instruction set (see isa.h). Contract:
// fastbert/ops/attention_received.py.
//
// Math       out_j = Σ_i exp(scale q_i·k_j - lse_i)
// Tiling     K is packed transposed into panels of 64 keys. 24 queries go through all keys together, and what
//            they add to a vector of keys stays in a register.
// Precision  Widened to float on load. The sum over 24 queries is added to the sum of those before it.
#include <cmath>

#include "attention_received.h"
#include "attention_simd.h"

namespace fastbert {
namespace FASTBERT_ISA {
namespace {

std::int64_t scratch_size(const Attention& args, std::int64_t seqlen) {
    const std::int64_t keys = round_up(seqlen, kKeyPanel);
    return round_up(keys * args.headdim + kQueryBlock * (width_of(args.headdim) + keys), 16);
}

template <class T>
void receive_as(const AttentionReceived& args, std::int64_t sequence, std::int64_t head, float* out,
                float* scratch) {
    const Span tokens = span_of(args, sequence);
    const std::int64_t n = tokens.length, stride = round_up(n, kKeyPanel);
    const std::int64_t headdim = args.headdim, width = width_of(headdim);
    float *const panels = scratch, *const q = panels + stride * headdim,
                 *const scores = q + kQueryBlock * width;
    transpose_rows<T>(args.k, tokens.start, kv_head_of(args, head), n, headdim, panels);
    for (std::int64_t j = 0; j < n; ++j) out[j] = 0.0f;
    const Vec scale = broadcast(args.softmax_scale);
    for (std::int64_t i = 0; i < n; i += kQueryBlock) {
        const std::int64_t rows = less(kQueryBlock, n - i), padded = round_up(rows, kRows);
        copy_rows<T>(args.q, tokens.start + i, head, rows, padded, headdim, width, q);
        times_panels(q, width, padded, panels, 0, n, headdim, scores, stride);
        const float* const lse = args.lse + head * args.total + tokens.start + i;
        for_vectors(n, [&](std::int64_t j, int, int m) __attribute__((always_inline)) {
            Vec sum = zero();
            for (std::int64_t r = 0; r < rows; ++r) {
                if (lse[r] == -INFINITY) continue;  // a query that sees nothing
                const Vec score = mul(load(scores + r * stride + j, m), scale);
                sum = add(sum, exponential(sub(score, broadcast(lse[r]))));
            }
            store(out + j, add(load(out + j, m), sum), m);
        });
    }
}

void receive(const AttentionReceived& args, std::int64_t sequence, std::int64_t head, float* out,
             float* scratch) {
    switch (args.dtype) {
        case DType::kFloat32:
            return receive_as<float>(args, sequence, head, out, scratch);
        case DType::kBFloat16:
            return receive_as<bf16>(args, sequence, head, out, scratch);
        case DType::kFloat16:
            return receive_as<fp16>(args, sequence, head, out, scratch);
    }
}

}  // namespace

extern const AttentionReceivedKernels attention_received_kernels;
const AttentionReceivedKernels attention_received_kernels = {scratch_size, receive};

}  // namespace FASTBERT_ISA
}  // namespace fastbert
