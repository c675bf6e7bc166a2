"""`attention` by the `aten` backend; contract in fastbert/ops/attention.py.

CPU: the packed rows are read in place, with one call per run of neighbouring sequences of one length and
without padding. Forward without dropout and probs goes to the fused CPU kernel behind PyTorch's
scaled_dot_product_attention, whose operator also returns lse. Everything else goes to explicit products, a
few heads at a time. Other devices: explicit products on a dense (batch, S) grid, built without a host
synchronisation.

Half precision is computed in float32 and rounded once. The fused kernel's own backward is not used: it takes
P from lse and delta from the rounded `out`, so where a query sees one key, dq and dk are that rounding error
instead of 0. Its forward returns 0 for a row with a NaN or infinite score; such rows are computed again by
explicit products.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastbert.ops.attention import AttentionInputs
from fastbert.ops.attention_grid import (
    bits_shape,
    from_grid,
    grid_mask,
    keep_mask,
    of_shared_heads,
    outside_window,
    pack_bits,
    to_grid,
    unpack_bits,
    with_all_heads,
)
from fastbert.ops.attention_inputs import CAUSAL, EVERYWHERE, AttentionNeeds
from fastbert.ops.checks import FLOATS, TensorOrNone, compute_dtype
from fastbert.runtime.table import HALF

DTYPES = FLOATS

# A private operator of PyTorch >= 2.3; where it is gone, the explicit products serve.
_flash = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)

# Rows cast to float32 at a time for the fused kernel, so that they stay in the cache.
_MAX_CAST_ROWS = 1024
# Elements of a matrix of scores for explicit products on a CPU: 4 MiB.
_MAX_SCORES = 1 << 20
# The same on the dense grid of other devices.
_MAX_GRID_SCORES = 1 << 26


def attention_fwd(
    inputs: AttentionInputs, return_probs: bool, save_bits: bool, places: Tensor | None = None
) -> tuple[Tensor, ...]:
    if inputs.q.device.type != "cpu":
        return _grid_fwd(inputs, return_probs, save_bits)
    q, k, v, cu_seqlens, max_seqlen, softmax_scale, window, bias, gate, dropout_p, seed, offset = (
        with_all_heads(inputs)
    )
    total, nheads, _ = q.shape
    compute = compute_dtype(q)
    out = q.new_empty(q.shape)
    lse = q.new_empty((nheads, total), dtype=compute)
    batch = cu_seqlens.shape[0] - 1
    probs = q.new_zeros((batch, nheads, max_seqlen, max_seqlen) if return_probs else (0,))
    keep_bits = q.new_zeros(bits_shape(nheads, total, max_seqlen, save_bits), dtype=torch.int32)
    ends = cu_seqlens.tolist()
    flash = None if dropout_p > 0 or return_probs else _flash
    fused = flash is not None
    for sequences, rows, length, heads in _runs(ends, nheads, q.dtype, fused):
        qs, ks, vs = (_run(t, rows, length, heads).to(compute) for t in (q, k, v))
        mask = _mask(bias, sequences, length, heads, window, qs, fused)
        if flash is not None:
            alone = mask is None and window == CAUSAL
            o, run_lse = flash(qs, ks, vs, 0.0, alone, attn_mask=mask, scale=softmax_scale)
            if bias is not None and mask is not None:  # the kernel returns 0 for a wholly masked row
                run_lse = run_lse.masked_fill(mask.isneginf().all(-1), -math.inf)
        else:
            keep = _keep(cu_seqlens[sequences], length, heads, dropout_p, seed, offset)
            blocked = outside_window(length, window, q.device)
            o, run_lse, p = _explicit_fwd(qs, ks, vs, mask, blocked, softmax_scale, keep, dropout_p)
            if return_probs:
                probs[sequences, heads, :length, :length] = p
            if save_bits:
                words = pack_bits(keep)
                _bits_of(keep_bits, rows, length, heads)[..., : words.shape[-1]] = words
        if gate is not None:
            o = o * gate[heads].to(compute).reshape(-1, 1, 1)
        _run(out, rows, length, heads).copy_(o)
        _run(lse.t(), rows, length, heads).copy_(run_lse)
    if fused and not _finite_scores(q[: ends[-1]], k[: ends[-1]], bias, softmax_scale, compute):
        _repair(out, lse, q, k, v, ends, softmax_scale, window, bias, gate)
    if ends[-1] < total:
        out[ends[-1] :], lse[:, ends[-1] :] = 0, 0
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
    if inputs.q.device.type != "cpu":
        return _grid_bwd(dout, inputs, out, lse, keep_bits, need)
    given = with_all_heads(inputs)
    q, k, v, cu_seqlens, _, softmax_scale, window, bias, gate, dropout_p, seed, offset = given
    (total, nheads, _), compute = q.shape, lse.dtype
    grads = dq, dk, dv = [q.new_empty(q.shape if needed else (0,)) for needed in need[:3]]
    dbias = lse.new_zeros(bias.shape if need.dbias else (0,))
    dgate = lse.new_zeros(gate.shape if need.dgate else (0,))
    ends = cu_seqlens.tolist()
    for sequences, rows, length, heads in _runs(ends, nheads, q.dtype, False):
        do, qs, ks, vs = (_run(t, rows, length, heads).to(compute) for t in (dout, q, k, v))
        mask = _mask(bias, sequences, length, heads, window, qs, False)
        blocked = outside_window(length, window, q.device)
        if keep_bits is None:
            keep = _keep(cu_seqlens[sequences], length, heads, dropout_p, seed, offset)
        else:
            keep = unpack_bits(_bits_of(keep_bits, rows, length, heads), length)
        empty = _run(lse.t(), rows, length, heads).isneginf()
        empty = empty if empty.any() else None
        factor = None if gate is None else gate[heads]
        *parts, ds, head = _explicit_bwd(
            do, qs, ks, vs, empty, mask, blocked, softmax_scale, factor, keep, dropout_p, need
        )
        if need.dgate:
            dgate[heads] += head
        if need.dbias:
            part = _cut(dbias, sequences, length, heads)
            part += ds.sum_to_size(part.shape)
        for grad, part in zip(grads, parts, strict=True):
            if part is not None:
                _run(grad, rows, length, heads).copy_(part)
    if ends[-1] < total:
        for grad in grads:
            grad[ends[-1] :] = 0
    return dq, *(of_shared_heads(grad, inputs.k) for grad in (dk, dv)), dbias, dgate


def _finite_scores(q, k, bias, softmax_scale, compute):
    """Whether no score can be NaN or infinite, except where bias masks it; False proves nothing."""
    if q.numel() == 0:
        return True
    most = torch.linalg.vector_norm(q, math.inf, dtype=compute) * abs(softmax_scale)
    most = most * torch.linalg.vector_norm(k, math.inf, dtype=compute) * q.shape[-1]
    if bias is not None and bias.numel() > 0:
        most = most + bias.to(compute).amax().clamp_min(0)  # its least may be -inf
    return bool(most.isfinite())


def _repair(out, lse, q, k, v, ends, softmax_scale, window, bias, gate):
    """Replace the rows of out and lse on which the fused kernel and explicit products do not agree.

    All other rows keep their bits.
    """
    for sequences, rows, length, heads in _runs(ends, q.shape[1], q.dtype, False):
        qs, ks, vs = (_run(t, rows, length, heads).to(lse.dtype) for t in (q, k, v))
        mask = _mask(bias, sequences, length, heads, window, qs, False)
        blocked = outside_window(length, window, q.device)
        o, run_lse, _ = _explicit_fwd(qs, ks, vs, mask, blocked, softmax_scale, None, 0.0)
        if gate is not None:
            o = o * gate[heads].to(o.dtype).reshape(-1, 1, 1)
        fused_out, fused_lse = _run(out, rows, length, heads), _run(lse.t(), rows, length, heads)
        agree = (fused_lse - run_lse).abs() <= 1e-3 * (1 + run_lse.abs())
        agree &= run_lse.isfinite()
        fused_out.copy_(torch.where(agree.unsqueeze(-1), fused_out, o.to(out.dtype)))
        fused_lse.copy_(torch.where(agree, fused_lse, run_lse))


def _runs(ends, nheads, dtype, fused):
    """(sequences, rows, length, heads), three of them slices, of neighbouring sequences of one length >= 1.

    Runs are cut where the fused kernel's float32 copies, or the explicit scores, would leave the cache.
    """
    first = 0
    while first < len(ends) - 1:
        start, length = ends[first], ends[first + 1] - ends[first]
        last = first + 1
        if length == 0:
            first = last
            continue
        most, step = len(ends), nheads
        if not fused:
            most = _MAX_SCORES // (nheads * length * length)
            step = min(nheads, max(1, _MAX_SCORES // (length * length)))
        elif dtype in HALF:
            most = _MAX_CAST_ROWS // length
        while last < len(ends) - 1 and last - first < most and ends[last + 1] - ends[last] == length:
            last += 1
        for head in range(0, nheads, step):
            heads = slice(head, min(head + step, nheads))
            yield slice(first, last), slice(start, ends[last]), length, heads
        first = last


def _run(t, rows, length, heads):
    """The view (count, nheads, length, ...) of a run of packed (total, nheads, ...)."""
    return t[rows, heads].view(-1, length, heads.stop - heads.start, *t.shape[2:]).transpose(1, 2)


def _cut(bias, sequences, length, heads):
    """The view of a 4-D bias that a run sees; dimensions of size 1 stay."""
    if bias.shape[0] > 1:
        bias = bias[sequences]
    if bias.shape[1] > 1:
        bias = bias[:, heads]
    return bias[:, :, :length, :length]


def _mask(bias, sequences, length, heads, window, like, fused) -> TensorOrNone:
    """What is added to a run's scores, 4-D or None.

    The fused kernel takes a bias with the window in it. Without a bias it applies a causal mask itself.
    """
    if bias is None and (not fused or window in (EVERYWHERE, CAUSAL)):
        return None
    mask = like.new_zeros(1, 1, 1, 1) if bias is None else _cut(bias, sequences, length, heads).to(like.dtype)
    if not fused:
        return mask
    outside = outside_window(length, window, like.device)
    if outside is not None:
        mask = mask.masked_fill(outside, -math.inf)
    elif mask.stride(-1) not in (0, 1):  # the fused kernel reads no other
        mask = mask.contiguous()
    return mask.expand(*mask.shape[:2], length, length)


def _keep(first_rows, seqlen, heads, dropout_p, seed, offset) -> TensorOrNone:
    if dropout_p == 0:
        return None
    return keep_mask(seed, offset, first_rows, heads.stop - heads.start, seqlen, dropout_p, heads.start)


def _bits_of(keep_bits, rows, length, heads):
    """The view (count, nheads, length, words) of a run of the saved bits."""
    return keep_bits[heads, rows].unflatten(1, (-1, length)).transpose(0, 1)


def _scores(q, k, mask, blocked, softmax_scale):
    """(batch, nheads, S, S), -inf where `blocked` is True."""
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(softmax_scale)
    if mask is not None:
        scores += mask
    return scores if blocked is None else scores.masked_fill_(blocked, -math.inf)


def _explicit_fwd(q, k, v, mask, blocked, softmax_scale, keep, dropout_p):
    """(out, lse, probs), (batch, nheads, S, …) in the compute dtype; a wholly masked row has 0, -inf, 0."""
    scores = _scores(q, k, mask, blocked, softmax_scale)
    top = scores.amax(-1, keepdim=True)
    top.masked_fill_(top.isneginf(), 0.0)
    probs = scores.sub_(top).exp_()
    norm = probs.sum(-1, keepdim=True)
    lse = (top + norm.log()).squeeze(-1)
    probs.div_(norm.masked_fill_(norm == 0, 1.0))
    dropped = probs if keep is None else probs * keep * (1.0 / (1.0 - dropout_p))
    return torch.matmul(dropped, v), lse, probs


def _explicit_bwd(
    dout, q, k, v, empty, mask, blocked, softmax_scale, gate, keep, dropout_p, need
) -> tuple[TensorOrNone, ...]:
    """(dq, dk, dv, dS, dgate), None where not needed.

    `empty` marks the rows that are wholly masked; None means that no row is.
    """
    scores = _scores(q, k, mask, blocked, softmax_scale)
    probs = torch.softmax(scores, -1)
    if empty is not None:
        probs.masked_fill_(empty.unsqueeze(-1), 0.0)
    dropped = probs if keep is None else probs * keep * (1.0 / (1.0 - dropout_p))
    dgate = (dout * torch.matmul(dropped, v)).sum((0, 2, 3)) if need.dgate else None
    if gate is not None:
        dout = dout * gate.to(dout.dtype).reshape(-1, 1, 1)
    dv = torch.matmul(dropped.transpose(-1, -2), dout) if need.dv else None
    dprobs = torch.matmul(dout, v.transpose(-1, -2))
    if keep is not None:
        dprobs.mul_(keep).mul_(1.0 / (1.0 - dropout_p))
    ds = torch.ops.aten._softmax_backward_data(dprobs, probs, -1, probs.dtype)  # probs * (dprobs - delta)
    dq = torch.matmul(ds, k).mul_(softmax_scale) if need.dq else None
    dk = torch.matmul(ds.transpose(-1, -2), q).mul_(softmax_scale) if need.dk else None
    return dq, dk, dv, ds, dgate


# --- the dense grid: devices where reading cu_seqlens on the host would synchronise -------------------------


def _grid_fwd(inputs: AttentionInputs, return_probs, save_bits, places=None):
    q, k, v, cu_seqlens, max_seqlen, softmax_scale, window, bias, gate, dropout_p, seed, offset = (
        with_all_heads(inputs)
    )
    total, nheads, headdim = q.shape
    compute = compute_dtype(q)
    batch = cu_seqlens.shape[0] - 1
    outs = [q.new_zeros((0, max_seqlen, nheads, headdim), dtype=compute)]
    lses = [q.new_zeros((0, nheads, max_seqlen), dtype=compute)]
    words = [q.new_zeros((0, nheads, max_seqlen, -(-max_seqlen // 32)), dtype=torch.int32)]
    probs = q.new_zeros((batch, nheads, max_seqlen, max_seqlen) if return_probs else (0,))
    for chunk in _chunks(batch, nheads, max_seqlen):
        ends = cu_seqlens[chunk.start : chunk.stop + 1]
        qs, ks, vs = (to_grid(t, ends, max_seqlen).to(compute).transpose(1, 2) for t in (q, k, v))
        mask, blocked = _grid_masks(ends, max_seqlen, window, bias, chunk, compute)
        keep = _keep(ends[:-1], max_seqlen, slice(0, nheads), dropout_p, seed, offset)
        o, run_lse, p = _explicit_fwd(qs, ks, vs, mask, blocked, softmax_scale, keep, dropout_p)
        if return_probs:
            probs[chunk] = p.to(q.dtype)
        if save_bits:
            words.append(pack_bits(keep))
        outs.append(o.transpose(1, 2))
        lses.append(run_lse)
    out, lse = torch.cat(outs), torch.cat(lses).transpose(1, 2)
    if gate is not None:
        out = out * gate.to(compute).unsqueeze(-1)
    lse = from_grid(lse, cu_seqlens, total).t().contiguous()
    keep_bits = q.new_zeros(0, dtype=torch.int32)
    if save_bits:
        keep_bits = (
            from_grid(torch.cat(words).transpose(1, 2), cu_seqlens, total).transpose(0, 1).contiguous()
        )
    return from_grid(out, cu_seqlens, total).to(q.dtype), lse, probs, keep_bits


def _grid_bwd(dout, inputs: AttentionInputs, out, lse, keep_bits, need: AttentionNeeds, places=None):
    q, k, v, cu_seqlens, max_seqlen, softmax_scale, window, bias, gate, dropout_p, seed, offset = (
        with_all_heads(inputs)
    )
    total, nheads, headdim = q.shape
    compute = lse.dtype
    batch = cu_seqlens.shape[0] - 1
    none = q.new_zeros((0, max_seqlen, nheads, headdim), dtype=compute)
    grads = [[none] if needed else [] for needed in need[:3]]
    dbias = lse.new_zeros(bias.shape if need.dbias else (0,))
    dgate = lse.new_zeros(gate.shape if need.dgate else (0,))
    for chunk in _chunks(batch, nheads, max_seqlen):
        ends = cu_seqlens[chunk.start : chunk.stop + 1]
        do, qs, ks, vs = (to_grid(t, ends, max_seqlen).to(compute).transpose(1, 2) for t in (dout, q, k, v))
        mask, blocked = _grid_masks(ends, max_seqlen, window, bias, chunk, compute)
        if keep_bits is None:
            keep = _keep(ends[:-1], max_seqlen, slice(0, nheads), dropout_p, seed, offset)
        else:
            words = to_grid(keep_bits.transpose(0, 1), ends, max_seqlen).transpose(1, 2)
            keep = unpack_bits(words, max_seqlen)
        empty = to_grid(lse.t(), ends, max_seqlen).transpose(1, 2).isneginf() | blocked.all(-1)
        *parts, ds, head = _explicit_bwd(
            do, qs, ks, vs, empty, mask, blocked, softmax_scale, gate, keep, dropout_p, need
        )
        if need.dgate:
            dgate += head
        if need.dbias:
            part = dbias[chunk] if dbias.shape[0] > 1 else dbias
            part += ds.sum_to_size(part.shape)
        for grad, part in zip(grads, parts, strict=True):
            if part is not None:
                grad.append(part.transpose(1, 2))
    dq, dk, dv = (
        from_grid(torch.cat(grad), cu_seqlens, total).to(q.dtype) if grad else q.new_empty(0)
        for grad in grads
    )
    return dq, *(of_shared_heads(grad, inputs.k) for grad in (dk, dv)), dbias, dgate


def _chunks(batch, nheads, max_seqlen):
    """Slices of the batch whose scores stay within the budget; none where there is nothing to compute."""
    if max_seqlen == 0:
        return []
    step = max(1, _MAX_GRID_SCORES // (nheads * max_seqlen * max_seqlen))
    return [slice(b, min(b + step, batch)) for b in range(0, batch, step)]


def _grid_masks(ends, max_seqlen, window, bias, chunk, compute):
    """(what is added to the dense scores or None, which of them are blocked)."""
    blocked = ~grid_mask(ends, ends.shape[0] - 1, max_seqlen, window, ends.device)
    if bias is None:
        return None, blocked
    return (bias[chunk] if bias.shape[0] > 1 else bias).to(compute), blocked
