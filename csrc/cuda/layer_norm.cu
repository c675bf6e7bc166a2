// LayerNorm on a GPU, forward and backward. Contract: fastbert/ops/layer_norm.py.
//
// Math       z = residual + dropout(x + x_bias);  x_hat = (z - mean) rstd;  y = x_hat weight + bias
//            dz = rstd (g - mean(g) - x_hat mean(g x_hat)), g = dy weight
// Tiling     forward: a row to a warp (hidden <= 1024) or to a block of 256 (<= 8192), z in registers,
// 16-byte loads.
//            Backward: eight columns to a thread, as many threads as the row needs (<= 4096), rows in a
//            grid-stride loop with the next row's loads in flight, column sums in registers. Looped kernels
//            for all else.
// Precision  float; variance in two passes over registers, the second also correcting the mean.
// Saved      z rounded to T, mean and rstd; the dropout bits are drawn again.
// Sums       each block writes its column sums, a second kernel adds them in a fixed order: no atomics,
// bit-equal.
#include "common.cuh"
#include "layer_norm.h"

namespace fastbert {
namespace cuda {
namespace {

constexpr int kForwardThreads = 256;  // of a block that owns one row
constexpr int kWarpsPerBlock = 4;     // of a block whose warps own a row each
constexpr int kColumns = 8;           // of one thread in backward
constexpr std::int64_t kForwardHidden = 8192, kBackwardHidden = 4096;  // beyond: the looped kernels

__device__ __forceinline__ float load_param(const Param& param, std::int64_t column) {
    switch (param.dtype) {
        case DType::kFloat32:
            return static_cast<const float*>(param.data)[column];
        case DType::kBFloat16:
            return widen(static_cast<const bf16*>(param.data)[column]);
        default:
            return widen(static_cast<const fp16*>(param.data)[column]);
    }
}

// kPack<T> parameters, stored as T or as float.
template <class T>
__device__ __forceinline__ void load_params(const Param& param, std::int64_t column, float* out) {
    if (param.dtype == DType::kFloat32) {
#pragma unroll
        for (int i = 0; i < kPack<T>; i += 4)
            widen_pack(load_pack(static_cast<const float*>(param.data) + column + i), out + i);
    } else {
        widen_pack(load_pack(static_cast<const T*>(param.data) + column), out);
    }
}

// Multiplies kCount values from `column` (a multiple of 4) on by 1 / (1 - p) or 0.
template <int kCount>
__device__ __forceinline__ void drop(const DropoutArgs& dropout, std::uint64_t seed, std::int64_t row,
                                     std::int64_t column, float* values) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        const Philox bits = philox(seed, static_cast<std::uint32_t>((column + i) >> 2),
                                   static_cast<std::uint32_t>(row), 0, dropout.offset);
#pragma unroll
        for (int k = 0; k < 4; ++k)
            values[i + k] = bits.word[k] >= dropout.threshold ? values[i + k] * dropout.scale : 0.0f;
    }
}

__device__ __forceinline__ float drop_one(const DropoutArgs& dropout, std::int64_t row, std::int64_t column,
                                          float value) {
    const Philox bits = philox(*dropout.seed, static_cast<std::uint32_t>(column >> 2),
                               static_cast<std::uint32_t>(row), 0, dropout.offset);
    const int lane = static_cast<int>(column & 3);
    const std::uint32_t low =
        lane == 0 ? bits.word[0] : bits.word[1];  // no indexing: it would go through memory
    const std::uint32_t high = lane == 2 ? bits.word[2] : bits.word[3];
    const std::uint32_t word = lane < 2 ? low : high;
    return word >= dropout.threshold ? value * dropout.scale : 0.0f;
}

// The sum of x over the kThreads threads of a row; `slots` are this sum's own, one per warp.
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
    return 1.0f / sqrtf((variance < 0.0f ? 0.0f : variance) + eps);  // a NaN stays one
}

