// dk and dv of attention. Mathematics and tiling: attention_backward.cu.
#include "attention_backward.cuh"

namespace fastbert {
namespace cuda {
namespace {

// Queries of a tile. Wide heads have half as many, and their keys and values stay in shared memory.
template <int kD>
constexpr int kQueries = kD <= 64 ? 64 : 32;
template <int kD>
constexpr bool kInRegisters = kD <= 64;

// A float and a word of bits per query.
template <int kD>
struct Rows {
    float delta[kQueries<kD>], norm[kQueries<kD>], lse[kQueries<kD>];
    std::uint32_t bits[kOwned / 32 * kQueries<kD>];
};

template <class T, int kD>
struct Shared {
    alignas(128) T query[2][kQueries<kD> * kD];
    alignas(128) T dout[2][kQueries<kD> * kD];
    alignas(128) T own[kInRegisters<kD> ? 1 : 2 * kOwned * kD];
    Rows<kD> rows[2];
};

template <class T, int kD>
__global__ void __launch_bounds__(kBackwardThreads, 2) dkdv_kernel(CudaAttentionBwd args) {
    constexpr int kTile = kQueries<kD>;
    constexpr bool kKeep = kInRegisters<kD>;
    constexpr int kSteps = kKeep ? kD / 16 : 2;
    const int kv_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(args.kv_heads));
    const std::int64_t stride = args.nheads * kD;
    const OwnedRows place = owned_rows(args, args.kv_heads);
    T* const dk = args.dk == nullptr ? nullptr : static_cast<T*>(args.dk) + kv_head * kD;
    T* const dv = args.dv == nullptr ? nullptr : static_cast<T*>(args.dv) + kv_head * kD;
    if (place.sequence == args.batch) {
        for (std::int64_t first = static_cast<std::int64_t>(place.start) + place.first; first < args.total;
             first += place.length) {
            if (dk != nullptr) zero_rows<T, kD>(dk, args.kv_grad_stride, first, args.total);
            if (dv != nullptr) zero_rows<T, kD>(dv, args.kv_grad_stride, first, args.total);
        }
        return;
    }
    if (place.first >= place.length) return;

    Shared<T, kD>& shared = *reinterpret_cast<Shared<T, kD>*>(dynamic_shared());
    const int first = place.first, length = place.length, thread = static_cast<int>(threadIdx.x);
    const std::int64_t start = place.start;
    // The heads of q that read these keys; `q` and `dout` are those of `head`.
    const int heads = static_cast<int>(args.nheads) / static_cast<int>(args.kv_heads);
    int head = kv_head * heads;
    const int last_head = head + heads - 1;
    const T* q = row_of<T>(args.q, head, start);
    const T* dout = static_cast<const T*>(args.dout) + start * stride + head * kD;
    const bool dropout = args.dropout.seed != nullptr, biased = args.bias.data != nullptr;
    // Rows after the sequence are zeros, their P finite: they add nothing.
    const auto fetch = [&](int first_row, int slot) {
        copy_rows<T, kD, kTile>(shared.query[slot], q, args.q.row_stride, first_row, length);
        copy_rows<T, kD, kTile>(shared.dout[slot], dout, stride, first_row, length);
        Rows<kD>& rows = shared.rows[slot];
        const std::int64_t at = head * args.total + start + first_row;
#pragma unroll
        for (int i = 0; i < 3 * kTile; i += kBackwardThreads) {
            const int which = (i + thread) / kTile, row = (i + thread) % kTile;
            const float* from = which == 0 ? args.delta : which == 1 ? args.norm : args.lse;
            float* to = which == 0 ? rows.delta : which == 1 ? rows.norm : rows.lse;
            const bool inside = row < length - first_row;
            if (which < 2 || (which == 2 && biased))
                copy_word(to + row, inside ? from + at + row : from, inside);
        }
        if (dropout) bring_bits<kTile, kOwned>(rows.bits, args, head, place, first_row, first);
        commit_copies();
    };

    // The keys take the second slot until they are in registers, or stay where they are.
    T* const own_keys = kKeep ? shared.query[1] : shared.own;
    T* const own_values = kKeep ? shared.dout[1] : shared.own + kOwned * kD;
    copy_rows<T, kD, kOwned>(own_keys, row_of<T>(args.k, kv_head, start), args.k.row_stride, first, length);
    copy_rows<T, kD, kOwned>(own_values, row_of<T>(args.v, kv_head, start), args.v.row_stride, first, length);
    // The queries that see the block's keys; those in [whole, seen) see all of them.
    const Reach reach({args.window.right, args.window.left}, length);
    const int last = (first + kOwned < length ? first + kOwned : length) - 1;
    const int begin = reach.first_key(first), end = reach.end_key(last);
    const int whole = reach.first_key(last), seen = reach.end_key(first);
    fetch(begin, 0);
    wait_copies<0>();
    __syncthreads();
    const int lane = thread % kWarp, group = lane / 4, pair = lane % 4;
    const int warp_row = thread / kWarp * 16;
    std::uint32_t left_k[kKeep ? kD / 16 : 1][4], left_v[kKeep ? kD / 16 : 1][4];
    if (kKeep) {
#pragma unroll
        for (int step = 0; step < kD / 16; ++step) {
            load_left<T, kD>(left_k[kKeep ? step : 0], own_keys, warp_row, step);
            load_left<T, kD>(left_v[kKeep ? step : 0], own_values, warp_row, step);
        }
    }
    const auto keys = [&](std::uint32_t (&a)[4], int step) {
        if (kKeep) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = left_k[kKeep ? step : 0][i];
        } else {
            load_left<T, kD>(a, own_keys, warp_row, step);
        }
    };
    const auto values = [&](std::uint32_t (&a)[4], int step) {
        if (kKeep) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = left_v[kKeep ? step : 0][i];
        } else {
            load_left<T, kD>(a, own_values, warp_row, step);
        }
    };

