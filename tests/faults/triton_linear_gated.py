"""Faults of the Triton linear with a gated activation."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import faults_of, of_op

_FORWARD = "kernels/linear_forward.py"
_fault = faults_of("kernels/linear_gated.py")

FAULTS = (
    # products
    _fault("second product from the first half", "gate_tile = gate_weight.load([col_start, k])", "gate_tile = weight.load([col_start, k])", _FORWARD),
    _fault("pointers: second product from the first half", "gate_at = gate_weight +", "gate_at = weight +", _FORWARD),
    _fault("stride of the second half forgotten", "gate_at = gate_weight + outs[None, :] * weight_stride", "gate_at = gate_weight + outs[None, :] * IN", _FORWARD),
    _fault("first block of the second half at every depth", "gate_weight.load([col_start, k])", "gate_weight.load([col_start, 0])", _FORWARD),
    _fault("only the last block of depth counts", "gate_tile.T, gate, input", "gate_tile.T, gate * 0, input", _FORWARD),
    _fault("depth mask dropped from the second half", "gate_at + k, inside[:, None], WHOLE", "gate_at + k, inside[:, None], True", _FORWARD),
    _fault("only the last part of a deep sum", "gate += gate_part", "gate = gate_part", _FORWARD),
    # epilogue
    _fault("halves the wrong way round", "weights = halves(weight.t(), gated)", 'weights = halves(weight.t(), "first")'),
    _fault("bias of the halves not exchanged", "*_none_or_halves(bias, gated),", '*_none_or_halves(bias, "first"),'),
    _fault("second half's bias from the first", "gate += _bias(gate_bias_ptr, cols, OUT)\n        place", "gate += _bias(bias_ptr, cols, OUT)\n        place", _FORWARD),
    _fault("bias in float32 forgotten", "gate += _bias(gate_bias_ptr, cols, OUT)\n        if pre", "gate += 0\n        if pre", _FORWARD),
    _fault("the other half activated", "        HALF_PRECISION: tl.constexpr", "        acc, gate = gate, acc\n        HALF_PRECISION: tl.constexpr", _FORWARD),
    _fault("parts of the second half exchanged", "gate_left, gate_right = _halves(gate)", "gate_right, gate_left = _halves(gate)", _FORWARD),
    _fault("halves of pre the same", "_store(gate_pre, row_start, col_start, pre_at, gate,", "_store(gate_pre, row_start, col_start, pre_at, acc,", _FORWARD),
    _fault("pre's stride is y's", "rows.to(tl.int64)[:, None] * (2 * OUT)", "rows.to(tl.int64)[:, None] * y_stride", _FORWARD),
    _fault("column mask dropped", "mask = (rows < n_rows)[:, None] & (cols < OUT)[None, :]", "mask = (rows < n_rows)[:, None] & (cols >= 0)[None, :]", _FORWARD),
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
