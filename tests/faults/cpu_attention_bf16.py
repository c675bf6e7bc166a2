"""Faults of the C++ attention's kernels for AVX-512-BF16, and of the choice of the instruction set."""

from tests.support.mutation import IN_PLACE, Suite, faults_of

_SIMD = "csrc/cpu/attention_bf16_simd.cpp"
_VEC = "csrc/cpu/vec_avx512_bf16.h"
_TASKS = "csrc/cpu/attention.cpp"
_ISA = "csrc/cpu/isa.cpp"
_PICK = "csrc/cpu/isa.h"
_fault = faults_of(_SIMD)

FAULTS = (
    # pairs
    _fault("odd numbers halved down", "return (n + 1) / 2;", "return n / 2;"),
    _fault("columns past the head read", "load_words(row + c, static_cast<int>(n))", "load_words(row + c, kLanes)"),
    _fault("panels without an odd last column", "const std::int64_t n = less(2 * kLanes, headdim - 2 * c);", "const std::int64_t n = less(2 * kLanes, headdim / 2 * 2 - 2 * c);"),
    _fault("panels repeat the first 32 columns", "first + j + i, head) + 2 * c)", "first + j + i, head))"),
    _fault("panels all at the first", "out + j / kKeyPanel * depth * kKeyPanel + j % kKeyPanel", "out + j % kKeyPanel"),
    _fault("panels past the last key", "block[i] = j + i < count", "block[i] = j + i < count + 1"),
    _fault("q's columns of the first vector", "words_of(row_of<bf16>(t, first + i, head), c, headdim),", "words_of(row_of<bf16>(t, first + i, head), 0, headdim),"),
    _fault("a row paired with itself", "less(i + 1, count - 1)", "less(i, count - 1)"),
    _fault("a row behind the last read", "less(i + 1, count - 1)", "(i + 1)"),
    _fault("pairs of rows packed too densely", "i += 2, out += width)", "i += 2, out += width / 2)"),
    _fault("the last query's partner keeps its P", "                clear(w + rows * columns / 2, columns / 2);\n", ""),
    _fault("an odd last key dropped", "half(keys.columns()) - skipped, width, out);", "keys.columns() / 2 - skipped, width, out);"),
    _fault("an odd last query dropped in dk", "add_transposed(ds_pairs + skipped, stride, half(rows),", "add_transposed(ds_pairs + skipped, stride, rows / 2,"),
    _fault("transpose swaps lines", "_mm512_unpackhi_epi64(low0, low1)", "_mm512_unpacklo_epi64(high0, low1)", _VEC),
    _fault("pairs the wrong way round", "_mm512_or_si512(_mm512_cvtepu16_epi32(first),\n                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16))",
           "_mm512_or_si512(_mm512_cvtepu16_epi32(second),\n                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(first), 16))", _VEC),
    _fault("second of every pair lost", "_mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16)", "_mm512_setzero_si512()", _VEC),
    _fault("truncated, not rounded", "return (Words)_mm512_cvtneps_pbh(v);", "return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(v), 16));", _VEC),
    _fault("old sums dropped", "return _mm512_dpbf16_ps(c, a, b);", "return _mm512_dpbf16_ps(mul(c, broadcast(1.0009765625f)), a, b);", _VEC),
    # the shortest sequences
    _fault("few tokens too", "constexpr std::int64_t kFew = 16;", "constexpr std::int64_t kFew = 8;"),
    _fault("forward's runs lost for few tokens", "attention_kernels.forward(args, relative, sequence, head, begin, end, scratch)", "attention_kernels.forward(args, relative, sequence, head, begin, begin + 1, scratch)"),
    _fault("few tokens rounded in backward", "if (tokens.length < kFew || gates_shared(args))", "if (gates_shared(args))"),
    # forward
    _fault("k taken for v", "pair_rows(args.v, tokens.start + low,", "pair_rows(args.k, tokens.start + low,"),
    _fault("softmax of the future", "softmax_rows(args, relative, sequence, head, n, i, rows, keys, keys.columns(), scores,", "softmax_rows(args, relative, sequence, head, n, i + 1, rows, keys, keys.columns(), scores,"),
    _fault("lse without the maximum", "softmax[r].top + __builtin_logf(softmax[r].sum)", "__builtin_logf(softmax[r].sum)"),
    _fault("lse of an empty row 0", "empty ? -INFINITY : softmax[r].top", "empty ? 0.0f : softmax[r].top"),
    _fault("probs not normalised", "store(p + j, mul(load(s + j, m), broadcast(inverse)), m);", "store(p + j, load(s + j, m), m);"),
    _fault("nothing dropped", "narrow(kept(load(p + j, n), word))", "narrow(load(p + j, n))"),
    _fault("dropout by the row within its sequence", "kept_in_forward(args, head, row, keys, bits)", "kept_in_forward(args, head, i + r, keys, bits)"),
    _fault("saved bits of the row within its sequence", "kept_in_backward(args, head, row, keys, bits)", "kept_in_backward(args, head, i + r, keys, bits)"),
    _fault("dropout's factor missing", "? gate : gate * args.dropout.scale;", "? gate : gate;"),
    _fault("gate forgotten", "factor[r] = inverse * common;", "factor[r] = inverse;"),
    _fault("one factor for all rows", "store_rows(out + r * width, 1, width, factor[r],", "store_rows(out + r * width, 1, width, factor[0],"),
    _fault("last query block dropped", "for (std::int64_t i = begin; i < end; i += kQueryBlock) {", "for (std::int64_t i = begin; i + kQueryBlock <= end || i == begin; i += kQueryBlock) {"),
    # backward
    _fault("dP from q", "times_panels(dout, width / 2, padded, v_panels,", "times_panels(q, width / 2, padded, v_panels,"),
    _fault("rows of dout strided like one head", "upstream{args.dout, args.nheads * headdim, headdim}", "upstream{args.dout, headdim, args.nheads * headdim}"),
    _fault("future keys in backward", "softmax_rows(args, relative, sequence, head, n, i, rows, keys, keys.columns(), p,", "softmax_rows(args, relative, sequence, head, n, i + 1, rows, keys, keys.columns(), p,"),
    _fault("P not normalised", "const Vec normal = broadcast(inverse);", "const Vec normal = broadcast(1.0f + 0.0f * inverse);"),
    _fault("dP not dropped", "if (drop) weigh(dpr,", "if (false) weigh(dpr,"),
    _fault("delta missing", "sub(load(dpr + j, c), broadcast(delta))", "load(dpr + j, c)"),
    _fault("gate missing in the bias' gradient", "store(wide + j, mul(d, broadcast(gate)), c)", "store(wide + j, d, c)"),
    _fault("gate missing in dq", "store_rows(dq, rows, width, gate * args.softmax_scale,", "store_rows(dq, rows, width, args.softmax_scale,"),
    _fault("scale missing in dk", "store_rows(dk, n, width, gate * args.softmax_scale,", "store_rows(dk, n, width, gate,"),
    _fault("dropout's factor missing in dv", "drop ? gate * args.dropout.scale : gate,", "gate,"),
    _fault("dk from dout", "half(rows), q_pairs, seen,", "half(rows), dout_pairs, seen,"),
    _fault("dv not zeroed", "dk[e] = dv[e] = 0.0f;", "dk[e] = 0.0f;"),
    _fault("last query block dropped in backward", "for (std::int64_t i = 0; i < n; i += kQueryBlock) {", "for (std::int64_t i = 0; i + kQueryBlock <= n || i == 0; i += kQueryBlock) {"),
    _fault("dbias of another row", "args.ds + cell_of(args, sequence, head, i + r,", "args.ds + cell_of(args, sequence, head, r,"),
    _fault("dgate of one head", "args.dgate[sequence * args.nheads + head]", "args.dgate[sequence * args.nheads]"),
    # window and fewer heads of k and v
    _fault("v of the first keys", "v + ((keys.first - low) / 2 + skipped) * width", "v + skipped * width"),
    _fault("weights from the vector's start on", "times_rows(weights + skipped,", "times_rows(weights,"),
    _fault("probs of the first keys", "static_cast<bf16*>(args.probs) + cell_of(args, sequence, head, i + r, keys.first)", "static_cast<bf16*>(args.probs) + cell_of(args, sequence, head, i + r, 0)"),
    _fault("dk's and dv's last tiles add old weights", "        store(out + j, _mm512_setzero_si512());\n", ""),
    _fault("dk of the first keys", "dk + keys.begin * width", "dk"),
    _fault("dv of the vector's first keys", "dv + keys.begin * width", "dv + keys.first * width"),
    _fault("dq from the first keys", "k + keys.begin / 2 * width", "k"),
    _fault("packed rows a panel late", "low = all.begin / kKeyPanel * kKeyPanel", "low = round_up(all.begin, kKeyPanel)"),
    _fault("dk and dv of one head of q", "head < (kv_head + 1) * shared; ++head", "head < kv_head * shared + 1; ++head"),
    _fault("one gate for all heads that share keys", "return args.gate != nullptr && args.kv_heads < args.nheads;", "return args.gate != nullptr && args.kv_heads > args.nheads;"),
    _fault("k of a head of q", "transpose_rows(args.k, tokens.start + low, kv_head,", "transpose_rows(args.k, tokens.start + low, head,"),
    # the choice
    _fault("fp16 taken for bf16", "dtype == DType::kBFloat16 ?", "dtype != DType::kFloat32 ?", _TASKS),
    _fault("never chosen", "dtype == DType::kBFloat16 ?", "false && dtype == DType::kBFloat16 ?", _TASKS),
    _fault("gradients of distances without the gate", "if (wanted(grads)) store(dpr + j, mul(d, broadcast(gate)), c);", "if (wanted(grads)) store(dpr + j, d, c);"),
    _fault("gradients of distances from dP", "head, i + r, keys, dpr);", "head, i + r, keys, pr);"),
    _fault("preferred on Intel", '!__builtin_cpu_is("amd")', '__builtin_cpu_is("amd")', _ISA),
    _fault("the default is the highest", "isa = static_cast<int>(preferred_isa())", "isa = static_cast<int>(best_isa())", _ISA),
    _fault("without AVX-512", 'if (avx512 && __builtin_cpu_supports("avx512bf16"))', 'if (__builtin_cpu_supports("avx512bf16"))', _ISA),
    _fault("the highest not allowed", "isa <= best; ++isa", "isa < best; ++isa", _ISA),
    _fault("no kernels for other processors", "avx512_bf16 != nullptr ? avx512_bf16 : avx512", "avx512_bf16", _PICK),
    _fault("its own kernels never picked", "avx512_bf16 != nullptr ? avx512_bf16 : avx512", "avx512", _PICK),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS,
    tests=(
        "tests/cpu/test_attention_scores.py",
        "tests/cpu/test_attention_dropout.py",
        "tests/cpu/test_attention.py",
        "tests/cpu/test_attention_window.py",
        "tests/cpu/test_attention_relative.py",
        "tests/cpu/test_isa.py",
        "tests/cpu/test_sanitizers.py::test_kernels_under_sanitizers[attention-address,undefined]",
        "-k",
        "test_isa.py or test_what_is_not or address or (avx512_bf16 and not repeats and not many and not windows)",
    ),
    **IN_PLACE,
)
