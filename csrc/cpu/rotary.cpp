// Rotary positions on the CPU: cuts the rows into tasks.
#include "rotary.h"

#include <algorithm>

#include "isa.h"
#include "layer_norm.h"
#include "pages.h"
#include "parallel.h"
#include "workspace.h"

namespace fastbert {

FASTBERT_KERNELS(RotaryKernels, rotary_kernels)

const char* cpu_rotary(const Rotary& args, int threads) {
    const RotaryKernels* simd = kernels();
    if (simd == nullptr) return kNoIsa;
    const std::int64_t width = args.heads * args.headdim, item = args.dtype == DType::kFloat32 ? 4 : 2;
    if (args.rows * width == 0) return nullptr;
    // In place the pages are there already.
    const std::int64_t total = args.x == args.y ? 0 : args.rows * width * item;
    const std::int64_t each = args.interleaved ? 4 * args.half : 0;  // floats of scratch per thread
    const Workspace workspace(std::max<std::int64_t>(1, threads * each));
    if (workspace.data() == nullptr) return kOutOfMemory;
    const std::int64_t step = norm_rows_per_task(args.rows, width, threads);
    expect_writes(args.y, total);
    parallel_for((args.rows + step - 1) / step, threads, [&](std::int64_t task, int worker) {
        const std::int64_t begin = task * step, end = std::min(args.rows, begin + step);
        populate(static_cast<char*>(args.y) + begin * width * item, (end - begin) * width * item, total);
        simd->rotate(args, begin, end, workspace.data() + worker * each);
    });
    return nullptr;
}

}  // namespace fastbert
