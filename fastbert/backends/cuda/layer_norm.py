"""`layer_norm` by the `cuda` backend: csrc/cuda/layer_norm.cu; contract in fastbert/ops/layer_norm.py."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.backends.cuda import device
from fastbert.backends.extension import DTYPE_CODES, STORED, dropout, vector
from fastbert.ops.layer_norm import (
    KINDS,
    LayerNormInputs,
    LayerNormNeeds,
    LayerNormSaved,
    own_dresidual,
    statistics,
    storage_dtype,
    stores_sum,
)
from fastbert.runtime import dispatch
from fastbert.runtime.streams import on

DTYPES = STORED


def layer_norm_fwd(inputs: LayerNormInputs, save: bool, rounded: bool = False) -> tuple[Tensor, ...]:
    x, weight, bias, residual, x_bias, eps, dropout_p, seed, offset, kind, _ = inputs
    if kind == "no_norm":
        # One pass in either backend: a kernel of this one would move no byte less.
        function = "layer_norm_fwd training" if save else "layer_norm_fwd"
        following = dispatch.next_function("cuda", function, x.device, storage_dtype(inputs))
        return following(inputs, save, rounded)
    rows, hidden = x.shape
    dtype = storage_dtype(inputs)
    y = x.new_empty(rows, hidden, dtype=dtype)
    z = x.new_empty((rows, hidden) if stores_sum(inputs, save) else 0, dtype=dtype)
    counts = statistics(kind, rows if save else 0)
    mean, rstd = (x.new_empty(count, dtype=torch.float32) for count in counts)
    more = (torch.empty_like(x, memory_format=torch.contiguous_format),) if rounded else ()
    added = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    outputs = y.data_ptr(), z.data_ptr(), mean.data_ptr(), rstd.data_ptr()
    with on(x.device):
        device.extension.cuda_layer_norm_fwd(
            *(DTYPE_CODES[dtype], rows, hidden, x.data_ptr(), x.stride(0), *added),
            *(*vector(weight), *vector(bias), *vector(x_bias), eps, KINDS.index(kind)),
            *dropout(dropout_p, seed, offset),
            *outputs,
            *(DTYPE_CODES[x.dtype], more[0].data_ptr() if more else 0),
            *device.place(x.device),
        )
    return y, z, mean, rstd, *more


def layer_norm_bwd(
    dy: Tensor,
    saved: LayerNormSaved,
    need: LayerNormNeeds,
    drounded: Tensor | None = None,
    dsum: Tensor | None = None,
) -> tuple[Tensor, ...]:
    z, weight, mean, rstd, dropout_p, seed, offset, kind = saved
    if kind == "no_norm":
        following = dispatch.next_function("cuda", "layer_norm_bwd training", z.device, z.dtype)
        return following(dy, saved, need, drounded, dsum)
    rows, hidden = z.shape
    dx = z.new_empty((rows, hidden) if need.dx else 0, dtype=need.x_dtype)
    dresidual = z.new_empty((rows, hidden) if own_dresidual(saved, need) else 0)
    dweight = mean.new_empty(hidden if need.dweight else 0)
    dbias = mean.new_empty(hidden if need.dweight else 0)
    dx_bias = mean.new_empty(hidden if need.dx_bias else 0)
    sizes = DTYPE_CODES[z.dtype], rows, hidden
    parts = device.extension.cuda_layer_norm_bwd_parts(*sizes, device.multiprocessors(z.device))
    partial = mean.new_empty((parts, 3, hidden) if need.dweight or need.dx_bias else 0)
    upstream = dy.data_ptr(), dy.stride(0), 0 if dsum is None else dsum.data_ptr()
    with on(z.device):
        device.extension.cuda_layer_norm_bwd(
            *(*sizes, *upstream, z.data_ptr(), z.stride(0)),
            *(*vector(weight), mean.data_ptr(), rstd.data_ptr(), KINDS.index(kind)),
            *dropout(dropout_p, seed, offset),
            *(t.data_ptr() for t in (dx, dresidual, dweight, dbias, dx_bias, partial)),
            parts,
            *(DTYPE_CODES[dx.dtype], 0 if drounded is None else drounded.data_ptr()),
            *device.place(z.device),
        )
    return dx, dresidual, dweight, dbias, dx_bias
