"""Faults of the Triton rotary."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import faults_of, of_op

_fault = faults_of("kernels/rotary.py")

FAULTS = (
    # signs
    _fault("no way back", "    if BACK:\n        s = -s\n", ""),
    _fault("sine of the right column subtracted", "s = tl.where(is_left, -s, s)", "s = tl.where(is_left, s, -s)"),
    _fault("interleaved signs exchanged", "s = tl.interleave(-s, s)", "s = tl.interleave(s, -s)"),
    # columns
    _fault("partner one column early", "tl.where(is_left, cols + HALF, cols - HALF)", "tl.where(is_left, cols + HALF, cols - HALF + 1)"),
    _fault("halves of the whole head", "is_left = cols < HALF", "is_left = cols < HEAD_DIM // 2"),
    _fault("neighbours not exchanged", "tl.join(right, left)", "tl.join(left, right)"),
    _fault("other columns rotated", "y = tl.where(rotated[None, :], x * c[None, :] + partner * s[None, :], x)", "y = x * c[None, :] + partner * s[None, :]"),
    _fault("one rotated column too few", "rotated = cols < 2 * HALF", "rotated = cols < 2 * HALF - 1"),
    _fault("columns past the head", "(cols < HEAD_DIM)[None, :]", "(cols <= HEAD_DIM)[None, :]"),
    _fault("interleaved as halves", "    if INTERLEAVED:\n", "    if INTERLEAVED and BACK:\n"),
    # tables
    _fault("position of the first row", "tl.load(positions_ptr + row)", "tl.load(positions_ptr + row * 0)"),
    _fault("rows of sin by one column less", "sin_ptr += position * HALF", "sin_ptr += position * (HALF - 1)"),
    _fault("cosine read past the pairs", "c = tl.load(cos_ptr + pair, mask=known & (pair < HALF), other=float(\"nan\"))", "c = tl.load(cos_ptr + pair, mask=known, other=float(\"nan\"))"),
    _fault("position one past the tables", "(position < max_positions)", "(position <= max_positions)"),
    _fault("negative positions", "(position >= 0) & ", ""),
    _fault("a bad position is position 0", "s = tl.load(sin_ptr + pair, mask=known & rotated, other=float(\"nan\"))\n        s = tl.where", "s = tl.load(sin_ptr + pair, mask=known & rotated, other=0.0)\n        c = tl.where(known, c, 1.0)\n        s = tl.where"),
    # rows and heads
    _fault("heads side by side in x", "[:, None] * head_stride", "[:, None] * HEAD_DIM"),
    _fault("rows side by side in x", "x_ptr += row * row_stride", "x_ptr += row * heads * HEAD_DIM"),
    _fault("one head too many", "(head < heads)[:, None]", "(head <= heads)[:, None]"),
    _fault("one block of heads", "(rows, cdiv(heads, block_h))", "(rows, 1)"),
    _fault("all blocks write the first heads", "tl.store(y_ptr + head[:, None] * HEAD_DIM", "tl.store(y_ptr + tl.arange(0, BLOCK_H)[:, None] * HEAD_DIM"),
    _fault("y at the stride of x", "y_ptr += row * heads * HEAD_DIM", "y_ptr += row * row_stride"),
    _fault("32-bit rows", "row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)"),
    _fault("32-bit heads", "head.to(tl.int64)[:, None]", "head[:, None]"),
    # precision
    _fault("x not widened", "mask=mask, other=0.0).to(tl.float32)  # [BLOCK_H, BLOCK_D]", "mask=mask, other=0.0).to(tl.bfloat16).to(tl.float32)"),
    _fault("result in float32", "dtype=x.dtype, device", "dtype=cos.dtype, device"),
)  # fmt: skip

SUITE = of_op(FAULTS, "rotary")
