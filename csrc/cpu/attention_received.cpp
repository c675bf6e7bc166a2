// The attention that tokens receive, on the CPU: a task is one sequence and head. The heads are added in
// order, so results do not depend on the number of threads.
#include "attention_received.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "isa.h"
#include "parallel.h"
#include "workspace.h"

namespace fastbert {

FASTBERT_KERNELS(AttentionReceivedKernels, attention_received_kernels)

namespace {

// With fewer products per call, waking a thread does not pay.
constexpr std::int64_t kGrain = 1 << 20;

}  // namespace

const char* cpu_attention_received(const AttentionReceived& args, int threads) {
    const AttentionReceivedKernels* const simd = kernels();
    if (simd == nullptr) return kNoIsa;
    std::int64_t longest = 0, pairs = 0;
    for (std::int64_t b = 0; b < args.batch; ++b) {
        const std::int64_t n = args.cu_seqlens[b + 1] - args.cu_seqlens[b];
        longest = std::max(longest, n);
        pairs += n * n;
    }
    if (pairs * args.nheads * args.headdim < kGrain) threads = 1;
    const std::int64_t share = simd->scratch(args, longest), end = args.cu_seqlens[args.batch];
    const Workspace workspace(share * threads + args.nheads * end);
    if (workspace.data() == nullptr) return kOutOfMemory;
    float* const by_head = workspace.data() + share * threads;
    parallel_for(args.batch * args.nheads, threads, [&](std::int64_t task, int worker) {
        const std::int64_t sequence = task / args.nheads, head = task % args.nheads;
        simd->receive(args, sequence, head, by_head + head * end + args.cu_seqlens[sequence],
                      workspace.data() + worker * share);
    });
    for (std::int64_t t = 0; t < args.total; ++t) {
        double sum = 0.0;
        for (std::int64_t head = 0; t < end && head < args.nheads; ++head) sum += by_head[head * end + t];
        args.out[t] = static_cast<float>(sum);
    }
    return nullptr;
}

void cpu_most_received(const float* received, const std::int32_t* cu_seqlens, std::int64_t batch,
                       const std::int32_t* kept, std::int64_t* rows) {
    std::vector<std::uint64_t> order;
    for (std::int64_t b = 0; b < batch; ++b) {
        const std::int64_t start = cu_seqlens[b], n = cu_seqlens[b + 1] - start,
                           count = kept[b + 1] - kept[b];
        if (count == 0) continue;
        // No number is negative, so their bits are ordered as they are, with NaN above all
        order.resize(static_cast<std::size_t>(n - 1));
        for (std::int64_t i = 1; i < n; ++i) {
            std::uint32_t bits;
            std::memcpy(&bits, received + start + i, sizeof bits);
            order[i - 1] = (std::uint64_t{bits} << 32) | (UINT32_MAX - static_cast<std::uint32_t>(i));
        }
        std::nth_element(order.begin(), order.begin() + (count - 1), order.end(), std::greater<>());
        std::int64_t* const own = rows + kept[b];
        own[0] = start;
        for (std::int64_t i = 1; i < count; ++i)
            own[i] = start + (UINT32_MAX - static_cast<std::uint32_t>(order[i - 1]));
        std::sort(own + 1, own + count);
    }
}

}  // namespace fastbert
