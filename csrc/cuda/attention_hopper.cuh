// Attention's forward on compute capability 9.0, for heads of 64 or 32 dimensions without a bias.
// kLocal: with a window, of which a causal mask is one, or heads of q that share one of k and v.
// Contract: fastbert/ops/attention.py; mathematics, precision and what is saved: attention_forward.cuh.
//
// Tiling     A block owns 128 queries of one sequence and head, 64 for each of two warp groups, whose P and
//            out stay in registers. It walks over the keys, 64 at a time. Two blocks share a multiprocessor.
//            With a window, tiles that no row of the block sees are not copied, and a group skips a tile that
//            no row of its own sees: the upper group may skip the last tile, the lower group the first.
//            Two heads of 32 fill the 64 columns of a tile. A block then owns 64 queries of both, a group
//            those of one head: the scores read half of the columns, and P v is computed for all, half of it
//            unused.
// Pipeline   Tiles of keys and of values come by tensor maps into a ring of 5 each, which one thread fills. A
//            group starts the scores of tile t and then P v of tile t - 1: the softmax waits for both, and
//            runs beside the products of the other groups. Measured on an H200: groups that start products in
//            turns are 2 to 5% slower, P v that runs beside the softmax and an earlier start of the copies 0
//            to 2% faster (32 x 512: 66.7 for 68.0 us) for 250 lines; bench/results/nvidia-h200/queue.json.
// Tails      A tensor map does not know where a sequence ends. Scores of keys behind the end become -inf
//            whatever those keys hold; values behind it become 0, because 0 times NaN is NaN. Queries behind
//            it are computed and not stored.
// Source     Shah et al. 2024, FlashAttention-3: the next scores before P v.
#pragma once

#include "attention_forward.cuh"
#include "hopper.cuh"

namespace fastbert {
namespace cuda {

struct AttentionTile {
    static constexpr int kGroups = 2, kColumns = kSwizzled, kSlots = 5;
    static constexpr int kThreads = kGroups * kGroupThreads, kWarps = kGroupThreads / kWarp;
    static constexpr int kRowBytes = kColumns * 2, kTileBytes = kTileRows * kRowBytes;
    // Queries of both groups, and two rings; tiles begin on 1,024 bytes.
    static constexpr int kBytes = (kGroups + 2 * kSlots) * kTileBytes + 1024;
    // A block's queries, with so many heads per tile.
    template <int kHeads>
    static constexpr int kRows = kGroups / kHeads * kTileRows;
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

// Zeros in the rows of a tile of values from `end` on, by `threads` threads of the block from thread `first`
// on.
__device__ __forceinline__ void clear_rows(char* tile, int end, int threads, int first) {
    constexpr int kChunks = AttentionTile::kRowBytes / kChunkBytes;
    // Read here, so that what depends on it takes no registers elsewhere.
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
#pragma unroll 1
    for (int i = end * kChunks + thread - first; i < kTileRows * kChunks; i += threads)
        *reinterpret_cast<uint4*>(tile + i * kChunkBytes) = uint4{};
}

// How much the exponentials of one tile may sum up to in a lane before the maximum that is subtracted
// follows.
constexpr float kMostSum = 256.0f;

// One lane's part of the softmax of 64 queries by a warp group: two rows, 8 apart.
template <class T>
struct GroupSoftmax {
    float scores[kTileRows / 2];
    std::uint32_t p[kTileRows / 16][4];
    float out[AttentionTile::kColumns / 2];
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

    // Likewise, and of those before the lane's key `least`; of each row by itself.
    __device__ __forceinline__ void mask(const int (&least)[2], const int (&most)[2]) {
#pragma unroll
        for (int n = 0; n < kTileRows / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (8 * n + i % 2 < least[i / 2] || 8 * n + i % 2 >= most[i / 2])
                    scores[4 * n + i] = -INFINITY;
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
                for (int n = 0; n < AttentionTile::kColumns / 8; ++n) {
                    out[4 * n + 2 * r] *= shrink;
                    out[4 * n + 2 * r + 1] *= shrink;
                }
            }
            exponentiate(sum);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) norm[r] += sum[r];
    }

