// Attention's forward on a GPU. Contract: fastbert/ops/attention.py.
//
// Math       S = softmax_scale q kᵀ + bias;  P = softmax(S) of each row;  lse = log Σ_j exp S_ij
//            out = gate * dropout(P) v.  A row without an allowed key has out 0 and lse -inf.
// Tiling     A block of 4 warps owns 64 queries of one sequence and head, a warp 16 of them. It walks over
//            the keys, 64 at a time, with an online softmax. Q stays in registers. The tiles q, k, v, k, v …
//            come through one ring of asynchronous copies: at each tile all warps wait, then copy a later one
//            into the place of the tile before. P goes from accumulators to operands within a lane.
// Precision  Products of T are summed in float. Softmax in float, exp as 2^x. The maximum that is subtracted
//            follows the true one only when that is 2^8 times higher: until then nothing has to be rescaled.
//            P is rounded to T. Without a bias the scale is folded into the factor of 2^x. With one, the
//            maximum is subtracted before the factor: float's lowest value as a mask must not overflow.
// Saved      lse, and dropout's bits where asked for: backward needs them twice.
// Source     Milakov, Gimelshein 2018, Online normalizer calculation for softmax, alg. 3; Dao 2023,
//            FlashAttention-2, alg. 1; the late maximum: Zadouri et al. 2026, FlashAttention-4.
#pragma once

#include "attention_tiles.cuh"

namespace fastbert {
namespace cuda {

constexpr int kForwardWarps = 4;
constexpr int kForwardThreads = kForwardWarps * kWarp;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
// How far a score may exceed the maximum that is subtracted, in units of log 2.
constexpr float kSlack = 8.0f;

// Tiles in shared memory: three of 128 dimensions, so that two blocks fit into 100 KB.
template <int kHeadDim>
constexpr int kRing = kHeadDim > 64 ? 3 : 4;

// What a kernel computes beside products and softmax.
enum class Extras {
    kNone,
    kDropout,
    kAny,    // bias and any scale; dropout if there is a seed
    kLocal,  // all of it, any window, and heads of q that share one of k and v
};

// Blocks per multiprocessor for which the compiler keeps registers free. sm_120 has shared memory for three,
// and its code would spill for more.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kMostBlocks = 3;
#else
constexpr int kMostBlocks = 4;
#endif
template <int kHeadDim, Extras kExtras>
constexpr int kForwardBlocks = kHeadDim > 64 ? 2 : kMostBlocks - (kExtras >= Extras::kAny);

// The online softmax of a lane's two rows, row g and row g + 8 of its warp.
struct Rows {
    // What is subtracted, and the greatest score for which it need not change; -inf before the first score.
    float base[2] = {0.0f, 0.0f};
    float most[2] = {-INFINITY, -INFINITY};
    // This lane's part of Σ exp(S - base).
    float norm[2] = {0.0f, 0.0f};
};

// Rows after the last sequence: out and lse are 0.
template <class T, int kHeadDim, int kRows = kTileRows, int kThreads = kForwardThreads>
__device__ void zero_rows(const AttentionFwd& args, std::int64_t first, int head) {
    constexpr int kChunks = kHeadDim / kPack<T>;
    const float zeros[kPack<T>] = {};
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kChunks; i += kThreads) {
        const std::int64_t row = first + i / kChunks;
        if (row >= args.total) return;
        T* out = static_cast<T*>(args.out) + (row * args.nheads + head) * kHeadDim;
        store_pack(out + i % kChunks * kPack<T>, zeros);
        if (i % kChunks == 0 && args.lse != nullptr) args.lse[head * args.total + row] = 0.0f;
    }
}

// --- a warp's 16 rows, and kKeys keys: kKeys / 8 fragments C ---

// Scaled scores, with the bias if there is one. bias: of this lane's two rows; first_key: this lane's.
template <int kKeys>
__device__ __forceinline__ void scale_scores(float (*scores)[4], const AttentionFwd& args,
                                             const float* const (&bias)[2], int first_key, int length) {
    if (args.bias.data == nullptr) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[n][i] *= args.softmax_scale;
        return;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float* const from = bias[r] + first_key;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float added = 8 * n + i < length - first_key ? from[8 * n + i] : 0.0f;
                scores[n][2 * r + i] = fmaf(scores[n][2 * r + i], args.softmax_scale, added);
            }
    }
}

