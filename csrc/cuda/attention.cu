// Attention's forward on a GPU: checks, and the choice of a kernel. Contract: fastbert/ops/attention.py.
#include "attention_forward.cuh"

namespace fastbert {
namespace {

bool readable(const AttentionFwd& args, const Heads& heads) {
    // 16 bytes
    const int pack = args.dtype == DType::kFloat32 ? 4 : 8;
    return cuda::aligned(heads.data) && heads.row_stride % pack == 0 && heads.head_stride % pack == 0;
}

}  // namespace

const char* cuda_attention_fwd(const AttentionFwd& args, int device, std::uintptr_t stream) {
    const bool wide = args.dtype == DType::kFloat32;
    if (wide && (args.dropout.seed != nullptr || args.keep_bits != nullptr))
        return "dropout: expected none in float32";
    if (args.headdim != 32 && args.headdim != 64 && args.headdim != 128)
        return "headdim: expected 32, 64 or 128";
    if (!readable(args, args.q) || !readable(args, args.k) || !readable(args, args.v) ||
        !cuda::aligned(args.out))
        return wide ? "q, k, v: expected multiples of 16 bytes, and strides that are multiples of 4"
                    : "q, k, v: expected multiples of 16 bytes, and strides that are multiples of 8";
    if (args.probs != nullptr) return "probs: no kernel of this backend returns them";
    if (args.total >= 0x40000000 || args.batch >= 0x40000000) return "total, batch: at most 2**30 - 1";
    if (args.total == 0) return nullptr;
    if (const cudaError_t error = cudaSetDevice(device)) return cudaGetErrorString(error);
    if (wide) return cuda::attention_forward<float>(args, stream);
    if (args.max_seqlen <= cuda::kTileRows && args.headdim <= 64 && args.dropout.seed == nullptr)
        return cuda::attention_short(args, stream);
    return args.dtype == DType::kBFloat16 ? cuda::attention_forward<bf16>(args, stream)
                                          : cuda::attention_forward<fp16>(args, stream);
}

}  // namespace fastbert
