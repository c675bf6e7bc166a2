// A forward product of few rows on compute capability 9.0: c = act(a bT + bias) + residual. LayerNorm is part
// of the products around it: the product that adds stores its rows' moments, and the next one norms them.
//
// Tiling     A cluster owns a tile of 64 x 64 of c, behind a norm of 64 x 128, and each of its blocks a part
//            of the depth: as many parts as fill the multiprocessors, at most 8. A warp group has 64 columns.
// Pipeline   One more warp copies 64 columns of a and of b into a ring of 6 or 4 slots, ahead of the groups'
//            products. What fits into the ring of b, a weight, comes before the kernel waits for those before
//            it (common.cuh, "chained"). Two blocks have room on a multiprocessor: this one, and one of the
//            kernel that follows.
// Norm       A block adds up its rows' moments of 64 columns (Chan), and norms a in the ring.
// Precision  float sums of a part, added in the order of the parts beginning with the bias, so that every run
//            has the same bits; one rounding. Moments are those of the rounded c; normed rows are rounded.
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

constexpr int kTile = 64, kMostParts = 8;

template <bool kNormed>
struct ClusterTile {
    static constexpr int kGroups = kNormed ? 2 : 1, kSlots = kNormed ? 4 : 6;
    static constexpr int kRows = kTile, kColumns = kGroups * kTile, kDepth = kSwizzled;
    static constexpr int kTileBytes = kTile * kDepth * 2, kSlotBytes = (1 + kGroups) * kTileBytes;
    static constexpr int kConsumers = kGroups * kGroupThreads, kThreads = kConsumers + kWarp;
    // Floats between rows of sums: 8 more, so that half a warp writes to all banks
    static constexpr int kStride = kColumns + 8;
    // Tiles begin on 1,024 bytes.
    static constexpr int kBytes = kSlots * kSlotBytes + 1024;
};

struct ClusterMaps {
    CUtensorMap a, b;
};

// With one instruction per value of bfloat16
template <class T>
__device__ __forceinline__ void widen_words(const uint4& words, float (&z)[8]) {
    const std::uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        unpack_pair<T>(pairs[i / 2], z[i], z[i + 1]);
        if (std::is_same_v<T, bf16>) z[i + 1] = __uint_as_float(pairs[i / 2] & 0xffff0000u);
    }
}

// mean and rstd of one of a's rows, by 4 lanes in turn
__device__ __forceinline__ float2 row_statistics(const Moments* moments, int hidden, float eps, int lane) {
    // Around a mean of 64 columns nothing cancels.
    const float around = moments[0].mean;
    float total = 0.0f, square = 0.0f;
    for (int first = lane; first * kTile < hidden; first += 16) {
        Moments own[4];  // loaded at once
#pragma unroll
        for (int i = 0; i < 4; ++i)
            own[i] = (first + 4 * i) * kTile < hidden ? moments[first + 4 * i] : Moments{around, 0.0f};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float apart = own[i].mean - around;
            const float columns = static_cast<float>(min(kTile, hidden - (first + 4 * i) * kTile));
            total += columns * apart;
            square += own[i].square + columns * apart * apart;
        }
    }
    const float count = static_cast<float>(hidden), mean = warp_sum<4>(total) / count;
    const float variance = warp_sum<4>(square) / count - mean * mean;
    // A NaN stays NaN.
    return make_float2(around + mean, 1.0f / sqrtf((variance < 0.0f ? 0.0f : variance) + eps));
}

