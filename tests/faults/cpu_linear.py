"""Faults of the C++ linear."""

from tests.support.mutation import IN_PLACE, Suite, faults_of

_SIMD = "csrc/cpu/linear_simd.cpp"
_TASKS = "csrc/cpu/linear.cpp"
_TRANSPOSE = "csrc/cpu/transpose.h"
_ACTIVATION = "csrc/cpu/activation.h"
_WIDENED = "csrc/cpu/widened.h"
_SHARED = "csrc/cpu/linear_simd.h"
_PACE = "csrc/cpu/pace.h"
_fault = faults_of(_SIMD)

FAULTS = (
    # the product: tiles, sums, passes
    _fault("a product left out of a long sum", "less(kSumDepth, depth - d)", "less(kSumDepth - 1, depth - d)"),
    _fault("sums of a pass overwritten", "c_stride, d > 0,", "c_stride, false,"),
    _fault("passes run on in one sum", "c_stride, d > 0,", "c_stride, k + d > 0,"),
    _fault("one long sum in float", "kSumDepth = 128;", "kSumDepth = 1 << 20;"),
    _fault("second run of a sum from the first panel row", "panel + d * kPanel + part", "panel + part"),
    _fault("later passes from b's first row", "j / kPanel * size + k * line;", "j / kPanel * size + k * line * integers;"),
    _fault("b in float32 not rounded", "if constexpr (sizeof(B) > sizeof(T)) v = rounded<T>(v);", ""),
    _fault("stored columns past the last of b read", "block[i] = j + i < columns ? load(b + (j + i) * stride + k, n) : zero();", "block[i] = load(b + (j + i) * stride + k, n);"),
    _fault("last rows of stored columns left out", "for (int i = 0; i < n; ++i) store(out + (k + i) * kPanel + j", "for (int i = 0; i < n - (n < kLanes); ++i) store(out + (k + i) * kPanel + j"),
    _fault("c in float32 rounded", "return args.wide_c ? kFinish<float>[kind] : kFinish<T>[kind];", "return kFinish<T>[kind];", _SHARED),
    _fault("later passes from a's first column", "left = reinterpret_cast<const float*>(a + k);", "left = reinterpret_cast<const float*>(a);"),
    _fault("a of the first pass kept", "} else if (held != k) {", "} else if (held < 0) {"),
    _fault("partial sums of another row", "sums + i * width + j - first", "sums + j - first"),
    _fault("finished after the first pass", "if (k + step >= args.depth) finish(", "if (k == 0) finish("),
    _fault("columns past the first 1,024 forgotten", "first < column_end; first += kMaxColumns)", "first < less(column_end, kMaxColumns); first += kMaxColumns)"),
    _fault("second half of the panel forgotten", "part < kPanel; part += kTileColumns)", "part < kPanel; part += 2 * kTileColumns)"),
    _fault("a's rows one stride", "const float* const tile_a = left + i * (by_rows ? row_stride : depth);", "const float* const tile_a = left + (by_rows ? i * row_stride : 0);"),
    # a transposed, b unpacked, widening
    _fault("whole vectors stored over the next tile", "if (i + kLanes <= readable && (depth - k) * n >= kLanes)", "if (i + kLanes <= readable)"),
    _fault("lines of a one row apart", "gather_columns(a + k * args.depth_stride, args.depth_stride,", "gather_columns(a + k * args.depth_stride, args.rows,"),
    _fault("columns behind the panel's last read", "n == kLanes ? load(b + j, kLanes) : n > 0 ? load(b + j, n) : zero()", "n > 0 ? load(b + j, kLanes) : zero()"),
    _fault("last elements not widened", "if (i < count) store(to + i,", "if (i + 1 < count) store(to + i,"),
    _fault("scratch without the partial sums", "return a + b + (passes(args.depth) > 1 ? rows * less(columns, kMaxColumns) : 0) + 64;", "return a + b + 64;"),
    # the epilogue
    _fault("bias of the first panel", "load(bias + column + j, kLanes));\n            if (args.pre", "load(bias + j, kLanes));\n            if (args.pre", _SHARED),
    _fault("pre behind the activation", "if (args.pre != nullptr) store(static_cast<T*>(args.pre) + at + j, z, n);\n            z = activate<kind>(z, kIsFloat<T>);", "z = activate<kind>(z, kIsFloat<T>);\n            if (args.pre != nullptr) store(static_cast<T*>(args.pre) + at + j, z, n);", _SHARED),
    _fault("residual before the activation", "z = activate<kind>(z, kIsFloat<T>);\n            if (args.multiplies || args.norm_weight != nullptr) z = rounded<T>(z);\n            if (args.residual != nullptr) {\n                const T* residual = static_cast<const T*>(args.residual);\n                const Vec held = load(residual + (row + r) * args.residual_stride + column + j, n);\n                z = args.multiplies ? mul(z, held) : add(z, held);\n            }",
           "if (args.residual != nullptr) {\n                const T* residual = static_cast<const T*>(args.residual);\n                const Vec held = load(residual + (row + r) * args.residual_stride + column + j, n);\n                z = args.multiplies ? mul(z, held) : add(z, held);\n            }\n            z = activate<kind>(z, kIsFloat<T>);", _SHARED),
    _fault("residual read past the row's end", "args.residual_stride + column + j, n);", "args.residual_stride + column + j, kLanes);", _SHARED),
    _fault("output written past the row's end", "store(static_cast<T*>(args.c) + at + j, z, n);", "store(static_cast<T*>(args.c) + at + j, z, kLanes);", _SHARED),
    # packing
    _fault("panel not filled with zeros", "given && j < columns ?", "given ?"),
    _fault("last lines of a panel left out", "for (int i = 0; i < n; ++i)\n                store(reinterpret_cast<Line*>", "for (int i = 0; i < n - (n < kLanes); ++i)\n                store(reinterpret_cast<Line*>"),
    _fault("rows of pairs one after the other", "out + k / kRows * kRows * kPanel + k % kRows;", "out + k * kPanel;"),
    _fault("second of a pair keeps the first", "_mm256_set1_epi32(-0x10000)", "_mm256_set1_epi32(-1)", "csrc/cpu/vec_avx2.h"),
    _fault("quarters of the transposition swapped", "w[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);", "w[i + 8] = _mm512_shuffle_f32x4(a, c, 0xd7);", _TRANSPOSE),
    # gradient of the activation, bias gradient
    _fault("first row counted twice", "row == begin ? g : add(load(partial + j, n), g)", "row == begin ? add(g, g) : add(load(partial + j, n), g)"),
    _fault("bias gradient of the rows' last", "row == begin ? g : add(load(partial + j, n), g)", "g"),
    _fault("bias gradient of rounded g", "if (partial != nullptr) store(partial + j,", "if (args.g != nullptr) g = load(static_cast<T*>(args.g) + at + j, n);\n            if (partial != nullptr) store(partial + j,"),
    _fault("last chunk of rows lost", "chunks = ceil_div(args.rows, step), columns", "chunks = (args.rows - 1) / step, columns", _TASKS),
    _fault("bias gradient in long float sums", "double sum = 0.0;", "float sum = 0.0f;", _TASKS),
    _fault("a row lost where there are 128 chunks", "std::min(args.rows, (chunk + 1) * step),\n                             partial", "std::min(args.rows, (chunk + 1) * step) - (chunk == 127),\n                             partial", _TASKS),
    _fault("chunks of rows too long", "std::max<std::int64_t>(16, ceil_div(args.rows, 128))", "std::max<std::int64_t>(4096, ceil_div(args.rows, 2))", _TASKS),
    # tasks
    _fault("last block of rows lost", "if (row >= args.rows) return;\n        if (task < team", "if (row + rows > args.rows && row > 0) return;\n        if (task < team", _TASKS),
    _fault("last columns lost", "const std::int64_t tasks = row_blocks * ceil_div(padded, columns);", "const std::int64_t tasks = row_blocks * std::max<std::int64_t>(1, padded / columns);", _TASKS),
    # what is prefetched: no result shows it
    _fault("lines left out", "const std::int64_t share = (left_ + tiles_ - 1) / tiles_", "const std::int64_t share = left_ > 0", _PACE),
    _fault("two lines count as one", "lines == 2 ? 1 : 2", "lines == 2 ? 0 : 2", _PACE),
    _fault("the first part again", "from += rows * step;", "from += 0 * rows * step;", _PACE),
    _fault("workers share their scratch", "workspace.data() + 2 * padded + worker * scratch", "workspace.data() + padded + 0 * worker * scratch", _TASKS),
    _fault("scratch over the bias", "workspace.data() + 2 * padded + worker * scratch", "workspace.data() + worker * scratch", _TASKS),
    # activations
    _fault("exponent of the density doubled", "mul(square, broadcast(-0.5f))", "mul(square, broadcast(-1.0f))", _ACTIVATION),
    _fault("coefficient around 0", "-0.0664903745f", "-0.0664913745f", _ACTIVATION),
    _fault("no fine path around 0", "if (fine) {", "if (false) {", _ACTIVATION),
    _fault("gelu by 1 - Φ(-z) alone", "where_negative(z, tail, sub(broadcast(1.0f), tail))", "where_negative(z, sub(broadcast(1.0f), sub(broadcast(1.0f), tail)), sub(broadcast(1.0f), tail))", _ACTIVATION),
    _fault("table: neighbour's interval", "broadcast(32.0f / 6.0f)", "broadcast(30.0f / 6.0f)", _ACTIVATION),
    _fault("table read past its end", "broadcast(5.98f), _CMP_NLT_UQ", "broadcast(6.5f), _CMP_NLT_UQ", _ACTIVATION),
    _fault("table: the slope's sign", "_mm512_mask_sub_ps(t, positive, zero(), t)", "t", _ACTIVATION),
    _fault("table: a digit of a coefficient", "0.0376730971f", "0.0376742273f", "csrc/cpu/normal_table.h"),
    _fault("gelu's derivative without z φ", "fma(mul(z, n.exponential), broadcast(0.398942280401432678f), n.distribution)", "n.distribution", _ACTIVATION),
    _fault("tanh's slope", "0.134145f", "0.13414f", _ACTIVATION),
    _fault("tanh's slope overflows", "where_less(zero(), both, fma(mul(z, slope), both, l.value), l.value)", "fma(mul(mul(z, slope), l.complement), l.value, l.value)", _ACTIVATION),
    _fault("relu swallows NaN", "return maximum(zero(), z);", "return maximum(z, zero());", _ACTIVATION),
    _fault("relu's slope at 0", "where_less(zero(), z, g, where_less(z, broadcast(__builtin_inff()), zero(), g))", "where_less(z, zero(), zero(), g)", _ACTIVATION),
    _fault("silu's derivative without z", "fma(z, l.complement, broadcast(1.0f))", "add(l.complement, broadcast(1.0f))", _ACTIVATION),
    _fault("tanh's polynomial too far out", "where_less(x, broadcast(0.625f)", "where_less(x, broadcast(1.0f)", _ACTIVATION),
    _fault("tanh without its sign far out", "where_negative(z, sub(zero(), far), far)", "far", _ACTIVATION),
    _fault("tanh by 1 - 2 σ(-2 |z|) alone", "where_less(x, broadcast(0.625f), near, ", "where_less(x, broadcast(0.0f), near, ", _ACTIVATION),
    _fault("tanh's slope halved", "mul(mul(l.value, l.complement), broadcast(4.0f))", "mul(mul(l.value, l.complement), broadcast(2.0f))", _ACTIVATION),
    _fault("logistic without the sign", "return {where_negative(x, small, r), where_negative(x, r, small)};", "return {r, small};", _ACTIVATION),
    _fault("half of fp16's range", "if ((bits & 0x7c00) == 0x7c00) {", "if ((bits & 0x7c00) == 0x7800) {", _WIDENED),
    _fault("fp16's sign", "return bits & 0x8000 ? -out : out;", "return out;", _WIDENED),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS,
    tests=(
        "tests/cpu/test_linear.py",
        "tests/cpu/test_sanitizers.py::test_kernels_under_sanitizers[linear-address,undefined]",
        "tests/ops/test_linear.py::test_every_row_of_many_reaches_the_gradients",
        "-k",
        "not error_rule and not repeats and not isa_none and not by_default",
    ),
    **IN_PLACE,
)
