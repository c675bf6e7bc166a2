"""Dropout bits on the device: Philox4x32-10 as fastbert/ops/dropout.py defines it.

Math       key = (lo32(seed), hi32(seed)); counter = (col >> 2, row, plane, offset);
           keep iff philox(counter, key)[col & 3] >= threshold (unsigned).
Tiling     One counter serves four neighbouring columns: BLOCK_N columns cost BLOCK_N / 4 Philox calls. Where
           backward needs the bits more than once, forward may save them, one bit per element.
Precision  32-bit unsigned integers. `offset` and `threshold` arrive as int32 with the bits of a uint32, so
           that their value never changes the types of a launch.
Source     Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
"""

import triton
import triton.language as tl


def as_int32_bits(value: int) -> int:
    """The int32 that has the bits of the uint32 `value`."""
    return value - 2**32 if value >= 2**31 else value


def threshold_bits(dropout_p: float) -> int:
    """The threshold of `dropout_p` as int32 bits: a lane below it is dropped."""
    return as_int32_bits(min(round(dropout_p * 2**32), 2**32 - 1))


@triton.jit
def _lanes(seed_ptr, offset, plane, rows, col_start, COLUMNS: tl.constexpr):
    """Four tensors [rows, COLUMNS // 4] of uint32: the first column of each group of four, the second, …"""
    groups = (col_start // 4 + tl.arange(0, COLUMNS // 4)).to(tl.uint32)[None, :]
    return tl.philox(tl.load(seed_ptr), groups, rows.to(tl.uint32)[:, None], plane, offset)


@triton.jit
def philox_keep(
    seed_ptr, offset, plane, rows, col_start, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """`keep` = [BLOCK_M, BLOCK_N] of bool; `rows` = [BLOCK_M]; columns from `col_start`, a multiple of 4."""
    r0, r1, r2, r3 = _lanes(seed_ptr, offset, plane, rows, col_start, BLOCK_N)
    # `lanes` = [BLOCK_M, BLOCK_N // 4, 2, 2]; the last two indices are the bits of the lane number.
    lanes = tl.join(tl.join(r0, r2), tl.join(r1, r3))
    return tl.reshape(lanes, (BLOCK_M, BLOCK_N)) >= threshold.to(tl.uint32, bitcast=True)


@triton.jit
def _drawn_word(
    seed_ptr, offset, plane, rows, col_start, threshold, BLOCK_M: tl.constexpr, WORD: tl.constexpr
):
    """`word` = [BLOCK_M] of int32: bit i says whether column `col_start` + i of a row is kept, i < WORD."""
    r0, r1, r2, r3 = _lanes(seed_ptr, offset, plane, rows, col_start, WORD)
    least = threshold.to(tl.uint32, bitcast=True)
    bits = (r0 >= least).to(tl.int32) | ((r1 >= least).to(tl.int32) << 1)
    bits |= ((r2 >= least).to(tl.int32) << 2) | ((r3 >= least).to(tl.int32) << 3)
    return tl.sum(bits << (4 * tl.arange(0, WORD // 4))[None, :], 1)


@triton.jit
def drawn_and_saved_keep(
    seed_ptr,
    offset,
    plane,
    rows,
    inside,
    col_start,
    threshold,
    bits_ptr,
    bits_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The tile of `philox_keep`, also saved at `bits_ptr` for `saved_keep`.

    `col_start` is a multiple of BLOCK_N. Word w of a row is at `bits_ptr` + row * `bits_stride` + w; bit i of
    it is column w * WORD + i. WORD, the bits per word, is 16 where BLOCK_N is 16, else 32. Nothing is written
    for rows not `inside` and for words from `bits_stride` on.
    """
    WORD: tl.constexpr = BLOCK_N if BLOCK_N < 32 else 32
    cols = tl.arange(0, BLOCK_N)[None, :]
    words = 0
    for w in tl.static_range(BLOCK_N // WORD):
        start = col_start + w * WORD
        word = _drawn_word(seed_ptr, offset, plane, rows, start, threshold, BLOCK_M, WORD)
        word_at = bits_ptr + rows.to(tl.int64) * bits_stride + start // WORD
        mask = inside & (start // WORD < bits_stride)
        tl.store(word_at, word.to(bits_ptr.dtype.element_ty), mask=mask)
        if w == 0:
            words = word[:, None]
        else:
            words = tl.where(cols < w * WORD, words, word[:, None])
    return ((words >> (cols % WORD)) & 1) != 0


@triton.jit
def saved_keep(
    bits_ptr, bits_stride, rows, inside, col_start, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """What `drawn_and_saved_keep` saved, or its transpose; False where not `inside`; BLOCK_N <= 64."""
    WORD: tl.constexpr = BLOCK_N if BLOCK_N < 32 else 32
    axis: tl.constexpr = 0 if TRANSPOSED else 1
    cols = tl.expand_dims(tl.arange(0, BLOCK_N), 1 - axis)
    column = col_start // WORD
    if BLOCK_N == 2 * WORD:
        # One load fetches both words: a small load is made whole by every thread.
        column += tl.arange(0, 2)
        pair_at = bits_ptr + (rows.to(tl.int64)[:, None] * bits_stride + column[None, :])
        pair = tl.load(pair_at, mask=inside[:, None] & (column < bits_stride)[None, :], other=0)
        first, second = tl.split(pair)
        words = tl.where(cols < WORD, tl.expand_dims(first, axis), tl.expand_dims(second, axis))
    else:
        tl.static_assert(BLOCK_N == WORD)
        word_at = bits_ptr + (rows.to(tl.int64) * bits_stride + column)
        word = tl.load(word_at, mask=inside & (column < bits_stride), other=0)
        words = tl.expand_dims(word.to(tl.int32), axis)
    return ((words >> (cols % WORD)) & 1) != 0
