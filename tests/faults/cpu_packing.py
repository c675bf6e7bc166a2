"""Faults of the C++ pack and unpack."""

from tests.support.mutation import IN_PLACE, Suite, faults_of

_CPP = "csrc/cpu/packing.cpp"
_BINDING = "csrc/bindings/packing.cpp"
_fault = faults_of(_CPP)

FAULTS = (
    # runs
    _fault("gaps in a run", "indices[t + run] == indices[t] + run", "indices[t + run] > indices[t]"),
    _fault("a run past its task", "while (t + run < end &&", "while (t + run <= end &&"),
    _fault("rows side by side in x", "if (stride == width) {", "if (stride >= width) {"),
    _fault("last row of a run lost", "std::memcpy(to, from, static_cast<std::size_t>(count * width));", "std::memcpy(to, from, static_cast<std::size_t>((count - 1) * width));"),
    # single elements
    _fault("wide rows taken for bytes", "if (args.width != sizeof(element)) return false;", "if (args.width < static_cast<std::int64_t>(sizeof(element))) return false;"),
    _fault("elements side by side in x", "x + args.indices[t] * args.stride, sizeof(T)", "x + args.indices[t] * sizeof(T), sizeof(T)"),
    _fault("elements packed in place", "y + t * sizeof(T), x", "y + args.indices[t] * 0 + begin * sizeof(T), x"),
    _fault("elements not put back in place", "y + args.indices[t] * sizeof(T), x", "y + t * sizeof(T), x"),
    _fault("no zeros between elements", "std::memset(y + row * args.width, 0, static_cast<std::size_t>((end_row - row) * args.width));", ""),
    # tasks
    _fault("last rows not packed", "parallel_for((args.total + step - 1) / step, threads", "parallel_for(args.total / step, threads"),
    _fault("last rows not unpacked", "parallel_for((rows + step - 1) / step, threads", "parallel_for(rows / step, threads"),
    _fault("packed past the last", "const std::int64_t end = std::min(args.total, (task + 1) * step);", "const std::int64_t end = (task + 1) * step;"),
    _fault("every task packs to the start", "run, y + t * args.width);", "run, y + (t - task * step) * args.width);"),
    _fault("every task begins with the first index", "std::int64_t t = std::lower_bound(first, last, row) - first;", "std::int64_t t = 0 * row;"),
    _fault("no zeros between rows", "std::memset(y + row * args.width, 0, static_cast<std::size_t>((next - row) * args.width));", ""),
    _fault("zeros one row short", "static_cast<std::size_t>((next - row) * args.width)", "static_cast<std::size_t>((next - row - (next > row)) * args.width)"),
    _fault("zeros over the rows of a run", "row += run;\n", "row += 1;\n"),
    # the edges
    _fault("index one past the rows", "out.indices[t] >= rows", "out.indices[t] > rows", _BINDING),
    _fault("equal indices", "out.indices[t] <= (t > 0", "out.indices[t] < (t > 0", _BINDING),
    _fault("negative indices", "out.indices[t - 1] : -1)", "out.indices[t - 1] : -2)", _BINDING),
    _fault("indices not looked at", "any |= wrong(t);", ";", _BINDING),
)  # fmt: skip

SUITE = Suite(
    faults=FAULTS, tests=("tests/cpu/test_packing.py", "-k", "not error_rule and not default"), **IN_PLACE
)
