"""Faults of the Triton linear with a gated activation."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import faults_of, of_op

_fault = faults_of("kernels/linear_gated.py")

FAULTS = (
    # products
    _fault("second product from the first half", "b = tl.dot(x_tile, b_weight.load([col_start, k]).T, b,", "b = tl.dot(x_tile, a_weight.load([col_start, k]).T, b,"),
    _fault("pointers: second product from the first half", "b_tile = tl.load(b_weight + weight_at + k)", "b_tile = tl.load(a_weight + weight_at + k)"),
    _fault("first block of the second half at every depth", "b_weight.load([col_start, k])", "b_weight.load([col_start, 0])"),
    _fault("only the last block of depth counts", "a_weight.load([col_start, k]).T, a, input", "a_weight.load([col_start, k]).T, a * 0, input"),
    _fault("column beyond the last read", "tl.minimum(col_start + tl.arange(0, a.shape[1]), OUT - 1)", "(col_start + tl.arange(0, a.shape[1]))"),
    _fault("row beyond the last read", "tl.minimum(row_start + tl.arange(0, a.shape[0]), n_rows - 1)", "(row_start + tl.arange(0, a.shape[0]))"),
    _fault("depth mask dropped from the second half", "b_tile = tl.load(b_weight + weight_at + k, mask=inside[:, None], other=0.0)", "b_tile = tl.load(b_weight + weight_at + k)"),
    _fault("only the last part of a deep sum", "b += b_part", "b = b_part"),
    # epilogue
    _fault("halves the wrong way round", "weights = halves(weight.t(), gated)", 'weights = halves(weight.t(), "first")'),
    _fault("bias of the halves not exchanged", "*_none_or_halves(bias, gated),", '*_none_or_halves(bias, "first"),'),
    _fault("second half's bias from the first", "            b += _bias(b_bias_ptr, cols, OUT)\n        operands", "            b += _bias(a_bias_ptr, cols, OUT)\n        operands"),
    _fault("bias in float32 forgotten", "            b += _bias(b_bias_ptr, cols, OUT)\n        if a_pre", "        if a_pre"),
    _fault("the other half activated", "a = activate(a, ACTIVATION, FEW_DIGITS=few, CHEAP=HALF_PRECISION and not EXACT) * b", "a = activate(b, ACTIVATION, FEW_DIGITS=few, CHEAP=HALF_PRECISION and not EXACT) * a"),
    _fault("right part over the left", "            col_start + HALF,\n", "            col_start,\n"),
    _fault("parts of the second half exchanged", "b_left, b_right = _halves(b)", "b_right, b_left = _halves(b)"),
    _fault("halves of pre the same", "b_pre.store([row_start, col_start], b.to(DTYPE))", "b_pre.store([row_start, col_start], a.to(DTYPE))"),
    _fault("pre's stride is y's", "pre_at = wide_rows * pre_stride + cols[None, :]\n                tl.store", "pre_at = wide_rows * y_stride + cols[None, :]\n                tl.store"),
    _fault("stride of the residual is y's", "residual_ptr + wide_rows * residual_stride", "residual_ptr + wide_rows * y_stride"),
    _fault("column mask dropped", "mask = (rows < n_rows)[:, None] & (cols < OUT)[None, :]", "mask = (rows < n_rows)[:, None] & (cols >= 0)[None, :]"),
    # the gradient
    _fault("gradient without the other half", "da = dy * b * slope(", "da = dy * slope("),
    _fault("the other half's gradient by z itself", "db = dy * activate(a, ACTIVATION, FEW_DIGITS=few, CHEAP=False)", "db = dy * a"),
    _fault("rows of the gradient half as long", "at = rows[:, None] * (2 * OUT) + cols[None, :]", "at = rows[:, None] * OUT + cols[None, :]"),
    _fault("bias gradient of one half twice", "b_sums += db", "b_sums += da"),
    _fault("bias gradient of the last rows", "a_sums += da", "a_sums = da"),
    _fault("row mask of the gradient dropped", "mask = (rows < n_rows)[:, None] & col_mask[None, :]", "mask = (rows >= 0)[:, None] & col_mask[None, :]"),
    _fault("bias gradient of the first half alone", "HIDDEN=2 * columns,", "HIDDEN=columns,"),
)  # fmt: skip

SUITE = of_op(FAULTS, "linear_gated")
