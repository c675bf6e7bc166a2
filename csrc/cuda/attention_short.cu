// Attention's forward over short sequences, of at most 64 tokens, with heads of 32 and 64, without dropout.
// Contract: fastbert/ops/attention.py; mathematics, precision and what is saved: attention_forward.cuh, whose
// bits it has.
//
// Tiling     A block of 4 warps has room for 64 rows: for 4 sequences of at most 16 tokens, 2 of at most 32,
// or
//            1 of at most 64. A warp owns 16 queries, and multiplies with the keys of its own sequence alone.
//            Blocks count sequences, so that nothing is searched for, and no block is without a sequence.
// Pipeline   q and k come first; v comes beside the scores and the softmax. There is one tile of keys, so the
//            softmax is not an online one.
#include "attention_forward.cuh"

namespace fastbert {
namespace cuda {
namespace {

// kAny: a bias, any scale, a window that is not a causal mask, or heads that share one of k and v.
// `shift`: a sequence has room for 2^shift rows.
template <class T, int kHeadDim, bool kAny>
__global__ void __launch_bounds__(kForwardThreads, kMostBlocks)
    attention_short_kernel(AttentionFwd args, int shift) {
    constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(T)), kTile = kTileRows * kRowBytes;
    constexpr int kChunks = kHeadDim / kPack<T>, kRowsAtOnce = kForwardThreads / kChunks;
    constexpr int kCopies = kTileRows / kRowsAtOnce;
    let_next_begin();
    char* const queries = dynamic_shared();
    char *const keys = queries + kTile, *const values = keys + kTile;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = of_warp(static_cast<int>(threadIdx.x) / kWarp);
    const int batch = static_cast<int>(args.batch), head = static_cast<int>(blockIdx.x);
    const int slot = static_cast<int>(blockIdx.y + blockIdx.z * gridDim.y);
    // Lane i has the first row of the block's sequence i. The last lane has the end of all sequences, and so
    // has a lane without a sequence.
    const int first = slot * (kTileRows >> shift);
    const int bound = args.cu_seqlens[lane < kWarp - 1 && first + lane < batch ? first + lane : batch];

    // --- copies: a thread has the same chunk of several rows ---
    const int chunk = static_cast<int>(threadIdx.x) % kChunks, at = static_cast<int>(threadIdx.x) / kChunks;
    int rows_of[kCopies];  // packed; -1: behind a sequence's end
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
        const int in_tile = at + i * kRowsAtOnce, which = in_tile >> shift;
        const int row = __shfl_sync(kAllLanes, bound, which) + in_tile - (which << shift);
        rows_of[i] = row < __shfl_sync(kAllLanes, bound, which + 1) ? row : -1;
    }
    const auto copy = [&](const Heads& heads, int head, char* tile) {
        const T* const from = static_cast<const T*>(heads.data) + head * heads.head_stride + chunk * kPack<T>;
        char* const to = tile + chunk_of<T, kHeadDim>(at, chunk) * static_cast<int>(sizeof(T));
#pragma unroll
        for (int i = 0; i < kCopies; ++i)
            copy_chunk(to + i * kRowsAtOnce * kRowBytes,
                       from + (rows_of[i] < 0 ? 0 : rows_of[i]) * heads.row_stride, rows_of[i] >= 0);
    };
    const int kv_head = kAny ? kv_head_of(args, head) : head;
    wait_for_kernels();
    copy(args.q, head, queries);
    copy(args.k, kv_head, keys);
    commit_copies();
    copy(args.v, kv_head, values);
    commit_copies();
    // Rows after the last sequence
    const std::int64_t step = static_cast<std::int64_t>(gridDim.y * gridDim.z) * kTileRows;
    for (std::int64_t row = __shfl_sync(kAllLanes, bound, kWarp - 1) + slot * std::int64_t{kTileRows};
         row < args.total; row += step)
        zero_rows<T, kHeadDim>(args, row, head);

    // --- this warp's rows ---
    const int which = (16 * warp) >> shift, warp_row = 16 * warp - (which << shift);
    const int start = of_warp(__shfl_sync(kAllLanes, bound, which));
    const int whole = of_warp(__shfl_sync(kAllLanes, bound, which + 1)) - start;
    const int length = whole < 1 << shift ? whole : 1 << shift;
    const int row = warp_row + lane / 4, pair = lane % 4;
    const int offset = (which << shift) * kRowBytes;  // of the sequence's rows in a tile
    std::uint32_t p[kTileRows / 16][4];
    Rows rows;

