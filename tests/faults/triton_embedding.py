"""Faults of the Triton embedding."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import Fault, Suite

_BAD_IDS = "kernels/bad_ids.py"


def _fault(name: str, old: str, new: str, file: str = "kernels/embedding.py") -> Fault:
    return Fault(name, file, old, new)


FAULTS = (
    # gathers, masks and offsets
    _fault("ids not read", "asked = tl.load(ids_ptr + rows, mask=row_mask, other=0)", "asked = 0 * tl.load(ids_ptr + rows, mask=row_mask, other=0)"),
    _fault("ids read beyond the last", "tl.load(ids_ptr + rows, mask=row_mask, other=0)", "tl.load(ids_ptr + rows)"),
    _fault("int32 ids", "    return picked * stride, bad\n", "    return picked.to(tl.int32) * stride.to(tl.int32), bad\n"),
    _fault("ids below zero read", "picked = tl.minimum(tl.maximum(asked, 0), table_rows - 1)", "picked = tl.minimum(asked, table_rows - 1)"),
    _fault("ids beyond the table read", "picked = tl.minimum(tl.maximum(asked, 0), table_rows - 1)", "picked = tl.maximum(asked, 0)"),
    _fault("the row behind the table read", "tl.maximum(asked, 0), table_rows - 1)", "tl.maximum(asked, 0), table_rows)"),
    _fault("bad ids not told", "if tl.max(bad.to(tl.int32), 0) > 0:", "if tl.max(bad.to(tl.int32), 0) > 1:", _BAD_IDS),
    _fault("all ids told", "bad = asked != picked", "bad = asked == picked"),
    _fault("bad ids told as the words'", "tl.store(bad_ptr + 2 * ARGUMENT, 1)", "tl.store(bad_ptr, 1)", _BAD_IDS),
    _fault("bad id stored with the words'", "tl.store(bad_ptr + 2 * ARGUMENT + 1,", "tl.store(bad_ptr + 1,", _BAD_IDS),
    _fault("a good id named", "tl.where(bad, ids, -(2**63))", "ids", _BAD_IDS),
    _fault("rows of the words for the positions", "row_mask, position_rows, bad_ptr", "row_mask, word_rows, bad_ptr"),
    _fault("bad ids not looked for", "    bad.check()\n", ""),
    _fault("bad ids told for ever", "                seen[2 * argument] = 0\n", "", _BAD_IDS),
    _fault("nearest row for a bad id", '    rstd = tl.where(bad_word | bad_position | bad_segment, float("nan"), rstd)\n', ""),
    _fault("nearest position for a bad one", "bad_word | bad_position | bad_segment", "bad_word | bad_segment"),
    _fault("nearest row for a bad token type", "bad_word | bad_position | bad_segment", "bad_word | bad_position"),
    _fault("every token NaN beside a bad one", "bad_word | bad_position | bad_segment, float", "tl.max((bad_word | bad_position | bad_segment).to(tl.int32), 0) > 0, float"),
    _fault("zeros for a bad id", 'float("nan"), rstd)', "0.0, rstd)"),
    _fault("infinity for a bad id", 'float("nan"), rstd)', 'float("inf"), rstd)'),
    _fault("NaN only in the result", '    rstd = tl.where(bad_word | bad_position | bad_segment, float("nan"), rstd)\n    if mean_ptr is not None:\n        tl.store(mean_ptr + rows, mean, mask=row_mask)\n        tl.store(rstd_ptr + rows, rstd, mask=row_mask)\n', '    if mean_ptr is not None:\n        tl.store(mean_ptr + rows, mean, mask=row_mask)\n        tl.store(rstd_ptr + rows, rstd, mask=row_mask)\n    rstd = tl.where(bad_word | bad_position | bad_segment, float("nan"), rstd)\n'),
    _fault("tokens bad without ids", "bad = rows != rows", "bad = rows == rows"),
    _fault("position named a token id", '("position_ids: position", "in the table")', '("input_ids: token id", "in the table")', _BAD_IDS),
    _fault("tables without rows read", "ids.shape[0] > 0 and count == 0:", "ids.shape[0] > 0 and count < 0:"),
    _fault("int32 rows", "tl.program_id(0).to(tl.int64) * BLOCK_M", "tl.program_id(0) * BLOCK_M"),
    _fault("positions by the segments' ids", "        position_ids_ptr, position_stride, rows", "        segment_ids_ptr, position_stride, rows"),
    _fault("stride of the words for the positions", "position_ids_ptr, position_stride, rows", "position_ids_ptr, word_stride, rows"),
    _fault("stride of the segments forgotten", "segment_ids_ptr, segment_stride, rows", "segment_ids_ptr, HIDDEN, rows"),
    _fault("position forgotten", "row = position_ptr + position_at[:, None]\n        z +=", "row = position_ptr + position_at[:, None]\n        z + "),
    _fault("segment taken for position", "row = segment_ptr + segment_at", "row = segment_ptr + position_at"),
    _fault("column mask dropped", "mask = row_mask[:, None] & (cols < HIDDEN)[None, :]", "mask = row_mask[:, None] & (cols >= 0)[None, :]"),
    _fault("row mask dropped from the stores", "mask = row_mask[:, None] & col_mask[None, :]\n        if", "mask = (rows >= 0)[:, None] & col_mask[None, :]\n        if"),
    _fault("y at the stride of the row's width", "at = rows[:, None] * y_stride", "at = rows[:, None] * HIDDEN"),
    # norm
    _fault("eps missing", "HIDDEN * 1.0) + eps)", "HIDDEN * 1.0))"),
    _fault("mean not subtracted", "y = (z - mean[:, None])", "y = z"),
    _fault("mean over the block", "mean = tl.div_rn(tl.sum(z, 1), HIDDEN * 1.0)", "mean = tl.div_rn(tl.sum(z, 1), BLOCK_N * 1.0)"),
    _fault("masked columns in the variance", "centred = tl.where(mask, z - mean[:, None], 0.0)", "centred = z - mean[:, None]"),
    _fault("masked columns in the variance of blocks", "centred = tl.where(mask, z - block_mean[:, None], 0.0)", "centred = z - block_mean[:, None]"),
    _fault("unbiased variance", "tl.div_rn(squares, HIDDEN * 1.0)", "tl.div_rn(squares, HIDDEN - 1.0)"),
    _fault("blocks merged without their distance", " + delta * delta * col_start * share", ""),
    _fault("last block counted as a full one", "tl.minimum(HIDDEN - col_start, BLOCK_N)", "tl.minimum(HIDDEN, BLOCK_N)"),
    _fault("second pass over the last block of the first", "if HIDDEN > BLOCK_N:\n", "if HIDDEN < 0:\n"),
    _fault("statistics of the rounded sum", "            mean = tl.div_rn(tl.sum(z, 1)", "            z = z.to(y_ptr.dtype.element_ty).to(tl.float32)\n            mean = tl.div_rn(tl.sum(z, 1)"),
    _fault("mean and rstd swapped", "tl.store(mean_ptr + rows, mean,", "tl.store(mean_ptr + rows, rstd,"),
    _fault("bias forgotten", "        y += row_of(bias_ptr, cols, HIDDEN)\n", ""),
    _fault("weight forgotten", " * row_of(weight_ptr, cols, HIDDEN)", ""),
    # dropout
    _fault("scale of the kept forgotten", "y * keep_scale", "y"),
    _fault("dropout before the norm's bias", "            keep = philox_keep(", "            y -= bias[None, :]\n            keep = philox_keep("),
    _fault("another plane", "            keep = philox_keep(tl.load(seed_ptr), offset, 0, rows", "            keep = philox_keep(tl.load(seed_ptr), offset, 1, rows"),
    _fault("columns of the block, not of the row", "            keep = philox_keep(tl.load(seed_ptr), offset, 0, rows, col_start, threshold", "            keep = philox_keep(tl.load(seed_ptr), offset, 0, rows, 0, threshold"),
    _fault("seed read without dropout", "            seed if dropout_p > 0 else None,\n", "            seed,\n"),
    # launcher
    _fault("a tile too few", "(cdiv(rows, block_m),)", "(max(1, rows // block_m),)"),
    _fault("z returned though not saved", "torch.empty_like(y) if save else", "torch.empty_like(y) if rows else"),
    _fault("rows of the word table for the tokens", "else input_ids.shape[0]", "else word.shape[0]"),
)  # fmt: skip

# what catches most comes first; node ids keep their order, a whole file would take its own
_TESTS = (
    "an_id_that_its_table_does_not_have",
    "bad_ids_of_all_tables_and_wide_tokens",
    "the_saved_statistics_of_a_bad_id_are_nan",
    "a_table_without_rows",
    "exact_on_small_integers",
    "no_tokens",
    "a_seed_is_not_launched_without_dropout",
    "token_tiles_are_on_the_grid_axis_that_has_no_limit",
    "what_forward_returns",
    "strided_tables_with_poisoned_padding",
    "offsets_beyond_2_to_31_elements",
    "eps",
    "variance_of_a_large_mean",
    "a_nan_stays_with_its_token",
    "embeds_in_place_of_ids",
    "outputs_are_correctly_rounded",
    "norm_vectors_in_float32_beside_half_tables",
    "dropout_comes_last_and_its_bits_are_the_definitions",
    "repeats_are_bit_equal_without_atomics",
)

SUITE = Suite(
    faults=FAULTS,
    tests=tuple(f"tests/triton/test_embedding.py::test_{name}" for name in _TESTS),
    timeout_s=600.0,
    environment={"TRITON_INTERPRET": "1"},
)