// P of the scores, and its sums before it is rounded. `unit`: exp S = 2^(unit S).
template <class T, bool kAny, int kKeys>
__device__ __forceinline__ void exponentiate(std::uint32_t (*p)[4], float (*scores)[4], Rows& rows,
                                             float unit) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float base = rows.base[i / 2];
            scores[n][i] = exp2_fast(kAny ? (scores[n][i] - base) * unit : fmaf(scores[n][i], unit, -base));
            rows.norm[i / 2] += scores[n][i];
        }
#pragma unroll
        for (int r = 0; r < 2; ++r)
            p[n / 2][n % 2 * 2 + r] = pack_pair<T>(scores[n][2 * r], scores[n][2 * r + 1]);
    }
}

// Writes out and lse. `start`: the sequence's; `staging`: 16 rows of shared memory that are this warp's.
template <class T, int kHeadDim, bool kAny>
__device__ __forceinline__ void store_rows(const AttentionFwd& args, int head, std::int64_t start,
                                           int warp_row, int length, const float (&out)[kHeadDim / 8][4],
                                           const Rows& rows, char* staging) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, group = lane / 4, pair = lane % 4;
    const int row = warp_row + group;
    const float common = args.dropout.scale * (args.gate != nullptr ? args.gate[head] : 1.0f);
    T* const staged = reinterpret_cast<T*>(staging);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float norm = rows.norm[r];
        norm += __shfl_xor_sync(kAllLanes, norm, 1);
        norm += __shfl_xor_sync(kAllLanes, norm, 2);
        const float factor = norm == 0.0f ? 0.0f : common / norm;
        if (pair == 0 && row + 8 * r < length && args.lse != nullptr)
            args.lse[head * args.total + start + row + 8 * r] = norm == 0.0f ? -INFINITY
                                                                : kAny ? rows.base[r] + logf(norm)
                                                                       : (rows.base[r] + log2f(norm)) * kLn2;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n)
            *reinterpret_cast<std::uint32_t*>(staged + chunk_of<T, kHeadDim>(group + 8 * r, n) + 2 * pair) =
                pack_pair<T>(out[n][2 * r] * factor, out[n][2 * r + 1] * factor);
    }
    __syncwarp();
    constexpr int kChunks = kHeadDim / kPack<T>, kRowsAtOnce = kWarp / kChunks;
    T* to = static_cast<T*>(args.out) + ((start + warp_row) * args.nheads + head) * kHeadDim;
#pragma unroll
    for (int i = 0; i < 16 / kRowsAtOnce; ++i) {
        const int at = i * kRowsAtOnce + lane / kChunks, chunk = lane % kChunks;
        if (warp_row + at < length)
            *reinterpret_cast<Pack<T>*>(to + at * args.nheads * kHeadDim + chunk * kPack<T>) =
                load_pack(staged + chunk_of<T, kHeadDim>(at, chunk));
    }
}

