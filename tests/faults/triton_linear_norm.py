"""Faults of the Triton product with its norm, of its counters and of the order of memory."""

from tests.support.mutation import Fault, Suite


def _fault(name: str, old: str, new: str, file: str = "kernels/linear_norm.py") -> Fault:
    return Fault(name, file, old, new)


FAULTS = (
    # the product
    _fault(
        "a part begins a step late", "range(part * STEPS // SPLIT_K,", "range((part * STEPS + 1) // SPLIT_K,"
    ),
    _fault(
        "the last part ends a step early",
        "(part + 1) * STEPS // SPLIT_K)",
        "((part + 1) * STEPS - 1) // SPLIT_K)",
    ),
    _fault(
        "steps rounded down",
        "STEPS: tl.constexpr = (IN + BLOCK_K - 1) // BLOCK_K",
        "STEPS: tl.constexpr = max(1, IN // BLOCK_K)",
    ),
    _fault("depth past the last", "depth = ks < IN - k", "depth = ks <= IN - k"),
    _fault("x does not advance", "x_tile = tl.load(x_at + k, mask", "x_tile = tl.load(x_at, mask"),
    _fault("whole tiles of the weight do not advance", "tl.load(weight_at + k)  #", "tl.load(weight_at)  #"),
    _fault("rows past the last", "tl.minimum(rows, n_rows - 1)", "tl.minimum(rows, n_rows)"),
    _fault("columns past the last", "tl.minimum(cols, OUT - 1)", "tl.minimum(cols, OUT)"),
    _fault("stride of x forgotten", "[:, None] * x_stride", "[:, None] * IN"),
    _fault("stride of the weight forgotten", "[None, :] * weight_stride", "[None, :] * IN"),
    _fault("stride of the residual forgotten", "wide * residual_stride", "wide * OUT"),
    _fault("int32 rows of x", "n_rows - 1).to(tl.int64)", "n_rows - 1)"),
    _fault("int32 rows of the weight", "OUT - 1).to(tl.int64)", "OUT - 1)"),
    _fault("int32 rows of the residual", "wide = rows.to(tl.int64)[:, None]", "wide = rows[:, None]"),
    _fault("parts swapped with columns", "col_start = program // SPLIT_K %", "col_start = program %"),
    # bias, residual, parts
    _fault("the bias in every part", "mask=(cols < OUT) & first", "mask=(cols < OUT)"),
    _fault("the residual in every part", "mask=mask & first", "mask=mask"),
    _fault("the residual dropped", "acc += residual.to(tl.float32)", "acc += 0 * residual.to(tl.float32)"),
    _fault("bias and residual by the last part", "first = part == 0", "first = part == SPLIT_K"),
    _fault("parts share a place", "place = tl.cast(part, tl.int64)", "place = 0 * tl.cast(part, tl.int64)"),
    _fault(
        "rows of the tail stored",
        "mask = (rows < n_rows)[:, None] & (cols",
        "mask = (rows >= 0)[:, None] & (cols",
    ),
    _fault("one part too few", "tl.static_range(1, SPLIT_K)", "tl.static_range(1, max(1, SPLIT_K - 1))"),
    _fault("the first part twice", "* (part * OUT)", "* (part * OUT - OUT)"),
    _fault(
        "parts in another order",
        "z += tl.load(of_part + at,",
        "z = z - tl.load(partials_ptr + at, mask=mask, other=0.0) + tl.load(of_part + at,",
    ),
    _fault(
        "sums rounded", "rows, out_features), dtype=torch.float32)", "rows, out_features), dtype=x.dtype)"
    ),
    # counters and memory
    _fault("the counter is not set back", "            tl.store(arrivals_ptr + row_tile, 0)\n", ""),
    _fault(
        "the counter is set to one",
        "tl.store(arrivals_ptr + row_tile, 0)",
        "tl.store(arrivals_ptr + row_tile, 1)",
    ),
    _fault(
        "one counter for all row tiles",
        "tl.atomic_add(arrivals_ptr + row_tile,",
        "tl.atomic_add(arrivals_ptr,",
    ),
    _fault("the last but one normalizes", "COL_TILES * SPLIT_K - 1:", "COL_TILES * SPLIT_K - 2:"),
    _fault("the first normalizes", "if before == COL_TILES * SPLIT_K - 1:", "if before == 0:"),
    _fault("parts are not waited for", "COL_TILES * SPLIT_K - 1:", "COL_TILES - 1:"),
    _fault("no barrier before the counter", "        tl.debug_barrier()\n", ""),
    _fault("the counter orders nothing", 'sem="acq_rel"', 'sem="relaxed"'),
    _fault("the counter only releases", 'sem="acq_rel"', 'sem="release"'),
    _fault("the counter only acquires", 'sem="acq_rel"', 'sem="acquire"'),
    _fault("order within the block alone", 'scope="gpu"', 'scope="cta"'),
    # the norm
    _fault("half of the rows of a tile", "n_rows), NORM_M)", "n_rows), 2 * NORM_M)"),
    _fault("eps forgotten", "tl.sqrt_rn(var + eps)", "tl.sqrt_rn(var)"),
    _fault(
        "columns after the last in the variance",
        "tl.where(inside, z - mean[:, None], 0.0)",
        "z - mean[:, None]",
    ),
    _fault(
        "the mean of a block", "tl.div_rn(tl.sum(z, 1), OUT * 1.0)", "tl.div_rn(tl.sum(z, 1), NORM_N * 1.0)"
    ),
    _fault("the bias of the norm dropped", "        y += norm_bias\n", "        y += 0 * norm_bias\n"),
    _fault("the weight of the norm dropped", "rstd[:, None] * norm_weight\n", "rstd[:, None]\n"),
    _fault(
        "mask of y one row too many",
        "mask = (rows < n_rows)[:, None] & inside",
        "mask = (rows <= n_rows)[:, None] & inside",
    ),
    # launchers
    _fault("too few programs", "(tiles * config.split_k,)", "(tiles,)"),
    _fault("the second launch always", "if arrivals is None:", "if True:"),
    _fault("rows of the second launch", "(cdiv(rows, norm_m),)", "(rows // norm_m,)"),
    _fault("more rows than counters", "return rows <= MOST_ROWS and", "return rows <= 4 * MOST_ROWS and"),
    _fault("the tail is not counted", "* operands, tail", "* operands, 0"),
    _fault("the last program's sums count as operands", "TAIL = 4", "TAIL = 1"),
    _fault("a second launch costs nothing", "sum(two) + SECOND_LAUNCH", "sum(two)"),
    _fault(
        "one launch wherever there are counters",
        "inputs.arrivals is not None and in_one_launch(*sizes, device)",
        "inputs.arrivals is not None",
    ),
    _fault("parts without a step", "if c.split_k <= steps or", "if c.split_k <= steps + 2 or"),
    _fault(
        "the last step in no part",
        "steps = cdiv(in_features, BLOCK_K)",
        "steps = in_features // BLOCK_K",
    ),
    _fault(
        "the bucket taken for rows", "return heuristic(2**rows_bucket,", "return heuristic(1 + rows_bucket,"
    ),
)

# what catches most comes first
_TESTS = (
    "optional_operands_and_float32_norms",
    "whoever_is_last_the_result_is_the_same",
    "parts_are_added_in_their_order",
    "launches",
    "eps",
    "no_rows_and_many",
    "the_heuristic_counts_the_bytes_of_the_busiest_multiprocessor",
    "candidates_fit_the_smallest_shared_memory",
    "many_lengths_meet_few_configs",
    "several_norm_tiles_per_row_tile",
    "strided_rows_with_poisoned_padding",
    "offsets_beyond_2_to_31_elements",
    "repeats_are_bit_equal_and_no_atomic_changes_a_sum",
    "one_launch_and_two_are_bit_equal",
    "parts_of_the_depth",
    "outputs_are_correctly_rounded",
    "edges_of_tiles",
)

SUITE = Suite(
    faults=FAULTS,
    tests=tuple(f"tests/triton/test_linear_norm.py::test_{name}" for name in _TESTS),
    timeout_s=600.0,
    environment={"TRITON_INTERPRET": "1"},
)
