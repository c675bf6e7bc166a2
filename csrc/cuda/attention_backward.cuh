// What the kernels of attention's backward share: their places, tiles in shared memory, products of a warp,
// dropout's bits, the store of a tile. Mathematics and tiling: attention_backward.cu.
#pragma once

#include "attention_backward.h"
#include "attention_tiles.cuh"

namespace fastbert {
namespace cuda {

constexpr int kBackwardWarps = 4;
constexpr int kBackwardThreads = kBackwardWarps * kWarp;
// Rows that a block owns: 16 per warp.
constexpr int kOwned = 16 * kBackwardWarps;
// Columns of a product at a time: a word of dropout's bits.
constexpr int kColumns = 32;
// Products of 8 columns among them.
constexpr int kProducts = kColumns / 8;
constexpr float kLog2E = 1.4426950408889634f;

// --- which rows a block owns ---

// `first` is the first row in the sequence. Of the rows after the last sequence: sequence = batch, `start` is
// where they begin, `length` the rows from one of the block's tiles to the next, `first` its first row.
struct OwnedRows {
    int sequence, start, length, first;
};

// heads: blocks per slot. They run side by side.
__device__ __forceinline__ OwnedRows owned_rows(const CudaAttentionBwd& args, std::int64_t heads) {
    const std::int64_t slot = blockIdx.x / static_cast<unsigned>(heads);
    if (args.places != nullptr) {
        const std::int32_t* place = args.places + 4 * slot;
        return {place[0], place[1], place[2], place[3]};
    }
    const std::int64_t tiles = (args.max_seqlen + kOwned - 1) / kOwned, sequences = args.batch * tiles;
    if (slot >= sequences)
        return {static_cast<int>(args.batch), args.cu_seqlens[args.batch],
                static_cast<int>(args.slots - sequences) * kOwned,
                static_cast<int>(slot - sequences) * kOwned};
    const int sequence = static_cast<int>(slot / tiles), start = args.cu_seqlens[sequence];
    // The last tile comes first: with a causal mask it has the most keys.
    return {sequence, start, args.cu_seqlens[sequence + 1] - start,
            static_cast<int>(tiles - 1 - slot % tiles) * kOwned};
}

// Row `row` of a head.
template <class T>
__device__ __forceinline__ const T* row_of(const Heads& heads, std::int64_t head, std::int64_t row) {
    return static_cast<const T*>(heads.data) + row * heads.row_stride + head * heads.head_stride;
}

// Zeros in one head's rows [first, end) of a contiguous (total, nheads, kD) tensor.
template <class T, int kD>
__device__ __forceinline__ void zero_rows(T* out, std::int64_t row_stride, std::int64_t first,
                                          std::int64_t end) {
    constexpr int kChunks = kD / kPack<T>;
    const float zeros[kPack<T>] = {};
    for (int i = static_cast<int>(threadIdx.x); i < kOwned * kChunks; i += kBackwardThreads)
        if (first + i / kChunks < end)
            store_pack(out + (first + i / kChunks) * row_stride + i % kChunks * kPack<T>, zeros);
}

// --- tiles in shared memory: rows of kD elements ---

// Starts to copy rows [first, first + kRows) of a sequence whose row 0 is at `rows`; zeros from row `length`.
template <class T, int kD, int kRows>
__device__ __forceinline__ void copy_rows(T* tile, const T* rows, std::int64_t stride, int first,
                                          int length) {
    constexpr int kChunks = kD / kPack<T>;
    static_assert(kRows * kChunks % kBackwardThreads == 0, "as many chunks for every thread");
    const int thread = static_cast<int>(threadIdx.x);
    const int chunk = thread % kChunks, row = thread / kChunks;
    const T* from = rows + (static_cast<std::int64_t>(first) + row) * stride + chunk * kPack<T>;
    const int left = length - first;
#pragma unroll
    for (int i = 0; i < kRows; i += kBackwardThreads / kChunks) {
        const bool inside = row + i < left;
        copy_chunk(tile + chunk_of<T, kD>(row + i, chunk), inside ? from : rows, inside);
        from += stride * (kBackwardThreads / kChunks);
    }
}

// The words of A: rows `row` to row + 15, columns 16 step to 16 step + 15 of a tile.
template <class T, int kD>
__device__ __forceinline__ void load_left(std::uint32_t (&a)[4], const T* tile, int row, int step) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    load_matrices(a, tile + chunk_of<T, kD>(row + lane % 16, 2 * step + lane / 16));
}

// c += a bᵀ: a holds all kD columns of the warp's 16 rows, b is kColumns rows of a tile, from `row` on.
// kUnroll: steps of 16 columns whose loads may be made ahead, in registers.
template <class T, int kD, int kUnroll = kD / 16, class Left>
__device__ __forceinline__ void multiply_rows(float (&c)[kProducts][4], const Left& left, const T* tile,
                                              int row) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll kUnroll
    for (int step = 0; step < kD / 16; ++step) {
        std::uint32_t a[4];
        left(a, step);
#pragma unroll
        for (int pair = 0; pair < kProducts / 2; ++pair) {
            std::uint32_t words[4];
            load_matrices(words, tile + chunk_of<T, kD>(row + 16 * pair + lane / 16 * 8 + lane % 8,
                                                        2 * step + lane / 8 % 2));
            const std::uint32_t low[2] = {words[0], words[1]}, high[2] = {words[2], words[3]};
            mma<T>(c[2 * pair], a, low);
            mma<T>(c[2 * pair + 1], a, high);
        }
    }
}