// One row: kThreads threads, kPacks packs to a thread, all of z in registers.
template <class T, int kThreads, int kPacks>
__global__ void __launch_bounds__(kThreads == kWarp ? kWarp * kWarpsPerBlock : kThreads,
                                  kThreads == kWarp ? 4 : 2) forward_kernel(LayerNormFwd args) {
    constexpr int N = kPack<T>;
    __shared__ float slots[3][kThreads / kWarp];
    const int thread = static_cast<int>(threadIdx.x) % kThreads;
    const std::int64_t row =
        kThreads == kWarp ? static_cast<std::int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp
                          : static_cast<std::int64_t>(blockIdx.x);
    if (row >= args.rows) return;  // a whole warp or a whole block
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    const T* residual = static_cast<const T*>(args.residual) + row * args.residual_stride;
    const std::uint64_t seed = args.dropout.seed != nullptr ? *args.dropout.seed : 0;

    float z[kPacks][N];  // [kPacks, N]; columns past hidden hold 0
    float total = 0.0f;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
        const std::int64_t column = (static_cast<std::int64_t>(p) * kThreads + thread) * N;
        const bool inside = column < args.hidden;
#pragma unroll
        for (int i = 0; i < N; ++i) z[p][i] = 0.0f;
        if (!inside) continue;
        widen_pack(load_pack(x + column), z[p]);
        float other[N];
        if (args.x_bias.data != nullptr) {
            load_params<T>(args.x_bias, column, other);
#pragma unroll
            for (int i = 0; i < N; ++i) z[p][i] += other[i];
        }
        if (args.dropout.seed != nullptr) drop<N>(args.dropout, seed, row, column, z[p]);
        if (args.residual != nullptr) {
            widen_pack(load_pack(residual + column), other);
#pragma unroll
            for (int i = 0; i < N; ++i) z[p][i] += other[i];
        }
        if (args.z != nullptr) store_pack(static_cast<T*>(args.z) + row * args.hidden + column, z[p]);
#pragma unroll
        for (int i = 0; i < N; ++i) total += z[p][i];
    }

    const float inverse = 1.0f / static_cast<float>(args.hidden);
    const float mean = row_sum<kThreads>(total, slots[0]) * inverse;
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
    const float correction = row_sum<kThreads>(first, slots[1]) * inverse;
    const float rstd =
        rstd_of(row_sum<kThreads>(second, slots[2]), correction, inverse, static_cast<float>(args.eps));
    if (args.mean != nullptr && thread == 0) {
        args.mean[row] = mean + correction;
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
        store_pack(static_cast<T*>(args.y) + row * args.hidden + column, z[p]);
    }
}

// Any hidden size, any alignment: a block to a row, z computed anew in each of the three passes.
template <class T>
__global__ void __launch_bounds__(kForwardThreads) forward_looped_kernel(LayerNormFwd args) {
    __shared__ float slots[3][kForwardThreads / kWarp];
    const std::int64_t row = blockIdx.x;
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    const T* residual = static_cast<const T*>(args.residual) + row * args.residual_stride;
    const auto z_at = [&](std::int64_t column) {
        float z = widen(x[column]);
        if (args.x_bias.data != nullptr) z += load_param(args.x_bias, column);
        if (args.dropout.seed != nullptr) z = drop_one(args.dropout, row, column, z);
        if (args.residual != nullptr) z += widen(residual[column]);
        return z;
    };
    float total = 0.0f;
    for (std::int64_t j = threadIdx.x; j < args.hidden; j += kForwardThreads) total += z_at(j);
    const float inverse = 1.0f / static_cast<float>(args.hidden);
    const float mean = row_sum<kForwardThreads>(total, slots[0]) * inverse;
    float first = 0.0f, second = 0.0f;
    for (std::int64_t j = threadIdx.x; j < args.hidden; j += kForwardThreads) {
        const float centred = z_at(j) - mean;
        first += centred;
        second += centred * centred;
    }
    const float correction = row_sum<kForwardThreads>(first, slots[1]) * inverse;
    const float rstd = rstd_of(row_sum<kForwardThreads>(second, slots[2]), correction, inverse,
                               static_cast<float>(args.eps));
    if (args.mean != nullptr && threadIdx.x == 0) {
        args.mean[row] = mean + correction;
        args.rstd[row] = rstd;
    }
    for (std::int64_t j = threadIdx.x; j < args.hidden; j += kForwardThreads) {
        const float z = z_at(j);
        const float bias = args.bias.data != nullptr ? load_param(args.bias, j) : 0.0f;
        if (args.z != nullptr) narrow(z, static_cast<T*>(args.z)[row * args.hidden + j]);
        narrow((z - mean - correction) * rstd * load_param(args.weight, j) + bias,
               static_cast<T*>(args.y)[row * args.hidden + j]);
    }
}

