"""Faults of the Triton pack and unpack."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import faults_of, of_op

_fault = faults_of("kernels/packing.py")

FAULTS = (
    _fault("indices read beyond the last", "tl.load(indices_ptr + at, mask=at < total, other=0)", "tl.load(indices_ptr + at)"),
    _fault("int32 indices in pack", "mask=at < total, other=0)\n", "mask=at < total, other=0).to(tl.int32)\n"),
    _fault("int32 rows in pack", "    rows = tl.program_id(0).to(tl.int64)", "    rows = tl.program_id(0)"),
    _fault("int32 search", "low = tl.zeros((BLOCK_M,), tl.int64)", "low = tl.zeros((BLOCK_M,), tl.int32)"),
    _fault("row mask dropped in pack", "mask = (rows < total)[:, None]", "mask = (rows >= 0)[:, None]"),
    _fault("column mask dropped in pack", "& (cols < inner)[None, :]", "& (cols >= 0)[None, :]"),
    _fault("column mask dropped in unpack", "inside = (cols < inner)[None, :]", "inside = (cols >= 0)[None, :]"),
    _fault("second column block writes the first in pack", "tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)\n    mask", "tl.arange(0, BLOCK_N)\n    mask"),
    _fault("stride of x forgotten in pack", "taken[:, None] * x_stride", "taken[:, None] * inner"),
    _fault("pack does not gather", "x_ptr + taken[:, None] * x_stride", "x_ptr + rows[:, None] * x_stride"),
    _fault("search stops one step early", "for _ in range(steps):", "for _ in range(steps - 1):"),
    _fault("search for the row after", "other=0) < padded\n", "other=0) <= padded\n"),
    _fault("search ends below", "middle + 1, low)", "middle, low)"),
    _fault("padding filled from the next token", "other=-1) == padded)", "other=-1) >= padded)"),
    _fault("padding left as it was", "mask=(padded < rows)[:, None] & inside", "mask=((padded < rows) & kept)[:, None] & inside"),
    _fault("padding is not zero", "mask=kept[:, None] & inside, other=0)", "mask=kept[:, None] & inside, other=1)"),
    _fault("too few steps", "total.bit_length(),\n            BLOCK_M", "max(0, total - 1).bit_length(),\n            BLOCK_M"),
    _fault("a tile too few in pack", "(cdiv(total, block_m), cdiv(inner, block_n))", "(max(1, total // block_m), cdiv(inner, block_n))"),
    _fault("columns of one block in unpack", "(cdiv(max(rows, total), block_m), cdiv(inner, block_n))", "(cdiv(max(rows, total), block_m), 1)"),
    _fault("rows on the short axis of the grid", "(cdiv(total, block_m), cdiv(inner, block_n))", "(cdiv(inner, block_n), cdiv(total, block_m))"),
    # indices that the padded batch does not have
    _fault("indices below zero read", "bad = (indices < 0) | (indices >= rows)", "bad = indices >= rows"),
    _fault("the row behind the batch read", "(indices >= rows)", "(indices > rows)"),
    _fault("the last row refused", "(indices >= rows)", "(indices >= rows - 1)"),
    _fault("bad indices read", "mask=mask & ~bad[:, None], other=SPOILED", "mask=mask, other=SPOILED"),
    _fault("zeros for a bad index", "~bad[:, None], other=SPOILED)", "~bad[:, None], other=0)"),
    _fault("bad indices not told in pack", "taken, bad = _bad_indices(indices_ptr, rows, total, padded_rows, bad_ptr)", "taken = tl.load(indices_ptr + rows, mask=rows < total, other=0)\n    bad = (taken < 0) | (taken >= padded_rows)"),
    _fault("bad indices told as token ids", "bad_ptr, INDICES)", "bad_ptr, 0)"),
    _fault("bad indices not looked for", "    bad.check()\n", ""),
    _fault("indices of no rows", "if total > 0 and rows == 0:", "if total > 0 and rows < 0:"),
    _fault("indices beyond the rows of unpack not looked at", "cdiv(max(rows, total), block_m)", "cdiv(rows, block_m)"),
    _fault("a bool that is none for a bad index", "    if dtype == torch.bool:\n        return 0\n", "    if dtype == torch.bool:\n        return 2\n"),
    _fault("bits of another width", "2: torch.int16", "2: torch.int8"),
    _fault("floats moved as floats", "return t.view(_AS_INTEGER[t.element_size()])", "return t + 0 if t.is_floating_point() else t.view(_AS_INTEGER[t.element_size()])"),
)  # fmt: skip

SUITE = of_op(FAULTS, "packing")
