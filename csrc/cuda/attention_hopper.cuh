// Attention's forward on compute capability 9.0, for heads of 64 dimensions without a bias or a causal mask.
// Contract: fastbert/ops/attention.py; mathematics, precision and what is saved: attention_forward.cuh.
//
// Tiling     A block owns 128 queries of one sequence and head, 64 for each of two warp groups, whose P and
//            out stay in registers. It walks over the keys, 64 at a time. Two blocks share a multiprocessor.
// Pipeline   Tiles of keys and of values come by tensor maps into a ring of 5 each, which one thread fills. A
//            group starts the scores of tile t and then P v of tile t - 1: the softmax waits for the scores
//            alone, and runs beside the products of the other groups. The two groups start products in turns.
//            Variants, of which one will stay: see AttentionTile.
// Tails      A tensor map does not know where a sequence ends. Scores of keys behind the end become -inf
//            whatever those keys hold; values behind it become 0, because 0 times NaN is NaN. Queries behind
//            it are computed and not stored.
// Source     Shah et al. 2024, FlashAttention-3: the next scores before P v, groups in turns.
#pragma once

#include "attention_forward.cuh"
#include "hopper.cuh"

namespace fastbert {
namespace cuda {

struct AttentionTile {
    static constexpr int kGroups = 2, kRows = kGroups * kTileRows, kHeadDim = kSwizzled, kSlots = 5;
    static constexpr int kThreads = kGroups * kGroupThreads, kWarps = kGroupThreads / kWarp;
    static constexpr int kRowBytes = kSwizzled * 2, kTileBytes = kTileRows * kRowBytes;
    // What a variant of the kernel has; each has what those before it have. Chosen by the launcher.
    // Without turns: by default the groups start products in turns.
    static constexpr int kFreeGroups = 1;
    // Barriers by many lanes, copies as soon as the place is known, that by one round of loads
    static constexpr int kEarlyStart = 2;
    // The softmax runs beside the sums of the tile before; without dropout, whose bits would spill
    static constexpr int kLateSums = 3;
    static constexpr int kVariants = 4;
    // Queries of both groups, and two rings; tiles begin on 1,024 bytes.
    static constexpr int kBytes = (kGroups + 2 * kSlots) * kTileBytes + 1024;
};

struct AttentionMaps {
    CUtensorMap q, k, v;
};

// A tile's slot in a ring, and the parity of the phase in which that is filled.
struct TilePlace {
    int slot = 0, parity = 0;

    __device__ __forceinline__ void next() {
        if (++slot == AttentionTile::kSlots) slot = 0, parity ^= 1;
    }
};

// A ring of tiles of keys or of values. `full`: a slot's bytes have come; `empty`: all warps are done with
// it.
struct TileRing {
    char* tiles;
    std::uint64_t *full, *empty;

