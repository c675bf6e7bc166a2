// What attention's kernels share: the place of a slot, tiles in shared memory, dropout bits of a tile.
#pragma once

#include "attention.h"
#include "tensor_core.cuh"

namespace fastbert {
namespace cuda {

// Rows of a tile of queries, and of one of keys.
constexpr int kTileRows = 64;

// --- the sequence and tile of a slot of the grid ---

// The host does not know the lengths, so it cuts a grid that suffices for any: sequence b begins at slot
// cu_seqlens[b] / rows + b, and has as many slots as tiles of so many rows, or one more.
inline std::int64_t slots(std::int64_t total, std::int64_t batch, int rows = kTileRows) {
    return total / rows + batch + 1;
}

// The most blocks along an axis of the grid other than the first.
constexpr std::int64_t kMostOnAxis = 65535;

// One head and slot per block; the heads of a slot run side by side. The last plane may have slots too many.
inline dim3 slot_grid(std::int64_t nheads, std::int64_t count) {
    const std::int64_t planes = (count + kMostOnAxis - 1) / kMostOnAxis;
    return dim3(static_cast<unsigned>(nheads), static_cast<unsigned>((count + planes - 1) / planes),
                static_cast<unsigned>(planes));
}

struct Place {
    int sequence;   // `batch`: the rows after the last sequence
    int start;      // its first packed row
    int length;     // its rows
    int first_row;  // of the tile, in the sequence; at or past the length: nothing to do
};

// Every warp searches for itself, 32 sequences at a time: two rounds for up to 1,024 sequences. Within a
// sequence the last tile comes first: with a causal mask it has the most keys.
template <int kRows = kTileRows>
__device__ __forceinline__ Place find_place(const std::int32_t* cu_seqlens, int batch, int total) {
    const int slot = static_cast<int>(blockIdx.y + blockIdx.z * gridDim.y);
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    int found = 0, left = batch + 1;
    while (left > 1) {
        const int step = (left + kWarp - 1) / kWarp;
        const int at = lane * step;
        const bool reached = at < left && cu_seqlens[found + at] / kRows + found + at <= slot;
        // Those reached come first, lane 0 among them.
        const int before = __popc(__ballot_sync(kAllLanes, reached) >> 1) * step;
        found += before;
        left = left - before < step ? left - before : step;
    }
    const int start = cu_seqlens[found];
    const int length = (found < batch ? cu_seqlens[found + 1] : total) - start;
    int tile = slot - (start / kRows + found);
    if (found < batch) tile = (length + kRows - 1) / kRows - 1 - tile;
    // A slot too many has tile -1.
    return {found, start, length, tile >= 0 ? tile * kRows : length};
}

// A number that all lanes of a warp have, which ptxas then knows, and keeps in a register of the warp's.
__device__ __forceinline__ int of_warp(int x) { return __shfl_sync(kAllLanes, x, 0); }

// --- windows and shared heads ---

// Whether a call has a window that is not a causal mask, or heads of q that share one of k and v.
inline bool is_local(const Attention& args) {
    return args.kv_heads != args.nheads || args.window.left >= 0 || args.window.right > 0;
}

// Likewise, or a causal mask.
inline bool is_masked(const Attention& args) { return args.causal || is_local(args); }

// The head of k and v that a head of q reads.
__device__ __forceinline__ int kv_head_of(const Attention& args, int head) {
    return head / (static_cast<int>(args.nheads) / static_cast<int>(args.kv_heads));
}

// How far a window reaches in a sequence. A side without a limit reaches over all of it.
struct Reach {
    int left, right, length;

