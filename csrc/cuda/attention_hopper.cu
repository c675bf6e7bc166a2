// Attention's forward on compute capability 9.0: the entry points of the kernel in attention_hopper.cuh.
#include "attention.h"
#include "attention_hopper.cuh"
#include "hopper_host.cuh"

namespace fastbert {
namespace cuda {
namespace {

template <class T, int kHeads, bool kDrop, bool kLocal>
const char* launch_hopper(const AttentionMaps& maps, const AttentionFwd& args, std::uintptr_t stream) {
    using Tile = AttentionTile;
    const dim3 grid =
        slot_grid((args.nheads + kHeads - 1) / kHeads, slots(args.total, args.batch, Tile::kRows<kHeads>));
    const auto kernel = attention_hopper_kernel<T, kHeads, kDrop, kLocal>;
    // Two blocks per multiprocessor
    if (const char* reason = prefer_shared(kernel)) return reason;
    return launch_shared(kernel, grid, dim3(Tile::kThreads), Tile::kBytes, stream, maps, args);
}

// Heads lie side by side: a row is one row of a matrix.
bool side_by_side(const AttentionFwd& args, const Heads& heads, std::int64_t count) {
    return aligned(heads.data) && heads.row_stride % 8 == 0 &&
           (count == 1 || heads.head_stride == args.headdim);
}

bool map_heads(CUtensorMap& map, const AttentionFwd& args, const Heads& heads, std::int64_t count) {
    return make_map(map, args.dtype, heads.data, args.total, count * args.headdim, heads.row_stride,
                    kTileRows);
}

template <class T>
const char* attention_hopper(const AttentionFwd& args, int device, std::uintptr_t stream) {
    AttentionMaps maps = {};
    if (!map_heads(maps.q, args, args.q, args.nheads) || !map_heads(maps.k, args, args.k, args.kv_heads) ||
        !map_heads(maps.v, args, args.v, args.kv_heads))
        return cuda_attention_fwd(args, device, stream);
    const bool drop = args.dropout.seed != nullptr;
    if (args.headdim < AttentionTile::kColumns) return launch_hopper<T, 2, false, false>(maps, args, stream);
    if (is_masked(args))
        return drop ? launch_hopper<T, 1, true, true>(maps, args, stream)
                    : launch_hopper<T, 1, false, true>(maps, args, stream);
    return drop ? launch_hopper<T, 1, true, false>(maps, args, stream)
                : launch_hopper<T, 1, false, false>(maps, args, stream);
}

}  // namespace
}  // namespace cuda

bool cuda_attention_hopper(int device) {
    static cuda::HopperDevices devices;
    return devices.run(cuda::attention_hopper_kernel<bf16, 1, false, false>, device);
}

bool cuda_attention_fills_hopper(std::int64_t batch, std::int64_t total, std::int64_t max_seqlen,
                                 std::int64_t nheads, std::int64_t headdim, int multiprocessors) {
    using Tile = cuda::AttentionTile;
    constexpr std::int64_t kRows = Tile::kRows<1>;
    return total >= kRows * batch && max_seqlen >= kRows &&
           total * nheads * headdim >= kRows * Tile::kColumns * multiprocessors;
}

const char* cuda_attention_hopper_fwd(const AttentionFwd& args, int device, std::uintptr_t stream) {
    if (args.dtype == DType::kFloat32) return "dtype: expected bfloat16 or float16";
    const bool plain = args.dropout.seed == nullptr && !cuda::is_masked(args);
    if (args.headdim != cuda::AttentionTile::kColumns && (args.headdim != 32 || !plain))
        return "headdim: expected 64, or 32 without dropout, window and heads that share k and v";
    if (args.bias.data != nullptr || args.probs != nullptr || !(args.softmax_scale > 0.0f))
        return "expected no bias or probs, and softmax_scale > 0";
    if (!cuda::side_by_side(args, args.q, args.nheads) || !cuda::side_by_side(args, args.k, args.kv_heads) ||
        !cuda::side_by_side(args, args.v, args.kv_heads) || !cuda::aligned(args.out))
        return "q, k, v: expected multiples of 16 bytes, rows on 16 bytes and heads side by side";
    if (args.total >= 0x40000000 || args.batch >= 0x40000000) return "total, batch: at most 2**30 - 1";
    if (args.nheads > 0x1ffffff) return "nheads: less than 2**25";
    if (args.total == 0) return nullptr;
    if (!cuda_attention_hopper(device)) return "the device or the build has no such kernel";
    if (const cudaError_t error = cudaSetDevice(device)) return cudaGetErrorString(error);
    return args.dtype == DType::kBFloat16 ? cuda::attention_hopper<bf16>(args, device, stream)
                                          : cuda::attention_hopper<fp16>(args, device, stream);
}

}  // namespace fastbert
