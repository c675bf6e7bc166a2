// Attention's forward in float32, for inference: no dropout. Contract: fastbert/ops/attention.py.
//
// Math       As attention_forward.cuh.
// Tiling     A block of 4 warps owns 64 queries of one sequence and head, a warp 16 of them. It walks over
//            the keys, 64 at a time, with an online softmax. A lane has 4 queries x 8 keys of the scores, and
//            the same 4 queries x headdim / 8 of out. Tiles in shared memory have 64 rows and at most 64
//            dimensions: heads of 128 are two tiles wide. The tiles k, v (k, k, v, v) come through two slots:
//            one is copied while the other is multiplied. P goes through shared memory within a warp.
//            All loads from shared memory have 16 bytes. A lane makes 128 multiply-adds of 12 loads in q kᵀ
//            and in P v (64 of 8 with heads of 32): 10.7 (8) per load. Every load is without bank conflicts.
// Precision  Products and sums are float's multiply-adds, never TF32. exp as 2^x. The true maximum is
//            subtracted, before the factor of 2^x: float's lowest value as a mask must not overflow.
// Saved      lse.
// Source     Milakov, Gimelshein 2018, Online normalizer calculation for softmax, alg. 3; lanes of a warp as
//            those of CUTLASS's SIMT products, which also share operands by twos.
#include "attention_forward.cuh"

