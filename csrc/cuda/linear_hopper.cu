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

struct Silu {
    template <class T>
    static __device__ __forceinline__ float of(float z) {
        return silu<T>(z);
    }
};

struct CheapGeluSlope {
    template <class T>
    static __device__ __forceinline__ float of(float z) {
        return cheap_gelu_slope<T>(z);
    }
};

struct GeluTanhSlope {
    template <class T>
    static __device__ __forceinline__ float of(float z) {
        // Without divisions: three of them per value spill. The rounding of c is 2^8 times as coarse.
        return gelu_tanh_slope<bf16>(z);
    }
};

template <class T>
auto kernel_of(Activation activation, bool gated, bool slope) {
    if (slope)
        return activation == Activation::kGelu ? hopper_kernel<T, CheapGeluSlope, false, SlopeTile>
                                               : hopper_kernel<T, GeluTanhSlope, false, SlopeTile>;
    if (activation == Activation::kGelu)
        return gated ? hopper_kernel<T, CheapGelu, true> : hopper_kernel<T, CheapGelu, false>;
    if (activation == Activation::kSilu) return hopper_kernel<T, Silu, true>;
    return gated ? hopper_kernel<T, GeluTanh, true> : hopper_kernel<T, GeluTanh, false>;
}

// Whether the kernels have this activation.
bool has_hopper(Activation activation, bool exact, Gate gate) {
    return (activation == Activation::kGelu && !exact) || activation == Activation::kGeluTanh ||
           (activation == Activation::kSilu && gate != Gate::kNone);
}

template <class T>
const char* hopper_product(const LinearProduct& args, int blocks, std::uintptr_t stream, bool& refused) {
    using Tile = HopperTile;
    const bool gated = args.gate != Gate::kNone, second = args.gate == Gate::kSecond;
    const bool slope = args.slope_at != nullptr;
    const void* const pre = slope ? args.slope_at : args.pre;
    const std::int64_t columns = gated ? Tile::kGatedColumns : Tile::kColumns, halves = gated ? 2 : 1;
    const std::int64_t tiles =
        ((args.rows + Tile::kRows - 1) / Tile::kRows) * ((args.columns + columns - 1) / columns);
    if (tiles > 0x3fffffff) return "rows * columns: more than 2**30 - 1 tiles";
    HopperMaps maps = {};
    // pre, or one half of it
    const auto make_pre = [&](CUtensorMap& map, bool behind) {
        const T* const from = static_cast<const T*>(pre) + (behind ? args.columns : 0);
        return make_map(map, args.dtype, from, args.rows, args.columns, halves * args.columns,
                        Tile::kPartRows);
    };
    const bool made =
        make_map(maps.a, args.dtype, args.a, args.rows, args.depth, args.a_stride, Tile::kRows) &&
        make_map(maps.b, args.dtype, args.b, slope ? args.depth : halves * args.columns,
                 slope ? args.columns : args.depth, args.b_stride,
                 slope ? Tile::kDepth : static_cast<int>(columns)) &&
        make_map(maps.c, args.dtype, args.c, args.rows, args.columns, args.columns, Tile::kPartRows) &&
        (pre == nullptr || (make_pre(maps.pre, second) && (!gated || make_pre(maps.other, !second))));
    refused = !made;
    if (refused) return nullptr;
    const int across = static_cast<int>(args.columns);
    HopperArguments own{static_cast<int>(args.rows),
                        across,
                        static_cast<int>(args.depth),
                        args.bias,
                        pre != nullptr,
                        second ? across : 0,
                        second ? 0 : across};
    own.sums = args.sums;
    const auto grid = static_cast<unsigned>(tiles < blocks ? tiles : blocks);
    return launch_shared(kernel_of<T>(args.activation, gated, slope), dim3(grid), dim3(Tile::kThreads),
                         slope ? SlopeTile::kBytes : Tile::kBytes, stream, maps, own);
}

}  // namespace
}  // namespace cuda

bool cuda_linear_hopper(int device) {
    static cuda::HopperDevices devices;
    return devices.run(cuda::hopper_kernel<bf16, cuda::CheapGelu, false>, device);
}

bool cuda_linear_takes_hopper(std::int64_t rows, std::int64_t columns, std::int64_t depth,
                              Activation activation, bool exact, Gate gate) {
    constexpr std::int64_t kLeastDepth = 256;  // the ring is filled once
    return cuda::has_hopper(activation, exact, gate) && rows >= kManyRows && depth >= kLeastDepth &&
           columns % 8 == 0;
}

const char* cuda_linear_hopper_product(const LinearProduct& args, int blocks, int device,
                                       std::uintptr_t stream, bool& refused) {
    refused = false;
    constexpr std::int64_t kMost = 0x7fffffff - 256;
    const std::int64_t b_columns = args.gate == Gate::kNone ? args.columns : 2 * args.columns;
    if (args.rows == 0 || args.columns == 0) return nullptr;
    if (args.rows > kMost || b_columns > kMost || args.depth > kMost)
        return "rows, columns, depth: less than 2**31 - 256";
    const bool slope = args.slope_at != nullptr;
    if (args.layout != (slope ? Layout::kInputs : Layout::kForward) || args.residual != nullptr ||
        !cuda::has_hopper(args.activation, args.exact, args.gate) ||
        (slope && (args.gate != Gate::kNone || args.bias != nullptr || args.pre != nullptr)))
        return "expected a forward product with GELU, not exact, GELU-tanh, gated SiLU or a slope; no "
               "residual";
    if (args.depth < 1 || args.depth % 8 != 0 || args.columns % 8 != 0)
        return "depth, columns: multiples of 8";
    if (!cuda::aligned(args.a) || !cuda::aligned(args.b) || !cuda::aligned(args.c) ||
        !cuda::aligned(slope ? args.slope_at : args.pre) || args.a_stride % 8 != 0 || args.b_stride % 8 != 0)
        return "a, b, c, pre: starts and rows on 16 bytes";
    if (reinterpret_cast<std::uintptr_t>(args.bias) % 4 != 0) return "bias: on 4 bytes";
    if (reinterpret_cast<std::uintptr_t>(args.sums) % 8 != 0) return "sums: on 8 bytes";
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
