"""`layer_norm` by the `cuda` backend: csrc/cuda/layer_norm.cu; contract in fastbert/ops/layer_norm.py."""

from __future__ import annotations

import torch

from fastbert.backends.cuda import device
from fastbert.backends.extension import DTYPE_CODES, STORED, dropout, vector

DTYPES = STORED


def layer_norm_fwd(x, weight, bias, residual, x_bias, eps, dropout_p, seed, offset, save):
    rows, hidden = x.shape
    summed = residual is not None or x_bias is not None or dropout_p > 0
    y = x.new_empty(rows, hidden)
    z = x.new_empty((rows, hidden) if save and summed else 0)
    mean = x.new_empty(rows if save else 0, dtype=torch.float32)
    rstd = x.new_empty(rows if save else 0, dtype=torch.float32)
    with torch.cuda.device(x.device):
        device.extension.cuda_layer_norm_fwd(
            DTYPE_CODES[x.dtype], rows, hidden, x.data_ptr(), x.stride(0),
            *((0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))),
            *vector(weight), *vector(bias), *vector(x_bias),
            eps, *dropout(dropout_p, seed, offset),
            y.data_ptr(), z.data_ptr(), mean.data_ptr(), rstd.data_ptr(), *device.place(x.device),
        )  # fmt: skip
    return y, z, mean, rstd


def layer_norm_bwd(
    dy, z, weight, mean, rstd, dropout_p, seed, offset, need_dx, need_dweight, need_dxbias, need_dresidual
):
    rows, hidden = z.shape
    dx = z.new_empty((rows, hidden) if need_dx else 0)
    dresidual = z.new_empty((rows, hidden) if need_dresidual and (dropout_p > 0 or not need_dx) else 0)
    dweight = mean.new_empty(hidden if need_dweight else 0)
    dbias = mean.new_empty(hidden if need_dweight else 0)
    dx_bias = mean.new_empty(hidden if need_dxbias else 0)
    parts = device.extension.cuda_layer_norm_bwd_parts(
        DTYPE_CODES[z.dtype], rows, hidden, device.multiprocessors(z.device)
    )
    partial = mean.new_empty((parts, 3, hidden) if need_dweight or need_dxbias else 0)
    with torch.cuda.device(z.device):
        device.extension.cuda_layer_norm_bwd(
            DTYPE_CODES[z.dtype], rows, hidden, dy.data_ptr(), dy.stride(0), z.data_ptr(), z.stride(0),
            *vector(weight), mean.data_ptr(), rstd.data_ptr(), *dropout(dropout_p, seed, offset),
            dx.data_ptr(), dresidual.data_ptr(), dweight.data_ptr(), dbias.data_ptr(), dx_bias.data_ptr(),
            partial.data_ptr(), parts, *device.place(z.device),
        )  # fmt: skip
    return dx, dresidual, dweight, dbias, dx_bias
