// LayerNorm's and RMSNorm's backward on a GPU. Contract: fastbert/ops/layer_norm.py.
//
// Math       dz = rstd (g - mean(g) - x_hat mean(g x_hat)), g = dy weight, x_hat = (z - mean) rstd
//            RMSNorm: mean and mean(g) are 0. The gradient of the returned z, dsum, is added to dz.
//            dx = dropout'(dz), dresidual = dz;  dweight = Σ dy x_hat, dbias = Σ dy, dx_bias = Σ dx over rows
// Tiling     Eight columns per thread, as many threads as the row needs (hidden <= 4096). A multiprocessor's
//            block has as many rows as registers allow. Each of them walks over rows on its own, with the
//            next row's loads in flight and its column sums in registers. A looped kernel takes all other
//            rows.
// Precision  float. dx is stored as X, all else of the rows as T: X differs where x was of half precision and
//            the residual float. `drounded`, or null, is the gradient of y as X; it is added to dy.
// Saved      nothing; the dropout bits are drawn again.
// Sums       Each block writes its column sums; a second kernel adds them in a fixed order: no atomics,
//            repeats are bit-equal.
#include <type_traits>

#include "layer_norm_rows.cuh"

namespace fastbert {
namespace cuda {
namespace {

// The columns of one thread.
constexpr int kColumns = 8;
// Wider rows take the looped kernel.
constexpr std::int64_t kBackwardHidden = 4096;

// The threads of a block, which has the multiprocessor's registers: 128 per thread, 96 where the loads in
// flight are of half precision.
template <class T>
constexpr int kBlockThreads = sizeof(T) == 4 ? 512 : 640;

// Sums of a and b over the threads of one row (threadIdx.x; threadIdx.y counts the rows of the block, which
// do not wait for each other). `slots` must not be those of the previous call: a warp may still read them.
__device__ __forceinline__ void pair_sum(float& a, float& b, float (*slots)[2]) {
    a = warp_sum(a);
    b = warp_sum(b);
    const int warps = static_cast<int>(blockDim.x) / kWarp, thread = static_cast<int>(threadIdx.x);
    if (warps == 1) return;
    slots += threadIdx.y * warps;
    if (thread % kWarp == 0) {
        slots[thread / kWarp][0] = a;
        slots[thread / kWarp][1] = b;
    }
    sync_threads_at(static_cast<int>(threadIdx.y) + 1, static_cast<int>(blockDim.x));
    a = b = 0.0f;
    for (int warp = 0; warp < warps; ++warp) {
        a += slots[warp][0];
        b += slots[warp][1];
    }
}

template <class T, class X>
__global__ void __launch_bounds__(kBlockThreads<T>, 1)
    backward_kernel(LayerNormBwd args, const X* drounded, float* partial) {
    constexpr int N = kPack<T>, kPacks = kColumns / N;
    __shared__ float slots[2][kBlockThreads<T> / kWarp][2];
    __shared__ float others[kColumns * kBlockThreads<T>];
    const std::int64_t column = static_cast<std::int64_t>(threadIdx.x) * kColumns;
    const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.y;
    const bool active = column < args.hidden;
    const std::uint64_t seed = args.dropout.seed != nullptr ? *args.dropout.seed : 0;
    const float inverse = 1.0f / static_cast<float>(args.hidden);
    float weight[kColumns] = {}, sums[3][kColumns] = {};
    if (active) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) load_params<T>(args.weight, column + p * N, weight + p * N);
    }

