// Attention on the CPU: the entry points, and the kernels that each instruction set provides.
#pragma once

#include <cstdint>

#include "../attention.h"

namespace fastbert {

// Both return nullptr, or the reason why they did nothing.
const char* cpu_attention_fwd(const AttentionFwd& args, int threads);
const char* cpu_attention_bwd(const AttentionBwd& args, int threads);

// --- per instruction set ---

inline constexpr std::int64_t kKeyPanel = 64;    // keys of one panel of K transposed
inline constexpr std::int64_t kQueryBlock = 24;  // queries that go through the keys together

struct AttentionKernels {
    // Floats of scratch that one worker needs for sequences of up to `seqlen` tokens.
    std::int64_t (*forward_scratch)(std::int64_t seqlen, std::int64_t headdim);
    std::int64_t (*backward_scratch)(std::int64_t seqlen, std::int64_t headdim);
    // Queries [begin, end) of one sequence and head.
    void (*forward)(const AttentionFwd& args, std::int64_t sequence, std::int64_t head, std::int64_t begin,
                    std::int64_t end, float* scratch);
    // One sequence and head.
    void (*backward)(const AttentionBwd& args, std::int64_t sequence, std::int64_t head, float* scratch);
};

}  // namespace fastbert
