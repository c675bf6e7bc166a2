"""Faults of the product with an activation's derivative for compute capability 9.0, in the PTX emulator."""

from tests.support.mutation import IN_EMULATOR, Suite, faults_of

_HOST = "csrc/cuda/linear_hopper.cu"
_LAUNCHER = "fastbert/backends/cuda/linear.py"
_fault = faults_of("csrc/cuda/linear_hopper.cuh")

FAULTS = (
    # pre
    _fault("a part of pre is read before it has come", "        wait_phase(&come[kBlock], half);\n", ""),
    _fault("the second half waits for the first one's part", "wait_phase(&come[kBlock], half);", "wait_phase(&come[kBlock], 0);"),
    _fault("a part of pre counts as come when nothing has", "arrive_expecting(&come[own], SlopeTile::kPartBytes);", "arrive(&come[own]);"),
    _fault("two arrivals are expected", "init_barrier(&come[i], 1);", "init_barrier(&come[i], 2);"),
    _fault("the second half has the first one's pre", "row + at / SlopeTile::kParts * 64", "row"),
    _fault("every part of pre has the first columns", "column + own * kSwizzled);\n}", "column);\n}"),
    _fault("all parts of pre come to one place", "load_tile(parts + own * SlopeTile::kPartBytes, pre,", "load_tile(parts, pre,"),
    _fault("pre comes over a part that leaves", "            wait_stores();\n            load_pre(", "            load_pre("),
    _fault("pre comes over the tile before", "            wait_stores();\n            const int own", "            const int own"),
    _fault("the last part of pre never comes", "next < 2 * Tile::kParts)", "next < 2 * Tile::kParts - 1)"),
    _fault("the second half's rows from its own on", "next, row - half * 64, column", "next, row, column"),
    _fault("a pair's slopes exchanged", "unpack_pair<T>(four[e], low, high);\n                c[half]", "unpack_pair<T>(four[e], high, low);\n                c[half]"),
    _fault("16 columns of pre for all", "own_chunk + (i - kAt) / 4));", "own_chunk));"),
    _fault("rows of pre in the order of lanes", "lane / 8 % 2 * 8, own_chunk = lane / 16;\n    const auto block", "lane / 16 * 8, own_chunk = lane / 8 % 2;\n    const auto block"),
    # the weight as it lies
    _fault("the weight's rows are the product's columns", "group_product<T, 0, kSlope>", "group_product<T, 0, 0>"),
    _fault("the weight's three tiles are one", "kSlope ? Tile::kDepth * Tile::kRowBytes : 16", "kSlope ? 0 : 16"),
    _fault("the weight's depth advances along its rows", "kSlope ? kTransposedStep : kDepthStep", "kDepthStep"),
    _fault("the first 64 columns three times", "depth, column + i);", "depth, column);"),
    _fault("the weight's tiles one over the other", "load_tile(b + i * Tile::kRowBytes, maps.b", "load_tile(b, maps.b"),
    # sums
    _fault("rows behind the end are summed", "if (row + Tile::kPartRows > args.rows) {", "if (row > args.rows) {"),
    _fault("the row behind the last one is summed", "i / 2 % 2 * 8 >= args.rows)", "i / 2 % 2 * 8 > args.rows)"),
    _fault("eight rows later is the same row", "row + lane / 4 + i / 2 % 2 * 8 >=", "row + lane / 4 >="),
    _fault("sums of the first half", "(c[0][at] + c[0][at + 2]) + (c[1][at] + c[1][at + 2])", "c[0][at] + c[0][at + 2]"),
    _fault("sums of every other eight rows", "(c[1][at] + c[1][at + 2])", "c[1][at]"),
    _fault("a lane keeps what it gives away", "(upper ? sums[i + kept] : sums[i])", "(upper ? sums[i] : sums[i + kept])"),
    _fault("lanes of one row exchange", "given, 2 * kept)", "given, kept)"),
    _fault("warps have one row of sums", " + row % 64 / Tile::kPartRows;", ";"),
    _fault("row tiles have one set of sums", "row / Tile::kRows * Tile::kWarps + ", ""),
    _fault("sums past the last column", "if (own < args.columns) *reinterpret_cast<float2*>", "*reinterpret_cast<float2*>"),
    _fault("sums of the first 64 columns three times", "const int own = column + kBlock * kSwizzled + 2 * lane;", "const int own = column + 2 * lane;"),
    _fault("sums that nothing asks for", "if (half == 0 || args.sums == nullptr) return;", "if (half == 0) return;"),
    _fault("sums of a half tile", "if (half == 0 || args.sums", "if (half == 1 || args.sums"),
    # host and launchers
    _fault("the weight's map has its rows exchanged", "slope ? args.depth : halves", "slope ? args.columns : halves", _HOST),
    _fault("gelu-tanh's slope is gelu's", ": hopper_kernel<T, GeluTanhSlope, false, SlopeTile>;", ": hopper_kernel<T, CheapGeluSlope, false, SlopeTile>;", _HOST),
    _fault("shared memory of the product without a slope less a part", "slope ? SlopeTile::kBytes : Tile::kBytes", "slope ? SlopeTile::kBytes - 4096 : Tile::kBytes", _HOST),
    _fault("misaligned slopes are taken", "!cuda::aligned(slope ? args.slope_at : args.pre)", "!cuda::aligned(args.pre)", _HOST),
    _fault("a row of sums per 64 rows", "(-(-rows // 128) * 4, columns)", "(-(-rows // 64) * 2, columns)", _LAUNCHER),
    _fault("rows that overlap are taken", "all(_row_stride(m) >= m.shape[1] for m in (x, weight))", "_row_stride(x) >= x.shape[1]", _LAUNCHER),
    _fault("it serves before it is timed", "if plan is None and SLOPE_PRODUCTS and", "if plan is None and", "fastbert/backends/cuda/feed_forward.py"),
)  # fmt: skip

SUITE = Suite(faults=FAULTS, tests=("tests/ptx/test_cuda_linear_slope.py",), **IN_EMULATOR)
