"""Pooling: one vector per sequence from the packed hidden states of its tokens.

Math, for sequence i with tokens t in [cu_seqlens[i], cu_seqlens[i + 1]):
    cls   h_t of the first token
    mean  sum_t h_t / length
    max   max_t h_t, element by element
Sums run in float32 (float64 for float64 input), in token order: the result is the same from run to run and
does not depend on what else is in the batch. A sequence of length zero gives zeros. Differentiable.
"""

from __future__ import annotations

import torch

POOLINGS = ("mean", "cls", "max")


def pool(hidden: torch.Tensor, cu_seqlens: torch.Tensor, mode: str = "mean") -> torch.Tensor:
    """Pool packed hidden states to one row per sequence.

    Args:
        hidden: (total, hidden), floating point. Rows at and past cu_seqlens[-1] are ignored.
        cu_seqlens: (batch + 1,) int32 or int64 on the same device, starting at 0 and never decreasing.
        mode: "mean", "cls" (the first token) or "max".

    Returns:
        (batch, hidden) in float32 (float64 for float64 input); zeros where a sequence has no tokens.

    Raises:
        ValueError: an unknown mode or a wrong shape.
        TypeError: a wrong dtype.
    """
    if mode not in POOLINGS:
        raise ValueError(f"mode: {mode!r}; expected one of {', '.join(POOLINGS)}")
    if hidden.dim() != 2:
        raise ValueError(f"hidden: shape {tuple(hidden.shape)}; expected (total, hidden)")
    if not hidden.is_floating_point():
        raise TypeError(f"hidden: dtype {hidden.dtype}; expected floating point")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise ValueError(f"cu_seqlens: shape {tuple(cu_seqlens.shape)}; expected (batch + 1,)")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: dtype {cu_seqlens.dtype}; expected int32 or int64")
    if cu_seqlens.device != hidden.device:
        raise ValueError(f"cu_seqlens: on {cu_seqlens.device}, but hidden is on {hidden.device}")

    accumulate = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    cu_seqlens = cu_seqlens.long()
    lengths = cu_seqlens.diff()  # (batch,)
    batch = lengths.numel()
    if hidden.shape[0] == 0 or batch == 0:
        return hidden.new_zeros((batch, hidden.shape[1]), dtype=accumulate)
    empty = (lengths == 0).unsqueeze(1)  # (batch, 1)
    if mode == "cls":
        first = cu_seqlens[:-1].clamp(max=hidden.shape[0] - 1)  # a last, empty sequence starts past it
        return hidden.index_select(0, first).to(accumulate).masked_fill(empty, 0)
    # `unsafe` skips a check that reads `lengths` back to the host and refuses rows past cu_seqlens[-1]
    if mode == "max":
        peak = torch.segment_reduce(hidden.to(accumulate), "max", lengths=lengths, unsafe=True)
        return peak.masked_fill(empty, 0)
    total = torch.segment_reduce(hidden.to(accumulate), "sum", lengths=lengths, unsafe=True, initial=0)
    return total / lengths.clamp(min=1).unsqueeze(1).to(accumulate)
