// The passes around a linear layer's products: adding the parts of a product, the gradient of an activation,
// and adding partial column sums. All sums are made in a fixed order.
//
// Math       c = act(Σ_parts) + residual;  g = dy act'(pre), sums = Σ_rows g. With a gate
//            [y, z] = Σ_parts, c = act(y) z + residual;  [y, z] = pre, g = [dy z act'(y), dy act(y)].
// Tiling     Adding: 8 columns per thread. Gradient: 8 columns per lane and every 8th row per warp, of the
//            rows of the block's part; the warps' sums are added in shared memory. Column sums: 32 columns
//            per block, every 8th row per warp.
// Precision  float; one rounding per store.
#include "linear_tiles.cuh"

namespace fastbert {
namespace cuda {
namespace {

constexpr int kPassThreads = 256;
constexpr int kPassWarps = kPassThreads / kWarp;
constexpr int kPassColumns = kWarp * kChunk;

// The sum of `parts` chunks of floats, `stride` apart
__device__ __forceinline__ void add_floats(const float* from, std::int64_t parts, std::int64_t stride,
                                           float (&sum)[kChunk]) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sum[i] = 0.0f;
    for (std::int64_t part = 0; part < parts; ++part, from += stride) {
        float values[kChunk];
        widen_pack(load_pack(from), values);
        widen_pack(load_pack(from + kPack<float>), values + kPack<float>);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) sum[i] += values[i];
    }
}

template <class T, bool kGated>
__global__ void __launch_bounds__(kPassThreads) add_parts_kernel(LinearProduct args, Whole whole) {
    const std::int64_t chunks = (args.columns + kChunk - 1) / kChunk, stride = chunks * kChunk;
    const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kPassThreads + threadIdx.x;
    if (index >= args.rows * chunks) return;
    const std::int64_t row = index / chunks;
    const int column = static_cast<int>(index % chunks) * kChunk, columns = static_cast<int>(args.columns);
    const bool second = kGated && args.gate == Gate::kSecond;
    constexpr int kHalves = kGated ? 2 : 1;
    float sum[kChunk];
    const float* const partial = args.partial + row * kHalves * stride + column;
    add_floats(partial, args.parts, args.rows * kHalves * stride, sum);
    const auto store = [&](const float (&values)[kChunk], T* to, bool whole_rows) {
        Pack<T> pack;
#pragma unroll
        for (int i = 0; i < kChunk; ++i) narrow(values[i], pack.item[i]);
        if (whole_rows)
            *reinterpret_cast<Pack<T>*>(to + column) = pack;
        else
            store_elements(to, column, columns, pack);
    };
    T* const pre = static_cast<T*>(args.pre) + row * kHalves * args.columns;
    if (args.pre != nullptr) store(sum, second ? pre + columns : pre, whole.pre);
    with_activation<T>(args.activation, args.exact, [&](auto function) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) sum[i] = function(sum[i]);
    });
    if (kGated) {
        float other[kChunk];
        add_floats(partial + stride, args.parts, args.rows * kHalves * stride, other);
        if (args.pre != nullptr) store(other, second ? pre : pre + columns, whole.pre);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) sum[i] *= other[i];
    }
    if (args.residual != nullptr) {
        const T* const residual = static_cast<const T*>(args.residual) + row * args.residual_stride;
        float values[kChunk];
        widen_pack(whole.residual ? load_pack(residual + column) : load_elements(residual, column, columns),
                   values);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) sum[i] += values[i];
    }
    store(sum, static_cast<T*>(args.c) + row * args.columns, whole.c);
}

template <class T, bool kGated>
__global__ void __launch_bounds__(kPassThreads) gradient_kernel(LinearGradient args) {
    __shared__ float slots[kPassWarps][kPassColumns];
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    const std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * kPassColumns + lane * kChunk;
    const std::int64_t begin = args.rows * blockIdx.x / args.parts;
    const std::int64_t end = args.rows * (blockIdx.x + 1) / args.parts;
    // Where the activated columns and their partners begin in a row of pre, g and sums
    const std::int64_t width = kGated ? 2 * args.columns : args.columns;
    const bool second = kGated && args.gate == Gate::kSecond;
    const std::int64_t starts[2] = {second ? args.columns : 0, second ? 0 : args.columns};
    float sum[2][kChunk] = {};
    if (column < args.columns) {
        for (std::int64_t row = begin + warp; row < end; row += kPassWarps) {
            const std::int64_t at = row * args.columns + column;
            const std::int64_t active = row * width + starts[0] + column,
                               other = row * width + starts[1] + column;
            float g[2][kChunk] = {};
            if (args.partial != nullptr)
                add_floats(args.partial + at, args.partial_parts, args.rows * args.columns, g[0]);
            else
                widen_pack(load_pack(static_cast<const T*>(args.dy) + at), g[0]);
            if (args.pre != nullptr) {
                float y[kChunk], z[kChunk];
                widen_pack(load_pack(static_cast<const T*>(args.pre) + active), y);
                if (kGated) {
                    with_activation<T>(args.activation, args.exact, [&](auto function) {
#pragma unroll
                        for (int i = 0; i < kChunk; ++i) g[1][i] = g[0][i] * function(y[i]);
                    });
                    widen_pack(load_pack(static_cast<const T*>(args.pre) + other), z);
#pragma unroll
                    for (int i = 0; i < kChunk; ++i) g[0][i] *= z[i];
                }
                with_slope<T>(args.activation, args.exact, [&](auto slope) {
#pragma unroll
                    for (int i = 0; i < kChunk; ++i) g[0][i] *= slope(y[i]);
                });
            }
            if (args.g != nullptr) {
                store_pack(static_cast<T*>(args.g) + active, g[0]);
                if (kGated) store_pack(static_cast<T*>(args.g) + other, g[1]);
            }
#pragma unroll
            for (int i = 0; i < kChunk; ++i) sum[0][i] += g[0][i];
            if (kGated) {
#pragma unroll
                for (int i = 0; i < kChunk; ++i) sum[1][i] += g[1][i];
            }
        }
    }
    if (args.sums == nullptr) return;
    const std::int64_t own = static_cast<std::int64_t>(blockIdx.y) * kPassColumns + threadIdx.x;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (half == 1 && !kGated) return;
        if (half == 1) __syncthreads();
#pragma unroll
        for (int i = 0; i < kChunk; ++i) slots[warp][lane * kChunk + i] = sum[half][i];
        __syncthreads();
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < kPassWarps; ++i) total += slots[i][threadIdx.x];
        if (own < args.columns) args.sums[blockIdx.x * width + starts[half] + own] = total;
    }
}

