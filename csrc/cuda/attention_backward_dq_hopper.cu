// dq of attention on compute capability 9.0, and delta and the normaliser of P: as attention_backward_dq.cu,
// by products of a warp group.
#include <type_traits>

#include "attention_backward.h"
#include "attention_backward_hopper.cuh"

namespace fastbert {
namespace cuda {
namespace {

// Tiles of keys and values: the products of one still run, one is used, one comes.
constexpr int kSlots = 3;

template <class T>
struct Shared {
    GroupTile<T> query, dout, key[kSlots], value[kSlots];
    std::uint32_t bits[kSlots][kGroupTile / 32 * kOwned];
    float delta[kOwned];
    std::uint64_t own, full[kSlots];
    int rough;
};

template <class T, bool kLocal>
__global__ void __launch_bounds__(kBackwardThreads, kGroupBlocks)
    dq_hopper_kernel(const __grid_constant__ GroupArguments group_args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int kD = kGroupHead;
    const CudaAttentionBwd& args = group_args.call;
    const std::int64_t head = blockIdx.x % static_cast<unsigned>(args.nheads), stride = args.nheads * kD;
    const OwnedRows place = owned_rows(args, args.nheads);
    T* const dq = static_cast<T*>(args.dq) + head * kD;
    if (place.sequence == args.batch) {
        for (std::int64_t first = static_cast<std::int64_t>(place.start) + place.first; first < args.total;
             first += place.length) {
            zero_rows<T, kD>(dq, args.grad_stride, first, args.total);
            const std::int64_t row = first + threadIdx.x;
            if (args.dgate != nullptr && threadIdx.x < kOwned && row < args.total)
                args.dgate[head * args.total + row] = 0.0f;
        }
        return;
    }
    if (place.first >= place.length) return;

    Shared<T>& shared = aligned_shared<Shared<T>>();
    const int first = of_warp(place.first), length = of_warp(place.length);
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % kWarp, group = lane / 4, pair = lane % 4, warp_row = thread / kWarp * 16;
    const std::int64_t start = of_warp(place.start), plane = head * args.total + start;
    const int column = static_cast<int>(head) * kD;
    const int kv_column = kLocal ? kv_head_of(args, static_cast<int>(head)) * kD : column;
    const bool dropout = args.dropout.seed != nullptr;
    const int words = static_cast<int>((args.max_seqlen + 31) / 32);
    // A thread copies a word of bits per tile: that of a row and 32 keys. Rows after the sequence have the
    // last one's.
    static_assert(kOwned * kGroupTile / 32 == kBackwardThreads, "a word per thread");
    const int bits_row = first + thread % kOwned < length ? first + thread % kOwned : length - 1;
    const std::int32_t* const bits = args.keep_bits + (plane + bits_row) * words + thread / kOwned;
    const auto fetch = [&](int first_key, int slot) {
        if (thread == 0)
            load_two(&shared.full[slot], shared.key[slot], group_args.k, shared.value[slot], group_args.v,
                     place.start + first_key, kv_column);
        if (!dropout) return;
        if (args.keep_bits == nullptr) {
            draw_bits<kOwned, kGroupTile>(shared.bits[slot], args, head, place, first, first_key);
        } else {
            const bool inside = first_key / 32 + thread / kOwned < words;
            copy_word(shared.bits[slot] + thread, inside ? bits + first_key / 32 : args.keep_bits, inside);
            commit_copies();
        }
    };

    // The keys that the block's rows see, from a whole tile on; all rows see those in [whole, seen).
    const Reach reach(args.window, length);
    int begin = 0, end = length, whole = 0, seen = length;
    if (kLocal) {
        begin = reach.first_key(first) / kGroupTile * kGroupTile, end = reach.end_key(first + kOwned - 1);
        whole = reach.first_key(first + kOwned - 1), seen = reach.end_key(first);
    }

    if (thread == 0) {
        init_barrier(&shared.own, 1);
        for (int i = 0; i < kSlots; ++i) init_barrier(&shared.full[i], 1);
        fence_barriers();
        shared.rough = 0;
    }
    __syncthreads();
    if (thread == 0)
        load_two(&shared.own, shared.query, group_args.q, shared.dout, group_args.dout, place.start + first,
                 column);
    fetch(begin, 0);

    // delta of the block's rows; out comes beside the copies.
    constexpr int kChunks = kD / kPack<T>, kPacks = kOwned * kChunks / kBackwardThreads;
    const int chunk = thread % kChunks;
    const T* const out = static_cast<const T*>(args.out) + start * stride + column + chunk * kPack<T>;
    Pack<T> packs[kPacks];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
        const int row = first + (thread + i * kBackwardThreads) / kChunks;
        packs[i] = load_pack(out + (row < length ? row : length - 1) * stride);
    }
    // This thread's two rows.
    int row[2];  // in the sequence
    float delta[2], shift[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        row[half] = first + warp_row + group + 8 * half;
        shift[half] = args.lse[plane + (row[half] < length ? row[half] : length - 1)] * kLog2E;
    }
    wait_phase(&shared.own, 0);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
        const int own = (thread + i * kBackwardThreads) / kChunks;
        float sum = 0.0f, a[kPack<T>], b[kPack<T>];
        widen_pack(load_pack(shared.dout + chunk_of<T, kD>(own, chunk)), a);
        widen_pack(packs[i], b);
#pragma unroll
        for (int j = 0; j < kPack<T>; ++j) sum = fmaf(a[j], b[j], sum);
#pragma unroll
        for (int across = kChunks / 2; across > 0; across /= 2)
            sum += __shfl_xor_sync(kAllLanes, sum, across);
        if (chunk == 0) shared.delta[own] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) delta[half] = shared.delta[warp_row + group + 8 * half];

