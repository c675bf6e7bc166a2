"""Faults of the C++ attention_received, and of the layer that keeps the tokens that receive most."""

from tests.support.mutation import IN_PLACE, Suite, faults_of

_CPP = "csrc/cpu/attention_received.cpp"
_LAYER = "csrc/cpu/encoder_layer.cpp"
_BINDING = "csrc/bindings/encoder_layer.cpp"
_fault = faults_of("csrc/cpu/attention_received_simd.cpp")

FAULTS = (
    # sums
    _fault("scale forgotten", "mul(load(scores + r * stride + j, m), scale);", "load(scores + r * stride + j, m);"),
    _fault("lse of the block's first query", "sub(score, broadcast(lse[r]))", "sub(score, broadcast(lse[0]))"),
    _fault("lse of the first sequence", "head * args.total + tokens.start + i;", "head * args.total + i;"),
    _fault("lse of the first head", "args.lse + head * args.total", "args.lse + 0 * args.total"),
    _fault("blind queries give NaN", "if (lse[r] == -INFINITY) continue;", ""),
    _fault("later queries overwrite", "add(load(out + j, m), sum)", "sum"),
    _fault("padded queries give too", "r < rows; ++r) {", "r < padded; ++r) {"),
    _fault("nothing cleared", "out[j] = 0.0f;", "out[j] = out[j];"),
    _fault("a head of k for each of q", "kv_head_of(args, head)", "head"),
    _fault("keys of the first sequence", "transpose_rows<T>(args.k, tokens.start,", "transpose_rows<T>(args.k, 0,"),
    _fault("the last queries dropped", "i < n; i += kQueryBlock", "i + kQueryBlock <= n; i += kQueryBlock"),
    _fault("queries of the first block", "copy_rows<T>(args.q, tokens.start + i,", "copy_rows<T>(args.q, tokens.start,"),
    _fault("the first head twice", "task % args.nheads;", "(task % args.nheads) / 2 * 2;", _CPP),
    _fault("a head less", "head < args.nheads; ++head)", "head + 1 < args.nheads; ++head)", _CPP),
    _fault("heads over each other", "by_head + head * end +", "by_head +", _CPP),
    _fault("rows past the end from the next head", "t < end && head", "head", _CPP),
    _fault("threads share the scratch", "workspace.data() + worker * share", "workspace.data() + 0 * worker * share", _CPP),
    # the choice
    _fault("the first token competes", "own[0] = start;", "own[0] = start + (n > 1);", _CPP),
    _fault("the least received kept", "order.end(), std::greater<>()", "order.end(), std::less<>()", _CPP),
    _fault("rows in the order of what they receive", "std::sort(own + 1, own + count);", "", _CPP),
    _fault("received of the first sequence", "received + start + i", "received + i", _CPP),
    # the layer
    _fault("context not moved", "std::memmove(context + i * width, context + row * width, width);", "", _LAYER),
    _fault("residual of the first rows", "row * layer.x_stride * size, hidden);", "i * layer.x_stride * size, hidden);", _LAYER),
    _fault("residual's rows side by side", "row * layer.x_stride * size, hidden);", "row * hidden, hidden);", _LAYER),
    _fault("residual over the context", "rest.x = base + 2 * plane;", "rest.x = base + 3 * plane;", _LAYER),
    _fault("all rows kept", "rest.total = layer.kept[layer.batch];", "", _LAYER),
    _fault("own kept rows as the first part's", "own.kept_rows[i] += begin;", "own.kept_rows[i] += 0;", _LAYER),
    _fault("own kept rows to the first place", "own.kept_rows += layer.kept[first];", "", _LAYER),
    _fault("own rows of y as if all were kept", "own.y = static_cast<char*>(layer.y) + layer.kept[first] * hidden * size;", "", _LAYER),
    _fault("ends of kept tokens of the run before", "own.kept = kept.data() + first + part;", "own.kept = kept.data() + first;", _LAYER),
    _fault("kept ends as the batch counts them", "layer.kept[b] - layer.kept[firsts[i]]", "layer.kept[b]", _LAYER),
    _fault("more tokens kept than there are", "if (count > n || (n > 0 && count == 0))", "if (n > 0 && count == 0)", _BINDING),
    _fault("a sequence without tokens", "if (count > n || (n > 0 && count == 0))", "if (count > n)", _BINDING),
)  # fmt: skip

TESTS = (
    "tests/ops/test_attention_received.py",
    "tests/ops/test_error_rule.py",
    "tests/compression/test_elimination.py",
)
SUITE = Suite(faults=FAULTS, tests=TESTS, **IN_PLACE)
