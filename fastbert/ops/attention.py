r"""Multi-head self-attention over packed sequences of any lengths, with additive bias, head gate and dropout.

Forward, for each sequence and head, in float32 (float64 for float64 input):

    S = softmax_scale * q kᵀ + bias            causal: key j is seen by query i only where j <= i
    P = softmax(S) by row,  lse = log Σ_j exp S_ij,  D = dropout(P)
    out = gate * D v

Backward, with dO = gate * dout and delta = rowsum(dout ∘ out) (= rowsum(P ∘ dP)):

    dv = Dᵀ dO,  dP = dropout'(dO vᵀ),  dS = P ∘ (dP - delta)
    dq = softmax_scale * dS k,  dk = softmax_scale * dSᵀ q
    dbias = Σ dS over the broadcast dimensions,  dgate = Σ_rows rowsum(dout ∘ (D v))

P is recomputed from lse. Nothing of size seqlen² is saved except dropout's bits, one per probability, and
those only where `fastbert.ops.dropout.SAVED_ON` says so; elsewhere they are drawn again from the seed.

Packed layout: q, k, v (total, nheads, headdim), sequence b in rows cu_seqlens[b] to cu_seqlens[b + 1]. They
may be strided views of one (total, 3, nheads, headdim) tensor: only the last dimension must be contiguous
(a tensor where it is not, or with expanded rows, is copied). Padded layout: (batch, seqlen, nheads, headdim);
backends receive it as packed with uniform cu_seqlens. Rows at and past cu_seqlens[-1] (capacity) are never
read; their out, lse and gradients are 0. A query without an allowed key has out 0, lse -inf, probs 0 and
gradients 0. Zero-length sequences are legal.

Dropout bits: `fastbert.ops.dropout`, plane = head, row = row of the query in the packed layout, column =
position of the key within its sequence. Neither max_seqlen nor the layout changes them. Saved, they are int32
(nheads, total, ceil(max_seqlen / 32)): bit i of word w of a row is that of key 32 w + i; those outside a
sequence, and of pairs that `causal` forbids, are unspecified.

Source: Vaswani et al. 2017, "Attention Is All You Need", eq. 1; backward as in Dao et al. 2022,
"FlashAttention", sec. 3.1; gate: Michel, Levy, Neubig 2019, "Are Sixteen Heads Really Better than One?",
eq. 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastbert.ops import checks
from fastbert.ops.dropout import SAVED_ON, philox_blocks, threshold
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
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, probs) in plain PyTorch, differentiable in q, k, v, bias and gate through out and probs.

    Computes in float64 for float64 `q`, else in float32, on a dense (batch, nheads, S, S) grid; no host
    synchronisation. `keep_mask` (batch, nheads, S, S), bool, says which probabilities dropout keeps; None
    keeps all. `probs` are those before dropout, in q's dtype. `lse` carries no gradient.
    """
    compute = checks.compute_dtype(q)
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    dense_q, dense_k, dense_v = (
        (t if cu_seqlens is None else to_grid(t, cu_seqlens, max_seqlen)).to(compute).transpose(1, 2)
        for t in (q, k, v)
    )  # (batch, nheads, S, headdim)
    seqlen = dense_q.shape[2]
    scores = dense_q @ dense_k.transpose(-1, -2) * softmax_scale
    if bias is not None:
        scores = scores + bias.to(compute)
    allowed = grid_mask(cu_seqlens, dense_q.shape[0], seqlen, causal, q.device)
    scores = scores.masked_fill(~allowed, -math.inf)
    top = scores.detach().amax(-1, keepdim=True) if seqlen > 0 else scores.new_zeros((*scores.shape[:3], 1))
    top = top.masked_fill(top.isneginf(), 0.0)  # no allowed key: exp(-inf - 0) = 0 rather than NaN
    weights = (scores - top).exp()
    norm = weights.sum(-1, keepdim=True)
    probs = weights / norm.masked_fill(norm == 0, 1.0)
    lse = (top + norm.log()).squeeze(-1).detach()
    dropped = probs if keep_mask is None else probs * keep_mask / (1.0 - dropout_p)
    out = (dropped @ dense_v).transpose(1, 2)  # (batch, S, nheads, headdim)
    if gate is not None:
        out = out * gate.to(compute).unsqueeze(-1)
    if cu_seqlens is not None:
        out = from_grid(out, cu_seqlens, q.shape[0])
        lse = from_grid(lse.transpose(1, 2), cu_seqlens, q.shape[0]).t().contiguous()
    return out.to(q.dtype), lse, probs.to(q.dtype)


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
    cu_seqlens: Tensor | None, batch: int, seqlen: int, causal: bool, device: torch.device
) -> Tensor:
    """Which (query, key) pairs of a dense grid are real and allowed: bool (batch or 1, 1, seqlen, seqlen)."""
    position = torch.arange(seqlen, device=device)
    if cu_seqlens is None:
        allowed = torch.ones((1, 1, seqlen, seqlen), dtype=torch.bool, device=device)
    else:
        real = position < cu_seqlens.diff().unsqueeze(1)  # (batch, seqlen)
        allowed = (real.unsqueeze(2) & real.unsqueeze(1)).unsqueeze(1)
    if causal:
        allowed = allowed & (position <= position.unsqueeze(1))
    return allowed


