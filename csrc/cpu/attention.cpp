// Attention on the CPU: cuts the batch into tasks. A task of forward is a run of queries of one sequence and
// head. A task of backward is one whole sequence and head of k and v, with all heads of q that read it, so it
// sums dk and dv alone. Results therefore do not depend on the number of threads.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <vector>

#include "isa.h"
#include "parallel.h"
#include "workspace.h"

namespace fastbert {

#if FASTBERT_X86
namespace avx2 {
extern const AttentionKernels attention_kernels;
}
namespace avx512 {
extern const AttentionKernels attention_kernels;
}
namespace avx512_bf16 {
extern const AttentionKernels attention_kernels;  // of bf16 alone
}
#endif

namespace {

// Queries per task if there are few sequences and heads: packing the keys again costs each task little.
constexpr std::int64_t kSplit = 5 * kQueryBlock;

const AttentionKernels* kernels(DType dtype) {
#if FASTBERT_X86
    return pick(&avx2::attention_kernels, &avx512::attention_kernels,
                dtype == DType::kBFloat16 ? &avx512_bf16::attention_kernels : nullptr);
#else
    static_cast<void>(dtype);
    return nullptr;
#endif
}

// With fewer products per call, waking a thread does not pay.
constexpr std::int64_t kGrain = 1 << 20;

struct Task {
    std::int32_t sequence, head, begin, end;
};

// All tasks, the longest sequences first, so that no thread starts a long one last.
std::vector<Task> cut(const Attention& args, std::int64_t heads, std::int64_t split) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(args.batch));
    std::iota(order.begin(), order.end(), 0);
    const auto length = [&](std::int32_t b) { return args.cu_seqlens[b + 1] - args.cu_seqlens[b]; };
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int32_t a, std::int32_t b) { return length(a) > length(b); });
    std::vector<Task> tasks;
    for (const std::int32_t b : order)
        for (std::int64_t begin = 0; begin < length(b); begin += split)
            for (std::int32_t h = 0; h < heads; ++h)
                tasks.push_back(
                    {b, h, static_cast<std::int32_t>(begin),
                     static_cast<std::int32_t>(std::min<std::int64_t>(length(b), begin + split))});
    return tasks;
}

int team(const Attention& args, int threads) {
    std::int64_t pairs = 0;
    for (std::int64_t b = 0; b < args.batch; ++b) {
        const std::int64_t n = args.cu_seqlens[b + 1] - args.cu_seqlens[b];
        pairs += n * most_keys(args, n, 1);
    }
    return pairs * args.nheads * args.headdim < kGrain ? 1 : threads;
}

std::int64_t longest(const Attention& args) {
    std::int64_t most = 0;
    for (std::int64_t b = 0; b < args.batch; ++b)
        most = std::max<std::int64_t>(most, args.cu_seqlens[b + 1] - args.cu_seqlens[b]);
    return most;
}

// Queries per task of forward, the longest sequence having `seqlen` tokens.
std::int64_t split_of(const Attention& args, std::int64_t seqlen, int threads) {
    const bool plenty = args.batch * args.nheads >= 4 * static_cast<std::int64_t>(threads);
    if (!plenty && threads > 1) return kSplit;
    // With a window a task packs only the keys that its queries see, and they shall stay in L2.
    const auto [left, right] = args.window;
    const bool whole = left < 0 || right < 0;
    return std::max<std::int64_t>(whole ? seqlen : kSplit + (left + right) / kQueryBlock * 2 * kQueryBlock,
                                  1);
}

}  // namespace

const char* cpu_table_scores(const TableScores& args, int threads) {
    const std::int64_t columns = table_columns(args), panels = panels_size(args.headdim, kPanel, false);
    const std::int64_t size = args.dtype == DType::kFloat32 ? 4 : 2,
                       all = panel_count(args.table_rows, false);
    const int team = args.nheads * args.rows * columns * args.headdim < kGrain ? 1 : threads;
    std::atomic<const char*> failed{nullptr};
    parallel_for(args.nheads, team, [&](std::int64_t head, int) {
        Product product{};
        product.dtype = args.dtype;
        product.rows = args.rows;
        product.columns = columns;
        product.depth = args.headdim;
        product.a = static_cast<const char*>(args.x.data) + head * args.x.head_stride * size;
        product.row_stride = args.x.row_stride;
        product.depth_stride = 1;
        product.panels =
            static_cast<const char*>(args.panels) + (head * all + table_begin(args) / kPanel) * panels * size;
        product.wide_c = args.dtype == DType::kFloat16;
        product.c = static_cast<char*>(args.out) + head * args.rows * columns * score_size(args.dtype);
        if (const char* const why = cpu_linear_product(product, 1))
            failed.store(why, std::memory_order_relaxed);
    });
    return failed.load(std::memory_order_relaxed);
}

const char* cpu_attention_fwd(const AttentionFwd& args, int threads, const Relative& relative) {
    const AttentionKernels* simd = kernels(args.dtype);
    if (simd == nullptr) return kNoIsa;
    threads = team(args, threads);
    const std::int64_t seqlen = longest(args);
    const std::int64_t split = split_of(args, seqlen, threads);
    const std::vector<Task> tasks = cut(args, args.nheads, split);
    if (tasks.empty()) return nullptr;
    const std::int64_t share = simd->forward_scratch(args, seqlen, split);
    const Workspace workspace(share * threads);
    if (workspace.data() == nullptr) return kOutOfMemory;
    parallel_for(static_cast<std::int64_t>(tasks.size()), threads, [&](std::int64_t i, int worker) {
        const Task& task = tasks[static_cast<std::size_t>(i)];
        simd->forward(args, relative, task.sequence, task.head, task.begin, task.end,
                      workspace.data() + worker * share);
    });
    return nullptr;
}

const char* cpu_attention_bwd(const AttentionBwd& args, int threads, const Relative& relative,
                              const RelativeGrads& grads) {
    const AttentionKernels* simd = kernels(args.dtype);
    if (simd == nullptr) return kNoIsa;
    threads = team(args, threads);
    const std::int64_t seqlen = longest(args);
    const std::vector<Task> tasks = cut(args, args.kv_heads, std::max<std::int64_t>(seqlen, 1));
    if (args.dgate != nullptr) std::fill(args.dgate, args.dgate + args.batch * args.nheads, 0.0);
    if (tasks.empty()) return nullptr;
    const std::int64_t share = simd->backward_scratch(args, seqlen);
    const Workspace workspace(share * threads);
    if (workspace.data() == nullptr) return kOutOfMemory;
    parallel_for(static_cast<std::int64_t>(tasks.size()), threads, [&](std::int64_t i, int worker) {
        const Task& task = tasks[static_cast<std::size_t>(i)];
        simd->backward(args, relative, grads, task.sequence, task.head, workspace.data() + worker * share);
    });
    return nullptr;
}

}  // namespace fastbert
