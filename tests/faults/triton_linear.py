"""Faults of the Triton linear, its activations and its look-up of configs."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import faults_of, of_op

_KERNEL = "kernels/linear.py"
_FORWARD = "kernels/linear_forward.py"
_ACTIVATION = "kernels/activation.py"
_TUNING = "kernels/tuning.py"
_fault = faults_of(_KERNEL)

FAULTS = (
    # tile order
    _fault("last group taken for a full one", "height = tl.minimum(row_tiles - first_row, GROUP_M)", "height = GROUP_M", _FORWARD),
    _fault("row within the group forgotten", "return first_row + within % height,", "return first_row,", _FORWARD),
    _fault("column tile from the group's full height", "within // height\n", "within // GROUP_M\n", _FORWARD),
    _fault("last tile forgotten", "row_tiles * COL_TILES, tl.num", "row_tiles * COL_TILES - 1, tl.num", _FORWARD),
    # masks and offsets
    _fault("row beyond the last read", "tl.minimum(row_start + tl.arange(0, acc.shape[0]), n_rows - 1)", "(row_start + tl.arange(0, acc.shape[0]))", _FORWARD),
    _fault("column beyond the last read", "tl.minimum(col_start + tl.arange(0, acc.shape[1]), OUT - 1)", "(col_start + tl.arange(0, acc.shape[1]))", _FORWARD),
    _fault("only the last part of a deep sum", "acc += part\n", "acc = part\n", _FORWARD),
    _fault("int32 rows of x", "n_rows - 1).to(tl.int64)", "n_rows - 1)", _FORWARD),
    _fault("int32 rows of weight", "OUT - 1).to(tl.int64)", "OUT - 1)", _FORWARD),
    _fault("int32 rows of y", "at = rows.to(tl.int64)[:, None] * y_stride", "at = rows[:, None] * y_stride", _FORWARD),
    _fault("row mask dropped", "mask = (rows < n_rows)[:, None] & (cols < OUT)[None, :]", "mask = (rows >= 0)[:, None] & (cols < OUT)[None, :]", _FORWARD),
    _fault("depth mask dropped from x", "x_at + k, inside[None, :]", "x_at + k, (ks >= 0)[None, :]", _FORWARD),
    _fault("always read as a whole number of blocks", "WHOLE: tl.constexpr = IN % BLOCK_K == 0", "WHOLE: tl.constexpr = IN % 8 == 0", _FORWARD),
    _fault("stride of weight forgotten", "weight_at = weight + outs[None, :] * weight_stride", "weight_at = weight + outs[None, :] * IN", _FORWARD),
    _fault("stride of the residual swapped for y's", "[:, None] * residual_stride", "[:, None] * y_stride", _FORWARD),
    _fault("first block of weight at every depth", "weight_tile = weight.load([col_start, k])", "weight_tile = weight.load([col_start, 0])", _FORWARD),
    # accumulator and its parts
    _fault("accumulator kept from the last tile", "        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)\n",
           "        if tile == tl.program_id(0):\n            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)\n", _FORWARD),
    _fault("only the last block of depth counts", "weight_tile.T, acc, input", "weight_tile.T, acc * 0, input", _FORWARD),
    _fault("even and odd columns for halves", "tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2))\n    return tl.split(tl.permute(cut, (0, 2, 1)))",
           "tl.reshape(tile, (tile.shape[0], tile.shape[1] // 2, 2))\n    return tl.split(cut)", _FORWARD),
    _fault("right half over the left", "col_start + HALF, n_rows)", "col_start, n_rows)", _FORWARD),
    # epilogue
    _fault("bias forgotten", "            acc += _bias(bias_ptr, cols, OUT)\n            if GATED:\n                gate += _bias(gate_bias_ptr, cols, OUT)\n        place", "            acc + _bias(bias_ptr, cols, OUT)\n            if GATED:\n                gate += _bias(gate_bias_ptr, cols, OUT)\n        place", _FORWARD),
    _fault("bias forgotten in float32", "not BIAS_FIRST:\n            acc += _bias(bias_ptr, cols, OUT)", "not BIAS_FIRST:\n            acc + _bias(bias_ptr, cols, OUT)", _FORWARD),
    _fault("bias before the product in float32", "bias_first = dtype != torch.float32 and capability[0] != 10", "bias_first = capability[0] != 10"),
    _fault("the config's place of the bias ignored", "BIAS_FIRST=config.bias_first", "BIAS_FIRST=False"),
    _fault("bias after the activation is saved", "_store(pre, row_start, col_start, pre_at, acc,", "_store(pre, row_start, col_start, pre_at, activate(acc, ACTIVATION, False, False),", _FORWARD),
    _fault("residual before the activation", "        acc = activate(acc, ACTIVATION, FEW_DIGITS=", "        if residual_ptr is not None:\n            acc += tl.load(residual_ptr + rows.to(tl.int64)[:, None] * residual_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)\n            residual_ptr = None\n        acc = activate(acc, ACTIVATION, FEW_DIGITS=", _FORWARD),
    _fault("activation of the rounded product", "acc = activate(acc, ACTIVATION,", "acc = activate(acc.to(DTYPE).to(tl.float32), ACTIVATION,", _FORWARD),
    _fault("few digits in every dtype", "few = DTYPE == tl.bfloat16", "few = True", _FORWARD),
    _fault("y stored one row down", "to.store([row_start, col_start]", "to.store([row_start + 1, col_start]", _FORWARD),
    # activations
    _fault("tanh form for erf", '            z = gelu(z, FEW_DIGITS)', '            z = _divided(z, 1.0 + _exp(-1.5957691216057308 * (z + 0.044715 * z * z * z)), FEW_DIGITS)', _ACTIVATION),
    _fault("exact gelu not given", "CHEAP=HALF_PRECISION and not EXACT", "CHEAP=HALF_PRECISION", _FORWARD),
    _fault("exact gelu not asked for", "EXACT=activation_kernels.EXACT_GELU", "EXACT=False"),
    _fault("cheap gelu of any size", "u = _magnitude(z, 16.0 if", "u = _magnitude(z, 60.0 if", _ACTIVATION),
    _fault("cheap gelu's digit in bfloat16", "r = r * u - 0.47983377", "r = r * u - 0.48083377", _ACTIVATION),
    _fault("cheap gelu's last term", "r = r * u - 1.0005708", "r = r * u - 1.0", _ACTIVATION),
    _fault("cheap gelu without u", "tl.maximum(z, 0.0) - u * tl.exp2(r)", "tl.maximum(z, 0.0) - tl.exp2(r)", _ACTIVATION),
    _fault("a coefficient's sign", "p = p * t + 0.11274342", "p = p * t - 0.11274342", _ACTIVATION),
    _fault("u of any size", "tl.minimum(tl.abs(z), MOST, propagate_nan=tl.PropagateNan.ALL)", "tl.abs(z)", _ACTIVATION),
    _fault("NaN becomes a number", "(tl.abs(z), MOST, propagate_nan=tl.PropagateNan.ALL)", "(tl.abs(z), MOST)", _ACTIVATION),
    _fault("relu drops NaN", "tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)", "tl.maximum(z, 0.0)", _ACTIVATION),
    _fault("silu without its sign", "_exp(-z)", "_exp(z)", _ACTIVATION),
    _fault("tanh's polynomial too far out", "tl.where(u < 0.625,", "tl.where(u < 1.0,", _ACTIVATION),
    _fault("tanh's coefficient", "p * square + 0.133314416", "p * square + 0.133344416", _ACTIVATION),
    _fault("root for the quotient", "x = x * root * root", "x = x * root", _ACTIVATION),
    _fault("tail of the wrong sign", "return tl.maximum(z, 0.0) - u * t * p", "return tl.maximum(z, 0.0) + u * t * p", _ACTIVATION),
    _fault("cube forgotten", "0.044715 * z * z * z", "0.044715 * z * z", _ACTIVATION),
    # launcher and configs
    _fault("pre saved without an activation", "if save and activation is not None else", "if save else"),
    _fault("pre not saved", "if save and activation is not None else", "if False else"),
    _fault("TMA for rows that are not aligned", "t.stride(0) * t.element_size() % 16 == 0", "t.stride(0) > 0"),
    _fault("TMA from any start", "t.data_ptr() % 16 == 0", "t.data_ptr() >= 0"),
    _fault("TMA of a column with a stride", "        and t.stride(1) == 1\n", ""),
    _fault("TMA of float32 on a GPU", "if dtype == torch.float32 or not aligned:", "if not aligned:"),
    _fault("TMA where there is none", "if capability[0] in (9, 10):\n        return (\n", "if capability[0] in (8, 9, 10):\n        return (\n"),
    _fault("TMA of the newest GPUs forgotten", "if capability[0] == 12:", "if capability[0] == 11:"),
    _fault("bucket of the rows themselves", "return max(0, rows - 1).bit_length()", "return rows", _TUNING),
)  # fmt: skip

SUITE = of_op(FAULTS, "linear", "linear_ or test_cases")
