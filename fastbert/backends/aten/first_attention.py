"""`first_attention` by the `aten` backend; contract in fastbert/ops/first_attention.py.

    q · (Wk x_t) = (Wkᵀ q) · x_t                      the query takes the key's weight
    Σ_t p_t (Wv x_t + bv) = Wv (Σ_t p_t x_t) + bv     the tokens are mixed first

so that no key or value is made. Neighbouring sequences of one length go through each product together. That
is for a CPU, where the lengths are at hand. On other devices, without a wait for them: keys and values of all
tokens, and `attention` with queries of zeros for the other rows.
"""

from __future__ import annotations

from itertools import groupby, pairwise

import torch
from torch import Tensor

from fastbert.backends.aten.attention import attention_fwd
from fastbert.ops.attention import AttentionInputs
from fastbert.ops.attention_inputs import EVERYWHERE
from fastbert.ops.checks import FLOATS, compute_dtype
from fastbert.ops.first_attention import FirstAttentionInputs

DTYPES = FLOATS


def first_attention_fwd(inputs: FirstAttentionInputs) -> Tensor:
    if inputs.x.device.type != "cpu":
        return _by_attention(inputs)
    x, q, key_weight, value_weight, value_bias, cu_seqlens, softmax_scale, bias, gate, _ = inputs
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


def _by_attention(inputs: FirstAttentionInputs):
    """With keys and values of all tokens; nothing is read on the host."""
    x, q, key_weight, value_weight, value_bias, cu_seqlens, softmax_scale, bias, gate, max_seqlen = inputs
    batch, total = q.shape[0], x.shape[0]
    if batch == 0 or total == 0:
        return x.new_zeros(batch, key_weight.shape[0])
    k = torch.nn.functional.linear(x, key_weight).unflatten(1, q.shape[1:])
    v = torch.nn.functional.linear(x, value_weight, value_bias).unflatten(1, q.shape[1:])
    # An empty sequence has the row of the next one, which it must neither change nor get
    starts = cu_seqlens[:-1].long().clamp_max(total - 1)
    filled = cu_seqlens.diff().gt(0)[:, None]
    queries = torch.zeros_like(k).index_add(0, starts, torch.where(filled[:, :, None], q, 0))
    gate = None if gate is None else gate.contiguous()
    all_rows = AttentionInputs(
        queries, k, v, cu_seqlens, max_seqlen, softmax_scale, EVERYWHERE, bias, gate, 0.0, None, 0
    )
    rows = attention_fwd(all_rows, False, False)[0].index_select(0, starts).flatten(1)
    return torch.where(filled, rows, 0)