def keep_mask(
    seed: Tensor,
    offset: int,
    first_rows: Tensor,
    nheads: int,
    seqlen: int,
    dropout_p: float,
    first_head: int = 0,
) -> Tensor:
    """Dropout bits (len(first_rows), nheads, seqlen, seqlen) of sequences that begin at packed rows
    `first_rows`, for `nheads` heads from `first_head` on.
    """
    device = seed.device
    position = torch.arange(seqlen, device=device)
    words = philox_blocks(
        seed,
        offset,
        torch.arange(first_head, first_head + nheads, device=device).reshape(1, nheads, 1, 1),
        first_rows.long().reshape(-1, 1, 1, 1) + position.reshape(1, 1, seqlen, 1),
        torch.arange((seqlen + 3) // 4, device=device),
    )
    return torch.stack([word >= threshold(dropout_p) for word in words], dim=-1).flatten(-2)[..., :seqlen]


def bits_shape(nheads: int, total: int, max_seqlen: int, save_bits: bool) -> tuple[int, ...]:
    """Of the saved dropout bits; (0,) where none are saved."""
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


# --- custom ops: what torch.compile sees --------------------------------------------------------------------


def _check_operands(q, k, v, cu_seqlens, max_seqlen, bias, gate, dropout_p, seed, offset):
    """What `torch.ops` takes from anybody, and the values of the lengths, which tracing does not see."""
    _check_qkv(q, k, v, cu_seqlens)
    for name, t in (("q", q), ("k", k), ("v", v)):
        checks.operand(name, t, q.shape, checks.FLOATS, q, strided=True)
    check_lengths(cu_seqlens, max_seqlen, q)
    check_bias(bias, cu_seqlens.shape[0] - 1, q.shape[1], max_seqlen, q)
    if bias is not None and bias.dim() != 4:
        raise ValueError(f"bias: expected four dimensions, got {tuple(bias.shape)}")
    if gate is not None:
        checks.float_tensor("gate", gate, q)
        checks.shape("gate", gate, (q.shape[1],))
    checks.dropout(dropout_p, seed, offset, q)


@torch.library.custom_op("fastbert::attention_fwd", mutates_args=())
def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float,
    causal: bool,
    bias: Tensor | None,
    gate: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
    offset: int,
    return_probs: bool,
    save_bits: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, probs, keep_bits): out contiguous like `q`; lse (nheads, total) in float32 (float64 for
    float64); probs (batch, nheads, max_seqlen, max_seqlen) in q's dtype, before dropout, and keep_bits, as
    the module says, each empty (0,) where not asked for. `bias` is 4-D with broadcast dimensions of size 1.
    `save_bits` is asked for only with dropout.
    """
    _check_operands(q, k, v, cu_seqlens, max_seqlen, bias, gate, dropout_p, seed, offset)
    return dispatch.call(
        "attention_fwd",
        q,
        q, k, v, cu_seqlens, max_seqlen, softmax_scale, causal, bias, gate, dropout_p, seed, offset,
        return_probs, save_bits,
    )  # fmt: skip


@attention_fwd.register_fake
def _(
    q, k, v, cu_seqlens, max_seqlen, softmax_scale, causal, bias, gate, dropout_p, seed, offset,
    return_probs, save_bits,
):  # fmt: skip
    total, nheads, _ = q.shape
    batch = cu_seqlens.shape[0] - 1
    return (
        q.new_empty(q.shape),
        q.new_empty((nheads, total), dtype=checks.compute_dtype(q)),
        q.new_empty((batch, nheads, max_seqlen, max_seqlen) if return_probs else (0,)),
        q.new_empty(bits_shape(nheads, total, max_seqlen, save_bits), dtype=torch.int32),
    )


@torch.library.custom_op("fastbert::attention_bwd", mutates_args=())
def attention_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float,
    causal: bool,
    bias: Tensor | None,
    gate: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
    offset: int,
    keep_bits: Tensor | None,
    need_dq: bool,
    need_dk: bool,
    need_dv: bool,
    need_dbias: bool,
    need_dgate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dbias, dgate): the first three contiguous in q's dtype; dbias in bias' shape and dgate
    (nheads,) in float32 (float64 for float64); each empty (0,) where not needed. `dout` is contiguous.
    `keep_bits`: forward's; None where it saved none, and they are to be drawn again.
    """
    _check_operands(q, k, v, cu_seqlens, max_seqlen, bias, gate, dropout_p, seed, offset)
    total, nheads, _ = q.shape
    for name, t in (("dout", dout), ("out", out)):
        checks.operand(name, t, q.shape, (q.dtype,), q)
    checks.operand("lse", lse, (nheads, total), (checks.compute_dtype(q),), q)
    bits = bits_shape(nheads, total, max_seqlen, True)
    checks.operand("keep_bits", keep_bits, bits, (torch.int32,), q)
    for name, t, needed in (("bias", bias, need_dbias), ("gate", gate, need_dgate)):
        if needed and t is None:
            raise ValueError(f"{name}: expected a torch.Tensor, whose gradient is asked for, got None")
    return dispatch.call(
        "attention_bwd",
        q,
        dout, q, k, v, out, lse, cu_seqlens, max_seqlen, softmax_scale, causal, bias, gate, dropout_p, seed,
        offset, keep_bits, need_dq, need_dk, need_dv, need_dbias, need_dgate,
    )  # fmt: skip


