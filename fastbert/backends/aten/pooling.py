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
    if mode == "cls":
        first = cu_seqlens[:-1].clamp(max=hidden.shape[0] - 1)  # a last, empty sequence starts past it
        return hidden.index_select(0, first).to(compute).masked_fill(empty, 0)
    # `unsafe` skips a check that reads `lengths` back to the host and refuses rows past cu_seqlens[-1]
    if mode == "max":
        peak = torch.segment_reduce(hidden.to(compute), "max", lengths=lengths, unsafe=True)
        return peak.masked_fill(empty, 0)
    total = torch.segment_reduce(hidden.to(compute), "sum", lengths=lengths, unsafe=True, initial=0)
    return total / lengths.clamp(min=1).unsqueeze(1).to(compute)


def pooling_bwd(dy: Tensor, hidden: Tensor, y: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    cu_seqlens = cu_seqlens.long()
    row = torch.arange(hidden.shape[0], device=hidden.device)
    sequence = torch.searchsorted(cu_seqlens[1:], row, right=True)  # `batch` for rows past the last one
    nothing = dy.new_zeros((1, dy.shape[1]))
    if mode == "cls":
        first = (row == cu_seqlens[sequence]).unsqueeze(1)
        grad = torch.cat((dy, nothing))[sequence].masked_fill(~first, 0)
    elif mode == "mean":
        share = dy / cu_seqlens.diff().clamp(min=1).unsqueeze(1).to(dy.dtype)
        grad = torch.cat((share, nothing))[sequence]
    else:
        top = torch.cat((y, torch.full_like(nothing, torch.nan)))[sequence]  # equal to no element
        is_top = hidden.to(y.dtype) == top
        # counts are whole numbers: sums of them are exact in any order
        ties = dy.new_zeros((dy.shape[0] + 1, dy.shape[1])).index_add_(0, sequence, is_top.to(dy.dtype))
        share = torch.cat((dy, nothing)) / ties.clamp(min=1)
        grad = share[sequence].masked_fill(~is_top, 0)
    return grad.to(hidden.dtype)
