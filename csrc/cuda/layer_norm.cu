// LayerNorm's and RMSNorm's forward on a GPU. Contract: fastbert/ops/layer_norm.py.
//
// Math       z = residual + dropout(x + x_bias);  x_hat = (z - mean) rstd;  y = x_hat weight + bias
//            RMSNorm: the mean is 0, which no thread sums
// Tiling     One row per warp (hidden <= 1024) or per block of 256 threads (hidden <= 8192), with z in
//            registers and 16-byte loads. A looped kernel takes all other rows.
// Precision  float. The variance takes two passes over registers; the second also corrects the mean.
//            x is stored as T, and residual, z and y as R: T, or float for sums of half precision and float.
//            `rounded` is y as T, or null.
// Saved      z rounded to R, mean and rstd.
#include <type_traits>

#include "layer_norm_rows.cuh"

namespace fastbert {
namespace cuda {
namespace {

// The warps of a block whose warps own one row each.
constexpr int kWarpsPerBlock = 4;
// Wider rows take the looped kernel.
constexpr std::int64_t kForwardHidden = 8192;

// The sum of x over the kThreads threads of a row. `slots` holds one float per warp, for this sum alone.
template <int kThreads>
__device__ __forceinline__ float row_sum(float x, float* slots) {
    x = warp_sum(x);
    if (kThreads == kWarp) return x;
    const int thread = static_cast<int>(threadIdx.x);
    if (thread % kWarp == 0) slots[thread / kWarp] = x;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kThreads / kWarp; ++warp) total += slots[warp];
    return total;
}

__device__ __forceinline__ float rstd_of(float square_sum, float correction, float inverse, float eps) {
    const float variance = square_sum * inverse - correction * correction;
    // A NaN stays NaN.
    return 1.0f / sqrtf((variance < 0.0f ? 0.0f : variance) + eps);
}

// N consecutive values as they are stored, in registers.
template <class R, int N>
struct Values {
    Pack<R> pack[N / kPack<R>];

    __device__ __forceinline__ void load(const R* p) {
#pragma unroll
        for (int i = 0; i < N / kPack<R>; ++i) pack[i] = load_pack(p + i * kPack<R>);
    }
    __device__ __forceinline__ void widen_to(float* out) const {
#pragma unroll
        for (int i = 0; i < N / kPack<R>; ++i) widen_pack(pack[i], out + i * kPack<R>);
    }
};

// One row: kThreads threads, kPacks packs per thread, z in registers.
template <class T, class R, int kThreads, int kPacks>
__global__ void __launch_bounds__(kThreads == kWarp ? kWarp * kWarpsPerBlock : kThreads,
                                  kThreads == kWarp ? 4 : 2) forward_kernel(LayerNormFwd args, T* rounded) {
    constexpr int N = kPack<T>;
    __shared__ float slots[3][kThreads / kWarp];
    const int thread = static_cast<int>(threadIdx.x) % kThreads;
    const std::int64_t row =
        kThreads == kWarp ? static_cast<std::int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp
                          : static_cast<std::int64_t>(blockIdx.x);
    let_next_begin();
    // A whole warp or a whole block returns.
    if (row >= args.rows) return;
    wait_for_kernels();
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    const R* residual = static_cast<const R*>(args.residual) + row * args.residual_stride;
    const std::uint64_t seed = args.dropout.seed != nullptr ? *args.dropout.seed : 0;

    // All loads of a row are under way before the first one is waited for: a store of z would hold them up.
    Pack<T> own[kPacks];
    Values<R, N> added[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
        const std::int64_t column = (static_cast<std::int64_t>(p) * kThreads + thread) * N;
        if (column < args.hidden) own[p] = load_pack(x + column);
        if (column < args.hidden && args.residual != nullptr) added[p].load(residual + column);
    }

    // Columns from hidden on hold 0.
    float z[kPacks][N];
    float total = 0.0f;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
        const std::int64_t column = (static_cast<std::int64_t>(p) * kThreads + thread) * N;
        const bool inside = column < args.hidden;
#pragma unroll
        for (int i = 0; i < N; ++i) z[p][i] = 0.0f;
        if (!inside) continue;
        widen_pack(own[p], z[p]);
        float other[N];
        if (args.x_bias.data != nullptr) {
            load_params<T>(args.x_bias, column, other);
#pragma unroll
            for (int i = 0; i < N; ++i) z[p][i] += other[i];
        }
        if (args.dropout.seed != nullptr) drop<N>(args.dropout, seed, row, column, z[p]);
        if (args.residual != nullptr) {
            added[p].widen_to(other);
#pragma unroll
            for (int i = 0; i < N; ++i) z[p][i] += other[i];
        }
        if (args.z != nullptr) store_values<N>(static_cast<R*>(args.z) + row * args.hidden + column, z[p]);
#pragma unroll
        for (int i = 0; i < N; ++i) total += z[p][i];
    }