@attention_bwd.register_fake
def _(
    dout, q, k, v, out, lse, cu_seqlens, max_seqlen, softmax_scale, causal, bias, gate, dropout_p, seed,
    offset, keep_bits, need_dq, need_dk, need_dv, need_dbias, need_dgate,
):  # fmt: skip
    return (
        *(q.new_empty(q.shape if needed else (0,)) for needed in (need_dq, need_dk, need_dv)),
        lse.new_empty(bias.shape if need_dbias else (0,)),
        lse.new_empty(gate.shape if need_dgate else (0,)),
    )


# --- autograd: one setup and one backward for eager and for the compiled op ---------------------------------


def _setup_context(ctx, inputs, output):
    q, k, v, cu_seqlens, max_seqlen, softmax_scale, causal, bias, gate = inputs[:9]
    dropout_p, seed, offset, _return_probs, save_bits = inputs[9:]
    out, lse, _probs, keep_bits = output
    keep_bits = keep_bits if save_bits else None
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens, bias, gate, seed, keep_bits)
    ctx.set_materialize_grads(False)
    ctx.max_seqlen, ctx.softmax_scale, ctx.causal = max_seqlen, softmax_scale, causal
    ctx.dropout_p, ctx.offset = dropout_p, offset


def _backward(launch, ctx, dout):
    if dout is None:
        return (None,) * 14
    q, k, v, out, lse, cu_seqlens, bias, gate, seed, keep_bits = ctx.saved_tensors
    need = ctx.needs_input_grad
    dq, dk, dv, dbias, dgate = launch(
        dout.contiguous(), q, k, v, out, lse, cu_seqlens, ctx.max_seqlen, ctx.softmax_scale, ctx.causal,
        bias, gate, ctx.dropout_p, seed, ctx.offset, keep_bits, *need[:3], need[7], need[8],
    )  # fmt: skip
    return (
        dq if need[0] else None,
        dk if need[1] else None,
        dv if need[2] else None,
        None, None, None, None,
        dbias.to(bias.dtype) if need[7] else None,
        dgate.to(gate.dtype) if need[8] else None,
        None, None, None, None, None,
    )  # fmt: skip


