// Linear layers on a GPU: how a product is cut, and tiles of 128 rows forward. Contract:
// fastbert/ops/linear.py. The kernel: linear_tiles.cuh.
#include "linear_tiles.cuh"

namespace fastbert {
namespace cuda {

template <class T>
const char* large_product(const LinearProduct& args, std::uintptr_t stream) {
    return launch_product<T, 128, Layout::kForward>(args, stream);
}

namespace {

// Work of a block of the plan that has most of it. Counted, not measured, in bytes of shared memory's
// bandwidth: operands, and for the tensor cores 8 cycles per row and step of 64, in which 64 bytes each move.
std::int64_t work_of(const LinearPlan& plan, std::int64_t rows, std::int64_t columns, std::int64_t depth,
                     int multiprocessors) {
    // What a second launch costs: two and a half microseconds, 3.0 with its floats for 128 x 3,072 and five
    // parts (bench/results, H100).
    constexpr std::int64_t kSecond = 512 * 1024;
    const std::int64_t tile = plan.tile_rows, steps = (depth + 63) / 64;
    const std::int64_t tiles = ((rows + tile - 1) / tile) * ((columns + kTileColumns - 1) / kTileColumns);
    const std::int64_t waves = (tiles * plan.parts + multiprocessors - 1) / multiprocessors;
    const std::int64_t step = tile * 512 + (tile + kTileColumns) * 128;
    std::int64_t work = waves * ((steps + plan.parts - 1) / plan.parts) * step;
    // Floats that are written once and read once
    if (plan.parts > 1) work += kSecond + 8 * rows * columns * plan.parts / multiprocessors;
    return work;
}

template <class T>
const char* product(const LinearProduct& args, int device, std::uintptr_t stream) {
    const char* const error = args.layout != Layout::kForward ? backward_product<T>(args, stream)
                              : args.tile_rows == 128         ? large_product<T>(args, stream)
                                                              : small_product<T>(args, device, stream);
    const bool whole = args.parts == 1 && has_epilogue(args.activation, args.exact, args.gate);
    return error != nullptr || whole ? error : add_parts<T>(args, stream);
}

}  // namespace
}  // namespace cuda

LinearPlan cuda_linear_plan(Layout layout, std::int64_t rows, std::int64_t columns, std::int64_t depth,
                            int multiprocessors) {
    // Fewer steps of 64 do not fill the ring.
    constexpr std::int64_t kLeast = 2, kMost = 32;
    const std::int64_t most = depth / (64 * kLeast) < kMost ? depth / (64 * kLeast) : kMost;
    LinearPlan best{0, 1};
    std::int64_t least = 0;
    for (const int tile : {128, 64, 32, 16}) {
        // Tiles of 16 and 32 rows are for a single row tile: more of them would read the weight as often.
        if (tile < 64 && (layout != Layout::kForward || rows > tile)) continue;
        if (tile < 128 && layout == Layout::kWeights) continue;
        for (std::int64_t parts = 1; parts == 1 || parts <= most; ++parts) {
            const LinearPlan plan{tile, static_cast<int>(parts)};
            const std::int64_t work = cuda::work_of(plan, rows, columns, depth, multiprocessors);
            if (best.tile_rows == 0 || work < least) best = plan, least = work;
        }
    }
    return best;
}

std::int64_t cuda_linear_partial(std::int64_t rows, std::int64_t columns, int parts, Activation activation,
                                 bool exact, Gate gate) {
    if (parts == 1 && cuda::has_epilogue(activation, exact, gate)) return 0;
    const int halves = gate == Gate::kNone ? 1 : 2;
    return halves * parts * rows * ((columns + cuda::kChunk - 1) / cuda::kChunk * cuda::kChunk);
}

const char* cuda_linear_product(const LinearProduct& args, int device, std::uintptr_t stream) {
    constexpr std::int64_t kMost = 0x7fffffff - 256;
    const std::int64_t b_columns = args.gate == Gate::kNone ? args.columns : 2 * args.columns;
    if (args.rows == 0 || args.columns == 0) return nullptr;
    if (args.rows > kMost || b_columns > kMost || args.depth > kMost)
        return "rows, columns, depth: less than 2**31 - 256";
    const bool a_runs = (args.layout == Layout::kWeights ? args.rows : args.depth) % cuda::kChunk == 0;
    const bool b_runs = (args.layout == Layout::kForward ? args.depth : args.columns) % cuda::kChunk == 0;
    if (!a_runs || !b_runs || args.depth < 1) return "a, b: contiguous runs of a multiple of 8 elements";
    if (!cuda::aligned(args.a) || !cuda::aligned(args.b) || args.a_stride % cuda::kChunk != 0 ||
        args.b_stride % cuda::kChunk != 0)
        return "a, b: starts and rows on 16 bytes";
    if (args.gate != Gate::kNone &&
        (args.layout != Layout::kForward || args.activation == Activation::kNone || args.slope_at != nullptr))
        return "gate: needs a forward product with an activation";
    if (args.partial == nullptr &&
        cuda_linear_partial(args.rows, args.columns, args.parts, args.activation, args.exact, args.gate) != 0)
        return "partial: an address, for this activation or several parts";
    if (args.slope_at != nullptr &&
        (args.activation == Activation::kNone || args.columns % cuda::kChunk != 0))
        return "slope_at: needs an activation";
    if (const cudaError_t error = cudaSetDevice(device)) return cudaGetErrorString(error);
    switch (args.dtype) {
        case DType::kBFloat16:
            return cuda::product<bf16>(args, device, stream);
        case DType::kFloat16:
            return cuda::product<fp16>(args, device, stream);
        default:
            return "dtype: bfloat16 or float16";
    }
}

template const char* cuda::large_product<bf16>(const LinearProduct&, std::uintptr_t);
template const char* cuda::large_product<fp16>(const LinearProduct&, std::uintptr_t);

}  // namespace fastbert
