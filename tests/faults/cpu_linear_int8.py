"""Faults of the C++ linear_int8."""

from tests.support.mutation import IN_PLACE, Suite, faults_of

_SIMD = "csrc/cpu/linear_int8_simd.cpp"
_TASKS = "csrc/cpu/linear_int8.cpp"
_FLOATS = "csrc/cpu/linear_simd.cpp"
_fault = faults_of(_SIMD)

FAULTS = (
    # rows to integers
    _fault("halves away from even", "add(nearest(mul(v, factor)), shift)", "nearest(add(mul(v, factor), shift))"),
    _fault("zero point rounded down", "__builtin_rintf(-lo * inv)", "__builtin_floorf(-lo * inv)"),
    _fault("not clamped above", "minimum(maximum(rounded, zero()), most)", "maximum(rounded, zero())"),
    _fault("range without 0 below", "low[k] = high[k] = zero();", "high[k] = zero(), low[k] = broadcast(3.0f);"),
    _fault("a step of 1 / 256", "float step = width / 255.0f;", "float step = width / 256.0f;"),
    _fault("smallest steps kept", "if (step < 1.17549435e-38f) step = 1.0f;", "if (step == 0.0f) step = 1.0f;"),
    _fault("NaN not seen", "if (sum(nothing) != 0.0f) return", "if (args.depth == 0) return"),
    _fault("last group of a row cut", "static_cast<std::size_t>(groups_of(n, kGroup)) * 4);\n    }\n    // Whatever", "static_cast<std::size_t>(n / kGroup) * 4);\n    }\n    // Whatever"),
    # smooth factors
    _fault("range before smoothing", "const Vec v = input(i, n);", "const Vec v = load(x + i, n);"),
    _fault("factors in the range alone", "add(nearest(mul(v, factor)), shift)", "add(nearest(mul(load(x + i, n), factor)), shift)"),
    _fault("factors of the first columns", "load(args.smooth + i, n));", "load(args.smooth, n));"),
    _fault("factors one column on", "load(args.smooth + i, n));", "load(args.smooth + i + (i > 0), n));"),
    _fault("factors added", "return mul(load(x + i, n), load(args.smooth + i, n));", "return add(load(x + i, n), load(args.smooth + i, n));"),
    _fault("factors of whole vectors alone", "if constexpr (kSmooth) return mul", "if (kSmooth && n == kLanes) return mul"),
    _fault("factors not seen", "[args.smooth != nullptr](args", "[false](args"),
    _fault("factors of fp16 lost", "{quantize_of<kGroup, fp16, false>, quantize_of<kGroup, fp16, true>}", "{quantize_of<kGroup, fp16, false>, quantize_of<kGroup, fp16, false>}"),
    _fault("factors of bf16 lost", "{quantize_of<kGroup, bf16, false>, quantize_of<kGroup, bf16, true>}", "{quantize_of<kGroup, bf16, false>, quantize_of<kGroup, bf16, false>}"),
    # one range for all rows
    _fault("one range without 0 above", "high[0] = broadcast(args.range[1]);", "high[0] = high[1] = high[2] = high[3] = broadcast(args.range[1]);"),
    _fault("one range without 0 below", "low[0] = broadcast(args.range[0]);", "low[0] = low[1] = low[2] = low[3] = broadcast(args.range[0]);"),
    _fault("ends of one range exchanged", "low[0] = broadcast(args.range[0])", "low[0] = broadcast(args.range[1])"),
    _fault("one range not seen", "if (args.range != nullptr) {", "if (args.dtype == DType::kFloat32 && args.range != nullptr) {"),
    _fault("NaN of the last columns alone", "nothing = fma(v, zero(), nothing);", "nothing = mul(v, zero());"),
    # rows in floating point
    _fault("integers one place on", "load_part<kPlaces * kBits, kBits>(panel)", "load_part<(kPlaces + 1) % kGroup * kBits, kBits>(panel)", _FLOATS),
    _fault("integers without a sign", "_mm512_srai_epi32(top, 32 - kBits)", "_mm512_srli_epi32(top, 32 - kBits)", "csrc/cpu/vec_avx512.h"),
    _fault("AVX2's integers without a sign", "_mm256_srai_epi32(top, 32 - kBits)", "_mm256_srli_epi32(top, 32 - kBits)", "csrc/cpu/vec_avx2.h"),
    _fault("factors of the first panel", "widen_integers<4>(panel, args.scale + j,", "widen_integers<4>(panel, args.scale,", _FLOATS),
    _fault("AVX2's factors of the first panel", "widen_integers<2>(panel, args.scale + j,", "widen_integers<2>(panel, args.scale,", _FLOATS),
    _fault("panels of integers as long as those of floats", "(args.depth + args.group - 1) / args.group * args.group", "even(args.depth)", _FLOATS),
    _fault("the first pass's integers again", "j / kPanel * size + k * line;", "j / kPanel * size + k * line * !integers;", _FLOATS),
    _fault("no memory for widened integers", "args.panels != nullptr && args.scale == nullptr ? 0 : kPanel * depth", "args.panels != nullptr ? 0 : kPanel * depth", _FLOATS),
    _fault("integers multiplied as pairs of bf16", "if (args.dtype != DType::kBFloat16 || args.scale != nullptr)\n        return avx512::linear_kernels.product(", "if (args.dtype != DType::kBFloat16)\n        return avx512::linear_kernels.product(", "csrc/cpu/linear_bf16_simd.cpp"),
    _fault("factors in the order of the weight", "ordered({args.scale, DType::kFloat32}, workspace.data() + padded)", "const_cast<float*>(args.scale)", "csrc/cpu/linear.cpp"),
    _fault("factors in the place of the bias", "workspace.data() + padded);", "workspace.data());", "csrc/cpu/linear.cpp"),
    # the product
    _fault("zero point times the sum of another column", "column_sums + j, buffer", "column_sums, buffer"),
    _fault("zero point of another row", "of.quantized[of.row + r].zero", "of.quantized[of.row].zero"),
    _fault("step of another row", "of.quantized[of.row + r].step", "of.quantized[of.row].step"),
    _fault("steps multiplied in another order", "mul(to_float(acc), mul(row.step, load(of.scale + j, kLanes)))", "mul(mul(to_float(acc), row.step), load(of.scale + j, kLanes))"),
    _fault("8-bit bias of the first panel", "bias == nullptr ? nullptr : bias + j,", "bias,"),
    _fault("8-bit groups one row apart", "(groups + i * count, count, panel", "(groups + i * (count + 1), count, panel"),
    _fault("last group left out", "panel + 4 * part, count,", "panel + 4 * part, count - (count > 9),"),
    _fault("AVX-512's pairs lose a bit", "_mm512_add_epi32(sums, _mm512_madd_epi16(a, b))", "_mm512_add_epi32(sums, _mm512_madd_epi16(a, _mm512_slli_epi16(_mm512_srli_epi16(b, 1), 1)))"),
    _fault("AVX2's pairs lose a bit", "_mm256_add_epi32(sums, _mm256_madd_epi16(a, b))", "_mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_slli_epi16(_mm256_srli_epi16(a, 1), 1), b))"),
    _fault("AVX-VNNI not taken", "if (current_isa() == Isa::kAvx2Vnni) return &avx2::linear_int8_vnni_kernels;", "", _TASKS),
    _fault("sum of a column over whole groups alone", "sum += w;", "if (i / kGroup * kGroup + kGroup <= args.depth) sum += w;"),
    _fault("panel's padding unset", "__builtin_memset(out, 0, static_cast<std::size_t>(count) * 4 * kPanel);", ""),
    _fault("layouts equal in size", "return simd.group - (gated ? 1 : 0);", "return 4 * simd.group / simd.group - (gated ? 1 : 0);", _TASKS),
    _fault("last rows not quantised", "parallel_for(ceil_div(args.rows, some), team,", "parallel_for(std::max<std::int64_t>(1, args.rows / some), team,", _TASKS),
    _fault("8-bit blocks of rows lost", "if (row >= args.rows) return;\n        simd->product(args, groups,", "if (row > 0) return;\n        simd->product(args, groups,", _TASKS),
    _fault("8-bit bias taken for float32", "widened(args.bias, half + j) : 0.0f;", "widened({args.bias.data, args.dtype}, half + j) : 0.0f;", _TASKS),
    # gates, and what y holds
    _fault("8-bit halves exchanged", "args.gate == Gate::kFirst ? 0 : kHalfPanel", "args.gate == Gate::kFirst ? kHalfPanel : 0"),
    _fault("8-bit half multiplied by itself", "kHalfPanel - active + j", "active + j"),
    _fault("8-bit second half is the first", "(j < width ? 0 : columns)", "0"),
    _fault("8-bit scales of the first half", "begin % kPanel != 0 ? args.columns : 0", "begin % kPanel != 0 ? 0 : 0", _TASKS),
    _fault("gated layouts equal in size", "return simd.group - (gated ? 1 : 0);", "return simd.group;", _TASKS),
    _fault("gated panels as wide as others", "const std::int64_t first = j / kPanel * width;", "const std::int64_t first = j;"),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS,
    tests=(
        "tests/cpu/test_linear_int8.py",
        "tests/ops/test_linear_int8.py",
        "tests/cpu/test_sanitizers.py::test_kernels_under_sanitizers[linear-address,undefined]",
        "-k",
        "not error_rule and not repeats and not isa_none and not by_default",
    ),
    **IN_PLACE,
)
