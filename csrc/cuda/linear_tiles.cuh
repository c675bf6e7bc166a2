// A product of 16-bit matrices with bias, activation and residual, or with an activation's derivative.
//
// Math       c = act(a b + bias) + residual, or c = (a b) act'(slope_at) with the sums of its columns. With a
//            gate [y, z] = a b + bias are the activated columns and their partners: c = act(y) z + residual.
// Tiling     A block of 4 warps owns kTileRows x 128 of c and a part of the depth. Tiles of 128 rows: a warp
//            has 64 x 64, steps of depth 32, 3 slots. Fewer rows: kTileRows x 32, depth 64, 4 slots, or kDeep
//            where a block has a multiprocessor to itself: what it waits for is the weight, and twice as much
//            of it is under way. A block goes down 8 row tiles before it takes the next column tile, so that
//            its inputs stay in the L2. With a gate the first half of a warp's columns are activated ones and
//            the second half their partners, so a lane holds both.
// Pipeline   cp.async fills the ring's slots two or three steps ahead; ldmatrix reads the fragments of one
//            step of 16 while the products of the previous step run. One barrier per slot. Copies behind the
//            end write zeros, so that the loop has no branch.
// Precision  float accumulators that begin with the bias; one rounding per store.
// Saved      pre, where backward asks for it; the activation reads it before the rounding.
// Epilogue   A warp's part of c goes through its own part of the ring, for stores of 16 bytes per lane. What
//            is added or read there (residual, slope_at) comes the same way.
// Source     Hendrycks and Gimpel 2016, Gaussian Error Linear Units; PTX ISA, mma.m16n8k16.
#pragma once

#include "activation.cuh"

namespace fastbert {
namespace cuda {

constexpr int kProductThreads = 128;
constexpr int kTileColumns = 128;
// Elements of a chunk of 16 bytes
constexpr int kChunk = 8;
// Row tiles before the next column tile
constexpr int kGroup = 8;

template <int kTileRows>
struct Tile {
    static constexpr bool kLarge = kTileRows == 128;
    static constexpr int kWarpRows = kLarge ? 64 : kTileRows;
    static constexpr int kWarpColumns = kLarge ? 64 : 32;
    static constexpr int kWarpsAcross = kTileColumns / kWarpColumns;
    static constexpr int kDepth = kLarge ? 32 : 64;
    static constexpr int kSlots = kLarge ? 3 : 4;
    static constexpr int kSlot = (kTileRows + kTileColumns) * kDepth;  // elements
    // What compute capability 8.0, 9.0 and 10.x have for a block
    static constexpr int kDeep = 163 * 1024 / (kSlot * 2);
    static_assert(kTileRows * kTileColumns <= kSlots * kSlot, "the epilogue fits into the ring");
};

// One operand's tile of kLines rows of a (columns of b) and kDepth of the depth. In shared memory a row is a
// line, or with kTurned a step of depth. Copies lines that exist; after the last one it copies that again,
// and nothing of it is stored. `line_of` maps a line of the tile to one of the operand; chunks of turned
// lines stay together.
template <class T, int kLines, int kDepth, bool kTurned>
struct Operand {
    static constexpr int kColumns = kTurned ? kLines : kDepth;
    static constexpr int kChunks = kColumns / kChunk;
    static constexpr int kRowsAtOnce = kProductThreads / kChunks;
    static constexpr int kCopies = (kTurned ? kDepth : kLines) / kRowsAtOnce;
    static_assert(kRowsAtOnce % 8 == 0 && kCopies > 0, "the chunks' order has a period of 8 rows");

    const T* from[kCopies];
    std::int64_t step;
    int at, depth;  // where this thread's first chunk goes, and its depth within the tile

    template <class LineOf>
    __device__ __forceinline__ Operand(const void* data, std::int64_t stride, int first_depth,
                                       LineOf line_of) {
        const int thread = static_cast<int>(threadIdx.x);
        const int row = thread / kChunks, chunk = thread % kChunks;
        at = chunk_of<T, kColumns>(row, chunk);
        depth = kTurned ? row : chunk * kChunk;
        step = kTurned ? kDepth * stride : kDepth;
        const T* const start = static_cast<const T*>(data) + (kTurned ? first_depth * stride : first_depth);
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            const int own = row + i * kRowsAtOnce;
            if (kTurned)
                from[i] = start + own * stride + line_of(chunk * kChunk);
            else
                from[i] = start + line_of(own) * stride + depth;
        }
    }

