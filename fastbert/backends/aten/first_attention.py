"""`first_attention` by the `aten` backend; contract in fastbert/ops/first_attention.py.

    q · (Wk x_t) = (Wkᵀ q) · x_t                      the query takes the key's weight
    Σ_t p_t (Wv x_t + bv) = Wv (Σ_t p_t x_t) + bv     the tokens are mixed first

so that no key or value is made. Neighbouring sequences of one length go through each product together.
"""

from __future__ import annotations

from itertools import groupby, pairwise

import torch

from fastbert.ops.checks import FLOATS, compute_dtype
from fastbert.ops.first_attention import FirstAttentionInputs

DTYPES = FLOATS


def first_attention_fwd(inputs: FirstAttentionInputs):
    x, q, key_weight, value_weight, value_bias, cu_seqlens, softmax_scale, bias, gate = inputs
    compute = compute_dtype(x)
    batch, nheads, head_dim = q.shape
    wk, wv = (w.to(compute).reshape(nheads, head_dim, -1) for w in (key_weight, value_weight))
    scaled = (q.to(compute) * softmax_scale).transpose(0, 1)  # (nheads, batch, head_dim)
    asked = (scaled @ wk).transpose(0, 1)  # (batch, nheads, width)
    mixed = asked.new_zeros(asked.shape)  # Σ_t p_t x_t
    mass = asked.new_zeros(batch, nheads, 1)  # Σ_t p_t: 1, or 0 where there is no allowed key
    ends = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(ends)]
    last = 0
    for length, run in groupby(lengths):
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
    return context.reshape(batch, nheads * head_dim).to(x.dtype)
