// What the kernels of attention's backward for compute capability 9.0 share: products of tiles of 64 x 64 by
// a warp group. Mathematics and tiling: attention_backward.cu; why so: NOTES.md.
#pragma once

#include "attention_backward.cuh"
#include "hopper.cuh"

namespace fastbert {
namespace cuda {

// A block is one warp group, and owns a tile of 64 rows, as all tiles are.
constexpr int kGroupHead = kSwizzled, kGroupTile = kOwned, kGroupSums = 32;
static_assert(kBackwardThreads == kGroupThreads, "a block is a warp group");
// Of a multiprocessor, by registers and by shared memory
constexpr int kGroupBlocks = 3;
constexpr int kTileBytes = kGroupTile * kGroupHead * 2;
template <class T>
using GroupTile = T[kGroupTile * kGroupHead];
// From one tile of an array to the next, as operands count
constexpr std::uint64_t kTileStep = kTileBytes >> 4;

struct GroupArguments {
    CUtensorMap q, k, v, dout;  // (total, nheads * 64) in tiles of 64 x 64
    CudaAttentionBwd call;
    bool local;  // whether there is a window, or heads of q share one of k and v: the kernels with kLocal
};

// Shared memory begins on 128 bytes, tiles on kTileAlignment.
constexpr int kTileAlignment = 1024;
template <class Shared>
__device__ __forceinline__ Shared& aligned_shared() {
    char* const start = dynamic_shared();
    return *reinterpret_cast<Shared*>(start + (0u - shared_address(start)) % kTileAlignment);
}

template <class Shared>
const char* launch_group(void (*kernel)(GroupArguments), const GroupArguments& args, std::uintptr_t stream) {
    // As many blocks as registers allow
    if (const char* reason = prefer_shared(kernel)) return reason;
    return launch_shared(kernel, grid_of(args.call.slots * args.call.nheads), dim3(kGroupThreads),
                         sizeof(Shared) + kTileAlignment, stream, args);
}

const char* launch_dq_hopper(const GroupArguments& args, std::uintptr_t stream);

// Two tiles from `row` on, by one thread; their bytes count on `barrier`.
template <class T>
__device__ __forceinline__ void load_two(std::uint64_t* barrier, T* a, const CUtensorMap& of_a, T* b,
                                         const CUtensorMap& of_b, int row, int column) {
    arrive_expecting(barrier, 2 * kTileBytes);
    load_tile(a, of_a, barrier, row, column);
    load_tile(b, of_b, barrier, row, column);
}

// Zeros in rows [left, 64) of a tile, which the next sequence's came into: 0 * NaN would be NaN.
template <class T>
__device__ __forceinline__ void zero_rest(T* tile, int left) {
    constexpr int kChunks = kGroupHead / kPack<T>;
    const int thread = static_cast<int>(threadIdx.x);
    const float zeros[kPack<T>] = {};
#pragma unroll
    for (int i = 0; i < kGroupTile * kChunks; i += kGroupThreads)
        if ((i + thread) / kChunks >= left) store_pack(tile + (i + thread) * kPack<T>, zeros);
}

// c = a bᵀ of two tiles; a group of its own.
template <class T>
__device__ __forceinline__ void multiply_tiles(float (&c)[kGroupSums], std::uint64_t a, std::uint64_t b) {
#pragma unroll
    for (int k = 0; k < kGroupHead / 16; ++k)
        group_product<T>(c, a + k * kDepthStep, b + k * kDepthStep, k > 0);
    commit_products();
}

// c = a b, or c += a b if `add`: a is what `rounded` made of a product, b a tile; a group of its own.
template <class T>
__device__ __forceinline__ void multiply_rounded(float (&c)[kGroupSums],
                                                 const std::uint32_t (&a)[kGroupTile / 16][4],
                                                 std::uint64_t b, bool add) {
#pragma unroll
    for (int k = 0; k < kGroupTile / 16; ++k)
        group_product<T, 1>(c, a[k], b + k * kTransposedStep, k > 0 || add);
    commit_products();
}

// A product's 64 x 64, rounded, as the left operand of the next one.
template <class T>
__device__ __forceinline__ void rounded(std::uint32_t (&a)[kGroupTile / 16][4],
                                        const float (&c)[kGroupSums]) {
#pragma unroll
    for (int i = 0; i < kGroupSums; i += 2) a[i / 8][i / 2 % 4] = pack_pair<T>(c[i], c[i + 1]);
}

// c is read and written no earlier than here, and no later: after the wait for its product, or before the
// wait for another one.
__device__ __forceinline__ void settle(float (&c)[kGroupSums]) {
#pragma unroll
    for (int i = 0; i < kGroupSums; ++i) asm volatile("" : "+f"(c[i]) : : "memory");
}

// Zeros in a product's columns that its rows do not see. Its first row and column are at `row` and `column`
// of the sequence. kLocal: there is a window.
template <bool kLocal>
__device__ __forceinline__ void hide(float (&c)[kGroupSums], const Reach& reach, int row, int column) {
    // Read here, so that what depends on it takes no registers elsewhere.
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    row += thread / kWarp * 16 + thread % kWarp / 4;
    column += thread % 4 * 2;
    int least[2], most[2];
    for (int half = 0; half < 2; ++half) {
        least[half] = reach.first_key(row + 8 * half) - column;
        most[half] = (kLocal ? reach.end_key(row + 8 * half) : reach.length) - column;
    }
#pragma unroll
    for (int i = 0; i < kGroupSums; ++i) {
        const int at = i / 4 * 8 + i % 2;
        if ((kLocal && at < least[i / 2 % 2]) || at >= most[i / 2 % 2]) c[i] = 0.0f;
    }
}

// As store_rows.
template <class T>
__device__ __forceinline__ void store_product(T* out, std::int64_t row_stride, const float (&c)[kGroupSums],
                                              const float (&factor)[2], T* stage, int first, int length) {
    float parts[kGroupHead / 8][4];
#pragma unroll
    for (int i = 0; i < kGroupSums; ++i) parts[i / 4][i % 4] = c[i];
    store_rows<T, kGroupHead>(out, row_stride, parts, factor, stage, first, length);
}

}  // namespace cuda
}  // namespace fastbert