template <class T, int kHeadDim, Extras kExtras>
__global__ void __launch_bounds__(kForwardThreads, (kForwardBlocks<kHeadDim, kExtras>))
    attention_forward_kernel(AttentionFwd args) {
    constexpr bool kLocal = kExtras == Extras::kLocal, kAny = kLocal || kExtras == Extras::kAny;
    // In bytes, as `slot` below.
    constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(T)), kTile = kTileRows * kRowBytes;
    constexpr int kSlots = kRing<kHeadDim>;
    let_next_begin();
    char* const ring = dynamic_shared();
    const Place place =
        find_place(args.cu_seqlens, static_cast<int>(args.batch), static_cast<int>(args.total));
    const int head = static_cast<int>(blockIdx.x), length = place.length, first_row = place.first_row;
    if (first_row >= length) return;
    wait_for_kernels();
    const std::int64_t start = place.start;
    if (place.sequence == args.batch) {
        zero_rows<T, kHeadDim>(args, start + first_row, head);
        return;
    }

    const int kv_head = kLocal ? kv_head_of(args, head) : head;
    const auto rows_of = [&](const Heads& heads, int head) {
        return static_cast<const T*>(heads.data) + start * heads.row_stride + head * heads.head_stride;
    };
    using Copies = TileCopies<T, kHeadDim, kForwardThreads>;
    // The keys that any row of the tile sees.
    const Reach reach(args.window, length);
    int begin = 0, end = args.causal && first_row + kTileRows < length ? first_row + kTileRows : length;
    if (kLocal) {
        begin = reach.first_key(first_row) / kTileRows * kTileRows;
        end = reach.end_key(first_row + kTileRows - 1);
    }
    Copies keys(rows_of(args.k, kv_head), args.k.row_stride, begin, end);
    Copies values(rows_of(args.v, kv_head), args.v.row_stride, begin, end);
    // Copies the next tile, if there is one. Every call makes a group, so that waits can count.
    const auto copy_next = [&](Copies& copies, int slot) {
        if (copies.left > 0) copies.next(ring + slot);
        commit_copies();
    };
    Copies(rows_of(args.q, head), args.q.row_stride, first_row, length).next(ring);
    commit_copies();
    copy_next(keys, kTile);
    if (kSlots == 4) copy_next(values, 2 * kTile);

    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int group = lane / 4, pair = lane % 4;
    // In the sequence: this warp's first row, this lane's first row.
    const int warp_row = first_row + 16 * warp, row = warp_row + group;
    // A vote, so that ptxas knows that it is the warp's.
    const bool active = __ballot_sync(kAllLanes, warp_row < length) != 0;

    wait_copies<kSlots - 2>();
    __syncthreads();
    if (kSlots == 4)
        copy_next(keys, 3 * kTile);
    else
        copy_next(values, 2 * kTile);
    std::uint32_t q[kHeadDim / 16][4];
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d)
        load_matrices(q[d], ring + (matrix_row<T, kHeadDim>(false) ^ 32 * d) + 16 * warp * kRowBytes);

    const bool drop = kExtras == Extras::kDropout || (kAny && args.dropout.seed != nullptr);
    const std::uint64_t seed = drop ? *args.dropout.seed : 0;
    const LaneThreshold threshold = lane_threshold(args.dropout.threshold);
    // Words of a row of saved bits
    const int words = static_cast<int>((args.max_seqlen + 31) / 32);
    // Lane 4 g + p saves word p % 2 of row g + 8 (p / 2).
    const int saved_row = row + pair / 2 * 8;
    std::int32_t* const saved = args.keep_bits != nullptr && saved_row < length
                                    ? args.keep_bits + (head * args.total + start + saved_row) * words
                                    : nullptr;
    // exp S = 2^(unit S) where the scale is folded, else of the scaled scores.
    const float unit = kAny ? kLog2E : args.softmax_scale * kLog2E;
    const float slack = kAny ? kSlack * kLn2 : kSlack;
    // All rows see the keys from `whole` on before `seen`.
    int whole = 0, seen = args.causal && first_row + 1 < length ? first_row + 1 : length;
    if (kLocal) whole = reach.first_key(first_row + kTileRows - 1), seen = reach.end_key(first_row);
    const float* bias[2] = {nullptr, nullptr};
    if (kAny && args.bias.data != nullptr) {
        const float* matrix =
            args.bias.data + place.sequence * args.bias.batch_stride + head * args.bias.head_stride;
        for (int r = 0; r < 2; ++r)
            // Rows past the length are computed, too, and not read.
            bias[r] = matrix + static_cast<std::int64_t>(row + 8 * r < length ? row + 8 * r : first_row) *
                                   args.bias.row_stride;
    }

    float out[kHeadDim / 8][4] = {};
    Rows rows;
    const int key_row = matrix_row<T, kHeadDim>(true), value_row = matrix_row<T, kHeadDim>(false);
    int slot = 0, before = 0;
    const auto advance = [&] {
        before = slot;
        slot = slot + kTile == kSlots * kTile ? 0 : slot + kTile;
        wait_copies<kSlots - 2>();
        __syncthreads();
    };
    for (int first_key = begin; first_key < end; first_key += kTileRows) {
        // --- dropout bits, while the keys arrive ---
        std::uint32_t keep_bytes = 0;
        if (drop && active) {
            keep_bytes = draw_keep_bytes(seed, args.dropout.offset, static_cast<std::uint32_t>(head),
                                         static_cast<std::uint32_t>(start + warp_row),
                                         static_cast<std::uint32_t>(first_key), threshold);
            if (args.keep_bits != nullptr) {
                const std::uint32_t word = keep_word(keep_bytes);
                const int at = first_key / 32 + pair % 2;
                if (saved != nullptr && at < words) saved[at] = static_cast<std::int32_t>(word);
            }
        }
        // --- scores, and P of them ---
        advance();
        copy_next(kSlots == 4 ? values : keys, before);
        std::uint32_t p[kTileRows / 16][4];
        if (active) {
            float scores[kTileRows / 8][4] = {};
#pragma unroll
            for (int d = 0; d < kHeadDim / 16; ++d) {
#pragma unroll
                for (int n = 0; n < kTileRows / 16; ++n) {
                    std::uint32_t b[4];
                    load_matrices(b, ring + ((slot + key_row) ^ 32 * d) + 16 * n * kRowBytes);
                    const std::uint32_t lower[2] = {b[0], b[1]}, upper[2] = {b[2], b[3]};
                    mma<T>(scores[2 * n], q[d], lower);
                    mma<T>(scores[2 * n + 1], q[d], upper);
                }
            }
            if (kAny) scale_scores<kTileRows>(scores, args, bias, first_key + 2 * pair, length);
            if (first_key + kTileRows > seen || (kLocal && first_key < whole)) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int after = row + 8 * r + 1;
                    int most = (args.causal && after < length ? after : length) - first_key - 2 * pair;
                    int least = 0;
                    if (kLocal) {
                        least = reach.first_key(row + 8 * r) - first_key - 2 * pair;
                        most = reach.end_key(row + 8 * r) - first_key - 2 * pair;
                    }
#pragma unroll
                    for (int n = 0; n < kTileRows / 8; ++n)
#pragma unroll
                        for (int i = 0; i < 2; ++i)
                            if (8 * n + i >= most || (kLocal && 8 * n + i < least))
                                scores[n][2 * r + i] = -INFINITY;
                }
            }
            float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
            for (int n = 0; n < kTileRows / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) top[i / 2] = fmaxf(top[i / 2], scores[n][i]);
            if (!kAny) {
                top[0] *= unit;
                top[1] *= unit;
            }
            if (__ballot_sync(kAllLanes, top[0] > rows.most[0] || top[1] > rows.most[1]) != 0) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    top[r] = fmaxf(top[r], __shfl_xor_sync(kAllLanes, top[r], 1));
                    top[r] = fmaxf(top[r], __shfl_xor_sync(kAllLanes, top[r], 2));
                    const bool grown = top[r] > rows.most[r], first = rows.most[r] == -INFINITY;
                    const float less = (rows.base[r] - top[r]) * (kAny ? unit : 1.0f);
                    const float shrink = grown ? (first ? 0.0f : exp2_fast(less)) : 1.0f;
                    rows.base[r] = grown ? top[r] : rows.base[r];
                    rows.most[r] = grown ? top[r] + slack : rows.most[r];
                    rows.norm[r] *= shrink;
