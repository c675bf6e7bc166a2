"""Attention's dense grid: packed sequences padded to one length, its mask, and dropout's bits on it.

The reference works on the grid, and so does every backend that computes without the packed layout. The layout
and the order of the bits: fastbert/ops/attention.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.ops.attention_inputs import AttentionInputs, Window
from fastbert.ops.checks import TensorOrNone
from fastbert.ops.dropout import lanes_of, philox_blocks, threshold


def to_grid(x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Packed (total, ...) -> (batch, max_seqlen, ...), zeros past each length; differentiable, no sync."""
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.long().diff()
    position = torch.arange(max_seqlen, device=x.device)
    rows = torch.where(position < lengths.unsqueeze(1), starts.unsqueeze(1) + position, x.shape[0])
    return torch.cat((x, x.new_zeros((1, *x.shape[1:]))))[rows]


def from_grid(grid: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """(batch, max_seqlen, ...) -> packed (total, ...), zeros from cu_seqlens[-1]; differentiable, no sync."""
    batch, seqlen = grid.shape[:2]
    ends = cu_seqlens[1:].long()
    row = torch.arange(total, device=grid.device)
    sequence = torch.searchsorted(ends, row, right=True)  # `batch` for capacity rows
    position = row - cu_seqlens.long()[sequence]
    cell = torch.where((sequence < batch) & (position < seqlen), sequence * seqlen + position, batch * seqlen)
    flat = grid.reshape(batch * seqlen, *grid.shape[2:])
    return torch.cat((flat, flat.new_zeros((1, *flat.shape[1:]))))[cell]


def grid_mask(
    cu_seqlens: Tensor | None, batch: int, seqlen: int, window: Window, device: torch.device
) -> Tensor:
    """Which (query, key) pairs of a dense grid are real and allowed: bool (batch or 1, 1, seqlen, seqlen)."""
    position = torch.arange(seqlen, device=device)
    if cu_seqlens is None:
        allowed = torch.ones((1, 1, seqlen, seqlen), dtype=torch.bool, device=device)
    else:
        real = position < cu_seqlens.diff().unsqueeze(1)  # (batch, seqlen)
        allowed = (real.unsqueeze(2) & real.unsqueeze(1)).unsqueeze(1)
    outside = outside_window(seqlen, window, device)
    return allowed if outside is None else allowed & ~outside


def outside_window(seqlen: int, window: Window, device: torch.device) -> TensorOrNone:
    """Which (query, key) pairs the window forbids: bool (seqlen, seqlen), or None if it forbids none."""
    left, right = window
    if left < 0 and right < 0:
        return None
    pairs = torch.ones((seqlen, seqlen), dtype=torch.bool, device=device)
    later = pairs.triu(right + 1) if right >= 0 else None
    if left < 0:
        return later
    earlier = pairs.tril(-left - 1)
    return earlier if later is None else earlier | later


def with_all_heads(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs with keys and values repeated for each head of q, if they have fewer."""
    q, k, v = inputs[:3]
    if k.shape[1] == q.shape[1]:
        return inputs
    each = q.shape[1] // k.shape[1]
    return inputs._replace(k=k.repeat_interleave(each, 1), v=v.repeat_interleave(each, 1))


def of_shared_heads(grad: Tensor, k: Tensor) -> Tensor:
    """The gradient of k or v, (total, heads of k, headdim), from that of `with_all_heads`."""
    if grad.dim() == 1 or grad.shape[1] == k.shape[1]:
        return grad
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    return grad.unflatten(1, (k.shape[1], -1)).sum(2, dtype=wide).to(grad.dtype)


def keep_mask(
    seed: Tensor,
    offset: int,
    first_rows: Tensor,
    nheads: int,
    seqlen: int,
    dropout_p: float,
    first_head: int = 0,
) -> Tensor:
    """Dropout bits (len(first_rows), nheads, seqlen, seqlen) of sequences, for `nheads` heads.

    The sequences begin at the packed rows `first_rows`, the heads at `first_head`.
    """
    device = seed.device
    position = torch.arange(seqlen, device=device)
    words = philox_blocks(
        seed,
        offset,
        torch.arange(first_head, first_head + nheads, device=device).reshape(1, nheads, 1, 1),
        first_rows.long().reshape(-1, 1, 1, 1) + position.reshape(1, 1, seqlen, 1),
        torch.arange((seqlen + 7) // 8, device=device),
    )
    return (lanes_of(words) >= threshold(dropout_p)).flatten(-2)[..., :seqlen]


def bits_shape(nheads: int, total: int, max_seqlen: int, save_bits: bool) -> tuple[int, ...]:
    """The shape of the saved dropout bits; (0,) if none are saved."""
    return (nheads, total, (max_seqlen + 31) // 32) if save_bits else (0,)


def pack_bits(keep: Tensor) -> Tensor:
    """Bool (…, n) -> int32 (…, ceil(n / 32)): bit i of word w is element 32 w + i; the last word's rest 0."""
    n_words = -(-keep.shape[-1] // 32)
    keep = torch.nn.functional.pad(keep, (0, 32 * n_words - keep.shape[-1]))
    places = torch.ones((), dtype=torch.int64, device=keep.device) << _bit_numbers(keep.device)
    words = (keep.unflatten(-1, (n_words, 32)) * places).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_bits(words: Tensor, n: int) -> Tensor:
    """The inverse of `pack_bits`."""
    return (words.unsqueeze(-1) >> _bit_numbers(words.device) & 1).bool().flatten(-2)[..., :n]


def _bit_numbers(device: torch.device) -> Tensor:
    return torch.arange(32, device=device)
