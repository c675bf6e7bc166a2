// A forward product with bias and activation on compute capability 9.0: c = act(a bT + bias), or with a gate
// c = act(y) z, where [y, z] = a bT + bias are the activated columns and their partners. Backward, the
// product with an activation's derivative: c = (a b) act'(pre), and the sums of c's columns.
//
// Tiling     A block per multiprocessor owns tiles of 128 x 192 of c, one after another; they go down
//            kGroupRows row tiles before the next column tile. Two warp groups take them in turns, each with
//            a whole tile in registers: while one is in its epilogue, the other one keeps the tensor cores
//            busy. With a gate a tile has 96 columns of y and their 96 of z.
// Pipeline   A third group's first warp copies 128 x 64 of a and 192 x 64 of b into a ring of 5 slots, ahead
//            of both. `full` means that a slot's bytes have come, `empty` that all four warps are done with
//            it.
// Precision  float accumulators that begin with the bias; one rounding per store.
// Saved      pre, where backward asks for it; the activation reads it before the rounding.
// Epilogue   A warp's 16 x 64 of c go through its own 2 KB of shared memory and leave as a tile: neither
//            waits for other warps. What lies outside of the matrices comes as 0 and is not written. 96
//            columns are two parts, which both write the 32 in the middle: the same bits.
// Derivative b lies as it is stored: its columns are those of c, and a step is three tiles of 64 x 64. A warp
//            has three parts of its own, which is a slot less. Each brings 16 x 64 of pre, before the
//            products of its tile or two parts ahead, and takes c in its place. A warp's sums are of its 32
//            rows of the tile; rows behind the end count as 0, since 0 times what is not finite in b is NaN.
// Source     PTX ISA 8.0, wgmma; Hendrycks and Gimpel 2016, Gaussian Error Linear Units.
#pragma once

#include "activation.cuh"
#include "hopper.cuh"

namespace fastbert {
namespace cuda {

template <int kOwnSlots, int kOwnParts>
struct RingTile {
    static constexpr int kRows = 128, kColumns = 192, kDepth = kSwizzled, kSlots = kOwnSlots;
    static constexpr int kGatedColumns = kColumns / 2;
    static constexpr int kHalves = kRows / 64;
    // Of a warp's part that leaves at once
    static constexpr int kPartRows = 16, kPartColumns = kSwizzled, kParts = kOwnParts;
    static constexpr int kRowBytes = kSwizzled * 2;
    static constexpr int kSlotBytes = (kRows + kColumns) * kRowBytes;
    static constexpr int kConsumers = 2, kThreads = (kConsumers + 1) * kGroupThreads;
    static constexpr int kWarps = kGroupThreads / kWarp;
    static constexpr int kPartBytes = kPartRows * kRowBytes;
    // Tiles begin on 1,024 bytes.
    static constexpr int kBytes = kSlots * kSlotBytes + kConsumers * kWarps * kParts * kPartBytes + 1024;
    // Row tiles before the next column tile
    static constexpr int kGroupRows = 16;
};
using HopperTile = RingTile<5, 1>;
// With an activation's derivative
using SlopeTile = RingTile<4, 3>;

struct HopperMaps {
    CUtensorMap a, b, c, pre, other;  // with a gate pre is of y, and other of z; pre is read for a derivative
};

struct HopperArguments {
    int rows, columns, depth;  // columns: of c
    const void* bias;          // may be null
    bool save;                 // whether there is pre
    int active, other;         // with a gate: where y and z begin among the columns of b
    // With a derivative: of c's columns, a row per warp and row tile; may be null
    float* sums;
};

// A place in the ring: its slot, and the parity of the phase in which that is filled.
template <int kSlots>
struct RingPlace {
    int slot = 0, parity = 0;

    __device__ __forceinline__ void advance(int steps) {
        slot += steps;
        parity ^= slot / kSlots & 1;
        slot %= kSlots;
    }
    __device__ __forceinline__ void next() {
        if (++slot == kSlots) slot = 0, parity ^= 1;
    }
};

// The first row and column of a tile, of kColumns of c, in grouped order
template <int kColumns>
__device__ __forceinline__ void hopper_tile_at(int tile, const HopperArguments& args, int& row, int& column) {
    using Tile = HopperTile;
    const int row_tiles = (args.rows + Tile::kRows - 1) / Tile::kRows;
    const int column_tiles = (args.columns + kColumns - 1) / kColumns;
    const int wide = Tile::kGroupRows * column_tiles;
    const int first = tile / wide * Tile::kGroupRows, within = tile % wide;
    const int height = row_tiles - first < Tile::kGroupRows ? row_tiles - first : Tile::kGroupRows;
    row = (first + within % height) * Tile::kRows;
    column = within / height * kColumns;
}

// A warp's part of an epilogue: 16 x 64 of a matrix. `c` are 8 fragments of 16 x 8.
template <class T, int kAt>
__device__ __forceinline__ void store_part(char* part, const float (&c)[96], const CUtensorMap& map, int row,
                                           int column) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    std::uint32_t words[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) words[i] = pack_pair<T>(c[kAt + 2 * i], c[kAt + 2 * i + 1]);
    if (lane == 0) wait_stores();
    __syncwarp();
    // Matrices 0 to 3 of an instruction: rows 0 and 8 of one chunk, then of the next
    const int own_row = lane % 8 + lane / 8 % 2 * 8, own_chunk = lane / 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const std::uint32_t four[4] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
        store_matrices(part + swizzled_chunk(own_row, own_chunk + 2 * i), four);
    }
    fence_shared();
    __syncwarp();
    if (lane == 0) store_tile(part, map, row, column);
}

