"""Faults of the Triton embedding."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import faults_of, of_op

_BAD_IDS = "kernels/bad_ids.py"
_NORM = "kernels/layer_norm_forward.py"
_PHILOX = "kernels/philox.py"
_fault = faults_of("kernels/embedding.py")

FAULTS = (
    # gathers, masks and offsets
    _fault("ids not read", "asked = tl.load(ids_ptr + rows, mask=row_mask, other=0)", "asked = 0 * tl.load(ids_ptr + rows, mask=row_mask, other=0)"),
    _fault("ids read beyond the last", "tl.load(ids_ptr + rows, mask=row_mask, other=0)", "tl.load(ids_ptr + rows)"),
    _fault("int32 ids", "    return picked * stride, bad\n", "    return picked.to(tl.int32) * stride.to(tl.int32), bad\n"),
    _fault("ids below zero read", "picked = tl.minimum(tl.maximum(asked, 0), table_rows - 1)", "picked = tl.minimum(asked, table_rows - 1)"),
    _fault("ids beyond the table read", "picked = tl.minimum(tl.maximum(asked, 0), table_rows - 1)", "picked = tl.maximum(asked, 0)"),
    _fault("bad ids not told", "if tl.max(bad.to(tl.int32), 0) > 0:", "if tl.max(bad.to(tl.int32), 0) > 1:", _BAD_IDS),
    _fault("bad ids told as the words'", "tl.store(bad_ptr + 2 * ARGUMENT, 1)", "tl.store(bad_ptr, 1)", _BAD_IDS),
    _fault("rows of the words for the positions", "row_mask, position_rows, bad_ptr", "row_mask, word_rows, bad_ptr"),
    _fault("bad ids not looked for", "    bad.check()\n", ""),
    _fault("bad ids told for ever", "                seen[2 * argument] = 0\n", "", _BAD_IDS),
    _fault("nearest position for a bad one", "bad_word | bad_position | bad_segment", "bad_word | bad_segment"),
    _fault("every token NaN beside a bad one", "bad_word | bad_position | bad_segment, float", "tl.max((bad_word | bad_position | bad_segment).to(tl.int32), 0) > 0, float"),
    _fault("zeros for a bad id", 'float("nan"), rstd)', "0.0, rstd)"),
    _fault("tokens bad without ids", "bad = rows != rows", "bad = rows == rows"),
    _fault("tables without rows read", "if ids is not None and count == 0:", "if ids is not None and count < 0:"),
    _fault("int32 rows", "tl.program_id(0).to(tl.int64) * BLOCK_M", "tl.program_id(0) * BLOCK_M"),
    _fault("stride of the words for the positions", "position_ids_ptr, position_stride, rows", "position_ids_ptr, word_stride, rows"),
    _fault("position forgotten", "row = position_ptr + position_at[:, None]\n        z +=", "row = position_ptr + position_at[:, None]\n        z + "),
    _fault("segment taken for position", "row = segment_ptr + segment_at", "row = segment_ptr + position_at"),
    _fault("column mask dropped", "mask = row_mask[:, None] & (cols < HIDDEN)[None, :]", "mask = row_mask[:, None] & (cols >= 0)[None, :]"),
    _fault("row mask dropped from the stores", "mask = row_mask[:, None] & col_mask[None, :]\n        if", "mask = (rows >= 0)[:, None] & col_mask[None, :]\n        if"),
    _fault("y at the stride of the row's width", "at = rows[:, None] * y_stride", "at = rows[:, None] * HIDDEN"),
    # norm
    _fault("eps missing", "rstd_of(squares, eps, HIDDEN)", "rstd_of(squares, 0.0, HIDDEN)"),
    _fault("mean not subtracted", "y = (z - mean[:, None])", "y = z"),
    _fault("masked columns in the variance", "return mean, tl.where(inside, z - mean[:, None], 0.0)", "return mean, z - mean[:, None]", _NORM),
    _fault("masked columns in the variance of blocks", "centred = tl.where(inside, z - block_mean[:, None], 0.0)", "centred = z - block_mean[:, None]", _NORM),
    _fault("unbiased variance", "tl.div_rn(squares, HIDDEN * 1.0)", "tl.div_rn(squares, HIDDEN - 1.0)", _NORM),
    _fault("blocks merged without their distance", " + delta * delta * col_start * share", "", _NORM),
    _fault("second pass over the last block of the first", "if HIDDEN > BLOCK_N:\n", "if HIDDEN < 0:\n"),
    _fault("statistics of the rounded sum", "            mean, centred = centred_rows(z,", "            z = z.to(y_ptr.dtype.element_ty).to(tl.float32)\n            mean, centred = centred_rows(z,"),
    _fault("mean and rstd swapped", "tl.store(mean_ptr + rows, mean,", "tl.store(mean_ptr + rows, rstd,"),
    _fault("bias forgotten", "        y += row_of(bias_ptr, cols, HIDDEN)\n", ""),
    _fault("weight forgotten", " * row_of(weight_ptr, cols, HIDDEN)", ""),
    # dropout
    _fault("scale of the kept forgotten", "x = tl.where(keep, x * keep_scale, 0.0)", "x = tl.where(keep, x, 0.0)", _PHILOX),
    _fault("dropout before the norm's bias", "        y += row_of(bias_ptr, cols, HIDDEN)\n        y = dropped(y, (seed_ptr, offset, threshold, keep_scale), rows, col_start, BLOCK_M, BLOCK_N)\n", "        y = dropped(y, (seed_ptr, offset, threshold, keep_scale), rows, col_start, BLOCK_M, BLOCK_N)\n        y += row_of(bias_ptr, cols, HIDDEN)\n"),
    _fault("another plane", "philox_keep(tl.load(seed_ptr), offset, 0, rows", "philox_keep(tl.load(seed_ptr), offset, 1, rows", _PHILOX),
    # launcher
    _fault("a tile too few", "(cdiv(rows, block_m),)", "(max(1, rows // block_m),)"),
    _fault("rows of the word table for the tokens", "else input_ids.shape[0]", "else word.shape[0]"),
)  # fmt: skip

SUITE = of_op(FAULTS, "embedding")