// c += a b: a is (16, kColumns), as products left it and rounded to T; b is kColumns rows of a tile, from
// `row` on.
template <class T, int kD>
__device__ __forceinline__ void multiply_columns(float (&c)[kD / 8][4],
                                                 const std::uint32_t (&a)[kColumns / 16][4], const T* tile,
                                                 int row) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int step = 0; step < kColumns / 16; ++step) {
#pragma unroll
        for (int pair = 0; pair < kD / 16; ++pair) {
            std::uint32_t words[4];
            load_matrices_transposed(
                words, tile + chunk_of<T, kD>(row + 16 * step + lane % 16, 2 * pair + lane / 16));
            const std::uint32_t low[2] = {words[0], words[1]}, high[2] = {words[2], words[3]};
            mma<T>(c[2 * pair], a[step], low);
            mma<T>(c[2 * pair + 1], a[step], high);
        }
    }
}

// A product's (16, kColumns), rounded, as the left operand of the next one.
template <class T>
__device__ __forceinline__ void as_left(std::uint32_t (&a)[kColumns / 16][4],
                                        const float (&c)[kProducts][4]) {
#pragma unroll
    for (int n = 0; n < kProducts; ++n) {
        a[n / 2][n % 2 * 2] = pack_pair<T>(c[n][0], c[n][1]);
        a[n / 2][n % 2 * 2 + 1] = pack_pair<T>(c[n][2], c[n][3]);
    }
}

// The sum over the four lanes that share a row.
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(kAllLanes, x, 1);
    return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// Stores the warp's 16 rows of c, those of the upper half times factor[0], of the lower half times
// factor[1]. They go through `stage`, the warp's own (16, kD) of shared memory. out: row 0 of the sequence.
template <class T, int kD>
__device__ __forceinline__ void store_rows(T* out, std::int64_t row_stride, const float (&c)[kD / 8][4],
                                           const float (&factor)[2], T* stage, int first, int length) {
    constexpr int kChunks = kD / kPack<T>;
    const int lane = static_cast<int>(threadIdx.x) % kWarp, group = lane / 4, pair = lane % 4;
#pragma unroll
    for (int n = 0; n < kD / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            T* at = stage + chunk_of<T, kD>(group + 8 * half, n) + 2 * pair;
            *reinterpret_cast<std::uint32_t*>(at) =
                pack_pair<T>(c[n][2 * half] * factor[half], c[n][2 * half + 1] * factor[half]);
        }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16 * kChunks; i += kWarp) {
        const int row = (i + lane) / kChunks, chunk = (i + lane) % kChunks;
        if (row < length - first)
            *reinterpret_cast<Pack<T>*>(out + (static_cast<std::int64_t>(first) + row) * row_stride +
                                        chunk * kPack<T>) = load_pack(stage + chunk_of<T, kD>(row, chunk));
    }
    // The stage may be written again.
    __syncwarp();
}

// --- dropout's bits: a word per row and 32 columns of a tile, word 0 of all rows first; bit i of word w is
// column 32 w + i of the tile ---