    // The next tile; `left`: how much of the depth is left from its start on.
    __device__ __forceinline__ void copy(T* tile, int left) {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            const bool inside = depth + (kTurned ? i * kRowsAtOnce : 0) < left;
            copy_chunk(tile + at + i * kRowsAtOnce * kColumns, from[i], inside);
            from[i] += step;
        }
    }

    // 16 lines from `line` on by 16 of the depth, as ldmatrix returns them. In words: 8 lines more is 1 and 8
    // of depth more is 2; the other way around for b.
    template <bool kDepthFirst>
    static __device__ __forceinline__ void load(std::uint32_t (&words)[4], const T* tile, int line, int k) {
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
        const int first = lane % 8, second = lane / 8 % 2 * 8, third = lane / 16 * 8;
        const int own_line = kDepthFirst ? third : second, own_depth = kDepthFirst ? second : third;
        if (kTurned) {
            const int chunk = (line + own_line) / kChunk;
            load_matrices_transposed(words,
                                     tile + k * kColumns + chunk_of<T, kColumns>(own_depth + first, chunk));
        } else {
            const int chunk = (k + own_depth) / kChunk;
            load_matrices(words, tile + line * kColumns + chunk_of<T, kColumns>(own_line + first, chunk));
        }
    }
};

// --- rows of 8 elements between global memory and a warp's part of the ring ---

// Where rows are no 16-byte chunks: elements from `columns` on are left out, or 0.
template <class T>
__device__ __forceinline__ void store_elements(T* row, int column, int columns, const Pack<T>& pack) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
        if (column + i < columns) row[column + i] = pack.item[i];
}
template <class T>
__device__ __forceinline__ Pack<T> load_elements(const T* row, int column, int columns) {
    Pack<T> pack = {};
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
        if (column + i < columns) pack.item[i] = row[column + i];
    return pack;
}

inline bool whole_chunks(const void* data, std::int64_t stride, std::int64_t columns) {
    return aligned(data) && stride % kChunk == 0 && columns % kChunk == 0;
}

// The epilogue's matrices, from the host.
struct Whole {
    bool c, pre, residual, slope_at;
};
inline Whole whole_of(const LinearProduct& args) {
    // of pre also each half
    return {whole_chunks(args.c, args.columns, args.columns),
            whole_chunks(args.pre, args.columns, args.columns),
            whole_chunks(args.residual, args.residual_stride, args.columns),
            whole_chunks(args.slope_at, args.columns, args.columns)};
}

struct alignas(8) Two {
    float low, high;
};

// A warp's part of c, kRows x kColumns: where it is, and its accumulators.
template <class T, int kRows, int kColumns>
struct WarpTile {
    static constexpr int kBlocksDown = kRows / 16, kBlocksAcross = kColumns / 8;
    static constexpr int kChunks = kColumns / kChunk;
    static constexpr int kRowsAtOnce = kWarp / kChunks, kPasses = kRows / kRowsAtOnce;

    // A lane's chunks of the part: one per pass
    struct Walk {
        int row, column;  // of the first in c
        __device__ __forceinline__ explicit Walk(const WarpTile& tile)
            : row(tile.row + lane() / kChunks), column(tile.column + lane() % kChunks * kChunk) {}
        static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
        static __device__ __forceinline__ int at(int pass) {
            return chunk_of<T, kColumns>(pass * kRowsAtOnce + lane() / kChunks, lane() % kChunks);
        }
    };

    float acc[kBlocksDown][kBlocksAcross][4];
    int row, column;    // of its first element in c
    int rows, columns;  // of c

    // visit(word of two neighbours, where they are in the part) for every pair
    template <class Visit>
    __device__ __forceinline__ void pairs(Visit visit) {
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
        const int group = lane / 4, pair = lane % 4;
#pragma unroll
        for (int i = 0; i < kBlocksDown; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int j = 0; j < kBlocksAcross; ++j) {
                    const int at =
                        (16 * i + 8 * half) * kColumns + chunk_of<T, kColumns>(group, j) + 2 * pair;
                    visit(acc[i][j][2 * half], acc[i][j][2 * half + 1], at);
                }
    }

