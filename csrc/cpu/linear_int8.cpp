// 8-bit linear layers on the CPU: cuts first the rows, then the product into tasks. Sums are integers, so
// results are bit-equal for any number of threads.
#include "linear_int8.h"

#include <algorithm>

#include "isa.h"
#include "parallel.h"
#include "widened.h"
#include "workspace.h"

namespace fastbert {

#if FASTBERT_X86
namespace avx2 {
extern const LinearInt8Kernels linear_int8_kernels, linear_int8_vnni_kernels;
}
namespace avx512 {
extern const LinearInt8Kernels linear_int8_kernels, linear_int8_vnni_kernels;
}
#endif

namespace {

constexpr std::int64_t kBlockRows = 240;
constexpr std::int64_t kGrain = 1 << 19;  // multiply-adds that pay for waking a thread

const LinearInt8Kernels* kernels() {
#if FASTBERT_X86
    static const bool vnni = __builtin_cpu_supports("avx512vnni");
    if (current_isa() == Isa::kAvx2Vnni) return &avx2::linear_int8_vnni_kernels;
    return pick(&avx2::linear_int8_kernels,
                vnni ? &avx512::linear_int8_vnni_kernels : &avx512::linear_int8_kernels);
#else
    return nullptr;
#endif
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
std::int64_t padded_to_panels(std::int64_t columns, bool gated) {
    return panel_count(columns, gated) * kPanel;
}

// Bytes after the sums: two layouts then always differ in size, by which the launcher tells them apart.
std::int64_t spare_bytes(const LinearInt8Kernels& simd, bool gated) { return simd.group - (gated ? 1 : 0); }

}  // namespace

std::int64_t int8_panels_size(std::int64_t depth, std::int64_t columns, bool gated) {
    const LinearInt8Kernels* simd = kernels();
    if (simd == nullptr) return 0;
    return padded_to_panels(columns, gated) * 4 * (groups_of(depth, simd->group) + 1) +
           spare_bytes(*simd, gated);
}

int int8_group() { return kernels() == nullptr ? 0 : kernels()->group; }

const char* cpu_linear_int8_panels(const ToPanelsInt8& args, int threads) {
    const LinearInt8Kernels* simd = kernels();
    if (simd == nullptr) return kNoIsa;
    const std::int64_t padded = padded_to_panels(args.columns, args.gated);
    auto* const sums =
        reinterpret_cast<std::int32_t*>(args.panels + padded * 4 * groups_of(args.depth, simd->group));
    parallel_for(padded / kPanel, args.columns * args.depth < kGrain ? 1 : threads,
                 [&](std::int64_t panel, int) { simd->make_panel(args, panel, sums); });
    std::fill_n(reinterpret_cast<std::uint8_t*>(sums + padded), spare_bytes(*simd, args.gated), 0);
    return nullptr;
}

const char* cpu_linear_int8(const ProductInt8& args, int threads) {
    const LinearInt8Kernels* simd = kernels();
    if (simd == nullptr) return kNoIsa;
    if (args.rows == 0) return nullptr;
    const bool gated = args.gate != Gate::kNone;
    const std::int64_t all_columns = gated ? 2 * args.columns : args.columns;
    const std::int64_t count = groups_of(args.depth, simd->group);
    const std::int64_t padded = padded_to_panels(all_columns, gated), width = panel_columns(gated);
    const int team = args.rows * all_columns * args.depth < kGrain ? 1 : threads;
    static_assert(sizeof(QuantizedRow) == 2 * sizeof(float), "");
    const Workspace workspace(2 * padded + args.rows * (count + 2));
    if (workspace.data() == nullptr) return kOutOfMemory;
    float *const scale = workspace.data(), *const bias = scale + padded;
    auto* const groups = reinterpret_cast<std::uint32_t*>(bias + padded);
    auto* const quantized = reinterpret_cast<QuantizedRow*>(groups + args.rows * count);
    for (std::int64_t begin = 0; begin < padded; begin += width) {  // the columns of one half in a panel
        const std::int64_t first = gated ? begin / kPanel * width : begin;
        const std::int64_t half = gated && begin % kPanel != 0 ? args.columns : 0;
        for (std::int64_t j = first, to = begin; j < first + width; ++j, ++to) {
            const bool real = j < args.columns;
            scale[to] = real ? args.scale[half + j] : 0.0f;
            bias[to] = real && args.bias.data != nullptr ? widened(args.bias, half + j) : 0.0f;
        }
    }

    const std::int64_t some = std::max<std::int64_t>(1, (1 << 15) / args.depth);
    parallel_for(ceil_div(args.rows, some), team, [&](std::int64_t task, int) {
        for (std::int64_t row = task * some; row < std::min(args.rows, (task + 1) * some); ++row)
            quantized[row] = simd->quantize(args, row, groups + row * count);
    });

    const std::int64_t panels = padded / kPanel;
    const std::int64_t row_blocks = ceil_div(args.rows, kBlockRows), rows = ceil_div(args.rows, row_blocks);
    const std::int64_t wanted = team == 1 ? 1 : ceil_div(4 * team, row_blocks);
    const std::int64_t columns = ceil_div(panels, std::min(wanted, panels)) * kPanel;
    const std::int64_t tasks = row_blocks * ceil_div(padded, columns);
    parallel_for(tasks, team, [&](std::int64_t task, int) {
        const std::int64_t row = task % row_blocks * rows, column = task / row_blocks * columns;
        if (row >= args.rows) return;
        simd->product(args, groups, quantized, scale, args.bias.data == nullptr ? nullptr : bias, row,
                      std::min(args.rows, row + rows), column, std::min(padded, column + columns),
                      std::min(task + team, tasks - 1) / row_blocks * columns);
    });
    return nullptr;
}

}  // namespace fastbert