// The bias of kBlocks times 8 columns; `columns` is a multiple of 8, and two neighbours lie on 4 bytes.
template <class T, int kAt, int kBlocks = 8>
__device__ __forceinline__ void add_bias(float (&c)[96], const T* bias, int column, int columns) {
    const int own = column + 2 * (static_cast<int>(threadIdx.x) % 4);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
        std::uint32_t word = 0;
        if (column + 8 * i < columns) word = *reinterpret_cast<const std::uint32_t*>(bias + own + 8 * i);
        float low, high;
        unpack_pair<T>(word, low, high);
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            c[kAt + 4 * i + e] += low;
            c[kAt + 4 * i + e + 1] += high;
        }
    }
}

template <class T, class Function>
__device__ __forceinline__ void hopper_epilogue(char* part, float (&c)[96], const HopperMaps& maps,
                                                const HopperArguments& args, int row, int column) {
    const auto block = [&](auto at, int across) {
        constexpr int kAt = decltype(at)::value;
        if (column + across >= args.columns) return;
        if (args.bias != nullptr)
            add_bias<T, kAt>(c, static_cast<const T*>(args.bias), column + across, args.columns);
        if (args.save) store_part<T, kAt>(part, c, maps.pre, row, column + across);
#pragma unroll
        for (int i = kAt; i < kAt + 32; ++i) c[i] = Function::template of<T>(c[i]);
        store_part<T, kAt>(part, c, maps.c, row, column + across);
    };
    block(std::integral_constant<int, 0>(), 0);
    block(std::integral_constant<int, 32>(), 64);
    block(std::integral_constant<int, 64>(), 128);
}

// c are 16 x 96 of y and then of z.
template <class T, class Function>
__device__ __forceinline__ void gated_epilogue(char* part, float (&c)[96], const HopperMaps& maps,
                                               const HopperArguments& args, int row, int column) {
    constexpr int kHalf = 48, kMiddle = 16;  // where z begins, and the last 64 columns of either
    const bool both = column + kSwizzled < args.columns;
    // One half after the other: all loads of the bias at once spill.
    const auto finish_pre = [&](auto at, int begin, const CUtensorMap& map) {
        constexpr int kAt = decltype(at)::value;
        if (args.bias != nullptr)
            add_bias<T, kAt, kHalf / 4>(c, static_cast<const T*>(args.bias) + begin, column, args.columns);
        if (!args.save) return;
        store_part<T, kAt>(part, c, map, row, column);
        if (both) store_part<T, kAt + kMiddle>(part, c, map, row, column + 2 * kMiddle);
    };
    finish_pre(std::integral_constant<int, 0>(), args.active, maps.pre);
    finish_pre(std::integral_constant<int, kHalf>(), args.other, maps.other);
#pragma unroll
    for (int i = 0; i < 2 * kMiddle; ++i) c[i] = Function::template of<T>(c[i]) * c[kHalf + i];
    store_part<T, 0>(part, c, maps.c, row, column);
    if (!both) return;
#pragma unroll
    for (int i = 2 * kMiddle; i < kHalf; ++i) c[i] = Function::template of<T>(c[i]) * c[kHalf + i];
    store_part<T, kMiddle>(part, c, maps.c, row, column + 2 * kMiddle);
}

// Part `at` of the six of pre in a warp's tile, three of each half; `row` is the warp's first one.
__device__ __forceinline__ void load_pre(char* parts, std::uint64_t* come, const CUtensorMap& pre, int at,
                                         int row, int column) {
    const int own = at % SlopeTile::kParts;
    arrive_expecting(&come[own], SlopeTile::kPartBytes);
    load_tile(parts + own * SlopeTile::kPartBytes, pre, &come[own], row + at / SlopeTile::kParts * 64,
              column + own * kSwizzled);
}