// Sums of a and b over the threads of one row (threadIdx.x; threadIdx.y are other rows of the block). `slots`
// must not be those of the call before: a warp may still be reading them.
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
    __syncthreads();
    a = b = 0.0f;
    for (int warp = 0; warp < warps; ++warp) {
        a += slots[warp][0];
        b += slots[warp][1];
    }
}

// Threads to a multiprocessor, as far as registers go: 80 a thread, 104 where the loads in flight are floats.
template <int kItemSize>
constexpr int kResident = kItemSize == 4 ? 600 : 800;

// kMaxThreads: 256 for hidden <= 2048, where a block may hold several rows; 512 up to 4096, one row.
template <class T, int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads, kMaxThreads == 256 ? kResident<sizeof(T)> / 256 : 1)
    backward_kernel(LayerNormBwd args, float* partial) {
    constexpr int N = kPack<T>, kPacks = kColumns / N;
    constexpr bool kManyRows = kMaxThreads == 256;
    __shared__ float slots[2][kMaxThreads / kWarp][2];
    __shared__ float others[kManyRows ? 3 * kColumns * kMaxThreads : 1];
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

    Pack<T> next_dy[kPacks] = {}, next_z[kPacks] = {};
    const auto fetch = [&](std::int64_t row) {
        if (!active || row >= args.rows) return;
        const T* dy = static_cast<const T*>(args.dy) + row * args.dy_stride + column;
        const T* z = static_cast<const T*>(args.z) + row * args.z_stride + column;
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
            next_dy[p] = load_pack(dy + p * N);
            next_z[p] = load_pack(z + p * N);
        }
    };
    const std::int64_t start = static_cast<std::int64_t>(blockIdx.x) * blockDim.y;
    fetch(start + threadIdx.y);
    int turn = 0;
    for (std::int64_t base = start; base < args.rows;
         base += step, turn ^= 1) {  // the same for the whole block
        const std::int64_t row = base + threadIdx.y;
        const bool inside = active && row < args.rows;
        float dy[kColumns], x_hat[kColumns];
        const float mean = row < args.rows ? args.mean[row] : 0.0f,
                    rstd = row < args.rows ? args.rstd[row] : 0.0f;
        float mean_g = 0.0f, mean_gx = 0.0f;
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
            widen_pack(next_dy[p], dy + p * N);
            widen_pack(next_z[p], x_hat + p * N);
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
        mean_g *= inverse;
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
        if (args.dresidual != nullptr) {
#pragma unroll
            for (int p = 0; p < kPacks; ++p)
                store_pack(static_cast<T*>(args.dresidual) + at + p * N, dz + p * N);
        }
        if (args.dropout.seed != nullptr) drop<kColumns>(args.dropout, seed, row, column, dz);
        if (args.dx != nullptr) {
#pragma unroll
            for (int p = 0; p < kPacks; ++p) store_pack(static_cast<T*>(args.dx) + at + p * N, dz + p * N);
        }
#pragma unroll
        for (int i = 0; i < kColumns; ++i) sums[2][i] += dz[i];
    }
    if (partial == nullptr) return;

    if (kManyRows && blockDim.y > 1) {  // the rows of the block, added in order
        const int own = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
        const int threads = static_cast<int>(blockDim.x * blockDim.y);
#pragma unroll
        for (int k = 0; k < 3; ++k)
#pragma unroll
            for (int i = 0; i < kColumns; ++i) others[(k * kColumns + i) * threads + own] = sums[k][i];
        __syncthreads();
        if (threadIdx.y > 0) return;
        for (int y = 1; y < static_cast<int>(blockDim.y); ++y) {
            const int other = y * static_cast<int>(blockDim.x) + own;
#pragma unroll
            for (int k = 0; k < 3; ++k)
#pragma unroll
                for (int i = 0; i < kColumns; ++i) sums[k][i] += others[(k * kColumns + i) * threads + other];
        }
    }
    if (!active) return;
    float* out = partial + static_cast<std::int64_t>(blockIdx.x) * 3 * args.hidden + column;
#pragma unroll
    for (int k = 0; k < 3; ++k)
#pragma unroll
        for (int i = 0; i < kColumns; i += 4) store_pack(out + k * args.hidden + i, &sums[k][i]);
}

