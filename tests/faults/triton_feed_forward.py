"""Faults of the Triton feed-forward block's kernel, and of the cheap slope."""

from tests.support.mutation import Fault, Suite

_ACTIVATION = "kernels/activation.py"


def _fault(name: str, old: str, new: str, file: str = "kernels/feed_forward.py") -> Fault:
    return Fault(name, file, old, new)


FAULTS = (
    # the product
    _fault(
        "one step of depth too few by TMA",
        "            for k in range(0, OUT, BLOCK_K):\n                dy_tile = dy.load",
        "            for k in range(0, OUT - 8, BLOCK_K):\n                dy_tile = dy.load",
    ),
    _fault("the first depth again by TMA", "dy.load([row_start, k])", "dy.load([row_start, 0])"),
    _fault("the weight's first rows again", "weight.load([k, col_start])", "weight.load([0, col_start])"),
    _fault("the weight's columns at the rows", "weight.load([k, col_start])", "weight.load([k, row_start])"),
    _fault(
        "the weight's rows do not advance", "= tl.cast(k, tl.int64) * weight_stride", "= 0 * weight_stride"
    ),
    _fault("int32 rows of the weight", "tl.cast(k, tl.int64) * weight_stride", "k * weight_stride"),
    _fault("dy does not advance", "dy_tile = tl.load(dy_at + k,", "dy_tile = tl.load(dy_at,"),
    _fault("depth past the last", "inside = ks < OUT - k", "inside = ks <= OUT - k"),
    _fault("stride of dy forgotten", "dy + rows[:, None] * dy_stride", "dy + rows[:, None] * OUT"),
    _fault(
        "stride of the weight forgotten",
        "weight + ks.to(tl.int64)[:, None] * weight_stride",
        "weight + ks.to(tl.int64)[:, None] * INNER",
    ),
    _fault(
        "int32 rows of dy",
        "tl.minimum(row_start + tl.arange(0, BLOCK_M), n_rows - 1).to(tl.int64)",
        "tl.minimum(row_start + tl.arange(0, BLOCK_M), n_rows - 1)",
    ),
    _fault("rows past the last", "n_rows - 1).to(tl.int64)", "n_rows).to(tl.int64)"),
    _fault(
        "columns past the last",
        "tl.minimum(col_start + tl.arange(0, BLOCK_N), INNER - 1)",
        "tl.minimum(col_start + tl.arange(0, BLOCK_N), INNER)",
    ),
    _fault(
        "half of the tiles",
        "row_tiles * COL_TILES, tl.num_programs(0), flatten",
        "row_tiles * COL_TILES, 2 * tl.num_programs(0), flatten",
    ),
    # the epilogue
    _fault("no slope", "acc *= slope(", "acc * slope("),
    _fault("few digits in every type", "few = DTYPE == tl.bfloat16", "few = DTYPE != tl.float32"),
    _fault("cheap in float32", "CHEAP=HALF_PRECISION and not EXACT", "CHEAP=not EXACT"),
    _fault("the right half stored at the left", "            col_start + HALF,", "            col_start,"),
    _fault(
        "mask of g one row too many", "mask = (rows < n_rows)[:, None]", "mask = (rows <= n_rows)[:, None]"
    ),
    _fault(
        "mask of g one column too many",
        "& (cols < INNER)[None, :]\n        at =",
        "& (cols <= INNER)[None, :]\n        at =",
    ),
    _fault("pre of the first tile", "pre.load([row_start, col_start])", "pre.load([0, col_start])"),
    _fault(
        "sums of the last column block",
        "(line == 0) & (cols < INNER)[None, :]",
        "(line == 0) & (cols >= 0)[None, :]",
    ),
    _fault(
        "sums of half the rows",
        "tl.where(line + tl.zeros((64, acc.shape[0]), tl.int32) == 0",
        "tl.where(line + tl.arange(0, acc.shape[0])[None, :] // (acc.shape[0] // 2) == 0",
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
        "            row_tiles,\n            HIDDEN=inner",
        "            max(1, row_tiles - 1),\n            HIDDEN=inner",
    ),
    _fault(
        "partial sums rounded",
        "dy.new_empty((row_tiles, inner), dtype=torch.float32)",
        "dy.new_empty((row_tiles, inner))",
    ),
    _fault(
        "dbias where it is not needed", "dtype=torch.float32) if need_dbias else None", "dtype=torch.float32)"
    ),
    _fault("TMA for rows of any stride", "linear.fits_tensor_map(dy, down_weight, pre) and", "True or"),
    _fault(
        "TMA for any start of pre",
        "fits_tensor_map(dy, down_weight, pre)",
        "fits_tensor_map(dy, down_weight)",
    ),
    _fault("exact slope not asked for", "EXACT=activation_kernels.EXACT_GELU", "EXACT=False"),
    _fault("exact slope always", "EXACT=activation_kernels.EXACT_GELU", "EXACT=True"),
    # the slope
    _fault("W without its constant", "return w * u - 0.5", "return w * u", _ACTIVATION),
    _fault(
        "W's linear term",
        "(0.79618587 if FEW_DIGITS else 0.79736814)",
        "(0.79736814 if FEW_DIGITS else 0.80736814)",
        _ACTIVATION,
    ),
    _fault("W's square", "(0.23730794 if FEW_DIGITS", "(0.24730794 if FEW_DIGITS", _ACTIVATION),
    _fault("W's cube in float16", "else 0.11811384)", "else 0.11911384)", _ACTIVATION),
)

# what catches most comes first
_TESTS = (
    "limits_and_nan",
    "exact_on_small_integers",
    "no_rows",
    "nothing_is_launched_for_nothing",
    "only_what_is_needed",
    "a_nan_stays_in_its_column",
    "strided_rows_with_poisoned_padding",
    "a_start_that_no_tensor_map_has",
    "offsets_beyond_2_to_31_elements",
    "slopes_everywhere",
    "sums_by_a_product_and_by_lanes",
    "a_cheap_slope_is_better_than_a_rounded_product",
    "sums_are_kept_in_float32",
    "exact_gelu_has_an_exact_slope",
    "more_tiles_than_programs",
    "training_is_served_by_the_table",
    "edges_of_tiles",
)

SUITE = Suite(
    faults=FAULTS,
    tests=(
        *(f"tests/triton/test_feed_forward.py::test_{name}" for name in _TESTS),
        *("tests/triton/test_cases.py", "-k", "feed_forward"),
    ),
    timeout_s=600.0,
    environment={"TRITON_INTERPRET": "1"},
)
