"""`layer_norm` by the `cpu` backend: csrc/cpu/layer_norm; contract in fastbert/ops/layer_norm.py."""

from __future__ import annotations

import torch
from torch import Tensor

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
from fastbert.runtime.loader import extension as _C

DTYPES = STORED


def layer_norm_fwd(inputs: LayerNormInputs, save: bool, rounded: bool = False) -> tuple[Tensor, ...]:
    x, weight, bias, residual, x_bias, eps, dropout_p, seed, offset, kind, _ = inputs
    # the kernel takes one dtype
    x_dtype, x = x.dtype, x.to(storage_dtype(inputs))
    rows, hidden = x.shape
    y = x.new_empty(rows, hidden)
    z = x.new_empty((rows, hidden) if stores_sum(inputs, save) else 0)
    counts = statistics(kind, rows if save else 0)
    mean, rstd = (x.new_empty(count, dtype=torch.float32) for count in counts)
    added = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    outputs = y.data_ptr(), z.data_ptr(), mean.data_ptr(), rstd.data_ptr()
    _C.cpu_layer_norm_fwd(
        *(DTYPE_CODES[x.dtype], rows, hidden, x.data_ptr(), x.stride(0), *added),
        *(*vector(weight), *vector(bias), *vector(x_bias), eps, KINDS.index(kind)),
        *dropout(dropout_p, seed, offset),
        *outputs,
        torch.get_num_threads(),
    )
    return (y, z, mean, rstd, y.to(x_dtype)) if rounded else (y, z, mean, rstd)


def layer_norm_bwd(
    dy: Tensor,
    saved: LayerNormSaved,
    need: LayerNormNeeds,
    drounded: Tensor | None = None,
    dsum: Tensor | None = None,
) -> tuple[Tensor, ...]:
    z, weight, mean, rstd, dropout_p, seed, offset, kind = saved
    if drounded is not None:
        dy = dy + drounded
    rows, hidden = z.shape
    dx = z.new_empty((rows, hidden) if need.dx else 0)
    dresidual = z.new_empty((rows, hidden) if own_dresidual(saved, need) else 0)
    dweight = mean.new_empty(hidden if need.dweight else 0)
    dbias = mean.new_empty(hidden if need.dweight else 0)
    dx_bias = mean.new_empty(hidden if need.dx_bias else 0)
    sizes = DTYPE_CODES[z.dtype], rows, hidden
    upstream = dy.data_ptr(), dy.stride(0), 0 if dsum is None else dsum.data_ptr()
    _C.cpu_layer_norm_bwd(
        *(*sizes, *upstream, z.data_ptr(), z.stride(0)),
        *(*vector(weight), mean.data_ptr(), rstd.data_ptr(), KINDS.index(kind)),
        *dropout(dropout_p, seed, offset),
        *map(torch.Tensor.data_ptr, (dx, dresidual, dweight, dbias, dx_bias)),
        torch.get_num_threads(),
    )
    return dx.to(need.x_dtype or z.dtype), dresidual, dweight, dbias, dx_bias
