// Linear layers on compute capability 9.0: the entry points of the kernel in linear_hopper.cuh.
#include "hopper_host.cuh"
#include "linear.h"
#include "linear_hopper.cuh"

namespace fastbert {
namespace cuda {
namespace {

struct CheapGelu {
    template <class T>
    static __device__ __forceinline__ float of(float z) {
        return cheap_gelu<T>(z);
    }
};

struct GeluTanh {
    template <class T>
    static __device__ __forceinline__ float of(float z) {
        return gelu_tanh<T>(z);
    }
};

template <class T>
const char* hopper_product(const LinearProduct& args, int blocks, std::uintptr_t stream, bool& refused) {
    using Tile = HopperTile;
    const std::int64_t tiles = ((args.rows + Tile::kRows - 1) / Tile::kRows) *
                               ((args.columns + Tile::kColumns - 1) / Tile::kColumns);
    if (tiles > 0x3fffffff) return "rows * columns: more than 2**30 - 1 tiles";
    HopperMaps maps = {};
    const bool made =
        make_map(maps.a, args.dtype, args.a, args.rows, args.depth, args.a_stride, Tile::kRows) &&
        make_map(maps.b, args.dtype, args.b, args.columns, args.depth, args.b_stride, Tile::kColumns) &&
        make_map(maps.c, args.dtype, args.c, args.rows, args.columns, args.columns, Tile::kPartRows) &&
        (args.pre == nullptr ||
         make_map(maps.pre, args.dtype, args.pre, args.rows, args.columns, args.columns, Tile::kPartRows));
    refused = !made;
    if (refused) return nullptr;
    const HopperArguments own{static_cast<int>(args.rows), static_cast<int>(args.columns),
                              static_cast<int>(args.depth), args.bias, args.pre != nullptr};
    const auto grid = static_cast<unsigned>(tiles < blocks ? tiles : blocks);
    const auto kernel =
        args.activation == Activation::kGelu ? hopper_kernel<T, CheapGelu> : hopper_kernel<T, GeluTanh>;
    return launch_shared(kernel, dim3(grid), dim3(Tile::kThreads), Tile::kBytes, stream, maps, own);
}

}  // namespace
}  // namespace cuda

bool cuda_linear_hopper(int device) {
    static cuda::HopperDevices devices;
    return devices.run(cuda::hopper_kernel<bf16, cuda::CheapGelu>, device);
}

bool cuda_linear_takes_hopper(std::int64_t rows, std::int64_t columns, std::int64_t depth,
                              Activation activation, bool exact) {
    constexpr std::int64_t kLeastDepth = 256;  // the ring is filled once
    const bool gelu = activation == Activation::kGelu && !exact;
    return (gelu || activation == Activation::kGeluTanh) && rows >= kManyRows && depth >= kLeastDepth &&
           columns % 8 == 0;
}

const char* cuda_linear_hopper_product(const LinearProduct& args, int blocks, int device,
                                       std::uintptr_t stream, bool& refused) {
    refused = false;
    constexpr std::int64_t kMost = 0x7fffffff - 256;
    if (args.rows == 0 || args.columns == 0) return nullptr;
    if (args.rows > kMost || args.columns > kMost || args.depth > kMost)
        return "rows, columns, depth: less than 2**31 - 256";
    const bool gelu = args.activation == Activation::kGelu && !args.exact;
    if (args.layout != Layout::kForward || (!gelu && args.activation != Activation::kGeluTanh) ||
        args.residual != nullptr || args.slope_at != nullptr)
        return "expected a forward product with GELU, not exact, or GELU-tanh, without a residual";
    if (args.depth < 1 || args.depth % 8 != 0 || args.columns % 8 != 0)
        return "depth, columns: multiples of 8";
    if (!cuda::aligned(args.a) || !cuda::aligned(args.b) || !cuda::aligned(args.c) ||
        !cuda::aligned(args.pre) || args.a_stride % 8 != 0 || args.b_stride % 8 != 0)
        return "a, b, c, pre: starts and rows on 16 bytes";
    if (reinterpret_cast<std::uintptr_t>(args.bias) % 4 != 0) return "bias: on 4 bytes";
    if (blocks < 1) return "blocks: at least 1";
    if (!cuda_linear_hopper(device)) return "the device or the build has no such kernel";
    switch (args.dtype) {
        case DType::kBFloat16:
            return cuda::hopper_product<bf16>(args, blocks, stream, refused);
        case DType::kFloat16:
            return cuda::hopper_product<fp16>(args, blocks, stream, refused);
        default:
            return "dtype: bfloat16 or float16";
    }
}

}  // namespace fastbert
