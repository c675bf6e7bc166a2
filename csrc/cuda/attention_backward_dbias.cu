// dbias of attention. Mathematics and tiling: attention_backward.cu.
#include "attention_backward.cuh"

namespace fastbert {
namespace cuda {
namespace {

// Keys of a tile.
constexpr int kKeys = 64;

template <class T, int kD>
struct Shared {
    alignas(128) T query[kOwned * kD];
    alignas(128) T dout[kOwned * kD];
    alignas(128) T key[kKeys * kD];
    alignas(128) T value[kKeys * kD];
    std::uint32_t bits[2 * kOwned];
    float sums[kBackwardWarps][kKeys];
};

// One tile of one part of dbias. The pairs of a sequence and a head that share it are summed in order, every
// `parts`-th from the part's number on.
template <class T, int kD>
__global__ void __launch_bounds__(kBackwardThreads, 2) dbias_kernel(CudaAttentionBwd args) {
    Shared<T, kD>& shared = *reinterpret_cast<Shared<T, kD>*>(dynamic_shared());
    const std::int64_t n_rows = args.bias_has_rows ? args.max_seqlen : 1;
    const std::int64_t n_keys = args.bias_has_keys ? args.max_seqlen : 1;
    const std::int64_t row_tiles = (n_rows + kOwned - 1) / kOwned;
    const std::int64_t key_tiles = (n_keys + kKeys - 1) / kKeys;
    // The tiles of a matrix, and the matrices in the order of the output
    const int own_row = static_cast<int>(blockIdx.x % row_tiles) * kOwned;
    const int own_key = static_cast<int>(blockIdx.x / row_tiles % key_tiles) * kKeys;
    const std::int64_t matrix = blockIdx.x / (row_tiles * key_tiles);
    const std::int64_t first_head = matrix % args.bias_heads;
    const std::int64_t first_sequence = matrix / args.bias_heads % args.bias_batch;
    const std::int64_t heads = args.nheads / args.bias_heads;
    const std::int64_t pairs = args.batch / args.bias_batch * heads;
    const std::int64_t stride = args.nheads * kD;
    const int lane = static_cast<int>(threadIdx.x) % kWarp, group = lane / 4, pair = lane % 4;
    const int warp = static_cast<int>(threadIdx.x) / kWarp, warp_row = warp * 16;
    const bool dropout = args.dropout.seed != nullptr;
    const float scale = args.softmax_scale;

    float sum[kKeys / 8][4] = {};
    for (std::int64_t shared_by = matrix / args.bias_heads / args.bias_batch; shared_by < pairs;
         shared_by += args.parts) {
        const std::int64_t sequence = first_sequence + shared_by / heads,
                           head = first_head + shared_by % heads;
        const std::int64_t start = args.cu_seqlens[sequence];
        const OwnedRows place{static_cast<int>(sequence), static_cast<int>(start),
                              static_cast<int>(args.cu_seqlens[sequence + 1] - start), 0};
        const int length = place.length;
        const int kv_head = kv_head_of(args, static_cast<int>(head));
        const T* const q = row_of<T>(args.q, head, start);
        const T* const k = row_of<T>(args.k, kv_head, start);
        const T* const v = row_of<T>(args.v, kv_head, start);
        const T* const dout = static_cast<const T*>(args.dout) + start * stride + head * kD;
        const float* const matrix_bias =
            args.bias.data + sequence * args.bias.batch_stride + head * args.bias.head_stride;
        const float factor = args.dropout.scale * (args.gate != nullptr ? args.gate[head] : 1.0f);
        const int row_end = args.bias_has_rows && own_row + kOwned < length ? own_row + kOwned : length;
        const int key_end = args.bias_has_keys && own_key + kKeys < length ? own_key + kKeys : length;
        const Reach reach(args.window, length);
        for (int first = own_row; first < row_end; first += kOwned) {
            int least[2], most[2];  // the keys that a row sees
            float delta[2], shift[2], inverse[2];
            const float* bias[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = first + warp_row + group + 8 * half;
                const bool inside = row < length;
                const std::int64_t at = head * args.total + start + row;
                const float lse = inside ? args.lse[at] : 0.0f;
                shift[half] = lse == -INFINITY ? 0.0f : lse;
                delta[half] = inside ? args.delta[at] : 0.0f;
                inverse[half] = inside ? args.norm[at] : 0.0f;
                // A row after the sequence sees no key.
                least[half] = reach.first_key(row);
                most[half] = inside ? reach.end_key(row) : 0;
                bias[half] = matrix_bias + (inside ? row * args.bias.row_stride : 0);
            }
            for (int first_key = own_key; first_key < key_end; first_key += kKeys) {
                if (first_key >= reach.end_key(first + kOwned - 1)) break;
                if (first_key + kKeys <= reach.first_key(first)) continue;
                // Other warps may still read the tiles.
                __syncthreads();
                copy_rows<T, kD, kOwned>(shared.query, q, args.q.row_stride, first, length);
                copy_rows<T, kD, kOwned>(shared.dout, dout, stride, first, length);
                copy_rows<T, kD, kKeys>(shared.key, k, args.k.row_stride, first_key, length);
                copy_rows<T, kD, kKeys>(shared.value, v, args.v.row_stride, first_key, length);
                if (dropout) bring_bits<kOwned, kKeys>(shared.bits, args, head, place, first, first_key);
                commit_copies();
                wait_copies<0>();
                __syncthreads();
                const auto queries = [&](std::uint32_t (&a)[4], int step) {
                    load_left<T, kD>(a, shared.query, warp_row, step);
                };
                const auto douts = [&](std::uint32_t (&a)[4], int step) {
                    load_left<T, kD>(a, shared.dout, warp_row, step);
                };
#pragma unroll 1
                for (int column = 0; column < kKeys; column += kColumns) {
                    float p[kProducts][4] = {}, dp[kProducts][4] = {};
                    multiply_rows<T, kD>(p, queries, shared.key, column);
                    multiply_rows<T, kD>(dp, douts, shared.value, column);
                    const int key = first_key + column + 2 * pair;
#pragma unroll
                    for (int n = 0; n < kProducts; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const int at = key + 8 * n + i % 2;
                            if (at >= least[i / 2] && at < most[i / 2]) {
                                const float s = fmaf(p[n][i], scale, bias[i / 2][at]);
                                const float weight = exp2_fast((s - shift[i / 2]) * kLog2E) * inverse[i / 2];
                                const std::uint32_t word =
                                    dropout ? shared.bits[column / 32 * kOwned + warp_row + group + i / 2 * 8]
                                            : ~0u;
                                const bool kept = (word >> (2 * pair + 8 * n + i % 2) & 1) != 0;
                                sum[column / 8 + n][i] +=
                                    weight * fmaf(kept ? dp[n][i] : 0.0f, factor, -delta[i / 2]);
                            }
                        }
                }
            }
        }
    }

    float* const out = args.dbias + matrix * n_rows * n_keys;
    const int row = own_row + warp_row + group;
    if (args.bias_has_rows && args.bias_has_keys) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = row + i / 2 * 8, key = own_key + 8 * n + 2 * pair + i % 2;
                if (at < n_rows && key < n_keys) out[at * n_keys + key] = sum[n][i];
            }
        return;
    }
    if (args.bias_has_rows) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float total = 0.0f;
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n) total += sum[n][2 * half] + sum[n][2 * half + 1];
            total = row_sum(total);
            if (pair == 0 && row + 8 * half < n_rows) out[row + 8 * half] = total;
        }
        return;
    }
    // The sum over the rows: of a warp's by its lanes, then of the warps in order.
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float total = sum[n][i] + sum[n][i + 2];
#pragma unroll
            for (int other = 4; other < kWarp; other *= 2) total += __shfl_xor_sync(kAllLanes, total, other);
            if (group == 0) shared.sums[warp][8 * n + 2 * pair + i] = total;
        }
    __syncthreads();
    if (warp > 0) return;
    float both[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int column = lane + kWarp * half;
        for (int w = 0; w < kBackwardWarps; ++w) both[half] += shared.sums[w][column];
        if (args.bias_has_keys && own_key + column < n_keys) out[own_key + column] = both[half];
    }
    if (args.bias_has_keys) return;
    const float total = warp_sum(both[0] + both[1]);
    if (lane == 0) out[0] = total;
}

template <class T, int kD>
const char* launch(const CudaAttentionBwd& args, std::uintptr_t stream) {
    const std::int64_t row_tiles = args.bias_has_rows ? (args.max_seqlen + kOwned - 1) / kOwned : 1;
    const std::int64_t key_tiles = args.bias_has_keys ? (args.max_seqlen + kKeys - 1) / kKeys : 1;
    const std::int64_t matrices = args.parts * args.bias_batch * args.bias_heads;
    const std::int64_t blocks = row_tiles * key_tiles * matrices;
    if (blocks == 0) return nullptr;
    return launch_shared(dbias_kernel<T, kD>, grid_of(blocks), dim3(kBackwardThreads), sizeof(Shared<T, kD>),
                         stream, args);
}

}  // namespace

const char* launch_dbias(const CudaAttentionBwd& args, std::uintptr_t stream) {
    FASTBERT_BY_HEADDIM(launch, args, stream)
}

}  // namespace cuda
}  // namespace fastbert
