// LayerNorm on the CPU: cuts the rows into tasks, and adds up the column sums of backward.
//
// Backward cuts the rows into chunks that depend on the shape alone, never on the number of threads. Each
// chunk sums its own rows. Then the chunks are added in order, in double. Results are bit-equal for any
// number of threads.
#include "layer_norm.h"

#include <algorithm>

#include "isa.h"
#include "parallel.h"
#include "workspace.h"

namespace fastbert {

FASTBERT_KERNELS(LayerNormKernels, layer_norm_kernels)

const LayerNormKernels* layer_norm_kernels() { return kernels(); }

std::int64_t norm_rows_per_task(std::int64_t rows, std::int64_t hidden, int threads) {
    const std::int64_t grain = std::max<std::int64_t>(1, kNormGrain / hidden);
    const std::int64_t share = (rows + 4 * threads - 1) / (4 * threads);  // a few tasks per thread even out
    return std::max(grain, share);
}

std::int64_t norm_rows_per_chunk(std::int64_t rows) {
    const std::int64_t share = (rows + 255) / 256;
    return std::max<std::int64_t>(32, (share + 3) / 4 * 4);
}

const char* cpu_layer_norm_fwd(const LayerNormFwd& args, int threads) {
    const LayerNormKernels* simd = layer_norm_kernels();
    if (simd == nullptr) return kNoIsa;
    if (args.rows == 0) return nullptr;
    const std::int64_t hidden = args.hidden, width = padded(hidden);
    const Workspace workspace((3 + 2 * static_cast<std::int64_t>(threads)) * width);
    if (workspace.data() == nullptr) return kOutOfMemory;
    float *weight = workspace.data(), *bias = weight + width, *x_bias = bias + width,
          *scratch = x_bias + width;
    simd->widen(args.weight, 1.0f, weight, hidden);
    simd->widen(args.bias, 0.0f, bias, hidden);
    if (args.x_bias.data != nullptr)
        simd->widen(args.x_bias, 0.0f, x_bias, hidden);
    else
        x_bias = nullptr;
    const std::int64_t step = norm_rows_per_task(args.rows, hidden, threads);
    parallel_for((args.rows + step - 1) / step, threads, [&](std::int64_t task, int worker) {
        simd->forward(args, weight, bias, x_bias, task * step, std::min(args.rows, (task + 1) * step),
                      scratch + worker * 2 * width);
    });
    return nullptr;
}

const char* cpu_layer_norm_bwd(const LayerNormBwd& args, int threads) {
    const LayerNormKernels* simd = layer_norm_kernels();
    if (simd == nullptr) return kNoIsa;
    const std::int64_t hidden = args.hidden, width = padded(hidden);
    const std::int64_t step = norm_rows_per_chunk(args.rows), chunks = (args.rows + step - 1) / step;
    const Workspace workspace((1 + 3 * chunks + threads) * width);
    if (workspace.data() == nullptr) return kOutOfMemory;
    float *weight = workspace.data(), *partial = weight + width, *scratch = partial + 3 * chunks * width;
    simd->widen(args.weight, 1.0f, weight, hidden);
    const int team = args.rows * hidden < kNormGrain ? 1 : threads;
    parallel_for(chunks, team, [&](std::int64_t chunk, int worker) {
        simd->backward(args, weight, chunk * step, std::min(args.rows, (chunk + 1) * step),
                       partial + chunk * 3 * width, scratch + worker * width);
    });
    // A second parallel region costs more than adding up one or two megabytes.
    float* const sums[3] = {args.dweight, args.dbias, args.dx_bias};
    const std::int64_t tile = 256, tiles = (hidden + tile - 1) / tile;
    parallel_for(3 * tiles, 3 * chunks * width < 16 * kNormGrain ? 1 : team, [&](std::int64_t task, int) {
        const std::int64_t k = task / tiles, begin = task % tiles * tile;
        if (sums[k] == nullptr) return;
        simd->sum_chunks(partial + k * width, chunks, 3 * width, sums[k], begin,
                         std::min(hidden, begin + tile));
    });
    return nullptr;
}

}  // namespace fastbert
