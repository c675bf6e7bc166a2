// Forward products of tiles of 16, 32 and 64 rows.
// The kernel: linear_tiles.cuh.
#include "linear_tiles.cuh"

namespace fastbert {
namespace cuda {

template <class T>
const char* small_product(const LinearProduct& args, std::uintptr_t stream) {
    switch (args.tile_rows) {
        case 16:
            return launch_product<T, 16, Layout::kForward>(args, stream);
        case 32:
            return launch_product<T, 32, Layout::kForward>(args, stream);
        case 64:
            return launch_product<T, 64, Layout::kForward>(args, stream);
        default:
            return "tile_rows: 16, 32, 64 or 128";
    }
}

template const char* small_product<bf16>(const LinearProduct&, std::uintptr_t);
template const char* small_product<fp16>(const LinearProduct&, std::uintptr_t);

}  // namespace cuda
}  // namespace fastbert
