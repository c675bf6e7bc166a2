"""`pooling` by the `aten` backend; contract in fastbert/ops/pooling.py."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.ops.checks import FLOATS, compute_dtype

DTYPES = FLOATS


def pooling_fwd(hidden: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    compute, cu_seqlens = compute_dtype(hidden), cu_seqlens.long()
    lengths = cu_seqlens.diff()  # (batch,)
    if hidden.shape[0] == 0 or lengths.shape[0] == 0:
        return hidden.new_zeros((lengths.shape[0], hidden.shape[1]), dtype=compute)
    empty = (lengths == 0).unsqueeze(1)  # (batch, 1)
    if mode in ("cls", "lasttoken"):
        chosen = cu_seqlens[:-1] if mode == "cls" else cu_seqlens[1:] - 1
        # A first or last sequence without tokens has no row there
        chosen = chosen.clamp(0, hidden.shape[0] - 1)
        return hidden.index_select(0, chosen).to(compute).masked_fill(empty, 0)
    # `unsafe` skips a check that reads `lengths` back to the host and refuses rows past cu_seqlens[-1]
    if mode == "max":
        peak = torch.segment_reduce(hidden.to(compute), "max", lengths=lengths, unsafe=True)
        return peak.masked_fill(empty, 0)
    wide = hidden.to(compute)
    if mode == "weightedmean":
        wide = wide * _weights(cu_seqlens, *_sequences(hidden, cu_seqlens)).to(compute)
    total = torch.segment_reduce(wide, "sum", lengths=lengths, unsafe=True, initial=0)
    return total / _divisor(lengths, mode, compute)


def pooling_bwd(dy: Tensor, hidden: Tensor, y: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    cu_seqlens = cu_seqlens.long()
    row, sequence = _sequences(hidden, cu_seqlens)
    nothing = dy.new_zeros((1, dy.shape[1]))
    if mode in ("cls", "lasttoken"):
        edge = cu_seqlens if mode == "cls" else torch.cat((cu_seqlens[1:] - 1, cu_seqlens[:1]))
        chosen = (row == edge[sequence]).unsqueeze(1)
        grad = torch.cat((dy, nothing))[sequence].masked_fill(~chosen, 0)
    elif mode != "max":
        share = dy / _divisor(cu_seqlens.diff(), mode, dy.dtype)
        grad = torch.cat((share, nothing))[sequence]
        if mode == "weightedmean":
            grad = grad * _weights(cu_seqlens, row, sequence).to(dy.dtype)
    else:
        top = torch.cat((y, torch.full_like(nothing, torch.nan)))[sequence]  # equal to no element
        is_top = hidden.to(y.dtype) == top
        # counts are whole numbers: sums of them are exact in any order
        ties = dy.new_zeros((dy.shape[0] + 1, dy.shape[1])).index_add_(0, sequence, is_top.to(dy.dtype))
        share = torch.cat((dy, nothing)) / ties.clamp(min=1)
        grad = share[sequence].masked_fill(~is_top, 0)
    return grad.to(hidden.dtype)


def _sequences(hidden: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """(row, its sequence), both (total,); rows past the last sequence belong to sequence `batch`."""
    row = torch.arange(hidden.shape[0], device=hidden.device)
    return row, torch.searchsorted(cu_seqlens[1:], row, right=True)


def _weights(cu_seqlens: Tensor, row: Tensor, sequence: Tensor) -> Tensor:
    """(total, 1): 1, 2, … for the tokens of each sequence."""
    return (row - cu_seqlens[sequence] + 1).unsqueeze(1)


def _divisor(lengths: Tensor, mode: str, dtype: torch.dtype) -> Tensor:
    """(batch, 1): what the sum over a sequence is divided by."""
    count = lengths.clamp(min=1).unsqueeze(1)
    if mode == "weightedmean":
        count = count * (count + 1) // 2
    return count.to(dtype).sqrt() if mode == "mean_sqrt_len_tokens" else count.to(dtype)