    // Half precision has eight values in a pack.
    constexpr bool kMixed = !std::is_same_v<T, X>;
    Pack<T> next_dy[kPacks] = {}, next_z[kPacks] = {};
    Pack<X> next_more = {};
    float next_mean = 0.0f, next_rstd = 0.0f;
    const auto fetch = [&](std::int64_t row) {
        next_mean = row < args.rows && !args.rms ? args.mean[row] : 0.0f;
        next_rstd = row < args.rows ? args.rstd[row] : 0.0f;
        if (!active || row >= args.rows) return;
        const T* dy = static_cast<const T*>(args.dy) + row * args.dy_stride + column;
        const T* z = static_cast<const T*>(args.z) + row * args.z_stride + column;
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
            next_dy[p] = load_pack(dy + p * N);
            next_z[p] = load_pack(z + p * N);
        }
        if (kMixed && drounded != nullptr) next_more = load_pack(drounded + row * args.hidden + column);
    };
    const std::int64_t start = static_cast<std::int64_t>(blockIdx.x) * blockDim.y;
    fetch(start + threadIdx.y);
    int turn = 0;
    for (std::int64_t base = start; base < args.rows; base += step, turn ^= 1) {
        const std::int64_t row = base + threadIdx.y;
        const bool inside = active && row < args.rows;
        float dy[kColumns], x_hat[kColumns];
        const float mean = next_mean, rstd = next_rstd;
        float mean_g = 0.0f, mean_gx = 0.0f;
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
            widen_pack(next_dy[p], dy + p * N);
            widen_pack(next_z[p], x_hat + p * N);
        }
        if constexpr (kMixed) {
            // Zeros without drounded.
            float more[kColumns];
            widen_pack(next_more, more);
#pragma unroll
            for (int i = 0; i < kColumns; ++i) dy[i] += more[i];
        }
        fetch(row + step);
        if (inside) {
#pragma unroll
            for (int i = 0; i < kColumns; ++i) {
                x_hat[i] = (x_hat[i] - mean) * rstd;
                mean_g += dy[i] * weight[i];
                mean_gx += dy[i] * weight[i] * x_hat[i];
            }
        }
        pair_sum(mean_g, mean_gx, slots[turn]);
        mean_g = args.rms ? 0.0f : mean_g * inverse;
        mean_gx *= inverse;
        if (!inside) continue;
        float dz[kColumns];
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            dz[i] = (dy[i] * weight[i] - mean_g - x_hat[i] * mean_gx) * rstd;
            sums[0][i] += dy[i] * x_hat[i];
            sums[1][i] += dy[i];
        }
        const std::int64_t at = row * args.hidden + column;
        if (args.dsum != nullptr) {
            // Loaded late, where the registers of dy and x_hat are free.
            float dsum[kColumns];
            load_values<kColumns>(static_cast<const T*>(args.dsum) + at, dsum);
#pragma unroll
            for (int i = 0; i < kColumns; ++i) dz[i] += dsum[i];
        }
        if (args.dresidual != nullptr) store_values<kColumns>(static_cast<T*>(args.dresidual) + at, dz);
        if (args.dropout.seed != nullptr) drop<kColumns>(args.dropout, seed, row, column, dz);
        if (args.dx != nullptr) store_values<kColumns>(static_cast<X*>(args.dx) + at, dz);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) sums[2][i] += dz[i];
    }
    if (partial == nullptr) return;

    // The rows of the block are added in order.
    const int threads = static_cast<int>(blockDim.x * blockDim.y), width = static_cast<int>(blockDim.x);
    const int own = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
#pragma unroll
    for (int k = 0; k < 3; ++k) {
        // The sums before have been read.
        if (k > 0) __syncthreads();
#pragma unroll
        for (int i = 0; i < kColumns; ++i) others[i * threads + own] = sums[k][i];
        __syncthreads();
        float* out = partial + (static_cast<std::int64_t>(blockIdx.x) * 3 + k) * args.hidden;
#pragma unroll 1
        for (int j = own; j < kColumns * width; j += threads) {
            const int i = j / width, x = j % width;
            float total = 0.0f;
            for (int y = 0; y < static_cast<int>(blockDim.y); ++y)
                total += others[i * threads + y * width + x];
            if (x * kColumns < args.hidden) out[x * kColumns + i] = total;
        }
    }
}