    __device__ __forceinline__ char* at(TilePlace place) const {
        return tiles + place.slot * AttentionTile::kTileBytes;
    }
    __device__ __forceinline__ void wait(TilePlace place) const {
        wait_phase(&full[place.slot], place.parity);
    }
    // By one lane of each warp
    __device__ __forceinline__ void release(TilePlace place) const { arrive(&empty[place.slot]); }
    // By one thread: tile `tile`, which begins at (row, column) of the tensor, once its slot is free.
    __device__ __forceinline__ void fill(int tile, const CUtensorMap& map, int row, int column) const {
        const int slot = tile % AttentionTile::kSlots, turn = tile / AttentionTile::kSlots;
        if (turn > 0) wait_phase(&empty[slot], (turn - 1) & 1);
        arrive_expecting(&full[slot], AttentionTile::kTileBytes);
        load_tile(tiles + slot * AttentionTile::kTileBytes, map, &full[slot], row, column);
    }
};

// Zeros in the rows of a tile of values from `end` on, by the block's first `threads` threads.
__device__ __forceinline__ void clear_rows(char* tile, int end, int threads) {
    constexpr int kChunks = AttentionTile::kRowBytes / kChunkBytes;
    // Read here, so that what depends on it takes no registers elsewhere.
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
#pragma unroll 1
    for (int i = end * kChunks + thread; i < kTileRows * kChunks; i += threads)
        *reinterpret_cast<uint4*>(tile + i * kChunkBytes) = uint4{};
}

struct EarlyPlace : Place {
    int rest;  // the first row after the last sequence that this block clears
};

// As find_place, by one round of loads for up to 126 sequences. `meanwhile` runs while they are under way.
// each > 0: every sequence has so many slots, and nothing is searched; all blocks clear rows.
template <int kRows, class Meanwhile>
__device__ __forceinline__ EarlyPlace find_place_early(const std::int32_t* cu_seqlens, int batch, int total,
                                                       int each, Meanwhile meanwhile) {
    constexpr int kLoads = 4;
    const int slot = static_cast<int>(blockIdx.y + blockIdx.z * gridDim.y);
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    if (each > 0) {
        const int sequence = slot / each;
        int start = 0, end = 0;
        if (sequence < batch) start = cu_seqlens[sequence], end = cu_seqlens[sequence + 1];
        const int after = cu_seqlens[batch];
        meanwhile();
        return {{sequence, start, end - start, (slot - sequence * each) * kRows}, after + slot * kRows};
    }
    int found = 0, left = batch + 1;
    while (left >= kLoads * kWarp) {
        const int step = (left + kWarp - 1) / kWarp, at = lane * step;
        const bool reached = at < left && cu_seqlens[found + at] / kRows + found + at <= slot;
        const int before = __popc(__ballot_sync(kAllLanes, reached) >> 1) * step;
        found += before;
        left = left - before < step ? left - before : step;
    }
    // Starts of sequences; the rows after the last one end with `total`.
    int starts[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        const int at = i * kWarp + lane;
        starts[i] = at < left + 1 && found + at <= batch ? cu_seqlens[found + at] : total;
    }
    meanwhile();
    // Starts never decrease: the last one reached is the greatest, and the next one the least of the others.
    int reached = 0, start = 0, end = total;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        const int at = i * kWarp + lane;
        const bool is = at < left && starts[i] / kRows + found + at <= slot;
        reached += __popc(__ballot_sync(kAllLanes, is));
        start = is && starts[i] > start ? starts[i] : start;
        end = !is && starts[i] < end ? starts[i] : end;
    }
    start = __reduce_max_sync(kAllLanes, start);
    end = __reduce_min_sync(kAllLanes, end);
    found += reached - 1;
    int tile = slot - (start / kRows + found);
    if (found < batch) tile = (end - start + kRows - 1) / kRows - 1 - tile;
    const int first_row = tile >= 0 ? tile * kRows : end - start;
    return {{found, start, end - start, first_row}, found < batch ? total : start + first_row};
}

// The thread's number, read here, so that what depends on it takes no registers elsewhere.
__device__ __forceinline__ int thread_again() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// c is read and written no earlier than here, and no later.
__device__ __forceinline__ void settle(float (&c)[kTileRows / 2]) {
#pragma unroll
    for (int i = 0; i < kTileRows / 2; ++i) asm volatile("" : "+f"(c[i]) : : "memory");
}

// How much the exponentials of one tile may sum up to in a lane before the maximum that is subtracted
// follows.
constexpr float kMostSum = 256.0f;

// One lane's part of the softmax of 64 queries by a warp group: two rows, 8 apart.
template <class T>
struct GroupSoftmax {
    float scores[kTileRows / 2];
    std::uint32_t p[kTileRows / 16][4];
    float out[AttentionTile::kHeadDim / 2];
    float unit;     // exp S = 2^(unit S)
    float base[2];  // what is subtracted, in units of log 2
    float norm[2];  // this lane's part of the sum of 2^(unit S - base)

    // Scores of keys from this lane's key `most` on become -inf.
    __device__ __forceinline__ void mask(int most) {
#pragma unroll
        for (int n = 0; n < kTileRows / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (8 * n + i % 2 >= most) scores[4 * n + i] = -INFINITY;
    }

    static __device__ __forceinline__ float most_of_row(float x) {
        x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
        return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
    }

    // The greatest scores of both rows, in units of log 2.
    __device__ __forceinline__ void find_top(float (&top)[2]) const {
        top[0] = top[1] = -INFINITY;
#pragma unroll
        for (int i = 0; i < kTileRows / 2; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], scores[i]);
#pragma unroll
        for (int r = 0; r < 2; ++r) top[r] = most_of_row(top[r]) * unit;
    }