    template <class F>
    __device__ __forceinline__ void apply(F f) {
#pragma unroll
        for (int i = 0; i < kBlocksDown; ++i)
#pragma unroll
            for (int j = 0; j < kBlocksAcross; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[i][j][e] = f(acc[i][j][e]);
    }

    // acc, rounded, to rows `stride` apart
    __device__ __forceinline__ void store(T* shared, void* to, std::int64_t stride, bool whole) {
        pairs([&](float low, float high, int at) {
            *reinterpret_cast<std::uint32_t*>(shared + at) = pack_pair<T>(low, high);
        });
        __syncwarp();
        const Walk walk(*this);
        T* line = static_cast<T*>(to) + static_cast<std::int64_t>(walk.row) * stride;
        if (whole && walk.column < columns) {
            line += walk.column;
#pragma unroll
            for (int i = 0; i < kPasses; ++i, line += kRowsAtOnce * stride)
                if (walk.row + i * kRowsAtOnce < rows)
                    *reinterpret_cast<Pack<T>*>(line) = load_pack(shared + walk.at(i));
        } else if (!whole) {
#pragma unroll 1
            for (int i = 0; i < kPasses; ++i, line += kRowsAtOnce * stride)
                if (walk.row + i * kRowsAtOnce < rows)
                    store_elements(line, walk.column, columns, load_pack(shared + walk.at(i)));
        }
        // The part may be written again.
        __syncwarp();
    }

    // Another matrix's elements into the part; 0 where there are none.
    __device__ __forceinline__ void load(T* shared, const void* from, std::int64_t stride, bool whole) {
        const Walk walk(*this);
        const T* line = static_cast<const T*>(from) + static_cast<std::int64_t>(walk.row) * stride;
        if (whole) {
#pragma unroll 8
            for (int i = 0; i < kPasses; ++i, line += kRowsAtOnce * stride) {
                Pack<T> pack = {};
                if (walk.row + i * kRowsAtOnce < rows && walk.column < columns)
                    pack = load_pack(line + walk.column);
                *reinterpret_cast<Pack<T>*>(shared + walk.at(i)) = pack;
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < kPasses; ++i, line += kRowsAtOnce * stride) {
                Pack<T> pack = {};
                if (walk.row + i * kRowsAtOnce < rows) pack = load_elements(line, walk.column, columns);
                *reinterpret_cast<Pack<T>*>(shared + walk.at(i)) = pack;
            }
        }
        __syncwarp();
    }

    // Another matrix's elements to acc
    __device__ __forceinline__ void add(T* shared, const void* from, std::int64_t stride, bool whole) {
        load(shared, from, stride, whole);
        pairs([&](float& low, float& high, int at) {
            float first, second;
            unpack_pair<T>(*reinterpret_cast<const std::uint32_t*>(shared + at), first, second);
            low += first;
            high += second;
        });
    }

    // The sums of acc's columns over the rows that c has
    __device__ __forceinline__ void sum_columns(float* sums) {
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
        for (int j = 0; j < kBlocksAcross; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < kBlocksDown; ++i) sum += acc[i][j][e] + acc[i][j][e + 2];
#pragma unroll
                for (int other = 4; other < kWarp; other *= 2) sum += __shfl_xor_sync(kAllLanes, sum, other);
                const int own = column + 8 * j + 2 * (lane % 4) + e;
                if (lane < 4 && own < columns && row < rows)
                    sums[static_cast<std::int64_t>(row / 64) * columns + own] = sum;
            }
    }

    // Rows that c does not have were copies of its last one.
    __device__ __forceinline__ void clear_rows_behind() {
        if (row + kRows <= rows) return;
        const int group = static_cast<int>(threadIdx.x) % kWarp / 4;
#pragma unroll
        for (int i = 0; i < kBlocksDown; ++i)
#pragma unroll
            for (int j = 0; j < kBlocksAcross; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (row + 16 * i + group + e / 2 * 8 >= rows) acc[i][j][e] = 0.0f;
    }

    // Rows of a part are `stride` apart; columns up to a multiple of 8
    __device__ __forceinline__ void store_partial(float* partial, std::int64_t stride) {
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
        const int whole = (columns + kChunk - 1) / kChunk * kChunk;
        float* const own = partial + (static_cast<std::int64_t>(blockIdx.y) * rows + row) * stride;
#pragma unroll
        for (int i = 0; i < kBlocksDown; ++i)
#pragma unroll
            for (int j = 0; j < kBlocksAcross; ++j)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int down = 16 * i + lane / 4 + 8 * half, across = column + 8 * j + 2 * (lane % 4);
                    if (row + down < rows && across < whole)
                        *reinterpret_cast<Two*>(own + down * stride + across) = {acc[i][j][2 * half],
                                                                                 acc[i][j][2 * half + 1]};
                }
    }
};