// Any hidden size, any alignment. A thread owns its columns of the block's partial sums, which are in memory.
// In a row of one column g - mean(g) must be 0: so g is rounded in both, where a multiply-add would keep g's
// rounding, times an rstd of 1 / sqrt(eps).
template <class T, class X>
__global__ void __launch_bounds__(kRowThreads)
    backward_looped_kernel(LayerNormBwd args, const X* drounded, float* partial) {
    __shared__ float slots[2][kRowThreads / kWarp][2];
    const float inverse = 1.0f / static_cast<float>(args.hidden);
    float* sums =
        partial == nullptr ? nullptr : partial + static_cast<std::int64_t>(blockIdx.x) * 3 * args.hidden;
    if (sums != nullptr)
        for (std::int64_t j = threadIdx.x; j < args.hidden; j += kRowThreads)
            for (int k = 0; k < 3; ++k) sums[k * args.hidden + j] = 0.0f;
    const auto grad_at = [&](std::int64_t row, std::int64_t j) {
        const float grad = widen(static_cast<const T*>(args.dy)[row * args.dy_stride + j]);
        return !std::is_same_v<T, X> && drounded != nullptr ? grad + widen(drounded[row * args.hidden + j])
                                                            : grad;
    };
    int turn = 0;
    for (std::int64_t row = blockIdx.x; row < args.rows; row += gridDim.x, turn ^= 1) {
        const T* z = static_cast<const T*>(args.z) + row * args.z_stride;
        const float mean = args.rms ? 0.0f : args.mean[row], rstd = args.rstd[row];
        float mean_g = 0.0f, mean_gx = 0.0f;
        for (std::int64_t j = threadIdx.x; j < args.hidden; j += kRowThreads) {
            const float g = rounded_product(grad_at(row, j), load_param(args.weight, j));
            mean_g += g;
            mean_gx += g * ((widen(z[j]) - mean) * rstd);
        }
        pair_sum(mean_g, mean_gx, slots[turn]);
        mean_g = args.rms ? 0.0f : mean_g * inverse;
        mean_gx *= inverse;
        for (std::int64_t j = threadIdx.x; j < args.hidden; j += kRowThreads) {
            const float grad = grad_at(row, j), x_hat = (widen(z[j]) - mean) * rstd;
            const float g = rounded_product(grad, load_param(args.weight, j));
            float dz = (g - mean_g - x_hat * mean_gx) * rstd;
            if (args.dsum != nullptr) dz += widen(static_cast<const T*>(args.dsum)[row * args.hidden + j]);
            const float dx = args.dropout.seed != nullptr ? drop_one(args.dropout, row, j, dz) : dz;
            if (args.dresidual != nullptr) narrow(dz, static_cast<T*>(args.dresidual)[row * args.hidden + j]);
            if (args.dx != nullptr) narrow(dx, static_cast<X*>(args.dx)[row * args.hidden + j]);
            if (sums != nullptr) {
                sums[j] += grad * x_hat;
                sums[args.hidden + j] += grad;
                sums[2 * args.hidden + j] += dx;
            }
        }
    }
}

// dweight, dbias, dx_bias; null where not wanted.
struct Sums {
    float* out[3];
};

// blockIdx.y is the index of the sum. A block adds 32 columns: thread row y adds the parts y, y + 32, …; then
// the 32 totals are added in pairs.
__global__ void __launch_bounds__(1024)
    sum_parts_kernel(const float* partial, std::int64_t parts, std::int64_t hidden, Sums sums) {
    __shared__ float totals[32][33];
    const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
    float* out = blockIdx.y == 0 ? sums.out[0] : blockIdx.y == 1 ? sums.out[1] : sums.out[2];
    if (out == nullptr) return;
    const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * 32 + x;
    float total = 0.0f;
    if (column < hidden)
        for (std::int64_t part = y; part < parts; part += 32)
            total += partial[(part * 3 + blockIdx.y) * hidden + column];
    totals[y][x] = total;
    __syncthreads();
    // Transposed: a warp holds the 32 totals of column y.
    total = warp_sum(totals[x][y]);
    const std::int64_t own = static_cast<std::int64_t>(blockIdx.x) * 32 + y;
    if (x == 0 && own < hidden) out[own] = total;
}