    const int key = first + warp_row + group;  // and 8 more
    // Of the two keys, in word warp_row / 32 of a row
    const std::uint32_t bit[2] = {1u << (warp_row % 32 + group), 1u << (warp_row % 32 + group + 8)};
    const float scale = args.softmax_scale, unit = args.softmax_scale * kLog2E;

    float grad_k[kD / 8][4] = {}, grad_v[kD / 8][4] = {};
    int slot = 0;
    for (int first_row = begin, next_row; first_row < end; first_row = next_row, slot ^= 1) {
        wait_copies<0>();
        __syncthreads();
        const float factor = args.dropout.scale * (args.gate != nullptr ? args.gate[head] : 1.0f);
        const float* const bias =
            args.bias.data +
            (biased ? place.sequence * args.bias.batch_stride + head * args.bias.head_stride : 0);
        next_row = first_row + kTile;
        if (next_row >= end && head < last_head) {
            next_row = begin;
            ++head;
            q += args.q.head_stride;
            dout += kD;
        }
        if (next_row < end) fetch(next_row, slot ^ 1);
        const Rows<kD>& rows = shared.rows[slot];
        const bool edge = first_row < whole || (seen < length && first_row + kTile > seen);
#pragma unroll 1
        for (int column = 0; column < kTile; column += kColumns) {
            // Transposed: keys are rows, queries columns.
            float p[kProducts][4] = {};
            multiply_rows<T, kD, kSteps>(p, keys, shared.query[slot], column);
            const int query = column + 2 * pair;
#pragma unroll
            for (int n = 0; n < kProducts; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int at = query + 8 * n + i % 2;
                    if (biased) {
                        const int row = first_row + at;
                        const bool inside = row < length && key + i / 2 * 8 < length;
                        const float b = inside ? bias[row * args.bias.row_stride + key + i / 2 * 8] : 0.0f;
                        const float lse = rows.lse[at];
                        p[n][i] = (fmaf(p[n][i], scale, b) - (lse == -INFINITY ? 0.0f : lse)) * kLog2E;
                        p[n][i] = exp2_fast(p[n][i]) * rows.norm[at];
                    } else {
                        p[n][i] = exp2_fast(fmaf(p[n][i], unit, -rows.norm[at]));
                    }
                }
            if (edge) {
#pragma unroll
                for (int n = 0; n < kProducts; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (!reach.sees(key + i / 2 * 8, first_row + query + 8 * n + i % 2)) p[n][i] = 0.0f;
            }
            float dp[kProducts][4] = {};
            if (dk != nullptr) multiply_rows<T, kD, kSteps>(dp, values, shared.dout[slot], column);
            std::uint32_t left[kColumns / 16][4];
            // P with dropout's bits, times `weight`, as the left operand of dv
            const auto drop = [&](float weight) {
                float dropped[kProducts][4];
#pragma unroll
                for (int n = 0; n < kProducts; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int at = warp_row / 32 * kTile + query + 8 * n + i % 2;
                        const bool kept = !dropout || (rows.bits[at] & bit[i / 2]) != 0;
                        dropped[n][i] = kept ? p[n][i] * weight : 0.0f;
                        dp[n][i] = kept ? dp[n][i] : 0.0f;
                    }
                as_left<T>(left, dropped);
            };
            // Heads have gates of their own; dropout's factor alone is left to the end.
            if (args.gate != nullptr)
                drop(factor);
            else if (dropout)
                drop(1.0f);
            else
                as_left<T>(left, p);
            if (dv != nullptr) multiply_columns<T, kD>(grad_v, left, shared.dout[slot], column);
            if (dk != nullptr) {
#pragma unroll
                for (int n = 0; n < kProducts; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        p[n][i] *= fmaf(dp[n][i], factor, -rows.delta[query + 8 * n + i % 2]);
                as_left<T>(left, p);
                multiply_columns<T, kD>(grad_k, left, shared.query[slot], column);
            }
        }
    }
    // Other warps may still read the queries. Both slots together have the block's rows.
    __syncthreads();
    T* const stage = &shared.query[0][0] + warp_row * kD;
    const float rest = args.gate != nullptr ? 1.0f : args.dropout.scale;
    const float of_k[2] = {scale, scale}, of_v[2] = {rest, rest};
    if (dk != nullptr)
        store_rows<T, kD>(dk + start * args.kv_grad_stride, args.kv_grad_stride, grad_k, of_k, stage,
                          first + warp_row, length);
    if (dv != nullptr)
        store_rows<T, kD>(dv + start * args.kv_grad_stride, args.kv_grad_stride, grad_v, of_v, stage,
                          first + warp_row, length);
}

template <class T, int kD>
const char* launch(const CudaAttentionBwd& args, std::uintptr_t stream) {
    return launch_shared(dkdv_kernel<T, kD>, grid_of(args.slots * args.kv_heads), dim3(kBackwardThreads),
                         sizeof(Shared<T, kD>), stream, args);
}

}  // namespace

const char* launch_dkdv(const CudaAttentionBwd& args, std::uintptr_t stream) {
    FASTBERT_BY_HEADDIM(launch, args, stream)
}

}  // namespace cuda
}  // namespace fastbert
