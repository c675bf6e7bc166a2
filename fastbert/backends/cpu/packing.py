"""`packing` by the `cpu` backend: csrc/cpu/packing; contract in fastbert/ops/packing.py."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.ops import packing
from fastbert.runtime.loader import extension as _C

DTYPES = packing.DTYPES


def _copy(launch, x, indices, rows, out):
    indices, item = indices.contiguous(), x.element_size()
    source = x.data_ptr(), x.stride(0) * item, x.shape[1] * item
    kept = indices.data_ptr(), indices.shape[0]
    launch(*source, *kept, rows, out.data_ptr(), torch.get_num_threads())
    return out


def packing_fwd(x: Tensor, indices: Tensor) -> Tensor:
    return _copy(_C.cpu_packing_fwd, x, indices, x.shape[0], x.new_empty(indices.shape[0], x.shape[1]))


def packing_bwd(x: Tensor, indices: Tensor, rows: int) -> Tensor:
    return _copy(_C.cpu_packing_bwd, x, indices, rows, x.new_empty(rows, x.shape[1]))
