"""Scores of distances in attention's kernels; the contract is in fastbert/ops/attention_relative.py.

Math       S_ij += query[i, h, c] + key[j, h, c] + bias[h, c],  c = columns[p_j - p_i + reach]
           dquery[i, h, c] = Σ dS_ij over the keys j whose column is c;  dkey[j, h, c] likewise over queries
           dbias[h, c] = Σ_i dquery[i, h, c] = Σ_j dkey[j, h, c]
Tiling     A tile of m queries and n keys has m + n - 1 distances, so its columns are 4 (m + n - 1) bytes,
           which stay in L1. Near distances have neighbouring columns: a row of the tile is a run of a row of
           `query`, a column of the tile is a run of a row of `key`, and both are gathered by pointer.
           Backward reads the dense dS of attention_dbias.py. A program owns BLOCK_M rows and BLOCK_C columns,
           and adds the distances of each column in rising order: no atomics. With positions a column's keys
           are anywhere: keys are added in order, each to the column that it has, BLOCK_M of them only if one
           has a column of the tile.
Cost       Forward, per pair and head, scores of 2 bytes: 2 bytes of `query` and 2 of `key`, at most; far
           distances share columns and read less. As a dense float32 bias the same scores take 4 bytes of the
           kernel, and 72 bytes before it: per term a float32 copy, its grid, a gather, then their sum.
           Backward has no such bias either. Its dS is 4 bytes per pair and head, written once and read once
           per term; that of `key` is transposed first, so that lanes side by side read a run of a row.
Precision  Sums of float32.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.launch import MOST_REGISTERS, cdiv, launch, next_power_of_2

if TYPE_CHECKING:
    from fastbert.ops.attention_relative import RelativeScores

# Arguments for which 1 and multiples of 16 compile nothing anew.
FIXED_TYPES = (
    "query_stride",
    "query_head_stride",
    "key_stride",
    "key_head_stride",
    "distance_head_stride",
    "positions_stride",
    "reach",
)
# What a launch without scores of distances gets.
_NONE = (None,) * 5 + (0,) * 7


def relative_args(relative: "RelativeScores | None") -> tuple:
    """The arguments of a kernel, from `columns_ptr` to `reach`."""
    if relative is None:
        return _NONE
    columns, query, key, bias, positions = relative
    query, key, bias = (t if t is None or t.stride(-1) == 1 else t.contiguous() for t in (query, key, bias))
    positions = None if positions is None else positions.contiguous()
    strides = [n for t in (query, key) for n in ((0, 0) if t is None else t.stride()[:2])]
    return (
        *(columns.contiguous(), query, key, bias, positions),
        *strides,
        0 if bias is None else bias.stride(0),
        0 if positions is None else positions.stride(0),
        columns.shape[0] // 2,
    )


@triton.jit
def _columns(columns_ptr, positions_ptr, reach, own, other, OF_KEYS: tl.constexpr):
    """`columns` = [own, other] of the distances from rows to keys, or OF_KEYS the other way round.

    `positions_ptr`: None, or those of the sequence.
    """
    if positions_ptr is not None:
        own, other = tl.load(positions_ptr + own), tl.load(positions_ptr + other)
    if OF_KEYS:
        distance = own[:, None] - other[None, :]
    else:
        distance = other[None, :] - own[:, None]
    if positions_ptr is not None:
        distance = tl.minimum(tl.maximum(distance, -reach), reach)
    return tl.load(columns_ptr + (reach + distance))


@triton.jit
def _with_distances(
    scores,
    relative,
    first_row,
    first_key,
    length,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """`scores` = [BLOCK_M, BLOCK_N], or TRANSPOSED, and those of the distances from rows to keys.

    Rows and keys past the sequence get those of its last token, which takes fewer registers than masks.
    `relative`: pointers (the first is None without scores), strides of rows, other numbers (in the order of
    `relative_args`), and the place in int64: the sequence, its start in the packed layout, the head. Triton
    3.6 cannot compare a tuple that holds None with None.
    """
    columns_ptr, query_ptr, key_ptr, bias_ptr, positions_ptr = relative[0]
    if columns_ptr is not None:
        query_stride, query_head_stride, key_stride, key_head_stride = relative[1]
        bias_head_stride, positions_stride, reach = relative[2]
        sequence, start, head = relative[3]
        if positions_ptr is not None:
            positions_ptr += sequence * positions_stride
        rows = tl.minimum(first_row + tl.arange(0, BLOCK_M), length - 1)
        keys = tl.minimum(first_key + tl.arange(0, BLOCK_N), length - 1)
        if query_ptr is not None or bias_ptr is not None:
            column = _columns(columns_ptr, positions_ptr, reach, rows, keys, False)
            if query_ptr is not None:
                at = query_ptr + head * query_head_stride + (start + rows)[:, None] * query_stride
                found = tl.load(at + column)
                scores += (tl.trans(found) if TRANSPOSED else found).to(tl.float32)
            if bias_ptr is not None:
                found = tl.load(bias_ptr + head * bias_head_stride + column)
                scores += (tl.trans(found) if TRANSPOSED else found).to(tl.float32)
        if key_ptr is not None:
            # Lanes side by side read a run of a row: rows are those of `key`.
            column = _columns(columns_ptr, positions_ptr, reach, keys, rows, True)
            at = key_ptr + head * key_head_stride + (start + keys)[:, None] * key_stride
            found = tl.load(at + column)
            scores += (found if TRANSPOSED else tl.trans(found)).to(tl.float32)
    return scores


@triton.jit(do_not_specialize=("nheads", "max_seqlen", "ncolumns", "n_tiles", "positions_stride", "reach"))
def _attention_bwd_columns_kernel(
    ds_ptr, order_ptr, ends_ptr, columns_ptr, positions_ptr, cu_seqlens_ptr, out_ptr,
    nheads, max_seqlen, ncolumns, n_tiles, positions_stride, reach,
    BACK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`out` = [rows, nheads, ncolumns]: dS = [sequences, nheads, max_seqlen, max_seqlen], summed by column.

    `order` has the distances, counted from 1 - max_seqlen, by their columns; those of column c end before
    ends[c + 1]. With `positions_ptr` there are neither. BACK: distances from the column of dS to its row.
    """
    place = tl.program_id(0)
    head = place % nheads
    sequence = place // nheads // n_tiles
    start = tl.load(cu_seqlens_ptr + sequence)
    length = tl.load(cu_seqlens_ptr + sequence + 1) - start
    first = place // nheads % n_tiles * BLOCK_M
    if first < length:
        rows = first + tl.arange(0, BLOCK_M)[:, None]
        first_column = tl.program_id(1) * BLOCK_C
        columns = first_column + tl.arange(0, BLOCK_C)
        wide_sequence = tl.cast(sequence, tl.int64)
        row_ptr = ds_ptr + ((wide_sequence * nheads + head) * max_seqlen + rows) * max_seqlen
        acc = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
        if positions_ptr is not None:
            positions_ptr += wide_sequence * positions_stride
            own = tl.minimum(first + tl.arange(0, BLOCK_M), length - 1)
            for beside in range(0, length, BLOCK_M):
                others = tl.minimum(beside + tl.arange(0, BLOCK_M), length - 1)
                found = _columns(columns_ptr, positions_ptr, reach, own, others, BACK)
                least, most = tl.min(tl.min(found, 1), 0), tl.max(tl.max(found, 1), 0)
                if (least < first_column + BLOCK_C) & (most >= first_column):
                    for other in range(beside, tl.minimum(beside + BLOCK_M, length)):
                        at = other + tl.arange(0, 1)
                        column = _columns(columns_ptr, positions_ptr, reach, own, at, BACK)
                        ds = tl.load(row_ptr + other, mask=rows < length, other=0.0)
                        acc += tl.where(column == columns[None, :], ds, 0.0)
        else:
            begin = tl.load(ends_ptr + columns, mask=columns < ncolumns, other=0)
            count = tl.load(ends_ptr + columns + 1, mask=columns < ncolumns, other=0) - begin
            for which in range(tl.max(count, 0)):
                there = which < count
                distance = tl.load(order_ptr + begin + which, mask=there, other=0) + 1 - max_seqlen
                if BACK:
                    distance = -distance
                others = rows + distance[None, :]
                inside = there[None, :] & (rows < length) & (others >= 0) & (others < length)
                acc += tl.load(row_ptr + others, mask=inside, other=0.0)
        at = out_ptr + ((start.to(tl.int64) + rows) * nheads + head) * ncolumns + columns[None, :]
        tl.store(at, acc, mask=(rows < length) & (columns < ncolumns)[None, :])


