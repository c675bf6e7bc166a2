"""`cuda`: CUDA C++ kernels through raw pointers and the current stream. Allocates, and hands over.

The kernels come with `fastbert._C` where it was built with nvcc; they hold code for compute capability 8.0,
9.0, 10.0 and 12.0, and PTX for the rest.
"""

from __future__ import annotations

import functools

import torch

from fastbert.backends.native import DTYPE_CODES, dropout, vector
from fastbert.runtime import native as _native

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES: dict[str, tuple[torch.dtype, ...]] = {"layer_norm": _FLOATS}

_C = _native.extension


def available(device_type: str) -> str | None:
    """None where the kernels run on this device type, else why not."""
    if device_type != "cuda":
        return f"runs on cuda, not on {device_type}"
    return _native.cuda_gap()


def _place(device: torch.device) -> tuple[int, int]:
    """(index of the device, its current stream as an integer)."""
    return device.index, torch.cuda.current_stream(device).cuda_stream


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def layer_norm_fwd(x, weight, bias, residual, x_bias, eps, dropout_p, seed, offset, save):
    rows, hidden = x.shape
    summed = residual is not None or x_bias is not None or dropout_p > 0
    y = x.new_empty(rows, hidden)
    z = x.new_empty((rows, hidden) if save and summed else 0)
    mean = x.new_empty(rows if save else 0, dtype=torch.float32)
    rstd = x.new_empty(rows if save else 0, dtype=torch.float32)
    with torch.cuda.device(x.device):
        _C.cuda_layer_norm_fwd(
            DTYPE_CODES[x.dtype], rows, hidden, x.data_ptr(), x.stride(0),
            *((0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))),
            *vector(weight), *vector(bias), *vector(x_bias),
            eps, *dropout(dropout_p, seed, offset),
            y.data_ptr(), z.data_ptr(), mean.data_ptr(), rstd.data_ptr(), *_place(x.device),
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
    parts = _C.cuda_layer_norm_bwd_parts(DTYPE_CODES[z.dtype], rows, hidden, _multiprocessors(z.device))
    partial = mean.new_empty((parts, 3, hidden) if need_dweight or need_dxbias else 0)
    with torch.cuda.device(z.device):
        _C.cuda_layer_norm_bwd(
            DTYPE_CODES[z.dtype], rows, hidden, dy.data_ptr(), dy.stride(0), z.data_ptr(), z.stride(0),
            *vector(weight), mean.data_ptr(), rstd.data_ptr(), *dropout(dropout_p, seed, offset),
            dx.data_ptr(), dresidual.data_ptr(), dweight.data_ptr(), dbias.data_ptr(), dx_bias.data_ptr(),
            partial.data_ptr(), parts, *_place(z.device),
        )  # fmt: skip
    return dx, dresidual, dweight, dbias, dx_bias
