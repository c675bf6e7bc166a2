"""Dropout bits on the device: Philox4x32-10 as fastbert/ops/dropout.py defines it.

Math       key = (lo32(seed), hi32(seed)); counter = (col >> 3, row, plane, offset);
           keep iff lane (col & 7) >= p * 2**16, rounded: of the eight 16-bit halves of philox(counter, key),
           lane 2 w is the low half of word w, lane 2 w + 1 the high one.
Tiling     One counter serves eight neighbouring columns: BLOCK_N columns cost BLOCK_N / 8 Philox calls. Where
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
    """The threshold of `dropout_p` as int32 bits: a lane, shifted left by 16, that is below it is dropped."""
    return as_int32_bits(min(round(dropout_p * 2**16), 2**16 - 1) << 16)


@triton.jit
def _philox(seed, c0, c1, c2, c3):
    """The four words of Philox4x32-10, as `tl.philox` has them, by one wide product for both its halves."""
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    m0, m1 = tl.full((), 0xD2511F53, tl.uint64), tl.full((), 0xCD9E8D57, tl.uint64)
    w0, w1 = tl.full((), 0x9E3779B9, tl.uint32), tl.full((), 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        p0, p1 = c0.to(tl.uint64) * m0, c2.to(tl.uint64) * m1
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = p1.to(tl.uint32), p0.to(tl.uint32)
        k0, k1 = k0 + w0, k1 + w1
    return c0, c1, c2, c3


@triton.jit
def _lanes(seed, offset, plane, rows, col_start, COLUMNS: tl.constexpr):
    """Four tensors [rows, COLUMNS // 8] of uint32: two lanes each for every group of eight columns."""
    groups = (col_start // 8 + tl.arange(0, COLUMNS // 8)).to(tl.uint32)[None, :]
    rows, plane = rows.to(tl.uint32)[:, None], tl.cast(plane, tl.uint32)
    return _philox(seed, groups, rows, plane, offset.to(tl.uint32, bitcast=True))


@triton.jit
def philox_keep(
    seed, offset, plane, rows, col_start, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """`keep` = [BLOCK_M, BLOCK_N] of bool; `rows` = [BLOCK_M]; columns from `col_start`, a multiple of 8."""
    r0, r1, r2, r3 = _lanes(seed, offset, plane, rows, col_start, BLOCK_N)
    # `words` = [BLOCK_M, BLOCK_N // 8, 2, 2]; the last two indices are the bits of the word's number.
    words = tl.join(tl.join(r0, r2), tl.join(r1, r3))
    lanes = tl.join(words << 16, words)
    return tl.reshape(lanes, (BLOCK_M, BLOCK_N)) >= threshold.to(tl.uint32, bitcast=True)


@triton.jit
def dropped(x, dropout, rows, col_start, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """`x` = [BLOCK_M, BLOCK_N] after `dropout` = (seed_ptr or None, offset, threshold, scale of the kept)."""
    seed_ptr, offset, threshold, keep_scale = dropout
    if seed_ptr is not None:
        keep = philox_keep(tl.load(seed_ptr), offset, 0, rows, col_start, threshold, BLOCK_M, BLOCK_N)
        x = tl.where(keep, x * keep_scale, 0.0)
    return x


@triton.jit
def _two_bits(words, least):
    """Bit 0: whether the low half of each word is kept; bit 1: the high half."""
    return (words << 16 >= least).to(tl.int32) | ((words >= least).to(tl.int32) << 1)


@triton.jit
def _drawn_word(seed, offset, plane, rows, col_start, threshold, BLOCK_M: tl.constexpr, WORD: tl.constexpr):
    """`word` = [BLOCK_M] of int32: bit i says whether column `col_start` + i of a row is kept, i < WORD."""
    r0, r1, r2, r3 = _lanes(seed, offset, plane, rows, col_start, WORD)
    least = threshold.to(tl.uint32, bitcast=True)
    bits = _two_bits(r0, least) | (_two_bits(r1, least) << 2)
    bits |= (_two_bits(r2, least) << 4) | (_two_bits(r3, least) << 6)
    return tl.sum(bits << (8 * tl.arange(0, WORD // 8))[None, :], 1)


@triton.jit
def drawn_and_saved_keep(
    seed, offset, plane, rows, inside, col_start, threshold, bits_ptr, bits_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
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
        word = _drawn_word(seed, offset, plane, rows, start, threshold, BLOCK_M, WORD)
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
