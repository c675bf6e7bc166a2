"""`attention` by the `reference` backend; contract in fastbert/ops/attention.py.

One sequence at a time, all of it in float64 or float32. Backward recomputes the probabilities from q and k,
and delta from them, and the dropout bits from the seed: it uses neither `out`, `lse` nor `keep_bits`, so it
checks backends that do.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from fastbert.ops.attention import AttentionInputs, attention_ref
from fastbert.ops.attention_grid import bits_shape, keep_mask, of_shared_heads, pack_bits, with_all_heads
from fastbert.ops.attention_inputs import AttentionNeeds
from fastbert.ops.checks import FLOATS, TensorOrNone, compute_dtype

DTYPES = FLOATS


def attention_fwd(
    inputs: AttentionInputs, return_probs: bool, save_bits: bool, places: Tensor | None = None
) -> tuple[Tensor, ...]:
    q, k, v, cu_seqlens, max_seqlen, softmax_scale, window, bias, gate, dropout_p, seed, offset = (
        with_all_heads(inputs)
    )
    total, nheads, _ = q.shape
    compute = compute_dtype(q)
    out = q.new_zeros(q.shape)
    lse = q.new_zeros((nheads, total), dtype=compute)
    batch = cu_seqlens.shape[0] - 1
    probs = q.new_zeros((batch, nheads, max_seqlen, max_seqlen) if return_probs else (0,))
    keep_bits = lse.new_zeros(bits_shape(nheads, total, max_seqlen, save_bits), dtype=torch.int32)
    for b, (rows, length) in _sequences(cu_seqlens):
        keep = _keep(cu_seqlens, b, length, nheads, dropout_p, seed, offset)
        o, sequence_lse, p = attention_ref(
            *(q[rows].to(compute)[None], k[rows].to(compute)[None], v[rows].to(compute)[None]),
            softmax_scale=softmax_scale,
            window=window,
            bias=None if bias is None else _cut(bias, b, length),
            gate=gate,
            dropout_p=dropout_p,
            keep_mask=keep,
        )
        out[rows] = o[0].to(q.dtype)
        lse[:, rows] = sequence_lse[0]
        if save_bits:
            words = pack_bits(keep[0])
            keep_bits[:, rows, : words.shape[-1]] = words
        if return_probs:
            probs[b, :, :length, :length] = p[0].to(q.dtype)
    return out, lse, probs, keep_bits


def attention_bwd(
    dout: Tensor,
    inputs: AttentionInputs,
    out: Tensor,
    lse: Tensor,
    keep_bits: Tensor | None,
    need: AttentionNeeds,
    places: Tensor | None = None,
) -> tuple[Tensor, ...]:
    given = with_all_heads(inputs)
    q, k, v, cu_seqlens, _, softmax_scale, window, bias, gate, dropout_p, seed, offset = given
    compute, nheads = lse.dtype, q.shape[1]
    dq, dk, dv = (q.new_zeros(q.shape if needed else (0,)) for needed in need[:3])
    dbias = lse.new_zeros(bias.shape if need.dbias else (0,))
    dgate = lse.new_zeros(gate.shape if need.dgate else (0,))
    for b, (rows, length) in _sequences(cu_seqlens):
        # (nheads, length, headdim)
        qs, ks, vs, do = (t[rows].to(compute).transpose(0, 1) for t in (q, k, v, dout))
        keep = _keep(cu_seqlens, b, length, nheads, dropout_p, seed, offset)
        p = attention_ref(
            *(qs.transpose(0, 1)[None], ks.transpose(0, 1)[None], vs.transpose(0, 1)[None]),
            softmax_scale=softmax_scale,
            window=window,
            bias=None if bias is None else _cut(bias, b, length),
        )[2][0]  # (nheads, length, length)
        dropped = p if keep is None else p * keep[0] / (1.0 - dropout_p)
        if need.dgate:
            dgate += (do * (dropped @ vs)).sum((1, 2))
        if gate is not None:
            do = do * gate.to(compute).reshape(-1, 1, 1)
        dp = do @ vs.transpose(1, 2)
        if keep is not None:
            dp = dp * keep[0] / (1.0 - dropout_p)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        if need.dq:
            dq[rows] = (softmax_scale * (ds @ ks)).transpose(0, 1).to(q.dtype)
        if need.dk:
            dk[rows] = (softmax_scale * (ds.transpose(1, 2) @ qs)).transpose(0, 1).to(q.dtype)
        if need.dv:
            dv[rows] = (dropped.transpose(1, 2) @ do).transpose(0, 1).to(q.dtype)
        if need.dbias:
            part = _cut(dbias, b, length)  # a view
            part += ds.unsqueeze(0).sum_to_size(part.shape)
    return dq, *(of_shared_heads(grad, inputs.k) for grad in (dk, dv)), dbias, dgate


def _sequences(cu_seqlens):
    """(index, (rows, length)) of each sequence that has rows."""
    ends = cu_seqlens.tolist()
    spans = [(slice(start, end), end - start) for start, end in pairwise(ends)]
    return [(b, span) for b, span in enumerate(spans) if span[1] > 0]


def _cut(bias, b, length):
    """The view of a 4-D bias that sequence b sees, (1, nheads or 1, length or 1, length or 1)."""
    b = b if bias.shape[0] > 1 else 0
    return bias[b : b + 1, :, :length, :length]


def _keep(cu_seqlens, b, length, nheads, dropout_p, seed, offset) -> TensorOrNone:
    if dropout_p == 0:
        return None
    return keep_mask(seed, offset, cu_seqlens[b : b + 1], nheads, length, dropout_p)
