// dk and dv of attention on compute capability 9.0: as attention_backward_dkdv.cu, by products of a warp
// group. And the launch of both kernels.
#include "attention_backward.h"
#include "attention_backward_hopper.cuh"
#include "hopper_host.cuh"
#include "linear.h"

namespace fastbert {
namespace cuda {
namespace {

// Tiles of queries: one is used, one comes.
constexpr int kSlots = 2;

template <class T>
struct Shared {
    GroupTile<T> key, value, query[kSlots], dout[kSlots];
    // The normalisers of P of the queries, then their deltas without dropout's factor; a word of bits per
    // query and 32 keys
    float numbers[kSlots][2 * kGroupTile];
    std::uint32_t bits[kSlots][kOwned / 32 * kGroupTile];
    std::uint64_t own, full[kSlots];
};

template <class T, bool kDropout, bool kLocal>
__global__ void __launch_bounds__(kBackwardThreads, kGroupBlocks)
    dkdv_hopper_kernel(const __grid_constant__ GroupArguments group_args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int kD = kGroupHead;
    const CudaAttentionBwd& args = group_args.call;
    const std::int64_t kv_heads = kLocal ? args.kv_heads : args.nheads;
    const std::int64_t kv_head = blockIdx.x % static_cast<unsigned>(kv_heads);
    const OwnedRows place = owned_rows(args, kv_heads);
    T* const dk = static_cast<T*>(args.dk) + kv_head * kD;
    T* const dv = static_cast<T*>(args.dv) + kv_head * kD;
    if (place.sequence == args.batch) {
        for (std::int64_t first = static_cast<std::int64_t>(place.start) + place.first; first < args.total;
             first += place.length) {
            zero_rows<T, kD>(dk, args.kv_grad_stride, first, args.total);
            zero_rows<T, kD>(dv, args.kv_grad_stride, first, args.total);
        }
        return;
    }
    if (place.first >= place.length) return;

    Shared<T>& shared = aligned_shared<Shared<T>>();
    const int first = place.first, length = place.length;
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % kWarp, group = lane / 4, pair = lane % 4, warp_row = thread / kWarp * 16;
    // The heads of q that read these keys
    const int heads = kLocal ? static_cast<int>(args.nheads) / static_cast<int>(kv_heads) : 1;
    const std::int64_t first_head = kv_head * heads, end_head = first_head + heads;
    const std::int64_t start = place.start, plane = first_head * args.total + start;
    const int words = static_cast<int>((args.max_seqlen + 31) / 32);
    // A thread copies a number of norm or delta per tile, and a word of bits: of one row.
    static_assert(2 * kGroupTile == kBackwardThreads && kOwned == 64, "two numbers and words per row");
    const int own = thread % kGroupTile;
    const float* const numbers = (thread < kGroupTile ? args.norm : args.delta) + plane;
    const std::int32_t* const bits = args.keep_bits + plane * words + first / 32 + thread / kGroupTile;
    // Rows after the sequence are zeros, their P finite: they add nothing.
    const auto fetch = [&](std::int64_t head, int first_row, int slot) {
        if (thread == 0)
            load_two(&shared.full[slot], shared.query[slot], group_args.q, shared.dout[slot], group_args.dout,
                     place.start + first_row, static_cast<int>(head) * kD);
        const bool inside = first_row + own < length;
        const int row = inside ? first_row + own : 0;
        const std::int64_t at = row + (kLocal ? (head - first_head) * args.total : 0);
        copy_word(shared.numbers[slot] + thread, numbers + at, inside);
        if constexpr (kDropout) {
            if (args.keep_bits == nullptr) {
                draw_bits<kGroupTile, kOwned>(shared.bits[slot], args, head, place, first_row, first);
            } else {
                // Without a word for these keys there are none in the sequence.
                const bool any = first / 32 + thread / kGroupTile < words;
                const std::int32_t* const from = bits + at * words;
                copy_word(shared.bits[slot] + thread, any ? from : args.keep_bits, any);
            }
        }
        commit_copies();
    };

    // The queries that see the block's keys; those in [whole, seen) see all of them.
    const Reach reach({args.window.right, args.window.left}, length);
    const int last = (first + kOwned < length ? first + kOwned : length) - 1;
    const int begin = kLocal ? reach.first_key(first) : 0, end = kLocal ? reach.end_key(last) : length;
    const int whole = reach.first_key(last), seen = reach.end_key(first);

    if (thread == 0) {
        init_barrier(&shared.own, 1);
        for (int i = 0; i < kSlots; ++i) init_barrier(&shared.full[i], 1);
        fence_barriers();
    }
    __syncthreads();
    if (thread == 0)
        load_two(&shared.own, shared.key, group_args.k, shared.value, group_args.v, place.start + first,
                 static_cast<int>(kv_head) * kD);
    fetch(first_head, begin, 0);

    // Of this thread's two keys, in word warp_row / 32 of a row
    const std::uint32_t bit[2] = {1u << (warp_row % 32 + group), 1u << (warp_row % 32 + group + 8)};
    const float scale = args.softmax_scale, unit = args.softmax_scale * kLog2E;
    const std::uint64_t own_k = operand_at(shared.key), own_v = operand_at(shared.value);
    const std::uint64_t queries = operand_at(shared.query[0]), douts = operand_at(shared.dout[0]);

    float grad_k[kGroupSums], grad_v[kGroupSums];
    int slot = 0, parity = 0;
    wait_phase(&shared.own, 0);
    std::int64_t head = first_head;
    for (int first_row = begin; first_row < end;) {
        wait_copies<0>();
        wait_phase(&shared.full[slot], parity);
        if (first_row + kGroupTile > length) {
            zero_rest(shared.query[slot], length - first_row);
            zero_rest(shared.dout[slot], length - first_row);
            fence_shared();
        }
        __syncthreads();
        // All warps have waited for the products that read the other slot.
        int next_row = first_row + kGroupTile;
        std::int64_t next_head = head;
        if (kLocal && next_row >= end && head + 1 < end_head) next_row = begin, ++next_head;
        if (next_row < end) fetch(next_head, next_row, slot ^ 1);
        // Transposed: keys are rows, queries columns.
        float p[kGroupSums], ds[kGroupSums];
        fence_products();
        multiply_tiles<T>(p, own_k, queries + slot * kTileStep);
        multiply_tiles<T>(ds, own_v, douts + slot * kTileStep);
        wait_products<1>();
        settle(p);
        // This thread's columns are 2 pair and 2 pair + 1 of each 8.
        const auto pairs_of = [&](const float* row, int n) {
            return *reinterpret_cast<const float2*>(row + 8 * n + 2 * pair);
        };
        // Always so. ptxas moves nothing over a branch: the exponentials run beside the second product.
        if (args.max_seqlen > 0) {
#pragma unroll
            for (int n = 0; n < kGroupTile / 8; ++n) {
                const float2 norm = pairs_of(shared.numbers[slot], n);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    p[4 * n + i] = exp2_fast(fmaf(p[4 * n + i], unit, -(i % 2 == 0 ? norm.x : norm.y)));
            }
        }
        if (kLocal && (first_row < whole || (seen < length && first_row + kGroupTile > seen)))
            hide<kLocal>(p, reach, first, first_row);
        wait_products<0>();
        settle(ds);
        std::uint32_t left[kGroupTile / 16][4], of_ds[kGroupTile / 16][4];
        // dropout(P) and dS, both without dropout's factor, of 8 queries at a time: their registers are those
        // of P and dP.
        const std::uint32_t* const kept = shared.bits[slot] + warp_row / 32 * kGroupTile + 2 * pair;
#pragma unroll
        for (int n = 0; n < kGroupTile / 8; ++n) {
            float dropped[4], own_ds[4];
            const float2 delta = pairs_of(shared.numbers[slot] + kGroupTile, n);
            const uint2 word = kDropout ? *reinterpret_cast<const uint2*>(kept + 8 * n) : uint2{};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float of_p = p[4 * n + i];
                const bool keep = !kDropout || ((i % 2 == 0 ? word.x : word.y) & bit[i / 2]) != 0;
                dropped[i] = keep ? of_p : 0.0f;
                own_ds[i] = fmaf(dropped[i], ds[4 * n + i], -(of_p * (i % 2 == 0 ? delta.x : delta.y)));
            }
            left[n / 2][n % 2 * 2] = pack_pair<T>(dropped[0], dropped[1]);
            left[n / 2][n % 2 * 2 + 1] = pack_pair<T>(dropped[2], dropped[3]);
            of_ds[n / 2][n % 2 * 2] = pack_pair<T>(own_ds[0], own_ds[1]);
            of_ds[n / 2][n % 2 * 2 + 1] = pack_pair<T>(own_ds[2], own_ds[3]);
        }
        const bool add = first_row > begin || (kLocal && head > first_head);
        fence_products();
        multiply_rounded<T>(grad_v, left, douts + slot * kTileStep, add);
        multiply_rounded<T>(grad_k, of_ds, queries + slot * kTileStep, add);
        wait_products<0>();
        parity ^= slot;
        slot ^= 1;
        head = next_head;
        first_row = next_row;
    }
    settle(grad_k);
    settle(grad_v);
    // Other warps may still read the keys.
    __syncthreads();
    T* const stage = shared.key + warp_row * kD;
    const float factor = args.dropout.scale * (args.gate != nullptr ? args.gate[kv_head] : 1.0f);
    const float of_k[2] = {factor * scale, factor * scale}, of_v[2] = {factor, factor};
    store_product<T>(dk + start * args.kv_grad_stride, args.kv_grad_stride, grad_k, of_k, stage,
                     first + warp_row, length);
    store_product<T>(dv + start * args.kv_grad_stride, args.kv_grad_stride, grad_v, of_v, stage,
                     first + warp_row, length);
#endif
}

template <class T>
const char* launch(const GroupArguments& args, std::uintptr_t stream) {
    const bool dropout = args.call.dropout.seed != nullptr;
    const auto kernel =
        args.local ? (dropout ? dkdv_hopper_kernel<T, true, true> : dkdv_hopper_kernel<T, false, true>)
                   : (dropout ? dkdv_hopper_kernel<T, true, false> : dkdv_hopper_kernel<T, false, false>);
    return launch_group<Shared<T>>(kernel, args, stream);
}

const char* launch_dkdv_hopper(const GroupArguments& args, std::uintptr_t stream) {
    return args.call.dtype == DType::kFloat16 ? launch<fp16>(args, stream) : launch<bf16>(args, stream);
}

}  // namespace
}  // namespace cuda

