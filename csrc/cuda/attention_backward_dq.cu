// dq of attention, and what the other kernels of backward read: delta and the normaliser of P. Mathematics
// and tiling: attention_backward.cu.
#include <type_traits>

#include "attention_backward.cuh"

namespace fastbert {
namespace cuda {
namespace {

// Keys of a tile. Wide heads have half as many, and their dout stays in shared memory.
template <int kD>
constexpr int kKeysOf = kD <= 64 ? 64 : 32;
template <int kD>
constexpr bool kInRegisters = kD <= 64;

template <class T, int kD>
struct Shared {
    alignas(128) T key[2][kKeysOf<kD> * kD];
    alignas(128) T value[2][kKeysOf<kD> * kD];
    alignas(128) T own[kInRegisters<kD> ? 1 : 2 * kOwned * kD];
    std::uint32_t bits[2][kKeysOf<kD> / 32 * kOwned];
    float delta[kOwned];
    int rough;
};

// delta of the block's rows, from `dout`, a tile, and out in memory.
template <class T, int kD>
__device__ __forceinline__ void sum_delta(float* delta, const T* dout, const T* out, std::int64_t stride,
                                          int first, int length) {
    constexpr int kChunks = kD / kPack<T>;
#pragma unroll
    for (int i = static_cast<int>(threadIdx.x); i < kOwned * kChunks; i += kBackwardThreads) {
        const int row = i / kChunks, chunk = i % kChunks;
        float sum = 0.0f;
        if (row < length - first) {
            float a[kPack<T>], b[kPack<T>];
            widen_pack(load_pack(dout + chunk_of<T, kD>(row, chunk)), a);
            widen_pack(load_pack(out + (static_cast<std::int64_t>(first) + row) * stride + chunk * kPack<T>),
                       b);
#pragma unroll
            for (int j = 0; j < kPack<T>; ++j) sum = fmaf(a[j], b[j], sum);
        }
#pragma unroll
        for (int lane = kChunks / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(kAllLanes, sum, lane);
        if (chunk == 0) delta[row] = sum;
    }
}

template <class T, int kD>
__global__ void __launch_bounds__(kBackwardThreads, 2) dq_kernel(CudaAttentionBwd args) {
    constexpr int kKeys = kKeysOf<kD>;
    constexpr bool kKeep = kInRegisters<kD>;
    const std::int64_t head = blockIdx.x % static_cast<unsigned>(args.nheads), stride = args.nheads * kD;
    const OwnedRows place = owned_rows(args, args.nheads);
    T* const dq = args.dq == nullptr ? nullptr : static_cast<T*>(args.dq) + head * kD;
    if (place.sequence == args.batch) {
        for (std::int64_t first = static_cast<std::int64_t>(place.start) + place.first; first < args.total;
             first += place.length) {
            if (dq != nullptr) zero_rows<T, kD>(dq, args.grad_stride, first, args.total);
            const std::int64_t row = first + threadIdx.x;
            if (args.dgate != nullptr && threadIdx.x < kOwned && row < args.total)
                args.dgate[head * args.total + row] = 0.0f;
        }
        return;
    }
    if (place.first >= place.length) return;

    Shared<T, kD>& shared = *reinterpret_cast<Shared<T, kD>*>(dynamic_shared());
    const int first = place.first, length = place.length;
    const std::int64_t start = place.start;
    const int kv_head = kv_head_of(args, static_cast<int>(head));
    const T* const q = row_of<T>(args.q, head, start);
    const T* const k = row_of<T>(args.k, kv_head, start);
    const T* const v = row_of<T>(args.v, kv_head, start);
    const T* const dout = static_cast<const T*>(args.dout) + start * stride + head * kD;
    const T* const out = static_cast<const T*>(args.out) + start * stride + head * kD;
    const bool dropout = args.dropout.seed != nullptr;
    const auto fetch = [&](int first_key, int slot) {
        copy_rows<T, kD, kKeys>(shared.key[slot], k, args.k.row_stride, first_key, length);
        copy_rows<T, kD, kKeys>(shared.value[slot], v, args.v.row_stride, first_key, length);
        if (dropout) bring_bits<kOwned, kKeys>(shared.bits[slot], args, head, place, first, first_key);
        commit_copies();
    };

    // The keys that the block's rows see, from a whole tile on; all rows see those in [whole, seen).
    const Reach reach(args.window, length);
    const int begin = reach.first_key(first) / kKeys * kKeys, end = reach.end_key(first + kOwned - 1);
    const int whole = reach.first_key(first + kOwned - 1), seen = reach.end_key(first);

    // The queries take the second slot until they are in registers, or have a place of their own.
    T* const own_q = kKeep ? shared.key[1] : shared.own;
    T* const own_dout = kKeep ? shared.value[1] : shared.own + kOwned * kD;
    copy_rows<T, kD, kOwned>(own_q, q, args.q.row_stride, first, length);
    copy_rows<T, kD, kOwned>(own_dout, dout, stride, first, length);
    if (threadIdx.x == 0) shared.rough = 0;
    fetch(begin, 0);
    wait_copies<0>();
    __syncthreads();
    const int lane = static_cast<int>(threadIdx.x) % kWarp, group = lane / 4, pair = lane % 4;
    const int warp_row = static_cast<int>(threadIdx.x) / kWarp * 16;
    std::uint32_t left_q[kD / 16][4], left_dout[kKeep ? kD / 16 : 1][4];
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
        load_left<T, kD>(left_q[step], own_q, warp_row, step);
        if (kKeep) load_left<T, kD>(left_dout[kKeep ? step : 0], own_dout, warp_row, step);
    }
    const auto of_q = [&](std::uint32_t (&a)[4], int step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = left_q[step][i];
    };
    const auto of_dout = [&](std::uint32_t (&a)[4], int step) {
        if (kKeep) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = left_dout[kKeep ? step : 0][i];
        } else {
            load_left<T, kD>(a, own_dout, warp_row, step);
        }
    };
    sum_delta<T, kD>(shared.delta, own_dout, out, stride, first, length);
    __syncthreads();