    // P of the scores, and its sums before it is rounded.
    __device__ __forceinline__ void exponentiate(float (&sum)[2]) {
#pragma unroll
        for (int n = 0; n < kTileRows / 8; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float low = exp2_fast(fmaf(scores[4 * n + 2 * r], unit, -base[r]));
                const float high = exp2_fast(fmaf(scores[4 * n + 2 * r + 1], unit, -base[r]));
                sum[r] = n == 0 ? low : sum[r] + low;
                sum[r] += high;
                p[n / 2][n % 2 * 2 + r] = pack_pair<T>(low, high);
            }
    }

    __device__ __forceinline__ void first_tile() {
        // Any score exceeds this one, and then the base follows.
        constexpr float kNone = -1e30f;
        float top[2];
        find_top(top);
#pragma unroll
        for (int r = 0; r < 2; ++r) base[r] = fmaxf(top[r], kNone);
        exponentiate(norm);
    }

    __device__ __forceinline__ void next_tile() {
        float sum[2];
        exponentiate(sum);
        if (__any_sync(kAllLanes, sum[0] > kMostSum || sum[1] > kMostSum)) {
            float top[2];
            find_top(top);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                // Of each row by itself: others of the warp may be another sequence's.
                top[r] = most_of_row(sum[r]) > kMostSum ? fmaxf(top[r], base[r]) : base[r];
                const float shrink = exp2_fast(base[r] - top[r]);
                base[r] = top[r];
                norm[r] *= shrink;
#pragma unroll
                for (int n = 0; n < AttentionTile::kHeadDim / 8; ++n) {
                    out[4 * n + 2 * r] *= shrink;
                    out[4 * n + 2 * r + 1] *= shrink;
                }
            }
            exponentiate(sum);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) norm[r] += sum[r];
    }

    // The exponentials in the place of the scores, and their sums.
    __device__ __forceinline__ void exponentiate_here(float (&sum)[2]) {
#pragma unroll
        for (int n = 0; n < kTileRows / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& x = scores[4 * n + i];
                x = exp2_fast(fmaf(x, unit, -base[i / 2]));
                sum[i / 2] = n == 0 && i % 2 == 0 ? x : sum[i / 2] + x;
            }
    }