// (row tile, column tile) of the block in grouped order
__device__ __forceinline__ void tile_at(int row_tiles, int column_tiles, int& row_tile, int& column_tile) {
    const unsigned index = blockIdx.x, wide = static_cast<unsigned>(kGroup) * column_tiles;
    const int first = static_cast<int>(index / wide) * kGroup, within = static_cast<int>(index % wide);
    const int height = row_tiles - first < kGroup ? row_tiles - first : kGroup;
    row_tile = first + within % height;
    column_tile = within / height;
}

// The columns of a block's tile, `own` one of 128.
template <int kWarpColumns, bool kGated>
struct TileColumns {
    int first, columns;  // of c
    bool second;         // whether the second half of b is activated

    // Its column in c; with a gate two have the same.
    __device__ __forceinline__ int of(int own) const {
        constexpr int kHalf = kWarpColumns / 2;
        return first + (kGated ? own / kWarpColumns * kHalf + own % kHalf : own);
    }
    // How far its column in b is from that in c.
    __device__ __forceinline__ int partner(int own) const {
        return kGated && (own / (kWarpColumns / 2) % 2 == 1) != second ? columns : 0;
    }
};

// Of a gated product's tile: its activated columns, and their partners.
template <class T, int kRows, int kColumns>
struct Halves {
    WarpTile<T, kRows, kColumns / 2> active, other;

    __device__ __forceinline__ explicit Halves(const WarpTile<T, kRows, kColumns>& tile) {
        active.row = other.row = tile.row;
        active.column = other.column = tile.column;
        active.rows = other.rows = tile.rows;
        active.columns = other.columns = tile.columns;
#pragma unroll
        for (int i = 0; i < kRows / 16; ++i)
#pragma unroll
            for (int j = 0; j < kColumns / 16; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    active.acc[i][j][e] = tile.acc[i][j][e];
                    other.acc[i][j][e] = tile.acc[i][j + kColumns / 16][e];
                }
    }
};

// A part of the depth's sums. With a gate a row has the activated columns, then their partners.
template <bool kGated, class T, int kRows, int kColumns>
__device__ __forceinline__ void store_partials(const LinearProduct& args,
                                               WarpTile<T, kRows, kColumns>& tile) {
    const std::int64_t stride = (args.columns + kChunk - 1) / kChunk * kChunk;
    if (!kGated) return tile.store_partial(args.partial, stride);
    Halves<T, kRows, kColumns> halves(tile);
    halves.active.store_partial(args.partial, 2 * stride);
    halves.other.store_partial(args.partial + stride, 2 * stride);
}

// What follows the product in the same kernel: GELU's cheap forms, everything without an activation; with a
// gate, which has half as many values, also SiLU and GELU-tanh. The rest is in linear_passes.cu, where it is
// compiled once.
inline bool has_epilogue(Activation activation, bool exact, Gate gate) {
    if (gate != Gate::kNone && (activation == Activation::kSilu || activation == Activation::kGeluTanh))
        return true;
    return activation == Activation::kNone || (activation == Activation::kGelu && !exact);
}

template <class T, int kRows, int kColumns>
__device__ __forceinline__ void finish_gated(const LinearProduct& args, const Whole& whole,
                                             const WarpTile<T, kRows, kColumns>& tile, T* shared) {
    Halves<T, kRows, kColumns> halves(tile);
    if (args.pre != nullptr) {
        T* const pre = static_cast<T*>(args.pre);
        const bool second = args.gate == Gate::kSecond;
        halves.active.store(shared, pre + (second ? args.columns : 0), 2 * args.columns, whole.pre);
        halves.other.store(shared, pre + (second ? 0 : args.columns), 2 * args.columns, whole.pre);
    }
    const auto activate = [&](auto function) {
#pragma unroll
        for (int i = 0; i < kRows / 16; ++i)
#pragma unroll
            for (int j = 0; j < kColumns / 16; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float& y = halves.active.acc[i][j][e];
                    y = function(y) * halves.other.acc[i][j][e];
                }
    };
    if (args.activation == Activation::kGelu)
        activate([](float z) { return cheap_gelu<T>(z); });
    else if (args.activation == Activation::kSilu)
        activate([](float z) { return silu<T>(z); });
    else
        activate([](float z) { return gelu_tanh<T>(z); });
    if (args.residual != nullptr)
        halves.active.add(shared, args.residual, args.residual_stride, whole.residual);
    halves.active.store(shared, args.c, args.columns, whole.c);
}