class AttentionFunction(torch.autograd.Function):
    """Eager autograd around the backend's launchers, without the cost of a custom op's dispatch."""

    @staticmethod
    def forward(ctx, *inputs):
        # a separate setup_context would cost an inspect.signature at every call
        output = dispatch.call("attention_fwd", inputs[0], *inputs)
        ctx.mark_non_differentiable(*output[1:])
        _setup_context(ctx, inputs, output)
        return output

    @staticmethod
    @checks.once_differentiable
    def backward(ctx, dout, *_):
        return _backward(lambda *args: dispatch.call("attention_bwd", args[1], *args), ctx, dout)


attention_fwd.register_autograd(
    lambda ctx, dout, *_: _backward(attention_bwd, ctx, dout), setup_context=_setup_context
)


# --- public function ----------------------------------------------------------------------------------------


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    offset: int = 0,
    return_lse: bool = False,
    return_probs: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """gate * dropout(softmax(softmax_scale * q kᵀ + bias)) v, per head and per sequence.

    Args:
        q, k, v: one shape and one dtype (float32, bfloat16, float16 or float64). Packed: (total, nheads,
            headdim). Padded: (batch, seqlen, nheads, headdim), every position a token. Views of one packed
            qkv tensor are read in place. Under autocast they are cast to its dtype, as
            scaled_dot_product_attention does (float64 is not).
        cu_seqlens: int32 (batch + 1,): 0, then where each sequence ends, not beyond `total`. None = padded
            layout. The values of a CPU tensor are checked, under torch.compile when the graph runs. On CUDA
            a check would cost a synchronisation, so the caller is responsible for them.
        max_seqlen: packed layout only: at least the longest length; S below. The padded layout's S is seqlen.
        softmax_scale: headdim ** -0.5 by default.
        causal: whether a query sees only keys up to its own position.
        bias: added to the scores: (nheads, S, S) or (batch, nheads, S, S), any float dtype, -inf allowed.
            Dimensions of size 1 broadcast. Differentiable. Cells past a sequence's length are not read.
        gate: (nheads,), any float dtype: a factor per head's output (a soft head mask). Differentiable.
        dropout_p: probability of dropping a probability, in [0, 1).
        seed: int64 tensor of one element on `q`'s device; needed where dropout_p > 0.
        offset: the call site, in [0, 2**32): two sites with one seed need two offsets.
        return_lse: also return lse, which carries no gradient.
        return_probs: also return the probabilities P, before dropout and gate, in q's dtype. Where a
            gradient is needed they are differentiable; the dense plain-PyTorch reference then computes them.

    Returns:
        out, in the shape of `q`; with lse or probs asked for, a tuple, in the order (out, lse, probs).
        lse: natural log, float32 (float64 for float64), (nheads, total), padded (batch, nheads, seqlen).
        probs: (batch, nheads, S, S), 0 outside each sequence.
        Rows from cu_seqlens[-1] on: out and lse 0. A query without an allowed key: out 0, lse -inf, probs 0.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.

    Source: Vaswani et al. 2017, "Attention Is All You Need"; Dao et al. 2022, "FlashAttention".
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        checks.float_tensor(name, t, None if name == "q" else q)
    cast = checks.autocast_dtype(q)
    if cast is not None:
        q, k, v = (t if t.dtype == torch.float64 else t.to(cast) for t in (q, k, v))
    _check_qkv(q, k, v, cu_seqlens)
    nheads, headdim = q.shape[-2:]
    padded = q.dim() == 4
    if padded:
        if max_seqlen is not None:
            raise ValueError(f"max_seqlen: expected None with the padded layout (4-D q), got {max_seqlen!r}")
        batch, max_seqlen = q.shape[:2]
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * max_seqlen
        q, k, v = (t.reshape(batch * max_seqlen, nheads, headdim) for t in (q, k, v))
    else:
        check_lengths(cu_seqlens, max_seqlen, q)
        batch = cu_seqlens.shape[0] - 1
    softmax_scale = _scale(softmax_scale, headdim)
    if not isinstance(causal, bool):
        raise TypeError(f"causal: expected a bool, got {causal!r}")
    bias = check_bias(bias, batch, nheads, max_seqlen, q)
    if gate is not None:
        checks.float_tensor("gate", gate, q)
        checks.shape("gate", gate, (nheads,))
        gate = gate.contiguous()
    seed = checks.dropout(dropout_p, seed, offset, q)
    dropout_p = float(dropout_p)

    q, k, v = (_readable(t, headdim) for t in (q, k, v))
    differentiable = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (q, k, v, bias, gate)
    )
    save_bits = differentiable and dropout_p > 0 and q.dtype in SAVED_ON.get(q.device.type, ())
    args = (
        q, k, v, cu_seqlens, max_seqlen, softmax_scale, causal, bias, gate, dropout_p, seed, offset,
        return_probs, save_bits,
    )  # fmt: skip
    if return_probs and differentiable:
        keep = (
            None if seed is None else keep_mask(seed, offset, cu_seqlens[:-1], nheads, max_seqlen, dropout_p)
        )
        with torch.autocast(q.device.type, enabled=False):
            out, lse, probs = attention_ref(*args[:9], dropout_p, keep)
    elif torch.compiler.is_compiling():
        out, lse, probs, _ = attention_fwd(*args)
        lse, probs = lse.detach(), probs.detach()
    elif differentiable:
        out, lse, probs, _ = AttentionFunction.apply(*args)
    else:
        out, lse, probs, _ = dispatch.call("attention_fwd", q, *args)

    if padded:
        out = out.reshape(batch, max_seqlen, nheads, headdim)
        lse = lse.reshape(nheads, batch, max_seqlen).transpose(0, 1) if return_lse else lse
    if not (return_lse or return_probs):
        return out
    return (out, *((lse,) if return_lse else ()), *((probs,) if return_probs else ()))


def _readable(t: Tensor, headdim: int) -> Tensor:
    """`t` itself where its heads' rows are contiguous and do not overlap, as BLAS asks; else a copy."""
    readable = (t.stride(-1) == 1 or headdim == 1) and t.stride(0) >= headdim
    return t if readable else t.contiguous()


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> None:
    dims = 4 if cu_seqlens is None else 3
    if q.dim() != dims or q.shape[-1] == 0 or q.shape[-2] == 0:
        layout = (
            "(batch, seqlen, nheads, headdim) where cu_seqlens is None"
            if cu_seqlens is None
            else "(total, nheads, headdim) with cu_seqlens"
        )
        raise ValueError(f"q: expected shape {layout}, nheads and headdim >= 1, got {tuple(q.shape)}")
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise TypeError(f"{name}: expected q's dtype {q.dtype}, got {t.dtype}")
        checks.shape(name, t, q.shape)


