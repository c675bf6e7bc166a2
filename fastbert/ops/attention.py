r"""Multi-head self-attention over packed sequences of any lengths, with additive bias, head gate and dropout.

Forward, for each sequence and head, in float32 (float64 for float64 input):

    S = softmax_scale * q kᵀ + bias       window (l, r): query i sees key j only where i - l <= j <= i + r
    P = softmax(S) of each row,  lse = log Σ_j exp S_ij,  D = dropout(P)
    out = gate * D v

Backward, with dO = gate * dout and delta = rowsum(dout ∘ out) (= rowsum(P ∘ dP)):

    dv = Dᵀ dO,  dP = dropout'(dO vᵀ),  dS = P ∘ (dP - delta)
    dq = softmax_scale * dS k,  dk = softmax_scale * dSᵀ q
    dbias = Σ dS over the broadcast dimensions,  dgate = Σ_rows rowsum(dout ∘ (D v))

`relative` adds scores of distances to bias (ops/attention_relative.py). `causal` is the window with r = 0. If
k and v have fewer heads than q, each serves several neighbouring heads of q, and dk and dv are the sums over
those.

P is recomputed from lse. Nothing of size seqlen² is saved but dropout's bits, one per probability, and only
for the devices and dtypes in `fastbert.ops.dropout.SAVED_ON`. Otherwise backward draws them again.

Packed layout: q, k, v (total, nheads, headdim), sequence b in rows cu_seqlens[b] to cu_seqlens[b + 1]. They
may be strided views of one (total, 3, nheads, headdim) tensor: only the last dimension must be contiguous.
Other tensors, and expanded rows, are copied. Padded layout: (batch, seqlen, nheads, headdim); backends get it
as a packed batch of equal lengths. Rows at and past cu_seqlens[-1] (capacity) are never read; their out, lse
and gradients are 0. A query without an allowed key has out 0, lse -inf, probs 0 and gradients 0. Zero-length
sequences are legal.

Dropout bits: `fastbert.ops.dropout`, plane = head, row = row of the query in the packed layout, column =
position of the key within its sequence. Neither max_seqlen nor the layout changes them. Saved bits are int32
(nheads, total, ceil(max_seqlen / 32)): bit i of word w of a row belongs to key 32 w + i. Bits outside a
sequence, and bits of pairs that the window forbids, are unspecified.

Source: Vaswani et al. 2017, "Attention Is All You Need", eq. 1; backward as in Dao et al. 2022,
"FlashAttention", sec. 3.1; gate: Michel, Levy, Neubig 2019, "Are Sixteen Heads Really Better than One?",
eq. 1; window: Beltagy, Peters, Cohan 2020, "Longformer", sec. 3.1; fewer heads of k and v: Ainslie et al.
2023, "GQA", sec. 2.2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastbert.ops import checks
from fastbert.ops.attention_autograd import RELATIVE, AttentionFunction, attention_fwd
from fastbert.ops.attention_checks import check_bias, check_lengths, check_qkv, checked_scale, checked_window
from fastbert.ops.attention_grid import from_grid, grid_mask, keep_mask, to_grid
from fastbert.ops.attention_inputs import AttentionInputs
from fastbert.ops.attention_places import Places, checked_table
from fastbert.ops.attention_relative import RelativeScores, checked_relative, dense_scores
from fastbert.ops.dropout import SAVED_ON
from fastbert.runtime import dispatch


def attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    dropout_p: float = 0.0,
    keep_mask: Tensor | None = None,
    window: tuple[int, int] | None = None,
    relative: RelativeScores | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, probs) in plain PyTorch, differentiable through out and probs in all tensors of floats.

    Computes in float64 for float64 `q`, else in float32, on a dense (batch, nheads, S, S) grid; no host
    synchronisation. `keep_mask` (batch, nheads, S, S), bool, says which probabilities dropout keeps; None
    keeps all. `probs` are those before dropout, in q's dtype. `lse` carries no gradient.
    """
    compute, dtype, total = checks.compute_dtype(q), q.dtype, q.shape[0]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if cu_seqlens is not None:
        if max_seqlen is None:
            raise TypeError("max_seqlen: expected an int with cu_seqlens, got None")
        q, k, v = (to_grid(t, cu_seqlens, max_seqlen) for t in (q, k, v))
    q, k, v = (t.to(compute).transpose(1, 2) for t in (q, k, v))  # (batch, nheads, S, headdim)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    seqlen = q.shape[2]
    scores = q @ k.transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias.to(compute)
    if relative is not None:
        scores = scores + dense_scores(relative, cu_seqlens, seqlen, q)
    allowed = grid_mask(cu_seqlens, q.shape[0], seqlen, checked_window(causal, window), q.device)
    scores = scores.masked_fill(~allowed, -math.inf)
    top = scores.detach().amax(-1, keepdim=True) if seqlen > 0 else scores.new_zeros((*scores.shape[:3], 1))
    top = top.masked_fill(top.isneginf(), 0.0)  # no allowed key: exp(-inf - 0) = 0 rather than NaN
    weights = (scores - top).exp()
    norm = weights.sum(-1, keepdim=True)
    probs = weights / norm.masked_fill(norm == 0, 1.0)
    lse = (top + norm.log()).squeeze(-1).detach()
    dropped = probs if keep_mask is None else probs * keep_mask / (1.0 - dropout_p)
    out = (dropped @ v).transpose(1, 2)  # (batch, S, nheads, headdim)
    if gate is not None:
        out = out * gate.to(compute).unsqueeze(-1)
    if cu_seqlens is not None:
        out = from_grid(out, cu_seqlens, total)
        lse = from_grid(lse.transpose(1, 2), cu_seqlens, total).t().contiguous()
    return out.to(dtype), lse, probs.to(dtype)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    bias: Tensor | None = None,
    relative: RelativeScores | None = None,
    gate: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    offset: int = 0,
    return_lse: bool = False,
    return_probs: bool = False,
    places: Places | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """gate * dropout(softmax(softmax_scale * q kᵀ + bias)) v, per head and per sequence.

    Args:
        q, k, v: one dtype (float32, bfloat16, float16 or float64). Packed: (total, nheads, headdim). Padded:
            (batch, seqlen, nheads, headdim); every position is a token. k and v may have fewer heads, a
            divisor kv_heads of nheads; head h of q reads their head h // (nheads // kv_heads). Views of one
            packed qkv tensor are read in place. Under autocast they are cast to its dtype, as
            scaled_dot_product_attention does (float64 is not).
        cu_seqlens: int32 (batch + 1,): 0, then the end of each sequence, not beyond `total`. None = padded
            layout. The values of a CPU tensor are checked, under torch.compile when the graph runs. On CUDA
            a check would cost a synchronisation, so the caller is responsible for them.
        max_seqlen: packed layout only: at least the longest length; S below. The padded layout's S is seqlen.
        softmax_scale: headdim ** -0.5 by default.
        causal: whether a query sees only keys up to its own position.
        window: (left, right): a query sees only keys from `left` positions before its own to `right` after
            it, both inclusive. -1 on a side is no limit. `causal` makes `right` 0. None = no limits.
        bias: added to the scores: (nheads, S, S) or (batch, nheads, S, S), any float dtype, -inf allowed.
            Dimensions of size 1 broadcast. Differentiable. Cells past a sequence's length are not read.
        relative: scores of the distance from query to key, added to the scores. Differentiable.
        gate: (nheads,), any float dtype: a factor per head's output (a soft head mask). Differentiable.
        dropout_p: probability of dropping a probability, in [0, 1), exact to 2**-17.
        seed: int64 tensor of one element on `q`'s device; needed where dropout_p > 0.
        offset: the call site, in [0, 2**32): two sites with one seed need two offsets.
        return_lse: also return lse, which carries no gradient.
        return_probs: also return the probabilities P, before dropout and gate, in q's dtype. Where a
            gradient is needed they are differentiable; the dense plain-PyTorch reference then computes them.
        places: the result of `attention_places` for this very cu_seqlens, shared by all calls over one batch;
            or None. Packed layout only.

    Returns:
        out, in the shape of `q`; with lse or probs asked for, a tuple, in the order (out, lse, probs).
        lse: natural log, float32 (float64 for float64), (nheads, total), padded (batch, nheads, seqlen).
        probs: (batch, nheads, S, S), 0 outside each sequence.
        Rows from cu_seqlens[-1] on: out and lse 0. A query without an allowed key: out 0, lse -inf, probs 0.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.

    Source: Vaswani et al. 2017, "Attention Is All You Need"; Dao et al. 2022, "FlashAttention".
    """
    if k is None or v is None or not checks.are_ordinary(q, k, v):
        checks.float_tensor("q", q)
        checks.float_tensor("k", k, q)
        checks.float_tensor("v", v, q)
        cast = checks.autocast_dtype(q)
        if cast is not None:
            q, k, v = (t if t.dtype == torch.float64 else t.to(cast) for t in (q, k, v))
    check_qkv(q, k, v, cu_seqlens)
    nheads, headdim = q.shape[-2:]
    padded, rows = q.dim() == 4, q.shape[:-2]
    if padded:
        if max_seqlen is not None:
            raise ValueError(f"max_seqlen: expected None with the padded layout (4-D q), got {max_seqlen!r}")
        batch, max_seqlen = q.shape[:2]
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * max_seqlen
        q, k, v = (t.reshape(batch * max_seqlen, *t.shape[2:]) for t in (q, k, v))
    else:
        cu_seqlens, max_seqlen = check_lengths(cu_seqlens, max_seqlen, q)
        batch = cu_seqlens.shape[0] - 1
    table = None if places is None else checked_table(places, None if padded else cu_seqlens, max_seqlen, q)
    softmax_scale = checked_scale(softmax_scale, headdim)
    seen = checked_window(causal, window, None if torch.compiler.is_compiling() else max_seqlen)
    bias = None if bias is None else check_bias(bias, batch, nheads, max_seqlen, q)
    if relative is not None:
        relative = checked_relative(relative, rows, batch, max_seqlen, q)
    if gate is not None:
        checks.float_tensor("gate", gate, q)
        checks.shape("gate", gate, (nheads,))
        gate = gate.contiguous()
    seed = checks.dropout(dropout_p, seed, offset, q)
    dropout_p = float(dropout_p)

    # BLAS needs rows of heads that are contiguous and do not overlap
    q, k, v = (
        t if (headdim == 1 or t.stride(-1) == 1) and t.stride(0) >= headdim else t.contiguous()
        for t in (q, k, v)
    )
    scores = () if relative is None else relative
    differentiable = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (q, k, v, bias, gate, *scores)
    )
    if relative is not None:
        op, reads = "attention relative training" if differentiable else "attention relative", None
        if not (torch.compiler.is_compiling() or (differentiable and return_probs)):
            reads = dispatch.serving_function("reads_relative", (op,), q.device, q.dtype)
        if reads is None or not reads(relative, headdim, differentiable):
            found = dense_scores(relative, cu_seqlens, max_seqlen, q)
            bias, relative, scores = found if bias is None else bias + found, None, ()
    save_bits = differentiable and dropout_p > 0 and q.dtype in SAVED_ON.get(q.device.type, ())
    inputs = AttentionInputs(
        q, k, v, cu_seqlens, max_seqlen, softmax_scale, seen, bias, gate, dropout_p, seed, offset
    )
    if return_probs and differentiable:
        keep = (
            None if seed is None else keep_mask(seed, offset, cu_seqlens[:-1], nheads, max_seqlen, dropout_p)
        )
        with torch.autocast(q.device.type, enabled=False):
            out, lse, probs = attention_ref(*inputs[:6], False, bias, gate, dropout_p, keep, seen)
    elif torch.compiler.is_compiling():
        out, lse, probs, _ = attention_fwd(*inputs, return_probs, save_bits, table, differentiable)
        lse, probs = lse.detach(), probs.detach()
    elif differentiable:
        out, lse, probs, _ = AttentionFunction.apply(*inputs, return_probs, save_bits, table, *scores)
    else:
        function, more = ("attention_fwd", ()) if relative is None else (RELATIVE, (relative,))
        out, lse, probs, _ = dispatch.call(function, q, inputs, return_probs, save_bits, table, *more)

    if padded:
        out = out.reshape(batch, max_seqlen, nheads, headdim)
        lse = lse.reshape(nheads, batch, max_seqlen).transpose(0, 1) if return_lse else lse
    if not (return_lse or return_probs):
        return out
    return (out, *((lse,) if return_lse else ()), *((probs,) if return_probs else ()))