template <class T, bool kNormed>
__global__ void __launch_bounds__(ClusterTile<kNormed>::kThreads, 2)
    cluster_hopper_kernel(const __grid_constant__ ClusterMaps maps,
                          const __grid_constant__ LinearProduct args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using Tile = ClusterTile<kNormed>;
    constexpr int kSlots = Tile::kSlots;
    __shared__ alignas(8) std::uint64_t full[kSlots], empty[kSlots];
    __shared__ float2 statistics[kNormed ? Tile::kRows : 1];  // mean and rstd
    char* const start = dynamic_shared();
    char* const ring = start + (0u - shared_address(start)) % 1024;
    float* const sums = reinterpret_cast<float*>(ring);
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
    // Broadcast, so that ptxas keeps what depends on it in uniform registers
    const int warp = __shfl_sync(kAllLanes, thread / kWarp, 0);
    const int part = static_cast<int>(blockIdx.x) % args.parts,
              tile = static_cast<int>(blockIdx.x) / args.parts;
    const int rows = static_cast<int>(args.rows), columns = static_cast<int>(args.columns),
              depth = static_cast<int>(args.depth);
    const int row_tiles = (rows + Tile::kRows - 1) / Tile::kRows;
    const int row = tile % row_tiles * Tile::kRows, column = tile / row_tiles * Tile::kColumns;
    const int down = rows - row < Tile::kRows ? rows - row : Tile::kRows;
    const int all_steps = (depth + Tile::kDepth - 1) / Tile::kDepth;
    const int begin = all_steps * part / args.parts, steps = all_steps * (part + 1) / args.parts - begin;
    if (thread == 0) {
        prefetch_map(maps.a);
        prefetch_map(maps.b);
        for (int i = 0; i < kSlots; ++i) {
            init_barrier(&full[i], 1);
            init_barrier(&empty[i], Tile::kConsumers / kWarp);
        }
        fence_barriers();
    }
    __syncthreads();
    let_next_begin();

    if (warp >= Tile::kConsumers / kWarp) {
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
        const int group = kNormed ? warp / 4 : 0;
        // Of a step's rows of a, a thread norms this chunk of two.
        const int chunk = thread % 8, first = thread / 8;
        uint4 gain, shift;
        const auto load_params = [&](int step) {
            const int at = (begin + step) * Tile::kDepth + chunk * 8;
            if (at >= depth) return;
            gain = *reinterpret_cast<const uint4*>(static_cast<const T*>(args.norm.weight) + at);
            shift = *reinterpret_cast<const uint4*>(static_cast<const T*>(args.norm.bias) + at);
        };
        const auto norm_rows = [&](char* tile, int step) {
            const int at = (begin + step) * Tile::kDepth + chunk * 8;
            if (at >= depth) return;
            float weight[8], bias[8], z[8];
            widen_words<T>(gain, weight);
            widen_words<T>(shift, bias);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = first + 32 * half;
                if (i >= down) break;
                uint4* const place = reinterpret_cast<uint4*>(tile + swizzled_chunk(i, chunk));
                const float2 own = statistics[i];
                widen_words<T>(*place, z);
#pragma unroll
                for (int k = 0; k < 8; ++k) z[k] = (z[k] - own.x) * own.y * weight[k] + bias[k];
                *place = {pack_pair<T>(z[0], z[1]), pack_pair<T>(z[2], z[3]), pack_pair<T>(z[4], z[5]),
                          pack_pair<T>(z[6], z[7])};
                if (column == 0)
                    *reinterpret_cast<uint4*>(static_cast<T*>(args.norm.y) + (row + i) * args.depth + at) =
                        *place;
            }
        };
        if constexpr (kNormed) {
            load_params(0);
            wait_for_kernels();
            const int at = thread / 4;
            const Moments* const own =
                args.norm.moments + std::int64_t{row + (at < down ? at : 0)} * all_steps;
            const float2 found = row_statistics(own, depth, static_cast<float>(args.norm.eps), thread % 4);
            if (thread % 4 == 0) statistics[at] = found;
            sync_threads_at(1, Tile::kConsumers);
        }
        float c[32];
        for (int step = 0; step < steps; ++step) {
            char* const slot = ring + step % kSlots * Tile::kSlotBytes;
            wait_phase(&full[step % kSlots], step / kSlots & 1);
            if constexpr (kNormed) {
                norm_rows(slot, step);
                load_params(step + 1);
                fence_shared();
                sync_threads_at(1, Tile::kConsumers);
            }
            const std::uint64_t a = operand_at(slot), b = operand_at(slot + (1 + group) * Tile::kTileBytes);
            fence_products();
#pragma unroll
            for (int k = 0; k < Tile::kDepth / 16; ++k)
                group_product<T>(c, a + k * kDepthStep, b + k * kDepthStep, step + k > 0);
            commit_products();
            wait_products<1>();
            if (step > 0 && lane == 0) arrive(&empty[(step - 1) % kSlots]);
        }
        wait_products<0>();
        // No product reads the ring any more.
        sync_threads_at(1, Tile::kConsumers);
        float* const to =
            sums + (16 * (warp % 4) + lane / 4) * Tile::kStride + group * kTile + 2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<float2*>(to + 8 * half * Tile::kStride + 8 * i) =
                    make_float2(c[4 * i + 2 * half], c[4 * i + 2 * half + 1]);
    }
    sync_cluster();

    wait_for_kernels();
    // A row's 8 chunks, or 16, are in lanes side by side.
    constexpr int kAcross = Tile::kColumns / 8;
    const int last = down * (part + 1) / args.parts * kAcross;
    for (int chunk = down * part / args.parts * kAcross + thread; chunk < last; chunk += Tile::kThreads) {
        const int own_row = chunk / kAcross, own_column = chunk % kAcross * 8;
        const bool inside = column + own_column < columns;
        const std::int64_t c_row = row + own_row, at = c_row * columns + column + own_column;
        const float* const from = sums + own_row * Tile::kStride + own_column;
        float z[8] = {};
        Pack<T> residual = {};
        if (inside && args.bias != nullptr)
            widen_pack(load_pack(static_cast<const T*>(args.bias) + column + own_column), z);
        if (!kNormed && inside && args.residual != nullptr)
            residual = load_pack(static_cast<const T*>(args.residual) + c_row * args.residual_stride +
                                 column + own_column);
        float4 found[kMostParts][2];
#pragma unroll
        for (int i = 0; i < kMostParts; ++i)
            if (i < args.parts)
                for (int half = 0; half < 2; ++half) found[i][half] = load_from_rank(from + 4 * half, i);
#pragma unroll
        for (int i = 0; i < kMostParts; ++i)
            if (i < args.parts)
                for (int half = 0; half < 2; ++half) {
                    z[4 * half] += found[i][half].x, z[4 * half + 1] += found[i][half].y;
                    z[4 * half + 2] += found[i][half].z, z[4 * half + 3] += found[i][half].w;
                }
        with_activation<T>(args.activation, args.exact, [&](auto function) {
#pragma unroll
            for (int i = 0; i < 8; ++i) z[i] = function(z[i]);
        });
#pragma unroll
        for (int i = 0; i < 8; ++i) z[i] += widen(residual.item[i]);
        if (inside) store_pack(static_cast<T*>(args.c) + at, z);
        if (kNormed || args.moments == nullptr) continue;
        const unsigned lanes = 0xffu << (lane & ~7);
        float total = 0.0f, square = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            T rounded;
            narrow(z[i], rounded);
            total += z[i] = widen(rounded);
        }
        const float mean = warp_sum<8>(total, lanes) / static_cast<float>(min(kTile, columns - column));
