"""Faults of the C++ attention."""

# ruff: noqa: E501 (a table)

import sys

from tests.support.mutation import Fault, Suite

_SIMD = "csrc/cpu/attention_simd.cpp"
_SHARED = "csrc/cpu/attention_simd.h"
_VECTORS = "csrc/cpu/vec.h"
_AVX2 = "csrc/cpu/vec_avx2.h"
_AVX512 = "csrc/cpu/vec_avx512.h"
_TASKS = "csrc/cpu/attention.cpp"
_EXP = "csrc/cpu/exp.h"


def _fault(name: str, old: str, new: str, file: str = _SIMD) -> Fault:
    return Fault(name, file, old, new)


FAULTS = (
    # layout
    _fault("heads share one stride", "row * t.row_stride + head * t.head_stride", "row * t.row_stride", _SHARED),
    _fault("int32 rows", "row * t.row_stride", "static_cast<std::int32_t>(row * t.row_stride)", _SHARED),
    _fault("columns past the head read", "store(out + i * width + c,\n                  i < count && n > 0 ? load(row_of<T>(t, first + i, head) + c, static_cast<int>(n)) : zero(),",
           "store(out + i * width + c,\n                  i < count && n > 0 ? load(row_of<T>(t, first + i, head) + c, kLanes) : zero(),"),
    _fault("first row of the sequence forgotten", "transpose_rows<T>(args.k, tokens.start, head, n, headdim, panels)",
           "transpose_rows<T>(args.k, 0, head, n, headdim, panels)"),
    _fault("first row of v forgotten", "float_rows<T>(args.v, tokens.start, head, n, headdim, width, room, v_row);\n    const float gate", "float_rows<T>(args.v, 0, head, n, headdim, width, room, v_row);\n    const float gate"),
    _fault("k taken for v in forward", "float_rows<T>(args.v, tokens.start, head, n, headdim, width, room, v_row);\n    const float gate", "float_rows<T>(args.k, tokens.start, head, n, headdim, width, room, v_row);\n    const float gate"),
    _fault("few keys: k taken for v", "float_rows<T>(args.v, tokens.start, head, n, headdim, width, room, v_row);\n    for", "float_rows<T>(args.k, tokens.start, head, n, headdim, width, room, v_row);\n    for"),
    _fault("few keys: half of the sum", "const Vec all = add(total[0], total[1]);", "const Vec all = total[0];"),
    _fault("few keys: nothing subtracted", "const Vec shift = load(top + i, kLanes);", "const Vec shift = zero();"),
    _fault("few keys: the largest of the first keys", "most = maximum(most, mul(load(scores + j * stride + i, kLanes), factor));", "most = j > 2 ? most : maximum(most, mul(load(scores + j * stride + i, kLanes), factor));"),
    _fault("few keys: no score above -inf", "if (top[i] == -INFINITY) return false;", "if (top[i] == -INFINITY) break;"),
    _fault("few keys: lse without the maximum", "= top[i] + __builtin_logf(sum[i]);", "= __builtin_logf(sum[i]);"),
    _fault("few keys: probabilities of the first query", "row[l] = scores[(j + l) * stride + i];", "row[l] = scores[(j + l) * stride];"),
    _fault("few keys: the gate forgotten", "broadcast(inverse[i] * gate)", "broadcast(inverse[i])"),
    _fault("few keys: the gate in the probabilities", "mul(load(row, kLanes), broadcast(inverse[i]))", "mul(load(row, kLanes), broadcast(inverse[i] * (args.gate == nullptr ? 1.0f : args.gate[head])))"),
    _fault("few keys: weights of the next query", "tiles(scores + i, 1, stride, v,", "tiles(scores + i + 1, 1, stride, v,"),
    _fault("few keys: with order", "const bool plain = !args.causal && ", "const bool plain = "),
    _fault("few keys: with a bias", "args.bias.data == nullptr && args.dropout", "args.dropout"),
    _fault("few keys: with dropout", "&& args.dropout.seed == nullptr;", ";"),
    _fault("v taken for k in forward", "transpose_rows<T>(args.k, tokens.start, head, n, headdim, panels)", "transpose_rows<T>(args.v, tokens.start, head, n, headdim, panels)"),
    _fault("v in place side by side", "stride = t.row_stride;", "stride = headdim;"),
    _fault("narrow rows of v read in place", "if (headdim == width) {", "if (headdim <= width) {"),
    _fault("dP from k", "transpose_rows<T>(args.v, tokens.start, head, n, headdim, v_panels)", "transpose_rows<T>(args.k, tokens.start, head, n, headdim, v_panels)"),
    _fault("q taken for k in backward", "copy_rows<T>(args.k, tokens.start, head, n, n, headdim, width, k)", "copy_rows<T>(args.q, tokens.start, head, n, n, headdim, width, k)"),
    _fault("rows of dout strided like one head", "upstream{args.dout, args.nheads * headdim, headdim}", "upstream{args.dout, headdim, args.nheads * headdim}"),
    _fault("out of another head", "((tokens.start + i + r) * args.nheads + head) * headdim", "((tokens.start + i + r) * args.nheads) * headdim"),
    _fault("lse transposed", "args.lse[head * args.total + row]", "args.lse[row * args.nheads + head]"),
    # panels and tiles
    _fault("keys of a panel short of one", "j + i < count ? load(row_of<T>(t, first + j + i, head) + c, n)", "j + i + 1 < count ? load(row_of<T>(t, first + j + i, head) + c, n)"),
    _fault("second panel forgotten", "float* const panel = out + j / kKeyPanel * headdim * kKeyPanel + j % kKeyPanel;", "float* const panel = out + j % kKeyPanel;"),
    _fault("columns of a panel from the first", "store(panel + (c + i) * kKeyPanel, block[i], kLanes)", "store(panel + i * kKeyPanel, block[i], kLanes)"),
    _fault("narrow tiles repeat the first columns", "for (; j < columns; j += kLanes) tile<1>(a, a_row, a_k, b + j,", "for (; j < columns; j += kLanes) tile<1>(a, a_row, a_k, b,", _SHARED),
    _fault("later keys overwrite earlier ones", "out + r * width, width, width, j > 0);", "out + r * width, width, width, false);", _SHARED),
    _fault("old sums kept", "out + r * width, width, width, j > 0);", "out + r * width, width, width, true);", _SHARED),
    _fault("last query block dropped", "for (std::int64_t i = begin; i < end; i += kQueryBlock) {", "for (std::int64_t i = begin; i + kQueryBlock <= end || i == begin; i += kQueryBlock) {"),
    _fault("last query block dropped in backward", "for (std::int64_t i = 0; i < n; i += kQueryBlock) {", "for (std::int64_t i = 0; i + kQueryBlock <= n || i == 0; i += kQueryBlock) {"),
    # softmax
    _fault("scale missing", "Vec x = mul(load(s + j, n), factor);", "Vec x = load(s + j, n);", _SHARED),
    _fault("maximum not subtracted", "exponential(sub(load(s + j, n), shift))", "exponential(load(s + j, n))", _SHARED),
    _fault("tail lanes in the maximum", "n == kLanes ? x : first_or(x, n, -INFINITY)", "x", _SHARED),
    _fault("tail lanes in the sum", "const Vec e = first(exponential(sub(load(s + j, n), shift)), n);", "const Vec e = exponential(sub(load(s + j, n), shift));", _SHARED),
    _fault("future keys keep their scores", "for (std::int64_t j = allowed; j < keys; ++j) s[j] = 0.0f;", "", _SHARED),
    _fault("NaN taken for an empty row", "if (s[j] != s[j]) sum = s[j];", "if (s[j] > INFINITY) sum = s[j];", _SHARED),
    _fault("empty rows not recognised", "if (top == -INFINITY) {", "if (top == INFINITY) {", _SHARED),
    _fault("causal off by one", "softmax_row(s, args.causal ? i + r + 1 : n,", "softmax_row(s, args.causal ? less(i + r + 2, n) : n,"),
    _fault("causal off by one in backward", "softmax_row(pr, args.causal ? i + r + 1 : n,", "softmax_row(pr, args.causal ? less(i + r + 2, n) : n,"),
    _fault("causal counts from the run's start", "softmax_row(s, args.causal ? i + r + 1 : n,", "softmax_row(s, args.causal ? i - begin + r + 1 : n,"),
    _fault("lse without the maximum", "softmax.top + __builtin_logf(softmax.sum)", "__builtin_logf(softmax.sum)"),
    _fault("probs not normalised", "store(p + j, mul(load(s + j, m), broadcast(inverse)), m);", "store(p + j, load(s + j, m), m);"),
    _fault("probs after dropout", "const bool empty = softmax.sum == 0.0f;", "if (args.dropout.seed != nullptr && args.probs != nullptr) weigh(s, s, n, 1.0f, drawn_bits(args.dropout, head, row, n, bits));\n            const bool empty = softmax.sum == 0.0f;"),
    _fault("bias of another sequence", "sequence * bias.batch_stride", "0 * sequence * bias.batch_stride", _SHARED),
    _fault("bias strides swapped", "head * bias.head_stride + i * bias.row_stride", "head * bias.row_stride + i * bias.head_stride", _SHARED),
    _fault("bias added before the scale", "Vec x = mul(load(s + j, n), factor);\n        if (bias != nullptr) x = add(x, load(bias + j, n));",
           "Vec x = load(s + j, n);\n        if (bias != nullptr) x = add(x, load(bias + j, n));\n        x = mul(x, factor);", _SHARED),
    # exp
    _fault("exp a term short", "Vec series = broadcast(1.0f / 5040.0f);", "Vec series = zero();", _EXP),
    _fault("exp with a wrong coefficient", "1.0f / 120.0f", "1.0f / 121.0f", _EXP),
    _fault("exp with a short ln 2", "1.428606820309417e-6f", "1.4e-6f", _EXP),
    _fault("exp stops before the subnormals", "broadcast(-104.0f)", "broadcast(-87.0f)", _EXP),
    _fault("exp swallows NaN", "maximum(broadcast(-104.0f), x)", "maximum(x, broadcast(-104.0f))", _EXP),
    # dropout
    _fault("bits of the first 64 columns for all", "iota(static_cast<std::uint32_t>(block * 8))", "iota(static_cast<std::uint32_t>(block * 0))", _VECTORS),
    _fault("the last bits not drawn", "(row), (keys + 63) / 64, bits);", "(row), (keys + 31) / 64, bits);", _SHARED),
    _fault("four columns a counter", "iota(static_cast<std::uint32_t>(block * 8))", "iota(static_cast<std::uint32_t>(block * 16))", _VECTORS),
    _fault("lanes of neighbouring words swapped", "kPairs << (2 * word)", "kPairs << (2 * (word ^ 1))", _VECTORS),
    _fault("threshold of 15 bits", "dropout.threshold >> 16", "(dropout.threshold >> 17) * 2", _VECTORS),
    _fault("signed lanes", "_mm512_cmpge_epu16_mask", "_mm512_cmpge_epi16_mask", _AVX512),
    _fault("signed lanes of AVX2", "_mm256_max_epu16(a, limit)", "_mm256_max_epi16(a, limit)", _AVX2),
    _fault("bits of a vector's first block twice", "masks[word] >> (16 * b)", "masks[word] >> (0 * b)", _VECTORS),
    _fault("bits of the first keys for all", "kept == nullptr ? ~0ull : kept[block / 64];", "kept == nullptr ? ~0ull : kept[0];", _SHARED),
    _fault("bits saved for one head", "(head * args.total + row) * ((args.max_seqlen", "row * ((args.max_seqlen", _SHARED),
    _fault("bits saved in whole words only", "(args.max_seqlen + 31) / 32)", "args.max_seqlen / 32)", _SHARED),
    _fault("last word not saved", "(keys + 31) / 32 * 4", "keys / 32 * 4", _SHARED),
    _fault("bits never saved", "std::memcpy(saved_bits(args.keep_bits, args, head, row), drawn, saved_size(keys));", "(void)0;", _SHARED),
    _fault("saved bits of the row within its sequence", "kept_in_backward(args, head, row, n, bits)", "kept_in_backward(args, head, i + r, n, bits)"),
    _fault("saved bits not read", "    std::memcpy(bits, saved_bits(args.keep_bits, args, head, row), saved_size(keys));\n    return bits;", "    return drawn_bits(args.dropout, head, row, keys, bits);", _SHARED),
    _fault("room for no bits", "return round_up(keys / 32, 16);", "return keys - keys;", _SHARED),
    _fault("bits shifted by a vector", "bits >> (j - block));", "bits);", _SHARED),
    _fault("plane and row swapped", "static_cast<std::uint32_t>(head),", "static_cast<std::uint32_t>(row),", _SHARED),
    _fault("row within its sequence", "kept_in_forward(args, head, row, n, bits)", "kept_in_forward(args, head, i + r, n, bits)"),
    _fault("dropout scale missing", "gate : gate * args.dropout.scale;", "gate : gate;"),
    _fault("dropout scale missing in backward", "args.dropout.seed == nullptr ? 1.0f : args.dropout.scale;", "1.0f;"),
    _fault("dP not dropped", "if (kept != nullptr) weigh(dpr, dpr, n, scale, kept);", "if (kept != nullptr) weigh(dpr, dpr, n, scale, nullptr);"),
    _fault("dv from undropped P", "if (args.dv != nullptr) weigh(pr, wr, n, gate * scale, kept);", "if (args.dv != nullptr) weigh(pr, wr, n, gate * scale, nullptr);"),
    _fault("dv alone from undropped P", "weigh(pr, wr, n, gate * scale, kept);\n                continue;", "weigh(pr, wr, n, gate * scale, nullptr);\n                continue;"),
    _fault("dv alone not normalised", "store(pr + j, mul(load(pr + j, c), normal), c);\n                });", "store(pr + j, load(pr + j, c), c);\n                });"),
    _fault("no dS for dk alone", "return args.dq != nullptr || args.dk != nullptr || args.ds", "return args.dq != nullptr || args.ds", _SHARED),
    _fault("no dS for dgate alone", "|| args.ds != nullptr || args.dgate != nullptr;", "|| args.ds != nullptr;", _SHARED),
    # gate and gradients
    _fault("gate forgotten in forward", "factor[r] = inverse * common;", "factor[r] = inverse;"),
    _fault("gate forgotten in dv", "if (args.dv != nullptr) weigh(pr, wr, n, gate * scale,", "if (args.dv != nullptr) weigh(pr, wr, n, scale,"),
    _fault("gate forgotten in dS", "sub(load(dpr + j, c), broadcast(delta))), broadcast(gate))", "sub(load(dpr + j, c), broadcast(delta))), broadcast(1.0f))"),
    _fault("gate within dgate", "gate_sum += delta;", "gate_sum += gate * delta;"),
    _fault("dgate of the last row", "gate_sum += delta;", "gate_sum = delta;"),
    _fault("dgate of one head", "args.dgate[sequence * args.nheads + head]", "args.dgate[sequence * args.nheads]"),
    _fault("delta missing", "sub(load(dpr + j, c), broadcast(delta))", "load(dpr + j, c)"),
    _fault("P not normalised in backward", "const Vec normal = broadcast(inverse);", "const Vec normal = broadcast(1.0f + 0.0f * inverse);"),
    _fault("dq not scaled", "store_rows(dq, rows, width, args.softmax_scale,", "store_rows(dq, rows, width, 1.0f,"),
    _fault("dk not scaled", "store_rows(dk, n, width, args.softmax_scale,", "store_rows(dk, n, width, 1.0f,"),
    _fault("dk and dv not zeroed", "dk[e] = dv[e] = 0.0f;", "dk[e] = 0.0f;"),
    _fault("dk from dout", "add_transposed(p, stride, rows, q, n, width, dk);", "add_transposed(p, stride, rows, dout, n, width, dk);"),
    _fault("dv from dS", "add_transposed(w, stride, rows, dout, n, width, dv);", "add_transposed(p, stride, rows, dout, n, width, dv);"),
    _fault("dk only of the last block", "sums + j * width, width, width, true);", "sums + j * width, width, width, false);", _SHARED),
    _fault("dbias of another row", "(sequence * args.nheads + head) * args.max_seqlen + i + r) * args.max_seqlen;\n            for_vectors", "(sequence * args.nheads + head) * args.max_seqlen + r) * args.max_seqlen;\n            for_vectors"),
    # tasks
    _fault("last run of queries lost", "begin < length(b); begin += split)", "begin + split <= length(b) || begin == 0; begin += split)", _TASKS),
    _fault("runs overlap by a block", "begin + split)", "begin + split - kQueryBlock)", _TASKS),
    _fault("workers share their scratch", "workspace.data() + worker * share);\n    });\n    return nullptr;\n}\n\nconst char* cpu_attention_bwd",
           "workspace.data() + worker * 0);\n    });\n    return nullptr;\n}\n\nconst char* cpu_attention_bwd", _TASKS),
    _fault("dgate of empty sequences not set", "if (args.dgate != nullptr) std::fill(args.dgate, args.dgate + args.batch * args.nheads, 0.0);", "", _TASKS),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS,
    tests=(
        "tests/cpu/test_attention_scores.py",
        "tests/cpu/test_attention_dropout.py",
        "tests/cpu/test_attention.py",
        "tests/cpu/test_sanitizers.py::test_kernels_under_sanitizers[attention-address,undefined]",
        "-k",
        "not error_rule and not repeats and not many and not windows and not isa_none",
    ),
    build=(sys.executable, "setup.py", "build_ext", "--inplace"),
    environment={"FASTBERT_CUDA": "0", "CXXFLAGS": "-O1"},
)