namespace fastbert {
namespace cuda {
namespace {

// Of a tile's scores, a lane has rows of its warp 4 apart and keys 8 apart.
constexpr int kLaneRows = 4, kLaneKeys = 8;

// kLocal: any window, and heads of q that share one of k and v.
template <int kHeadDim, bool kLocal>
struct FloatTile {
    static constexpr int kColumns = kHeadDim > 64 ? 64 : kHeadDim;
    static constexpr int kParts = kHeadDim / kColumns;
    static constexpr int kSize = kTileRows * kColumns;
    // Two slots, q, and P.
    static constexpr int kBytes = ((2 + kParts) * kSize + kTileRows * kTileRows) * 4;
    // With a window four would spill.
    static constexpr int kBlocks = kHeadDim == 32 && !kLocal ? 4 : kHeadDim <= 64 ? 3 : 2;
};

// The maximum or the sum over the eight lanes that share a row.
template <class Function>
__device__ __forceinline__ float over_row(float x, Function function) {
#pragma unroll
    for (int lane = 2; lane < 16; lane *= 2) x = function(x, __shfl_xor_sync(kAllLanes, x, lane));
    return x;
}

template <int kHeadDim, bool kLocal>
__global__ void __launch_bounds__(kForwardThreads, (FloatTile<kHeadDim, kLocal>::kBlocks))
    attention_forward_float_kernel(AttentionFwd args) {
    using Tile = FloatTile<kHeadDim, kLocal>;
    constexpr int kColumns = Tile::kColumns, kParts = Tile::kParts;
    float* const ring = reinterpret_cast<float*>(dynamic_shared());
    float* const queries = ring + 2 * Tile::kSize;
    float* const probs = queries + kParts * Tile::kSize;
    const Place place =
        find_place(args.cu_seqlens, static_cast<int>(args.batch), static_cast<int>(args.total));
    const int head = static_cast<int>(blockIdx.x), length = place.length, first_row = place.first_row;
    if (first_row >= length) return;
    const std::int64_t start = place.start;
    if (place.sequence == args.batch) {
        zero_rows<float, kHeadDim>(args, start + first_row, head);
        return;
    }

    // The keys that any row of the tile sees.
    const Reach reach(args.window, length);
    int begin = 0, end = args.causal && first_row + kTileRows < length ? first_row + kTileRows : length;
    if (kLocal) {
        begin = reach.first_key(first_row) / kTileRows * kTileRows;
        end = reach.end_key(first_row + kTileRows - 1);
    }
    const int kv_head = kLocal ? kv_head_of(args, head) : head;
    // Copies a tile of a head's dimensions, from row `first` of the sequence on; zeros from row `last` on.
    const auto copy = [&](const Heads& heads, int own, int part, int first, int last, float* tile) {
        const float* const rows = static_cast<const float*>(heads.data) + start * heads.row_stride +
                                  own * heads.head_stride + part * kColumns;
        TileCopies<float, kColumns, kForwardThreads>(rows, heads.row_stride, first, last)
            .next(reinterpret_cast<char*>(tile));
    };
#pragma unroll
    for (int part = 0; part < kParts; ++part)
        copy(args.q, head, part, first_row, length, queries + part * Tile::kSize);
    copy(args.k, kv_head, 0, begin, end, ring);
    commit_copies();
    // Waits for tile `step` of those that a turn of the loop reads, and begins to copy the next one.
    const auto advance = [&](int step, int first_key) {
        wait_copies<0>();
        __syncthreads();
        const int next = (step + 1) % (2 * kParts), first = first_key + (next == 0 ? kTileRows : 0);
        if (first < end)
            copy(next < kParts ? args.k : args.v, kv_head, next % kParts, first, end,
                 ring + next % 2 * Tile::kSize);
        commit_copies();
    };

    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    // 16 lanes in a row read two rows of q or P, or eight chunks of k or v: neighbours the same chunk.
    const int lane_row = lane % 2 + lane / 16 * 2, lane_key = lane / 2 % 8;
    // In the tile, and in the sequence: this lane's first row.
    const int tile_row = 16 * warp + lane_row, row = first_row + tile_row;
    // A vote, so that ptxas knows that it is the warp's.
    const bool active = __ballot_sync(kAllLanes, first_row + 16 * warp < length) != 0;

    // Chunk 0 of q's rows and of the first key, the lane's first key of P; `^ 4 * c` is c chunks further.
    const int q_at[2] = {chunk_of<float, kColumns>(tile_row, 0), chunk_of<float, kColumns>(tile_row + 4, 0)};
    const int k_at = chunk_of<float, kColumns>(lane_key, 0);
    const int p_at = tile_row * kTileRows + 8 * lane_row;
    // All rows see the keys from `whole` on before `seen`.
    int whole = 0, seen = args.causal && first_row + 1 < length ? first_row + 1 : length;
    if (kLocal) whole = reach.first_key(first_row + kTileRows - 1), seen = reach.end_key(first_row);

    float out[kLaneRows][kHeadDim / 8] = {};
    float base[kLaneRows], norm[kLaneRows] = {};
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) base[i] = -INFINITY;
    for (int first_key = begin; first_key < end; first_key += kTileRows) {
        // --- scores ---
        float scores[kLaneRows][kLaneKeys] = {};
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            advance(part, first_key);
            if (!active) continue;
            const float* const q_tile = queries + part * Tile::kSize;
            const float* const k_tile = ring + part * Tile::kSize;
#pragma unroll 1
            for (int c = 0; c < kColumns / 4; ++c) {
                Pack<float> q[kLaneRows];
#pragma unroll
                for (int i = 0; i < kLaneRows; ++i)
                    q[i] = load_pack(q_tile + (q_at[i % 2] ^ 4 * c) + i / 2 * 8 * kColumns);
#pragma unroll
                for (int j = 0; j < kLaneKeys; ++j) {
                    const Pack<float> k = load_pack(k_tile + (k_at ^ 4 * c) + 8 * j * kColumns);
#pragma unroll
                    for (int e = 0; e < 4; ++e)
#pragma unroll
                        for (int i = 0; i < kLaneRows; ++i)
                            scores[i][j] = fmaf(q[i].item[e], k.item[e], scores[i][j]);
                }
            }
        }
        // --- P of them ---
        if (active) {
            const int keys_left = length - first_key - lane_key;
            if (args.bias.data != nullptr) {
                const float* const bias = args.bias.data + place.sequence * args.bias.batch_stride +
                                          head * args.bias.head_stride + first_key + lane_key;
#pragma unroll
                for (int i = 0; i < kLaneRows; ++i) {
                    // Rows past the length are computed, too, and not read.
                    const int own = row + 4 * i < length ? row + 4 * i : first_row;
                    const float* const from = bias + own * args.bias.row_stride;
#pragma unroll
                    for (int j = 0; j < kLaneKeys; ++j) {
                        const float added = 8 * j < keys_left ? from[8 * j] : 0.0f;
                        scores[i][j] = fmaf(scores[i][j], args.softmax_scale, added);
                    }
                }
            } else {
#pragma unroll
                for (int i = 0; i < kLaneRows; ++i)
#pragma unroll
                    for (int j = 0; j < kLaneKeys; ++j) scores[i][j] *= args.softmax_scale;
            }
            if (first_key + kTileRows > seen || (kLocal && first_key < whole)) {
#pragma unroll
                for (int i = 0; i < kLaneRows; ++i) {
                    const int past = row + 4 * i + 1 - first_key - lane_key;
                    int most = args.causal && past < keys_left ? past : keys_left, least = 0;
                    if (kLocal) {
                        least = reach.first_key(row + 4 * i) - first_key - lane_key;
                        most = reach.end_key(row + 4 * i) - first_key - lane_key;
                    }
#pragma unroll
                    for (int j = 0; j < kLaneKeys; ++j)
                        if (8 * j >= most || (kLocal && 8 * j < least)) scores[i][j] = -INFINITY;
                }
            }
#pragma unroll
            for (int i = 0; i < kLaneRows; ++i) {
                float top = base[i];
#pragma unroll
                for (int j = 0; j < kLaneKeys; ++j) top = fmaxf(top, scores[i][j]);
                top = over_row(top, [](float a, float b) { return fmaxf(a, b); });
                // Without a key so far exp(-inf - 0) = 0; exp(-inf + inf) would be NaN.
                const float less = top == -INFINITY ? 0.0f : top;
                const float shrink = exp2_fast((base[i] - less) * kLog2E);
                base[i] = top;
                norm[i] *= shrink;
#pragma unroll
                for (int j = 0; j < kLaneKeys; ++j) {
                    scores[i][j] = exp2_fast((scores[i][j] - less) * kLog2E);
                    norm[i] += scores[i][j];
                    probs[((p_at + lane_key) ^ 8 * j) + 4 * i * kTileRows] = scores[i][j];
                }
#pragma unroll
                for (int d = 0; d < kHeadDim / 8; ++d) out[i][d] *= shrink;
            }
        }
        // --- P v ---
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            advance(kParts + part, first_key);
            if (!active) continue;
            const float* const v_tile = ring + (kParts + part) % 2 * Tile::kSize;
            for (int g = 0; g < kTileRows / 8 && first_key + 8 * g < end; ++g)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    Pack<float> p[kLaneRows];
#pragma unroll
                    for (int i = 0; i < kLaneRows; ++i)
                        p[i] = load_pack(probs + (p_at ^ 8 * g ^ 4 * c) + 4 * i * kTileRows);
#pragma unroll
                    for (int e = 0; e < 4; ++e)
#pragma unroll
                        for (int m = 0; m < kColumns / 32; ++m) {
                            const int v_at = chunk_of<float, kColumns>(4 * c + e, lane_key) + 32 * m;
                            const Pack<float> v = load_pack(v_tile + 8 * g * kColumns + v_at);
#pragma unroll
                            for (int i = 0; i < kLaneRows; ++i)
#pragma unroll
                                for (int d = 0; d < 4; ++d) {
                                    float& sum = out[i][part * kColumns / 8 + 4 * m + d];
                                    sum = fmaf(p[i].item[e], v.item[d], sum);
                                }
                        }
                }
        }
    }
    if (!active) return;

    // --- out and lse ---
    const float gate = args.gate != nullptr ? args.gate[head] : 1.0f;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
        const float total = over_row(norm[i], [](float a, float b) { return a + b; });
        const float factor = total == 0.0f ? 0.0f : gate / total;
        if (row + 4 * i >= length) continue;
        const std::int64_t at = start + row + 4 * i;
        if (lane_key == 0 && args.lse != nullptr)
            args.lse[head * args.total + at] = total == 0.0f ? -INFINITY : base[i] + logf(total);
        float* const to = static_cast<float*>(args.out) + (at * args.nheads + head) * kHeadDim + 4 * lane_key;
#pragma unroll
        for (int m = 0; m < kHeadDim / 32; ++m) {
            float values_out[4];
#pragma unroll
            for (int d = 0; d < 4; ++d) values_out[d] = out[i][4 * m + d] * factor;
            store_pack(to + 32 * m, values_out);
        }
    }
}

template <int kHeadDim>
const char* launch_float(const AttentionFwd& args, std::uintptr_t stream) {
    // As many blocks as registers allow
    const auto kernel = is_local(args) ? attention_forward_float_kernel<kHeadDim, true>
                                       : attention_forward_float_kernel<kHeadDim, false>;
    if (const char* reason = prefer_shared(kernel)) return reason;
    return launch_shared(kernel, slot_grid(args.nheads, slots(args.total, args.batch)), dim3(kForwardThreads),
                         FloatTile<kHeadDim, false>::kBytes, stream, args);
}

}  // namespace

template <>
const char* attention_forward<float>(const AttentionFwd& args, std::uintptr_t stream) {
    switch (args.headdim) {
        case 32:
            return launch_float<32>(args, stream);
        case 64:
            return launch_float<64>(args, stream);
        default:
            return launch_float<128>(args, stream);
    }
}

}  // namespace cuda
}  // namespace fastbert