const char* cuda_attention_bwd_hopper(const CudaAttentionBwd& args, int device, std::uintptr_t stream) {
    constexpr int kD = cuda::kGroupHead;
    if (args.dtype == DType::kFloat32) return "attention_bwd: expected bfloat16 or float16";
    if (args.headdim != kD || args.bias.data != nullptr ||
        (args.gate != nullptr && args.kv_heads != args.nheads))
        return "attention_bwd: expected headdim 64, no bias, and no gate of shared heads";
    if (args.dq == nullptr || args.dk == nullptr || args.dv == nullptr)
        return "attention_bwd: expected dq, dk and dv";
    for (const auto& [heads, count] : {std::pair(&args.q, args.nheads), std::pair(&args.k, args.kv_heads),
                                       std::pair(&args.v, args.kv_heads)})
        if (heads->head_stride != kD && count > 1)
            return "attention_bwd: expected the heads of a row side by side";
    if (!cuda_linear_hopper(device)) return "the device or the build has no such kernel";
    if (args.total == 0) return nullptr;
    if (const cudaError_t error = cudaSetDevice(device)) return cudaGetErrorString(error);
    cuda::GroupArguments own = {};
    own.call = args;
    own.local = cuda::is_masked(args);
    const auto map = [&](CUtensorMap& to, const void* data, std::int64_t heads, std::int64_t stride) {
        return cuda::make_map(to, args.dtype, data, args.total, heads * kD, stride, cuda::kGroupTile);
    };
    const bool made = map(own.q, args.q.data, args.nheads, args.q.row_stride) &&
                      map(own.k, args.k.data, args.kv_heads, args.k.row_stride) &&
                      map(own.v, args.v.data, args.kv_heads, args.v.row_stride) &&
                      map(own.dout, args.dout, args.nheads, args.nheads * kD);
    if (!made) return cuda_attention_bwd(args, device, stream);
    const char* const reason = cuda::launch_dq_hopper(own, stream);
    if (reason != nullptr) return reason;
    return cuda::launch_dkdv_hopper(own, stream);
}

}  // namespace fastbert