    wait_copies<1>();
    __syncthreads();
    if (warp_row < length) {
        std::uint32_t q[kHeadDim / 16][4];
#pragma unroll
        for (int d = 0; d < kHeadDim / 16; ++d)
            load_matrices(q[d], queries + (matrix_row<T, kHeadDim>(false) ^ 32 * d) + 16 * warp * kRowBytes);
        const float* bias[2] = {nullptr, nullptr};
        if (kAny && args.bias.data != nullptr)
            for (int r = 0; r < 2; ++r)
                // Rows past the length are computed, too, and not read.
                bias[r] = args.bias.data + (first + which) * args.bias.batch_stride +
                          head * args.bias.head_stride +
                          (row + 8 * r < length ? row + 8 * r : 0) * args.bias.row_stride;
        const int key_row = matrix_row<T, kHeadDim>(true);
        const Reach reach(args.window, length);
        int least[2], most[2];
        for (int r = 0; r < 2; ++r)
            least[r] = reach.first_key(row + 8 * r) - 2 * pair,
            most[r] = reach.end_key(row + 8 * r) - 2 * pair;
        float scores[kTileRows / 8][4] = {}, top[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int n = 0; n < kTileRows / 8; n += 2) {
            if (8 * n >= length) break;
#pragma unroll
            for (int d = 0; d < kHeadDim / 16; ++d) {
                std::uint32_t b[4];
                load_matrices(b, keys + offset + (key_row ^ 32 * d) + 8 * n * kRowBytes);
                const std::uint32_t lower[2] = {b[0], b[1]}, upper[2] = {b[2], b[3]};
                mma<T>(scores[n], q[d], lower);
                mma<T>(scores[n + 1], q[d], upper);
            }
            if (kAny) scale_scores<16>(scores + n, args, bias, 8 * n + 2 * pair, length);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int at = 8 * (n + i / 4) + i % 2, r = i / 2 % 2;
                float& score = scores[n + i / 4][i % 4];
                if (at < least[r] || at >= most[r]) score = -INFINITY;
                top[r] = fmaxf(top[r], score);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (!kAny) top[r] *= args.softmax_scale * kLog2E;
            top[r] = fmaxf(top[r], __shfl_xor_sync(kAllLanes, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(kAllLanes, top[r], 2));
            rows.base[r] = top[r] == -INFINITY ? 0.0f : top[r];
        }
        const float unit = kAny ? kLog2E : args.softmax_scale * kLog2E;
#pragma unroll
        for (int n = 0; n < kTileRows / 16; ++n) {
            if (16 * n >= length) break;
            exponentiate<T, kAny, 16>(p + n, scores + 2 * n, rows, unit);
        }
    }
    wait_copies<0>();
    __syncthreads();
    if (warp_row >= length) return;
    const int value_row = matrix_row<T, kHeadDim>(false);
    float out[kHeadDim / 8][4] = {};
#pragma unroll
    for (int n = 0; n < kTileRows / 16; ++n) {
        if (16 * n >= length) break;
#pragma unroll
        for (int d = 0; d < kHeadDim / 16; ++d) {
            std::uint32_t b[4];
            load_matrices_transposed(b, values + offset + (value_row ^ 32 * d) + 16 * n * kRowBytes);
            const std::uint32_t lower[2] = {b[0], b[1]}, upper[2] = {b[2], b[3]};
            mma<T>(out[2 * d], p[n], lower);
            mma<T>(out[2 * d + 1], p[n], upper);
        }
    }
    // The warp's own queries are in registers.
    store_rows<T, kHeadDim, kAny>(args, head, start, warp_row, length, out, rows,
                                  queries + 16 * warp * kRowBytes);
}

// --- host ---

template <class T, int kHeadDim, bool kAny>
const char* launch_short(const AttentionFwd& args, std::uintptr_t stream) {
    const int shift = args.max_seqlen <= 16 ? 4 : args.max_seqlen <= 32 ? 5 : 6;
    const std::int64_t room = kTileRows >> shift, count = (args.batch + room - 1) / room;
    return launch_shared(attention_short_kernel<T, kHeadDim, kAny>,
                         slot_grid(args.nheads, count > 0 ? count : 1), dim3(kForwardThreads),
                         sizeof(T) * 3 * kTileRows * kHeadDim, stream, args, shift);
}

template <class T, int kHeadDim>
const char* short_of(const AttentionFwd& args, std::uintptr_t stream) {
    return args.bias.data != nullptr || !(args.softmax_scale > 0.0f) || is_local(args)
               ? launch_short<T, kHeadDim, true>(args, stream)
               : launch_short<T, kHeadDim, false>(args, stream);
}

template <class T>
const char* short_in(const AttentionFwd& args, std::uintptr_t stream) {
    return args.headdim == 32 ? short_of<T, 32>(args, stream) : short_of<T, 64>(args, stream);
}

}  // namespace

const char* attention_short(const AttentionFwd& args, std::uintptr_t stream) {
    return args.dtype == DType::kBFloat16 ? short_in<bf16>(args, stream) : short_in<fp16>(args, stream);
}

}  // namespace cuda
}  // namespace fastbert