    __device__ __forceinline__ Reach(const Window& window, int length)
        : left(within(window.left, length)), right(within(window.right, length)), length(length) {}
    static __device__ __forceinline__ int within(std::int64_t side, int length) {
        return side < 0 || side > length ? length : static_cast<int>(side);
    }
    // The first key that a row sees, and the one after its last.
    __device__ __forceinline__ int first_key(int row) const { return row > left ? row - left : 0; }
    __device__ __forceinline__ int end_key(int row) const {
        return row + right < length ? row + right + 1 : length;
    }
    __device__ __forceinline__ bool sees(int row, int key) const {
        return key >= first_key(row) && key < end_key(row);
    }
};

// --- copies of tiles ---

// This thread's part of the copies of tiles of 64 rows, one tile after the other.
template <class T, int kHeadDim, int kThreads>
struct TileCopies {
    static constexpr int kChunks = kHeadDim / kPack<T>;
    static constexpr int kRowsAtOnce = kThreads / kChunks;
    static_assert(kThreads % kChunks == 0 && kTileRows % kRowsAtOnce == 0, "whole rows at a time");
    // So chunk_of orders the chunks of all rows of a thread alike.
    static_assert(kRowsAtOnce % 8 == 0, "the order of chunks repeats after 8 rows");

    const char* from;
    std::int64_t step;
    // Rows of the tensor from the next tile on.
    int left;

    // rows: row 0 of (`end`, kHeadDim); the first tile begins at row `first`.
    __device__ __forceinline__ TileCopies(const T* rows, std::int64_t stride, int first, int end)
        : from(reinterpret_cast<const char*>(rows + (first + row()) * stride + chunk() * kPack<T>)),
          step(kRowsAtOnce * stride * static_cast<std::int64_t>(sizeof(T))),
          left(end - first) {}

    static __device__ __forceinline__ int row() { return static_cast<int>(threadIdx.x) % kThreads / kChunks; }
    static __device__ __forceinline__ int chunk() { return static_cast<int>(threadIdx.x) % kChunks; }

