"""Faults of the C++ fused encoder layer."""

from tests.support.mutation import IN_PLACE, Suite, faults_of

_CPP = "csrc/cpu/encoder_layer.cpp"
_PARTS = "csrc/cpu/encoder_layer_parts.cpp"
_HEADER = "csrc/cpu/encoder_layer_parts.h"
_BINDING = "csrc/bindings/encoder_layer.cpp"
_LINEAR = "csrc/cpu/linear_simd.h"
_INT8 = "csrc/cpu/linear_int8_simd.cpp"
_fault = faults_of(_CPP)

FAULTS = (
    # places in the workspace
    _fault("no room for wide inner rows", "2 * plane + std::max(2 * plane, wide)", "4 * plane", _HEADER),
    _fault("context over v", "char* const context = base + 3 * plane;", "char* const context = base + 2 * plane;"),
    _fault("inner rows over the first norm's", "void* const inner = base + 2 * plane;", "void* const inner = attended;"),
    _fault("first norm over its own input's place", "void* const attended = base + plane;", "void* const attended = base;"),
    # parts
    _fault("part's rows of a from the first", "static_cast<const char*>(a) + rows.begin * a_stride * size", "static_cast<const char*>(a)", _PARTS),
    _fault("part's rows of x side by side", "rows.begin * a_stride * size", "rows.begin * depth * size", _PARTS),
    _fault("part's residual from the first row", "static_cast<const char*>(sum.residual) + rows.begin * sum.residual_stride * size", "static_cast<const char*>(sum.residual)", _PARTS),
    _fault("part's norm to the first row", "args.y = static_cast<char*>(y) + first;", "args.y = y;", _PARTS),
    _fault("own sequences as the batch counts them", "ends.push_back(layer.cu_seqlens[b] - begin)", "ends.push_back(layer.cu_seqlens[b])"),
    _fault("ends of the run before", "ends.data() + first + part", "ends.data() + first"),
    _fault("own x from the first row", "own.x = static_cast<const char*>(layer.x) + begin * layer.x_stride * size;", ""),
    _fault("own y from the first row", "own.y = static_cast<char*>(layer.y) + begin * hidden * size;", ""),
    _fault("bias of the first sequences for all", "own.bias.data += first * own.bias.batch_stride;", ""),
    _fault("threads in one place", "return run(own, 1, false, work + memory[part]);", "return run(own, 1, false, work);"),
    _fault("last sequence in no run", "firsts.push_back(layer.batch);", "firsts.push_back(layer.batch - 1);"),
    _fault("rows behind the last sequence in no run", "if (layer.cu_seqlens[layer.batch] != layer.total) return {};", ""),
    _fault("half precision takes no less", "? 4 : 2;\n        const std::int64_t widest", "? 4 : 1;\n        const std::int64_t widest", _HEADER),
    # attention
    _fault("one weight for all three", "multiply(layer, rows, *weights[i], x,", "multiply(layer, rows, *weights[0], x,"),
    _fault("joined rows as single ones", "Heads{base + before * layer.headdim * size, columns,", "Heads{base + before * layer.headdim * size, width,"),
    _fault("joined: v is k", "Heads{base + before * layer.headdim * size,", "Heads{base + (i == 2 ? counts[0] : before) * layer.headdim * size,"),
    _fault("bias forgotten", "    attention.bias = layer.bias;\n", "", _PARTS),
    _fault("gate forgotten", "    attention.gate = layer.gate;\n", "", _PARTS),
    _fault("scale forgotten", "attention.softmax_scale = layer.softmax_scale;", "attention.softmax_scale = 1.0f;", _PARTS),
    _fault("rows behind the last token not zero", "    std::memset(context + end", "    if (end < 0) std::memset(context + end"),
    _fault("rows of x side by side", "multiply(layer, rows, *weights[i], x, x_stride,", "multiply(layer, rows, *weights[i], x, hidden,"),
    # norms
    _fault("second residual is x", "layer.output.bias, attended, hidden}", "layer.output.bias, layer.x, layer.x_stride}"),
    _fault("bias of the output layer forgotten", "    args.x_bias = sum.bias;\n", "", _PARTS),
    _fault("first norm twice", "add_norm(layer, rows, layer.output_norm,", "add_norm(layer, rows, layer.attention_norm,"),
    _fault("eps of the other norm", "args.output_norm.eps = layer.next<double>();", "args.output_norm.eps = (layer.next<double>(), args.attention_norm.eps);", _BINDING),
    # layers one after the other
    _fault("each reads the first rows", "pointer(all.empty() ? x : y)", "pointer(x)", _BINDING),
    _fault("each reads with the first stride", "all.empty() ? x_stride : args.hidden", "x_stride", _BINDING),
    _fault("the first layer again", "cpu_encoder_layer_fwd(all[i], threads)", "cpu_encoder_layer_fwd(all[0], threads)", _BINDING),
    _fault("a layer too few", "i < all.size() &&", "i < all.size() - (all.size() > 1) &&", _BINDING),
    _fault("no bias for the later layers", "args.bias = shared;", "if (all.empty()) args.bias = shared;", _BINDING),
    _fault("no activation", "{true, layer.activation, layer.gated}", "{true, Activation::kNone, layer.gated}"),
    _fault("bias twice", "context, width, hidden, width, {false},", "context, width, hidden, width, {true},"),
    # scores of distances
    _fault("no scores of distances", "failed = attend(layer, attention, threads);", "failed = cpu_attention_fwd(attention, threads, layer.relative);"),
    _fault("keys by the table of queries", "score(layer.distances.key, own.k,", "score(layer.distances.query, own.k,", _PARTS),
    _fault("queries by the table of keys", "score(layer.distances.key, own.k,", "score(layer.distances.key, own.q,", _PARTS),
    _fault("a piece's rows from the first", "+ begin * heads->row_stride * size;", "+ 0 * begin * heads->row_stride * size;", _PARTS),
    _fault("a piece's output to the first rows", "static_cast<char*>(all.out) + begin", "static_cast<char*>(all.out) + 0 * begin", _PARTS),
    _fault("a piece's ends as the batch counts them", "static_cast<std::int32_t>(layer.cu_seqlens[b] - begin)", "static_cast<std::int32_t>(layer.cu_seqlens[b])", _PARTS),
    _fault("a piece's bias of the first sequences", "own.bias.data += first * all.bias.batch_stride;", "own.bias.data += 0;", _PARTS),
    _fault("both terms in one place", "memory += rows * layer.nheads", "memory += 0 * rows * layer.nheads", _PARTS),
    _fault("columns from the panel's first", "scores = {memory + skipped,", "scores = {memory,", _PARTS),
    _fault("heads' scores a row too near", "columns, rows * columns};", "columns, (rows - 1) * columns};", _PARTS),
    _fault("sequences in no piece", "attend_by_distance(layer, args, firsts[i], firsts[i + 1],", "attend_by_distance(layer, args, firsts[i], firsts[i] + 1,", _PARTS),
    _fault("columns of the table's first rows", "args.distances.first = table.next<std::int64_t>();", "args.distances.first = 0 * table.next<std::int64_t>();", _BINDING),
    # layers that rotate, with norms before the blocks, gates and windows
    _fault("window forgotten", "    attention.window = layer.window;\n", "", _PARTS),
    _fault("only queries rotated", "together ? counts[0] + counts[1] : counts[i]", "counts[i]"),
    _fault("keys of three products not rotated", "i < (together ? 1 : 2) && why", "i < 1 && why"),
    _fault("part's positions from the first row", "args.positions = layer.positions + rows.begin;", "args.positions = layer.positions;", _PARTS),
    _fault("own positions from the first row", "if (own.positions != nullptr) own.positions += begin;", ""),
    _fault("first norm skipped", "layer.pre_norm && layer.attention_norm.eps >= 0.0;", "false;"),
    _fault("norm that is missing", "layer.pre_norm && layer.attention_norm.eps >= 0.0;", "layer.pre_norm;"),
    _fault("norm before attention again", "layer.pre_norm ? layer.output_norm : layer.attention_norm", "layer.attention_norm"),
    _fault("sum after attention not kept", "layer.pre_norm ? layer.y : nullptr", "nullptr"),
    _fault("output without its residual", "Onto::kAdds}, layer.y", "Onto::kNone}, layer.y"),
    _fault("gate of its own added", "Onto::kMultiplies}, inner", "Onto::kAdds}, inner"),
    _fault("gate of its own taken for the other factor", "alone ? layer.activated : layer.intermediate", "layer.intermediate"),
    _fault("other half activated", "args.gated = gate_of(layer.next<int>());", "args.gated = static_cast<Gate>(3 - layer.next<int>());", _BINDING),
    _fault("sides of the window exchanged", "args.window.left = layer.next<std::int64_t>();\n        args.window.right", "args.window.right = layer.next<std::int64_t>();\n        args.window.left", _BINDING),
    _fault("sum of a strided x", "rows.begin * sum.x_stride * size", "rows.begin * hidden * size", _PARTS),
    # attention narrower than the rows, or wider
    _fault("places as wide as attention", "std::max(layer.nheads * layer.headdim, layer.hidden)", "layer.nheads * layer.headdim", _HEADER),
    _fault("values as wide as the rows", "Heads{base + i * plane, counts[i] * layer.headdim, layer.headdim}", "Heads{base + i * plane, hidden, layer.headdim}"),
    # RMSNorm, shared heads of keys, head-major rows, interleaved rotation
    _fault("LayerNorm for RMSNorm", "    args.rms = layer.rms;\n", "", _PARTS),
    _fault("heads of keys not shared", "attention.kv_heads = layer.kv_heads;", "attention.kv_heads = layer.nheads;", _PARTS),
    _fault("shared keys as wide as queries", "x_stride, counts[i] * layer.headdim, hidden", "x_stride, width, hidden"),
    _fault("one product of three equal widths", "columns = (layer.nheads + 2 * layer.kv_heads)", "columns = 3 * layer.nheads"),
    _fault("head-major keys behind all queries", "Heads{base + i * layer.headdim * size, columns, 3 *", "Heads{base + i * width * size, columns, 3 *"),
    _fault("head-major heads next to each other", "columns, 3 * layer.headdim}", "columns, layer.headdim}"),
    _fault("halves rotated, not neighbours", "    args.interleaved = layer.interleaved;\n", "", _PARTS),
    _fault("head-major values rotated", "together = joined && !layer.head_major;", "together = joined;"),
    _fault("rotated in place: the next head overwritten", "args.y == args.x ? args.head_stride : args.headdim", "args.headdim", "csrc/cpu/rotary_simd.cpp"),
    _fault("RMSNorm for head-major", "args.rms = layer.next<bool>();\n        args.head_major = layer.next<bool>();", "args.head_major = layer.next<bool>();\n        args.rms = layer.next<bool>();", _BINDING),
    # layers with bottlenecks
    _fault("narrow context over wide inner rows", "return std::max(3 * plane, wide);", "return 3 * plane;", _HEADER),
    _fault("keys' narrow place is the residual's", "shared ? residual : residual + places.narrow", "residual"),
    _fault("one bottleneck is both, whichever it is", "own.keys.panels == own.residual.panels;", "own.narrow_keys;"),
    _fault("NoNorm of the other bottleneck", "narrowed(own.keys, own.keys_norm, keys)", "narrowed(own.keys, own.residual_norm, keys)"),
    _fault("values from what keys are made from", "i < 2 ? own.narrow_keys : own.narrow_values", "own.narrow_keys"),
    _fault("narrow rows of x side by side", "w, layer.x, layer.x_stride, narrow, hidden,", "w, layer.x, hidden, narrow, hidden,"),
    _fault("context behind the last token not zero", "(layer.total - used) * width * size", "0 * width * size"),
    _fault("block without its residual", "Onto::kAdds, norm}, to", "Onto::kNone, norm}, to"),
    _fault("one NoNorm for all blocks", "summed(feed.down, feed.norm,", "summed(feed.down, layer.output_norm,"),
    _fault("blocks without activation", "{true, layer.activation}, memory", "{true}, memory"),
    _fault("wide residual not copied", "layer.x != layer.y && r <", "layer.x == layer.y && r <"),
    _fault("wide residual's rows side by side", "r * layer.x_stride * size, hidden * size", "r * hidden * size, hidden * size"),
    _fault("only the first rows' residual", "r = rows.begin; layer.x", "r = 0; layer.x"),
    _fault("NoNorm's weight for its bias in 8 bits", "epilogue.no_norm.bias.data,", "epilogue.no_norm.weight.data,", _PARTS),
    _fault("8-bit factors not handed on", "w.smooth,\n", "nullptr,\n", _PARTS),
    _fault("one range not handed on", "w.range};", "nullptr};", _PARTS),
    _fault("rows of weights alone rounded", "w.scale != nullptr && !w.float_rows", "w.scale != nullptr", _PARTS),
    _fault("factors of weights alone lost", "args.scale = w.scale;", "args.scale = nullptr;", _PARTS),
    _fault("8-bit factors not read", "return {panels, scale, bias, smooth,", "return {panels, scale, bias, nullptr,", _BINDING),
    _fault("last block forgotten", "    own.feeds.push_back({args.intermediate, args.output, args.output_norm});\n", "", _BINDING),
    _fault("output's bottleneck for the residual's", "own.output = number.linear();", "own.output = (number.linear(), own.residual);", _BINDING),
    _fault("NoNorm of what is not rounded", "if (args.multiplies || args.norm_weight != nullptr) z =", "if (args.multiplies) z =", _LINEAR),
    _fault("NoNorm of the rounded sum", "z = fma(z, load(", "z = fma(rounded<T>(z), load(", _LINEAR),
    _fault("NoNorm's bias of the first panel", "args.norm_bias) + column + j, n));", "args.norm_bias) + j, n));", _LINEAR),
    _fault("8-bit NoNorm forgotten without a residual", "args.onto != Onto::kNone || args.norm_weight != nullptr", "args.onto != Onto::kNone", _INT8),
    _fault("8-bit NoNorm's weight of the first panel", "args.norm_weight) + column + j, n),", "args.norm_weight) + j, n),", _INT8),
)  # fmt: skip

TESTS = (
    "tests/execution/test_cpu.py",
    "tests/execution/test_cpu_bottleneck.py",
    "tests/execution/test_cpu_distances.py",
    "tests/models/test_layer_forms.py",
    "tests/layers/test_smoothing.py",
    "tests/layers/test_activations.py",
)
SUITE = Suite(faults=FAULTS, tests=TESTS, **IN_PLACE)
