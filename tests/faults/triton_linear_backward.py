"""Faults of the Triton linear's backward, and of the activations' derivatives."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import faults_of, of_op

_ACTIVATION = "kernels/activation.py"
_fault = faults_of("kernels/linear_backward.py")

FAULTS = (
    # the pass
    _fault("g without the derivative", "            g *= slope(", "            g * slope("),
    _fault("g from the rounded dbias", "        dbias += g\n", "        dbias += g.to(dy_ptr.dtype.element_ty).to(tl.float32)\n"),
    _fault("dbias of dy", "        if ACTIVATION is not None:\n            pre =", "        dbias += g\n        if ACTIVATION is not None:\n            pre ="),
    _fault("dbias of the last tile", "        dbias += g\n", "        dbias = g\n"),
    _fault("programs share a partial sum", "dbias_ptr + program.to(tl.int64) * OUT + cols", "dbias_ptr + cols"),
    _fault("columns past the last", "    col_mask = cols < OUT\n    dbias", "    col_mask = cols <= OUT\n    dbias"),
    _fault("rows past the last", "mask = (rows < n_rows)[:, None] & col_mask[None, :]", "mask = (rows <= n_rows)[:, None] & col_mask[None, :]"),
    _fault("second column block reads the first", "    program = tl.program_id(0)\n    cols = tl.program_id(1) * BLOCK_N", "    program = tl.program_id(0)\n    cols = 0 * BLOCK_N"),
    _fault("stride of dy forgotten", "dy_ptr + rows[:, None] * dy_stride", "dy_ptr + rows[:, None] * OUT"),
    _fault("stride of pre forgotten", "pre_ptr + rows[:, None] * pre_stride", "pre_ptr + rows[:, None] * OUT"),
    _fault("g at dy's stride", "g_ptr + rows[:, None] * OUT", "g_ptr + rows[:, None] * dy_stride"),
    _fault("int32 rows in backward", "tl.cast(tile, tl.int64) * BLOCK_M", "tile * BLOCK_M"),
    _fault("few digits in every type", "g *= slope(pre.to(tl.float32), ACTIVATION, FEW_DIGITS=DTYPE == tl.bfloat16)", "g *= slope(pre.to(tl.float32), ACTIVATION, FEW_DIGITS=True)"),
    # launcher
    _fault("no rows: dbias unset", "dbias = dy.new_zeros((out_features if need_dbias", "dbias = dy.new_empty((out_features if need_dbias"),
    _fault("g made where it is not needed", "new_g = need_g and activation is not None", "new_g = activation is not None"),
    _fault("dy overwritten by g", "g = dy.new_empty((rows, out_features)) if new_g else dy", "g = dy"),
    _fault("one column block of dbias", "(triton.cdiv(out_features, 32), 1), dy.device", "(1, 1), dy.device"),
    _fault("a partial sum too few", "None, None, programs)", "None, None, max(1, programs - 1))"),
    _fault("dx from dy", "g @ saved.weight if need.dx", "dy @ saved.weight if need.dx"),
    _fault("dweight needs dx", "need.dx or need.dweight, need.dbias", "need.dx, need.dbias"),
    _fault("dbias rounded twice", "partials = dy.new_empty((programs, out_features), dtype=torch.float32)", "partials = dy.new_empty((programs, out_features))"),
    _fault("dbias not computed without an activation", "if rows == 0 or not (new_g or need_dbias):", "if rows == 0 or not new_g:"),
    # derivatives
    _fault("gelu without the density", "w = u * 0.3989422804014327 - t * p", "w = 0.0 - t * p", _ACTIVATION),
    _fault("gelu's tail with the wrong sign", "far = tl.where(z > 0, 1.0 + d, -d)", "far = tl.where(z > 0, 1.0 + d, d)", _ACTIVATION),
    _fault("gelu's slope near 0 for bfloat16 alone", "if CHEAP or FEW_DIGITS:", "if CHEAP or not FEW_DIGITS:", _ACTIVATION),
    _fault("gelu's slope near 0 used too far out", "tl.where(u < 1.0, 0.5 + z", "tl.where(u < 1.5, 0.5 + z", _ACTIVATION),
    _fault("a coefficient of gelu's slope near 0", "0.0011525692", "0.0011535692", _ACTIVATION),
    _fault("infinity not cut off", "    return tl.minimum(tl.abs(z), MOST, propagate_nan=tl.PropagateNan.ALL)", "    return tl.abs(z)", _ACTIVATION),
    _fault("NaN cut off", "    return tl.minimum(tl.abs(z), MOST, propagate_nan=tl.PropagateNan.ALL)", "    return tl.where(tl.abs(z) < MOST, tl.abs(z), MOST)", _ACTIVATION),
    _fault("tanh's inner derivative without the cube", "rise = 1.5957691216057308 * (u + 0.134145 * u * u * u)", "rise = 1.5957691216057308 * u", _ACTIVATION),
    _fault("half of the rise of gelu_tanh", "rise = 1.5957691216057308", "rise = 0.7978845608028654", _ACTIVATION),
    _fault("silu cut off at 20", "tl.minimum(tl.abs(z), 120.0", "tl.minimum(tl.abs(z), 6.0", _ACTIVATION),
    _fault("tanh's slope halved", "z = 4.0 * product", "z = 2.0 * product", _ACTIVATION),
    _fault("s for s (1 - s)", "_divided(_divided(e, 1.0 + e, FEW_DIGITS), 1.0 + e, FEW_DIGITS)", "_divided(e, 1.0 + e, FEW_DIGITS)", _ACTIVATION),
    _fault("relu's derivative at 0", "z = tl.where(z <= 0, 0.0, 1.0)", "z = tl.where(z < 0, 0.0, 1.0)", _ACTIVATION),
)  # fmt: skip

SUITE = of_op(FAULTS, "linear_backward")
