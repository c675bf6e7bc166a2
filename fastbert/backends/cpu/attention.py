"""`attention` by the `cpu` backend: csrc/cpu/attention; contract in fastbert/ops/attention.py."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.backends.extension import STORED
from fastbert.backends.extension import attention as attention_args
from fastbert.ops.attention import AttentionInputs, AttentionNeeds
from fastbert.ops.attention_grid import bits_shape
from fastbert.runtime.loader import extension as _C

DTYPES = STORED


def attention_fwd(
    inputs: AttentionInputs, return_probs: bool, save_bits: bool, places: Tensor | None = None
) -> tuple[Tensor, ...]:
    args, _held = attention_args(inputs)
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


def attention_bwd(
    dout: Tensor,
    inputs: AttentionInputs,
    out: Tensor,
    lse: Tensor,
    keep_bits: Tensor | None,
    need: AttentionNeeds,
    places: Tensor | None = None,
) -> tuple[Tensor, ...]:
    args, _held = attention_args(inputs)
    q, cu_seqlens, max_seqlen = inputs.q, inputs.cu_seqlens, inputs.max_seqlen
    (total, nheads, _), batch, end = q.shape, cu_seqlens.shape[0] - 1, int(cu_seqlens[-1])
    qkv = zip(inputs[:3], need[:3], strict=True)
    grads = [q.new_empty(t.shape if needed else 0) for t, needed in qkv]
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