    const float inverse = 1.0f / static_cast<float>(args.hidden);
    const float mean = args.rms ? 0.0f : row_sum<kThreads>(total, slots[0]) * inverse;
    float first = 0.0f, second = 0.0f;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
        const std::int64_t column = (static_cast<std::int64_t>(p) * kThreads + thread) * N;
        if (column >= args.hidden) continue;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            z[p][i] -= mean;
            first += z[p][i];
            second += z[p][i] * z[p][i];
        }
    }
    const float correction = args.rms ? 0.0f : row_sum<kThreads>(first, slots[1]) * inverse;
    const float rstd =
        rstd_of(row_sum<kThreads>(second, slots[2]), correction, inverse, static_cast<float>(args.eps));
    if (args.rstd != nullptr && thread == 0) {
        if (!args.rms) args.mean[row] = mean + correction;
        args.rstd[row] = rstd;
    }

#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
        const std::int64_t column = (static_cast<std::int64_t>(p) * kThreads + thread) * N;
        if (column >= args.hidden) continue;
        float weight[N], bias[N] = {};
        load_params<T>(args.weight, column, weight);
        if (args.bias.data != nullptr) load_params<T>(args.bias, column, bias);
#pragma unroll
        for (int i = 0; i < N; ++i) z[p][i] = (z[p][i] - correction) * rstd * weight[i] + bias[i];
        store_values<N>(static_cast<R*>(args.y) + row * args.hidden + column, z[p]);
        if (!std::is_same_v<T, R> && rounded != nullptr)
            store_values<N>(rounded + row * args.hidden + column, z[p]);
    }
}

// Any hidden size, any alignment: one block per row; z is computed in each of the three passes.
template <class T, class R>
__global__ void __launch_bounds__(kRowThreads) forward_looped_kernel(LayerNormFwd args, T* rounded) {
    __shared__ float slots[3][kRowThreads / kWarp];
    let_next_begin();
    wait_for_kernels();
    const std::int64_t row = blockIdx.x;
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    const R* residual = static_cast<const R*>(args.residual) + row * args.residual_stride;
    const auto z_at = [&](std::int64_t column) {
        float z = widen(x[column]);
        if (args.x_bias.data != nullptr) z += load_param(args.x_bias, column);
        if (args.dropout.seed != nullptr) z = drop_one(args.dropout, row, column, z);
        if (args.residual != nullptr) z += widen(residual[column]);
        return z;
    };
    float total = 0.0f;
    for (std::int64_t j = threadIdx.x; j < args.hidden; j += kRowThreads) total += z_at(j);
    const float inverse = 1.0f / static_cast<float>(args.hidden);
    const float mean = args.rms ? 0.0f : row_sum<kRowThreads>(total, slots[0]) * inverse;
    float first = 0.0f, second = 0.0f;
    for (std::int64_t j = threadIdx.x; j < args.hidden; j += kRowThreads) {
        const float centred = z_at(j) - mean;
        first += centred;
        second += centred * centred;
    }
    const float correction = args.rms ? 0.0f : row_sum<kRowThreads>(first, slots[1]) * inverse;
    const float rstd =
        rstd_of(row_sum<kRowThreads>(second, slots[2]), correction, inverse, static_cast<float>(args.eps));
    if (args.rstd != nullptr && threadIdx.x == 0) {
        if (!args.rms) args.mean[row] = mean + correction;
        args.rstd[row] = rstd;
    }
    for (std::int64_t j = threadIdx.x; j < args.hidden; j += kRowThreads) {
        const float z = z_at(j);
        const float bias = args.bias.data != nullptr ? load_param(args.bias, j) : 0.0f;
        if (args.z != nullptr) narrow(z, static_cast<R*>(args.z)[row * args.hidden + j]);
        const float y = (z - mean - correction) * rstd * load_param(args.weight, j) + bias;
        narrow(y, static_cast<R*>(args.y)[row * args.hidden + j]);
        if (!std::is_same_v<T, R> && rounded != nullptr) narrow(y, rounded[row * args.hidden + j]);
    }
}