def check_lengths(cu_seqlens: Tensor, max_seqlen: int | None, q: Tensor) -> None:
    """Of the packed layout, for the rows of `q`; the values too where they lie on the CPU."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens: expected an int32 torch.Tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"cu_seqlens: expected int32, got {cu_seqlens.dtype}")
    checks.same_device("cu_seqlens", cu_seqlens, q)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"cu_seqlens: expected shape (batch + 1,), got {tuple(cu_seqlens.shape)}")
    if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, (int, torch.SymInt)):
        raise TypeError(f"max_seqlen: expected an int with the packed layout (3-D q), got {max_seqlen!r}")
    if max_seqlen < 0:
        raise ValueError(f"max_seqlen: expected >= 0, got {max_seqlen}")
    longest = checks.lengths(cu_seqlens, q.shape[0], "q")
    if longest is not None and longest > max_seqlen:
        raise ValueError(f"max_seqlen: expected at least the longest length {longest}, got {max_seqlen}")


def _scale(softmax_scale: float | None, headdim: int) -> float:
    if softmax_scale is None:
        return float(headdim) ** -0.5
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float, torch.SymFloat)):
        raise TypeError(f"softmax_scale: expected a finite number, got {softmax_scale!r}")
    if not -math.inf < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale: expected a finite number, got {softmax_scale!r}")
    return float(softmax_scale)


def check_bias(bias: Tensor | None, batch: int, nheads: int, seqlen: int, q: Tensor) -> Tensor | None:
    """The bias in four dimensions."""
    if bias is None:
        return None
    checks.float_tensor("bias", bias, q)
    full = (batch, nheads, seqlen, seqlen)
    if bias.dim() not in (3, 4) or any(
        size not in (1, wanted) for size, wanted in zip(bias.shape, full[-bias.dim() :], strict=True)
    ):
        raise ValueError(
            "bias: expected (nheads, S, S) or (batch, nheads, S, S), each size that of "
            f"{full} or 1, got {tuple(bias.shape)}"
        )
    return bias.unsqueeze(0) if bias.dim() == 3 else bias