// The sums of 64 columns over the rows of both halves: lane l has columns 2 l and 2 l + 1.
template <int kAt>
__device__ __forceinline__ float2 sum_columns(const float (&c)[2][96]) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    float sums[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const int at = kAt + i / 2 * 4 + i % 2;
        sums[i] = (c[0][at] + c[0][at + 2]) + (c[1][at] + c[1][at + 2]);
    }
    // Of two lanes each keeps half of the columns, and adds the other one's.
#pragma unroll
    for (int step = 0; step < 3; ++step) {
        const int kept = 8 >> step;
        const bool upper = (lane & 2 * kept) != 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i >= kept) continue;
            const float given = upper ? sums[i] : sums[i + kept];
            sums[i] = (upper ? sums[i + kept] : sums[i]) + __shfl_xor_sync(kAllLanes, given, 2 * kept);
        }
    }
    return {sums[0], sums[1]};
}

// One half of a warp's tile. `row` is the first of its rows there; `come`: of its parts of pre.
template <class T, class Function>
__device__ __forceinline__ void slope_epilogue(char* parts, std::uint64_t* come, float (&c)[2][96], int half,
                                               const HopperMaps& maps, const HopperArguments& args, int row,
                                               int column) {
    using Tile = SlopeTile;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int own_row = lane % 8 + lane / 8 % 2 * 8, own_chunk = lane / 16;
    const auto block = [&](auto block_of) {
        constexpr int kBlock = decltype(block_of)::value, kAt = 32 * kBlock;
        char* const part = parts + kBlock * Tile::kPartBytes;
        wait_phase(&come[kBlock], half);
#pragma unroll
        for (int i = kAt; i < kAt + 32; i += 8) {
            std::uint32_t four[4];
            load_matrices(four, part + swizzled_chunk(own_row, own_chunk + (i - kAt) / 4));
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float low, high;
                unpack_pair<T>(four[e], low, high);
                c[half][i + 2 * e] *= Function::template of<T>(low);
                c[half][i + 2 * e + 1] *= Function::template of<T>(high);
            }
        }
        if (row + Tile::kPartRows > args.rows) {
#pragma unroll
            for (int i = kAt; i < kAt + 32; ++i)
                if (row + lane / 4 + i / 2 % 2 * 8 >= args.rows) c[half][i] = 0.0f;
        }
        // The part before has left: it takes the second half's.
        const int next = half * Tile::kParts + kBlock + 2;
        if (lane == 0 && next >= Tile::kParts && next < 2 * Tile::kParts) {
            wait_stores();
            load_pre(parts, come, maps.pre, next, row - half * 64, column);
        }
        store_part<T, kAt>(part, c[half], maps.c, row, column + kBlock * kSwizzled);
        const int own = column + kBlock * kSwizzled + 2 * lane;
        if (half == 0 || args.sums == nullptr) return;
        const float2 sums = sum_columns<kAt>(c);
        const std::int64_t line = row / Tile::kRows * Tile::kWarps + row % 64 / Tile::kPartRows;
        if (own < args.columns) *reinterpret_cast<float2*>(args.sums + line * args.columns + own) = sums;
    };
    block(std::integral_constant<int, 0>());
    block(std::integral_constant<int, 1>());
    block(std::integral_constant<int, 2>());
}