    __device__ __forceinline__ void drop(std::uint32_t keep_bytes) {
        const KeepMasks masks(keep_bytes);
#pragma unroll
        for (int n = 0; n < kTileRows / 8; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) p[n / 2][n % 2 * 2 + r] &= masks.of(n, r);
    }
};

// kHeads: heads per tile.
template <class T, int kHeads, bool kDrop, bool kLocal>
__global__ void __launch_bounds__(AttentionTile::kThreads, 2)
    attention_hopper_kernel(const __grid_constant__ AttentionMaps maps, AttentionFwd args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    static_assert(kHeads == 1 || (!kDrop && !kLocal), "two heads: with nothing else");
    using Tile = AttentionTile;
    constexpr int kHeadDim = Tile::kColumns / kHeads, kRows = Tile::kRows<kHeads>;
    // The host sees by these whether the kernel was compiled for 9.0 (runs_hopper).
    __shared__ alignas(8) std::uint64_t barriers[4][Tile::kSlots], asked, cleared;
    if (threadIdx.x == 0) {
        prefetch_map(maps.q);
        prefetch_map(maps.k);
        prefetch_map(maps.v);
    }
    const Place place =
        find_place<kRows>(args.cu_seqlens, static_cast<int>(args.batch), static_cast<int>(args.total));
    const int first_head = static_cast<int>(blockIdx.x) * kHeads, start = of_warp(place.start);
    const int heads_left = static_cast<int>(args.nheads) - first_head;
    const int length = of_warp(place.length), first_row = of_warp(place.first_row);
    if (first_row >= length) return;
    if (place.sequence == args.batch) {
        for (int i = 0; i < kHeads && i < heads_left; ++i)
            zero_rows<T, kHeadDim, kRows, Tile::kThreads>(args, start + first_row, first_head + i);
        return;
    }
    char* const shared = dynamic_shared();
    char* const queries = shared + (0u - shared_address(shared)) % 1024;
    const TileRing keys{queries + Tile::kGroups * Tile::kTileBytes, barriers[0], barriers[1]};
    const TileRing values{keys.tiles + Tile::kSlots * Tile::kTileBytes, barriers[2], barriers[3]};
    const int groups = (kHeads == 1 ? length - first_row > kTileRows : heads_left > 1) ? 2 : 1;
    const int query_tiles = kHeads == 1 ? groups : 1;
    const int column = first_head * kHeadDim;
    const int kv_column = kLocal ? kv_head_of(args, first_head) * kHeadDim : column;
    const Reach reach(args.window, length);
    // The first tile that a row sees, and the tiles before the end of what it sees.
    const auto first_tile = [&](int row) { return reach.first_key(row) / kTileRows; };
    const auto tiles_until = [&](int row) { return (reach.end_key(row) + kTileRows - 1) / kTileRows; };
    // Tiles are counted from the first that the block sees.
    const int skipped = kLocal ? first_tile(first_row) : 0, all = (length + kTileRows - 1) / kTileRows;
    const int tiles = kLocal ? tiles_until(first_row + groups * kTileRows - 1) - skipped : all;
    const int first_key_row = start + skipped * kTileRows;
    const auto fill_keys = [&](int tile) {
        keys.fill(tile, maps.k, first_key_row + tile * kTileRows, kv_column);
    };
    const auto fill_values = [&](int tile) {
        values.fill(tile, maps.v, first_key_row + tile * kTileRows, kv_column);
    };
    // The groups that see the sequence's last tile: both, or the last.
    const int enders = kLocal && groups == 2 && tiles_until(first_row + kTileRows - 1) < all ? 1 : groups;
    if (threadIdx.x == 0) {
        for (int i = 0; i < Tile::kSlots; ++i) {
            init_barrier(&keys.full[i], 1);
            init_barrier(&values.full[i], 1);
            init_barrier(&keys.empty[i], groups * Tile::kWarps);
            init_barrier(&values.empty[i], groups * Tile::kWarps);
        }
        init_barrier(&asked, 1);
        init_barrier(&cleared, enders * Tile::kWarps);
        fence_barriers();
        fence_shared();
        arrive_expecting(&asked, query_tiles * Tile::kTileBytes);
        for (int i = 0; i < query_tiles; ++i)
            load_tile(queries + i * Tile::kTileBytes, maps.q, &asked, start + first_row + i * kTileRows,
                      column);
        for (int tile = 0; tile < tiles && tile < Tile::kSlots; ++tile) {
            fill_keys(tile);
            fill_values(tile);
        }
    }
    __syncthreads();
    const int group = of_warp(static_cast<int>(threadIdx.x) / kGroupThreads);
    if (group >= groups) return;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) % kGroupThreads / kWarp;
    const int pair = lane % 4;
    // The group's tile of queries, its head of that tile and of all, and its first chunk of a tile's row.
    const int query_tile = kHeads == 1 ? group : 0, part = kHeads == 1 ? 0 : group;
    const int head = first_head + part, first_chunk = part * kHeadDim / 8;
    // In the sequence: this warp's first row, this lane's first row.
    const int warp_row = first_row + query_tile * kTileRows + 16 * warp, row = warp_row + lane / 4;

    // The tiles that this group sees.
    const int begin = kLocal ? first_tile(first_row + group * kTileRows) - skipped : 0;
    const int upto = kLocal ? tiles_until(first_row + (group + 1) * kTileRows - 1) - skipped : tiles;

