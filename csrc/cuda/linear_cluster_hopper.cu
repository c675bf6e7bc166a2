// A forward product of few rows on compute capability 9.0: c = act(a bT + bias).
//
// Tiling     A cluster owns a tile of 64 x 64 of c, and each of its blocks a part of the depth: as many parts
//            as fill the multiprocessors, at most 8.
// Pipeline   A fifth warp copies 64 x 64 of a and of b into a ring of 6 slots, ahead of a warp group's
//            products. What fits into the ring of b, a weight, comes before the kernel waits for those before
//            it (common.cuh, "chained"). Two blocks have room on a multiprocessor: this one, and one of the
//            kernel that follows.
// Precision  float sums of a part, added in the order of the parts beginning with the bias, so that every run
//            has the same bits; one rounding.
// Epilogue   The parts' sums lie where the ring was. Each block adds its share of the tile's chunks of 8
//            columns from the shared memory of all, and stores them.
// Source     PTX ISA 8.0, wgmma, mapa, griddepcontrol.
#include <algorithm>

#include "activation.cuh"
#include "hopper_host.cuh"
#include "linear.h"

namespace fastbert {
namespace cuda {
namespace {

struct ClusterTile {
    static constexpr int kRows = 64, kColumns = 64, kDepth = kSwizzled, kSlots = 6, kMostParts = 8;
    static constexpr int kTileBytes = kRows * kDepth * 2, kSlotBytes = 2 * kTileBytes;
    static constexpr int kWarps = kGroupThreads / kWarp, kThreads = kGroupThreads + kWarp;
    // Floats between rows of sums: 8 more, so that half a warp writes to all banks
    static constexpr int kStride = kColumns + 8;
    // Tiles begin on 1,024 bytes.
    static constexpr int kBytes = kSlots * kSlotBytes + 1024;
};

struct ClusterMaps {
    CUtensorMap a, b;
};

struct ClusterArguments {
    int rows, columns, depth, parts;
    const void* bias;  // may be null
    void* c;
    Activation activation;
    bool exact;
};

template <class T>
__global__ void __launch_bounds__(ClusterTile::kThreads, 2)
    cluster_hopper_kernel(const __grid_constant__ ClusterMaps maps, ClusterArguments args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using Tile = ClusterTile;
    constexpr int kSlots = Tile::kSlots;
    __shared__ alignas(8) std::uint64_t full[kSlots], empty[kSlots];
    char* const start = dynamic_shared();
    char* const ring = start + (0u - shared_address(start)) % 1024;
    float* const sums = reinterpret_cast<float*>(ring);
    const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
    const int part = static_cast<int>(blockIdx.x) % args.parts,
              tile = static_cast<int>(blockIdx.x) / args.parts;
    const int row_tiles = (args.rows + Tile::kRows - 1) / Tile::kRows;
    const int row = tile % row_tiles * Tile::kRows, column = tile / row_tiles * Tile::kColumns;
    const int all_steps = (args.depth + Tile::kDepth - 1) / Tile::kDepth;
    const int begin = all_steps * part / args.parts, steps = all_steps * (part + 1) / args.parts - begin;
    if (thread == 0) {
        prefetch_map(maps.a);
        prefetch_map(maps.b);
        for (int i = 0; i < kSlots; ++i) {
            init_barrier(&full[i], 1);
            init_barrier(&empty[i], Tile::kWarps);
        }
        fence_barriers();
    }
    __syncthreads();
    let_next_begin();

    if (warp == Tile::kWarps) {
        const auto copy_a = [&](int step) {
            if (lane == 0)
                load_tile(ring + step % kSlots * Tile::kSlotBytes, maps.a, &full[step % kSlots], row,
                          (begin + step) * Tile::kDepth);
        };
        const auto copy_b = [&](int step) {
            const int slot = step % kSlots;
            if (lane != 0) return;
            arrive_expecting(&full[slot], Tile::kSlotBytes);
            load_tile(ring + slot * Tile::kSlotBytes + Tile::kTileBytes, maps.b, &full[slot], column,
                      (begin + step) * Tile::kDepth);
        };
        for (int step = 0; step < steps && step < kSlots; ++step) copy_b(step);
        // The other steps of b come to the L2 cache meanwhile, once for all rows.
        if (lane == 0 && row == 0)
#pragma unroll 1
            for (int step = kSlots; step < steps; ++step)
                prefetch_tile(maps.b, column, (begin + step) * Tile::kDepth);
        wait_for_kernels();
        for (int step = 0; step < steps && step < kSlots; ++step) copy_a(step);
        for (int step = kSlots; step < steps; ++step) {
            wait_phase(&empty[step % kSlots], (step / kSlots - 1) & 1);
            copy_b(step);
            copy_a(step);
        }
        __syncwarp();
    } else {
        float c[32];
        for (int step = 0; step < steps; ++step) {
            const char* const slot = ring + step % kSlots * Tile::kSlotBytes;
            wait_phase(&full[step % kSlots], step / kSlots & 1);
            const std::uint64_t a = operand_at(slot), b = operand_at(slot + Tile::kTileBytes);
            fence_products();
#pragma unroll
            for (int k = 0; k < Tile::kDepth / 16; ++k)
                group_product<T>(c, a + k * kDepthStep, b + k * kDepthStep, step + k > 0);
            commit_products();
            wait_products<1>();
            if (step > 0 && lane == 0) arrive(&empty[(step - 1) % kSlots]);
        }
        wait_products<0>();
        // No product of the group reads the ring any more.
        sync_threads_at(1, kGroupThreads);
        float* const own = sums + (16 * warp + lane / 4) * Tile::kStride + 2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<float2*>(own + 8 * half * Tile::kStride + 8 * i) =
                    make_float2(c[4 * i + 2 * half], c[4 * i + 2 * half + 1]);
    }
    sync_cluster();

    wait_for_kernels();
    constexpr int kAcross = Tile::kColumns / 8;
    const int down = args.rows - row < Tile::kRows ? args.rows - row : Tile::kRows;
    const int chunks = down * kAcross, last = chunks * (part + 1) / args.parts;
    for (int chunk = chunks * part / args.parts + thread; chunk < last; chunk += Tile::kThreads) {
        const int own_row = chunk / kAcross, own_column = chunk % kAcross * 8;
        if (column + own_column >= args.columns) continue;
        const float* const from = sums + own_row * Tile::kStride + own_column;
        float z[8] = {};
        if (args.bias != nullptr)
            widen_pack(load_pack(static_cast<const T*>(args.bias) + column + own_column), z);
        float4 found[Tile::kMostParts][2];
#pragma unroll
        for (int i = 0; i < Tile::kMostParts; ++i)
            if (i < args.parts)
                for (int half = 0; half < 2; ++half) found[i][half] = load_from_rank(from + 4 * half, i);
#pragma unroll
        for (int i = 0; i < Tile::kMostParts; ++i)
            if (i < args.parts)
                for (int half = 0; half < 2; ++half) {
                    z[4 * half] += found[i][half].x, z[4 * half + 1] += found[i][half].y;
                    z[4 * half + 2] += found[i][half].z, z[4 * half + 3] += found[i][half].w;
                }
        with_activation<T>(args.activation, args.exact, [&](auto function) {
#pragma unroll
            for (int i = 0; i < 8; ++i) z[i] = function(z[i]);
        });
        store_pack(static_cast<T*>(args.c) + static_cast<std::int64_t>(row + own_row) * args.columns +
                       column + own_column,
                   z);
    }
    // Until no block reads the sums of this one
    sync_cluster();
#endif
}

// Parts of the depth: as many as fill the multiprocessors, of two steps or more; of equally long parts the
// fewest.
int parts_of(std::int64_t tiles, std::int64_t depth, int multiprocessors) {
    const std::int64_t steps = (depth + ClusterTile::kDepth - 1) / ClusterTile::kDepth;
    std::int64_t most = std::min<std::int64_t>(multiprocessors / tiles, ClusterTile::kMostParts);
    most = std::max<std::int64_t>(std::min(most, steps / 2), 1);
    const std::int64_t longest = (steps + most - 1) / most;
    return static_cast<int>((steps + longest - 1) / longest);
}

template <class T>
const char* cluster_product(const LinearProduct& args, int multiprocessors, std::uintptr_t stream,
                            bool& refused) {
    using Tile = ClusterTile;
    const std::int64_t tiles = ((args.rows + Tile::kRows - 1) / Tile::kRows) *
                               ((args.columns + Tile::kColumns - 1) / Tile::kColumns);
    if (tiles > 0x3fffffff / Tile::kMostParts) return "rows * columns: more than 2**27 - 1 tiles";
    ClusterMaps maps = {};
    refused = !make_map(maps.a, args.dtype, args.a, args.rows, args.depth, args.a_stride, Tile::kRows) ||
              !make_map(maps.b, args.dtype, args.b, args.columns, args.depth, args.b_stride, Tile::kColumns);
    if (refused) return nullptr;
    const int parts = parts_of(tiles, args.depth, multiprocessors);
    const ClusterArguments own{static_cast<int>(args.rows),
                               static_cast<int>(args.columns),
                               static_cast<int>(args.depth),
                               parts,
                               args.bias,
                               args.c,
                               args.activation,
                               args.exact};
    return launch_clusters(static_cast<unsigned>(parts), cluster_hopper_kernel<T>,
                           dim3(static_cast<unsigned>(tiles * parts)), dim3(Tile::kThreads), Tile::kBytes,
                           stream, maps, own);
}

}  // namespace
}  // namespace cuda

const char* cuda_linear_cluster_product(const LinearProduct& args, int multiprocessors, int device,
                                        std::uintptr_t stream, bool& refused) {
    refused = false;
    constexpr std::int64_t kMost = 0x7fffffff - 256;
    if (args.rows == 0 || args.columns == 0) return nullptr;
    if (args.rows > kMost || args.columns > kMost || args.depth > kMost)
        return "rows, columns, depth: less than 2**31 - 256";
    if (args.layout != Layout::kForward || args.gate != Gate::kNone || args.residual != nullptr ||
        args.pre != nullptr || args.slope_at != nullptr)
        return "expected a forward product without a gate, a residual and pre";
    if (args.depth < 1 || args.depth % 8 != 0 || args.columns % 8 != 0)
        return "depth, columns: multiples of 8";
    if (!cuda::aligned(args.a) || !cuda::aligned(args.b) || !cuda::aligned(args.bias) ||
        !cuda::aligned(args.c) || args.a_stride % 8 != 0 || args.b_stride % 8 != 0)
        return "a, b, bias, c: starts and rows on 16 bytes";
    if (multiprocessors < 1) return "multiprocessors: at least 1";
    if (!cuda_linear_hopper(device)) return "the device or the build has no such kernel";
    switch (args.dtype) {
        case DType::kBFloat16:
            return cuda::cluster_product<bf16>(args, multiprocessors, stream, refused);
        case DType::kFloat16:
            return cuda::cluster_product<fp16>(args, multiprocessors, stream, refused);
        default:
            return "dtype: bfloat16 or float16";
    }
}

}  // namespace fastbert
