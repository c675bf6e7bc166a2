// Cross-entropy on the CPU: cuts the rows into tasks and adds up their losses in order, in double. Results
// are bit-equal for any number of threads.
#include "cross_entropy.h"

#include <algorithm>

#include "isa.h"
#include "pages.h"
#include "parallel.h"
#include "workspace.h"

namespace fastbert {

FASTBERT_KERNELS(CrossEntropyKernels, cross_entropy_kernels)

namespace {

// Elements per task. Rows without a label cost nothing, so tasks are small, to balance the threads.
constexpr std::int64_t kGrain = 32768;

template <class F>
void for_rows(const CrossEntropy& args, int threads, const F& f) {
    const std::int64_t step = std::max<std::int64_t>(1, kGrain / args.classes);
    parallel_for((args.rows + step - 1) / step, threads,
                 [&](std::int64_t task, int) { f(task * step, std::min(args.rows, (task + 1) * step)); });
}

}  // namespace

const char* cpu_cross_entropy_fwd(const CrossEntropyFwd& args, int threads) {
    const CrossEntropyKernels* simd = kernels();
    if (simd == nullptr) return kNoIsa;
    const Workspace workspace(2 * std::max<std::int64_t>(1, args.rows));
    if (workspace.data() == nullptr) return kOutOfMemory;
    double* const losses = reinterpret_cast<double*>(workspace.data());
    for_rows(args, threads,
             [&](std::int64_t begin, std::int64_t end) { simd->forward(args, begin, end, losses); });
    double total = 0.0;
    std::int64_t count = 0;
    for (std::int64_t row = 0; row < args.rows; ++row) {
        total += losses[row];
        count += args.labels[row] != args.ignore_index;
    }
    *args.loss = count > 0 ? static_cast<float>(total / static_cast<double>(count)) : 0.0f;
    *args.count = count;
    return nullptr;
}

const char* cpu_cross_entropy_bwd(const CrossEntropyBwd& args, int threads) {
    const CrossEntropyKernels* simd = kernels();
    if (simd == nullptr) return kNoIsa;
    const double factor =
        static_cast<double>(*args.dloss) / static_cast<double>(std::max<std::int64_t>(1, *args.count));
    const std::int64_t row_bytes = args.classes * (args.dtype == DType::kFloat32 ? 4 : 2);
    expect_writes(args.dlogits, args.rows * row_bytes);
    for_rows(args, threads, [&](std::int64_t begin, std::int64_t end) {
        populate(static_cast<char*>(args.dlogits) + begin * row_bytes, (end - begin) * row_bytes,
                 args.rows * row_bytes);
        simd->backward(args, begin, end, factor);
    });
    return nullptr;
}

}  // namespace fastbert