// Draws the bits of rows `row` … of a sequence, of columns `column` …. A barrier makes them visible.
template <int kRows, int kWidth>
__device__ __forceinline__ void draw_bits(std::uint32_t* bits, const CudaAttentionBwd& args,
                                          std::int64_t head, const OwnedRows& place, int row, int column) {
    const int thread = static_cast<int>(threadIdx.x);
    const std::int64_t first_row = static_cast<std::int64_t>(place.start) + row;
    const std::uint64_t seed = *args.dropout.seed;
    static_assert(kWidth / 8 * kRows % kBackwardThreads == 0, "as many calls for every thread");
    // Eight columns per call of Philox: a byte of a word.
#pragma unroll 1
    for (int i = 0; i < kWidth / 8 * kRows; i += kBackwardThreads) {
        const int group = (i + thread) % (kWidth / 8), drawn_row = (i + thread) / (kWidth / 8);
        const Philox drawn = philox(seed, static_cast<std::uint32_t>(column / 8 + group),
                                    static_cast<std::uint32_t>(first_row + drawn_row),
                                    static_cast<std::uint32_t>(head), args.dropout.offset);
        unsigned byte = 0;
#pragma unroll
        for (int lane = 0; lane < 8; ++lane)
            byte |=
                static_cast<unsigned>(kept_lane(drawn.word[lane / 2], lane % 2 != 0, args.dropout.threshold))
                << lane;
        reinterpret_cast<unsigned char*>(bits + group / 4 * kRows + drawn_row)[group % 4] =
            static_cast<unsigned char>(byte);
    }
}

// Brings the bits of rows `row` … of a sequence, of columns `column` …, into shared memory: copied by the
// asynchronous copies, or drawn. A barrier makes them visible.
template <int kRows, int kWidth>
__device__ __forceinline__ void bring_bits(std::uint32_t* bits, const CudaAttentionBwd& args,
                                           std::int64_t head, const OwnedRows& place, int row, int column) {
    if (args.keep_bits == nullptr) return draw_bits<kRows, kWidth>(bits, args, head, place, row, column);
    const int thread = static_cast<int>(threadIdx.x);
    const std::int64_t first_row = static_cast<std::int64_t>(place.start) + row;
    const std::int64_t words = (args.max_seqlen + 31) / 32, word = column / 32;
    const std::int32_t* from = args.keep_bits + (head * args.total + first_row) * words + word;
    // Trips that the compiler can count: a loop that begins at the thread is unrolled with a rest.
#pragma unroll
    for (int i = 0; i < kWidth / 32 * kRows; i += kBackwardThreads) {
        const int at = i + thread, at_row = at % kRows, at_word = at / kRows;
        const bool inside = at_row < place.length - row && word + at_word < words;
        if (at < kWidth / 32 * kRows)
            copy_word(bits + at, inside ? from + at_row * words + at_word : args.keep_bits, inside);
    }
}

// --- launching ---

// A grid of that many blocks, or of none where CUDA has no such grid: the launch then fails with an error.
inline dim3 grid_of(std::int64_t blocks) {
    return dim3(blocks < std::int64_t{1} << 31 ? static_cast<unsigned>(blocks) : 0);
}

// One file each. dbias is launched over its own grid.
const char* launch_dq(const CudaAttentionBwd& args, std::uintptr_t stream);
const char* launch_dkdv(const CudaAttentionBwd& args, std::uintptr_t stream);
const char* launch_dbias(const CudaAttentionBwd& args, std::uintptr_t stream);

// Calls launch<T, kD>(args, stream) for the dtype and the head dimension.
#define FASTBERT_BY_HEADDIM(launch, args, stream)                                            \
    const bool half = args.dtype == DType::kFloat16;                                         \
    switch (args.headdim) {                                                                  \
        case 32:                                                                             \
            return half ? launch<fp16, 32>(args, stream) : launch<bf16, 32>(args, stream);   \
        case 64:                                                                             \
            return half ? launch<fp16, 64>(args, stream) : launch<bf16, 64>(args, stream);   \
        default:                                                                             \
            return half ? launch<fp16, 128>(args, stream) : launch<bf16, 128>(args, stream); \
    }

}  // namespace cuda
}  // namespace fastbert
