// Forward products of tiles of 16, 32 and 64 rows.
// The kernel: linear_tiles.cuh.
#include "linear_tiles.cuh"

namespace fastbert {
namespace cuda {

namespace {

// Whether every block has a multiprocessor to itself, and more steps than the usual ring holds.
template <int kTileRows>
bool is_deep(const LinearProduct& args, int device) {
    using Shape = Tile<kTileRows>;
    const std::int64_t steps = (args.depth + Shape::kDepth - 1) / Shape::kDepth;
    if (steps < args.parts * Shape::kSlots) return false;
    int multiprocessors = 0, shared = 0;
    const bool known =
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) == cudaSuccess &&
        cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess;
    if (!known) cudaGetLastError();  // the next launch must not see it
    return known && tiles_of(args, kTileRows) * args.parts <= multiprocessors &&
           Shape::kDeep * Shape::kSlot * 2 <= shared;
}

template <class T, int kTileRows>
const char* launch_small(const LinearProduct& args, int device, std::uintptr_t stream) {
    constexpr int kDeep = Tile<kTileRows>::kDeep;
    return is_deep<kTileRows>(args, device)
               ? launch_product<T, kTileRows, Layout::kForward, kDeep>(args, stream)
               : launch_product<T, kTileRows, Layout::kForward>(args, stream);
}

}  // namespace

template <class T>
const char* small_product(const LinearProduct& args, int device, std::uintptr_t stream) {
    switch (args.tile_rows) {
        case 16:
            return launch_small<T, 16>(args, device, stream);
        case 32:
            return launch_small<T, 32>(args, device, stream);
        case 64:
            return launch_small<T, 64>(args, device, stream);
        default:
            return "tile_rows: 16, 32, 64 or 128";
    }
}

template const char* small_product<bf16>(const LinearProduct&, int, std::uintptr_t);
template const char* small_product<fp16>(const LinearProduct&, int, std::uintptr_t);

}  // namespace cuda
}  // namespace fastbert