template <class T, class Function, bool kGated, class Tile = HopperTile>
__global__ void __launch_bounds__(HopperTile::kThreads, 1)
    hopper_kernel(const __grid_constant__ HopperMaps maps, HopperArguments args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr bool kSlope = Tile::kParts > 1;
    constexpr int kColumns = kGated ? Tile::kGatedColumns : Tile::kColumns;
    // The host sees by this variable whether the kernel was compiled for 9.0 (runs_hopper).
    __shared__ alignas(8) std::uint64_t full[Tile::kSlots], empty[Tile::kSlots];
    __shared__ alignas(8) std::uint64_t come[Tile::kConsumers * Tile::kWarps * Tile::kParts];  // parts of pre
    char* const start = dynamic_shared();
    char* const ring = start + (0u - shared_address(start)) % 1024;
    const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
    if (threadIdx.x == 0) {
        prefetch_map(maps.a);
        prefetch_map(maps.b);
        prefetch_map(maps.c);
        if (args.save) prefetch_map(maps.pre);
        if (kGated && args.save) prefetch_map(maps.other);
        for (int i = 0; i < Tile::kSlots; ++i) {
            init_barrier(&full[i], 1);
            init_barrier(&empty[i], Tile::kWarps);
        }
        for (int i = 0; kSlope && i < Tile::kConsumers * Tile::kWarps * Tile::kParts; ++i)
            init_barrier(&come[i], 1);
        fence_barriers();
    }
    __syncthreads();
    const int steps = (args.depth + Tile::kDepth - 1) / Tile::kDepth;
    const int tiles =
        (args.rows + Tile::kRows - 1) / Tile::kRows * ((args.columns + kColumns - 1) / kColumns);
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) % kGroupThreads / kWarp;
    RingPlace<Tile::kSlots> place;

    if (group == Tile::kConsumers) {
        give_back_registers<24>();
        if (warp != 0) return;
        for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += static_cast<int>(gridDim.x)) {
            int row, column;
            hopper_tile_at<kColumns>(tile, args, row, column);
            for (int depth = 0; depth < args.depth; depth += Tile::kDepth, place.next()) {
                char* const slot = ring + place.slot * Tile::kSlotBytes;
                wait_phase(&empty[place.slot], place.parity ^ 1);
                if (lane == 0) {
                    arrive_expecting(&full[place.slot], Tile::kSlotBytes);
                    load_tile(slot, maps.a, &full[place.slot], row, depth);
                    char* const b = slot + Tile::kRows * Tile::kRowBytes;
                    if (kSlope) {
                        for (int i = 0; i < kColumns; i += kSwizzled)
                            load_tile(b + i * Tile::kRowBytes, maps.b, &full[place.slot], depth, column + i);
                    } else {
                        load_tile(b, maps.b, &full[place.slot], kGated ? args.active + column : column,
                                  depth);
                    }
                    if (kGated)
                        load_tile(b + kColumns * Tile::kRowBytes, maps.b, &full[place.slot],
                                  args.other + column, depth);
                }
                __syncwarp();
            }
        }
        return;
    }

    take_registers<240>();
    const int own_parts = (group * Tile::kWarps + warp) * Tile::kParts;
    char* const part = ring + Tile::kSlots * Tile::kSlotBytes + own_parts * Tile::kPartBytes;
    // Barriers 1 and 2: the group's turn at the tensor cores
    constexpr int kTurn = 1;
    constexpr int kNext = kSlope ? Tile::kDepth * Tile::kRowBytes : 16;
    constexpr std::uint64_t kStep = kSlope ? kTransposedStep : kDepthStep;
    place.advance(group * steps);
    for (int turn = group;; turn += Tile::kConsumers) {
        const int tile = static_cast<int>(blockIdx.x) + turn * static_cast<int>(gridDim.x);
        if (tile >= tiles) break;
        int row, column;
        hopper_tile_at<kColumns>(tile, args, row, column);
        if (kSlope && lane == 0) {
            wait_stores();
            const int own = row + warp * Tile::kPartRows;
            for (int i = 0; i < Tile::kParts; ++i) {
                load_pre(part, &come[own_parts], maps.pre, i, own, column);
                prefetch_tile(maps.pre, own + 64, column + i * kSwizzled);
            }
        }
        float c[Tile::kHalves][96];
        if (turn > 0) sync_threads_at(kTurn + group, 2 * kGroupThreads);
        int previous = 0;
        for (int step = 0; step < steps; ++step, place.next()) {
            const char* const slot = ring + place.slot * Tile::kSlotBytes;
            wait_phase(&full[place.slot], place.parity);
            const std::uint64_t a = operand_at(slot),
                                b = operand_at(slot + Tile::kRows * Tile::kRowBytes, kNext);
            constexpr std::uint64_t kHalf = 64 * Tile::kRowBytes >> 4;
            fence_products();
#pragma unroll
            for (int k = 0; k < Tile::kDepth / 16; ++k)
#pragma unroll
                for (int half = 0; half < Tile::kHalves; ++half)
                    group_product<T, 0, kSlope>(c[half], a + half * kHalf + k * kDepthStep, b + k * kStep,
                                                step + k > 0);
            commit_products();
            wait_products<1>();
            if (step > 0 && lane == 0) arrive(&empty[previous]);
            previous = place.slot;
        }
        if (tile + static_cast<int>(gridDim.x) < tiles) arrive_at(kTurn + (group ^ 1), 2 * kGroupThreads);
        wait_products<0>();
        if (lane == 0) arrive(&empty[previous]);
        // The other group's tile
        place.advance(steps);
#pragma unroll
        for (int half = 0; half < Tile::kHalves; ++half) {
            const int own = row + half * 64 + warp * Tile::kPartRows;
            if constexpr (kSlope)
                slope_epilogue<T, Function>(part, &come[own_parts], c, half, maps, args, own, column);
            else if (kGated)
                gated_epilogue<T, Function>(part, c[half], maps, args, own, column);
            else
                hopper_epilogue<T, Function>(part, c[half], maps, args, own, column);
        }
    }
    if (lane == 0) wait_stores();
#endif
}

}  // namespace cuda
}  // namespace fastbert
