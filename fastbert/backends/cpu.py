"""`cpu`: C++ kernels with AVX2 or AVX-512, through raw pointers. Allocates, and hands over.

They run on PyTorch's own threads, `torch.get_num_threads()` of them. Environment:
FASTBERT_ISA=avx512|avx2|none, read at import.
"""

from __future__ import annotations

import torch

from fastbert import _native
from fastbert._native import DTYPE_CODES, dropout, vector

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES: dict[str, tuple[torch.dtype, ...]] = dict.fromkeys(("attention", "layer_norm"), _FLOATS)

_C = _native.extension


def available(device_type: str) -> str | None:
    """None where the kernels run on this device type, else why not."""
    if device_type != "cpu":
        return f"runs on cpu, not on {device_type}"
    return _native.cpu_gap()


def layer_norm_fwd(x, weight, bias, residual, x_bias, eps, dropout_p, seed, offset, save):
    rows, hidden = x.shape
    summed = residual is not None or x_bias is not None or dropout_p > 0
    y = x.new_empty(rows, hidden)
    z = x.new_empty((rows, hidden) if save and summed else 0)
    mean = x.new_empty(rows if save else 0, dtype=torch.float32)
    rstd = x.new_empty(rows if save else 0, dtype=torch.float32)
    _C.cpu_layer_norm_fwd(
        DTYPE_CODES[x.dtype], rows, hidden, x.data_ptr(), x.stride(0),
        *((0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))),
        *vector(weight), *vector(bias), *vector(x_bias),
        eps, *dropout(dropout_p, seed, offset),
        y.data_ptr(), z.data_ptr(), mean.data_ptr(), rstd.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return y, z, mean, rstd


def layer_norm_bwd(
    dy, z, weight, mean, rstd, dropout_p, seed, offset, need_dweight, need_dxbias, has_residual
):
    rows, hidden = z.shape
    dx = z.new_empty(rows, hidden)
    dresidual = z.new_empty((rows, hidden) if has_residual and dropout_p > 0 else 0)
    dweight = mean.new_empty(hidden if need_dweight else 0)
    dbias = mean.new_empty(hidden if need_dweight else 0)
    dx_bias = mean.new_empty(hidden if need_dxbias else 0)
    _C.cpu_layer_norm_bwd(
        DTYPE_CODES[z.dtype], rows, hidden, dy.data_ptr(), dy.stride(0), z.data_ptr(), z.stride(0),
        *vector(weight), mean.data_ptr(), rstd.data_ptr(), *dropout(dropout_p, seed, offset),
        dx.data_ptr(), dresidual.data_ptr(),
        dweight.data_ptr(), dbias.data_ptr(), dx_bias.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return dx, dresidual, dweight, dbias, dx_bias


def _attention_args(
    q, k, v, cu_seqlens, max_seqlen, softmax_scale, causal, bias, gate, dropout_p, seed, offset
) -> tuple[tuple, list]:
    """(what csrc/bindings.cpp takes, the tensors it points to and that must outlive the call)."""
    total, nheads, headdim = q.shape
    batch = cu_seqlens.shape[0] - 1
    cu_seqlens = cu_seqlens.contiguous()
    bias_args = (0, 0, 0, 0)
    if bias is not None:
        bias = bias.float().expand(batch, nheads, max_seqlen, max_seqlen)
        if bias.stride(3) != 1 and max_seqlen > 1:  # one value for a whole row, or transposed
            bias = bias.contiguous()
        bias_args = (bias.data_ptr(), *bias.stride()[:3])
    if gate is not None:
        gate = gate.float().contiguous()
    args = (
        DTYPE_CODES[q.dtype], batch, nheads, headdim, total, max_seqlen, cu_seqlens.data_ptr(),
        *(n for t in (q, k, v) for n in (t.data_ptr(), t.stride(0), t.stride(1))),
        softmax_scale, causal, *bias_args, 0 if gate is None else gate.data_ptr(),
        *dropout(dropout_p, seed, offset),
    )  # fmt: skip
    return args, [cu_seqlens, bias, gate]


def attention_fwd(
    q, k, v, cu_seqlens, max_seqlen, softmax_scale, causal, bias, gate, dropout_p, seed, offset, return_probs
):
    args, _held = _attention_args(
        q, k, v, cu_seqlens, max_seqlen, softmax_scale, causal, bias, gate, dropout_p, seed, offset
    )
    (total, nheads, _), end = q.shape, int(cu_seqlens[-1])
    out = q.new_empty(q.shape)
    lse = q.new_empty((nheads, total), dtype=torch.float32)
    batch = cu_seqlens.shape[0] - 1
    probs = q.new_zeros((batch, nheads, max_seqlen, max_seqlen) if return_probs else 0)
    _C.cpu_attention_fwd(
        args, out.data_ptr(), lse.data_ptr(), probs.data_ptr() if return_probs else 0, torch.get_num_threads()
    )
    if end < total:
        out[end:], lse[:, end:] = 0, 0
    return out, lse, probs


def attention_bwd(
    dout, q, k, v, out, lse, cu_seqlens, max_seqlen, softmax_scale, causal, bias, gate, dropout_p, seed,
    offset, need_dbias, need_dgate,
):  # fmt: skip
    args, _held = _attention_args(
        q, k, v, cu_seqlens, max_seqlen, softmax_scale, causal, bias, gate, dropout_p, seed, offset
    )
    (total, nheads, _), batch, end = q.shape, cu_seqlens.shape[0] - 1, int(cu_seqlens[-1])
    grads = [q.new_empty(q.shape) for _ in range(3)]
    ds = lse.new_zeros((batch, nheads, max_seqlen, max_seqlen) if need_dbias else 0)
    dgate = lse.new_empty((batch, nheads) if need_dgate else 0, dtype=torch.float64)
    _C.cpu_attention_bwd(
        args, dout.data_ptr(), *(g.data_ptr() for g in grads), ds.data_ptr() if need_dbias else 0,
        dgate.data_ptr() if need_dgate else 0, torch.get_num_threads(),
    )  # fmt: skip
    if end < total:
        for grad in grads:
            grad[end:] = 0
    dbias = ds.sum_to_size(bias.shape) if need_dbias else ds
    return (*grads, dbias, dgate.sum(0).float() if need_dgate else lse.new_empty(0))