template <Layout kLayout, class T, int kRows, int kColumns>
__device__ __forceinline__ void finish(const LinearProduct& args, const Whole& whole,
                                       WarpTile<T, kRows, kColumns>& tile, T* shared) {
    if (kLayout == Layout::kForward) {
        if (args.pre != nullptr) tile.store(shared, args.pre, args.columns, whole.pre);
        if (args.activation != Activation::kNone) tile.apply([](float z) { return cheap_gelu<T>(z); });
        if (args.residual != nullptr) tile.add(shared, args.residual, args.residual_stride, whole.residual);
    } else if (kLayout == Layout::kInputs && args.slope_at != nullptr) {
        tile.load(shared, args.slope_at, args.columns, whole.slope_at);
        tile.clear_rows_behind();
        tile.pairs([&](float& low, float& high, int at) {
            float first, second;
            unpack_pair<T>(*reinterpret_cast<const std::uint32_t*>(shared + at), first, second);
            low *= cheap_gelu_slope<T>(first);
            high *= cheap_gelu_slope<T>(second);
        });
        if (args.sums != nullptr) tile.sum_columns(args.sums);
    }
    tile.store(shared, args.c, args.columns, whole.c);
}

template <class T, int kTileRows, Layout kLayout, int kSlots, bool kGated>
__global__ void __launch_bounds__(kProductThreads, kTileRows == 128 ? 2 : 1)
    product_kernel(LinearProduct args, Whole whole) {
    using Shape = Tile<kTileRows>;
    using Warp = WarpTile<T, Shape::kWarpRows, Shape::kWarpColumns>;
    using A = Operand<T, kTileRows, Shape::kDepth, kLayout == Layout::kWeights>;
    using B = Operand<T, kTileColumns, Shape::kDepth, kLayout != Layout::kForward>;
    constexpr int kSteps = Shape::kDepth / 16;
    T* const ring = reinterpret_cast<T*>(dynamic_shared());
    const int rows = static_cast<int>(args.rows), columns = static_cast<int>(args.columns);
    const int all_depth = static_cast<int>(args.depth);

    constexpr int kOwnColumns = kGated ? kTileColumns / 2 : kTileColumns;  // of c

    int row_tile, column_tile;
    tile_at((rows + kTileRows - 1) / kTileRows, (columns + kOwnColumns - 1) / kOwnColumns, row_tile,
            column_tile);
    const std::int64_t slots = (args.depth + Shape::kDepth - 1) / Shape::kDepth;
    const int begin = static_cast<int>(slots * blockIdx.y / gridDim.y);
    const int end = static_cast<int>(slots * (blockIdx.y + 1) / gridDim.y);
    int depth = begin * Shape::kDepth;  // of the next copy
    const int last = end * Shape::kDepth < all_depth ? end * Shape::kDepth : all_depth;

    const TileColumns<Shape::kWarpColumns, kGated> across{column_tile * kOwnColumns, columns,
                                                          args.gate == Gate::kSecond};
    const auto up_to = [](int line, int last) { return line < last ? line : last; };
    A a(args.a, args.a_stride, depth, [&](int own) {
        return up_to(row_tile * kTileRows + own, rows - (kLayout == Layout::kWeights ? kChunk : 1));
    });
    B b(args.b, args.b_stride, depth, [&](int own) {
        const int last = columns - (kLayout != Layout::kForward ? kChunk : 1);
        return up_to(across.of(own), last) + across.partner(own);
    });
    const auto copy = [&](int slot) {
        T* const tile = ring + slot * Shape::kSlot;
        a.copy(tile, last - depth);
        b.copy(tile + kTileRows * Shape::kDepth, last - depth);
        commit_copies();
        depth += Shape::kDepth;
    };
#pragma unroll
    for (int slot = 0; slot < kSlots - 1; ++slot) copy(slot);

    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp_row = warp / Shape::kWarpsAcross * Shape::kWarpRows;
    const int warp_column = warp % Shape::kWarpsAcross * Shape::kWarpColumns;
    Warp own;
    own.row = row_tile * kTileRows + warp_row;
    own.column = across.of(warp_column);
    own.rows = rows;
    own.columns = columns;
    const T* const bias = static_cast<const T*>(args.bias);
#pragma unroll
    for (int j = 0; j < Warp::kBlocksAcross; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int within = warp_column + 8 * j + 2 * (lane % 4) + e, column = across.of(within);
            float first = 0.0f;
            if (bias != nullptr && blockIdx.y == 0 && column < columns)
                first = widen(bias[column + across.partner(within)]);
#pragma unroll
            for (int i = 0; i < Warp::kBlocksDown; ++i) own.acc[i][j][e] = own.acc[i][j][e + 2] = first;
        }

    std::uint32_t left[2][Warp::kBlocksDown][4], right[2][Warp::kBlocksAcross / 2][4];
    const auto load = [&](int which, int slot, int k) {
        const T* const tile = ring + slot * Shape::kSlot;
#pragma unroll
        for (int i = 0; i < Warp::kBlocksDown; ++i)
            A::template load<false>(left[which][i], tile, warp_row + 16 * i, k);
#pragma unroll
        for (int j = 0; j < Warp::kBlocksAcross / 2; ++j)
            B::template load<true>(right[which][j], tile + kTileRows * Shape::kDepth, warp_column + 16 * j,
                                   k);
    };
    wait_copies<kSlots - 2>();
    __syncthreads();
    load(0, 0, 0);

    int slot = 0, following = 1, spare = kSlots - 1;
    for (int i = begin; i < end; ++i) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (step == kSteps - 1) {
                // The next slot is complete for all threads, and no thread reads this one any more.
                wait_copies<kSlots - 2>();
                __syncthreads();
            }
            load((step + 1) % 2, step == kSteps - 1 ? following : slot, (step + 1) % kSteps * 16);
            if (step == 0) copy(spare);
#pragma unroll
            for (int down = 0; down < Warp::kBlocksDown; ++down)
#pragma unroll
                for (int across = 0; across < Warp::kBlocksAcross; ++across) {
                    const std::uint32_t (&four)[4] = right[step % 2][across / 2];
                    const std::uint32_t two[2] = {four[across % 2 * 2], four[across % 2 * 2 + 1]};
                    mma<T>(own.acc[down][across], left[step % 2][down], two);
                }
        }
        spare = slot;
        slot = following;
        following = following + 1 == kSlots ? 0 : following + 1;
    }

    // Copies behind the end may still be under way, and other warps may read their fragments.
    wait_copies<0>();
    if (args.partial != nullptr) return store_partials<kGated>(args, own);
    __syncthreads();
    T* const part = ring + warp * Shape::kWarpRows * Shape::kWarpColumns;
    if (kGated)
        finish_gated(args, whole, own, part);
    else
        finish<kLayout>(args, whole, own, part);
}

