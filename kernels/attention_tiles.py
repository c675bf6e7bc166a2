"""What attention's forward and backward share: the place of a tile, and its rows."""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.attention_slots import FIELDS

if TYPE_CHECKING:
    from fastbert.ops.attention import AttentionInputs

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
def _key_head(head, GROUP: tl.constexpr):
    """The head of k and v that a head of q reads; GROUP heads of q share it."""
    if GROUP == 1:
        return head
    else:
        return head // GROUP


@triton.jit
def _keys_seen(
    first_row, length, left, right, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """(begin, end) of the keys that rows of the tile see, of those before `length`; `begin` begins a tile."""
    begin = 0
    end = length
    if CAUSAL:
        end = tl.minimum(length, first_row + BLOCK_M)
    if right is not None:
        end = tl.minimum(length, first_row + BLOCK_M + right)
    if left is not None:
        begin = tl.minimum(tl.maximum(first_row - left, 0) // BLOCK_N * BLOCK_N, length)
    return begin, end


@triton.jit
def _in_window(allowed, rows, keys, left, right, CAUSAL: tl.constexpr):
    """The `allowed` pairs whose key is at most `left` before its row and `right` after it; None: no limit."""
    if CAUSAL:
        allowed = allowed & (keys <= rows)
    if right is not None:
        allowed = allowed & (keys <= rows + right)
    if left is not None:
        allowed = allowed & (keys >= rows - left)
    return allowed


@triton.jit
def _finite(top):
    """`top`, or 0 where no key has been allowed yet: (-inf) - (-inf) would be NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


def sides_of(inputs: "AttentionInputs") -> tuple[int | None, int | None, bool]:
    """(left, right, causal) as kernels take the window: None is no limit, and right = 0 is `causal`.

    A side that reaches over every sequence is no limit.
    """
    left, right = inputs.window
    farthest = min(inputs.max_seqlen, inputs.q.shape[0]) - 1
    return (
        left if 0 <= left < farthest else None,
        right if 0 < right < farthest else None,
        right == 0,
    )


def span_of(inputs: "AttentionInputs") -> int:
    """The length by which tiles are chosen: max_seqlen, or half of the window where that is shorter.

    A tile as high as the window walks over twice the keys that a row sees.
    """
    left, right = inputs.window
    if left < 0 or right < 0:
        return inputs.max_seqlen
    return min(inputs.max_seqlen, max(1, (left + right) // 2))


def words_of(keep_bits: Tensor, block_n: int) -> Tensor:
    """The saved dropout bits, viewed as words small enough that `block_n` columns are whole words."""
    return keep_bits if block_n % 32 == 0 else keep_bits.view(torch.int16)
