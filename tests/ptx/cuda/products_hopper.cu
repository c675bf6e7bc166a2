// The products of csrc/cuda/hopper.cuh, one per launch: for tests of their operands' places.
#include "../../../csrc/cuda/hopper.cuh"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace fastbert {
namespace cuda {
namespace {

constexpr int kDepth = 64;
// Of a tile's 64 or 128 rows
constexpr int kTileBytes = 64 * kSwizzled * 2;

// A (rows, columns) matrix of T in tiles of 64 columns, as copies leave them: all rows of a tile, then the
// next.
template <class T>
__device__ void place_tiles(char* tiles, const T* matrix, int rows, int columns) {
    for (int i = static_cast<int>(threadIdx.x); i < rows * columns / kPack<T>; i += kGroupThreads) {
        const int row = i / (columns / kPack<T>), chunk = i % (columns / kPack<T>);
        *reinterpret_cast<Pack<T>*>(tiles + chunk / 8 * rows * kSwizzled * 2 +
                                    swizzled_chunk(row, chunk % 8)) = load_pack(matrix + i * kPack<T>);
    }
}

// c (64, kColumns) = 2 a b, with a (64, 64) or its transpose, and b (64, kColumns) transposed or not.
template <class T, int kColumns, bool kHeld, int kTransposedA, int kTransposedB>
__global__ void __launch_bounds__(kGroupThreads) product_kernel(const T* a, const T* b, float* c) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    char* const start = dynamic_shared();
    char* const left = start + (0u - shared_address(start)) % 1024;
    char* const right = left + kTileBytes;
    place_tiles(left, a, 64, kDepth);
    if (kTransposedB)
        place_tiles(right, b, kDepth, kColumns);
    else
        place_tiles(right, b, kColumns, kDepth);
    fence_shared();
    __syncthreads();
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    std::uint32_t held[kDepth / 16][4];
    if (kHeld) {
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k)
            load_matrices(held[k], left + swizzled_chunk(16 * warp + lane % 16, 2 * k + lane / 16));
    }
    const std::uint64_t from = operand_at(left), to = operand_at(right, kDepth * kSwizzled * 2);
    constexpr std::uint64_t kStepA = kTransposedA ? kTransposedStep : kDepthStep;
    constexpr std::uint64_t kStepB = kTransposedB ? kTransposedStep : kDepthStep;
    float sums[kColumns / 2];
    fence_products();
#pragma unroll
    for (int k = 0; k < 2 * kDepth / 16; ++k) {
        const int at = k % (kDepth / 16);
        if constexpr (kHeld)
            group_product<T, kTransposedB>(sums, held[at], to + at * kStepB, k > 0);
        else
            group_product<T, kTransposedA, kTransposedB>(sums, from + at * kStepA, to + at * kStepB, k > 0);
    }
    commit_products();
    wait_products<0>();
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i)
        c[(16 * warp + lane / 4 + i / 2 % 2 * 8) * kColumns + i / 4 * 8 + lane % 4 * 2 + i % 2] = sums[i];
#endif
}

template <class T, int kColumns, bool kHeld, int kTransposedA, int kTransposedB>
const char* product_of(const void* a, const void* b, float* c) {
    return launch_shared(product_kernel<T, kColumns, kHeld, kTransposedA, kTransposedB>, dim3(1),
                         dim3(kGroupThreads), kTileBytes * (1 + kColumns / 64) + 1024, 0,
                         static_cast<const T*>(a), static_cast<const T*>(b), c);
}

template <class T, int kColumns>
const char* product_in(int form, const void* a, const void* b, float* c) {
    switch (form) {
        case 0:
            return product_of<T, kColumns, false, 0, 0>(a, b, c);
        case 1:
            return product_of<T, kColumns, false, 0, 1>(a, b, c);
        case 2:
            return product_of<T, kColumns, false, 1, 0>(a, b, c);
        case 3:
            return product_of<T, kColumns, false, 1, 1>(a, b, c);
        case 4:
            return product_of<T, kColumns, true, 0, 0>(a, b, c);
        default:
            return product_of<T, kColumns, true, 0, 1>(a, b, c);
    }
}

template <class T>
const char* product_with(int columns, int form, const void* a, const void* b, float* c) {
    return columns == 64    ? product_in<T, 64>(form, a, b, c)
           : columns == 128 ? product_in<T, 128>(form, a, b, c)
                            : product_in<T, 192>(form, a, b, c);
}

}  // namespace
}  // namespace cuda
}  // namespace fastbert

// form: whether b is transposed, plus 2 if a is, or 4 if a is in registers. nullptr, or the text of the
// error.
EXPORTED const char* product(int half, int columns, int form, const void* a, const void* b, float* c) {
    return half ? fastbert::cuda::product_with<fastbert::fp16>(columns, form, a, b, c)
                : fastbert::cuda::product_with<fastbert::bf16>(columns, form, a, b, c);
}
