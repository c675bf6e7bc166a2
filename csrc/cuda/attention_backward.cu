// Attention's backward on a GPU. Contract: fastbert/ops/attention.py.
//
// Math       P = exp(S - lse);  D = dropout(P);  delta = rowsum(dout ∘ out);  dP = gate * dropout'(dout vᵀ)
//            dS = P ∘ (dP - delta);  dq = scale * dS k;  dk = scale * dSᵀ q;  dv = gate * Dᵀ dout
//            dbias = Σ dS over its broadcast dimensions;  dgate = Σ_rows rowsum(D ∘ (dout vᵀ))
// Tiling     Three kernels of 4 warps; a warp owns 16 rows. Products take 32 columns at a time.
//            dq: 64 queries of a sequence and head walk over its keys. The kernel also writes delta, the
//            normaliser of P and each row's share of dgate.
//            dk and dv: 64 keys walk over the queries. Their products are transposed, so that P and dS stay
//            in registers as the left operand of the next one. With fewer heads of k and v they walk over
//            the queries of each head that reads them, one head after the other. Tiles that a window hides
//            are not visited. dbias: a tile of the bias walks over all sequences and heads (queries, keys)
//            that share it, in several parts if there are few tiles.
//            Tiles of the other side come by asynchronous copies, one ahead of the products. On compute
//            capability 9.0 the files *_hopper.cu have dq, dk and dv by products of a warp group.
// Precision  Products of the storage type are summed in float; P and dS are rounded to the storage type
//            before their product; the rest is float, rounded once at the store. As in
//            kernels/attention_backward.py, P is divided by its own sum. A row of dS sums to 0: what it sums
//            to is the error of delta, whose `out` is rounded. delta is corrected by it, and where it is more
//            than the rounding of dS itself, dq's block walks over the keys once more.
// Saved      out, lse, and dropout's bits; without them the bits are drawn again, once per kernel.
// Sums       in registers and in one order: no atomics, repeats are bit-equal.
// Source     Dao 2023, FlashAttention-2, alg. 2; delta: Dao et al. 2022, FlashAttention, app. B.2.
#include "attention_backward.cuh"

namespace fastbert {

std::int64_t cuda_attention_bwd_slots(std::int64_t batch, std::int64_t total, std::int64_t max_seqlen) {
    // Enough blocks for a long tail
    constexpr std::int64_t kTail = 8;
    const std::int64_t of_all_rows = (total + cuda::kOwned - 1) / cuda::kOwned;
    return batch * ((max_seqlen + cuda::kOwned - 1) / cuda::kOwned) +
           (of_all_rows < kTail ? of_all_rows : kTail);
}

const char* cuda_attention_bwd(const CudaAttentionBwd& args, int device, std::uintptr_t stream) {
    if (args.headdim != 32 && args.headdim != 64 && args.headdim != 128)
        return "attention_bwd: expected headdim 32, 64 or 128";
    if (args.dtype == DType::kFloat32) return "attention_bwd: expected bfloat16 or float16";
    if (const cudaError_t error = cudaSetDevice(device)) return cudaGetErrorString(error);
    if (args.total > 0) {
        const char* reason = cuda::launch_dq(args, stream);
        if (reason == nullptr && (args.dk != nullptr || args.dv != nullptr))
            reason = cuda::launch_dkdv(args, stream);
        if (reason != nullptr) return reason;
    }
    return args.dbias != nullptr ? cuda::launch_dbias(args, stream) : nullptr;
}

}  // namespace fastbert
