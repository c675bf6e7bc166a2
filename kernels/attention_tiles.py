"""What attention's forward and backward share: the place of a tile, and its rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.attention_slots import FIELDS

LOG2_E = 1.4426950408889634
_FIELDS = tl.constexpr(FIELDS)


@triton.jit
def _slot():
    """The slot of this program; `grid` in kernels/attention_slots.py."""
    return tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)


@triton.jit
def _place(places_ptr, slot):
    """(sequence, its start, its length, first row of the tile) of a slot; fastbert/ops/attention_places.py.

    Of the tail: (number of sequences, where they end, rows from tile to tile, the first after that end).
    """
    at = places_ptr + slot * _FIELDS
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def _whole_place(cu_seqlens_ptr, slot, n_sequences, n_tiles, BLOCK_M: tl.constexpr):
    """The same where every sequence has `n_tiles` tiles, in order; the tail has all other slots."""
    sequence = tl.minimum(slot // n_tiles, n_sequences)
    start = tl.load(cu_seqlens_ptr + sequence)
    length = (tl.num_programs(1) * tl.num_programs(2) - n_sequences * n_tiles) * BLOCK_M
    if sequence < n_sequences:
        length = tl.load(cu_seqlens_ptr + sequence + 1) - start
    return sequence, start, length, (slot - sequence * n_tiles) * BLOCK_M


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