    char* const own = queries + query_tile * Tile::kTileBytes;
    std::uint32_t q[kHeadDim / 16][4];
    wait_phase(&asked, 0);
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d)
        load_matrices(q[d], own + swizzled_chunk(16 * warp + lane % 16, first_chunk + 2 * d + lane / 16));

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
                            static_cast<std::uint32_t>((skipped + tile) * kTileRows), threshold);
        if (args.keep_bits != nullptr) {
            const std::uint32_t word = keep_word(keep_bytes);
            const int at = (skipped + tile) * (kTileRows / 32) + pair % 2;
            if (saved != nullptr && at < words) saved[at] = static_cast<std::int32_t>(word);
        }
        return keep_bytes;
    };

    GroupSoftmax<T> softmax;
    softmax.unit = args.softmax_scale * kLog2E;
    TilePlace key, value;  // of the tile whose scores, and whose P v, are next
    constexpr std::uint64_t kTileStep = Tile::kTileBytes >> 4;
    const std::uint64_t first_keys = operand_at(keys.tiles) + part * (kHeadDim / 16) * kDepthStep,
                        first_values = operand_at(values.tiles, 8 * Tile::kRowBytes);
    const auto start_scores = [&] {
        const std::uint64_t b = first_keys + key.slot * kTileStep;
#pragma unroll
        for (int d = 0; d < kHeadDim / 16; ++d)
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
    const bool ends = !kLocal || skipped + upto == all;
    const int last = ends ? length - (all - 1) * kTileRows : kTileRows;
    const auto end_tile = [&] {
        if (last == kTileRows) return;
        if (!kLocal) softmax.mask(last - 2 * pair);
        values.wait(value);
        clear_rows(values.at(value), last, enders * kGroupThreads,
                   kLocal ? (groups - enders) * kGroupThreads : 0);
        fence_shared();
        __syncwarp();
        if (lane == 0) arrive(&cleared);
    };

    // Scores that the window hides, and those behind the end.
    const auto hide = [&](int tile) {
        const int first_key = (skipped + tile) * kTileRows;
        if (first_key >= reach.first_key(warp_row + 15) && first_key + kTileRows <= reach.end_key(warp_row))
            return;
        int least[2], most[2];
        for (int r = 0; r < 2; ++r) {
            least[r] = reach.first_key(row + 8 * r) - first_key - 2 * pair;
            most[r] = reach.end_key(row + 8 * r) - first_key - 2 * pair;
        }
        softmax.mask(least, most);
    };

    // --- the first tile ---
    if (kLocal && begin > 0) {
        keys.wait(key);
        values.wait(value);
        if (lane == 0) {
            keys.release(key);
            values.release(value);
        }
        key.next();
        value.next();
    }
    keys.wait(key);
    fence_products();
    start_scores();
    wait_products<0>();
    if (lane == 0) keys.release(key);
    key.next();
    if (kLocal) hide(begin);
    if (upto - begin == 1) end_tile();
    softmax.first_tile();
    if (kDrop) softmax.drop(draw(begin));

    for (int tile = begin + 1; tile < upto; ++tile) {
        keys.wait(key);
        values.wait(value);
        fence_products();
        start_scores();
        start_sums(tile > begin + 1);
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
        if (kLocal) hide(tile);
        if (tile == upto - 1) end_tile();
        softmax.next_tile();
        if (kDrop) softmax.drop(draw(tile));
    }
    values.wait(value);
    if (last < kTileRows) wait_phase(&cleared, 0);
    fence_products();
    start_sums(upto - begin > 1);
    wait_products<0>();

    // --- out and lse, through this warp's rows of the queries ---
    const float common = args.dropout.scale * (args.gate != nullptr ? args.gate[head] : 1.0f);
    char* const staged = own + 16 * warp * Tile::kRowBytes;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float norm = softmax.norm[r];
        norm += __shfl_xor_sync(kAllLanes, norm, 1);
        norm += __shfl_xor_sync(kAllLanes, norm, 2);
        const float factor = norm == 0.0f ? 0.0f : common / norm;
        if (pair == 0 && row + 8 * r < length && args.lse != nullptr)
            args.lse[head * args.total + start + row + 8 * r] =
                norm == 0.0f ? -INFINITY : (softmax.base[r] + log2f(norm)) * kLn2;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
            float found[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int at = 4 * n + 2 * r + i;
                found[i] =
                    (part == 0 ? softmax.out[at] : softmax.out[at + Tile::kColumns / 2 - kHeadDim / 2]);
            }
            *reinterpret_cast<std::uint32_t*>(staged + swizzled_chunk(lane / 4 + 8 * r, first_chunk + n) +
                                              4 * pair) = pack_pair<T>(found[0] * factor, found[1] * factor);
        }
    }
    __syncwarp();
    T* const to = static_cast<T*>(args.out) +
                  ((static_cast<std::int64_t>(start) + warp_row) * args.nheads + head) * kHeadDim;
    constexpr int kChunks = kHeadDim / kPack<T>, kRowsAtOnce = kWarp / kChunks;
#pragma unroll
    for (int i = 0; i < 16 / kRowsAtOnce; ++i) {
        const int at = kRowsAtOnce * i + lane / kChunks, chunk = lane % kChunks;
        if (warp_row + at < length)
            *reinterpret_cast<Pack<T>*>(to + at * args.nheads * kHeadDim + chunk * kPack<T>) =
                *reinterpret_cast<const Pack<T>*>(staged + swizzled_chunk(at, first_chunk + chunk));
    }
#endif
}

}  // namespace cuda
}  // namespace fastbert
