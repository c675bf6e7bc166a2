"""Faults of the C++ linear with a gated activation."""

from tests.support.mutation import IN_PLACE, Suite, faults_of

_PANELS = "csrc/cpu/linear_simd.cpp"
_PAIRS = "csrc/cpu/linear_bf16_simd.cpp"
_TASKS = "csrc/cpu/linear.cpp"
_SHARED = "csrc/cpu/linear_simd.h"
_fault = faults_of(_SHARED)

FAULTS = (
    # the epilogue
    _fault("the other half activated", "const bool first = args.gate == Gate::kFirst;", "const bool first = args.gate == Gate::kSecond;"),
    _fault("second half's bias from the first", "load(bias + column + kHalfPanel + j, kLanes)", "load(bias + column + j, kLanes)"),
    _fault("second half of pre beside the first", "store(pre + args.columns, right, n);", "store(pre + kHalfPanel, right, n);"),
    _fault("pre's rows half as long", "2 * r * args.columns + begin + j;", "r * args.columns + begin + j;"),
    _fault("residual of c's stride", "args.residual) + r * args.residual_stride;", "args.residual) + r * args.columns;"),
    _fault("residual of the first columns", "load(residual + begin + j, n)", "load(residual + j, n)"),
    _fault("output written past the row's end", "begin + j, y, n);", "begin + j, y, kLanes);"),
    _fault("columns of whole panels", "begin = column / kPanel * kHalfPanel;", "begin = column;"),
    _fault("no end of the columns", "count = less(width, args.columns - begin);", "count = width;"),
    # panels
    _fault("second half copied from the first", "(args, k, args.columns + of.begin, depth, of.count, out + kHalfPanel)", "(args, k, of.begin, depth, of.count, out + kHalfPanel)", _PANELS),
    _fault("pairs: second half copied from the first", "(args, k, args.columns + of.begin, depth, of.count, out + kHalfPanel)", "(args, k, of.begin, depth, of.count, out + kHalfPanel)", _PAIRS),
    _fault("kept second half from the first", "make_columns<T, Line>(args, half + first,", "make_columns<T, Line>(args, first,", _PANELS),
    _fault("kept second half a row too early", "out + width * kRowsOfLine<T, Line>);", "out + width);", _PANELS),
    _fault("kept panel filled with the other half", "less(width, half - first)", "less(width, args.columns - first)", _PANELS),
    # tasks
    _fault("bias of the second half forgotten", "widened(from, begin + j)", "widened(from, j)", _TASKS),
    _fault("last panels lost", "std::min(padded, column + columns), next,", "std::min(args.columns, column + columns), next,", _TASKS),
    # the gradient
    _fault("gradient of the other half", "args.gate == Gate::kFirst ? 0 : columns, other", "args.gate == Gate::kSecond ? 0 : columns, other", _PANELS),
    _fault("gradient without the other half", "activate_bwd<kind>(mul(dy, load(pre + other, n)), z,", "activate_bwd<kind>(dy, z,", _PANELS),
    _fault("the other half's gradient by z itself", "mul(dy, activate<kind>(z, kIsFloat<T>))", "mul(dy, z)", _PANELS),
    _fault("bias gradient of one half twice", "sum(partial + other + j, dother);", "sum(partial + other + j, dactive);", _PANELS),
    _fault("bias gradient of the last rows", "row == begin ? v : add(load(to, n), v)", "v", _PANELS),
    _fault("bias gradient of the first half alone", "columns = halves * args.columns;", "columns = args.columns;", _TASKS),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS,
    tests=(
        "tests/cpu/test_linear_gated.py",
        "tests/cpu/test_sanitizers.py::test_kernels_under_sanitizers[linear-address,undefined]",
    ),
    **IN_PLACE,
)
