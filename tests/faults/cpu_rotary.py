"""Faults of the C++ rotary."""

from tests.support.mutation import IN_PLACE, Suite, faults_of

_CPP = "csrc/cpu/rotary.cpp"
_BINDING = "csrc/bindings/bindings.h"
_HEADER = "csrc/cpu/rotary.h"
_fault = faults_of("csrc/cpu/rotary_simd.cpp")

FAULTS = (
    # signs
    _fault("sine of the left column added", "fnma(right, sine, mul(left, cosine))", "fma(right, sine, mul(left, cosine))"),
    _fault("sine of the right column subtracted", "fma(left, sine, mul(right, cosine)), n);\n    });", "fnma(left, sine, mul(right, cosine)), n);\n    });"),
    _fault("no way back", "args.back ? -1.0f : 1.0f", "args.back ? 1.0f : 1.0f"),
    _fault("interleaved signs exchanged", "spread_s[2 * i] = -sign * s[i];", "spread_s[2 * i] = sign * s[i];"),
    # columns
    _fault("right column one early", "right = load(x + half + j, n)", "right = load(x + half + j - 1, n)"),
    _fault("right columns written on the left", "store(y + half + j,", "store(y + j,"),
    _fault("neighbours not exchanged", "fma(neighbours(here), ", "fma(here, "),
    _fault("half of the neighbours", "rotate_neighbours(x, c, s, 2 * half, y);", "rotate_neighbours(x, c, s, half, y);"),
    _fault("other columns not copied", "if (rest > 0 && x != y)", "if (rest > 1 && x != y)"),
    _fault("other columns from the start", "x + 2 * half, static_cast", "x, static_cast"),
    _fault("interleaved as halves", "            if (args.interleaved)\n", "            if (false)\n"),
    # tables
    _fault("row of the table by the row of x", "position_of(args, row) * half", "position_of(args, begin) * half"),
    _fault("width of the table", "position_of(args, row) * half", "position_of(args, row) * (half + rest)"),
    _fault("cosine of the next column", "spread_c[2 * i] = spread_c[2 * i + 1] = c[i];", "spread_c[2 * i] = spread_c[2 * i + 1] = c[i > 0 ? i - 1 : 0];"),
    _fault("positions of 64 bits read as 32", "args.wide ?", "!args.wide ?", _HEADER),
    # rows
    _fault("heads side by side in x", "x += args.head_stride", "x += args.headdim"),
    _fault("rows side by side in x", "row * args.row_stride", "row * args.heads * args.headdim"),
    _fault("every task writes to the start", "static_cast<T*>(args.y) + row * args.y_stride", "static_cast<T*>(args.y) + (row - begin) * args.y_stride"),
    _fault("last rows lost", "parallel_for((args.rows + step - 1) / step, threads", "parallel_for(args.rows / step, threads", _CPP),
    _fault("past the last row", "std::min(args.rows, begin + step)", "begin + step", _CPP),
    _fault("threads share the spread tables", "workspace.data() + worker * each", "workspace.data() + 0 * worker * each", _CPP),
    # the edges
    _fault("position one past the tables", "position >= rows", "position > rows", _BINDING),
    _fault("negative positions", "if (position < 0 ||", "if (", _BINDING),
)  # fmt: skip

SUITE = Suite(faults=FAULTS, tests=("tests/cpu/test_rotary.py",), **IN_PLACE)