#pragma unroll
                    for (int n = 0; n < kHeadDim / 8; ++n) {
                        out[n][2 * r] *= shrink;
                        out[n][2 * r + 1] *= shrink;
                    }
                }
            }
            exponentiate<T, kAny, kTileRows>(p, scores, rows, unit);
            if (drop) {
                const KeepMasks masks(keep_bytes);
#pragma unroll
                for (int n = 0; n < kTileRows / 8; ++n)
#pragma unroll
                    for (int r = 0; r < 2; ++r) p[n / 2][n % 2 * 2 + r] &= masks.of(n, r);
            }
        }
        // --- P v ---
        advance();
        copy_next(kSlots == 4 ? keys : values, before);
        if (active) {
#pragma unroll
            for (int n = 0; n < kTileRows / 16; ++n) {
#pragma unroll
                for (int d = 0; d < kHeadDim / 16; ++d) {
                    std::uint32_t b[4];
                    load_matrices_transposed(b, ring + ((slot + value_row) ^ 32 * d) + 16 * n * kRowBytes);
                    const std::uint32_t lower[2] = {b[0], b[1]}, upper[2] = {b[2], b[3]};
                    mma<T>(out[2 * d], p[n], lower);
                    mma<T>(out[2 * d + 1], p[n], upper);
                }
            }
        }
    }
    if (!active) return;

    // Every warp has passed the last barrier, so the ring's next tile is free.
    char* const free = ring + (slot + kTile == kSlots * kTile ? 0 : slot + kTile);
    store_rows<T, kHeadDim, kAny>(args, head, start, warp_row, length, out, rows,
                                  free + 16 * warp * kRowBytes);
}

