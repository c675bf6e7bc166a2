"""Faults of the C++ linear's product of pairs of bf16."""

from tests.support.mutation import IN_PLACE, Suite, faults_of

_SIMD = "csrc/cpu/linear_bf16_simd.cpp"
_VEC = "csrc/cpu/vec_avx512_bf16.h"
_VEC512 = "csrc/cpu/vec_avx512.h"
_PANELS = "csrc/cpu/linear_simd.cpp"
_TASKS = "csrc/cpu/linear.cpp"
_fault = faults_of(_SIMD)

FAULTS = (
    # tiles and runs
    _fault("last pair of a run left out", "k < depth; k += 2, a += pair_stride", "k + 2 < depth; k += 2, a += pair_stride"),
    _fault("pairs of a one element apart", "by_rows ? 2 : 2 * n, panel", "by_rows ? 1 : 2 * n, panel"),
    _fault("runs overwrite each other", "k > 0, ahead.from", "false, ahead.from"),
    _fault("first run added to old sums", "k > 0, ahead.from", "true, ahead.from"),
    _fault("sums of all tiles in one place", "sums + (padded > kRunDepth ? i * kPanel : 0)", "sums"),
    _fault("later runs from a's first column", "by_rows ? a + i * row_stride + k :", "by_rows ? a + i * row_stride :"),
    _fault("later runs from the panel's first row", "panels + j * padded + k * kPanel);", "panels + j * padded);"),
    _fault("stored columns read as rows", "if (args.b_column_stride == 1)\n", "if (args.b_column_stride != 0)\n"),
    _fault("stored columns past the last of b read", "j + i < columns ? static_cast<int>(depth - k) : 0", "static_cast<int>(depth - k)"),
    _fault("last pairs of stored columns left out", "less(kLanes, (depth - k + 1) / 2)", "less(kLanes, (depth - k) / 2)"),
    _fault("float32 read as bf16", "if (args.wide_b)\n", "if (false)\n"),
    _fault("tail of float32 cut", "n > from ? n - from : 0", "0", _VEC),
    _fault("panels of an odd depth closer together", "panels + j * padded + k * kPanel);", "panels + j * args.depth + k * kPanel);"),
    _fault("finished after the first run", "if (last) finish(", "if (k == 0) finish("),
    _fault("rows of another task", "+ row * args.row_stride;", "+ 0 * row * args.row_stride;"),
    _fault("bias and residual of the first rows", "c, kPanel, row + i, n, j,", "c, kPanel, i, n, j,"),
    # odd depths, copies
    _fault("an odd last element's partner read", "args.depth_stride == 1 && args.depth % 2 == 0;", "args.depth_stride == 1;"),
    _fault("an odd last element's partner not zeroed", "__builtin_memset(out + depth, 0,", "__builtin_memset(out + depth, 0xff,"),
    _fault("an odd last row dropped", "k < padded; k += kRunDepth", "k < args.depth / 2 * 2; k += kRunDepth"),
    _fault("a line paired with itself", "load_words(line + depth_stride, wide)", "load_words(line, wide)"),
    _fault("lines of a read past the matrix", "i + kLanes <= readable ? kLanes : n", "i < readable ? kLanes : n"),
    _fault("columns past the last of b read", "load_two(b + j, n), second", "load_two(b + j, kTwo), second"),
    _fault("scratch without the copy of a", "in_place ? 0 : rows * even(args.depth) / 2 + kLanes;", "in_place ? 0 : kLanes;"),
    # vectors
    _fault("pairs the wrong way round", "_mm512_permutex2var_epi16(first, words, second)", "_mm512_permutex2var_epi16(second, words, first)", _VEC),
    _fault("a tail of 32 cut", "_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << n) - 1), p);\n}\nFASTBERT_INLINE __m512i load_two(const float", "_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << n) / 2 - 1), p);\n}\nFASTBERT_INLINE __m512i load_two(const float", _VEC),
    _fault("subnormal results lost", "_mm512_fpclass_ps_mask(v, kSubnormal) == 0", "true", _VEC512),
    # panels, choice
    _fault("an odd depth's last line not filled", "const bool given = k < args.depth;", "const bool given = true;", _PANELS),
    _fault("second rows of pairs widened as first ones", "store(out + kPanel + j, second_of_pairs(pairs), kLanes);", "store(out + kPanel + j, first_of_pairs(pairs), kLanes);", _PANELS),
    _fault("never chosen", "&avx512::linear_kernels, &avx512_bf16::linear_kernels", "&avx512::linear_kernels, &avx512::linear_kernels", _TASKS),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS,
    tests=(
        "tests/cpu/test_linear_bf16.py",
        "tests/cpu/test_sanitizers.py::test_kernels_under_sanitizers[linear-address,undefined]",
    ),
    **IN_PLACE,
)
