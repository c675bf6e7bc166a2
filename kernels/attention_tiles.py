"""What attention's forward and backward share: the place of a tile, its rows, and the size of the grid."""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634


@triton.jit
def _place(
    cu_seqlens_ptr,
    slot,
    n_slots,
    n_sequences,
    n_tiles,
    BLOCK_M: tl.constexpr,
    WHOLE: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """(sequence, tile, number of slots that share the tail) of a slot.

    The tail, the rows after the last sequence, is sequence `n_sequences`.

    WHOLE: every sequence has `n_tiles` tiles. Else each has the tiles of its length. SEQUENCES > 0 (at least
    n_sequences): they follow without a gap, the longest sequence first. SEQUENCES = 0: they follow in order,
    with at most one slot too many per sequence.
    """
    if WHOLE:
        sequence, tile, tail_slots = slot // n_tiles, slot % n_tiles, n_tiles
    elif SEQUENCES > 0:
        at = tl.arange(0, SEQUENCES)
        starts = tl.load(cu_seqlens_ptr + at, mask=at < n_sequences, other=0)
        lengths = tl.load(cu_seqlens_ptr + 1 + at, mask=at < n_sequences, other=0) - starts
        tiles = (lengths + BLOCK_M - 1) // BLOCK_M
        # No two ranks are equal.
        rank = lengths * SEQUENCES + at
        before = tl.sum(tl.where(rank[None, :] > rank[:, None], tiles[None, :], 0), 1)
        here = (before <= slot) & (slot < before + tiles)
        used = tl.sum(tiles, 0)
        tail_slots = n_slots - used
        sequence, tile = n_sequences, slot - used
        if slot < used:
            # Within a sequence the last tile comes first: with a causal mask it has the most keys.
            sequence = tl.sum(tl.where(here, at, 0), 0)
            tile = tl.sum(tl.where(here, before + tiles - 1, 0), 0) - slot
    else:
        # Sequence b begins at slot start // BLOCK_M + b.
        sequence, last = 0, n_sequences
        while sequence < last:
            middle = (sequence + last + 1) // 2
            if tl.load(cu_seqlens_ptr + middle) // BLOCK_M + middle <= slot:
                sequence = middle
            else:
                last = middle - 1
        begin = tl.load(cu_seqlens_ptr + sequence) // BLOCK_M + sequence
        tile, tail_slots = slot - begin, n_slots - begin
    return sequence, tile, tail_slots


@triton.jit
def _load_rows(
    ptr,
    stride,
    first,
    end,
    HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """`tile` = [BLOCK, BLOCK_D]: the rows from `first` on; MASKED: 0 from row `end` on."""
    rows = tl.arange(0, BLOCK)
    dims = tl.arange(0, BLOCK_D)
    at = ptr + tl.cast(first, tl.int64) * stride + (rows.to(tl.int64)[:, None] * stride + dims[None, :])
    if MASKED:
        return tl.load(at, mask=(rows < end - first)[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM < BLOCK_D:
        return tl.load(at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _finite(top):
    """`top`, or 0 where no key has been allowed yet: (-inf) - (-inf) would be NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


def words_of(keep_bits: Tensor, block_n: int) -> Tensor:
    """The saved dropout bits, viewed as words small enough that `block_n` columns are whole words."""
    return keep_bits if block_n % 32 == 0 else keep_bits.view(torch.int16)


def slots(block_m: int, total: int, batch: int, n_tiles: int, ranked: bool, whole: bool) -> int:
    """The slots of a grid for the tiles of any `batch` lengths within `total` rows, and for the tail."""
    if whole:
        return n_tiles * (batch + 1)
    if ranked:
        # A length wastes at most block_m - 1 rows of its last tile.
        return min(n_tiles * batch, (total + batch * (block_m - 1)) // block_m) + 1
    return total // block_m + batch + 1
