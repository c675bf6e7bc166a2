// Products of a linear layer's backward: dx = g weight, with an activation's derivative where g of the layer
// before is wanted, and dweight = gT x. The kernel: linear_tiles.cuh.
#include "linear_tiles.cuh"

namespace fastbert {
namespace cuda {

template <class T>
const char* backward_product(const LinearProduct& args, std::uintptr_t stream) {
    if (args.layout == Layout::kInputs && args.tile_rows == 64)
        return launch_product<T, 64, Layout::kInputs>(args, stream);
    if (args.tile_rows != 128) return "tile_rows: 128 backward, or 64 for dx";
    if (args.layout == Layout::kInputs) return launch_product<T, 128, Layout::kInputs>(args, stream);
    return launch_product<T, 128, Layout::kWeights>(args, stream);
}

template const char* backward_product<bf16>(const LinearProduct&, std::uintptr_t);
template const char* backward_product<fp16>(const LinearProduct&, std::uintptr_t);

}  // namespace cuda
}  // namespace fastbert