def relative_bwd(
    ds: Tensor,
    relative: "RelativeScores",
    need: Sequence[bool],
    cu_seqlens: Tensor,
    total: int,
) -> tuple[Tensor, ...]:
    """The gradients of query, key and bias in float32, of shape (0,) where not needed.

    `ds`: (batch, nheads, S, S), zeros past each sequence; summed to a batch of 1 where bias alone needs it,
    without positions.
    """
    if ds.numel() == 0:
        scores = zip(relative[1:4], need, strict=True)
        return tuple(ds.new_zeros(t.shape if needed else 0) for t, needed in scores)
    need_query, need_key, need_bias = need
    batch, nheads, size, _ = ds.shape
    none = ds.new_empty(0)
    given = next(t for t in relative[1:4] if t is not None)
    reach, ncolumns = relative.columns.shape[0] // 2, given.shape[-1]
    columns, positions, order, ends = relative.columns.contiguous(), relative.positions, None, None
    if positions is None:
        sorted_columns, order = columns[reach - size + 1 : reach + size].sort(stable=True)
        starts = torch.arange(ncolumns + 1, device=ds.device, dtype=torch.int32)
        ends = torch.searchsorted(sorted_columns, starts)
    else:
        positions = positions.contiguous()
    if batch < cu_seqlens.shape[0] - 1:
        total, cu_seqlens = size, size * torch.arange(2, device=ds.device, dtype=torch.int32)

    def by_column(ds: Tensor, back: bool) -> Tensor:
        # Rows past the last sequence are 0.
        out = ds.new_zeros((total, nheads, ncolumns))
        block_m, block_c = 16, min(64, next_power_of_2(ncolumns))
        n_tiles = cdiv(size, block_m)
        launch(
            _attention_bwd_columns_kernel,
            (batch * n_tiles * nheads, cdiv(ncolumns, block_c)),
            ds.device,
            *(ds, order, ends, columns, positions, cu_seqlens, out),
            *(nheads, size, ncolumns, n_tiles, size, reach),
            BACK=back,
            BLOCK_M=block_m,
            BLOCK_C=block_c,
            num_warps=4,
            maxnreg=MOST_REGISTERS,
        )
        return out

    dkey = by_column(ds.mT.contiguous(), True) if need_key else none
    dquery = by_column(ds, False) if need_query or (need_bias and not need_key) else none
    dbias = (dkey if need_key else dquery).sum(0) if need_bias else none
    return dquery if need_query else none, dkey, dbias
