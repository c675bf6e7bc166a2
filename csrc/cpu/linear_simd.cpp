// Linear layers: panels, the product of a block, the gradient of the activation. Compiled once per
// instruction set.
#include "linear_simd.h"

#include <utility>

#include "pace.h"
#include "transpose.h"

namespace fastbert {
namespace FASTBERT_ISA {
namespace {

// A tile of c is held in registers: 6 x 64 in 24 of AVX-512's 32, 6 x 16 in 12 of AVX2's 16.
constexpr int kTileVectors = kLanes == 16 ? 4 : 2;
constexpr int kTileColumns = kTileVectors * kLanes;
// The depth of one float sum; longer sums are added up from these.
constexpr std::int64_t kSumDepth = 128;
static_assert(kPanel % kTileColumns == 0, "a panel is a whole number of tiles wide");
constexpr std::int64_t kMaxDepth = 1024;  // depth of one pass over a panel: in float it stays in the L2 cache
constexpr std::int64_t kMaxColumns = 1024;  // columns whose partial sums are kept over several passes

FASTBERT_INLINE std::int64_t passes(std::int64_t depth) { return (depth + kMaxDepth - 1) / kMaxDepth; }
FASTBERT_INLINE std::int64_t depth_of_pass(std::int64_t depth) {
    const std::int64_t n = passes(depth);
    return ((depth + n - 1) / n + 15) / 16 * 16;
}
std::int64_t product_scratch(const Product& args, std::int64_t rows, std::int64_t columns) {
    const bool wide = args.dtype == DType::kFloat32;
    const std::int64_t depth = depth_of_pass(args.depth);
    const std::int64_t a = wide && args.depth_stride == 1 ? 0 : rows * depth;
    const std::int64_t b = wide && args.panels != nullptr && args.scale == nullptr ? 0 : kPanel * depth;
    return a + b + (passes(args.depth) > 1 ? rows * less(columns, kMaxColumns) : 0) + 64;
}

// c (kRows x kTileColumns) = or += a times `depth` rows of a panel. The new sum starts from zero: float loses
// less in many short sums than in a long one. Meanwhile it prefetches the next panel from `ahead` on,
// `ahead_step` bytes per row, kLines lines at a time.
template <int kRows, int kLines>
__attribute__((noinline)) void tile(const float* a, std::int64_t row_stride, std::int64_t depth_stride,
                                    const float* b, std::int64_t depth, float* c, std::int64_t c_stride,
                                    bool accumulate, const char* ahead, std::int64_t ahead_step) {
    Vec sums[kRows][kTileVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kTileVectors; ++v) sums[r][v] = zero();
    for (std::int64_t k = 0; k < depth; ++k, a += depth_stride, b += kPanel, ahead += ahead_step) {
#pragma GCC unroll 8
        for (int i = 0; i < kLines; ++i) __builtin_prefetch(ahead + i * kLine, 0, 2);
        Vec right[kTileVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kTileVectors; ++v) right[v] = load(b + v * kLanes, kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const Vec left = broadcast(a[r * row_stride]);
#pragma GCC unroll 8
            for (int v = 0; v < kTileVectors; ++v) sums[r][v] = fma(left, right[v], sums[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kTileVectors; ++v) {
            float* const at = c + r * c_stride + v * kLanes;
            store(at, accumulate ? add(load(at, kLanes), sums[r][v]) : sums[r][v], kLanes);
        }
}

// c (rows x kPanel) = or += the sums of one pass over the depth. Passes have sums of their own for the same
// reason as tiles.
FASTBERT_INLINE void add_pass(const float* pass, std::int64_t rows, bool accumulate, float* c,
                              std::int64_t c_stride) {
    for (std::int64_t r = 0; r < rows; ++r, pass += kPanel, c += c_stride)
        for (int j = 0; j < kPanel; j += kLanes) {
            const Vec v = load(pass + j, kLanes);
            store(c + j, accumulate ? add(load(c + j, kLanes), v) : v, kLanes);
        }
}

using Tile = void (*)(const float*, std::int64_t, std::int64_t, const float*, std::int64_t, float*,
                      std::int64_t, bool, const char*, std::int64_t);
constexpr Tile kTiles[3][kTileRows] = {
    {tile<1, 1>, tile<2, 1>, tile<3, 1>, tile<4, 1>, tile<5, 1>, tile<6, 1>},
    {tile<1, 2>, tile<2, 2>, tile<3, 2>, tile<4, 2>, tile<5, 2>, tile<6, 2>},
    {tile<1, 4>, tile<2, 4>, tile<3, 4>, tile<4, 4>, tile<5, 4>, tile<6, 4>}};

template <class T>
FASTBERT_INLINE void widen(const T* from, std::int64_t count, float* to) {
    std::int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i, kLanes), kLanes);
    if (i < count) store(to + i, load(from + i, static_cast<int>(count - i)), static_cast<int>(count - i));
}

// A panel of a half-precision weight, widened. bf16 lies in pairs of rows (linear.h).
FASTBERT_INLINE void widen_panel(const fp16* panel, std::int64_t depth, float* out) {
    widen(panel, depth * kPanel, out);
}
FASTBERT_INLINE void widen_panel(const bf16* panel, std::int64_t depth, float* out) {
    for (std::int64_t k = 0; k < depth; k += 2, panel += 2 * kPanel, out += 2 * kPanel)
        for (int j = 0; j < kPanel; j += kLanes) {
            const Vec pairs = load(reinterpret_cast<const float*>(panel + 2 * j), kLanes);
            store(out + j, first_of_pairs(pairs), kLanes);
            store(out + kPanel + j, second_of_pairs(pairs), kLanes);
        }
}

// Rows of a panel of integers, times the factors of its columns: `depth` of them, or up to three more.
template <int kGroup, int... kPlaces>
FASTBERT_INLINE void widen_integers(const char* panel, const float* scale, std::int64_t depth, float* out,
                                    std::integer_sequence<int, kPlaces...>) {
    constexpr int kBits = 32 / kGroup;
    for (std::int64_t k = 0; k < depth; k += kGroup, out += kGroup * kPanel)
        for (int j = 0; j < kPanel; j += kLanes, panel += 4 * kLanes)
            (store(out + kPlaces * kPanel + j,
                   mul(load_part<kPlaces * kBits, kBits>(panel), load(scale + j, kLanes)), kLanes),
             ...);
}
void widen_integers(const Product& args, const char* panel, std::int64_t j, std::int64_t depth, float* out) {
    if (args.group == 4)
        widen_integers<4>(panel, args.scale + j, depth, out, std::make_integer_sequence<int, 4>());
    else
        widen_integers<2>(panel, args.scale + j, depth, out, std::make_integer_sequence<int, 2>());
}

// Rows of b, rounded to T, as the first kWidth columns of a panel, with zeros after the last column of b.
template <class T, int kWidth, class B>
void copy_rows(const B* b, std::int64_t stride, std::int64_t depth, std::int64_t columns, float* out) {
    for (std::int64_t k = 0; k < depth; ++k, b += stride, out += kPanel)
        for (int j = 0; j < kWidth; j += kLanes) {
            const int n = static_cast<int>(less(columns - j, kLanes));
            Vec v = n == kLanes ? load(b + j, kLanes) : n > 0 ? load(b + j, n) : zero();
            if constexpr (sizeof(B) > sizeof(T)) v = rounded<T>(v);
            store(out + j, v, kLanes);
        }
}

// The same where the columns of b are stored one after the other.
template <class T, int kWidth, class B>
void copy_stored_columns(const B* b, std::int64_t stride, std::int64_t depth, std::int64_t columns,
                         float* out) {
    for (int j = 0; j < kWidth; j += kLanes)
        for (std::int64_t k = 0; k < depth; k += kLanes) {
            const int n = static_cast<int>(less(kLanes, depth - k));
            Vec block[kLanes];
            for (int i = 0; i < kLanes; ++i) {
                block[i] = j + i < columns ? load(b + (j + i) * stride + k, n) : zero();
                if constexpr (sizeof(B) > sizeof(T)) block[i] = rounded<T>(block[i]);
            }
            transpose(block);
            for (int i = 0; i < n; ++i) store(out + (k + i) * kPanel + j, block[i], kLanes);
        }
}

// `depth` rows of kWidth columns of a panel, from row k and column j of b on, which is of type B.
template <class T, int kWidth, class B>
void copy_columns(const Product& args, std::int64_t k, std::int64_t j, std::int64_t depth,
                  std::int64_t columns, float* out) {
    const B* const b = static_cast<const B*>(args.b) + k * args.b_stride + j * args.b_column_stride;
    if (args.b_column_stride == 1)
        copy_rows<T, kWidth>(b, args.b_stride, depth, columns, out);
    else
        copy_stored_columns<T, kWidth>(b, args.b_column_stride, depth, columns, out);
}

// `depth` rows of the panel that makes these columns of c.
template <class T, class B>
void copy_panel(const Product& args, std::int64_t k, Columns of, std::int64_t depth, float* out) {
    if (args.gate == Gate::kNone) return copy_columns<T, kPanel, B>(args, k, of.begin, depth, of.count, out);
    copy_columns<T, kHalfPanel, B>(args, k, of.begin, depth, of.count, out);
    copy_columns<T, kHalfPanel, B>(args, k, args.columns + of.begin, depth, of.count, out + kHalfPanel);
}

// A transposed a, tile after tile: each is [depth][height of the tile], one run of memory. Whole vectors are
// read where `readable` elements of a line allow it. They may overwrite only places that are written later.
template <class T>
void gather_columns(const T* a, std::int64_t depth_stride, std::int64_t rows, std::int64_t readable,
                    std::int64_t depth, float* out) {
    for (std::int64_t k = 0; k < depth; ++k, a += depth_stride) {
        std::int64_t tiles = (rows + kTileRows - 1) / kTileRows;
        for (std::int64_t i = 0, n; i < rows; i += n, --tiles) {
            n = tile_height(rows - i, tiles);
            float* const to = out + i * depth + k * n;
            if (i + kLanes <= readable && (depth - k) * n >= kLanes)
                store(to, load(a + i, kLanes), kLanes);
            else
                store(to, load(a + i, static_cast<int>(n)), static_cast<int>(n));
        }
    }
}

template <class T>
void product_of(const Product& args, const float* bias, std::int64_t row, std::int64_t row_end,
                std::int64_t column, std::int64_t column_end, std::int64_t next_column, float* scratch) {
    const std::int64_t rows = row_end - row, step = depth_of_pass(args.depth);
    const bool integers = args.scale != nullptr;
    // Bytes of a row of a panel, and of a panel
    const std::int64_t line = kPanel * (integers ? 4 / args.group : static_cast<int>(sizeof(T)));
    const std::int64_t size =
        line * (integers ? (args.depth + args.group - 1) / args.group * args.group : even(args.depth));
    const bool once = step >= args.depth, by_rows = args.depth_stride == 1;
    const T* const a = static_cast<const T*>(args.a) + row * args.row_stride;
    const auto finish = finish_of<T>(args);
    alignas(64) float buffer[kTileRows * kPanel];
    float *wide_a = scratch, *wide_b = wide_a + (by_rows && kIsFloat<T> ? 0 : rows * step),
          *sums = wide_b + (kIsFloat<T> && args.panels != nullptr && !integers ? 0 : kPanel * step);
    std::int64_t held = -1;  // the pass whose part of a lies in wide_a
    for (std::int64_t first = column; first < column_end; first += kMaxColumns) {
        const std::int64_t end = less(column_end, first + kMaxColumns);
        const std::int64_t width = (end - first + kPanel - 1) / kPanel * kPanel;
        for (std::int64_t k = 0; k < args.depth; k += step) {
            const std::int64_t depth = less(step, args.depth - k);
            const float* left = wide_a;
            if (by_rows && kIsFloat<T>) {
                left = reinterpret_cast<const float*>(a + k);
            } else if (held != k) {
                held = k;
                if (by_rows)
                    for (std::int64_t i = 0; i < rows; ++i)
                        widen(a + i * args.row_stride + k, depth, wide_a + i * step);
                else
                    gather_columns(a + k * args.depth_stride, args.depth_stride, rows, args.rows - row, depth,
                                   wide_a);
            }
            for (std::int64_t j = first; j < end; j += kPanel) {
                const Columns of(args, j);
                const char* const stored =
                    static_cast<const char*>(args.panels) + j / kPanel * size + k * line;
                const char* next = stored;
                const float* panel = wide_b;
                if (args.panels == nullptr) {
                    if (args.wide_b)
                        copy_panel<T, float>(args, k, of, depth, wide_b);
                    else
                        copy_panel<T, T>(args, k, of, depth, wide_b);
                    next = reinterpret_cast<const char*>(static_cast<const T*>(args.b) + k * args.b_stride +
                                                         of.begin * args.b_column_stride);
                } else {
                    if (j + kPanel < end)
                        next += size;
                    else if (k + step < args.depth)
                        next += (first - j) / kPanel * size + step * line;
                    else
                        next += ((end < column_end ? end : next_column) - j) / kPanel * size - k * line;
                    if (integers)
                        widen_integers(args, stored, j, depth, wide_b);
                    else if constexpr (kIsFloat<T>)
                        panel = reinterpret_cast<const float*>(stored);
                    else
                        widen_panel(reinterpret_cast<const T*>(stored), depth, wide_b);
                }
                std::int64_t tiles = (rows + kTileRows - 1) / kTileRows;
                Pace ahead(next, line / kLine, tiles);
                for (std::int64_t i = 0, n; i < rows; i += n, --tiles) {
                    n = tile_height(rows - i, tiles);
                    const std::int64_t row_stride = !by_rows ? 1 : kIsFloat<T> ? args.row_stride : step;
                    const std::int64_t depth_stride = by_rows ? 1 : n;
                    const float* const tile_a = left + i * (by_rows ? row_stride : depth);
                    float* c = buffer;
                    std::int64_t c_stride = kPanel;
                    if (k + step >= args.depth) fetch_residual<T>(args, row + i, n, of);
                    for (std::int64_t d = 0; d < depth; d += kSumDepth)
                        for (int part = 0; part < kPanel; part += kTileColumns)
                            kTiles[ahead.kind()][n - 1](tile_a + d * depth_stride, row_stride, depth_stride,
                                                        panel + d * kPanel + part, less(kSumDepth, depth - d),
                                                        c + part, c_stride, d > 0,
                                                        ahead.from + d * ahead.step, ahead.step);
                    ahead.next(depth);
                    if (!once) {
                        c = sums + i * width + j - first;
                        c_stride = width;
                        add_pass(buffer, n, k > 0, c, c_stride);
                    }
                    if (k + step >= args.depth) finish(args, bias, c, c_stride, row + i, n, j, of.count);
                }
            }
        }
    }
}

void product(const Product& args, const float* bias, std::int64_t row, std::int64_t row_end,
             std::int64_t column, std::int64_t column_end, std::int64_t next_column, float* scratch) {
    switch (args.dtype) {
        case DType::kFloat32:
            return product_of<float>(args, bias, row, row_end, column, column_end, next_column, scratch);
        case DType::kBFloat16:
            return product_of<bf16>(args, bias, row, row_end, column, column_end, next_column, scratch);
        case DType::kFloat16:
            return product_of<fp16>(args, bias, row, row_end, column, column_end, next_column, scratch);
    }
}

// Lines of a panel are rows of b, or pairs of rows, whose two elements lie side by side (bf16). `Line` is a
// type of that size: the 4 bytes of a pair are moved like those of a float.
template <class T, class Line>
constexpr int kRowsOfLine = sizeof(Line) / sizeof(T);  // rows of b

// `width` columns of a panel: `columns` of b from `first` on, then zeros.
template <class T, class Line>
void make_columns(const ToPanels& args, std::int64_t first, std::int64_t columns, std::int64_t width,
                  T* out) {
    constexpr int kRows = kRowsOfLine<T, Line>;
    const std::int64_t lines = args.depth / kRows;  // complete ones
    const T* const b = static_cast<const T*>(args.b) + first * args.column_stride;
    const auto copy = [&](std::int64_t begin, std::int64_t end) {  // rows, element by element
        for (std::int64_t k = begin; k < end; ++k) {
            T* const line = out + k / kRows * kRows * kPanel + k % kRows;
            const bool given = k < args.depth;
            for (std::int64_t j = 0; j < width; ++j)
                line[j * kRows] =
                    given && j < columns ? b[k * args.depth_stride + j * args.column_stride] : T{};
        }
    };
    if (args.column_stride == 1) return copy(0, even(args.depth));
    for (std::int64_t j = 0; j < width; j += kLanes) {
        for (std::int64_t k = 0; k < lines; k += kLanes) {
            const int n = static_cast<int>(less(kLanes, lines - k));
            Vec block[kLanes];
            for (int i = 0; i < kLanes; ++i)
                block[i] =
                    j + i < columns
                        ? load(reinterpret_cast<const Line*>(b + (j + i) * args.column_stride + k * kRows), n)
                        : zero();
            transpose(block);
            for (int i = 0; i < n; ++i)
                store(reinterpret_cast<Line*>(out + (k + i) * kRows * kPanel) + j, block[i], kLanes);
        }
    }
    copy(lines * kRows, even(args.depth));
}

template <class T, class Line>
void make_panel_of(const ToPanels& args, std::int64_t panel) {
    T* const out = static_cast<T*>(args.panels) + panel * kPanel * even(args.depth);
    const std::int64_t width = panel_columns(args.gated), first = panel * width;
    const std::int64_t half = args.gated ? args.columns / 2 : args.columns;
    const std::int64_t columns = less(width, half - first);
    make_columns<T, Line>(args, first, columns, width, out);
    if (args.gated)
        make_columns<T, Line>(args, half + first, columns, width, out + width * kRowsOfLine<T, Line>);
}

void make_panel(const ToPanels& args, std::int64_t panel) {
    switch (args.dtype) {
        case DType::kFloat32:
            return make_panel_of<float, float>(args, panel);
        case DType::kBFloat16:
            return make_panel_of<bf16, float>(args, panel);
        case DType::kFloat16:
            return make_panel_of<fp16, fp16>(args, panel);
    }
}

template <class T, Activation kind>
void activation_bwd_of(const ActivationBwd& args, std::int64_t begin, std::int64_t end, float* partial) {
    for (std::int64_t row = begin; row < end; ++row) {
        const std::int64_t at = row * args.columns;
        for (std::int64_t j = 0; j < args.columns; j += kLanes) {
            const int n = static_cast<int>(less(args.columns - j, kLanes));
            Vec g = load(static_cast<const T*>(args.dy) + at + j, n);
            if (kind != Activation::kNone)
                g = activate_bwd<kind>(g, load(static_cast<const T*>(args.pre) + at + j, n), kIsFloat<T>);
            if (args.g != nullptr) store(static_cast<T*>(args.g) + at + j, g, n);
            if (partial != nullptr) store(partial + j, row == begin ? g : add(load(partial + j, n), g), n);
        }
    }
}

// The same for a gated activation; partial: the sums of g's columns.
template <class T, Activation kind>
void gate_bwd_of(const ActivationBwd& args, std::int64_t begin, std::int64_t end, float* partial) {
    const std::int64_t columns = args.columns;
    // Where in a row of pre and g the activated half begins, and the other half.
    const std::int64_t active = args.gate == Gate::kFirst ? 0 : columns, other = columns - active;
    for (std::int64_t row = begin; row < end; ++row)
        for (std::int64_t j = 0; j < columns; j += kLanes) {
            const int n = static_cast<int>(less(columns - j, kLanes));
            const T* const pre = static_cast<const T*>(args.pre) + 2 * row * columns + j;
            T* const g = static_cast<T*>(args.g) + 2 * row * columns + j;
            const Vec dy = load(static_cast<const T*>(args.dy) + row * columns + j, n);
            const Vec z = load(pre + active, n);
            const Vec dactive = activate_bwd<kind>(mul(dy, load(pre + other, n)), z, kIsFloat<T>);
            const Vec dother = mul(dy, activate<kind>(z, kIsFloat<T>));
            store(g + active, dactive, n);
            store(g + other, dother, n);
            if (partial == nullptr) continue;
            const auto sum = [&](float* to, Vec v) { store(to, row == begin ? v : add(load(to, n), v), n); };
            sum(partial + active + j, dactive);
            sum(partial + other + j, dother);
        }
}

template <class T>
void activation_bwd_of(const ActivationBwd& args, std::int64_t begin, std::int64_t end, float* partial) {
    constexpr decltype(&activation_bwd_of<T, Activation::kNone>) kKinds[] = {
        activation_bwd_of<T, Activation::kNone>,     activation_bwd_of<T, Activation::kGelu>,
        activation_bwd_of<T, Activation::kGeluTanh>, activation_bwd_of<T, Activation::kRelu>,
        activation_bwd_of<T, Activation::kSilu>,     activation_bwd_of<T, Activation::kTanh>};
    constexpr decltype(&activation_bwd_of<T, Activation::kNone>) kGated[] = {
        gate_bwd_of<T, Activation::kNone>,     gate_bwd_of<T, Activation::kGelu>,
        gate_bwd_of<T, Activation::kGeluTanh>, gate_bwd_of<T, Activation::kRelu>,
        gate_bwd_of<T, Activation::kSilu>,     gate_bwd_of<T, Activation::kTanh>};
    const int kind = static_cast<int>(args.activation);
    (args.gate == Gate::kNone ? kKinds : kGated)[kind](args, begin, end, partial);
}

void activation_bwd(const ActivationBwd& args, std::int64_t begin, std::int64_t end, float* partial) {
    switch (args.dtype) {
        case DType::kFloat32:
            return activation_bwd_of<float>(args, begin, end, partial);
        case DType::kBFloat16:
            return activation_bwd_of<bf16>(args, begin, end, partial);
        case DType::kFloat16:
            return activation_bwd_of<fp16>(args, begin, end, partial);
    }
}

}  // namespace

extern const LinearKernels linear_kernels;
const LinearKernels linear_kernels = {make_panel, product_scratch, product, activation_bwd};

}  // namespace FASTBERT_ISA
}  // namespace fastbert