    // The next tile; zeros from the tensor's end on, whose memory is not read.
    __device__ __forceinline__ void next(char* tile) {
        constexpr int kCopies = kTileRows / kRowsAtOnce;
        constexpr int kStep = kRowsAtOnce * kHeadDim * static_cast<int>(sizeof(T));
        char* to = tile + chunk_of<T, kHeadDim>(row(), chunk()) * static_cast<int>(sizeof(T));
        if (left >= kTileRows) {
#pragma unroll
            for (int i = 0; i < kCopies; ++i, from += step) copy_chunk(to + i * kStep, from, true);
        } else {
#pragma unroll
            for (int i = 0; i < kCopies; ++i, from += step)
                copy_chunk(to + i * kStep, from, row() + i * kRowsAtOnce < left);
        }
        left -= kTileRows;
    }
};

// Where this lane's row of load_matrices begins, in bytes from the start of a tile: matrices 0 and 1, or with
// `across` 0 and 2, are rows 0 to 7 and 8 to 15 of chunk 0; the other two are those of chunk 1. `^ 32 * i`
// gives chunks 2 i and 2 i + 1; 16 rows further down are 16 whole rows further.
template <class T, int kHeadDim>
__device__ __forceinline__ int matrix_row(bool across) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, second = lane / 8 % 2, upper = lane / 16;
    return chunk_of<T, kHeadDim>(lane % 8 + 8 * (across ? upper : second), across ? second : upper) *
           static_cast<int>(sizeof(T));
}

// --- dropout: the bits of 16 rows and 64 keys, by one warp ---

// prmt: byte i of the result is byte s_i of (b, a), s_i the low three bits of nibble i of `selector`; with
// the nibble's highest bit, eight times that byte's highest bit.
__device__ __forceinline__ std::uint32_t permute_bytes(std::uint32_t a, std::uint32_t b,
                                                       std::uint32_t selector) {
    std::uint32_t out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
    return out;
}

// A 16-bit threshold in both halves of a word, as `kept_lanes` compares with it.
struct LaneThreshold {
    std::uint32_t low15, below_half;  // below_half: all ones if the threshold is below 2^15
};
__device__ __forceinline__ LaneThreshold lane_threshold(std::uint32_t threshold) {
    const std::uint32_t low = threshold >> 16 & 0x7fff;
    return {low | low << 16, threshold >> 31 ? 0u : 0xffffffffu};
}

// Bits 15 and 31: whether that half of `word` is at least the threshold. The highest bits are compared apart,
// so no half borrows from the other.
__device__ __forceinline__ std::uint32_t kept_lanes(std::uint32_t word, LaneThreshold t) {
    const std::uint32_t low = (word | 0x80008000u) - t.low15;
    return (word & low) | (t.below_half & (word | low));
}

// The eight decisions of one call of Philox in the highest byte: its bit i says whether column i is kept.
__device__ __forceinline__ std::uint32_t kept_columns(const Philox& bits, LaneThreshold t) {
    // The highest bits of the four halves of two words, each as a byte 0 or 255.
    const std::uint32_t low = permute_bytes(kept_lanes(bits.word[0], t), kept_lanes(bits.word[1], t), 0xfdb9);
    const std::uint32_t high =
        permute_bytes(kept_lanes(bits.word[2], t), kept_lanes(bits.word[3], t), 0xfdb9);
    // The product's highest byte is the sum of all four.
    return ((low & 0x08040201u) | (high & 0x80402010u)) * 0x01010101u;
}

// Keep bits of the C fragments of 16 rows and 64 keys. Lane 4 g + p draws rows g and g + 8, of each the
// groups of eight columns p and p + 4: byte 2 r + h of its word is (row g + 8 r, group p + 4 h).
__device__ __forceinline__ std::uint32_t draw_keep_bytes(std::uint64_t seed, std::uint32_t offset,
                                                         std::uint32_t plane, std::uint32_t first_row,
                                                         std::uint32_t first_key, LaneThreshold t) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const std::uint32_t row = first_row + lane / 4, group = first_key / 8 + lane % 4;
    std::uint32_t parts[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        parts[i] = kept_columns(philox(seed, group + 4 * (i % 2), row + 8 * (i / 2), plane, offset), t);
    return permute_bytes(permute_bytes(parts[0], parts[1], 0x73), permute_bytes(parts[2], parts[3], 0x73),
                         0x5410);
}

// The saved form: lane 4 g + p gets the word of row g + 8 (p / 2) with keys 32 (p % 2) … + 31.
__device__ __forceinline__ std::uint32_t keep_word(std::uint32_t keep_bytes) {
    // Four lanes exchange bytes i of lane j and j of lane i, first by the low bits of i and j.
    const int lane = static_cast<int>(threadIdx.x) % 4;
    const std::uint32_t once =
        permute_bytes(keep_bytes, __shfl_xor_sync(kAllLanes, keep_bytes, 1), lane % 2 == 0 ? 0x6240 : 0x3715);
    return permute_bytes(once, __shfl_xor_sync(kAllLanes, once, 2), lane / 2 == 0 ? 0x5410 : 0x3276);
}

// The bytes of draw_keep_bytes of the saved words: the exchange is its own inverse.
__device__ __forceinline__ std::uint32_t keep_bytes_of(std::uint32_t word) { return keep_word(word); }

// Masks of the words of a packed C fragment (two neighbours of a row): 0xffff where kept.
struct KeepMasks {
    std::uint32_t low[4], high[4];  // per lane of four: the left element's bits at 8 i + 7; the right one's

    __device__ __forceinline__ explicit KeepMasks(std::uint32_t keep_bytes) {
        const int lane = static_cast<int>(threadIdx.x) % kWarp, pair = lane % 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const std::uint32_t bytes = __shfl_sync(kAllLanes, keep_bytes, lane - pair + i);
            low[i] = bytes << (7 - 2 * pair);
            high[i] = bytes << (6 - 2 * pair);
        }
    }
    // Group `group` of eight columns, 0 to 7, of row g + 8 * half.
    __device__ __forceinline__ std::uint32_t of(int group, int half) const {
        const int byte = 2 * half + group / 4;
        return permute_bytes(low[group % 4], high[group % 4], 0xcc88u + 0x1111u * byte);
    }
};

}  // namespace cuda
}  // namespace fastbert