// Any hidden size, any alignment. A thread owns its columns of the block's partial sums, which lie in memory.
template <class T>
__global__ void __launch_bounds__(kForwardThreads) backward_looped_kernel(LayerNormBwd args, float* partial) {
    __shared__ float slots[2][kForwardThreads / kWarp][2];
    const float inverse = 1.0f / static_cast<float>(args.hidden);
    float* sums =
        partial == nullptr ? nullptr : partial + static_cast<std::int64_t>(blockIdx.x) * 3 * args.hidden;
    if (sums != nullptr)
        for (std::int64_t j = threadIdx.x; j < args.hidden; j += kForwardThreads)
            for (int k = 0; k < 3; ++k) sums[k * args.hidden + j] = 0.0f;
    int turn = 0;
    for (std::int64_t row = blockIdx.x; row < args.rows; row += gridDim.x, turn ^= 1) {
        const T* dy = static_cast<const T*>(args.dy) + row * args.dy_stride;
        const T* z = static_cast<const T*>(args.z) + row * args.z_stride;
        const float mean = args.mean[row], rstd = args.rstd[row];
        float mean_g = 0.0f, mean_gx = 0.0f;
        for (std::int64_t j = threadIdx.x; j < args.hidden; j += kForwardThreads) {
            const float g = widen(dy[j]) * load_param(args.weight, j);
            mean_g += g;
            mean_gx += g * ((widen(z[j]) - mean) * rstd);
        }
        pair_sum(mean_g, mean_gx, slots[turn]);
        mean_g *= inverse;
        mean_gx *= inverse;
        for (std::int64_t j = threadIdx.x; j < args.hidden; j += kForwardThreads) {
            const float grad = widen(dy[j]), x_hat = (widen(z[j]) - mean) * rstd;
            const float dz = (grad * load_param(args.weight, j) - mean_g - x_hat * mean_gx) * rstd;
            const float dx = args.dropout.seed != nullptr ? drop_one(args.dropout, row, j, dz) : dz;
            if (args.dresidual != nullptr) narrow(dz, static_cast<T*>(args.dresidual)[row * args.hidden + j]);
            if (args.dx != nullptr) narrow(dx, static_cast<T*>(args.dx)[row * args.hidden + j]);
            if (sums != nullptr) {
                sums[j] += grad * x_hat;
                sums[args.hidden + j] += grad;
                sums[2 * args.hidden + j] += dx;
            }
        }
    }
}

struct Sums {
    float* out[3];  // dweight, dbias, dx_bias; null where not wanted
};

// blockIdx.y: which sum. A block adds 32 columns: row y takes parts y, y + 32, …; the 32 totals then in
// pairs.
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
    total = warp_sum(totals[x][y]);  // transposed: a warp holds the 32 totals of column y
    const std::int64_t own = static_cast<std::int64_t>(blockIdx.x) * 32 + y;
    if (x == 0 && own < hidden) out[own] = total;
}

// --- host ---

bool aligned(const Param& param) { return cuda::aligned(param.data); }

template <class T>
bool rows_aligned(const void* p, std::int64_t stride) {
    return cuda::aligned(p) && (p == nullptr || stride % kPack<T> == 0);
}

template <class T, int kThreads, int kPacks>
const char* launch_forward(const LayerNormFwd& args, std::uintptr_t stream) {
    const std::int64_t blocks =
        kThreads == kWarp ? (args.rows + kWarpsPerBlock - 1) / kWarpsPerBlock : args.rows;
    const unsigned threads = kThreads == kWarp ? kWarp * kWarpsPerBlock : kThreads;
    return launch(forward_kernel<T, kThreads, kPacks>, dim3(static_cast<unsigned>(blocks)), dim3(threads),
                  stream, args);
}

