"""Attention of each sequence's first token alone, without making any key or value."""

from __future__ import annotations

from itertools import groupby, pairwise

import torch
from torch import Tensor

from fastbert.ops import checks


def first_attention(
    x: Tensor,
    q: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    value_bias: Tensor | None,
    cu_seqlens: Tensor,
    *,
    softmax_scale: float,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Attention of one query a sequence, that of its first token, without making any key or value.

    For a head with one query q, over the tokens x_t of its sequence,

        q · (Wk x_t + bk) = (Wkᵀ q) · x_t + a constant, which softmax does not see
        Σ_t p_t (Wv x_t + bv) = Wv (Σ_t p_t x_t) + bv

    so both products with a weight run over sequences instead of tokens. Computed in float32 (float64 for
    float64) and rounded once. On a CPU only: it reads `cu_seqlens` on the host.

    Args:
        x: (total, hidden), what keys and values would be made of.
        q: (batch, nheads, head_dim).
        key_weight, value_weight, value_bias: of the linear layers; (hidden, hidden), and (hidden,) or None.
        cu_seqlens: (batch + 1,) int32.
        softmax_scale, bias, gate: as `ops.attention.attention`; of a 4-D `bias` query 0 is read.

    Returns:
        (batch, hidden) in x's dtype; zeros where a sequence has no token or its query no allowed key.
    """
    compute = checks.compute_dtype(x)
    batch, nheads, head_dim = q.shape
    wk, wv = (w.to(compute).reshape(nheads, head_dim, -1) for w in (key_weight, value_weight))
    scaled = (q.to(compute) * softmax_scale).transpose(0, 1)  # (nheads, batch, head_dim)
    asked = (scaled @ wk).transpose(0, 1)  # (batch, nheads, hidden)
    mixed = asked.new_zeros(asked.shape)  # Σ_t p_t x_t
    mass = asked.new_zeros(batch, nheads, 1)  # Σ_t p_t: 1, or 0 where there is no allowed key
    ends = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(ends)]
    last = 0
    for length, run in groupby(lengths):  # neighbours of one length go together
        first, last = last, last + len(list(run))
        if length == 0:
            continue
        tokens = x[ends[first] : ends[last]].to(compute).reshape(last - first, length, -1)
        scores = asked[first:last] @ tokens.mT  # (sequences, nheads, length)
        mass[first:last] = 1
        if bias is not None:
            scores = scores + bias[slice(first, last) if bias.shape[0] > 1 else 0, :, 0, :length].to(compute)
            blind = scores.isneginf().all(-1, keepdim=True)
            scores, mass[first:last] = scores.masked_fill(blind, 0), blind.logical_not().to(compute)
        mixed[first:last] = torch.softmax(scores, -1) @ tokens
    context = (mixed.transpose(0, 1) @ wv.mT).transpose(0, 1)  # (batch, nheads, head_dim)
    if value_bias is not None:
        context = context + value_bias.to(compute).reshape(nheads, head_dim)
    context = context * mass
    if gate is not None:
        context = context * gate.to(compute).unsqueeze(1)
    return context.reshape(batch, -1).to(x.dtype)