    // Scores of this warp's queries and of keys 8 n … 8 n + 7 anew; of keys from `end` on they are -inf.
    static __device__ __forceinline__ void multiply_again(
        float (&c)[4], const std::uint32_t (&q)[AttentionTile::kHeadDim / 16][4], const char* keys, int n,
        int end) {
        const int lane = thread_again() % kWarp;
#pragma unroll
        for (int i = 0; i < 4; ++i) c[i] = 0.0f;
#pragma unroll
        for (int d = 0; d < AttentionTile::kHeadDim / 32; ++d) {
            std::uint32_t b[4];
            load_matrices(b, keys + swizzled_chunk(8 * n + lane % 8, 4 * d + lane / 8));
            const std::uint32_t lower[2] = {b[0], b[1]}, upper[2] = {b[2], b[3]};
            mma<T>(c, q[2 * d], lower);
            mma<T>(c, q[2 * d + 1], upper);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (8 * n + lane % 4 * 2 + i % 2 >= end) c[i] = -INFINITY;
    }

    // Where a sum is too large the maximum follows. The scores are gone by then: they are computed again.
    __device__ __forceinline__ void follow(float (&sum)[2],
                                           const std::uint32_t (&q)[AttentionTile::kHeadDim / 16][4],
                                           const char* keys, int end) {
        if (!__any_sync(kAllLanes, fmaxf(sum[0], sum[1]) > kMostSum)) return;
        float top[2] = {-INFINITY, -INFINITY};
#pragma unroll 1
        for (int n = 0; n < kTileRows / 8; ++n) {
            float c[4];
            multiply_again(c, q, keys, n, end);
#pragma unroll
            for (int i = 0; i < 4; ++i) top[i / 2] = fmaxf(top[i / 2], c[i]);
        }
        bool grown[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            // Of each row by itself: others of the warp may be another sequence's.
            grown[r] = most_of_row(sum[r]) > kMostSum;
            const float now = fmaxf(most_of_row(top[r]) * unit, base[r]);
            const float shrink = grown[r] ? exp2_fast(base[r] - now) : 1.0f;
            if (grown[r]) base[r] = now, sum[r] = 0.0f;
            norm[r] *= shrink;
#pragma unroll
            for (int n = 0; n < AttentionTile::kHeadDim / 8; ++n) {
                out[4 * n + 2 * r] *= shrink;
                out[4 * n + 2 * r + 1] *= shrink;
            }
        }
#pragma unroll
        for (int n = 0; n < kTileRows / 8; ++n) {
            float c[4];
            multiply_again(c, q, keys, n, end);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (grown[i / 2]) {
                    scores[4 * n + i] = exp2_fast(fmaf(c[i], unit, -base[i / 2]));
                    sum[i / 2] += scores[4 * n + i];
                }
        }
    }

    // P of exponentials that are in the place of the scores
    __device__ __forceinline__ void pack() {
#pragma unroll
        for (int i = 0; i < kTileRows / 2; i += 2)
            p[i / 8][i / 2 % 4] = pack_pair<T>(scores[i], scores[i + 1]);
    }

    __device__ __forceinline__ void drop(std::uint32_t keep_bytes) {
        const KeepMasks masks(keep_bytes);
#pragma unroll
        for (int n = 0; n < kTileRows / 8; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) p[n / 2][n % 2 * 2 + r] &= masks.of(n, r);
    }
};

// A number that all lanes of a warp have, which ptxas then knows, and keeps in a register of the warp's.
__device__ __forceinline__ int of_warp(int x) { return __shfl_sync(kAllLanes, x, 0); }

template <class T, bool kDrop, int kVariant>
__global__ void __launch_bounds__(AttentionTile::kThreads, 2)
    attention_hopper_kernel(const __grid_constant__ AttentionMaps maps, AttentionFwd args, int each) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using Tile = AttentionTile;
    constexpr bool kEarly = kVariant >= Tile::kEarlyStart, kLate = kVariant >= Tile::kLateSums;
    static_assert(!(kLate && kDrop), "spills");
    // The host sees by these whether the kernel was compiled for 9.0 (runs_hopper).
    __shared__ alignas(8) std::uint64_t barriers[4][Tile::kSlots], asked, cleared;
    if (!kEarly && threadIdx.x == 0) {
        prefetch_map(maps.q);
        prefetch_map(maps.k);
        prefetch_map(maps.v);
    }
    // The first warp asks for queries and keys, the second one for values.
    const int block_warp = of_warp(static_cast<int>(threadIdx.x) / kWarp);
    const auto prepare = [&] {
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
        if (block_warp > 1) return;
        if (lane == 0) prefetch_map(block_warp == 0 ? maps.k : maps.v);
        if (lane < Tile::kSlots) init_barrier(&barriers[2 * block_warp][lane], 1);
        if (block_warp == 0 && lane == Tile::kSlots) {
            prefetch_map(maps.q);
            init_barrier(&asked, 1);
        }
        fence_barriers();
        __syncwarp();
    };
    std::conditional_t<kEarly, EarlyPlace, Place> place;
    if constexpr (kEarly)
        place = find_place_early<Tile::kRows>(args.cu_seqlens, static_cast<int>(args.batch),
                                              static_cast<int>(args.total), each, prepare);
    else
        place = find_place<Tile::kRows>(args.cu_seqlens, static_cast<int>(args.batch),
                                        static_cast<int>(args.total));
    const int head = static_cast<int>(blockIdx.x), start = of_warp(place.start);
    const int length = of_warp(place.length), first_row = of_warp(place.first_row);
    if constexpr (kEarly) {
        const int step = static_cast<int>(gridDim.y * gridDim.z) * Tile::kRows;
        for (int rest = place.rest; rest < static_cast<int>(args.total); rest += step)
            zero_rows<T, Tile::kHeadDim, Tile::kRows, Tile::kThreads>(args, rest, head);
        if (place.sequence == args.batch) return;
    }
    if (first_row >= length) return;
    if (!kEarly && place.sequence == args.batch) {
        zero_rows<T, Tile::kHeadDim, Tile::kRows, Tile::kThreads>(args, start + first_row, head);
        return;
    }
    char* const shared = dynamic_shared();
    char* const queries = shared + (0u - shared_address(shared)) % 1024;
    const TileRing keys{queries + Tile::kGroups * Tile::kTileBytes, barriers[0], barriers[1]};
    const TileRing values{keys.tiles + Tile::kSlots * Tile::kTileBytes, barriers[2], barriers[3]};
    const int tiles = (length + kTileRows - 1) / kTileRows;
    const int groups = length - first_row > kTileRows ? 2 : 1;
    const int column = head * Tile::kHeadDim;
    const auto fill_keys = [&](int tile) { keys.fill(tile, maps.k, start + tile * kTileRows, column); };
    const auto fill_values = [&](int tile) { values.fill(tile, maps.v, start + tile * kTileRows, column); };
    if (kEarly) {
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
        if (block_warp == 0 && lane == 0) {
            arrive_expecting(&asked, groups * Tile::kTileBytes);
            load_tile(queries, maps.q, &asked, start + first_row, column);
            fill_keys(0);
            if (groups == 2)
                load_tile(queries + Tile::kTileBytes, maps.q, &asked, start + first_row + kTileRows, column);
            for (int tile = 1; tile < tiles && tile < Tile::kSlots; ++tile) fill_keys(tile);
        }
        if (block_warp == 1 && lane == 0)
            for (int tile = 0; tile < tiles && tile < Tile::kSlots; ++tile) fill_values(tile);
        if (block_warp == 2) {
            if (lane < Tile::kSlots) {
                init_barrier(&keys.empty[lane], groups * Tile::kWarps);
                init_barrier(&values.empty[lane], groups * Tile::kWarps);
            }
            if (lane == Tile::kSlots) init_barrier(&cleared, groups * Tile::kWarps);
        }
    }
    if (!kEarly && threadIdx.x == 0) {
        for (int i = 0; i < Tile::kSlots; ++i) {
            init_barrier(&keys.full[i], 1);
            init_barrier(&values.full[i], 1);
            init_barrier(&keys.empty[i], groups * Tile::kWarps);
            init_barrier(&values.empty[i], groups * Tile::kWarps);
        }
        init_barrier(&asked, 1);
        init_barrier(&cleared, groups * Tile::kWarps);
        fence_barriers();
        fence_shared();
        arrive_expecting(&asked, groups * Tile::kTileBytes);
        for (int group = 0; group < groups; ++group)
            load_tile(queries + group * Tile::kTileBytes, maps.q, &asked,
                      start + first_row + group * kTileRows, column);
        for (int tile = 0; tile < tiles && tile < Tile::kSlots; ++tile) {
            fill_keys(tile);
            fill_values(tile);
        }
    }
    __syncthreads();
    const int group = of_warp(static_cast<int>(threadIdx.x) / kGroupThreads);
    if (group >= groups) return;
    int lane = static_cast<int>(threadIdx.x) % kWarp;
    int warp = static_cast<int>(threadIdx.x) % kGroupThreads / kWarp;
    int pair = lane % 4;
    // In the sequence: this warp's first row, this lane's first row.
    int warp_row = first_row + group * kTileRows + 16 * warp, row = warp_row + lane / 4;

