"""`attention` by the `cpu` backend: csrc/cpu/attention; contract in fastbert/ops/attention.py."""

from __future__ import annotations

import torch

from fastbert.backends.extension import DTYPE_CODES, STORED, dropout
from fastbert.ops.attention import AttentionInputs, AttentionNeeds
from fastbert.ops.attention_grid import bits_shape
from fastbert.runtime.loader import extension as _C

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


def _attention_args(inputs: AttentionInputs) -> tuple[tuple, list]:
    """(what csrc/bindings/attention.cpp takes, the tensors it points to and that must outlive the call)."""
    q, k, v, cu_seqlens, max_seqlen, softmax_scale, causal, bias, gate, dropout_p, seed, offset = inputs
    total, nheads, headdim = q.shape
    batch = cu_seqlens.shape[0] - 1
    cu_seqlens = cu_seqlens.contiguous()
    bias, bias_numbers = bias_args(bias, batch, nheads, max_seqlen)
    if gate is not None:
        gate = gate.float().contiguous()
    sizes = DTYPE_CODES[q.dtype], batch, nheads, headdim, total, max_seqlen, cu_seqlens.data_ptr()
    rows = (n for t in (q, k, v) for n in (t.data_ptr(), t.stride(0), t.stride(1)))
    scores = softmax_scale, causal, *bias_numbers, 0 if gate is None else gate.data_ptr()
    return (*sizes, *rows, *scores, *dropout(dropout_p, seed, offset)), [cu_seqlens, bias, gate]


def attention_fwd(inputs: AttentionInputs, return_probs, save_bits, places=None):
    args, _held = _attention_args(inputs)
    q, cu_seqlens, max_seqlen = inputs.q, inputs.cu_seqlens, inputs.max_seqlen
    (total, nheads, _), end = q.shape, int(cu_seqlens[-1])
    out = q.new_empty(q.shape)
    lse = q.new_empty((nheads, total), dtype=torch.float32)
    batch = cu_seqlens.shape[0] - 1
    probs = q.new_zeros((batch, nheads, max_seqlen, max_seqlen) if return_probs else 0)
    keep_bits = q.new_empty(bits_shape(nheads, total, max_seqlen, save_bits), dtype=torch.int32)
    _C.cpu_attention_fwd(
        args,
        out.data_ptr(),
        lse.data_ptr(),
        probs.data_ptr() if return_probs else 0,
        keep_bits.data_ptr() if save_bits else 0,
        torch.get_num_threads(),
    )
    if end < total:
        out[end:], lse[:, end:] = 0, 0
    return out, lse, probs, keep_bits


def attention_bwd(dout, inputs: AttentionInputs, out, lse, keep_bits, need: AttentionNeeds, places=None):
    args, _held = _attention_args(inputs)
    q, cu_seqlens, max_seqlen = inputs.q, inputs.cu_seqlens, inputs.max_seqlen
    (total, nheads, _), batch, end = q.shape, cu_seqlens.shape[0] - 1, int(cu_seqlens[-1])
    grads = [q.new_empty(q.shape if needed else 0) for needed in need[:3]]
    ds = lse.new_zeros((batch, nheads, max_seqlen, max_seqlen) if need.dbias else 0)
    dgate = lse.new_empty((batch, nheads) if need.dgate else 0, dtype=torch.float64)
    _C.cpu_attention_bwd(
        args,
        0 if keep_bits is None else keep_bits.data_ptr(),
        dout.data_ptr(),
        *(grad.data_ptr() if needed else 0 for grad, needed in zip(grads, need[:3], strict=True)),
        ds.data_ptr() if need.dbias else 0,
        dgate.data_ptr() if need.dgate else 0,
        torch.get_num_threads(),
    )
    if end < total:
        for grad in grads:
            grad[end:] = 0
    dbias = ds.sum_to_size(inputs.bias.shape) if need.dbias else ds
    return (*grads, dbias, dgate.sum(0).float() if need.dgate else lse.new_empty(0))
