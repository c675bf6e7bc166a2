// Instructions of compute capability 9.0 (sm_90a): barriers in shared memory that count bytes, copies of
// tiles by tensor maps, products of warp groups. PTX ISA 8.0, "mbarrier", "cp.async.bulk.tensor", "wgmma".
//
// A tile in shared memory has rows of 64 elements, 128 bytes, and begins on 1,024 bytes. The copies exchange
// the 16-byte chunks of row r by `^ r % 8` (128-byte swizzle), as the products and `swizzled_chunk` have
// them.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "tensor_core.cuh"

namespace fastbert {
namespace cuda {

constexpr int kGroupThreads = 128;
// Elements of a tile's row
constexpr int kSwizzled = 64;

// --- barriers in shared memory ---

// `arrivals` complete a phase, if the bytes that it expects have come too.
__device__ __forceinline__ void init_barrier(std::uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 :
                 : "r"(shared_address(barrier)), "r"(arrivals)
                 : "memory");
}
// Initialised barriers are seen by copies.
__device__ __forceinline__ void fence_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(std::uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void arrive_expecting(std::uint64_t* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :
                 : "r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
// Until the phase of this parity is over. The phase before the first has parity 1 and is over.
__device__ __forceinline__ void wait_phase(std::uint64_t* barrier, int parity) {
    std::uint32_t over;
    do {
        asm volatile(
            "{\n"
            ".reg .pred over;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
            "selp.u32 %0, 1, 0, over;\n"
            "}"
            : "=r"(over)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    } while (over == 0);
}

// --- arriving at a barrier of some threads (sync_threads_at) without waiting ---

__device__ __forceinline__ void arrive_at(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" : : "r"(number), "r"(threads) : "memory");
}

// --- registers: a warp group gives back or takes some of the multiprocessor's ---

template <int kRegisters>
__device__ __forceinline__ void give_back_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

// --- copies of tiles, by one thread; what lies outside of the tensor is read as 0 and not written ---

// Before its first use: the map itself is read from memory.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" : : "l"(&map) : "memory");
}
// The tile at (row, column) into shared memory; its bytes count on `barrier`.
__device__ __forceinline__ void load_tile(void* shared, const CUtensorMap& map, std::uint64_t* barrier,
                                          int row, int column) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
        "%4}], "
        "[%2];"
        :
        : "r"(shared_address(shared)), "l"(&map), "r"(shared_address(barrier)), "r"(column), "r"(row)
        : "memory");
}
// The tile at (row, column) into the L2 cache.
__device__ __forceinline__ void prefetch_tile(const CUtensorMap& map, int row, int column) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];"
                 :
                 : "l"(&map), "r"(column), "r"(row)
                 : "memory");
}
// A group of its own: see wait_stores.
__device__ __forceinline__ void store_tile(const void* shared, const CUtensorMap& map, int row, int column) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];\n"
        "cp.async.bulk.commit_group;"
        :
        : "l"(&map), "r"(shared_address(shared)), "r"(column), "r"(row)
        : "memory");
}
// Until the calling thread's stores have read shared memory.
__device__ __forceinline__ void wait_stores() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// The calling thread's writes to shared memory are seen by the stores and products that follow.
__device__ __forceinline__ void fence_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- shared memory of the blocks of a cluster ---

// All threads of the cluster's blocks wait for each other, and see what was written before.
__device__ __forceinline__ void sync_cluster() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}
// What lies at this place in the block of this rank
__device__ __forceinline__ float4 load_from_rank(const float* shared, int rank) {
    float4 four;
    asm volatile(
        "{\n"
        ".reg .b32 place;\n"
        "mapa.shared::cluster.u32 place, %4, %5;\n"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [place];\n"
        "}"
        : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
        : "r"(shared_address(shared)), "r"(rank)
        : "memory");
    return four;
}

// --- fragments to shared memory ---

// The place in bytes of a 16-byte chunk of a tile's row.
__device__ __forceinline__ int swizzled_chunk(int row, int chunk) {
    return row * kSwizzled * 2 + (chunk ^ (row & 7)) * kChunkBytes;
}
// The reverse of load_matrices.
__device__ __forceinline__ void store_matrices(void* row, const std::uint32_t (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(shared_address(row)), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

// --- products of a warp group ---

// A tile in shared memory as an operand. By default the tile's rows are the operand's rows or columns, and
// its 64 columns are the depth: 16 of the depth further is kDepthStep more. Transposed, the tile's rows are
// the depth and its columns the operand's rows or columns: 16 of the depth further is kTransposedStep more. A
// transposed operand wider than 64 is several tiles, `next` bytes apart.
__device__ __forceinline__ std::uint64_t operand_at(const void* tile, int next = 16) {
    constexpr std::uint64_t kSwizzle128 = 1, kBytesOfEightRows = 8 * kSwizzled * 2;
    return static_cast<std::uint64_t>((shared_address(tile) & 0x3ffff) >> 4) |
           static_cast<std::uint64_t>(next >> 4) << 16 | (kBytesOfEightRows >> 4) << 32 | kSwizzle128 << 62;
}
constexpr std::uint64_t kDepthStep = 16 * 2 >> 4, kTransposedStep = 16 * kSwizzled * 2 >> 4;

// Before the first product, and where other code has written c or the registers of a since.
__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most kPending groups run.
template <int kPending>
__device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kPending) : "memory");
}