    char* own = queries + group * Tile::kTileBytes;
    std::uint32_t q[Tile::kHeadDim / 16][4];
    wait_phase(&asked, 0);
#pragma unroll
    for (int d = 0; d < Tile::kHeadDim / 16; ++d)
        load_matrices(q[d], own + swizzled_chunk(16 * warp + lane % 16, 2 * d + lane / 16));

    const std::uint64_t seed = kDrop ? *args.dropout.seed : 0;
    const LaneThreshold threshold = lane_threshold(args.dropout.threshold);
    // Words of a row of saved bits; lane 4 g + p saves word p % 2 of row g + 8 (p / 2).
    const int words = static_cast<int>((args.max_seqlen + 31) / 32), saved_row = row + pair / 2 * 8;
    std::int32_t* const saved =
        kDrop && args.keep_bits != nullptr && saved_row < length
            ? args.keep_bits + (head * args.total + start + saved_row) * static_cast<std::int64_t>(words)
            : nullptr;
    const auto draw = [&](int tile) {
        const std::uint32_t keep_bytes =
            draw_keep_bytes(seed, args.dropout.offset, static_cast<std::uint32_t>(head),
                            static_cast<std::uint32_t>(start + warp_row),
                            static_cast<std::uint32_t>(tile * kTileRows), threshold);
        if (args.keep_bits != nullptr) {
            const std::uint32_t word = keep_word(keep_bytes);
            const int at = tile * (kTileRows / 32) + pair % 2;
            if (saved != nullptr && at < words) saved[at] = static_cast<std::int32_t>(word);
        }
        return keep_bytes;
    };