// --- host ---

// Threads per row and rows per block of backward_kernel.
struct Block {
    unsigned threads, rows;
};

template <class T>
Block backward_block(std::int64_t hidden) {
    const unsigned threads =
        static_cast<unsigned>((hidden + kColumns * kWarp - 1) / (kColumns * kWarp) * kWarp);
    return {threads, kBlockThreads<T> / threads};
}

bool has_columns(std::int64_t hidden) { return hidden <= kBackwardHidden && hidden % kColumns == 0; }

template <class T, class X = T>
const char* backward(const LayerNormBwd& args, float* partial, std::int64_t parts, std::uintptr_t stream,
                     const X* drounded = nullptr) {
    const std::int64_t hidden = args.hidden;
    const bool vectors = has_columns(hidden) && rows_aligned<T>(args.dy, args.dy_stride) &&
                         rows_aligned<T>(args.z, args.z_stride) && aligned(args.weight) &&
                         cuda::aligned(args.dsum) && cuda::aligned(args.dx) &&
                         cuda::aligned(args.dresidual) && cuda::aligned(partial) && cuda::aligned(drounded);
    const dim3 grid(static_cast<unsigned>(parts));
    if (!vectors)
        return launch(backward_looped_kernel<T, X>, grid, dim3(kRowThreads), stream, args, drounded, partial);
    const Block block = backward_block<T>(hidden);
    return launch(backward_kernel<T, X>, grid, dim3(block.threads, block.rows), stream, args, drounded,
                  partial);
}

}  // namespace
}  // namespace cuda

std::int64_t cuda_layer_norm_bwd_parts(int dtype, std::int64_t rows, std::int64_t hidden,
                                       int multiprocessors) {
    // Blocks that fill the device once, and no more than there are rows.
    std::int64_t block_rows = 1, fill = 3 * static_cast<std::int64_t>(multiprocessors);
    if (cuda::has_columns(hidden)) {
        block_rows =
            dtype == 0 ? cuda::backward_block<float>(hidden).rows : cuda::backward_block<bf16>(hidden).rows;
        fill = multiprocessors;
    }
    const std::int64_t most = (rows + block_rows - 1) / block_rows;
    return most < fill ? most : fill;
}

const char* cuda_layer_norm_bwd(const LayerNormBwd& args, std::uintptr_t partial_address, std::int64_t parts,
                                int dx_dtype, std::uintptr_t drounded, int device, std::uintptr_t stream) {
    if (const cudaError_t error = cudaSetDevice(device)) return cudaGetErrorString(error);
    float* partial = reinterpret_cast<float*>(partial_address);
    if (args.rows > 0) {
        const char* reason = nullptr;
        switch (args.dtype) {
            case DType::kFloat32:
                switch (static_cast<DType>(dx_dtype)) {
                    case DType::kFloat32:
                        reason = cuda::backward<float>(args, partial, parts, stream);
                        break;
                    case DType::kBFloat16:
                        reason = cuda::backward<float, bf16>(args, partial, parts, stream,
                                                             reinterpret_cast<const bf16*>(drounded));
                        break;
                    default:
                        reason = cuda::backward<float, fp16>(args, partial, parts, stream,
                                                             reinterpret_cast<const fp16*>(drounded));
                }
                break;
            case DType::kBFloat16:
                reason = cuda::backward<bf16>(args, partial, parts, stream);
                break;
            default:
                reason = cuda::backward<fp16>(args, partial, parts, stream);
        }
        if (reason != nullptr) return reason;
    }
    if (args.dweight == nullptr && args.dx_bias == nullptr) return nullptr;
    const cuda::Sums sums{{args.dweight, args.dbias, args.dx_bias}};
    const dim3 grid(static_cast<unsigned>((args.hidden + 31) / 32), 3);
    return cuda::launch(cuda::sum_parts_kernel, grid, dim3(32, 32), stream,
                        static_cast<const float*>(partial), parts, args.hidden, sums);
}

}  // namespace fastbert
