// The product of linear layers in bf16, by AVX-512-BF16's product of pairs. Everything else is AVX-512's.
//
// Math       As in linear_simd.cpp: c = act(a b + bias) + residual. An element of a sum is a pair of bf16,
//            {a[i][2 k], a[i][2 k + 1]} times {b[2 k][j], b[2 k + 1][j]}.
// Tiling     A tile of 6 rows x 64 columns of c is held in 24 registers. A run of kRunDepth rows of a panel,
//            32 KiB, stays in the L1 cache while all tiles of the task pass over it; meanwhile the next run
//            is prefetched. Rows of a are read where they lie. A transposed a is copied in pairs, tile after
//            tile; rows of an odd depth are copied too, since the element after the last one is not part of
//            the row and must weigh 0. Parts of b that are not in panels are copied run by run.
// Precision  Sums in float, in runs of kRunDepth; an element is the same sum in every tile. Bias, activation
//            and residual in float, rounded once. Subnormal elements count as 0 (vec_avx512_bf16.h).
// Source     Intel, "Intel Architecture Instruction Set Extensions Programming Reference", VDPBF16PS.
#include "linear_simd.h"
#include "pace.h"

namespace fastbert {
namespace avx512 {
extern const LinearKernels linear_kernels;
}
namespace FASTBERT_ISA {
namespace {

constexpr int kVectors = kPanel / kLanes;
// The depth of one float sum, and the rows of a panel that stay in the L1 cache. Half of it costs 3 to 7%.
constexpr std::int64_t kRunDepth = 256;

FASTBERT_INLINE Pairs broadcast_pair(const bf16* p) {
    Pair pair;
    __builtin_memcpy(&pair, p, sizeof pair);
    return broadcast(pair);
}

// c (kRows x kPanel) = or += a times `depth` rows of a panel, an even number. Meanwhile it prefetches from
// `ahead` on, `ahead_step` bytes per pair of rows, kLines lines at a time.
template <int kRows, int kLines>
__attribute__((noinline)) void tile(const bf16* a, std::int64_t row_stride, std::int64_t pair_stride,
                                    const Pair* b, std::int64_t depth, float* c, bool accumulate,
                                    const char* ahead, std::int64_t ahead_step) {
    Vec sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[r][v] = zero();
    for (std::int64_t k = 0; k < depth; k += 2, a += pair_stride, b += kPanel, ahead += ahead_step) {
#pragma GCC unroll 8
        for (int i = 0; i < kLines; ++i) __builtin_prefetch(ahead + i * kLine, 0, 2);
        Pairs right[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) right[v] = load(b + v * kLanes, kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const Pairs left = broadcast_pair(a + r * row_stride);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(left, right[v], sums[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            float* const at = c + r * kPanel + v * kLanes;
            store(at, accumulate ? add(load(at, kLanes), sums[r][v]) : sums[r][v], kLanes);
        }
}

using Tile = void (*)(const bf16*, std::int64_t, std::int64_t, const Pair*, std::int64_t, float*, bool,
                      const char*, std::int64_t);
constexpr Tile kTiles[3][kTileRows] = {
    {tile<1, 1>, tile<2, 1>, tile<3, 1>, tile<4, 1>, tile<5, 1>, tile<6, 1>},
    {tile<1, 2>, tile<2, 2>, tile<3, 2>, tile<4, 2>, tile<5, 2>, tile<6, 2>},
    {tile<1, 4>, tile<2, 4>, tile<3, 4>, tile<4, 4>, tile<5, 4>, tile<6, 4>}};

// Rows of b as the first kWidth columns of a run of a panel: pairs of rows, with zeros after the last column
// and an odd last row. float is rounded.
template <int kWidth, class B>
void pair_rows(const B* b, std::int64_t stride, std::int64_t depth, std::int64_t columns, Pair* out) {
    constexpr int kTwo = 2 * kLanes;
    for (std::int64_t k = 0; k < depth; k += 2, b += 2 * stride, out += kPanel) {
        const int odd_rows = k + 1 < depth;
        for (int j = 0; j < kWidth; j += kTwo) {
            const int n = static_cast<int>(less(kTwo, columns - j));
            const __m512i first = load_two(b + j, n), second = load_two(b + stride + j, odd_rows ? n : 0);
            store(out + j, lower_pairs(first, second));
            store(out + j + kLanes, upper_pairs(first, second));
        }
    }
}

// Columns of b, one stored after the other, as a run of a panel: see pair_rows.
template <int kWidth, class B>
void pair_stored_columns(const B* b, std::int64_t stride, std::int64_t depth, std::int64_t columns,
                         Pair* out) {
    for (int j = 0; j < kWidth; j += kLanes)
        for (std::int64_t k = 0; k < depth; k += 2 * kLanes) {
            __m512i block[kLanes];
            for (int i = 0; i < kLanes; ++i)
                block[i] =
                    load_two(b + (j + i) * stride + k, j + i < columns ? static_cast<int>(depth - k) : 0);
            transpose(block);
            const std::int64_t pairs = less(kLanes, (depth - k + 1) / 2);
            for (int i = 0; i < pairs; ++i) store(out + (k / 2 + i) * kPanel + j, block[i]);
        }
}

// kWidth columns of a run of a panel, from row k and column j of b on, which is of type B.
template <int kWidth, class B>
void copy_columns(const Product& args, std::int64_t k, std::int64_t j, std::int64_t depth,
                  std::int64_t columns, Pair* out) {
    const B* const b = static_cast<const B*>(args.b) + k * args.b_stride + j * args.b_column_stride;
    if (args.b_column_stride == 1)
        pair_rows<kWidth>(b, args.b_stride, depth, columns, out);
    else
        pair_stored_columns<kWidth>(b, args.b_column_stride, depth, columns, out);
}

// A run of the panel that makes these columns of c.
template <class B>
void copy_run(const Product& args, std::int64_t k, Columns of, std::int64_t depth, Pair* out) {
    if (args.gate == Gate::kNone) return copy_columns<kPanel, B>(args, k, of.begin, depth, of.count, out);
    copy_columns<kHalfPanel, B>(args, k, of.begin, depth, of.count, out);
    copy_columns<kHalfPanel, B>(args, k, args.columns + of.begin, depth, of.count, out + kHalfPanel);
}

// Rows of a one after the other, an odd depth filled with a zero.
void copy_rows(const bf16* a, std::int64_t stride, std::int64_t rows, std::int64_t depth, bf16* out) {
    for (std::int64_t i = 0; i < rows; ++i, a += stride, out += even(depth)) {
        __builtin_memcpy(out, a, static_cast<std::size_t>(depth) * sizeof(bf16));
        __builtin_memset(out + depth, 0, static_cast<std::size_t>(even(depth) - depth) * sizeof(bf16));
    }
}

// A transposed a, tile after tile: each is [pairs of the depth][height of the tile], one run of memory. Whole
// vectors are read where `readable` elements of a line allow it. What is stored too much is overwritten by
// the next pairs or the next tile, or lies in the spare vector behind them.
void pair_columns(const bf16* a, std::int64_t depth_stride, std::int64_t rows, std::int64_t readable,
                  std::int64_t depth, Pair* out) {
    std::int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    for (std::int64_t i = 0, n; i < rows; i += n, --tiles) {
        n = tile_height(rows - i, tiles);
        const int wide = static_cast<int>(i + kLanes <= readable ? kLanes : n);
        const bf16* line = a + i;
        for (std::int64_t k = 0; k < depth; k += 2, line += 2 * depth_stride, out += n)
            store(out,
                  interleave(load_words(line, wide),
                             k + 1 < depth ? load_words(line + depth_stride, wide) : _mm256_setzero_si256()));
    }
}

// What tiles prefetch of the next run where it is rows of b. Two rows of 64 columns fill four lines of the
// cache, eight in float; each of the first tiles takes one line of every two rows, the other tiles none.
struct Shares {
    const char* from;
    std::int64_t step;
    // `stride`: from row to row of b, in bytes; `size`: of an element.
    Shares(const char* run, std::int64_t stride, std::int64_t size)
        : from(run), step(2 * stride), half_(kPanel * size / kLine), across_(stride - (half_ - 1) * kLine) {}
    void next(std::int64_t) {
        if (++share_ == 2 * half_) step = 0;
        if (share_ < 2 * half_) from += share_ == half_ ? across_ : kLine;
    }
    static int kind() { return 0; }

  private:
    std::int64_t half_;    // lines of one row
    std::int64_t across_;  // from the last line of a row to the first of the next one
    std::int64_t share_ = 0;
};

// The same where the columns of b are stored one after the other: each of the first tiles takes one line of
// as many columns as there are pairs of rows.
struct ColumnShares {
    const char* from;
    std::int64_t step;
    ColumnShares(const char* run, std::int64_t stride, std::int64_t size)
        : from(run), step(stride), left_(kRunDepth * size / kLine) {}
    void next(std::int64_t) {
        from += kLine;
        if (--left_ == 0) step = 0;
    }
    static int kind() { return 0; }

  private:
    std::int64_t left_;
};

// Where a task's copies lie: sums [rows][kPanel], a run of a panel, and a.
struct Scratch {
    std::int64_t sums, run, a;
    Scratch(const Product& args, std::int64_t rows) {
        const bool in_place = args.depth_stride == 1 && args.depth % 2 == 0;
        sums = rows * kPanel;
        run = args.panels != nullptr ? 0 : kRunDepth / 2 * kPanel;
        a = in_place ? 0 : rows * even(args.depth) / 2 + kLanes;
    }
};

std::int64_t product_scratch(const Product& args, std::int64_t rows, std::int64_t columns) {
    if (args.dtype != DType::kBFloat16 || args.scale != nullptr)
        return avx512::linear_kernels.product_scratch(args, rows, columns);
    const Scratch scratch(args, rows);
    return scratch.sums + scratch.run + scratch.a;
}

void product(const Product& args, const float* bias, std::int64_t row, std::int64_t row_end,
             std::int64_t column, std::int64_t column_end, std::int64_t next_column, float* scratch) {
    if (args.dtype != DType::kBFloat16 || args.scale != nullptr)
        return avx512::linear_kernels.product(args, bias, row, row_end, column, column_end, next_column,
                                              scratch);
    const std::int64_t rows = row_end - row, padded = even(args.depth);
    const Scratch places(args, rows);
    float* const sums = scratch;
    Pair* const run = reinterpret_cast<Pair*>(sums + places.sums);
    Pair* const copied = run + places.run;
    const bool by_rows = args.depth_stride == 1;
    const bf16* a = static_cast<const bf16*>(args.a) + row * args.row_stride;
    std::int64_t row_stride = args.row_stride;
    if (!by_rows) {
        pair_columns(a, args.depth_stride, rows, args.rows - row, args.depth, copied);
        row_stride = 2;
    } else if (places.a != 0) {
        copy_rows(a, row_stride, rows, args.depth, reinterpret_cast<bf16*>(copied));
        row_stride = padded;
    }
    if (places.a != 0) a = reinterpret_cast<const bf16*>(copied);
    const std::int64_t b_size = args.wide_b ? sizeof(float) : sizeof(bf16);
    const auto finish = finish_of<bf16>(args);
    for (std::int64_t j = column; j < column_end; j += kPanel) {
        const Columns of(args, j);
        for (std::int64_t k = 0; k < padded; k += kRunDepth) {
            const std::int64_t depth = less(kRunDepth, padded - k);
            const bool last = k + depth == padded;
            // The next run: of this panel, of the next one, or of the next task's.
            const std::int64_t next_k = last ? 0 : k + depth;
            const std::int64_t next_j = !last ? j : j + kPanel < column_end ? j + kPanel : next_column;
            const Pair* panel = run;
            const char* next;
            if (args.panels != nullptr) {
                const bf16* const panels = static_cast<const bf16*>(args.panels);
                panel = reinterpret_cast<const Pair*>(panels + j * padded + k * kPanel);
                next = reinterpret_cast<const char*>(panels + next_j * padded + next_k * kPanel);
            } else {
                const std::int64_t given = less(depth, args.depth - k);
                if (args.wide_b)
                    copy_run<float>(args, k, of, given, run);
                else
                    copy_run<bf16>(args, k, of, given, run);
                next = static_cast<const char*>(args.b) +
                       (next_k * args.b_stride + Columns(args, next_j).begin * args.b_column_stride) * b_size;
            }
            const std::int64_t count = (rows + kTileRows - 1) / kTileRows;
            const auto go = [&](auto ahead) __attribute__((always_inline)) {
                std::int64_t tiles = count;
                for (std::int64_t i = 0, n; i < rows; i += n, --tiles) {
                    n = tile_height(rows - i, tiles);
                    const bf16* const tile_a = by_rows ? a + i * row_stride + k : a + i * padded + k * n;
                    float* const c = sums + (padded > kRunDepth ? i * kPanel : 0);
                    if (last) fetch_residual<bf16>(args, row + i, n, of);
                    kTiles[ahead.kind()][n - 1](tile_a, row_stride, by_rows ? 2 : 2 * n, panel, depth, c,
                                                k > 0, ahead.from, ahead.step);
                    ahead.next(depth / 2);
                    if (last) finish(args, bias, c, kPanel, row + i, n, j, of.count);
                }
            };
            if (args.panels != nullptr) {
                // Four lines per pair of rows, and more where this run is shorter than the next one
                const std::int64_t next_depth = less(kRunDepth, padded - next_k);
                go(Pace(next, (4 * next_depth + depth - 1) / depth, count));
            } else if (args.b_column_stride != 1) {
                go(ColumnShares(next, args.b_column_stride * b_size, b_size));
            } else {
                go(Shares(next, args.b_stride * b_size, b_size));
            }
        }
    }
}

void make_panel(const ToPanels& args, std::int64_t panel) { avx512::linear_kernels.make_panel(args, panel); }

void activation_bwd(const ActivationBwd& args, std::int64_t begin, std::int64_t end, float* partial) {
    avx512::linear_kernels.activation_bwd(args, begin, end, partial);
}

}  // namespace

extern const LinearKernels linear_kernels;
const LinearKernels linear_kernels = {make_panel, product_scratch, product, activation_bwd};

}  // namespace FASTBERT_ISA
}  // namespace fastbert