    GroupSoftmax<T> softmax;
    softmax.unit = args.softmax_scale * kLog2E;
    TilePlace key, value;  // of the tile whose scores, and whose P v, are next
    // Barriers 1 and 2: the group's turn to start products. Constant numbers: others would reserve all 16.
    const bool in_turns = kVariant < Tile::kFreeGroups && groups == 2;
    const auto take_turn = [&] {
        if (!in_turns) return;
        if (group == 0)
            sync_threads_at(1, Tile::kThreads);
        else
            sync_threads_at(2, Tile::kThreads);
    };
    const auto pass_turn = [&] {
        if (!in_turns) return;
        if (group == 0)
            arrive_at(2, Tile::kThreads);
        else
            arrive_at(1, Tile::kThreads);
    };
    constexpr std::uint64_t kTileStep = Tile::kTileBytes >> 4;
    const std::uint64_t first_keys = operand_at(keys.tiles),
                        first_values = operand_at(values.tiles, 8 * Tile::kRowBytes);
    const auto start_scores = [&] {
        const std::uint64_t b = first_keys + key.slot * kTileStep;
#pragma unroll
        for (int d = 0; d < Tile::kHeadDim / 16; ++d)
            group_product<T>(softmax.scores, q[d], b + d * kDepthStep, d > 0);
        commit_products();
    };
    const auto start_sums = [&](bool add) {
        const std::uint64_t b = first_values + value.slot * kTileStep;
#pragma unroll
        for (int n = 0; n < kTileRows / 16; ++n)
            group_product<T, 1>(softmax.out, softmax.p[n], b + n * kTransposedStep, n > 0 || add);
        commit_products();
    };
    // Of the last tile: scores behind the end, and this warp's part of the rows of values behind it.
    const int last = length - (tiles - 1) * kTileRows;
    const auto end_tile = [&] {
        if (last == kTileRows) return;
        if (kLate) pair = thread_again() % 4;
        softmax.mask(last - 2 * pair);
        values.wait(value);
        clear_rows(values.at(value), last, groups * kGroupThreads);
        fence_shared();
        __syncwarp();
        if (lane == 0) arrive(&cleared);
    };

    // --- the first tile ---
    keys.wait(key);
    if (group == 1) take_turn();
    fence_products();
    start_scores();
    pass_turn();
    wait_products<0>();
    if (lane == 0) keys.release(key);
    key.next();
    if (tiles == 1) end_tile();
    softmax.first_tile();
    if (kDrop) softmax.drop(draw(0));