template <class T>
const char* forward(const LayerNormFwd& args, std::uintptr_t stream) {
    constexpr int N = kPack<T>;
    const std::int64_t hidden = args.hidden;
    const bool vectors =
        hidden <= kForwardHidden && hidden % N == 0 && rows_aligned<T>(args.x, args.x_stride) &&
        rows_aligned<T>(args.residual, args.residual_stride) && aligned(args.weight) && aligned(args.bias) &&
        aligned(args.x_bias) && cuda::aligned(args.y) && cuda::aligned(args.z);
    if (!vectors)
        return launch(forward_looped_kernel<T>, dim3(static_cast<unsigned>(args.rows)), dim3(kForwardThreads),
                      stream, args);
    if (hidden <= 256) return launch_forward<T, kWarp, 8 / N>(args, stream);
    if (hidden <= 512) return launch_forward<T, kWarp, 16 / N>(args, stream);
    if (hidden <= 768) return launch_forward<T, kWarp, 24 / N>(args, stream);
    if (hidden <= 1024) return launch_forward<T, kWarp, 32 / N>(args, stream);
    if (hidden <= 2048) return launch_forward<T, kForwardThreads, 8 / N>(args, stream);
    if (hidden <= 4096) return launch_forward<T, kForwardThreads, 16 / N>(args, stream);
    return launch_forward<T, kForwardThreads, 32 / N>(args, stream);
}

// Threads to a row and rows to a block of backward_kernel.
struct Block {
    unsigned threads, rows;
};

Block backward_block(std::int64_t hidden) {
    const unsigned threads =
        static_cast<unsigned>((hidden + kColumns * kWarp - 1) / (kColumns * kWarp) * kWarp);
    return {threads, threads <= 256 ? 256 / threads : 1};
}

template <class T>
const char* backward(const LayerNormBwd& args, float* partial, std::int64_t parts, std::uintptr_t stream) {
    const std::int64_t hidden = args.hidden;
    const bool vectors = hidden <= kBackwardHidden && hidden % kColumns == 0 &&
                         rows_aligned<T>(args.dy, args.dy_stride) && rows_aligned<T>(args.z, args.z_stride) &&
                         aligned(args.weight) && cuda::aligned(args.dx) && cuda::aligned(args.dresidual) &&
                         cuda::aligned(partial);
    const dim3 grid(static_cast<unsigned>(parts));
    if (!vectors)
        return launch(backward_looped_kernel<T>, grid, dim3(kForwardThreads), stream, args, partial);
    const Block block = backward_block(hidden);
    const dim3 threads(block.threads, block.rows);
    if (block.threads <= 256) return launch(backward_kernel<T, 256>, grid, threads, stream, args, partial);
    return launch(backward_kernel<T, 512>, grid, threads, stream, args, partial);
}

}  // namespace
}  // namespace cuda

const char* cuda_layer_norm_fwd(const LayerNormFwd& args, int device, std::uintptr_t stream) {
    if (args.rows == 0) return nullptr;
    if (args.rows > 0x7fffffff) return "rows: at most 2**31 - 1";
    if (const cudaError_t error = cudaSetDevice(device)) return cudaGetErrorString(error);
    switch (args.dtype) {
        case DType::kFloat32:
            return cuda::forward<float>(args, stream);
        case DType::kBFloat16:
            return cuda::forward<bf16>(args, stream);
        default:
            return cuda::forward<fp16>(args, stream);
    }
}

std::int64_t cuda_layer_norm_bwd_parts(int dtype, std::int64_t rows, std::int64_t hidden,
                                       int multiprocessors) {
    // Enough blocks to fill the device once, and no more than there are rows.
    const cuda::Block block =
        hidden <= cuda::kBackwardHidden ? cuda::backward_block(hidden) : cuda::Block{256, 1};
    const unsigned resident = dtype == 0 || block.threads > 256 ? cuda::kResident<4> : cuda::kResident<2>;
    const unsigned per_multiprocessor = resident / (block.threads * block.rows);
    const std::int64_t fill =
        static_cast<std::int64_t>(multiprocessors) * (per_multiprocessor > 0 ? per_multiprocessor : 1);
    const std::int64_t most = (rows + block.rows - 1) / block.rows;
    return most < fill ? most : fill;
}

const char* cuda_layer_norm_bwd(const LayerNormBwd& args, std::uintptr_t partial_address, std::int64_t parts,
                                int device, std::uintptr_t stream) {
    if (const cudaError_t error = cudaSetDevice(device)) return cudaGetErrorString(error);
    float* partial = reinterpret_cast<float*>(partial_address);
    if (args.rows > 0) {
        const char* reason = nullptr;
        switch (args.dtype) {
            case DType::kFloat32:
                reason = cuda::backward<float>(args, partial, parts, stream);
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
