"""Faults of the Triton product with its norm, of its counters and of the order of memory."""

from tests.support.mutation import faults_of, of_op

_FORWARD = "kernels/linear_forward.py"
_NORM = "kernels/layer_norm_forward.py"
_fault = faults_of("kernels/linear_norm.py")

FAULTS = (
    # the product
    _fault(
        "a part begins a step late",
        "first, last = part * STEPS // SPLIT_K",
        "first, last = (part * STEPS + 1) // SPLIT_K",
    ),
    _fault(
        "steps rounded down",
        "STEPS: tl.constexpr = (IN + BLOCK_K - 1) // BLOCK_K",
        "STEPS: tl.constexpr = max(1, IN // BLOCK_K)",
    ),
    _fault("depth past the last", "inside = ks < IN - k", "inside = ks <= IN - k", _FORWARD),
    _fault("x does not advance", "_load_depth(x_at + k,", "_load_depth(x_at,", _FORWARD),
    _fault("the weight does not advance", "_load_depth(weight_at + k,", "_load_depth(weight_at,", _FORWARD),
    _fault("rows past the last", "n_rows - 1).to(tl.int64)", "n_rows).to(tl.int64)", _FORWARD),
    _fault("columns past the last", "OUT - 1).to(tl.int64)", "OUT).to(tl.int64)", _FORWARD),
    _fault("stride of x forgotten", "[:, None] * x_stride", "[:, None] * IN", _FORWARD),
    _fault("int32 rows of x", "n_rows - 1).to(tl.int64)", "n_rows - 1)", _FORWARD),
    _fault("int32 rows of the weight", "OUT - 1).to(tl.int64)", "OUT - 1)", _FORWARD),
    _fault("parts swapped with columns", "col_start = program // SPLIT_K %", "col_start = program %"),
    # bias, residual, parts
    _fault("the bias in every part", "mask=(cols < OUT) & is_first", "mask=(cols < OUT)"),
    _fault("the residual in every part", "mask=mask & is_first", "mask=mask"),
    _fault("the residual dropped", "acc += residual.to(tl.float32)", "acc += 0 * residual.to(tl.float32)"),
    _fault("parts share a place", "place = tl.cast(part, tl.int64)", "place = 0 * tl.cast(part, tl.int64)"),
    _fault(
        "rows of the tail stored",
        "mask = (rows < n_rows)[:, None] & (cols",
        "mask = (rows >= 0)[:, None] & (cols",
    ),
    _fault("one part too few", "tl.static_range(1, SPLIT_K)", "tl.static_range(1, max(1, SPLIT_K - 1))"),
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
        "one counter for all row tiles",
        "tl.atomic_add(arrivals_ptr + row_tile,",
        "tl.atomic_add(arrivals_ptr,",
    ),
    _fault("the last but one normalizes", "COL_TILES * SPLIT_K - 1:", "COL_TILES * SPLIT_K - 2:"),
    _fault("parts are not waited for", "COL_TILES * SPLIT_K - 1:", "COL_TILES - 1:"),
    _fault("no barrier before the counter", "        tl.debug_barrier()\n", ""),
    _fault("the counter orders nothing", 'sem="acq_rel"', 'sem="relaxed"'),
    _fault("the counter only releases", 'sem="acq_rel"', 'sem="release"'),
    _fault("order within the block alone", 'scope="gpu"', 'scope="cta"'),
    # the norm
    _fault("half of the rows of a tile", "n_rows), NORM_M)", "n_rows), 2 * NORM_M)"),
    _fault("eps forgotten", "centred, 1), eps, OUT)", "centred, 1), 0.0, OUT)"),
    _fault(
        "columns after the last in the variance",
        "return mean, tl.where(inside, z - mean[:, None], 0.0)",
        "return mean, z - mean[:, None]",
        _NORM,
    ),
    _fault(
        "the mean of a block",
        "_, centred = centred_rows(z, inside, OUT)",
        "_, centred = centred_rows(z, inside, NORM_N)",
    ),
    _fault("the weight of the norm dropped", "rstd[:, None] * norm_weight\n", "rstd[:, None]\n"),
    _fault(
        "mask of y one row too many",
        "mask = (rows < n_rows)[:, None] & inside",
        "mask = (rows <= n_rows)[:, None] & inside",
    ),
    # launchers
    _fault("too few programs", "(tiles * config.split_k,)", "(tiles,)"),
    _fault("rows of the second launch", "(cdiv(rows, norm_m),)", "(rows // norm_m,)"),
    _fault("more rows than counters", "return rows <= MOST_ROWS and", "return rows <= 4 * MOST_ROWS and"),
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
)

SUITE = of_op(FAULTS, "linear_norm")