    const float scale = args.softmax_scale, unit = args.softmax_scale * kLog2E;
    const float factor = args.dropout.scale * (args.gate != nullptr ? args.gate[head] : 1.0f);
    // Half a step of T
    constexpr float kRounding = std::is_same<T, bf16>::value ? 0x1p-8f : 0x1p-11f;
    const std::uint64_t own_q = operand_at(shared.query), own_dout = operand_at(shared.dout);
    const std::uint64_t keys = operand_at(shared.key[0]), values = operand_at(shared.value[0]);

    float grad[kGroupSums];
    float norm[2] = {}, rest[2] = {}, size[2] = {}, gate[2] = {}, inverse[2];
    int slot = 0, parity = 0;
    for (bool again = false;; again = true) {
        for (int first_key = begin; first_key < end; first_key += kGroupTile) {
            const bool edge = first_key + kGroupTile > seen || (kLocal && first_key < whole);
            wait_copies<0>();
            wait_phase(&shared.full[slot], parity);
            if (first_key + kGroupTile > length) {
                zero_rest(shared.key[slot], length - first_key);
                zero_rest(shared.value[slot], length - first_key);
                fence_shared();
            }
            __syncthreads();
            // The products that read the next slot have been waited for by all warps.
            const int next = slot + 1 == kSlots ? 0 : slot + 1;
            if (first_key + kGroupTile < end) fetch(first_key + kGroupTile, next);
            float p[kGroupSums], ds[kGroupSums];
            fence_products();
            multiply_tiles<T>(p, own_q, keys + slot * kTileStep);
            multiply_tiles<T>(ds, own_dout, values + slot * kTileStep);
            wait_products<1>();
            settle(p);
            // P, not normalised
#pragma unroll
            for (int i = 0; i < kGroupSums; ++i) p[i] = exp2_fast(fmaf(p[i], unit, -shift[i / 2 % 2]));
            if (edge) hide<kLocal>(p, reach, first, first_key);
#pragma unroll
            for (int i = 0; i < kGroupSums; ++i) norm[i / 2 % 2] += p[i];
            wait_products<0>();
            settle(ds);
            if (dropout) {
#pragma unroll
                for (int word = 0; word < kGroupTile / 32; ++word)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const std::uint32_t kept =
                            shared.bits[slot][word * kOwned + warp_row + group + 8 * half] >> (2 * pair);
#pragma unroll
                        for (int i = 0; i < 8; ++i) {
                            float& of = ds[16 * word + i / 2 * 4 + 2 * half + i % 2];
                            if ((kept & (1u << (i / 2 * 8 + i % 2))) == 0) of = 0.0f;
                        }
                    }
            }
            if (args.dgate != nullptr) {
#pragma unroll
                for (int i = 0; i < kGroupSums; ++i) gate[i / 2 % 2] = fmaf(p[i], ds[i], gate[i / 2 % 2]);
            }
#pragma unroll
            for (int i = 0; i < kGroupSums; ++i) {
                ds[i] = p[i] * fmaf(ds[i], factor, -delta[i / 2 % 2]);
                rest[i / 2 % 2] += ds[i];
                size[i / 2 % 2] += fabsf(ds[i]);
            }
            std::uint32_t left[kGroupTile / 16][4];
            rounded<T>(left, ds);
            fence_products();
            multiply_rounded<T>(grad, left, keys + slot * kTileStep, first_key > begin);
            parity ^= next == 0;
            slot = next;
        }
        wait_products<0>();
        settle(grad);
        bool rough = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            norm[half] = row_sum(norm[half]);
            inverse[half] = 1.0f / (norm[half] == 0.0f ? 1.0f : norm[half]);
            if (again) continue;
            rest[half] = row_sum(rest[half]);
            size[half] = row_sum(size[half]);
            gate[half] = row_sum(gate[half]);
            rough = rough || (row[half] < length && fabsf(rest[half]) > kRounding * size[half]);
            // By division: where there is one key, delta is then dP to the last bit.
            delta[half] += rest[half] / (norm[half] == 0.0f ? 1.0f : norm[half]);
            const std::int64_t at = plane + row[half];
            if (pair == 0 && row[half] < length) {
                args.delta[at] = factor == 0.0f ? 0.0f : delta[half] / factor;
                args.norm[at] = shift[half] + log2f(norm[half]);
                if (args.dgate != nullptr) args.dgate[at] = gate[half] * inverse[half] * args.dropout.scale;
            }
        }
        if (again) break;
        if (rough) shared.rough = 1;
        __syncthreads();
        if (shared.rough == 0) break;
        norm[0] = norm[1] = 0.0f;
        fetch(begin, slot);
    }
    // Other warps may still read the queries.
    __syncthreads();
    const float factors[2] = {inverse[0] * scale, inverse[1] * scale};
    store_product<T>(dq + start * args.grad_stride, args.grad_stride, grad, factors,
                     shared.query + warp_row * kD, first + warp_row, length);
#endif
}

template <class T>
const char* launch(const GroupArguments& args, std::uintptr_t stream) {
    return launch_group<Shared<T>>(args.local ? dq_hopper_kernel<T, true> : dq_hopper_kernel<T, false>, args,
                                   stream);
}

}  // namespace

const char* launch_dq_hopper(const GroupArguments& args, std::uintptr_t stream) {
    return args.call.dtype == DType::kFloat16 ? launch<fp16>(args, stream) : launch<bf16>(args, stream);
}

}  // namespace cuda
}  // namespace fastbert
