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

// At most so many keys of a sequence of n tokens lie between the first multiple of kKeyPanel that does not
// exceed what `queries` neighbouring queries see, and the last key that they see.
static inline std::int64_t most_keys(const Attention& args, std::int64_t n, std::int64_t queries) {
    const auto [left, right] = args.window;
    const std::int64_t most = queries + left + right + kKeyPanel;
    return left < 0 || right < 0 || n < most ? n : most;
}

struct AttentionKernels {
    // Floats of scratch that one worker needs for sequences of up to `seqlen` tokens; in forward for tasks of
    // up to `queries` queries.
    std::int64_t (*forward_scratch)(const Attention& args, std::int64_t seqlen, std::int64_t queries);
    std::int64_t (*backward_scratch)(const Attention& args, std::int64_t seqlen);
    // Queries [begin, end) of one sequence and head.
    void (*forward)(const AttentionFwd& args, std::int64_t sequence, std::int64_t head, std::int64_t begin,
                    std::int64_t end, float* scratch);
    // One sequence and one head of k and v, with all heads of q that read it.
    void (*backward)(const AttentionBwd& args, std::int64_t sequence, std::int64_t kv_head, float* scratch);
};

}  // namespace fastbert