// group_product: c = a b, or c += a b if `add`, of 64 x N x 16 by a warp group, N = 64, 128 or 192. c are
// N / 8 fragments C of 16 x 8 per warp (tensor_core.cuh). b (N x 16, one column of the product per row) lies
// in shared memory, and a (64 x 16) there too, or in registers as a fragment A of each warp's 16 rows. Until
// wait_products c and the registers of a may not be used, and the operands in shared memory may not be
// overwritten.
#define FASTBERT_EIGHT(i)                                                                       \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), \
        "+f"(c[i + 6]), "+f"(c[i + 7])
#define FASTBERT_SUMS_64 FASTBERT_EIGHT(0), FASTBERT_EIGHT(8), FASTBERT_EIGHT(16), FASTBERT_EIGHT(24)
#define FASTBERT_SUMS_128 \
    FASTBERT_SUMS_64, FASTBERT_EIGHT(32), FASTBERT_EIGHT(40), FASTBERT_EIGHT(48), FASTBERT_EIGHT(56)
#define FASTBERT_SUMS_192 \
    FASTBERT_SUMS_128, FASTBERT_EIGHT(64), FASTBERT_EIGHT(72), FASTBERT_EIGHT(80), FASTBERT_EIGHT(88)
#define FASTBERT_NAMES_64                                               \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, " \
    "%15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, " \
    "%28, %29, %30, %31"
#define FASTBERT_NAMES_128                                                   \
    FASTBERT_NAMES_64                                                        \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, "    \
    "%45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, " \
    "%59, %60, %61, %62, %63"
#define FASTBERT_NAMES_192                                                   \
    FASTBERT_NAMES_128                                                       \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, "    \
    "%77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, " \
    "%91, %92, %93, %94, %95"
#define FASTBERT_WGMMA(columns, type, a_and_b, add, flags)                                              \
    "{\n.reg .pred add;\nsetp.ne.b32 add, " add                                                         \
    ", 0;\n"                                                                                            \
    "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" FASTBERT_NAMES_##columns \
        "}, " a_and_b ", add, 1, 1, " flags ";\n}"
// Both in shared memory; the places of a, b, add and of what is transposed follow those of c.
#define FASTBERT_SHARED(columns, type, pa, pb, padd, pta, ptb)                 \
    asm volatile(FASTBERT_WGMMA(columns, type, pa ", " pb, padd, pta ", " ptb) \
                 : FASTBERT_SUMS_##columns                                     \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposedA), "n"(kTransposedB))
// a in registers
#define FASTBERT_HELD(columns, type, pa, pb, padd, ptb)                                            \
    asm volatile(FASTBERT_WGMMA(columns, type, "{" pa "}, " pb, padd, ptb)                         \
                 : FASTBERT_SUMS_##columns                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), \
                   "n"(kTransposedB))
#define FASTBERT_ONE_TYPE(macro, columns, ...)    \
    if constexpr (std::is_same<T, bf16>::value) { \
        macro(columns, "bf16", __VA_ARGS__);      \
    } else {                                      \
        macro(columns, "f16", __VA_ARGS__);       \
    }

template <class T, int kTransposedA = 0, int kTransposedB = 0, int kSums>
__device__ __forceinline__ void group_product(float (&c)[kSums], std::uint64_t a, std::uint64_t b, bool add) {
    static_assert(kSums == 32 || kSums == 64 || kSums == 96, "64, 128 or 192 columns");
    if constexpr (kSums == 32) {
        FASTBERT_ONE_TYPE(FASTBERT_SHARED, 64, "%32", "%33", "%34", "%35", "%36");
    } else if constexpr (kSums == 64) {
        FASTBERT_ONE_TYPE(FASTBERT_SHARED, 128, "%64", "%65", "%66", "%67", "%68");
    } else {
        FASTBERT_ONE_TYPE(FASTBERT_SHARED, 192, "%96", "%97", "%98", "%99", "%100");
    }
}
template <class T, int kTransposedB = 0, int kSums>
__device__ __forceinline__ void group_product(float (&c)[kSums], const std::uint32_t (&a)[4], std::uint64_t b,
                                              bool add) {
    static_assert(kSums == 32 || kSums == 64 || kSums == 96, "64, 128 or 192 columns");
    if constexpr (kSums == 32) {
        FASTBERT_ONE_TYPE(FASTBERT_HELD, 64, "%32, %33, %34, %35", "%36", "%37", "%38");
    } else if constexpr (kSums == 64) {
        FASTBERT_ONE_TYPE(FASTBERT_HELD, 128, "%64, %65, %66, %67", "%68", "%69", "%70");
    } else {
        FASTBERT_ONE_TYPE(FASTBERT_HELD, 192, "%96, %97, %98, %99", "%100", "%101", "%102");
    }
}
#undef FASTBERT_ONE_TYPE
#undef FASTBERT_HELD
#undef FASTBERT_SHARED
#undef FASTBERT_WGMMA
#undef FASTBERT_NAMES_192
#undef FASTBERT_NAMES_128
#undef FASTBERT_NAMES_64
#undef FASTBERT_SUMS_192
#undef FASTBERT_SUMS_128
#undef FASTBERT_SUMS_64
#undef FASTBERT_EIGHT

}  // namespace cuda
}  // namespace fastbert
