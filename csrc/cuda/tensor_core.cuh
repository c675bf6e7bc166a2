// Tensor cores from sm_80 on: products of 16-bit fragments, their loads from shared memory, asynchronous
// copies into it, and the order of a tile's 16-byte chunks there.
//
// A tile in shared memory has rows of kColumns elements without gaps. ldmatrix reads eight rows of one chunk
// at a time; with the chunks in plain order all eight would use the same banks. `chunk_of` exchanges the
// chunks of a row by its number, so that eight rows in a row, and the eight chunks of one row, use all 32
// banks.
//
// Fragments (PTX ISA, mma.m16n8k16), lane = 4 * group + pair: a 32-bit word holds two neighbours of a row of
// A (16 x 16), or of a column of B (16 x 8); the first is the low half.
//   A  word 0: row group, columns 2 * pair;  1: row + 8;  2: columns + 8;  3: both
//   B  word 0: column group, rows 2 * pair;  1: rows + 8
//   C  0, 1: row group, columns 2 * pair, + 1;  2, 3: row + 8
#pragma once

#include <map>
#include <mutex>
#include <tuple>

#include "common.cuh"

namespace fastbert {
namespace cuda {

// --- a tile's chunks in shared memory ---

constexpr int kChunkBytes = 16;

// The place, in elements from the start of the tile, of chunk `chunk` of row `row`.
template <class T, int kColumns>
__device__ __forceinline__ int chunk_of(int row, int chunk) {
    constexpr int kChunks = kColumns * static_cast<int>(sizeof(T)) / kChunkBytes;
    static_assert(kChunks > 0 && (kChunks & (kChunks - 1)) == 0, "rows of 1, 2, 4, 8 or more chunks");
    // 128 bytes are all banks once: that many rows lie in them.
    constexpr int kRows = kChunks >= 8 ? 1 : 8 / kChunks;
    constexpr int kMask = kChunks >= 8 ? 7 : kChunks - 1;
    return row * kColumns + (chunk ^ ((row / kRows) & kMask)) * kPack<T>;
}

// --- two floats as one word of a fragment ---

template <class T>
__device__ __forceinline__ std::uint32_t pack_pair(float low, float high);
template <>
__device__ __forceinline__ std::uint32_t pack_pair<bf16>(float low, float high) {
    std::uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
template <>
__device__ __forceinline__ std::uint32_t pack_pair<fp16>(float low, float high) {
    std::uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// The two values of a fragment's word.
template <class T>
__device__ __forceinline__ void unpack_pair(std::uint32_t word, float& low, float& high) {
    T half;
    half.bits = static_cast<std::uint16_t>(word);
    low = widen(half);
    half.bits = static_cast<std::uint16_t>(word >> 16);
    high = widen(half);
}

// --- instructions of a whole warp ---

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// c += a b
template <class T>
__device__ __forceinline__ void mma(float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]);
template <>
__device__ __forceinline__ void mma<bf16>(float (&c)[4], const std::uint32_t (&a)[4],
                                          const std::uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void mma<fp16>(float (&c)[4], const std::uint32_t (&a)[4],
                                          const std::uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8 x 8 matrices of 16-bit elements. Lane 8 i + j passes the address of row j of matrix i, 16 bytes,
// aligned; word i of lane 4 g + p gets elements 2 p and 2 p + 1 of row g of matrix i (of its column g, if
// transposed).
__device__ __forceinline__ void load_matrices(std::uint32_t (&words)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&words)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// --- asynchronous copies, by groups of the calling thread ---

// 16 bytes of global memory to shared memory, both aligned; zeros where `inside` is false (nothing is read).
__device__ __forceinline__ void copy_chunk(void* shared, const void* global, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(shared)), "l"(global), "r"(inside ? 16 : 0)
                 : "memory");
}
// 4 bytes, likewise.
__device__ __forceinline__ void copy_word(void* shared, const void* global, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :
                 : "r"(shared_address(shared)), "l"(global), "r"(inside ? 4 : 0)
                 : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of the calling thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" : : "n"(kPending) : "memory");
}

// --- functions with approximate instructions ---

// 2^x; 0 for -inf; relative error 2^-22; results below 2^-126 are 0.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Absolute error 2^-11.
__device__ __forceinline__ float tanh_fast(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// --- shared memory of a size given at the launch, aligned to 128 bytes ---

__device__ __forceinline__ char* dynamic_shared() {
    extern __shared__ __align__(128) char bytes[];
    return bytes;
}

// Sets an attribute of a kernel on the current device, unless it has that value already: a launch then asks
// the driver once.
inline cudaError_t set_attribute(const void* kernel, cudaFuncAttribute attribute, int value) {
    static std::mutex mutex;
    static std::map<std::tuple<const void*, int, int>, int> values;
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device)) return error;
    const std::lock_guard<std::mutex> lock(mutex);
    const auto key = std::make_tuple(kernel, device, static_cast<int>(attribute));
    const auto known = values.find(key);
    if (known != values.end() && known->second == value) return cudaSuccess;
    const cudaError_t error = cudaFuncSetAttribute(kernel, attribute, value);
    if (error == cudaSuccess) values[key] = value;
    return error;
}

// Gives a kernel shared memory before the first cache.
template <class... Params>
const char* prefer_shared(void (*kernel)(Params...)) {
    const cudaError_t error =
        set_attribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributePreferredSharedMemoryCarveout,
                      cudaSharedmemCarveoutMaxShared);
    if (error == cudaSuccess) return nullptr;
    cudaGetLastError();  // the next launch must not see it
    return cudaGetErrorString(error);
}

// As launch, with `shared` bytes of dynamic shared memory, in clusters of `cluster` blocks.
template <class... Params>
const char* launch_clusters(unsigned cluster, void (*kernel)(Params...), dim3 grid, dim3 block,
                            std::size_t shared, std::uintptr_t stream, Params... params) {
    const void* entry = reinterpret_cast<const void*>(kernel);
    cudaError_t error = cudaSuccess;
    // What needs no permission
    constexpr std::size_t kFree = 48 * 1024;
    if (shared > kFree)
        error = set_attribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    void* pointers[] = {&params...};
    if (error == cudaSuccess) error = enqueue(entry, grid, block, pointers, shared, stream, cluster);
    if (error == cudaSuccess) return nullptr;
    cudaGetLastError();  // the next launch must not see it
    return cudaGetErrorString(error);
}
template <class... Params>
const char* launch_shared(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared,
                          std::uintptr_t stream, Params... params) {
    return launch_clusters(1, kernel, grid, block, shared, stream, params...);
}

}  // namespace cuda
}  // namespace fastbert
