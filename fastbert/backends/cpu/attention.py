"""`attention` by the `cpu` backend: csrc/cpu/attention; contract in fastbert/ops/attention.py."""

from __future__ import annotations

import torch

from fastbert.backends.extension import DTYPE_CODES, STORED, dropout
from fastbert.ops.attention import bits_shape
from fastbert.runtime.native import extension as _C

DTYPES = STORED


def bias_args(
    bias: torch.Tensor | None, batch: int, nheads: int, max_seqlen: int
) -> tuple[torch.Tensor | None, tuple[int, int, int, int]]:
    """(the bias as the kernels read it, its address and strides): csrc/cpu/attention.h, Bias."""
    if bias is None:
        return None, (0, 0, 0, 0)
    bias = bias.float().expand(batch, nheads, max_seqlen, max_seqlen)
    if bias.stride(3) != 1 and max_seqlen > 1:  # one value for a whole row, or transposed
        bias = bias.contiguous()
    return bias, (bias.data_ptr(), *bias.stride()[:3])


def _attention_args(
    q, k, v, cu_seqlens, max_seqlen, softmax_scale, causal, bias, gate, dropout_p, seed, offset
) -> tuple[tuple, list]:
    """(what csrc/bindings/attention.cpp takes, the tensors it points to and that must outlive the call)."""
    total, nheads, headdim = q.shape
    batch = cu_seqlens.shape[0] - 1
    cu_seqlens = cu_seqlens.contiguous()
    bias, bias_numbers = bias_args(bias, batch, nheads, max_seqlen)
    if gate is not None:
        gate = gate.float().contiguous()
    args = (
        DTYPE_CODES[q.dtype], batch, nheads, headdim, total, max_seqlen, cu_seqlens.data_ptr(),
        *(n for t in (q, k, v) for n in (t.data_ptr(), t.stride(0), t.stride(1))),
        softmax_scale, causal, *bias_numbers, 0 if gate is None else gate.data_ptr(),
        *dropout(dropout_p, seed, offset),
    )  # fmt: skip
    return args, [cu_seqlens, bias, gate]


def attention_fwd(
    q, k, v, cu_seqlens, max_seqlen, softmax_scale, causal, bias, gate, dropout_p, seed, offset,
    return_probs, save_bits,
):  # fmt: skip
    args, _held = _attention_args(
        q, k, v, cu_seqlens, max_seqlen, softmax_scale, causal, bias, gate, dropout_p, seed, offset
    )
    (total, nheads, _), end = q.shape, int(cu_seqlens[-1])
    out = q.new_empty(q.shape)
    lse = q.new_empty((nheads, total), dtype=torch.float32)
    batch = cu_seqlens.shape[0] - 1
    probs = q.new_zeros((batch, nheads, max_seqlen, max_seqlen) if return_probs else 0)
    keep_bits = q.new_empty(bits_shape(nheads, total, max_seqlen, save_bits), dtype=torch.int32)
    _C.cpu_attention_fwd(
        args, out.data_ptr(), lse.data_ptr(), probs.data_ptr() if return_probs else 0,
        keep_bits.data_ptr() if save_bits else 0, torch.get_num_threads(),
    )  # fmt: skip
    if end < total:
        out[end:], lse[:, end:] = 0, 0
    return out, lse, probs, keep_bits


def attention_bwd(
    dout, q, k, v, out, lse, cu_seqlens, max_seqlen, softmax_scale, causal, bias, gate, dropout_p, seed,
    offset, keep_bits, need_dq, need_dk, need_dv, need_dbias, need_dgate,
):  # fmt: skip
    args, _held = _attention_args(
        q, k, v, cu_seqlens, max_seqlen, softmax_scale, causal, bias, gate, dropout_p, seed, offset
    )
    (total, nheads, _), batch, end = q.shape, cu_seqlens.shape[0] - 1, int(cu_seqlens[-1])
    needed = need_dq, need_dk, need_dv
    grads = [q.new_empty(q.shape if need else 0) for need in needed]
    ds = lse.new_zeros((batch, nheads, max_seqlen, max_seqlen) if need_dbias else 0)
    dgate = lse.new_empty((batch, nheads) if need_dgate else 0, dtype=torch.float64)
    _C.cpu_attention_bwd(
        args, 0 if keep_bits is None else keep_bits.data_ptr(), dout.data_ptr(),
        *(g.data_ptr() if need else 0 for g, need in zip(grads, needed, strict=True)),
        ds.data_ptr() if need_dbias else 0, dgate.data_ptr() if need_dgate else 0, torch.get_num_threads(),
    )  # fmt: skip
    if end < total:
        for grad in grads:
            grad[end:] = 0
    dbias = ds.sum_to_size(bias.shape) if need_dbias else ds
    return (*grads, dbias, dgate.sum(0).float() if need_dgate else lse.new_empty(0))