// --- host ---

template <class T, int kHeadDim, Extras kExtras>
const char* launch_forward(const AttentionFwd& args, std::uintptr_t stream) {
    return launch_shared(attention_forward_kernel<T, kHeadDim, kExtras>,
                         slot_grid(args.nheads, slots(args.total, args.batch)), dim3(kForwardThreads),
                         sizeof(T) * kRing<kHeadDim> * kTileRows * kHeadDim, stream, args);
}

template <class T, int kHeadDim>
const char* forward_of(const AttentionFwd& args, std::uintptr_t stream) {
    if (is_local(args)) return launch_forward<T, kHeadDim, Extras::kLocal>(args, stream);
    // Without a bias the greatest product is the greatest score, unless the scale turns the order.
    if (args.bias.data != nullptr || !(args.softmax_scale > 0.0f))
        return launch_forward<T, kHeadDim, Extras::kAny>(args, stream);
    if (args.dropout.seed != nullptr) return launch_forward<T, kHeadDim, Extras::kDropout>(args, stream);
    return launch_forward<T, kHeadDim, Extras::kNone>(args, stream);
}

// One source per type compiles this: nvcc then works on both at once.
template <class T>
const char* attention_forward(const AttentionFwd& args, std::uintptr_t stream) {
    switch (args.headdim) {
        case 32:
            return forward_of<T, 32>(args, stream);
        case 64:
            return forward_of<T, 64>(args, stream);
        default:
            return forward_of<T, 128>(args, stream);
    }
}

extern template const char* attention_forward<bf16>(const AttentionFwd& args, std::uintptr_t stream);
extern template const char* attention_forward<fp16>(const AttentionFwd& args, std::uintptr_t stream);
template <>
const char* attention_forward<float>(const AttentionFwd& args, std::uintptr_t stream);  // attention_float.cu

// attention_short.cu: half precision, headdim 32 and 64, sequences of at most kTileRows tokens, no dropout.
const char* attention_short(const AttentionFwd& args, std::uintptr_t stream);

}  // namespace cuda
}  // namespace fastbert
