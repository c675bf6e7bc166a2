// The passes around a linear layer's products: adding the parts of a product, the gradient of an activation,
// and adding partial column sums. All sums are made in a fixed order.
//
// Math       c = act(Σ_parts) + residual;  g = dy act'(pre), sums = Σ_rows g
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

template <class T>
__global__ void __launch_bounds__(kPassThreads) add_parts_kernel(LinearProduct args, Whole whole) {
    const std::int64_t chunks = (args.columns + kChunk - 1) / kChunk, stride = chunks * kChunk;
    const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kPassThreads + threadIdx.x;
    if (index >= args.rows * chunks) return;
    const std::int64_t row = index / chunks;
    const int column = static_cast<int>(index % chunks) * kChunk, columns = static_cast<int>(args.columns);
    float sum[kChunk];
    add_floats(args.partial + row * stride + column, args.parts, args.rows * stride, sum);
    const auto store = [&](void* to, bool whole_rows) {
        Pack<T> pack;
#pragma unroll
        for (int i = 0; i < kChunk; ++i) narrow(sum[i], pack.item[i]);
        T* const own = static_cast<T*>(to) + row * args.columns;
        if (whole_rows)
            *reinterpret_cast<Pack<T>*>(own + column) = pack;
        else
            store_elements(own, column, columns, pack);
    };
    if (args.pre != nullptr) store(args.pre, whole.pre);
    with_activation<T>(args.activation, args.exact, [&](auto function) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) sum[i] = function(sum[i]);
    });
    if (args.residual != nullptr) {
        const T* const residual = static_cast<const T*>(args.residual) + row * args.residual_stride;
        float values[kChunk];
        widen_pack(whole.residual ? load_pack(residual + column) : load_elements(residual, column, columns),
                   values);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) sum[i] += values[i];
    }
    store(args.c, whole.c);
}

template <class T>
__global__ void __launch_bounds__(kPassThreads) gradient_kernel(LinearGradient args) {
    __shared__ float slots[kPassWarps][kPassColumns];
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    const std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * kPassColumns + lane * kChunk;
    const std::int64_t begin = args.rows * blockIdx.x / args.parts;
    const std::int64_t end = args.rows * (blockIdx.x + 1) / args.parts;
    float sum[kChunk] = {};
    if (column < args.columns) {
        for (std::int64_t row = begin + warp; row < end; row += kPassWarps) {
            const std::int64_t at = row * args.columns + column;
            float g[kChunk];
            if (args.partial != nullptr)
                add_floats(args.partial + at, args.partial_parts, args.rows * args.columns, g);
            else
                widen_pack(load_pack(static_cast<const T*>(args.dy) + at), g);
            if (args.pre != nullptr) {
                float z[kChunk];
                widen_pack(load_pack(static_cast<const T*>(args.pre) + at), z);
                with_slope<T>(args.activation, args.exact, [&](auto slope) {
#pragma unroll
                    for (int i = 0; i < kChunk; ++i) g[i] *= slope(z[i]);
                });
            }
            if (args.g != nullptr) store_pack(static_cast<T*>(args.g) + at, g);
#pragma unroll
            for (int i = 0; i < kChunk; ++i) sum[i] += g[i];
        }
    }
    if (args.sums == nullptr) return;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) slots[warp][lane * kChunk + i] = sum[i];
    __syncthreads();
    const std::int64_t own = static_cast<std::int64_t>(blockIdx.y) * kPassColumns + threadIdx.x;
    if (own >= args.columns) return;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kPassWarps; ++i) total += slots[i][threadIdx.x];
    args.sums[blockIdx.x * args.columns + own] = total;
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
    return launch(gradient_kernel<T>, grid, dim3(kPassThreads), stream, args);
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
                                 args.exact,    args.c,       args.sums,    cuda_linear_sums(args.rows)};
        return gradient<T>(own, stream);
    }
    const std::int64_t threads = args.rows * ((args.columns + kChunk - 1) / kChunk);
    const std::int64_t blocks = (threads + kPassThreads - 1) / kPassThreads;
    if (blocks > 0x7fffffff) return "rows * columns: more than 2**31 - 1 blocks";
    const Whole whole{whole_chunks(args.c, args.columns, args.columns),
                      whole_chunks(args.pre, args.columns, args.columns),
                      whole_chunks(args.residual, args.residual_stride, args.columns), false};
    return launch(add_parts_kernel<T>, dim3(static_cast<unsigned>(blocks)), dim3(kPassThreads), stream, args,
                  whole);
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
