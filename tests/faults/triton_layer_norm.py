"""Faults of the Triton layer_norm."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import faults_of, of_op

_KERNEL = "kernels/layer_norm.py"
_FORWARD = "kernels/layer_norm_forward.py"
_BACKWARD = "kernels/layer_norm_backward.py"
_SUMS = "kernels/column_sums.py"
_PHILOX = "kernels/philox.py"
_fault = faults_of(_KERNEL)

FAULTS = (
    # masks and offsets
    _fault("column mask dropped from the load of x", "cols[None, :], mask=mask, other=0.0).to(tl.float32)\n    if x_bias",
           "cols[None, :], mask=(rows < n_rows)[:, None], other=0.0).to(tl.float32)\n    if x_bias", _FORWARD),
    _fault("row mask dropped in backward", "mask = row_mask[:, None] & col_mask[None, :]\n        mean",
           "mask = (rows >= 0)[:, None] & col_mask[None, :]\n        mean", _BACKWARD),
    _fault("int32 rows in forward", "tl.program_id(0).to(tl.int64) * BLOCK_M", "tl.program_id(0) * BLOCK_M", _FORWARD),
    _fault("int32 rows in backward", "tl.cast(tile, tl.int64) * BLOCK_M", "tile * BLOCK_M", _BACKWARD),
    _fault("stride of the residual forgotten", "rows[:, None] * residual_stride", "rows[:, None] * x_stride", _FORWARD),
    _fault("stride of z swapped for dy's", "z_ptr + rows[:, None] * z_stride + cols[None, :], mask=mask, other",
           "z_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other", _BACKWARD),
    _fault("second column block reads the first", "col_start = tl.program_id(1) * BLOCK_N\n    cols = col_start + tl.arange(0, BLOCK_N)\n    row_mask",
           "col_start = tl.program_id(1) * 0\n    cols = col_start + tl.arange(0, BLOCK_N)\n    row_mask", _FORWARD),
    # forward arithmetic
    _fault("x_bias forgotten", "    if x_bias_ptr is not None:\n        z +=", "    if x_bias_ptr is not None:\n        z + ", _FORWARD),
    _fault("residual forgotten", "    if residual_ptr is not None:\n", "    if residual_ptr is not None and x_bias_ptr is None:\n", _FORWARD),
    _fault("x_bias survives dropout", "    if x_bias_ptr is not None:\n        z += row_of(x_bias_ptr, cols, HIDDEN)\n    z = dropped(z, dropout, rows, col_start, BLOCK_M, BLOCK_N)\n",
           "    z = dropped(z, dropout, rows, col_start, BLOCK_M, BLOCK_N)\n    if x_bias_ptr is not None:\n        z += row_of(x_bias_ptr, cols, HIDDEN)\n", _FORWARD),
    _fault("eps missing", "rstd_of(tl.sum(centred * centred, 1), eps, HIDDEN)", "rstd_of(tl.sum(centred * centred, 1), 0.0, HIDDEN)", _FORWARD),
    _fault("eps missing in wide rows", "rstd_of(squares, eps, HIDDEN)\n    if KIND", "rstd_of(squares, 0.0, HIDDEN)\n    if KIND", _FORWARD),
    _fault("variance from E[z²] - E[z]²", "rstd_of(tl.sum(centred * centred, 1), eps", "rstd_of(tl.sum(z * z, 1) - HIDDEN * mean * mean, eps", _FORWARD),
    _fault("variance counts the masked columns", "return mean, tl.where(inside, z - mean[:, None], 0.0)", "return mean, z - mean[:, None]", _FORWARD),
    _fault("mean over the block, not the row", "mean = tl.div_rn(tl.sum(z, 1), HIDDEN * 1.0)",
           "mean = tl.div_rn(tl.sum(z, 1), BLOCK_N * 1.0)", _FORWARD),
    _fault("mean not subtracted", "            tl.store(rstd_ptr + rows, rstd, mask=row_mask)\n        x_hat = centred * rstd", "            tl.store(rstd_ptr + rows, rstd, mask=row_mask)\n        x_hat = z * rstd", _FORWARD),
    _fault("statistics from the rounded z", "    if KIND == \"no_norm\":\n        x_hat = z\n",
           "    z = z.to(y_ptr.dtype.element_ty).to(tl.float32)\n    if KIND == \"no_norm\":\n        x_hat = z\n", _FORWARD),
    _fault("x_hat rounded to storage dtype", "    y = x_hat * ", "    y = x_hat.to(y_ptr.dtype.element_ty).to(tl.float32) * ", _FORWARD),
    # wide rows
    _fault("blocks merged without their distance", " + delta * delta * col_start * share", "", _FORWARD),
    # dropout
    _fault("scale of the kept forgotten", "x = tl.where(keep, x * keep_scale, 0.0)", "x = tl.where(keep, x, 0.0)", _PHILOX),
    _fault("scale forgotten in backward", "dz = dropped(dz, dropout,", "dz = dropped(dz, (seed_ptr, offset, threshold, 1.0),", _BACKWARD),
    _fault("other bits in backward", "dz = dropped(dz, dropout, rows,", "dz = dropped(dz, dropout, rows + 1,", _BACKWARD),
    _fault("residual gradient after dropout", "dresidual_ptr + dx_at, dz.to(",
           "dresidual_ptr + dx_at, dropped(dz, dropout, rows, col_start, BLOCK_M, BLOCK_N).to(", _BACKWARD),
    _fault("wrong lane order", "tl.join(tl.join(r0, r2), tl.join(r1, r3))", "tl.join(tl.join(r0, r1), tl.join(r2, r3))", _PHILOX),
    _fault("offset forgotten", "plane, offset.to(tl.uint32, bitcast=True))\n", "plane, 0)\n", _PHILOX),
    _fault("row of the tile, not of the matrix", "rows.to(tl.uint32)[:, None]", "(rows % 4).to(tl.uint32)[:, None]", _PHILOX),
    _fault("column block forgotten in the counter", "(col_start // 8 + tl.arange", "(0 * col_start + tl.arange", _PHILOX),
    _fault("nine rounds", "tl.static_range(10)", "tl.static_range(9)", _PHILOX),
    _fault("threshold rounded down", "min(round(dropout_p * 2**16), 2**16 - 1)", "min(int(dropout_p * 2**16), 2**16 - 1)", _PHILOX),
    _fault("halves swapped", "tl.join(words << 16, words)", "tl.join(words, words << 16)", _PHILOX),
    # backward arithmetic
    _fault("mean of g not subtracted", "g - g_mean[:, None] - x_hat", "g - x_hat", _BACKWARD),
    _fault("no gradient at hidden size 1, whatever is NaN", "    return rstd[:, None] * centred", "    if HIDDEN == 1:\n        return tl.zeros_like(g)\n    return rstd[:, None] * centred", _BACKWARD),
    _fault("projection on x_hat not subtracted", "g_mean[:, None] - x_hat * gx_mean[:, None]\n", "g_mean[:, None]\n", _BACKWARD),
    _fault("weight forgotten", "        g = dy * weight\n", "        g = dy\n", _BACKWARD),
    _fault("rstd forgotten", "return rstd[:, None] * centred", "return centred", _BACKWARD),
    _fault("x_hat without rstd", "return dy, (z - mean[:, None]) * rstd[:, None]", "return dy, z - mean[:, None]", _BACKWARD),
    _fault("dweight without x_hat", "dweight += dy * x_hat", "dweight += dy", _BACKWARD),
    _fault("dx_bias only of the last tile", "dx_bias += dz\n", "dx_bias = dz\n", _BACKWARD),
    _fault("dx_bias only beside dx", "        if dx_bias_ptr is not None:\n", "        if dx_bias_ptr is not None and dx_ptr is not None:\n", _BACKWARD),
    _fault("dweight only of the last tile", "dweight += dy * x_hat", "dweight = dy * x_hat", _BACKWARD),
    _fault("wide means of the wrong half", "tl.load(means_ptr + n_rows + rows", "tl.load(means_ptr + rows", _BACKWARD),
    _fault("last partial sum lost", "mask=(p < n_partials)[:, None]", "mask=(p < n_partials - 1)[:, None]", _SUMS),
    _fault("partial sums share a row", "partial_at = program.to(tl.int64) * HIDDEN + cols", "partial_at = cols", _BACKWARD),
    # RMSNorm and the returned sum
    _fault("rms: mean subtracted", "        if KIND == \"layer_norm\":\n            mean, centred", "        if KIND != \"no_norm\":\n            mean, centred", _FORWARD),
    _fault("rms: squares of the last block alone", "            squares += tl.sum(z * z, 1)\n", "            squares = tl.sum(z * z, 1)\n", _FORWARD),
    _fault("rms: mean of g subtracted", "centred = g - x_hat * gx_mean[:, None]\n    elif", "centred = g - g_mean[:, None] - x_hat * gx_mean[:, None]\n    elif", _BACKWARD),
    _fault("rms: no gradient at hidden size 1", "    if KIND == \"rms_norm\":\n        centred = g", "    if KIND == \"rms_norm\" and HIDDEN > 1:\n        centred = g", _BACKWARD),
    _fault("rms: mean saved", "mean = torch.empty_like(rstd) if has_mean else rstd.new_empty((0,))", "mean = torch.empty_like(rstd)"),
    _fault("sum only where it is saved", "(save or return_sum) and summed", "save and summed"),
    _fault("gradient of the sum forgotten", "        if dsum_ptr is not None:\n", "        if dsum_ptr is not None and HIDDEN < 0:\n", _BACKWARD),
    _fault("gradient of the sum doubled", "            dz += tl.load(dsum_at,", "            dz += 2 * tl.load(dsum_at,", _BACKWARD),
    _fault("gradient of the sum past the row", "dz += tl.load(dsum_at, mask=mask,", "dz += tl.load(dsum_at, mask=row_mask[:, None],", _BACKWARD),
    # NoNorm
    _fault("none: normalised", "    if KIND == \"no_norm\":\n        x_hat = z\n    elif", "    if KIND == \"no_norm\" and HIDDEN > BLOCK_N:\n        x_hat = z\n    elif", _FORWARD),
    _fault("none: wide rows normalised", "    if KIND == \"no_norm\":\n        x_hat = z\n    elif", "    if KIND == \"no_norm\" and HIDDEN <= BLOCK_N:\n        x_hat = z\n    elif", _FORWARD),
    _fault("none: weight forgotten in backward", "            dz = g\n", "            dz = dy\n", _BACKWARD),
    _fault("none: gradient of a norm", "        if KIND == \"no_norm\":\n            dz = g\n", "        if KIND == \"no_norm\" and HIDDEN == 1:\n            dz = g\n", _BACKWARD),
    _fault("none: x_hat of rstd 0", "tl.full((BLOCK_M,), 1.0, tl.float32)", "tl.full((BLOCK_M,), 0.0, tl.float32)", _BACKWARD),
    _fault("none: mean read", "        if KIND == \"layer_norm\":\n            mean = tl.load", "        if KIND != \"rms_norm\":\n            mean = tl.load", _BACKWARD),
    _fault("none: rstd read", "        if KIND != \"no_norm\":\n            rstd = tl.load", "        if KIND is not None:\n            rstd = tl.load", _BACKWARD),
    _fault("none: rstd saved", "held = has_rstd and (save or wide)", "held = save or wide"),
    _fault("none: statistics of wide rows", "wide = hidden > FWD_ONE_BLOCK and has_rstd", "wide = hidden > FWD_ONE_BLOCK"),
    # launcher
    _fault("a tile too few", "(cdiv(rows, block_m), cdiv(hidden, block_n)),\n            x.device",
           "(max(1, rows // block_m), cdiv(hidden, block_n)),\n            x.device"),
    _fault("z not saved for x_bias alone", "summed = residual is not None or x_bias is not None or seed is not None", "summed = residual is not None or seed is not None"),
    _fault("no dresidual without dropout, even where there is no dx", "(seed is not None or not need_dx or x_dtype != z.dtype)", "(seed is not None or x_dtype != z.dtype)"),
    _fault("sums start unset where there are no rows", "dy.new_zeros((hidden if", "dy.new_empty((hidden if"),
)  # fmt: skip

SUITE = of_op(FAULTS, "layer_norm", "64x768")