// --- host ---

template <class T, class R, int kThreads, int kPacks>
const char* launch_forward(const LayerNormFwd& args, T* rounded, std::uintptr_t stream) {
    const std::int64_t blocks =
        kThreads == kWarp ? (args.rows + kWarpsPerBlock - 1) / kWarpsPerBlock : args.rows;
    const unsigned threads = kThreads == kWarp ? kWarp * kWarpsPerBlock : kThreads;
    return launch(forward_kernel<T, R, kThreads, kPacks>, dim3(static_cast<unsigned>(blocks)), dim3(threads),
                  stream, args, rounded);
}

template <class T, class R = T>
const char* forward(const LayerNormFwd& args, std::uintptr_t stream, T* rounded = nullptr) {
    constexpr int N = kPack<T>;
    const std::int64_t hidden = args.hidden;
    const bool vectors =
        hidden <= kForwardHidden && hidden % N == 0 && rows_aligned<T>(args.x, args.x_stride) &&
        rows_aligned<R>(args.residual, args.residual_stride) && aligned(args.weight) && aligned(args.bias) &&
        aligned(args.x_bias) && cuda::aligned(args.y) && cuda::aligned(args.z) && cuda::aligned(rounded);
    if (!vectors)
        return launch(forward_looped_kernel<T, R>, dim3(static_cast<unsigned>(args.rows)), dim3(kRowThreads),
                      stream, args, rounded);
    if (hidden <= 256) return launch_forward<T, R, kWarp, 8 / N>(args, rounded, stream);
    if (hidden <= 512) return launch_forward<T, R, kWarp, 16 / N>(args, rounded, stream);
    if (hidden <= 768) return launch_forward<T, R, kWarp, 24 / N>(args, rounded, stream);
    if (hidden <= 1024) return launch_forward<T, R, kWarp, 32 / N>(args, rounded, stream);
    if (hidden <= 2048) return launch_forward<T, R, kRowThreads, 8 / N>(args, rounded, stream);
    if (hidden <= 4096) return launch_forward<T, R, kRowThreads, 16 / N>(args, rounded, stream);
    return launch_forward<T, R, kRowThreads, 32 / N>(args, rounded, stream);
}

}  // namespace
}  // namespace cuda

const char* cuda_layer_norm_fwd(const LayerNormFwd& args, int x_dtype, std::uintptr_t rounded, int device,
                                std::uintptr_t stream) {
    if (args.rows == 0) return nullptr;
    if (args.rows > 0x7fffffff) return "rows: at most 2**31 - 1";
    if (const cudaError_t error = cudaSetDevice(device)) return cudaGetErrorString(error);
    switch (args.dtype) {
        case DType::kFloat32:
            switch (static_cast<DType>(x_dtype)) {
                case DType::kFloat32:
                    return cuda::forward<float>(args, stream);
                case DType::kBFloat16:
                    return cuda::forward<bf16, float>(args, stream, reinterpret_cast<bf16*>(rounded));
                default:
                    return cuda::forward<fp16, float>(args, stream, reinterpret_cast<fp16*>(rounded));
            }
        case DType::kBFloat16:
            return cuda::forward<bf16>(args, stream);
        default:
            return cuda::forward<fp16>(args, stream);
    }
}

}  // namespace fastbert
