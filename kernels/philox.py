"""Dropout bits on the device: Philox4x32-10 as fastbert/ops/dropout.py defines it.

Math       key = (lo32(seed), hi32(seed)); counter = (col >> 2, row, plane, offset);
           keep iff philox(counter, key)[col & 3] >= threshold (unsigned).
Tiling     One counter serves four neighbouring columns: BLOCK_N columns cost BLOCK_N / 4 Philox calls.
Precision  32-bit unsigned integers. `offset` and `threshold` arrive as int32 with the bits of a uint32, so
           that their value never changes a launch's types.
Source     Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
"""

import triton
import triton.language as tl


def as_int32_bits(value: int) -> int:
    """The int32 that has the bits of the uint32 `value`."""
    return value - 2**32 if value >= 2**31 else value


def threshold_bits(dropout_p: float) -> int:
    """The drop threshold of `dropout_p` as int32 bits: a lane is dropped when it is below it."""
    return as_int32_bits(min(round(dropout_p * 2**32), 2**32 - 1))


@triton.jit
def philox_keep(
    seed_ptr, offset, plane, rows, col_start, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """`keep` = [BLOCK_M, BLOCK_N] of bool; `rows` = [BLOCK_M]; columns from `col_start`, a multiple of 4."""
    groups = (col_start // 4 + tl.arange(0, BLOCK_N // 4)).to(tl.uint32)[None, :]
    r0, r1, r2, r3 = tl.philox(tl.load(seed_ptr), groups, rows.to(tl.uint32)[:, None], plane, offset)
    # `lanes` = [BLOCK_M, BLOCK_N // 4, 2, 2], the last two indices being the bits of the lane number
    lanes = tl.join(tl.join(r0, r2), tl.join(r1, r3))
    return tl.reshape(lanes, (BLOCK_M, BLOCK_N)) >= threshold.to(tl.uint32, bitcast=True)