// --- host ---

inline std::int64_t tiles_of(const LinearProduct& args, std::int64_t tile_rows) {
    const std::int64_t columns = args.gate == Gate::kNone ? kTileColumns : kTileColumns / 2;
    return (args.rows + tile_rows - 1) / tile_rows * ((args.columns + columns - 1) / columns);
}

template <class T, int kTileRows, Layout kLayout, int kSlots = Tile<kTileRows>::kSlots>
const char* launch_product(const LinearProduct& args, std::uintptr_t stream) {
    using Shape = Tile<kTileRows>;
    const std::int64_t tiles = tiles_of(args, kTileRows);
    if (tiles > 0x7fffffff) return "rows * columns: more than 2**31 - 1 tiles";
    if (args.parts < 1 || args.parts > (args.depth + Shape::kDepth - 1) / Shape::kDepth)
        return "parts: at least one step of the depth for each";
    LinearProduct own = args;
    if (args.parts == 1 && has_epilogue(args.activation, args.exact, args.gate)) own.partial = nullptr;
    const Whole whole = whole_of(args);
    constexpr bool kForward = kLayout == Layout::kForward;
    const auto kernel = kForward && args.gate != Gate::kNone
                            ? product_kernel<T, kTileRows, kLayout, kSlots, kForward>
                            : product_kernel<T, kTileRows, kLayout, kSlots, false>;
    return launch_shared(kernel, dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(args.parts)),
                         dim3(kProductThreads), kSlots * Shape::kSlot * 2, stream, own, whole);
}

// The products of each file.
template <class T>
const char* large_product(const LinearProduct& args, std::uintptr_t stream);
template <class T>
const char* small_product(const LinearProduct& args, int device, std::uintptr_t stream);
template <class T>
const char* backward_product(const LinearProduct& args, std::uintptr_t stream);
// Adds the parts in order, and does what follows.
template <class T>
const char* add_parts(const LinearProduct& args, std::uintptr_t stream);

}  // namespace cuda
}  // namespace fastbert