    for (int tile = 1; kLate && tile < tiles; ++tile) {
        keys.wait(key);
        fence_products();
        start_scores();
        values.wait(value);
        start_sums(/*add=*/tile > 1);
        const TilePlace summed = value;
        value.next();
        if (threadIdx.x == 0) {
            const int later_keys = tile - 2 + Tile::kSlots, later_values = tile - 3 + Tile::kSlots;
            if (later_keys >= Tile::kSlots && later_keys < tiles) fill_keys(later_keys);
            if (later_values >= Tile::kSlots && later_values < tiles) fill_values(later_values);
        }
        __syncwarp();
        wait_products<1>();
        settle(softmax.scores);
        if (tile == tiles - 1) end_tile();
        float sum[2];
        softmax.exponentiate_here(sum);
        settle(softmax.scores);
        wait_products<0>();
        settle(softmax.scores);
        settle(softmax.out);
        softmax.follow(sum, q, keys.at(key), tile == tiles - 1 ? last : kTileRows);
        // Scores may be computed again until here.
        if (lane == 0) {
            values.release(summed);
            keys.release(key);
        }
        key.next();
        softmax.norm[0] += sum[0];
        softmax.norm[1] += sum[1];
        softmax.pack();
    }
    for (int tile = 1; !kLate && tile < tiles; ++tile) {
        keys.wait(key);
        values.wait(value);
        take_turn();
        fence_products();
        start_scores();
        start_sums(tile > 1);
        pass_turn();
        wait_products<0>();
        if (lane == 0) {
            keys.release(key);
            values.release(value);
        }
        key.next();
        value.next();
        // Slots that both groups have left a while ago
        if (threadIdx.x == 0) {
            const int next_keys = tile - 2 + Tile::kSlots, next_values = tile - 3 + Tile::kSlots;
            if (next_keys >= Tile::kSlots && next_keys < tiles) fill_keys(next_keys);
            if (next_values >= Tile::kSlots && next_values < tiles) fill_values(next_values);
        }
        __syncwarp();
        if (tile == tiles - 1) end_tile();
        softmax.next_tile();
        if (kDrop) softmax.drop(draw(tile));
    }
    values.wait(value);
    if (last < kTileRows) wait_phase(&cleared, 0);
    take_turn();
    fence_products();
    start_sums(tiles > 1);
    if (group == 0) pass_turn();
    wait_products<0>();

    if (kLate) {
        const int thread = thread_again();
        lane = thread % kWarp, warp = thread % kGroupThreads / kWarp, pair = lane % 4;
        warp_row = first_row + group * kTileRows + 16 * warp, row = warp_row + lane / 4;
        own = queries + group * Tile::kTileBytes;
    }
    // --- out and lse, through this warp's rows of the queries ---
    const float common = args.dropout.scale * (args.gate != nullptr ? args.gate[head] : 1.0f);
    char* const staged = own + 16 * warp * Tile::kRowBytes;
    std::uint32_t packed[Tile::kHeadDim / 4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float norm = softmax.norm[r];
        norm += __shfl_xor_sync(kAllLanes, norm, 1);
        norm += __shfl_xor_sync(kAllLanes, norm, 2);
        const float factor = norm == 0.0f ? 0.0f : common / norm;
        if (kLate)
#pragma unroll
            for (int n = 0; n < Tile::kHeadDim / 8; ++n)
                packed[2 * n + r] = pack_pair<T>(softmax.out[4 * n + 2 * r] * factor,
                                                 softmax.out[4 * n + 2 * r + 1] * factor);
        if (pair == 0 && row + 8 * r < length && args.lse != nullptr)
            args.lse[head * args.total + start + row + 8 * r] =
                norm == 0.0f ? -INFINITY : (softmax.base[r] + log2f(norm)) * kLn2;
#pragma unroll
        for (int n = 0; !kLate && n < Tile::kHeadDim / 8; ++n)
            *reinterpret_cast<std::uint32_t*>(staged + swizzled_chunk(lane / 4 + 8 * r, n) + 4 * pair) =
                pack_pair<T>(softmax.out[4 * n + 2 * r] * factor, softmax.out[4 * n + 2 * r + 1] * factor);
    }
    if (kLate)
#pragma unroll
        for (int n = 0; n < Tile::kHeadDim / 16; ++n) {
            const std::uint32_t four[4] = {packed[4 * n], packed[4 * n + 1], packed[4 * n + 2],
                                           packed[4 * n + 3]};
            store_matrices(staged + swizzled_chunk(lane % 16, 2 * n + lane / 16), four);
        }
    __syncwarp();
    T* const to = static_cast<T*>(args.out) +
                  ((static_cast<std::int64_t>(start) + warp_row) * args.nheads + head) * Tile::kHeadDim;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int at = 4 * i + lane / 8, chunk = lane % 8;
        if (warp_row + at < length)
            *reinterpret_cast<Pack<T>*>(to + at * args.nheads * Tile::kHeadDim + chunk * kPack<T>) =
                *reinterpret_cast<const Pack<T>*>(staged + swizzled_chunk(at, chunk));
    }
#endif
}

}  // namespace cuda
}  // namespace fastbert