template <class T>
__global__ void __launch_bounds__(kPassThreads)
    add_sums_kernel(const float* sums, std::int64_t parts, std::int64_t columns, T* out) {
    __shared__ float slots[kPassWarps][kWarp];
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * kWarp + lane;
    float sum = 0.0f;
    if (column < columns)
        for (std::int64_t part = warp; part < parts; part += kPassWarps) sum += sums[part * columns + column];
    slots[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || column >= columns) return;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kPassWarps; ++i) total += slots[i][lane];
    narrow(total, out[column]);
}

// --- host ---

template <class T>
const char* gradient(const LinearGradient& args, std::uintptr_t stream) {
    const dim3 grid(static_cast<unsigned>(args.parts),
                    static_cast<unsigned>((args.columns + kPassColumns - 1) / kPassColumns));
    const auto kernel = args.gate == Gate::kNone ? gradient_kernel<T, false> : gradient_kernel<T, true>;
    return launch(kernel, grid, dim3(kPassThreads), stream, args);
}

template <class T>
const char* add_sums(const float* sums, std::int64_t parts, std::int64_t columns, void* out,
                     std::uintptr_t stream) {
    return launch(add_sums_kernel<T>, dim3(static_cast<unsigned>((columns + kWarp - 1) / kWarp)),
                  dim3(kPassThreads), stream, sums, parts, columns, static_cast<T*>(out));
}

}  // namespace

template <class T>
const char* add_parts(const LinearProduct& args, std::uintptr_t stream) {
    if (args.slope_at != nullptr) {
        const LinearGradient own{args.dtype,    args.rows,    args.columns, nullptr,
                                 args.slope_at, args.partial, args.parts,   args.activation,
                                 args.exact,    args.c,       args.sums,    cuda_linear_sums(args.rows),
                                 Gate::kNone};
        return gradient<T>(own, stream);
    }
    const std::int64_t threads = args.rows * ((args.columns + kChunk - 1) / kChunk);
    const std::int64_t blocks = (threads + kPassThreads - 1) / kPassThreads;
    if (blocks > 0x7fffffff) return "rows * columns: more than 2**31 - 1 blocks";
    const auto kernel = args.gate == Gate::kNone ? add_parts_kernel<T, false> : add_parts_kernel<T, true>;
    return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kPassThreads), stream, args,
                  whole_of(args));
}

template const char* add_parts<bf16>(const LinearProduct&, std::uintptr_t);
template const char* add_parts<fp16>(const LinearProduct&, std::uintptr_t);

}  // namespace cuda

const char* cuda_linear_gradient(const LinearGradient& args, int device, std::uintptr_t stream) {
    if (args.rows == 0 || args.columns == 0) return nullptr;
    if (args.columns % cuda::kChunk != 0 || !cuda::aligned(args.dy) || !cuda::aligned(args.pre) ||
        !cuda::aligned(args.g) || args.partial != nullptr)
        return "dy, pre, g: rows of a multiple of 8 elements, on 16 bytes";
    if (args.parts < 1 || args.parts > args.rows || args.parts > 0x7fffffff)
        return "parts: at least one row each";
    if (args.gate != Gate::kNone && (args.pre == nullptr || args.activation == Activation::kNone))
        return "gate: needs pre and an activation";
    if (args.columns > 65535 * static_cast<std::int64_t>(cuda::kPassColumns))
        return "columns: at most 65535 * 256";
    if (const cudaError_t error = cudaSetDevice(device)) return cudaGetErrorString(error);
    switch (args.dtype) {
        case DType::kBFloat16:
            return cuda::gradient<bf16>(args, stream);
        case DType::kFloat16:
            return cuda::gradient<fp16>(args, stream);
        default:
            return "dtype: bfloat16 or float16";
    }
}

const char* cuda_linear_add_sums(DType dtype, const float* sums, std::int64_t parts, std::int64_t columns,
                                 void* out, int device, std::uintptr_t stream) {
    if (columns == 0) return nullptr;
    if (columns > 0x7fffffff) return "columns: at most 2**31 - 1";
    if (const cudaError_t error = cudaSetDevice(device)) return cudaGetErrorString(error);
    switch (dtype) {
        case DType::kBFloat16:
            return cuda::add_sums<bf16>(sums, parts, columns, out, stream);
        case DType::kFloat16:
            return cuda::add_sums<fp16>(sums, parts, columns, out, stream);
        default:
            return "dtype: bfloat16 or float16";
    }
}

}  // namespace fastbert
