"""Faults of the Triton pass that rounds rows to E4M3."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import faults_of, of_op

_fault = faults_of("kernels/linear_fp8.py")
_LAUNCHER = "fastbert/backends/triton/linear_fp8.py"

FAULTS = (
    _fault("rounded toward 0", "q = x.to(tl.float8e4nv)", 'q = x.to(tl.float8e4nv, fp_downcast_rounding="rtz")'),
    _fault("through bfloat16", "q = x.to(tl.float8e4nv)", "q = x.to(tl.bfloat16).to(tl.float32).to(tl.float8e4nv)"),
    _fault("step of 480", "tl.div_rn(most, 448.0)", "tl.div_rn(most, 480.0)"),
    _fault("largest without its sign", "most = tl.max(tl.abs(first), 1)", "most = tl.max(first, 1)"),
    _fault("largest of the first block", "        most = tl.maximum(most, tl.max(tl.abs(x), 1))\n", ""),
    _fault("no smallest step", "tl.where(step < 1.1754943508222875e-38, 1.0, step)", "tl.where(step == 0.0, 1.0, step)"),
    _fault("multiplied by the step", "inv = tl.div_rn(1.0, step)[:, None]", "inv = step[:, None]"),
    _fault("an inverse of the largest", "inv = tl.div_rn(1.0, step)[:, None]", "inv = tl.div_rn(448.0, tl.where(step == 1.0, 448.0, most))[:, None]"),
    _fault("later columns not scaled", "_store_e4m3(q_ptr, x * inv, rows, start", "_store_e4m3(q_ptr, x, rows, start"),
    _fault("later columns in place of the first", "_store_e4m3(q_ptr, x * inv, rows, start", "_store_e4m3(q_ptr, x * inv, rows, 0"),
    _fault("columns past the last", "mask = (rows < n_rows)[:, None] & (cols < IN)[None, :]\n    q =", "mask = (rows < n_rows)[:, None] & (cols <= IN)[None, :]\n    q ="),
    _fault("rows of the tail stored", "mask = (rows < n_rows)[:, None] & (cols < IN)[None, :]\n    q =", "mask = (rows >= 0)[:, None] & (cols < IN)[None, :]\n    q ="),
    _fault("columns past the last read", "mask = (rows < n_rows)[:, None] & (cols < IN)[None, :]\n    x =", "mask = (rows < n_rows)[:, None] & (cols <= IN)[None, :]\n    x ="),
    _fault("rows of x side by side", "rows[:, None] * x_stride", "rows[:, None] * IN"),
    _fault("rows of q at the stride of a block", "rows[:, None] * IN + cols[None, :], q", "rows[:, None] * (IN + IN % 2) + cols[None, :], q"),
    _fault("32-bit rows", "rows = tl.program_id(0).to(tl.int64) * BLOCK_M", "rows = tl.program_id(0) * BLOCK_M"),
    _fault("activation not rounded", ".to(DTYPE).to(tl.float32)\n    return x", "\n    return x"),
    _fault("activation of the first block alone", "x = _active_tile(x_ptr, x_stride, rows, start, n_rows, IN, ACTIVATION, EXACT, BLOCK_N)\n        _store", "x = _active_tile(x_ptr, x_stride, rows, start, n_rows, IN, None, EXACT, BLOCK_N)\n        _store"),
    _fault("cheap gelu where the exact one is asked for", "CHEAP=HALF and not EXACT)", "CHEAP=HALF)"),
    _fault("cheap gelu in float32", "CHEAP=HALF and not EXACT)", "CHEAP=not EXACT)"),
    _fault("steps of the tail stored", "tl.store(step_ptr + rows, step, mask=rows < n_rows)", "tl.store(step_ptr + rows, step)"),
    # launchers
    _fault("activation forgotten", "ACTIVATION=activation,", "ACTIVATION=None,"),
    _fault("too few programs", "(cdiv(rows, block_m),)", "(rows // block_m or 1,)"),
    _fault("the op forgets the activation", "rounded_rows(x, input_activation)", "rounded_rows(x)", _LAUNCHER),
    _fault("the op activates its output by the input's", "bias), activation, gated)", "bias), input_activation, gated)", _LAUNCHER),
    _fault("sizes that the product does not take", "if not aten.multiplies(x, weight):", "if len(x) == 0:", _LAUNCHER),
)  # fmt: skip

SUITE = of_op(FAULTS, "linear_fp8")
