"""Faults of the C++ attention."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import IN_PLACE, Suite, faults_of

_SIMD = "csrc/cpu/attention_simd.cpp"
_SHARED = "csrc/cpu/attention_simd.h"
_VECTORS = "csrc/cpu/vec.h"
_AVX2 = "csrc/cpu/vec_avx2.h"
_AVX512 = "csrc/cpu/vec_avx512.h"
_TASKS = "csrc/cpu/attention.cpp"
_EXP = "csrc/cpu/exp.h"
_fault = faults_of(_SIMD)

FAULTS = (
    # layout
    _fault("heads share one stride", "row * t.row_stride + head * t.head_stride", "row * t.row_stride", _SHARED),
    _fault("int32 rows", "row * t.row_stride", "static_cast<std::int32_t>(row * t.row_stride)", _SHARED),
    _fault("columns past the head read", "store(out + i * width + c,\n                  i < count && n > 0 ? load(row_of<T>(t, first + i, head) + c, static_cast<int>(n)) : zero(),",
           "store(out + i * width + c,\n                  i < count && n > 0 ? load(row_of<T>(t, first + i, head) + c, kLanes) : zero(),"),
    _fault("first row of the sequence forgotten", "first = tokens.start + low;", "first = low;"),
    _fault("k taken for v in forward", "float_rows<T>(args.v, first, kv_head,", "float_rows<T>(args.k, first, kv_head,"),
    _fault("few keys: half of the sum", "const Vec all = add(total[0], total[1]);", "const Vec all = total[0];"),
    _fault("few keys: no score above -inf", "if (top[i] == -INFINITY) return false;", "if (top[i] == -INFINITY) break;"),
    _fault("few keys: probabilities of the first query", "row[l] = scores[(j + l) * stride + i];", "row[l] = scores[(j + l) * stride];"),
    _fault("few keys: the gate forgotten", "broadcast(inverse[i] * gate)", "broadcast(inverse[i])"),
    _fault("few keys: with order", "const bool plain = sees_all(args, n) && ", "const bool plain = "),
    _fault("v in place side by side", "stride = t.row_stride;", "stride = headdim;"),
    _fault("dP from k", "transpose_rows<T>(args.v, tokens.start, kv_head, n, headdim, v_panels)", "transpose_rows<T>(args.k, tokens.start, kv_head, n, headdim, v_panels)"),
    _fault("rows of dout strided like one head", "upstream{args.dout, args.nheads * headdim, headdim}", "upstream{args.dout, headdim, args.nheads * headdim}"),
    _fault("out of another head", "((tokens.start + i + r) * args.nheads + head) * headdim", "((tokens.start + i + r) * args.nheads) * headdim"),
    _fault("lse transposed", "args.lse[head * args.total + row]", "args.lse[row * args.nheads + head]"),
    # panels and tiles
    _fault("keys of a panel short of one", "j + i < count ? load(row_of<T>(t, first + j + i, head) + c, n)", "j + i + 1 < count ? load(row_of<T>(t, first + j + i, head) + c, n)"),
    _fault("narrow tiles repeat the first columns", "column_of_tiles<1>(a, a_row, a_k, b + j,", "column_of_tiles<1>(a, a_row, a_k, b,", _SHARED),
    _fault("later keys overwrite earlier ones", "less(kDepth, depth - j), out, width, rows, width,\n              j > 0);", "less(kDepth, depth - j), out, width, rows, width,\n              false);", _SHARED),
    _fault("last query block dropped", "for (std::int64_t i = begin; i < end; i += kQueryBlock) {", "for (std::int64_t i = begin; i + kQueryBlock <= end || i == begin; i += kQueryBlock) {"),
    # softmax
    _fault("scale missing", "take(k, n, mul(load(s + j, n), factor));", "take(k, n, load(s + j, n));", _SHARED),
    _fault("maximum not subtracted", "exponential(sub(mul(load(s + j, n), factor), shift))", "exponential(mul(load(s + j, n), factor))", _SHARED),
    _fault("tail lanes in the maximum", "n == kLanes ? x : first_or(x, n, -INFINITY)", "x", _SHARED),
    _fault("tail lanes in the sum", "const Vec e = first(exponential(sub(mul(load(s + j, n), factor), shift)), n);", "const Vec e = exponential(sub(mul(load(s + j, n), factor), shift));", _SHARED),
    _fault("future keys keep their scores", "for (std::int64_t j = end; j < width; ++j) row[j] = 0.0f;", "", _SHARED),
    _fault("NaN taken for an empty row", "if (x != x) sum = x;", "if (x > INFINITY) sum = x;", _SHARED),
    _fault("empty rows not recognised", "if (top == -INFINITY) {", "if (top == INFINITY) {", _SHARED),
    _fault("backward's softmax of other rows", "softmax_rows(args, sequence, head, n, i, rows, keys, read,", "softmax_rows(args, sequence, head, n, 0, rows, keys, read,"),
    _fault("scaled twice with a bias", "args.bias.data != nullptr ? 1.0f : args.softmax_scale;", "args.softmax_scale;", _SHARED),
    _fault("lse without the maximum", "softmax[r].top + __builtin_logf(softmax[r].sum)", "__builtin_logf(softmax[r].sum)"),
    _fault("probs not normalised", "store(p + j, mul(load(s + j, m), broadcast(inverse)), m);", "store(p + j, load(s + j, m), m);"),
    _fault("bias of another sequence", "sequence * bias.batch_stride", "0 * sequence * bias.batch_stride", _SHARED),
    _fault("bias added before the scale", "add(mul(load(s + j, n), factor), load(bias + j, n))", "mul(add(load(s + j, n), load(bias + j, n)), factor)", _SHARED),
    # exp
    _fault("exp a term short", "Vec series = broadcast(0.0013814599f);", "Vec series = zero();", _EXP),
    _fault("a power of 2 lost below the normal numbers", "12582912.0f + 191.0f", "12582912.0f + 127.0f", _EXP),
    _fault("exp stops before the subnormals", "broadcast(-104.0f)", "broadcast(-87.0f)", _EXP),
    _fault("exp swallows NaN", "maximum(broadcast(-104.0f), x)", "maximum(x, broadcast(-104.0f))", _EXP),
    # dropout
    _fault("bits of the first 64 columns for all", "iota(static_cast<std::uint32_t>((first + block) * 8))", "iota(static_cast<std::uint32_t>((first + block) * 0))", _VECTORS),
    _fault("lanes of neighbouring words swapped", "kPairs << (2 * word)", "kPairs << (2 * (word ^ 1))", _VECTORS),
    _fault("threshold of 15 bits", "dropout.threshold >> 16", "(dropout.threshold >> 17) * 2", _VECTORS),
    _fault("signed lanes", "_mm512_cmpge_epu16_mask", "_mm512_cmpge_epi16_mask", _AVX512),
    _fault("signed lanes of AVX2", "_mm256_max_epu16(a, limit)", "_mm256_max_epi16(a, limit)", _AVX2),
    _fault("bits of the first keys for all", "kept == nullptr ? ~0ull : *kept++;", "kept == nullptr ? ~0ull : *kept;", _SHARED),
    _fault("bits saved for one head", "(head * args.total + row) * ((args.max_seqlen", "row * ((args.max_seqlen", _SHARED),
    _fault("bits never saved", "std::memcpy(saved_bits(args.keep_bits, args, head, row, keys), drawn, saved_size(keys));", "(void)0;", _SHARED),
    _fault("saved bits of the row within its sequence", "kept_in_backward(args, head, row, keys, bits)", "kept_in_backward(args, head, i + r, keys, bits)"),
    _fault("saved bits not read", "    std::memcpy(bits, saved_bits(args.keep_bits, args, head, row, keys), saved_size(keys));\n    return bits;", "    return drawn_bits(args.dropout, head, row, keys, bits);", _SHARED),
    _fault("room for no bits", "return round_up(columns / 32 + 4, 16);", "return columns - columns;", _SHARED),
    _fault("plane and row swapped", "static_cast<std::uint32_t>(head),", "static_cast<std::uint32_t>(row),", _SHARED),
    _fault("row within its sequence", "kept_in_forward(args, head, row, keys, bits)", "kept_in_forward(args, head, i + r, keys, bits)"),
    _fault("dropout scale missing", "gate : gate * args.dropout.scale;", "gate : gate;"),
    _fault("dropout scale missing in backward", "args.dropout.seed == nullptr ? 1.0f : args.dropout.scale;", "1.0f;"),
    _fault("dP not dropped", "if (kept != nullptr) weigh(dpr, dpr, keys, scale, kept);", "if (kept != nullptr) weigh(dpr, dpr, keys, scale, nullptr);"),
    _fault("dv from undropped P", "if (args.dv != nullptr) weigh(pr, wr, keys, gate * scale, kept);", "if (args.dv != nullptr) weigh(pr, wr, keys, gate * scale, nullptr);"),
    _fault("no dS for dk alone", "return args.dq != nullptr || args.dk != nullptr || args.ds", "return args.dq != nullptr || args.ds", _SHARED),
    # gate and gradients
    _fault("gate forgotten in forward", "factor[r] = inverse * common;", "factor[r] = inverse;"),
    _fault("gate forgotten in dv", "if (args.dv != nullptr) weigh(pr, wr, keys, gate * scale,", "if (args.dv != nullptr) weigh(pr, wr, keys, scale,"),
    _fault("gate forgotten in dS", "sub(load(dpr + j, c), broadcast(delta))), broadcast(gate))", "sub(load(dpr + j, c), broadcast(delta))), broadcast(1.0f))"),
    _fault("gate within dgate", "gate_sum += delta;", "gate_sum += gate * delta;"),
    _fault("dgate of the last row", "gate_sum += delta;", "gate_sum = delta;"),
    _fault("delta missing", "sub(load(dpr + j, c), broadcast(delta))", "load(dpr + j, c)"),
    _fault("P not normalised in backward", "const Vec normal = broadcast(inverse);", "const Vec normal = broadcast(1.0f + 0.0f * inverse);"),
    _fault("dq not scaled", "store_rows(dq, rows, width, args.softmax_scale,", "store_rows(dq, rows, width, 1.0f,"),
    _fault("dk not scaled", "store_rows(dk, n, width, args.softmax_scale,", "store_rows(dk, n, width, 1.0f,"),
    _fault("dk and dv not zeroed", "dk[e] = dv[e] = 0.0f;", "dk[e] = 0.0f;"),
    _fault("dk from dout", "add_transposed(p_seen, stride, rows, q, seen,", "add_transposed(p_seen, stride, rows, dout, seen,"),
    _fault("dk only of the last block", "sums, width, keys, width, true);", "sums, width, keys, width, false);", _SHARED),
    _fault("dbias of another row", "args.ds + cell_of(args, sequence, head, i + r,", "args.ds + cell_of(args, sequence, head, r,"),
    # window
    _fault("left off by one", "left < 0 || i < left ? 0 : i - left;", "left < 0 || i <= left ? 0 : i - left - 1;", _SHARED),
    _fault("left a key short", "left < 0 || i < left ? 0 : i - left;", "left < 0 || i < left ? 0 : i - left + (left > 0);", _SHARED),
    _fault("right off by one", "less(n, i + rows + right), begin", "less(n, i + rows + right + 1), begin", _SHARED),
    _fault("right a key short", "less(n, i + rows + right), begin", "less(n, i + rows + right - (right > 0)), begin", _SHARED),
    _fault("sides swapped", "{begin, right < 0 ? n : less(n, i + rows + right),", "{begin, right < 0 ? n : less(n, i + rows + left),", _SHARED),
    _fault("no limit on the left taken for none on both", "right < 0 ? n : less(n, i + rows", "right < 0 || left < 0 ? n : less(n, i + rows", _SHARED),
    _fault("keys before the window keep their scores", "for (std::int64_t j = 0; j < begin; ++j) row[j] = 0.0f;", "", _SHARED),
    _fault("bias of the window's first keys", "bias == nullptr ? nullptr : bias + seen.begin", "bias == nullptr ? nullptr : bias + keys.begin", _SHARED),
    _fault("the window's maximum over the block's first keys", "top_of_row(s + r * stride + (seen.begin - keys.first),", "top_of_row(s + r * stride,", _SHARED),
    _fault("short sequences see all within a narrow window", "(left < 0 || left + 1 >= n)", "(left < 0 || left + 2 >= n)", _SHARED),
    _fault("bits drawn from the first key on", "keys.end + 63) / 64 - first, bits, first);", "keys.end + 63) / 64 - first, bits, 0);", _SHARED),
    _fault("saved bits of the first keys", "((args.max_seqlen + 31) / 32) + keys.first / 64 * 2;", "((args.max_seqlen + 31) / 32);", _SHARED),
    _fault("bits of a window from a whole word on", "skipped = keys.first % 64;", "skipped = 0 * keys.first;", _SHARED),
    _fault("panels of the first keys", "times_panels(q, width, padded, panels, keys.first - low, keys.end - low,", "times_panels(q, width, padded, panels, 0, keys.end - keys.first,"),
    _fault("a panel's start for its middle", "panels + panel * depth + (j - panel)", "panels + panel * depth", _SHARED),
    _fault("v of the first keys", "v + (keys.begin - low) * v_row", "v"),
    _fault("weights from the vector's start on", "times_rows(scores + (keys.begin - keys.first),", "times_rows(scores,"),
    _fault("probs of the first keys", "static_cast<T*>(args.probs) + cell_of(args, sequence, head, i + r, keys.first)", "static_cast<T*>(args.probs) + cell_of(args, sequence, head, i + r, 0)"),
    _fault("dbias of the first keys", "args.ds + cell_of(args, sequence, head, i + r, keys.first)", "args.ds + cell_of(args, sequence, head, i + r, 0)"),
    _fault("dk of the first keys", "*dk_seen = dk + keys.begin * width", "*dk_seen = dk"),
    _fault("dv's last tile adds old weights", "for (std::int64_t j = keys.columns(); j < read; ++j) wr[j] = 0.0f;", ""),
    _fault("dk's last tile adds old scores", "read = keys.columns() + kRows;", "read = keys.columns();"),
    _fault("dq from the first keys", "k + keys.begin * width, width, seen", "k, width, seen"),
    _fault("packed rows a panel late", "low = all.begin / kKeyPanel * kKeyPanel", "low = round_up(all.begin, kKeyPanel)"),
    _fault("room for no window", "queries + left + right + kKeyPanel", "queries + 0 * (left + right)", "csrc/cpu/attention.h"),
    # fewer heads of k and v
    _fault("k and v heads in turn", "head : head / (args.nheads / args.kv_heads);", "head : head % args.kv_heads;", _SHARED),
    _fault("few keys: a head of k for each of q", "copy_rows<T>(args.k, tokens.start, kv_head, n, padded,", "copy_rows<T>(args.k, tokens.start, head, n, padded,"),
    _fault("dk and dv of one head of q", "head < (kv_head + 1) * shared; ++head", "head < kv_head * shared + 1; ++head"),
    _fault("dk and dv strided like dq", "const std::int64_t step = args.kv_heads * headdim,", "const std::int64_t step = args.nheads * headdim,"),
    _fault("a task per head of q in backward", "cut(args, args.kv_heads,", "cut(args, args.kv_heads - args.kv_heads / 2,", _TASKS),
    # tasks
    _fault("last run of queries lost", "begin < length(b); begin += split)", "begin + split <= length(b) || begin == 0; begin += split)", _TASKS),
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
        "tests/cpu/test_attention_window.py",
        "tests/cpu/test_sanitizers.py::test_kernels_under_sanitizers[attention-address,undefined]",
        "-k",
        "not error_rule and not repeats and not many and not windows and not isa_none",
    ),
    **IN_PLACE,
)
