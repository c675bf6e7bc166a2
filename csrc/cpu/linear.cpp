// Linear layers on the CPU: cuts a product into tasks, and adds up the bias gradient.
//
// However the tasks are cut, an element of the product is one sum over the depth, so results are bit-equal
// for any number of threads. The bias gradient is summed in chunks that depend on the shape alone; the chunks
// are added in order, in double.
#include "linear.h"

#include <algorithm>

#include "isa.h"
#include "pages.h"
#include "parallel.h"
#include "widened.h"
#include "workspace.h"

namespace fastbert {

#if FASTBERT_X86
namespace avx2 {
extern const LinearKernels linear_kernels;
}
namespace avx512 {
extern const LinearKernels linear_kernels;
}
namespace avx512_bf16 {
extern const LinearKernels linear_kernels;
}
#endif

namespace {

// Rows per task: with a depth of 768 floats they fill a quarter of a 2 MB L2 cache. Twice as many where bf16
// is not widened.
constexpr std::int64_t kBlockRows = 160;
// Rows of a task's first panel that are prefetched.
constexpr std::int64_t kFetched = 1024;
// Multiply-adds that pay for waking a thread.
constexpr std::int64_t kGrain = 1 << 17;

const LinearKernels* kernels() {
#if FASTBERT_X86
    return pick(&avx2::linear_kernels, &avx512::linear_kernels, &avx512_bf16::linear_kernels);
#else
    return nullptr;
#endif
}

std::int64_t block_rows(DType dtype) {
    const bool widened = dtype != DType::kBFloat16 || current_isa() != Isa::kAvx512Bf16;
    return widened ? kBlockRows : 2 * kBlockRows;
}

// Prefetches many lines at a time: the processor itself prefetches only a few, and stops at the end of a
// page.
void fetch(const char* from, std::int64_t bytes) {
    for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

const char* cpu_linear_panels(const ToPanels& args, int threads) {
    const LinearKernels* simd = kernels();
    if (simd == nullptr) return kNoIsa;
    parallel_for(panel_count(args.columns, args.gated), args.columns * args.depth < kGrain ? 1 : threads,
                 [&](std::int64_t panel, int) { simd->make_panel(args, panel); });
    return nullptr;
}

const char* cpu_linear_product(const Product& args, int threads) {
    const LinearKernels* simd = kernels();
    if (simd == nullptr) return kNoIsa;
    if (args.rows == 0) return nullptr;
    const bool floats = args.dtype == DType::kFloat32 || args.wide_c;
    expect_writes(args.c, args.rows * args.columns * (floats ? 4 : 2));
    const bool gated = args.gate != Gate::kNone;
    const std::int64_t all_columns = gated ? 2 * args.columns : args.columns;
    const std::int64_t panels = panel_count(all_columns, gated);
    const int team = args.rows * all_columns * args.depth < kGrain ? 1 : threads;
    // A few tasks per thread balance the threads, even where other work shares a core; tasks of one panel
    // where there are few panels (NOTES.md). A transposed a is gathered by every task that has its rows, so
    // these tasks take all columns.
    const std::int64_t fewest =
        args.depth_stride == 1 ? 1 : std::min<std::int64_t>(4 * team, ceil_div(args.rows, 48));
    const std::int64_t row_blocks = std::max(fewest, ceil_div(args.rows, block_rows(args.dtype)));
    const std::int64_t rows = ceil_div(args.rows, row_blocks);
    const std::int64_t wanted = team == 1 ? 1 : ceil_div(4 * team, row_blocks);
    const std::int64_t column_blocks = std::min(wanted, panels);
    const std::int64_t columns = ceil_div(panels, column_blocks) * kPanel;
    const std::int64_t scratch = (simd->product_scratch(args, rows, columns) + 15) / 16 * 16;
    const std::int64_t padded = panels * kPanel;
    const Workspace workspace(2 * padded + team * scratch);
    if (workspace.data() == nullptr) return kOutOfMemory;
    // In the order of the panels' columns
    const auto ordered = [&](const Param& from, float* const out) -> float* {
        if (from.data == nullptr) return nullptr;
        const std::int64_t width = panel_columns(gated);
        float* to = out;
        for (std::int64_t first = 0; to < out + padded; first += width)
            for (std::int64_t begin = 0; begin < all_columns; begin += args.columns)  // of each half
                for (std::int64_t j = first; j < first + width; ++j)
                    *to++ = j < args.columns ? widened(from, begin + j) : 0.0f;
        return out;
    };
    const float* const bias = ordered(args.bias, workspace.data());
    Product inner = args;
    inner.scale = ordered({args.scale, DType::kFloat32}, workspace.data() + padded);
    const std::int64_t tasks = row_blocks * ceil_div(padded, columns);
    parallel_for(tasks, team, [&](std::int64_t task, int worker) {
        // Consecutive tasks share their columns: the weights stay in the cache that all threads share.
        const std::int64_t row = task % row_blocks * rows, column = task / row_blocks * columns;
        if (row >= args.rows) return;
        if (task < team && args.panels != nullptr) {
            // The first panels have not been prefetched.
            const std::int64_t size = args.scale != nullptr           ? 4 / args.group
                                      : args.dtype == DType::kFloat32 ? 4
                                                                      : 2;
            fetch(static_cast<const char*>(args.panels) + column * even(args.depth) * size,
                  std::min(even(args.depth), kFetched) * kPanel * size);
        }
        const std::int64_t next = std::min(task + team, tasks - 1) / row_blocks * columns;
        simd->product(inner, bias, row, std::min(args.rows, row + rows), column,
                      std::min(padded, column + columns), next,
                      workspace.data() + 2 * padded + worker * scratch);
    });
    return nullptr;
}

const char* cpu_linear_activation_bwd(const ActivationBwd& args, int threads) {
    keep_freed_pieces();
    const LinearKernels* simd = kernels();
    if (simd == nullptr) return kNoIsa;
    const std::int64_t step = std::max<std::int64_t>(16, ceil_div(args.rows, 128));
    const std::int64_t halves = args.gate == Gate::kNone ? 1 : 2;
    const std::int64_t chunks = ceil_div(args.rows, step), columns = halves * args.columns;
    const Workspace workspace(args.dbias == nullptr ? 1 : std::max<std::int64_t>(1, chunks * columns));
    if (workspace.data() == nullptr) return kOutOfMemory;
    float* const partial = args.dbias == nullptr ? nullptr : workspace.data();
    const int team = args.rows * columns < kGrain / 4 ? 1 : threads;
    parallel_for(chunks, team, [&](std::int64_t chunk, int) {
        simd->activation_bwd(args, chunk * step, std::min(args.rows, (chunk + 1) * step),
                             partial == nullptr ? nullptr : partial + chunk * columns);
    });
    if (partial == nullptr) return nullptr;
    for (std::int64_t j = 0; j < columns; ++j) {
        double sum = 0.0;
        for (std::int64_t chunk = 0; chunk < chunks; ++chunk) sum += partial[chunk * columns + j];
        args.dbias[j] = static_cast<float>(sum);
    }
    return nullptr;
}

}  // namespace fastbert
