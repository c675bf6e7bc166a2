"""Faults of the Triton feed-forward block's kernel, and of the cheap slope."""

from tests.support.mutation import faults_of, of_op

_ACTIVATION = "kernels/activation.py"
_fault = faults_of("kernels/feed_forward.py")

FAULTS = (
    # the product
    _fault(
        "one step of depth too few by TMA",
        "            for k in range(0, OUT, BLOCK_K):\n                dy_tile = dy.load",
        "            for k in range(0, OUT - 8, BLOCK_K):\n                dy_tile = dy.load",
    ),
    _fault("the weight's first rows again", "weight.load([k, col_start])", "weight.load([0, col_start])"),
    _fault("the weight's rows do not advance", "tl.cast(k, tl.int64) * weight_stride", "0 * weight_stride"),
    _fault("int32 rows of the weight", "tl.cast(k, tl.int64) * weight_stride", "k * weight_stride"),
    _fault("dy does not advance", "_load_depth(dy_at + k,", "_load_depth(dy_at,"),
    _fault("depth past the last", "inside = ks < OUT - k", "inside = ks <= OUT - k"),
    _fault(
        "stride of the weight forgotten",
        "weight + ks.to(tl.int64)[:, None] * weight_stride",
        "weight + ks.to(tl.int64)[:, None] * INNER",
    ),
    _fault("rows past the last", "n_rows - 1).to(tl.int64)", "n_rows).to(tl.int64)"),
    _fault(
        "half of the tiles",
        "row_tiles * COL_TILES, tl.num_programs(0), flatten",
        "row_tiles * COL_TILES, 2 * tl.num_programs(0), flatten",
    ),
    # the epilogue
    _fault("no slope", "acc *= slope(", "acc * slope("),
    _fault("few digits in every type", "few = DTYPE == tl.bfloat16", "few = DTYPE != tl.float32"),
    _fault("the right half stored at the left", "        col_start += HALF\n", ""),
    _fault(
        "mask of g one row too many", "mask = (rows < n_rows)[:, None]", "mask = (rows <= n_rows)[:, None]"
    ),
    _fault("pre of the first tile", "pre.load([row_start, col_start])", "pre.load([0, col_start])"),
    _fault(
        "sums of the last column block",
        "(line == 0) & (cols < INNER)[None, :]",
        "(line == 0) & (cols >= 0)[None, :]",
    ),
    _fault(
        "clamped rows are summed",
        "                acc = tl.where(mask, acc, 0.0)\n",
        "                acc = acc + 0.0\n",
    ),
    _fault(
        "tiles share a partial sum",
        "partials_ptr + row_tile.to(tl.int64) * INNER",
        "partials_ptr + 0 * row_tile.to(tl.int64)",
    ),
    # launcher
    _fault(
        "no rows: dbias unset",
        "dbias = dy.new_zeros((inner if need_dbias",
        "dbias = dy.new_empty((inner if need_dbias",
    ),
    _fault(
        "dbias not summed up",
        "None, None, row_tiles),\n            HIDDEN=inner",
        "None, None, max(1, row_tiles - 1)),\n            HIDDEN=inner",
    ),
    _fault(
        "partial sums rounded",
        "dy.new_empty((row_tiles, inner), dtype=torch.float32)",
        "dy.new_empty((row_tiles, inner))",
    ),
    _fault("TMA for rows of any stride", "linear.fits_tensor_map(dy, down_weight, pre) and", "True or"),
    _fault("exact slope not asked for", "EXACT=activation_kernels.EXACT_GELU", "EXACT=False"),
    _fault("exact slope always", "EXACT=activation_kernels.EXACT_GELU", "EXACT=True"),
    # the slope
    _fault("W without its constant", "return w * u - 0.5", "return w * u", _ACTIVATION),
    _fault("W's square", "(0.23730794 if FEW_DIGITS", "(0.24730794 if FEW_DIGITS", _ACTIVATION),
)

SUITE = of_op(FAULTS, "feed_forward")
