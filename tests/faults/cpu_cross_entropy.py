"""Faults of the C++ cross_entropy."""

from tests.support.mutation import IN_PLACE, Suite, faults_of

_SIMD = "csrc/cpu/cross_entropy_simd.cpp"
_TASKS = "csrc/cpu/cross_entropy.cpp"
_BINDING = "csrc/bindings/cross_entropy.cpp"
_fault = faults_of(_SIMD)

FAULTS = (
    # forward
    _fault("maximum not subtracted", "const Vec d = sub(load(x + begin + j, n), shift);", "const Vec d = load(x + begin + j, n);"),
    _fault("tail lanes in the maximum", "n == kLanes ? v : first_or(v, n, kLowest)", "v"),
    _fault("tail lanes in the sum", "first(exponential(d), n)", "exponential(d)"),
    _fault("one block alone", "for (std::int64_t begin = 0; begin < classes; begin += kBlock) {", "for (std::int64_t begin = 0; begin < 1; begin += kBlock) {"),
    _fault("every block the first", "load(x + begin + j, n)", "load(x + j, n)"),
    _fault("the last block as long as a whole one", "classes - begin < kBlock ? classes - begin : kBlock", "kBlock < classes ? kBlock : classes"),
    _fault("blocks overwrite each other", "out.exponentials += sum4(exponentials);", "out.exponentials = sum4(exponentials);"),
    _fault("smoothing not shared out", "smoothing * sums.shifted / static_cast<double>(args.classes)", "smoothing * sums.shifted"),
    _fault("the label weighs 1 under smoothing", "log_sum - (1.0 - smoothing) * target", "log_sum - target"),
    _fault("the label's logit not shifted", "static_cast<double>(sum(load(x + label, 1))) - top", "static_cast<double>(sum(load(x + label, 1)))"),
    _fault("the first class for the label", "sum(load(x + label, 1))", "sum(load(x, 1))"),
    _fault("negative labels for ignored ones", "if (label == args.ignore_index) continue;", "if (label < 0) continue;"),
    _fault("loss of ignored rows not set", "losses[row] = 0.0;", ""),
    _fault("lse in one number", "args.lse[args.rows + row] = static_cast<float>(log_sum);", "args.lse[args.rows + row] = static_cast<float>(log_sum + top);"),
    _fault("rows without gaps", "args.logits) + row * args.stride;\n        const float top", "args.logits) + row * args.classes;\n        const float top"),
    # backward
    _fault("rows without gaps in backward", "args.logits) + row * args.stride;\n        const double inverse", "args.logits) + row * args.classes;\n        const double inverse"),
    _fault("dlogits with the logits' gaps", "args.dlogits) + row * args.classes;", "args.dlogits) + row * args.stride;"),
    _fault("ignored rows not zeroed", "__builtin_memset(dx, 0, static_cast<std::size_t>(args.classes) * sizeof(T));", ""),
    _fault("softmax not normalised", "__builtin_exp(-static_cast<double>(args.lse[args.rows + row]))", "1.0"),
    _fault("maximum of another row", "shift = broadcast(args.lse[row]), normal", "shift = broadcast(args.lse[0]), normal"),
    _fault("upstream gradient forgotten", "mul(fma(e, normal, even), upstream)", "fma(e, normal, even)"),
    _fault("smoothing forgotten in backward", "fma(e, normal, even)", "mul(e, normal)"),
    _fault("the label's own gradient forgotten", "store(dx + label, broadcast(static_cast<float>(d)), 1);", ""),
    _fault("the label loses 1 under smoothing", "(p - own_share) * factor", "(p - 1.0 - share) * factor"),
    _fault("the label's gradient rounded before the difference", "const double p = sum(own) * inverse;", "const double p = static_cast<float>(sum(own) * static_cast<float>(inverse)) * (1.0 + 1e-6);"),
    # tasks
    _fault("all rows counted", "count += args.labels[row] != args.ignore_index;", "count += 1;", _TASKS),
    _fault("no label divides by 0", "count > 0 ? static_cast<float>(total / static_cast<double>(count)) : 0.0f", "static_cast<float>(total / static_cast<double>(count))", _TASKS),
    _fault("backward not divided by the count", "static_cast<double>(std::max<std::int64_t>(1, *args.count))", "1.0", _TASKS),
    _fault("losses summed in float", "double total = 0.0;", "float total = 0.0f;", _TASKS),
    _fault("last rows lost", "parallel_for((args.rows + step - 1) / step, threads", "parallel_for(args.rows / step, threads", _TASKS),
    # the edges
    _fault("label one past the classes", "label >= classes", "label > classes", _BINDING),
    _fault("negative labels", "(label < 0 || label >= classes)", "(label >= classes)", _BINDING),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS,
    tests=("tests/cpu/test_cross_entropy.py", "-k", "not error_rule and not mib and not default"),
    **IN_PLACE,
)
