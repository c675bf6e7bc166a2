// The attention that each token receives, and the tokens that receive most. Contract:
// fastbert/ops/attention_received.py.
#pragma once

#include <cstdint>

#include "../attention.h"

namespace fastbert {

struct AttentionReceived : Attention {  // v, the window, the bias, the gate and dropout are not read
    const float* lse;                   // (nheads, total)
    float* out;                         // (total,)
};

// nullptr, or the reason why `out` is not the result.
const char* cpu_attention_received(const AttentionReceived& args, int threads);

// The rows [kept[b], kept[b + 1]) of `rows`, ascending: of sequence b's tokens the first, and those others
// that received most; among equals the earlier. No sequence keeps more tokens than it has.
void cpu_most_received(const float* received, const std::int32_t* cu_seqlens, std::int64_t batch,
                       const std::int32_t* kept, std::int64_t* rows);

// --- per instruction set ---

struct AttentionReceivedKernels {
    // Floats of scratch that one worker needs for sequences of up to `seqlen` tokens.
    std::int64_t (*scratch)(const Attention& args, std::int64_t seqlen);
    // What one sequence's tokens receive by one head, in the order of the tokens.
    void (*receive)(const AttentionReceived& args, std::int64_t sequence, std::int64_t head, float* out,
                    float* scratch);
};

}  // namespace fastbert
