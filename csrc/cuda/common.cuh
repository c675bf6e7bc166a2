// Small parts that every kernel uses: conversions, 16-byte accesses, sums over threads, dropout bits,
// launching.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../dtype.h"

namespace fastbert {
namespace cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// --- conversions: exact to float, rounded to nearest even from it ---

__device__ __forceinline__ float widen(bf16 x) {
    return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}
__device__ __forceinline__ float widen(fp16 x) { return __half2float(__ushort_as_half(x.bits)); }
__device__ __forceinline__ void narrow(float x, bf16& out) {
    out.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
}
__device__ __forceinline__ void narrow(float x, fp16& out) {
    out.bits = __half_as_ushort(__float2half_rn(x));
}
// The rounded product: never part of a multiply-add.
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ void narrow(float x, float& out) { out = x; }

// --- packs: as many elements as fit into 16 bytes ---

template <class T>
constexpr int kPack = 16 / static_cast<int>(sizeof(T));

template <class T>
struct alignas(16) Pack {
    T item[kPack<T>];
};

template <class T>
__device__ __forceinline__ Pack<T> load_pack(const T* p) {
    return *reinterpret_cast<const Pack<T>*>(p);
}

template <class T>
__device__ __forceinline__ void store_pack(T* p, const float* values) {
    Pack<T> pack;
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) narrow(values[i], pack.item[i]);
    *reinterpret_cast<Pack<T>*>(p) = pack;
}

template <class T>
__device__ __forceinline__ void widen_pack(const Pack<T>& pack, float* out) {
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) out[i] = widen(pack.item[i]);
}

inline bool aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

// --- sums over the lanes of a warp, or over kLanes side by side: each of them gets the same bits ---

template <int kLanes = kWarp>
__device__ __forceinline__ float warp_sum(float x, unsigned lanes = kAllLanes) {
#pragma unroll
    for (int lane = kLanes / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(lanes, x, lane);
    return x;
}

// --- a barrier of some of a block's threads, by number; 0 is __syncthreads ---

__device__ __forceinline__ void sync_threads_at(int number, int threads) {
    asm volatile("bar.sync %0, %1;" : : "r"(number), "r"(threads) : "memory");
}

// --- dropout bits: Philox4x32-10, fastbert/ops/dropout.py ---

struct Philox {
    std::uint32_t word[4];
};

// The product of 32-bit numbers. nvcc adds a zero to the upper half of one that is written as 64-bit numbers.
__device__ __forceinline__ std::uint64_t wide_product(std::uint32_t a, std::uint32_t b) {
    std::uint64_t out;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(out) : "r"(a), "r"(b));
    return out;
}

// The words of columns 8 * group … 8 * group + 7: two 16-bit lanes each, the low half first.
__device__ __forceinline__ Philox philox(std::uint64_t seed, std::uint32_t group, std::uint32_t row,
                                         std::uint32_t plane, std::uint32_t offset) {
    std::uint32_t c0 = group, c1 = row, c2 = plane, c3 = offset;
    std::uint32_t k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        const std::uint64_t p0 = wide_product(c0, 0xD2511F53u), p1 = wide_product(c2, 0xCD9E8D57u);
        c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
        c1 = static_cast<std::uint32_t>(p1);
        c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
        c3 = static_cast<std::uint32_t>(p0);
    }
    return {{c0, c1, c2, c3}};
}

// Whether a lane of `word` is kept, its high half or its low one; the threshold is in the upper 16 bits.
__device__ __forceinline__ bool kept_lane(std::uint32_t word, bool high, std::uint32_t threshold) {
    return (high ? word : word << 16) >= threshold;
}

// --- kernels that begin before the kernel before them has ended ("chained"; compute capability 9.0) ---

// Until the kernels before have ended and their results are seen. Before it nothing is written, and only what
// none of them writes is read. Where the launch is not chained, they have ended already.
__device__ __forceinline__ void wait_for_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel may begin where all blocks have come here and left room.
__device__ __forceinline__ void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// --- launching: nullptr, or the text of the error ---

// Whether this thread's launches are chained: only of kernels that call wait_for_kernels, compiled for 9.0.
inline thread_local bool chained = false;

// `cluster`: blocks of a cluster.
inline cudaError_t enqueue(const void* kernel, dim3 grid, dim3 block, void** params, std::size_t shared,
                           std::uintptr_t stream, unsigned cluster = 1) {
    const auto queue = reinterpret_cast<cudaStream_t>(stream);
    if (!chained && cluster == 1) return cudaLaunchKernel(kernel, grid, block, params, shared, queue);
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = chained ? 1 : 0;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {cluster, 1, 1};
    const cudaLaunchConfig_t config{grid, block, shared, queue, attributes, 2};
    return cudaLaunchKernelExC(&config, kernel, params);
}

template <class... Params>
const char* launch(void (*kernel)(Params...), dim3 grid, dim3 block, std::uintptr_t stream,
                   Params... params) {
    void* pointers[] = {&params...};
    const cudaError_t error =
        enqueue(reinterpret_cast<const void*>(kernel), grid, block, pointers, 0, stream);
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace cuda
}  // namespace fastbert
