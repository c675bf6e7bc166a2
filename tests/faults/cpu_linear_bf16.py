"""Faults of the C++ linear's product of pairs of bf16."""

# ruff: noqa: E501 (a table)

import sys

from tests.support.mutation import Fault, Suite

_SIMD = "csrc/cpu/linear_bf16_simd.cpp"
_VEC = "csrc/cpu/vec_avx512_bf16.h"
_VEC512 = "csrc/cpu/vec_avx512.h"
_PANELS = "csrc/cpu/linear_simd.cpp"
_TASKS = "csrc/cpu/linear.cpp"


def _fault(name: str, old: str, new: str, file: str = _SIMD) -> Fault:
    return Fault(name, file, old, new)


FAULTS = (
    # tiles and runs
    _fault("last pair of a run left out", "k < depth; k += 2, a += pair_stride", "k + 2 < depth; k += 2, a += pair_stride"),
    _fault("pairs of a one element apart", "by_rows ? 2 : 2 * n, panel", "by_rows ? 1 : 2 * n, panel"),
    _fault("gathered pairs of another height", "by_rows ? 2 : 2 * n, panel", "by_rows ? 2 : 2 * kTileRows, panel"),
    _fault("runs overwrite each other", "k > 0, ahead.from", "false, ahead.from"),
    _fault("first run added to old sums", "k > 0, ahead.from", "true, ahead.from"),
    _fault("sums of all tiles in one place", "sums + (padded > kRunDepth ? i * kPanel : 0)", "sums"),
    _fault("later runs from a's first column", "by_rows ? a + i * row_stride + k :", "by_rows ? a + i * row_stride :"),
    _fault("later runs from a's first column, gathered", "a + i * padded + k * n;", "a + i * padded;"),
    _fault("later runs from the panel's first row", "panels + j * padded + k * kPanel);", "panels + j * padded);"),
    _fault("later runs from b's first row", "static_cast<const B*>(args.b) + k * args.b_stride +", "static_cast<const B*>(args.b) +"),
    _fault("stored columns read as rows", "if (args.b_column_stride == 1)\n", "if (args.b_column_stride != 0)\n"),
    _fault("stored columns past the last of b read", "j + i < columns ? static_cast<int>(depth - k) : 0", "static_cast<int>(depth - k)"),
    _fault("last pairs of stored columns left out", "less(kLanes, (depth - k + 1) / 2)", "less(kLanes, (depth - k) / 2)"),
    _fault("float32 read as bf16", "if (args.wide_b)\n", "if (false)\n"),
    _fault("halves of float32 swapped", "load(p + kLanes, part(kLanes)), load(p, part(0))", "load(p, part(0)), load(p + kLanes, part(kLanes))", _VEC),
    _fault("tail of float32 cut", "n > from ? n - from : 0", "0", _VEC),
    _fault("panels of an odd depth closer together", "panels + j * padded + k * kPanel);", "panels + j * args.depth + k * kPanel);"),
    _fault("finished after the first run", "if (last) finish(", "if (k == 0) finish("),
    _fault("rows of another task", "+ row * args.row_stride;", "+ 0 * row * args.row_stride;"),
    _fault("bias and residual of the first rows", "c, kPanel, row + i, n, j,", "c, kPanel, i, n, j,"),
    # odd depths, copies
    _fault("an odd last element's partner read", "args.depth_stride == 1 && args.depth % 2 == 0;", "args.depth_stride == 1;"),
    _fault("an odd last element's partner not zeroed", "__builtin_memset(out + depth, 0,", "__builtin_memset(out + depth, 0xff,"),
    _fault("an odd last row dropped", "k < padded; k += kRunDepth", "k < args.depth / 2 * 2; k += kRunDepth"),
    _fault("the row behind an odd last one read", "odd_rows ? n : 0)", "n)"),
    _fault("the line behind an odd last one read", "k + 1 < depth ? load_words(line + depth_stride, wide) : _mm256_setzero_si256()", "load_words(line + depth_stride, wide)"),
    _fault("a line paired with itself", "load_words(line + depth_stride, wide)", "load_words(line, wide)"),
    _fault("lines of a read past the matrix", "i + kLanes <= readable ? kLanes : n", "i < readable ? kLanes : n"),
    _fault("columns past the last of b read", "load_two(b + j, n), second", "load_two(b + j, kTwo), second"),
    _fault("scratch without the copy of a", "in_place ? 0 : rows * even(args.depth) / 2 + kLanes;", "in_place ? 0 : kLanes;"),
    # vectors
    _fault("pairs the wrong way round", "_mm512_permutex2var_epi16(first, words, second)", "_mm512_permutex2var_epi16(second, words, first)", _VEC),
    _fault("upper half as the lower", "return pairs_from(kLanes, first, second);", "return pairs_from(0, first, second);", _VEC),
    _fault("a tail of 32 cut", "_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << n) - 1), p);\n}\nFASTBERT_INLINE __m512i load_two(const float", "_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << n) / 2 - 1), p);\n}\nFASTBERT_INLINE __m512i load_two(const float", _VEC),
    _fault("subnormal results lost", "_mm512_fpclass_ps_mask(v, kSubnormal) == 0", "true", _VEC512),
    # panels, choice
    _fault("an odd depth's last line not filled", "const bool given = k < args.depth;", "const bool given = true;", _PANELS),
    _fault("an odd depth's last line left out", "copy(lines * kRows, even(args.depth));", "copy(lines * kRows, args.depth / 2 * 2);", _PANELS),
    _fault("second rows of pairs widened as first ones", "store(out + kPanel + j, second_of_pairs(pairs), kLanes);", "store(out + kPanel + j, first_of_pairs(pairs), kLanes);", _PANELS),
    _fault("never chosen", "&avx512::linear_kernels, &avx512_bf16::linear_kernels", "&avx512::linear_kernels, &avx512::linear_kernels", _TASKS),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS,
    tests=(
        "tests/cpu/test_linear_bf16.py",
        "tests/cpu/test_sanitizers.py::test_kernels_under_sanitizers[linear-address,undefined]",
    ),
    build=(sys.executable, "setup.py", "build_ext", "--inplace"),
    environment={"FASTBERT_CUDA": "0", "CXXFLAGS": "-O1"},
    timeout_s=600.0,
)