    // This thread's two rows.
    int row[2];  // in the sequence
    float delta[2], shift[2];
    const bool biased = args.bias.data != nullptr;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        row[half] = first + warp_row + group + 8 * half;
        const bool inside = row[half] < length;
        delta[half] = shared.delta[warp_row + group + 8 * half];
        const float lse = inside ? args.lse[head * args.total + start + row[half]] : 0.0f;
        // With a bias a score may be the lowest float: it is shifted before it is scaled.
        shift[half] = !biased ? lse * kLog2E : lse == -INFINITY ? 0.0f : lse;
    }
    const float scale = args.softmax_scale, unit = args.softmax_scale * kLog2E;
    const float factor = args.dropout.scale * (args.gate != nullptr ? args.gate[head] : 1.0f);
    // Half a step of T
    constexpr float kRounding = std::is_same<T, bf16>::value ? 0x1p-8f : 0x1p-11f;

    float grad[kD / 8][4] = {};
    float norm[2] = {}, rest[2] = {}, size[2] = {}, gate[2] = {}, inverse[2];
    int slot = 0;
    for (bool again = false;; again = true) {
        for (int first_key = begin; first_key < end; first_key += kKeys, slot ^= 1) {
            wait_copies<0>();
            __syncthreads();
            if (first_key + kKeys < end) fetch(first_key + kKeys, slot ^ 1);
            // Whether a key of the tile is not seen by all rows.
            const bool edge = first_key + kKeys > seen || first_key < whole;
#pragma unroll 1
            for (int column = 0; column < kKeys; column += kColumns) {
                float p[kProducts][4] = {}, dp[kProducts][4] = {};
                multiply_rows<T, kD>(p, of_q, shared.key[slot], column);
                multiply_rows<T, kD>(dp, of_dout, shared.value[slot], column);
                const int key = first_key + column + 2 * pair;
                // P, not normalised
                if (biased) {
                    const float* const bias = args.bias.data + place.sequence * args.bias.batch_stride +
                                              head * args.bias.head_stride + key;
#pragma unroll
                    for (int n = 0; n < kProducts; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const int at = 8 * n + i % 2;
                            const bool inside = row[i / 2] < length && key + at < length;
                            const float b = inside ? bias[row[i / 2] * args.bias.row_stride + at] : 0.0f;
                            p[n][i] = (fmaf(p[n][i], scale, b) - shift[i / 2]) * kLog2E;
                        }
                } else {
#pragma unroll
                    for (int n = 0; n < kProducts; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i) p[n][i] = fmaf(p[n][i], unit, -shift[i / 2]);
                }
#pragma unroll
                for (int n = 0; n < kProducts; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) p[n][i] = exp2_fast(p[n][i]);
                if (edge) {
#pragma unroll
                    for (int n = 0; n < kProducts; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            if (!reach.sees(row[i / 2], key + 8 * n + i % 2)) p[n][i] = 0.0f;
                }
                if (dropout) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const std::uint32_t word =
                            shared.bits[slot][column / 32 * kOwned + warp_row + group + 8 * half] >>
                            (2 * pair);
#pragma unroll
                        for (int n = 0; n < kProducts; ++n)
#pragma unroll
                            for (int i = 0; i < 2; ++i)
                                if ((word & (1u << (8 * n + i))) == 0) dp[n][2 * half + i] = 0.0f;
                    }
                }
                if (args.dgate != nullptr) {
#pragma unroll
                    for (int n = 0; n < kProducts; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i) gate[i / 2] = fmaf(p[n][i], dp[n][i], gate[i / 2]);
                }
                // dS
#pragma unroll
                for (int n = 0; n < kProducts; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        norm[i / 2] += p[n][i];
                        dp[n][i] = p[n][i] * fmaf(dp[n][i], factor, -delta[i / 2]);
                        rest[i / 2] += dp[n][i];
                        size[i / 2] += fabsf(dp[n][i]);
                    }
                if (dq != nullptr) {
                    std::uint32_t left[kColumns / 16][4];
                    as_left<T>(left, dp);
                    multiply_columns<T, kD>(grad, left, shared.key[slot], column);
                }
            }
        }
        bool rough = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            norm[half] = row_sum(norm[half]);
            const float divisor = norm[half] == 0.0f ? 1.0f : norm[half];
            inverse[half] = 1.0f / divisor;
            if (again) continue;
            rest[half] = row_sum(rest[half]);
            size[half] = row_sum(size[half]);
            gate[half] = row_sum(gate[half]);
            rough = rough || fabsf(rest[half]) > kRounding * size[half];
            // By division: where there is one key, delta is then dP to the last bit.
            delta[half] += rest[half] / divisor;
            const std::int64_t at = head * args.total + start + row[half];
            if (pair == 0 && row[half] < length) {
                args.delta[at] = delta[half];
                args.norm[at] = biased ? inverse[half] : shift[half] + log2f(norm[half]);
                if (args.dgate != nullptr) args.dgate[at] = gate[half] * inverse[half] * args.dropout.scale;
            }
        }
        if (dq == nullptr) return;
        if (again) break;
        if (rough) shared.rough = 1;
        __syncthreads();
        if (shared.rough == 0) break;
#pragma unroll
        for (int n = 0; n < kD / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) grad[n][i] = 0.0f;
        norm[0] = norm[1] = 0.0f;
        fetch(begin, slot);
    }
    // Other warps may still read the keys. Both slots together have the block's rows.
    __syncthreads();
    const float factors[2] = {inverse[0] * scale, inverse[1] * scale};
    store_rows<T, kD>(dq + start * args.grad_stride, args.grad_stride, grad, factors,
                      &shared.key[0][0] + warp_row * kD, first + warp_row, length);
}

template <class T, int kD>
const char* launch(const CudaAttentionBwd& args, std::uintptr_t stream) {
    return launch_shared(dq_kernel<T, kD>, grid_of(args.slots * args.nheads), dim3(kBackwardThreads),
                         sizeof(Shared<T, kD>), stream, args);
}

}  // namespace

const char* launch_dq(const CudaAttentionBwd& args, std::uintptr_t stream) {
    FASTBERT_BY_HEADDIM(launch, args, stream)
}

}  // namespace cuda
}  // namespace fastbert