#pragma unroll
        for (int i = 0; i < 8; ++i) square += (z[i] - mean) * (z[i] - mean);
        square = warp_sum<8>(inside ? square : 0.0f, lanes);
        if (chunk % 8 == 0)
            args.moments[c_row * ((columns + kTile - 1) / kTile) + column / kTile] = {mean, square};
    }
    // Until no block reads the sums of this one
    sync_cluster();
#endif
}

// Parts of the depth: as many as fill the multiprocessors, of two steps or more; of equally long parts the
// fewest.
int parts_of(std::int64_t tiles, std::int64_t depth, int multiprocessors) {
    const std::int64_t steps = (depth + kTile - 1) / kTile;
    std::int64_t most = std::min<std::int64_t>(multiprocessors / tiles, kMostParts);
    most = std::max<std::int64_t>(std::min(most, steps / 2), 1);
    const std::int64_t longest = (steps + most - 1) / most;
    return static_cast<int>((steps + longest - 1) / longest);
}

template <class T, bool kNormed>
const char* cluster_product(LinearProduct args, int multiprocessors, std::uintptr_t stream, bool& refused) {
    using Tile = ClusterTile<kNormed>;
    const std::int64_t tiles = ((args.rows + Tile::kRows - 1) / Tile::kRows) *
                               ((args.columns + Tile::kColumns - 1) / Tile::kColumns);
    if (tiles > 0x3fffffff / kMostParts) return "rows * columns: more than 2**27 - 1 tiles";
    ClusterMaps maps = {};
    refused = !make_map(maps.a, args.dtype, args.a, args.rows, args.depth, args.a_stride, Tile::kRows) ||
              !make_map(maps.b, args.dtype, args.b, args.columns, args.depth, args.b_stride, Tile::kColumns);
    if (refused) return nullptr;
    args.parts = parts_of(tiles, args.depth, multiprocessors);
    return launch_clusters(static_cast<unsigned>(args.parts), cluster_hopper_kernel<T, kNormed>,
                           dim3(static_cast<unsigned>(tiles * args.parts)), dim3(Tile::kThreads),
                           Tile::kBytes, stream, maps, args);
}

template <class T>
const char* product_of(const LinearProduct& args, int multiprocessors, std::uintptr_t stream, bool& refused) {
    return args.norm.y == nullptr ? cluster_product<T, false>(args, multiprocessors, stream, refused)
                                  : cluster_product<T, true>(args, multiprocessors, stream, refused);
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
    if (args.layout != Layout::kForward || args.gate != Gate::kNone || args.pre != nullptr ||
        args.slope_at != nullptr)
        return "expected a forward product without a gate and pre";
    if (args.norm.y != nullptr && (args.residual != nullptr || args.moments != nullptr))
        return "residual, moments: expected none of a product that norms its rows";
    if (args.depth < 1 || args.depth % 8 != 0 || args.columns % 8 != 0)
        return "depth, columns: multiples of 8";
    if (!cuda::aligned(args.a) || !cuda::aligned(args.b) || !cuda::aligned(args.bias) ||
        !cuda::aligned(args.c) || !cuda::aligned(args.residual) ||
        (args.a_stride | args.b_stride | args.residual_stride) % 8 != 0)
        return "a, b, bias, residual, c: starts and rows on 16 bytes";
    if (multiprocessors < 1) return "multiprocessors: at least 1";
    if (!cuda_linear_hopper(device)) return "the device or the build has no such kernel";
    switch (args.dtype) {
        case DType::kBFloat16:
            return cuda::product_of<bf16>(args, multiprocessors, stream, refused);
        case DType::kFloat16:
            return cuda::product_of<fp16>(args, multiprocessors, stream, refused);
        default:
            return "dtype: bfloat16 or float16";
    }
}

}  // namespace fastbert
